//! A manager of 1,000 hosts and 50,000 VMs: how soon it knows them, its memory use, and its
//! response times while all of it changes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use godwit_fleet::{Asker, Fleet, FleetPlan, allow_many_files};
use http::{Method, StatusCode};
use serde::Serialize;

use super::managed::{Managed, Usage};
use super::{Answers, Promise};
use crate::figures::Spread;
use crate::machine::Machine;
use crate::results;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Simulated hosts
    #[arg(long, value_name = "N", default_value_t = 1000)]
    hosts: usize,
    /// VMs of all hosts
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    vms: usize,
    /// Changes per second: loads of hosts, states of VMs
    #[arg(long, value_name = "N", default_value_t = 500)]
    changes: u32,
    /// Clients that follow all changes
    #[arg(long, value_name = "N", default_value_t = 4)]
    listeners: usize,
    /// Requests of each kind
    #[arg(
        long,
        value_name = "N",
        default_value_t = 300,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    requests: u32,
    /// Timed starts of the manager
    #[arg(
        long,
        value_name = "N",
        default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    starts: u32,
    /// Path of `godwit` [default: beside this program]
    #[arg(long, value_name = "FILE")]
    godwit: Option<PathBuf>,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

#[derive(Debug, Serialize)]
struct Figures {
    added_s: f64,
    start_s: Spread,
    idle: Usage,
    busy: Usage,
    cpu_share: f64,
    answers: Vec<Answers>,
    skipped: Vec<String>,
    promises: Vec<Promise>,
}

/// Measures, prints, writes.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::inspect("qemu-system-x86_64".as_ref());
    print!("{machine}");
    println!(
        "settings  {} simulated hosts (agents' API with simulated QEMU, in this process on the \
         same cores), {} VMs, {} changes/s, {} listeners, {} requests of each kind\n",
        settings.hosts, settings.vms, settings.changes, settings.listeners, settings.requests
    );
    allow_many_files()?;
    let runtime = tokio::runtime::Runtime::new()?;
    let figures = runtime.block_on(measure(settings))?;
    print(&figures);
    results::write(&settings.out, "control-scale", &machine, settings, &figures)?;
    Ok(!settings.check || figures.promises.iter().all(Promise::is_kept))
}

async fn measure(settings: &Settings) -> Result<Figures> {
    let plan = FleetPlan {
        hosts: settings.hosts,
        vms: settings.vms,
        hosts_with_vms: settings.hosts,
        link_bits_per_s: 10_000_000_000,
        ..FleetPlan::default()
    };
    let mut fleet = Fleet::begin(plan).await?;
    let mut managed = Managed::new(settings.godwit.as_deref())?;
    managed.start().await?;
    let added = managed.add_hosts(&fleet, 10_000_000_000).await?;
    let (hosts, vms) = (settings.hosts as u64, settings.vms as u64);
    managed.until(|cluster| (cluster.hosts_up, cluster.vms) == (hosts, vms)).await?;
    let mut starts = Vec::new();
    for _ in 0..settings.starts {
        managed.stop()?;
        let began = Instant::now();
        managed.start().await?;
        managed.until(|cluster| (cluster.hosts_up, cluster.vms) == (hosts, vms)).await?;
        starts.push(began.elapsed().as_secs_f64());
    }
    let idle = managed.usage()?;
    fleet.churn(settings.changes);
    let mut listeners = tokio::task::JoinSet::new();
    for _ in 0..settings.listeners {
        let mut asker = managed.asker();
        // The stream does not end, and is not stored.
        listeners.spawn(async move { asker.follow("/api/v1/events").await });
    }
    let began = Instant::now();
    let before = managed.usage()?;
    let (answers, skipped) = ask(settings, &mut managed.asker()).await?;
    let busy = managed.usage()?;
    let cpu_share = (busy.cpu_s - before.cpu_s) / began.elapsed().as_secs_f64();
    listeners.abort_all();
    let start_s = Spread::of(starts).context("the manager was not started")?;
    let promises = promises(start_s, busy, &answers);
    managed.stop()?;
    Ok(Figures {
        added_s: added.as_secs_f64(),
        start_s,
        idle,
        busy,
        cpu_share,
        answers,
        skipped,
        promises,
    })
}

fn promises(start_s: Spread, busy: Usage, answers: &[Answers]) -> Vec<Promise> {
    let mut promises = vec![
        Promise::new("start until all hosts are known, the slowest", 10.0, start_s.max, "s"),
        Promise::new("memory", 1024.0, busy.hwm_mib, "MiB"),
    ];
    for answer in answers {
        promises.push(Promise::new(
            format!("{}, 99th percentile", answer.what),
            200.0,
            answer.p99_ms,
            "ms",
        ));
    }
    promises
}

/// Sends each kind of request, in turns, so that other load on the machine affects all alike.
async fn ask(settings: &Settings, asker: &mut Asker) -> Result<(Vec<Answers>, Vec<String>)> {
    let (hosts, vms) = (settings.hosts.max(1), settings.vms.max(1));
    type Path = Box<dyn Fn(usize) -> String>;
    let kinds: Vec<(&str, Path)> = vec![
        (
            "VMs, a page of 100",
            Box::new(move |turn| {
                format!("/api/v1/vms?limit=100&cursor=vm-{:05}", turn * 7919 % vms)
            }),
        ),
        (
            "VMs, a page of 1,000",
            Box::new(move |turn| {
                format!("/api/v1/vms?limit=1000&cursor=vm-{:05}", turn * 7919 % vms)
            }),
        ),
        ("hosts, a page of 1,000", Box::new(|_| "/api/v1/hosts?limit=1000".to_owned())),
        (
            "VMs of a host",
            Box::new(move |turn| {
                format!("/api/v1/vms?limit=1000&host=host-{:04}", turn * 31 % hosts)
            }),
        ),
        ("VMs by state", Box::new(|_| "/api/v1/vms?limit=1000&state=paused".to_owned())),
        (
            "VMs by part of the name",
            Box::new(move |turn| format!("/api/v1/vms?limit=1000&search={:03}", turn % 1000)),
        ),
        (
            "hosts by label",
            Box::new(move |turn| {
                format!("/api/v1/hosts?limit=1000&label=rack=r{}", turn % hosts.div_ceil(20))
            }),
        ),
        ("one VM", Box::new(move |turn| format!("/api/v1/vms/vm-{:05}", turn * 7919 % vms))),
        ("one host", Box::new(move |turn| format!("/api/v1/hosts/host-{:04}", turn * 31 % hosts))),
        ("the cluster", Box::new(|_| "/api/v1/cluster".to_owned())),
        (
            "a VM's targets, ranked",
            Box::new(move |turn| format!("/api/v1/vms/vm-{:05}/preflight", turn * 7919 % vms)),
        ),
        ("the metrics", Box::new(|_| "/metrics".to_owned())),
    ];
    let mut times: Vec<(Vec<Duration>, usize)> = kinds.iter().map(|_| (Vec::new(), 0)).collect();
    let mut skipped = Vec::new();
    for turn in 0..settings.requests as usize {
        for ((what, path), (times, bytes)) in kinds.iter().zip(&mut times) {
            if skipped.iter().any(|skipped: &String| skipped.starts_with(what)) {
                continue;
            }
            let path = path(turn);
            let answer = asker.ask(Method::GET, &path, None).await?;
            if answer.status == StatusCode::OK {
                times.push(answer.took);
                *bytes = answer.body.len();
            } else {
                let why = String::from_utf8_lossy(&answer.body).into_owned();
                skipped.push(format!("{what}: {path}: {} {why}", answer.status));
            }
        }
    }
    let of = |((what, _), (times, bytes)): (&(&str, Path), &(Vec<Duration>, usize))| {
        Answers::of(what, times, *bytes)
    };
    Ok((kinds.iter().zip(&times).filter_map(of).collect(), skipped))
}

fn print(figures: &Figures) {
    let Figures { added_s, start_s, idle, busy, cpu_share, answers, skipped, promises } = figures;
    println!("hosts added through the API in {added_s:.1} s");
    println!(
        "start until all are known: median {:.2} s ({:.2} to {:.2}, {} starts)",
        start_s.median, start_s.min, start_s.max, start_s.count
    );
    println!(
        "memory: {:.0} MiB after the start, {:.0} MiB at the end, {:.0} MiB at most; {:.0} % of a \
         core during the requests",
        idle.rss_mib,
        busy.rss_mib,
        busy.hwm_mib,
        cpu_share * 100.0
    );
    println!(
        "\n  {:<26} {:>6} {:>9} {:>9} {:>9} {:>9}",
        "answer", "n", "p50 ms", "p99 ms", "max ms", "KiB"
    );
    for Answers { what, count, p50_ms, p99_ms, max_ms, bytes } in answers {
        let kib = bytes.div_ceil(1024);
        println!("  {what:<26} {count:>6} {p50_ms:>9.2} {p99_ms:>9.2} {max_ms:>9.2} {kib:>9}");
    }
    for skipped in skipped {
        println!("  skipped  {skipped}");
    }
    println!();
    promises.iter().for_each(Promise::print);
}
