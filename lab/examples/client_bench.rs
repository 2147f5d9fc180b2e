//! Measures the client prober itself: `cargo run --release -p godwit-lab --example client_bench`.
//!
//! Prints the cost of a prober of 1 kHz, and the longest gap that it sees with a target that never
//! stops: on an idle machine, and while twice as many programs as CPUs compute. No shorter blackout
//! can be distinguished from the machine's own noise. Needs root.

use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result};
use godwit_lab::{LabName, LabOptions, LabPaths, Programs, daemon, down, in_namespace, up};
use godwit_prober::Client;
use godwit_prober::clock::monotonic_ns;

const TARGET: &str = "10.88.0.21";
const SECONDS: u64 = 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["daemon", kind, "--config", config] = words[..] {
        return daemon::run(kind.parse()?, Path::new(config));
    }
    let name = LabName { prefix: "gwclient".to_owned(), state_dir: "/run/gwclient/lab".into() };
    let outcome = measure(&name);
    down(&name)?;
    drop(std::fs::remove_dir("/run/gwclient"));
    outcome
}

fn measure(name: &LabName) -> Result<()> {
    let LabName { prefix, state_dir } = name.clone();
    let options =
        LabOptions { agents: false, replace: true, prefix, state_dir, ..LabOptions::default() };
    let lab = up(&options, &Programs::beside(std::env::current_exe()?))?;
    let host = &lab.hosts[1].namespace;
    let added = Command::new("ip")
        .args(["-n", host, "addr", "add", "10.88.0.21/24", "dev", "br-lan"])
        .status()?;
    anyhow::ensure!(added.success(), "cannot give the host the target's address");
    let echo = in_namespace(host, || UdpSocket::bind((TARGET, 7)))??;
    std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok((length, from)) = echo.recv_from(&mut bytes) {
            drop(echo.send_to(&bytes[..length], from));
        }
    });
    let prober = lab.client.and_then(|client| client.prober).context("no prober")?;
    let mut client = Client::connect(&LabPaths::new(&name.state_dir).client_socket())?;
    let target: IpAddr = TARGET.parse()?;
    client.watch(target)?;
    client
        .wait_answer(target, 0, Duration::from_secs(10))?
        .context("the target does not answer")?;
    let cpus = std::thread::available_parallelism()?.get();
    println!(
        "computing  sent   lost  median rtt us  longest gap ms  longest send gap ms  prober's CPU %"
    );
    for programs in [0, 2 * cpus] {
        let mut load = (0..programs).map(|_| busy()).collect::<Result<Vec<Child>>>()?;
        let (since_ns, cpu_before) = (monotonic_ns(), cpu_ticks(prober.pid)?);
        let until_ns = since_ns + SECONDS * 1_000_000_000;
        client.wait_answer(target, until_ns, Duration::from_secs(2 * SECONDS))?;
        let gaps = client.gaps(target, since_ns, until_ns)?;
        // A tick is 10 ms on every Linux (USER_HZ).
        let cpu_percent = (cpu_ticks(prober.pid)? - cpu_before) as f64 / SECONDS as f64;
        for child in &mut load {
            child.kill()?;
            child.wait()?;
        }
        println!(
            "{programs:<10} {:<6} {:<5} {:<14.1} {:<15.2} {:<20.2} {cpu_percent:.1}",
            gaps.sent,
            gaps.lost,
            gaps.median_rtt_ns.unwrap_or(0) as f64 / 1e3,
            gaps.longest_gap_ns.unwrap_or(0) as f64 / 1e6,
            gaps.longest_send_gap_ns as f64 / 1e6,
        );
    }
    Ok(())
}

fn busy() -> Result<Child> {
    Command::new("sh")
        .args(["-c", "while :; do :; done"])
        .spawn()
        .context("cannot start a busy program")
}

/// Returns the user and system time of a process.
fn cpu_ticks(pid: i32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = stat.rsplit_once(')').context("no stat")?.1;
    Ok(rest
        .split_ascii_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum())
}
