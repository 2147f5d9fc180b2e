//! Init of the lab's guest: the only program in its initramfs. If the kernel command line names a
//! disk with a user space, that is booted instead, and this program runs in it as a service.
//!
//! When process 1 ends, the kernel panics and a test gets no explanation. So no error here is
//! fatal. Failures are reported on the console and in the control protocol's `status`, every thread
//! is restarted after a panic, and main itself only parks.

mod agent;
mod boot;
mod disks;
mod drives;
mod echo;
mod guest;
mod ledger;
mod load;
mod network;
mod plug;
mod server;
mod tasks;
mod tpm;
mod user_space;

use std::sync::Arc;

use godwit_guest::options::Options;

use crate::guest::Guest;

/// Niceness of threads that must answer at once, whatever the workload does.
const URGENT: i32 = -20;
/// Niceness of the control protocol.
const PROMPT: i32 = -5;
/// Niceness of the workload and of checks.
const BACKGROUND: i32 = 10;

fn main() {
    let is_init = std::process::id() == 1;
    let is_service = std::env::args_os().nth(1).is_some_and(|word| word == user_space::SERVICE);
    if !is_init && !is_service {
        eprintln!(
            "godwit-guest is the init of the lab's guest: it runs as process 1 of a virtual machine"
        );
        std::process::exit(2);
    }
    let guest = Arc::new(Guest::new());
    if is_init {
        boot::mount_all(&guest);
    }
    let (options, problems) = Options::parse(&boot::command_line(&guest));
    for problem in problems {
        guest.report(&format!("kernel command line: {problem}"));
    }
    if is_init {
        boot::load_modules(&guest);
        if let Some(disk) = &options.root {
            // It returns only if something is missing; then the guest runs without a user space.
            guest.report(&format!("booting from {disk}: {:#}", user_space::boot(disk)));
        }
    }
    network::configure(&guest, &options);

    tasks::forever(&guest, "echo4", URGENT, echo::serve_v4);
    tasks::forever(&guest, "echo6", URGENT, echo::serve_v6);
    if options.drives {
        tasks::forever(&guest, "drives", BACKGROUND, drives::use_all);
    }
    if let Some(disk) = options.ledger.clone() {
        tasks::forever(&guest, "ledger", PROMPT, move |_| ledger::keep(&disk));
    }
    for (number, name) in disks::WRITERS.into_iter().enumerate() {
        tasks::forever(&guest, name, PROMPT, move |guest| disks::write(guest, number));
    }
    tasks::forever(&guest, "tpm", BACKGROUND, tpm::use_it);
    if options.plug {
        tasks::forever(&guest, "plug", BACKGROUND, plug::use_all);
    }
    tasks::forever(&guest, "heartbeat", PROMPT, tasks::heartbeat);
    tasks::forever(&guest, "control", PROMPT, server::serve);
    let asked = options.clone();
    tasks::forever(&guest, "agent", PROMPT, move |guest| agent::serve(guest, &asked));
    tasks::forever(&guest, "workload", BACKGROUND, move |guest| load::run(guest, &options));
    tasks::forever(&guest, "beside", BACKGROUND, load::run_beside);
    loop {
        std::thread::park();
    }
}
