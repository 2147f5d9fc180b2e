//! Eight hosts with 200 VMs: one of them is drained, and then many VMs move at once. Checks that
//! moves are planned and begun soon and within all limits, and that each waiting move states what
//! it waits for.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use godwit_api::control::{Drain, DrainVmState, Move};
use godwit_fleet::{Asker, Counts, Fleet, FleetPlan, Looks};
use serde::Serialize;
use serde_json::json;

use super::Promise;
use super::managed::Managed;
use crate::machine::Machine;
use crate::results;

/// Time limit of every step.
const LIMIT: Duration = Duration::from_secs(600);
/// Maximum simultaneous moves out of a host and into it, at 1 Gb/s.
const MOST_MOVES: u32 = 4;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Simulated hosts
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(2..=64),
    )]
    hosts: u32,
    /// Place all VMs on the drained host; otherwise they are spread evenly
    #[arg(long)]
    all_on_one: bool,
    /// VMs
    #[arg(long, value_name = "N", default_value_t = 200)]
    vms: usize,
    /// Speed of migrations, as a multiple of real time
    #[arg(long, value_name = "FACTOR", default_value_t = 20.0)]
    speed: f64,
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
    drained_vms: usize,
    plan_s: f64,
    answered_s: f64,
    first_begun_s: f64,
    drained_s: f64,
    moves: usize,
    moved_s: f64,
    looks: Looks,
    counts: Counts,
    promises: Vec<Promise>,
}

/// Measures, prints, writes.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::inspect("qemu-system-x86_64".as_ref());
    print!("{machine}");
    println!(
        "settings  {} simulated hosts (agents' API with simulated QEMU) at 1 Gb/s, {} VMs of 256 \
         MiB to 1 GiB, {}, migrations {} times faster than real ones\n",
        settings.hosts,
        settings.vms,
        if settings.all_on_one { "all on one host" } else { "spread evenly" },
        settings.speed
    );
    let figures = tokio::runtime::Runtime::new()?.block_on(measure(settings))?;
    print(&figures);
    results::write(&settings.out, "control-drain", &machine, settings, &figures)?;
    Ok(!settings.check || figures.promises.iter().all(Promise::is_kept))
}

async fn measure(settings: &Settings) -> Result<Figures> {
    let hosts = settings.hosts as usize;
    let plan = FleetPlan {
        hosts,
        vms: settings.vms,
        hosts_with_vms: if settings.all_on_one { 1 } else { hosts },
        speed: settings.speed,
        ..FleetPlan::default()
    };
    let fleet = Fleet::begin(plan.clone()).await?;
    let mut managed = Managed::new(settings.godwit.as_deref())?;
    managed.start().await?;
    managed.add_hosts(&fleet, plan.link_bits_per_s).await?;
    let (up, vms) = (u64::from(settings.hosts), settings.vms as u64);
    managed.until(|cluster| (cluster.hosts_up, cluster.vms) == (up, vms)).await?;
    let mut asker = managed.asker();
    let mut looks = Looks::default();

    let began = Instant::now();
    let planned: Drain =
        asker.post("/api/v1/hosts/host-0000/drain", &json!({ "plan_only": true })).await?;
    let plan_s = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let first = first_begun(&fleet, began);
    let request = json!({});
    let drain = asker.post::<Drain>("/api/v1/hosts/host-0000/drain", &request);
    let answered = async { (drain.await, began.elapsed().as_secs_f64()) };
    let (first_begun_s, (drain, answered_s)) = tokio::join!(first, answered);
    let drain = drain?;
    looks.until_over(&mut asker, LIMIT).await?;
    let drained_s = began.elapsed().as_secs_f64();
    let ended: Drain = asker.get(&format!("/api/v1/drains/{}", drain.id)).await?;
    if ended.vms.iter().any(|vm| vm.state == DrainVmState::Stays)
        || !fleet.vms_of("host-0000").is_empty()
    {
        bail!("not every VM has left: {ended:?}");
    }

    let began = Instant::now();
    let moves = move_many(&mut asker, &fleet, hosts).await?;
    looks.until_over(&mut asker, LIMIT).await?;
    let moved_s = began.elapsed().as_secs_f64();
    managed.stop()?;
    let counts = fleet.counts();
    let first_begun_s = first_begun_s?;
    let promises = promises(plan_s, first_begun_s, &looks, &counts);
    Ok(Figures {
        drained_vms: planned.vms.len(),
        plan_s,
        answered_s,
        first_begun_s,
        drained_s,
        moves,
        moved_s,
        looks,
        counts,
        promises,
    })
}

/// Returns when the first migration has begun at an agent.
async fn first_begun(fleet: &Fleet, began: Instant) -> Result<f64> {
    while fleet.counts().begun.is_empty() {
        if began.elapsed() > LIMIT {
            bail!("no move has begun");
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(began.elapsed().as_secs_f64())
}

/// Moves ten VMs of each host to the next one.
async fn move_many(asker: &mut Asker, fleet: &Fleet, hosts: usize) -> Result<usize> {
    // A VM in motion is seen at two hosts, so all are chosen before the first one moves.
    let mut chosen = Vec::new();
    for number in 1..hosts {
        let to = format!("host-{:04}", if number + 1 == hosts { 1 } else { number + 1 });
        let from = format!("host-{number:04}");
        if from == to {
            continue;
        }
        chosen.extend(fleet.vms_of(&from).into_iter().take(10).map(|vm| (vm.name, to.clone())));
    }
    for (vm, to) in &chosen {
        let _: Move = asker.post(&format!("/api/v1/vms/{vm}/moves"), &json!({ "to": to })).await?;
    }
    Ok(chosen.len())
}

fn promises(plan_s: f64, first_begun_s: f64, looks: &Looks, counts: &Counts) -> Vec<Promise> {
    #[expect(clippy::cast_precision_loss, reason = "counts of a small fleet")]
    let count = |count: u64| count as f64;
    vec![
        Promise::new("the drain is planned in", 1.0, plan_s, "s"),
        Promise::new("its first move begins within", 2.0, first_begun_s, "s"),
        Promise::new(
            "moves out of a host",
            f64::from(MOST_MOVES),
            f64::from(counts.most_out_of_one()),
            "at once",
        ),
        Promise::new(
            "moves into a host",
            f64::from(MOST_MOVES),
            f64::from(counts.most_into_one()),
            "at once",
        ),
        Promise::new("waits without a reason", 0.0, count(looks.unexplained), "moves"),
        Promise::new(
            "moves begun twice",
            0.0,
            count(counts.double_begins + counts.not_there),
            "moves",
        ),
    ]
}

fn print(figures: &Figures) {
    let Figures {
        drained_vms,
        plan_s,
        answered_s,
        first_begun_s,
        drained_s,
        moves,
        moved_s,
        looks,
        counts,
        promises,
    } = figures;
    println!(
        "drain of a host with {drained_vms} VMs: planned in {plan_s:.3} s; request answered in \
         {answered_s:.3} s,"
    );
    println!("  its first move begun after {first_begun_s:.3} s, all gone after {drained_s:.1} s");
    println!("{moves} moves at once among the others: over after {moved_s:.1} s");
    println!(
        "{} polls, {} waits seen, {} without a reason: {}",
        looks.looks,
        looks.waiting,
        looks.unexplained,
        looks
            .codes
            .iter()
            .map(|(code, count)| format!("{code} {count}"))
            .collect::<Vec<_>>()
            .join(", ")
    );
    println!(
        "agents: {} completed, {} failed, at most {} out of a host, {} into a host, {} in total\n",
        counts.completed,
        counts.failed,
        counts.most_out_of_one(),
        counts.most_into_one(),
        counts.most_at_once
    );
    promises.iter().for_each(Promise::print);
}
