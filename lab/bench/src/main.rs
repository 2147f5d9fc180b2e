//! `godwit-bench`: measures the promised figures on this machine, in labs of its own. Each
//! subcommand is a scenario, which prints the machine, all settings and a table, and writes
//! everything measured as JSON.

mod bandwidth;
mod blackout;
mod cancel;
mod control;
mod converge;
mod cpu;
mod cpu_baseline;
mod debian;
mod devices;
mod drain;
mod faults;
mod figures;
mod footprint;
mod ha;
mod impact;
mod lanes;
mod loss;
mod machine;
mod plot;
mod predict;
mod references;
mod results;
mod scale;
mod schedule;
mod size;
mod storage;
mod subject;
mod svg;
mod switchover;
mod table;
mod warm;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use godwit_lab::trial::take_down_when_interrupted;

/// Measures Godwit against QEMU's own migration on this machine. Needs root and the programs of
/// `make programs`, or of `make build` for a release build.
#[derive(Debug, Parser)]
#[command(name = "godwit-bench", version, max_term_width = 110)]
enum Scenario {
    /// Move a guest back and forth, the engines taking turns on the same guest and link
    #[command(after_help = "Examples:
  godwit-bench switchover
  godwit-bench switchover --engine godwit --workload idle --rtt 0ms --godwit-runs 5
  godwit-bench switchover --link 10gbit --rtt 10ms --runs 9")]
    Switchover(switchover::Settings),
    /// Move a bare guest that answers packets, also under KVM, and compare blackout and switchover
    #[command(after_help = "Examples:
  godwit-bench blackout
  godwit-bench blackout --accel kvm,tcg --runs 5")]
    Blackout(blackout::Settings),
    /// Move guests of different sizes with the same working set
    #[command(after_help = "Examples:
  godwit-bench size
  godwit-bench size --memory 1GiB,4GiB --runs 3")]
    Size(size::Settings),
    /// Measure what guests of 64 GiB to 1 TiB cost the engine, with simulated guests and no lab
    #[command(after_help = "Examples:
  godwit-bench scale
  godwit-bench scale --memory 64GiB,1TiB --runs 3 --dirty-pages-per-s 100000
  godwit-bench scale --no-page-tables --tracking scans --link 100gbit")]
    Scale(scale::Settings),
    /// Move a guest full of random content where no link is the limit
    #[command(after_help = "Examples:
  godwit-bench bandwidth
  godwit-bench bandwidth --engine godwit --protection clear --runs 3 --memory 2GiB --fill 1GiB")]
    Bandwidth(bandwidth::Settings),
    /// Move an idle guest over shaped links, with several lanes and streams, in turns with iperf3
    #[command(after_help = "Examples:
  godwit-bench lanes
  godwit-bench lanes --case one-gbit-4-streams,four-lanes --runs 3")]
    Lanes(lanes::Settings),
    /// Move a guest there and back, and clones of one guest to one host, by reference to pages
    /// already there
    #[command(after_help = "Examples:
  godwit-bench references
  godwit-bench references --case way-back --runs 1 --memory 1GiB --fill 768MiB
  godwit-bench references --case clones --clones 4 --runs 1")]
    References(references::Settings),
    /// Move a guest that computes all the time, and measure the work that it loses
    #[command(after_help = "Examples:
  godwit-bench impact
  godwit-bench impact --engine godwit --link 5gbit --runs 3")]
    Impact(impact::Settings),
    /// Move a guest that writes memory and computes, and measure what tracking costs it
    #[command(after_help = "Examples:
  godwit-bench loss
  godwit-bench loss --runs 2 --link 500mbit")]
    Loss(loss::Settings),
    /// Move a guest that rewrites its memory faster than the link carries it
    #[command(after_help = "Examples:
  godwit-bench converge
  godwit-bench converge --case rewriting --engine godwit --link 200mbit --times 5 --runs 1
  godwit-bench converge --case computing,links --runs 3")]
    Converge(converge::Settings),
    /// Predict moves of guests that write little and much, over all kinds of links, then move them
    #[command(after_help = "Examples:
  godwit-bench predict
  godwit-bench predict --link 1gbit,1gbit-40ms")]
    Predict(predict::Settings),
    /// Move a guest with the distribution's user space and a full page cache; its image is built on
    /// first use
    #[command(after_help = "Examples:
  godwit-bench debian
  godwit-bench debian --engine godwit,multifd-4-zstd --runs 3
  godwit-bench debian --memory 4GiB --link 10gbit")]
    Debian(debian::Settings),
    /// Move an installed Debian with all kinds of devices, and trace how long QEMU writes and loads
    /// the state of each; its image is that of `make image`
    #[command(after_help = "Examples:
  godwit-bench devices
  godwit-bench devices --runs 20 --video virtio")]
    Devices(devices::Settings),
    /// Cancel migrations before their commit, and measure how long the guest does not answer
    #[command(after_help = "Examples:
  godwit-bench cancel
  godwit-bench cancel --runs 5 --link 10gbit")]
    Cancel(cancel::Settings),
    /// Drain a host with clones of one guest through the manager, with Godwit's and QEMU's own
    /// engine
    #[command(after_help = "Examples:
  godwit-bench drain
  godwit-bench drain --clones 8 --runs 1 --concurrency 4")]
    Drain(drain::Settings),
    /// Compare a CPU baseline with all features of the host, by computations in guests
    #[command(after_help = "Examples:
  godwit-bench cpu-baseline
  godwit-bench cpu-baseline --baseline x86-64-v3 --runs 9")]
    CpuBaseline(cpu_baseline::Settings),
    /// Move a guest with its disks, which it writes all the time, in turns with QEMU's mirror and
    /// migration
    #[command(after_help = "Examples:
  godwit-bench storage
  godwit-bench storage --way godwit,without-disks --rate 30 --rtt 0ms --used 64MiB --runs 1
  godwit-bench storage --used 2GiB --written 128MiB --base 1GiB --runs 2
  godwit-bench storage --content random
  godwit-bench storage --continue out/bench/storage-1764000000.json
  godwit-bench storage clones --clones 4")]
    Storage(storage::Settings),
    /// Inject faults at each phase of a migration, and check where the guest is and that it is
    /// whole
    #[command(after_help = "Examples:
  godwit-bench faults
  godwit-bench faults --list
  godwit-bench faults --fault kill-source-agent --phase committed
  godwit-bench faults --seed 7 --write")]
    Faults(faults::Settings),
    /// Let the host of a protected VM fail in every way, and check from the guest's disk that the
    /// VM never ran twice
    #[command(after_help = "Examples:
  godwit-bench ha
  godwit-bench ha --list
  godwit-bench ha --fault power-off,freeze --means both --runs 1
  godwit-bench ha --at-once 3 --continue out/bench/ha-1796000000.json")]
    Ha(ha::Settings),
    /// Measure a manager of 1,000 simulated hosts with 50,000 VMs, and its responses during changes
    #[command(after_help = "Examples:
  godwit-bench control-scale
  godwit-bench control-scale --hosts 100 --vms 5000 --requests 50")]
    ControlScale(control::scale::Settings),
    /// Drain one of eight simulated hosts through a manager, and move many VMs at once
    #[command(after_help = "Examples:
  godwit-bench control-drain
  godwit-bench control-drain --all-on-one --speed 100")]
    ControlDrain(control::drain::Settings),
    /// Let a host lie in every field of every message to a manager, and check that each lie is
    /// shown and no other host changes
    #[command(after_help = "Examples:
  godwit-bench control-liar
  godwit-bench control-liar --messages 500 --seed 7 --json")]
    ControlLiar(control::liar::Settings),
    /// Drain a simulated host and a real one at the same time, under one manager
    #[command(after_help = "Examples:
  godwit-bench control-mixed
  godwit-bench control-mixed --real-hosts 3 --real-vms 12")]
    ControlMixed(control::mixed::Settings),
}

fn main() -> ExitCode {
    let scenario = Scenario::parse();
    match take_down_when_interrupted().and_then(|()| run(&scenario)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a scenario. Returns false if it has found a problem, which it has printed.
fn run(scenario: &Scenario) -> Result<bool> {
    match scenario {
        Scenario::Switchover(settings) => switchover::run(settings),
        Scenario::Blackout(settings) => blackout::run(settings),
        Scenario::Size(settings) => size::run(settings),
        Scenario::Scale(settings) => scale::run(settings),
        Scenario::Bandwidth(settings) => bandwidth::run(settings),
        Scenario::Lanes(settings) => lanes::run(settings),
        Scenario::References(settings) => references::run(settings),
        Scenario::Impact(settings) => impact::run(settings),
        Scenario::Loss(settings) => loss::run(settings),
        Scenario::Converge(settings) => converge::run(settings),
        Scenario::Predict(settings) => predict::run(settings),
        Scenario::Debian(settings) => debian::run(settings),
        Scenario::Devices(settings) => devices::run(settings),
        Scenario::Cancel(settings) => cancel::run(settings),
        Scenario::Drain(settings) => drain::run(settings),
        Scenario::CpuBaseline(settings) => cpu_baseline::run(settings),
        Scenario::Storage(settings) => storage::run(settings),
        Scenario::Faults(settings) => faults::run(settings),
        Scenario::Ha(settings) => ha::run(settings),
        Scenario::ControlScale(settings) => control::scale::run(settings),
        Scenario::ControlDrain(settings) => control::drain::run(settings),
        Scenario::ControlLiar(settings) => control::liar::run(settings),
        Scenario::ControlMixed(settings) => control::mixed::run(settings),
    }
}
