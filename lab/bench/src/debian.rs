//! A realistic guest: the distribution's own user space booted by systemd, with page cache in most
//! of its memory, moved over a shaped link, the engines taking turns. The figures are the speed at
//! which guest memory arrives, relative to the link, and the CPU time that it costs.

mod table;

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use godwit_api::MigrationRequest;
use godwit_lab::image::{self, Debian};
use godwit_lab::trial::{Guest, GuestPlan, Trial, other_host};
use godwit_lab::{BitRate, Hooks, LabOptions};
use godwit_qemu::{ByteSize, Disk, DiskFormat};
use godwit_types::{EngineKind, Outcome, ReferenceUse, Report};
use rustix::process::Signal;
use serde::Serialize;

use crate::cpu::{CpuUse, CpuWatch, idle_cores};
use crate::figures::{Spread, dash};
use crate::machine::Machine;
use crate::plot::{Line, gbit};
use crate::results::as_text;
use crate::subject::{Engine, Subject};
use crate::switchover::ODD_BYTES;
use crate::{plot, results, schedule, warm};

/// Minimum rate of guest memory in use, as a multiple of the link's rate.
const TIMES_LINK: f64 = 2.7;
/// Maximum number of cores kept busy in total.
const CORES: f64 = 1.5;
/// Time for which the idle guest is observed before each move.
const IDLE_TIME: Duration = Duration::from_secs(3);
/// An emulated CPU takes a minute or two to boot and to read its disk.
const BOOT_LIMIT: Duration = Duration::from_secs(900);
const PAGE_BYTES: usize = 4096;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Moves by each engine, after a warm-up move
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Engines to compare
    #[arg(
        long = "engine",
        value_delimiter = ',',
        default_values = ["godwit", "qemu", "multifd-2-zstd", "multifd-4-zstd"],
    )]
    engines: Vec<Engine>,
    /// Rate of the link
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    #[serde(serialize_with = "as_text")]
    link: BitRate,
    /// The guest's memory (64 KiB more, without which QEMU before 9.0 loses writes under TCG)
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Random content that the guest can check; its user space uses the rest
    #[arg(long, value_name = "SIZE", default_value = "16MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// Pages that Godwit may refer to, never those left from earlier moves
    #[arg(long, default_value = "disks")]
    references: References,
    /// Restart the agents before each move, so that no image is indexed when it begins
    #[arg(long)]
    fresh: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
}

/// Pages that may be referred to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum References {
    /// Pages of the same move, and of the guest's disk
    Disks,
    /// Pages of the same move
    Own,
    /// Nothing
    None,
}

/// One move.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Run {
    /// Guest memory that was not zero before the move.
    in_use_bytes: u64,
    /// Cores busy before the move.
    idle_cores: f64,
    cpu: CpuUse,
    /// Bytes that the source's NIC sent meanwhile: QEMU before 8.1 counts compressed pages at their
    /// full size.
    sent_bytes: u64,
    report: Report,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figures {
    #[serde(rename = "name")]
    engine: Engine,
    failed: usize,
    migration_ms: Option<Spread>,
    /// Memory in use divided by the duration of the migration, relative to the link's rate.
    in_use_of_link: Option<Spread>,
    /// Total memory, zero pages included, divided by the duration of the migration, relative to the
    /// link's rate.
    all_of_link: Option<Spread>,
    /// CPU time of both hosts, without that of the idle guest.
    cpu_s: Option<Spread>,
    cores: Option<Spread>,
    source_cpu_s: Option<Spread>,
    destination_cpu_s: Option<Spread>,
    wire_mb: Option<Spread>,
    /// Pages that the destination took from the guest's disk.
    disk_mb: Option<Spread>,
    runs: Vec<Run>,
}

/// Promise and result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Goal {
    what: String,
    found: String,
    met: bool,
}

/// Contents of the JSON file.
#[derive(Serialize)]
struct Measured<'a> {
    accel: &'a str,
    user_space: &'a image::DebianContent,
    /// Lowest idle load observed; it is subtracted from all CPU figures.
    idle_cores: f64,
    engines: &'a [Figures],
    goals: &'a [Goal],
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let debian = image::build_debian(&image::default_dir())?;
    // No memory of earlier moves counts.
    let hooks =
        Hooks { settings: "[references]\nbase_memory = \"none\"\n".to_owned(), ..Hooks::default() };
    let options = LabOptions { link: Some(settings.link), hooks, ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let mut subject = Subject::new(&trial, plan(settings, &debian))?;
    let accel = trial.vm("a", "bench")?.accel;
    println!("settings  {}", described(settings, &debian, &accel, &subject.guest)?);
    let first = *settings.engines.first().context("no engine")?;
    measure(settings, &trial, &mut subject, first).context("the warm-up move")?;
    let mut runs: Vec<Vec<Option<Run>>> = settings.engines.iter().map(|_| Vec::new()).collect();
    for place in schedule::turns(&vec![settings.runs; settings.engines.len()]) {
        let engine = settings.engines[place];
        let run = measure(settings, &trial, &mut subject, engine)?;
        if let Some(run) = &run {
            let (took_ms, cpu_s) = (run.report.migration_time_ms, run.cpu.total_s());
            eprintln!("  {}: {took_ms:.0} ms, {cpu_s:.2} s of CPU", engine.name());
        }
        runs[place].push(run);
    }
    subject.guest.verify().context("the guest at the end")?;
    trial.finish()?;
    let idle_cores = least_idle(&runs);
    let figures: Vec<Figures> = (settings.engines.iter().zip(runs))
        .map(|(engine, runs)| figures_of(*engine, runs, settings.link, idle_cores))
        .collect();
    let goals = goals(&figures);
    print!("{}", table::render(&figures, &goals, idle_cores));
    plot(settings, &figures)?;
    let measured = Measured {
        accel: &accel,
        user_space: &debian.content,
        idle_cores,
        engines: &figures,
        goals: &goals,
    };
    results::write(&settings.out, "debian", &machine, settings, &measured)?;
    Ok(goals.iter().all(|goal| goal.met) || !settings.check)
}

/// Plots bandwidth over time of each engine's median move. QEMU does not report how many compressed
/// bytes it sends.
fn plot(settings: &Settings, figures: &[Figures]) -> Result<()> {
    let drawn = figures.iter().filter(|row| !row.engine.is_compressed_qemu());
    let lines: Vec<Line> = drawn
        .filter_map(|row| {
            Line::of_median(row.engine.name(), row.runs.iter().map(|run| &run.report))
        })
        .collect();
    let title = format!(
        "An idle guest with a Debian user space, {} over {}",
        settings.memory, settings.link
    );
    plot::write(&settings.out, "debian", &title, gbit(settings.link), &lines)
}

fn plan(settings: &Settings, debian: &Debian) -> GuestPlan {
    GuestPlan {
        memory: vec![ByteSize::from_bytes(settings.memory.bytes().saturating_add(ODD_BYTES))],
        fill: settings.fill,
        mix: Some("zero=0,compressible=0".to_owned()),
        disks: vec![Disk::new(&debian.disk, DiskFormat::Raw).readonly()],
        image: Some(debian.image.clone()),
        words: "godwit.root=/dev/vda godwit.read=/".to_owned(),
        boot_limit: BOOT_LIMIT,
        ..GuestPlan::new("bench")
    }
}

fn described(settings: &Settings, debian: &Debian, accel: &str, guest: &Guest) -> Result<String> {
    let memory = guest.status()?.memory.context("the guest reports no memory use")?;
    let mib = |bytes: u64| bytes >> 20;
    Ok(format!(
        "idle guest of {} and 64 KiB, 1 vCPU by {accel}: {} on a disk of virtio-blk, booted by \
         systemd, its files read; of its \
         memory {} MiB are files, {} MiB programs and kernel ({} of them random), {} MiB free; \
         link {}; {} moves by each engine; \
         the destination's memory kept warm; Godwit over TLS, compression auto, \
         references {}; QEMU in the clear",
        settings.memory,
        debian.content,
        mib(memory.cached_bytes),
        mib(memory.used_bytes()),
        settings.fill,
        mib(memory.free_bytes),
        settings.link,
        settings.runs,
        match settings.references {
            References::Disks => "to pages of the same move and of the guest's disk",
            References::Own => "own (to pages of the same move)",
            References::None => "none",
        },
    ))
}

/// Moves the guest once with one engine. Returns `None` if the guest was lost.
fn measure(
    settings: &Settings,
    trial: &Trial,
    subject: &mut Subject<'_>,
    engine: Engine,
) -> Result<Option<Run>> {
    let Guest { name, host: from, .. } = subject.guest.clone();
    let to = other_host(&from);
    if settings.fresh {
        for host in ["a", "b"] {
            trial.end_agent(host, Signal::TERM)?;
        }
        trial.start_missing()?;
    }
    let in_use_bytes = in_use_bytes(trial, &from, &name)?;
    let idle_cores = idle_cores(trial, &name, &from, IDLE_TIME)?;
    let _warm = warm::memory(trial, to, settings.memory.bytes())?;
    let references = match settings.references {
        References::Disks => ReferenceUse::All,
        References::Own => ReferenceUse::Own,
        References::None => ReferenceUse::None,
    };
    let change = |request: MigrationRequest| match request.engine {
        EngineKind::Godwit => MigrationRequest { references, ..request },
        EngineKind::Qemu => request,
    };
    let sent_before = sent_bytes(trial, &from)?;
    let watch = CpuWatch::begin(trial, &[&name], &from, to)?;
    let moved = subject.move_unwatched_by(engine, change, |_| {
        Ok((watch.end()?, sent_bytes(trial, &from)? - sent_before))
    })?;
    Ok(moved.map(|(report, (cpu, sent_bytes))| Run {
        in_use_bytes,
        idle_cores,
        cpu,
        sent_bytes,
        report,
    }))
}

/// Returns the total number of bytes that a host has sent to the other.
fn sent_bytes(trial: &Trial, host: &str) -> Result<u64> {
    Ok(trial.lane_sent_bytes(host)?.iter().sum())
}

/// Returns how much of a guest's memory is not zero.
fn in_use_bytes(trial: &Trial, host: &str, vm: &str) -> Result<u64> {
    let path = trial.paths().host(host).join("ram").join(format!("{vm}.0.ram"));
    let count = || -> std::io::Result<u64> {
        let mut file = File::open(&path)?;
        let mut piece = vec![0; 1 << 20];
        let mut pages = 0;
        loop {
            // A file in memory returns whole pages.
            let bytes = file.read(&mut piece)?;
            if bytes == 0 {
                return Ok(pages * PAGE_BYTES as u64);
            }
            pages += used_pages(&piece[..bytes]);
        }
    };
    count().with_context(|| format!("cannot read {}", path.display()))
}

fn used_pages(bytes: &[u8]) -> u64 {
    let zero = [0; PAGE_BYTES];
    bytes.chunks(PAGE_BYTES).filter(|page| **page != zero[..page.len()]).count() as u64
}

/// Returns the lowest idle load: subtracting more would flatter the figures.
fn least_idle(runs: &[Vec<Option<Run>>]) -> f64 {
    let seen = runs.iter().flatten().flatten().map(|run| run.idle_cores);
    seen.min_by(f64::total_cmp).unwrap_or(0.0)
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
fn figures_of(engine: Engine, moves: Vec<Option<Run>>, link: BitRate, idle_cores: f64) -> Figures {
    let is_done = |run: &&Run| run.report.outcome == Outcome::Completed;
    let all = moves.len();
    let runs: Vec<Run> = moves.into_iter().flatten().collect();
    let completed = || runs.iter().filter(is_done);
    let seconds = |run: &Run| run.report.migration_time_ms / 1e3;
    let of_link =
        |bytes: u64, run: &Run| bytes as f64 * 8.0 / seconds(run) / link.bits_per_second() as f64;
    let disk_mb = |run: &Run| (run.report.referenced.disk * PAGE_BYTES as u64) as f64 / 1e6;
    let cpu_s = |run: &Run| run.cpu.total_s() - idle_cores * seconds(run);
    Figures {
        engine,
        failed: all - completed().count(),
        migration_ms: Spread::of(completed().map(|run| run.report.migration_time_ms)),
        in_use_of_link: Spread::of(completed().map(|run| of_link(run.in_use_bytes, run))),
        all_of_link: Spread::of(completed().map(|run| of_link(run.report.guest_bytes, run))),
        cpu_s: Spread::of(completed().map(cpu_s)),
        cores: Spread::of(completed().map(|run| cpu_s(run) / seconds(run))),
        source_cpu_s: Spread::of(completed().map(|run| run.cpu.source_s)),
        destination_cpu_s: Spread::of(completed().map(|run| run.cpu.destination_s)),
        wire_mb: Spread::of(completed().map(|run| run.sent_bytes as f64 / 1e6)),
        disk_mb: Spread::of(completed().map(disk_mb)),
        runs,
    }
}

/// Returns the promises about Godwit, as far as they were measured.
fn goals(figures: &[Figures]) -> Vec<Goal> {
    let Some(ours) = figures.iter().find(|row| row.engine == Engine::Godwit) else {
        return Vec::new();
    };
    let median = |of: Option<Spread>| of.map(|spread| spread.median);
    let goal =
        |what: String, found: Option<f64>, digits: usize, is_met: &dyn Fn(f64) -> bool| Goal {
            what,
            found: found.map_or_else(dash, |found| format!("{found:.digits$}")),
            met: found.is_some_and(is_met) && ours.failed == 0,
        };
    let mut goals = vec![
        goal(
            format!("memory in use by time at least {TIMES_LINK} times the link's rate"),
            median(ours.in_use_of_link),
            2,
            &|found| found >= TIMES_LINK,
        ),
        goal(
            format!("at most {CORES} cores, both hosts together"),
            median(ours.cores),
            2,
            &|found| found <= CORES,
        ),
    ];
    // Faster than the fastest of them, and with less CPU time than the most economical.
    let best = |of: fn(&Figures) -> Option<Spread>| {
        let theirs = figures.iter().filter(|row| row.engine.is_compressed_qemu());
        theirs.filter_map(|row| Some(of(row)?.median)).min_by(f64::total_cmp)
    };
    if let Some(theirs) = best(|row| row.migration_ms) {
        let what = format!("faster than QEMU's multifd with zstd ({theirs:.0} ms), ms");
        goals.push(goal(what, median(ours.migration_ms), 0, &|found| found < theirs));
    }
    if let Some(theirs) = best(|row| row.cpu_s) {
        let what = format!("less CPU time than QEMU's multifd with zstd ({theirs:.2} s), s");
        goals.push(goal(what, median(ours.cpu_s), 2, &|found| found < theirs));
    }
    goals
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns an engine's figures, with the same values in all runs.
    pub(crate) fn figures(engine: Engine, migration_ms: f64, cpu_s: f64) -> Figures {
        let of = |value| Spread::of([value]);
        Figures {
            engine,
            failed: 0,
            migration_ms: of(migration_ms),
            in_use_of_link: of(16_000.0 / migration_ms),
            all_of_link: of(17_000.0 / migration_ms),
            cpu_s: of(cpu_s),
            cores: of(cpu_s * 1e3 / migration_ms),
            source_cpu_s: of(cpu_s / 2.0),
            destination_cpu_s: of(cpu_s / 2.0),
            wire_mb: None,
            disk_mb: None,
            runs: Vec::new(),
        }
    }

    #[test]
    fn goals_are_of_godwit_and_against_the_best_of_the_others() {
        let theirs = [
            figures(Engine::Qemu, 1000.0, 0.1),
            figures(Engine::Multifd2Zstd, 8000.0, 9.0),
            figures(Engine::Multifd4Zstd, 7000.0, 10.0),
        ];
        let met = |ours: Figures| {
            let goals = goals(&[vec![ours], theirs.to_vec()].concat());
            goals.into_iter().map(|goal| goal.met).collect::<Vec<_>>()
        };
        assert_eq!(met(figures(Engine::Godwit, 5000.0, 7.0)), [true, true, true, true]);
        assert_eq!(met(figures(Engine::Godwit, 6000.0, 9.5)), [false, false, true, false]);
        assert_eq!(met(figures(Engine::Godwit, 7500.0, 8.9)), [false, true, false, true]);
        assert_eq!(met(Figures { failed: 1, ..figures(Engine::Godwit, 5000.0, 7.0) }), [false; 4]);
        assert!(goals(&theirs).is_empty());
        assert_eq!(goals(&[figures(Engine::Godwit, 5000.0, 7.0)]).len(), 2);
    }

    #[test]
    fn pages_that_are_not_zero_count() {
        let mut bytes = vec![0; 3 * PAGE_BYTES];
        assert_eq!(used_pages(&bytes), 0);
        bytes[PAGE_BYTES] = 1;
        bytes[3 * PAGE_BYTES - 1] = 1;
        assert_eq!(used_pages(&bytes), 2);
    }
}
