//! Init of the lab's guest: the only program in its initramfs.
//!
//! When process 1 ends, the kernel panics and a test learns nothing. So nothing here is fatal: what fails is
//! reported on the console and in the control protocol's `status`, every thread is started again when it
//! panics, and main itself only parks.

mod boot;
mod echo;
mod guest;
mod load;
mod network;
mod server;
mod tasks;

use std::sync::Arc;

use godwit_guest::options::Options;

use crate::guest::Guest;

/// Niceness of what must answer at once, whatever the workload does.
const URGENT: i32 = -20;
/// Niceness of the control protocol.
const PROMPT: i32 = -5;
/// Niceness of the workload and of checks.
const BACKGROUND: i32 = 10;

fn main() {
    if std::process::id() != 1 {
        eprintln!("godwit-guest is the init of the lab's guest: it runs as process 1 of a virtual machine");
        std::process::exit(2);
    }
    let guest = Arc::new(Guest::new());
    boot::mount_all(&guest);
    let (options, problems) = Options::parse(&boot::command_line(&guest));
    for problem in problems {
        guest.report(&format!("kernel command line: {problem}"));
    }
    boot::load_modules(&guest);
    network::configure(&guest, &options);

    tasks::forever(&guest, "echo4", URGENT, echo::serve_v4);
    tasks::forever(&guest, "echo6", URGENT, echo::serve_v6);
    tasks::forever(&guest, "heartbeat", PROMPT, tasks::heartbeat);
    tasks::forever(&guest, "control", PROMPT, server::serve);
    tasks::forever(&guest, "workload", BACKGROUND, move |guest| load::run(guest, &options));
    loop {
        std::thread::park();
    }
}
