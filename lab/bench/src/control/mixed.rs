//! Simulated hosts with 200 VMs and real ones with real guests under one manager: a host of each
//! kind is drained at the same time. The promises are the same as for simulated hosts alone, and
//! each real guest must be intact afterwards.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use godwit_api::control::{Cluster, Drain, DrainVmState, Move, MoveState, Page};
use godwit_fleet::{Asker, Fleet, FleetPlan, Looks};
use godwit_lab::trial::{Guest, GuestPlan, Trial, until};
use godwit_lab::{BitRate, LabOptions, in_namespace};
use godwit_qemu::ByteSize;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::Promise;
use crate::machine::Machine;
use crate::results::{self, as_text};

/// Time limit of every step.
const LIMIT: Duration = Duration::from_secs(600);
/// Poll interval.
const LOOK: Duration = Duration::from_millis(2);
/// Maximum simultaneous moves out of a host and into it, at 1 Gb/s.
const MOST_MOVES: u32 = 4;
/// First of the address numbers that the lab has for guests.
const FIRST_NUMBER: u8 = 21;
/// The real host that is drained; the manager runs in its namespace.
const REAL: &str = "a";
/// The simulated host that is drained.
const SIMULATED: &str = "host-0000";

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
    /// Their VMs
    #[arg(
        long,
        value_name = "N",
        default_value_t = 200,
        value_parser = clap::value_parser!(u32).range(1..=256),
    )]
    vms: u32,
    /// Real hosts: namespaces with an agent and QEMU
    #[arg(
        long,
        value_name = "N",
        default_value_t = 6,
        value_parser = clap::value_parser!(u32).range(2..=16),
    )]
    real_hosts: u32,
    /// Real guests, all on the drained host
    #[arg(
        long,
        value_name = "N",
        default_value_t = 6,
        value_parser = clap::value_parser!(u8).range(1..=24),
    )]
    real_vms: u8,
    /// Memory of each guest
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Links of the real hosts
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    #[serde(serialize_with = "as_text")]
    link: BitRate,
    /// Speed of simulated migrations, as a multiple of real time
    #[arg(long, value_name = "FACTOR", default_value_t = 20.0)]
    speed: f64,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

/// One of the two drains.
#[derive(Debug, Clone, Serialize)]
struct Emptied {
    host: &'static str,
    vms: usize,
    plan_s: f64,
    first_begun_s: f64,
    drained_s: f64,
}

#[derive(Debug, Serialize)]
struct Figures {
    drains: Vec<Emptied>,
    looks: Looks,
    most_out_of_one: u32,
    most_into_one: u32,
    promises: Vec<Promise>,
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  {} simulated hosts (agents' API with simulated QEMU) with {} VMs, migrations \
         {} times faster than real ones; {} real \
         hosts with {} idle guests of {}, all on host {REAL}, links of {}; no TLS, which \
         simulated agents lack\n",
        settings.hosts,
        settings.vms,
        settings.speed,
        settings.real_hosts,
        settings.real_vms,
        settings.memory,
        settings.link
    );
    let options = LabOptions {
        hosts: settings.real_hosts,
        link: Some(settings.link),
        manager: true,
        insecure: true,
        ..LabOptions::default()
    };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let plans: Vec<GuestPlan> =
        (0..settings.real_vms).map(|number| guest_plan(settings, number)).collect();
    let mut guests = trial.guests(REAL, &plans)?;
    let (runtime, fleet) = fleet_beside_manager(settings, &trial)?;
    let figures = {
        let names: Vec<&str> = guests.iter().map(|guest| guest.name.as_str()).collect();
        runtime.block_on(measure(settings, &trial, &fleet, &names))?
    };
    expect_whole(&trial, &mut guests)?;
    drop(fleet);
    trial.finish()?;
    print(&figures);
    results::write(&settings.out, "control-mixed", &machine, settings, &figures)?;
    Ok(!settings.check || figures.promises.iter().all(Promise::is_kept))
}

fn guest_plan(settings: &Settings, number: u8) -> GuestPlan {
    GuestPlan {
        number: FIRST_NUMBER + number,
        memory: vec![settings.memory],
        fill: ByteSize::from_mib(32),
        ..GuestPlan::new(&format!("real-{number}"))
    }
}

/// Starts simulated agents in the namespace in which the manager runs: threads created there stay
/// there.
fn fleet_beside_manager(settings: &Settings, trial: &Trial) -> Result<(Runtime, Fleet)> {
    let plan = FleetPlan {
        hosts: settings.hosts as usize,
        vms: settings.vms as usize,
        hosts_with_vms: settings.hosts as usize,
        speed: settings.speed,
        ..FleetPlan::default()
    };
    in_namespace(&trial.namespace(REAL), || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let fleet = runtime.block_on(Fleet::begin(plan))?;
        anyhow::Ok((runtime, fleet))
    })?
}

async fn measure(
    settings: &Settings,
    trial: &Trial,
    fleet: &Fleet,
    guests: &[&str],
) -> Result<Figures> {
    let mut asker = Asker::new(&trial.paths().manager_socket());
    for (name, address) in fleet.agents() {
        let _: Value =
            asker.post("/api/v1/hosts", &json!({ "name": name, "address": address })).await?;
    }
    keep_apart(&mut asker, fleet, (guests, &trial.hosts())).await?;
    let hosts = u64::from(settings.hosts + settings.real_hosts);
    let vms = u64::from(settings.vms) + u64::from(settings.real_vms);
    let began = Instant::now();
    loop {
        let cluster: Cluster = asker.get("/api/v1/cluster").await?;
        if (cluster.hosts_up, cluster.vms) == (hosts, vms) {
            break;
        }
        ensure!(began.elapsed() < LIMIT, "the manager cannot reach all hosts: {cluster:?}");
        tokio::time::sleep(LOOK).await;
    }

    let socket = trial.paths().manager_socket();
    let (real, simulated) =
        tokio::join!(empty(Asker::new(&socket), REAL), empty(Asker::new(&socket), SIMULATED));
    let mut begun = vec![real?, simulated?];
    let mut looks = Looks::default();
    looks.until_over(&mut asker, LIMIT).await?;
    for (id, emptied) in &mut begun {
        emptied.drained_s = until_ended(&mut asker, id).await?;
    }
    let moves: Page<Move> = asker.get("/api/v1/moves?limit=1000").await?;
    let most_out_of_one = most_at_once(&moves.items, |one| Some(&one.from));
    let most_into_one = most_at_once(&moves.items, |one| one.to.as_ref());
    let drains: Vec<Emptied> = begun.into_iter().map(|(_, emptied)| emptied).collect();
    let twice = moves.total.abs_diff(drains.iter().map(|drain| drain.vms as u64).sum());
    let promises = promises(&drains, &looks, (most_out_of_one, most_into_one), twice);
    Ok(Figures { drains, looks, most_out_of_one, most_into_one, promises })
}

/// Adds rules that keep real and simulated VMs apart: a simulated host cannot run a guest, and a
/// real host cannot run a simulated one.
async fn keep_apart(asker: &mut Asker, fleet: &Fleet, real: (&[&str], &[String])) -> Result<()> {
    let names: Vec<String> = fleet.agents().keys().cloned().collect();
    let stand_ins: Vec<String> =
        names.iter().flat_map(|host| fleet.vms_of(host)).map(|vm| vm.name).collect();
    let (guests, real_hosts) = real;
    let on = |name: &str, vms: Value, hosts: Value| {
        let hosts = json!({ "names": hosts });
        json!({ "name": name, "kind": "on", "vms": vms, "hosts": hosts })
    };
    for rule in [
        on("simulated", json!(stand_ins), json!(names)),
        on("real", json!(guests), json!(real_hosts)),
    ] {
        let _: Value = asker.post("/api/v1/rules", &rule).await?;
    }
    Ok(())
}

/// Plans a drain, then starts it. Returns its ID and the figures until its first move has begun.
async fn empty(mut asker: Asker, host: &'static str) -> Result<(String, Emptied)> {
    let path = format!("/api/v1/hosts/{host}/drain");
    let began = Instant::now();
    let planned: Drain = asker.post(&path, &json!({ "plan_only": true })).await?;
    let plan_s = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let drain: Drain = asker.post(&path, &json!({})).await?;
    loop {
        let moves: Page<Move> = asker.get("/api/v1/moves?limit=1000").await?;
        let mut of_drain = moves.items.iter().filter(|one| one.drain.as_ref() == Some(&drain.id));
        if of_drain.any(|one| matches!(one.state, MoveState::Running | MoveState::Done)) {
            break;
        }
        ensure!(began.elapsed() < LIMIT, "no move out of {host} has begun");
        tokio::time::sleep(LOOK).await;
    }
    let first_begun_s = began.elapsed().as_secs_f64();
    Ok((drain.id, Emptied { host, vms: planned.vms.len(), plan_s, first_begun_s, drained_s: 0.0 }))
}

/// Waits until the drain has ended with no VM left. Returns its duration.
async fn until_ended(asker: &mut Asker, id: &str) -> Result<f64> {
    let began = Instant::now();
    loop {
        let drain: Drain = asker.get(&format!("/api/v1/drains/{id}")).await?;
        if drain.vms.iter().any(|vm| vm.state == DrainVmState::Stays) {
            bail!("not every VM has left: {drain:?}");
        }
        if let Some(ended) = drain.ended_unix_ms {
            return Ok(
                Duration::from_millis(ended.saturating_sub(drain.asked_unix_ms)).as_secs_f64()
            );
        }
        ensure!(began.elapsed() < LIMIT, "the drain did not end in time: {drain:?}");
        tokio::time::sleep(LOOK).await;
    }
}

/// Returns how many moves of one host ran at the same time, from the start and end of each.
fn most_at_once<'a>(moves: &'a [Move], host: impl Fn(&'a Move) -> Option<&'a String>) -> u32 {
    let mut changes: BTreeMap<&String, Vec<(u64, i32)>> = BTreeMap::new();
    for one in moves {
        if let (Some(host), Some(began), Some(ended)) =
            (host(one), one.started_unix_ms, one.ended_unix_ms)
        {
            // In one millisecond one may end and the next begin: ends sort first.
            changes.entry(host).or_default().extend([(began, 1), (ended.max(began + 1), -1)]);
        }
    }
    let most = changes.into_values().map(|mut of_host| {
        of_host.sort_unstable();
        let counts = of_host.iter().scan(0, |running, (_, change)| {
            *running += change;
            Some(*running)
        });
        counts.max().unwrap_or(0)
    });
    most.max().unwrap_or(0).unsigned_abs()
}

fn promises(drains: &[Emptied], looks: &Looks, most: (u32, u32), twice: u64) -> Vec<Promise> {
    #[expect(clippy::cast_precision_loss, reason = "counts of some hundred moves")]
    let count = |count: u64| count as f64;
    let of_drains = drains.iter().flat_map(|drain| {
        [
            Promise::new(
                format!("the drain of {} is planned in", drain.host),
                1.0,
                drain.plan_s,
                "s",
            ),
            Promise::new(
                format!("its first move ({}) begins within", drain.host),
                2.0,
                drain.first_begun_s,
                "s",
            ),
        ]
    });
    let limit = f64::from(MOST_MOVES);
    let of_all = [
        Promise::new("moves out of a host", limit, f64::from(most.0), "at once"),
        Promise::new("moves into a host", limit, f64::from(most.1), "at once"),
        Promise::new("waits without a reason", 0.0, count(looks.unexplained), "moves"),
        Promise::new("moves in addition to one per VM", 0.0, count(twice), "moves"),
    ];
    of_drains.chain(of_all).collect()
}

/// Checks that each real guest runs at another host, and that its memory is right.
fn expect_whole(trial: &Trial, guests: &mut [Guest]) -> Result<()> {
    ensure!(trial.ask(trial.agent(REAL).vms())?.is_empty(), "host {REAL} still has VMs");
    for guest in guests {
        let host = until(&format!("{} runs on a host", guest.name), LIMIT, || {
            for host in trial.hosts() {
                if trial.ask(trial.agent(&host).vms())?.iter().any(|vm| vm.name == guest.name) {
                    return Ok(Some(host));
                }
            }
            Ok(None)
        })?;
        guest.host = host;
        guest.verify().with_context(|| format!("{} after the drain", guest.name))?;
    }
    Ok(())
}

fn print(figures: &Figures) {
    let Figures { drains, looks, most_out_of_one, most_into_one, promises } = figures;
    for Emptied { host, vms, plan_s, first_begun_s, drained_s } in drains {
        println!(
            "drain of {host} with {vms} VMs: planned in {plan_s:.3} s, its first move begun after \
             {first_begun_s:.3} s, all gone after {drained_s:.1} s"
        );
    }
    println!(
        "at most {most_out_of_one} moves out of a host, {most_into_one} into a host; {} polls, {} \
         waits seen, {} without a reason: {}\n",
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
    promises.iter().for_each(Promise::print);
}
