//! The manager drains a host with clones of one guest, the engines taking turns. QEMU's own engine
//! runs with the settings and the number of simultaneous moves that are best for it here.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use godwit_api::control::{
    CreateDrain, Drain, DrainState, DrainVmState, ManagerClient, UpdateHost,
};
use godwit_api::{Endpoint, QemuEngineOptions};
use godwit_lab::trial::{Guest, GuestPlan, Trial, other_host, until};
use godwit_lab::{BitRate, LabOptions};
use godwit_qemu::ByteSize;
use godwit_types::EngineKind;
use rustix::process::Signal;
use serde::Serialize;

use crate::cpu::{CpuUse, CpuWatch};
use crate::figures::{Spread, cell};
use crate::machine::Machine;
use crate::results::as_text;
use crate::switchover::ODD_BYTES;
use crate::{results, warm};

/// Minimum speed of a drain, as a multiple of QEMU's own engine.
const GOAL: f64 = 2.5;
/// First of the address numbers that the lab has for guests.
const FIRST_NUMBER: u8 = 21;
/// Time limit of a drain.
const LIMIT: Duration = Duration::from_secs(1800);

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Drains by each engine
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// The link between the hosts
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    #[serde(serialize_with = "as_text")]
    link: BitRate,
    /// Number of clones
    #[arg(
        long,
        value_name = "N",
        default_value_t = 24,
        value_parser = clap::value_parser!(u8).range(2..=70),
    )]
    clones: u8,
    /// Memory of each guest
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Content in that memory
    #[arg(long, value_name = "SIZE", default_value = "128MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// Simultaneous moves tried with QEMU's own engine, one drain each; the fastest is compared
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    concurrency: Vec<u32>,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if the goal is missed
    #[arg(long)]
    check: bool,
}

/// Engine and settings of a drain.
#[derive(Debug, Clone, Serialize)]
struct Way {
    name: String,
    engine: EngineKind,
    qemu: QemuEngineOptions,
    /// Simultaneous moves; `None`: the manager's own limit for the link.
    at_once: Option<u32>,
}

/// One drain.
#[derive(Debug, Clone, Serialize)]
struct Run {
    /// Time from the request until the last guest is at the other host.
    seconds: f64,
    /// Time until the request was answered, with a target for every guest.
    planned_ms: f64,
    wire_mb: f64,
    /// CPU time of agents and QEMUs, the guests' own included.
    cpu: CpuUse,
    /// Memory that the guests' files take at the other host afterwards.
    memory_mb: f64,
}

#[derive(Debug, Serialize)]
struct Measured {
    tried: Vec<(Way, Run)>,
    godwit: Vec<Run>,
    qemu_way: Way,
    qemu: Vec<Run>,
    /// Median seconds of QEMU's engine divided by those of Godwit's.
    times_as_fast: f64,
    goal: f64,
    met: bool,
}

/// Measures, prints, writes. Returns false if the goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  link {}; {} clones of {} with {} of content each, idle; Godwit over TLS, QEMU \
         in the clear; QEMU's own tried with {:?} at \
         once, plain and by multifd with zstd; agents are restarted before each drain, so that \
         they know nothing of earlier ones, and \
         the memory that the guests take at the other host is kept warm",
        settings.link, settings.clones, settings.memory, settings.fill, settings.concurrency
    );
    let options = LabOptions { link: Some(settings.link), manager: true, ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let manager = ManagerClient::new(Endpoint::Unix(trial.paths().manager_socket()), None);
    let lab =
        Lab { manager, trial, guests_bytes: settings.memory.bytes() * u64::from(settings.clones) };
    let mut guests = lab.boot(settings)?;
    let measured = measure(settings, &lab, &mut guests)?;
    lab.trial.finish()?;
    println!("\nmedians (least to most)\n{}", render(&measured));
    let met = measured.met;
    results::write(&settings.out, "drain", &machine, settings, &measured)?;
    Ok(met || !settings.check)
}

struct Lab {
    trial: Trial,
    manager: ManagerClient,
    guests_bytes: u64,
}

fn measure(settings: &Settings, lab: &Lab, guests: &mut [Guest]) -> Result<Measured> {
    let godwit = Way {
        name: "godwit".to_owned(),
        engine: EngineKind::Godwit,
        qemu: QemuEngineOptions::default(),
        at_once: None,
    };
    let mut tried = Vec::new();
    for way in ways_of_qemu(settings) {
        let run = lab.drain(guests, &way)?;
        eprintln!("  {}: {:.1} s, {:.1} s of CPU", way.name, run.seconds, run.cpu.total_s());
        tried.push((way, run));
    }
    let best = tried.iter().min_by(|(_, one), (_, other)| one.seconds.total_cmp(&other.seconds));
    let qemu_way = best.context("no concurrency was given")?.0.clone();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..settings.runs {
        ours.push(lab.drain(guests, &godwit)?);
        theirs.push(lab.drain(guests, &qemu_way)?);
        if let (Some(one), Some(other)) = (ours.last(), theirs.last()) {
            eprintln!("  godwit {:.1} s, {} {:.1} s", one.seconds, qemu_way.name, other.seconds);
        }
    }
    let median =
        |runs: &[Run]| Spread::of(runs.iter().map(|run| run.seconds)).map_or(0.0, |all| all.median);
    let times_as_fast = median(&theirs) / median(&ours);
    let met = times_as_fast >= GOAL;
    Ok(Measured { tried, godwit: ours, qemu_way, qemu: theirs, times_as_fast, goal: GOAL, met })
}

fn ways_of_qemu(settings: &Settings) -> Vec<Way> {
    let way = |at_once: u32, name: &str, qemu: QemuEngineOptions| Way {
        name: format!("qemu{name}, {at_once} at once"),
        engine: EngineKind::Qemu,
        qemu,
        at_once: Some(at_once),
    };
    let plain = QemuEngineOptions { plaintext: true, ..QemuEngineOptions::default() };
    let zstd = QemuEngineOptions {
        multifd_channels: Some(2),
        compression: Some("zstd".to_owned()),
        ..plain.clone()
    };
    let of = |&at_once: &u32| {
        [way(at_once, "", plain.clone()), way(at_once, " multifd zstd", zstd.clone())]
    };
    settings.concurrency.iter().flat_map(of).collect()
}

impl Lab {
    fn boot(&self, settings: &Settings) -> Result<Vec<Guest>> {
        let clones = 0..settings.clones;
        let booted = clones.map(|clone| {
            let plan = GuestPlan {
                number: FIRST_NUMBER + clone,
                memory: vec![ByteSize::from_bytes(
                    settings.memory.bytes().saturating_add(ODD_BYTES),
                )],
                fill: settings.fill,
                ..GuestPlan::new(&format!("clone-{clone}"))
            };
            self.trial.clone_guest("a", &plan)
        });
        booted.collect()
    }

    /// Drains the host that has the guests, and checks that all are intact.
    fn drain(&self, guests: &mut [Guest], way: &Way) -> Result<Run> {
        let from = guests.first().context("no guests")?.host.clone();
        let to = other_host(&from);
        for host in [from.as_str(), to] {
            self.trial.end_agent(host, Signal::TERM)?;
        }
        self.trial.start_missing()?;
        for host in [from.as_str(), to] {
            let change = UpdateHost {
                maintenance: Some(false),
                // The simultaneous moves of this way; `None`: the link's own limit.
                most_moves: Some(way.at_once),
                ..UpdateHost::default()
            };
            self.trial.ask(self.manager.update_host(host, &change))?;
            until(&format!("the manager reaches host {host}"), LIMIT, || {
                let known = self.trial.ask(self.manager.host(host))?;
                let wanted = if host == from { guests.len() as u64 } else { 0 };
                let is_up = known.summary.state == godwit_api::control::HostState::Up;
                Ok((is_up && known.summary.vms == wanted).then_some(()))
            })?;
        }
        let warm = warm::memory(&self.trial, to, self.guests_bytes)?;
        let request =
            CreateDrain { engine: way.engine, qemu: way.qemu.clone(), ..CreateDrain::default() };
        let vms: Vec<&str> = guests.iter().map(|guest| guest.name.as_str()).collect();
        let watch = CpuWatch::begin(&self.trial, &vms, &from, to)?;
        let since = Instant::now();
        let begun = self.trial.ask(self.manager.create_drain(&from, &request))?;
        let planned_ms = since.elapsed().as_secs_f64() * 1e3;
        let over = until("the drain is over", LIMIT, || {
            let now = self.trial.ask(self.manager.drain(&begun.id))?;
            Ok((now.state != DrainState::Running).then_some(now))
        })?;
        let cpu = watch.end()?;
        drop(warm);
        let wire_mb = self.wire_mb(&over)?;
        let memory_mb = self.memory_mb(to)?;
        let ended = over.ended_unix_ms.context("the finished drain has no end time")?;
        for guest in guests.iter_mut() {
            to.clone_into(&mut guest.host);
            guest.verify().with_context(|| format!("{} after the drain of {from}", guest.name))?;
        }
        let milliseconds = ended.saturating_sub(over.asked_unix_ms);
        let seconds = Duration::from_millis(milliseconds).as_secs_f64();
        Ok(Run { seconds, planned_ms, wire_mb, cpu, memory_mb })
    }

    /// Returns the memory that the files of a host's guests take.
    fn memory_mb(&self, host: &str) -> Result<f64> {
        let folder = self.trial.paths().host(host).join("ram");
        let blocks = std::fs::read_dir(&folder)?
            .map(|file| Ok(file?.metadata()?.blocks()))
            .sum::<std::io::Result<u64>>();
        #[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
        blocks
            .map(|blocks| (blocks * 512) as f64 / 1e6)
            .with_context(|| format!("cannot examine {}", folder.display()))
    }

    /// Returns what its moves have sent, once all have completed.
    fn wire_mb(&self, drain: &Drain) -> Result<f64> {
        let mut bytes = 0;
        for vm in &drain.vms {
            ensure!(vm.state == DrainVmState::Gone, "{vm:?}");
            let Some(id) = &vm.r#move else { bail!("{vm:?}") };
            let report = self.trial.ask(self.manager.find_move(id))?.report;
            bytes += report.map_or(0, |report| report.wire_bytes);
        }
        #[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
        Ok(bytes as f64 / 1e6)
    }
}

fn render(measured: &Measured) -> String {
    let text = |runs: &[Run], of: fn(&Run) -> f64| cell(Spread::of(runs.iter().map(of)), 1);
    let mut lines = vec![format!(
        "  {:<28} {:>22} {:>22} {:>22} {:>18} {:>18}",
        "engine", "drain, s", "CPU, s", "wire, MB", "memory, MB", "planned, ms"
    )];
    let row = |name: &str, runs: &[Run]| {
        let (seconds, wire) = (text(runs, |run| run.seconds), text(runs, |run| run.wire_mb));
        format!(
            "  {name:<28} {seconds:>22} {:>22} {wire:>22} {:>18} {:>18}",
            text(runs, |run| run.cpu.total_s()),
            text(runs, |run| run.memory_mb),
            text(runs, |run| run.planned_ms),
        )
    };
    lines.extend(
        measured
            .tried
            .iter()
            .map(|(way, run)| row(&format!("{} (tried)", way.name), std::slice::from_ref(run))),
    );
    lines.push(row("godwit", &measured.godwit));
    lines.push(row(&measured.qemu_way.name, &measured.qemu));
    let verdict = if measured.met { "pass" } else { "FAIL" };
    lines.push(format!(
        "  {verdict}  {:.1} times as fast, goal at least {GOAL:.1}",
        measured.times_as_fast
    ));
    lines.join("\n")
}
