//! Storage: a guest moves with its disks, which it writes all the time: by Godwit, and by QEMU's
//! own mirror and migration, the ways taking turns over one link.

mod clones;
mod images;
mod peer;
mod subject;
mod table;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::{Args, Subcommand, ValueEnum};
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_lab::{BitRate, LabOptions, Rtt};
use godwit_qemu::ByteSize;
use godwit_types::{Outcome, Report};
use serde::Serialize;

use crate::machine::Machine;
use crate::results::as_text;
use crate::{results, schedule};
use images::{Folders, Sizes};
use peer::Peer;
use subject::Subject;
use table::{Compared, Part, WayFigures};

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Settings {
    #[command(subcommand)]
    #[serde(skip)]
    case: Option<Case>,
    /// Moves by each way, for each rate and round trip
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Ways to compare
    #[arg(
        long = "way",
        value_delimiter = ',',
        default_values = [
            "godwit", "without-disks", "mirror-background", "mirror-write-blocking",
        ],
    )]
    ways: Vec<Way>,
    /// Rates at which the guest writes its disks, in MiB/s
    #[arg(long = "rate", value_name = "MIB", value_delimiter = ',', default_values_t = [5, 30, 60])]
    rates: Vec<u64>,
    /// Round-trip times of the migration network, each in a separate lab
    #[arg(long, value_name = "TIME", value_delimiter = ',', default_values = ["0ms", "10ms"])]
    rtt: Vec<Rtt>,
    /// Rate of the migration network's links
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    link: BitRate,
    /// Size of each disk that the guest sees
    #[arg(long = "virtual", value_name = "SIZE", default_value = "8GiB")]
    #[serde(serialize_with = "as_text")]
    virtual_size: ByteSize,
    /// Content of each disk, without the base of the first
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    used: ByteSize,
    /// Part of that content on each disk that the guest rewrites, at random
    #[arg(long, value_name = "SIZE", default_value = "32MiB")]
    #[serde(serialize_with = "as_text")]
    written: ByteSize,
    /// Content of the first disk's base, which both hosts have
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    base: ByteSize,
    /// Time limit of a move, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    limit_s: u64,
    /// Encrypt Godwit's data; QEMU's data is never encrypted here
    #[arg(long)]
    tls: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
}

/// Other cases of the scenario.
#[derive(Debug, Clone, Subcommand)]
enum Case {
    /// Move clones of one base to a host that has the base, and count the bytes
    #[command(after_help = "Examples:
  godwit-bench storage clones
  godwit-bench storage clones --clones 4 --own 16MiB")]
    Clones(clones::Settings),
}

/// How the guest moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Way {
    /// Godwit, with the disks
    Godwit,
    /// Godwit; the disks are where both hosts find them
    WithoutDisks,
    /// QEMU's `blockdev-mirror` to the destination's QEMU and its migration, copying in the
    /// background
    MirrorBackground,
    /// QEMU's with each write of the guest going to both hosts
    #[value(name = "mirror-write-blocking")]
    #[serde(rename = "mirror-write-blocking")]
    MirrorBlocking,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Godwit => "godwit",
            Way::WithoutDisks => "without-disks",
            Way::MirrorBackground => "mirror-background",
            Way::MirrorBlocking => "mirror-write-blocking",
        }
    }

    fn is_qemu(self) -> bool {
        matches!(self, Way::MirrorBackground | Way::MirrorBlocking)
    }
}

/// A guest that moves by some of the ways.
trait Mover {
    fn guest(&self) -> &Guest;

    /// Returns the bytes of its disks that travel.
    fn travelling_bytes(&self, way: Way) -> u64;

    /// Moves it to the other host. A move that does not complete is a result; an error means that
    /// the guest is lost.
    fn move_by(&mut self, way: Way) -> Result<Moved>;

    /// Compares its images with those that the last move left behind.
    fn expect_same_images(&self) -> Result<()>;

    /// Removes the images that the last move left behind.
    fn remove_former(&mut self) -> Result<()>;

    /// Replaces it after it was lost.
    fn anew(&mut self) -> Result<()>;
}

/// One move, as its way reports it.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Moved {
    pub(crate) migration_ms: f64,
    /// Pause of the vCPUs.
    pub(crate) switchover_ms: Option<f64>,
    /// Time for which the guest's writes were limited.
    pub(crate) limited_ms: f64,
    /// Time until QEMU's mirrors were ready.
    pub(crate) mirrored_ms: Option<f64>,
    /// Why it did not complete.
    pub(crate) error: Option<String>,
    /// Godwit's report.
    pub(crate) report: Option<Report>,
}

impl Moved {
    fn by_godwit(report: Report) -> Moved {
        let is_completed = report.outcome == Outcome::Completed;
        let error = report.error.as_ref().map(|error| error.message.clone());
        Moved {
            migration_ms: report.migration_time_ms,
            switchover_ms: report.switchover_ms,
            limited_ms: report.disks.as_ref().map_or(0.0, |disks| disks.limited_ms),
            mirrored_ms: None,
            error: (!is_completed).then(|| error.unwrap_or_else(|| "no reason".to_owned())),
            report: Some(report),
        }
    }

    fn by_qemu(migration_ms: f64, switchover_ms: f64, mirrored_ms: f64) -> Moved {
        Moved {
            migration_ms,
            switchover_ms: Some(switchover_ms),
            mirrored_ms: Some(mirrored_ms),
            ..Moved::default()
        }
    }
}

/// One move and what was measured beside it.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Run {
    #[serde(flatten)]
    pub(crate) moved: Moved,
    /// Bytes that the source's NIC sent, frames and all.
    pub(crate) wire_bytes: u64,
    /// Content of travelling disks and memory in use: what has to travel once.
    pub(crate) in_use_bytes: u64,
    /// The guest's longest write during the move, by its own clock.
    pub(crate) longest_write_ms: f64,
    /// Rate at which the guest wrote during the move.
    pub(crate) written_bytes_per_s: f64,
}

/// Contents of the JSON file.
#[derive(Debug, Serialize)]
struct Measured<'a> {
    parts: &'a [Part],
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    if let Some(Case::Clones(settings)) = &settings.case {
        return clones::run(settings);
    }
    let machine = Machine::ready()?;
    let mut parts = Vec::new();
    for rtt in &settings.rtt {
        measure_lab(settings, *rtt, &mut parts)?;
    }
    results::write(&settings.out, "storage", &machine, settings, &Measured { parts: &parts })?;
    let all_met = parts.iter().flat_map(|part| &part.goals).all(|goal| goal.met);
    Ok(all_met || !settings.check)
}

/// Measures all rates in one lab.
fn measure_lab(settings: &Settings, rtt: Rtt, parts: &mut Vec<Part>) -> Result<()> {
    let root = tempfile::Builder::new().prefix("godwit-storage-").tempdir_in("/var/tmp")?;
    let options = LabOptions {
        link: Some(settings.link),
        rtt,
        insecure: !settings.tls,
        ..LabOptions::default()
    };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let sizes = Sizes {
        virtual_bytes: settings.virtual_size.bytes(),
        base_bytes: settings.base.bytes(),
        used_bytes: settings.used.bytes(),
    };
    let folders = Folders::make(&root.path().join("godwit"), sizes)?;
    // Both directories at both hosts, so that the guest can also move without its disks.
    for host in trial.hosts() {
        allow_folders(&trial, &host, &[folders.at("a"), folders.at("b")])?;
    }
    let limit = Duration::from_secs(settings.limit_s);
    let subject = Subject::new(&trial, &plan("storage", 21), folders, limit)?;
    let accel = trial.vm("a", "storage")?.accel;
    println!("{}", describe(settings, rtt, &accel));
    let peer = if settings.ways.iter().any(|way| way.is_qemu()) {
        let folders = Folders::make(&root.path().join("peer"), sizes)?;
        Some(Peer::new(&trial, &plan("peer", 22), folders, limit)?)
    } else {
        None
    };
    let mut lab = Lab { settings, trial: &trial, subject, peer };
    for way in &settings.ways {
        lab.move_once(*way, 5).context("warming up")?;
    }
    for rate in &settings.rates {
        let part = lab.measure(*rate, rtt)?;
        print!("{}", table::render(&part));
        parts.push(part);
    }
    drop(lab);
    trial.finish()
}

fn describe(settings: &Settings, rtt: Rtt, accel: &str) -> String {
    let Settings { link, virtual_size, used, written, base, runs, .. } = settings;
    let memory = GuestPlan::new("");
    let tls = if settings.tls { "Godwit over TLS, QEMU in the clear" } else { "all in the clear" };
    format!(
        "settings  guest of {} MiB with {} in use, 1 vCPU by {accel}; two disks of {virtual_size}, \
         qcow2 on a base with {base} that both hosts have, and raw, each with {used} of random \
         content of its own, of which {written} are rewritten in pieces of 64 KiB at random, \
         O_DIRECT; link {link}, round trip {rtt}, {tls}; {runs} moves by each way; mirrors: NBD \
         to the destination's QEMU, max-bandwidth unlimited, downtime-limit as Godwit's budget, \
         one stream, sync=top for the overlay",
        memory.memory.iter().map(|size| size.bytes()).sum::<u64>() >> 20,
        memory.fill,
    )
}

/// Returns the plan of a guest, without its disks.
fn plan(name: &str, number: u8) -> GuestPlan {
    GuestPlan { number, ..GuestPlan::new(name) }
}

/// Makes folders the directories for VMs of a host.
fn allow_folders(trial: &Trial, host: &str, folders: &[PathBuf]) -> Result<()> {
    let names: Vec<String> = folders.iter().map(|path| path.display().to_string()).collect();
    trial.reconfigure(host, |config| drop(config.insert("vm_dirs".to_owned(), names.into())))
}

/// Lab with the guests of both ways.
struct Lab<'a> {
    settings: &'a Settings,
    trial: &'a Trial,
    subject: Subject<'a>,
    peer: Option<Peer<'a>>,
}

impl Lab<'_> {
    /// Measures all ways at one rate, then compares the images of one more move by each.
    fn measure(&mut self, rate_mib_s: u64, rtt: Rtt) -> Result<Part> {
        let ways = self.settings.ways.clone();
        let turns = schedule::turns(&vec![self.settings.runs; ways.len()]);
        let mut runs: Vec<Vec<Option<Run>>> = vec![Vec::new(); ways.len()];
        for (number, place) in turns.iter().enumerate() {
            let way = ways[*place];
            let run = self.move_once(way, rate_mib_s)?;
            let (name, all) = (way.name(), turns.len());
            match &run {
                Some(Run { moved, longest_write_ms, .. }) => eprintln!(
                    "  {}/{all} {name}: {:.0} ms, switchover {:.1} ms, longest write \
                     {longest_write_ms:.1} ms{}",
                    number + 1,
                    moved.migration_ms,
                    moved.switchover_ms.unwrap_or(f64::NAN),
                    moved.error.as_ref().map_or(String::new(), |why| format!(": {why}")),
                ),
                None => eprintln!("  {}/{all} {name}: the guest was lost", number + 1),
            }
            runs[*place].push(run);
        }
        let compared = ways.iter().filter(|way| **way != Way::WithoutDisks);
        let compared = compared.map(|way| self.compare(*way)).collect::<Result<Vec<Compared>>>()?;
        let figures: Vec<WayFigures> = ways
            .iter()
            .zip(runs)
            .map(|(way, runs)| WayFigures::new(*way, self.settings.link, runs))
            .collect();
        Ok(Part::new(rate_mib_s, rtt, figures, compared))
    }

    fn mover(&mut self, way: Way) -> Result<&mut dyn Mover> {
        if way.is_qemu() {
            let peer = self.peer.as_mut().context("no guest for QEMU's own ways")?;
            return Ok(peer);
        }
        Ok(&mut self.subject)
    }

    /// Moves the guest of a way once while it writes, and checks it. `None`: the guest was lost,
    /// and replaced.
    fn move_once(&mut self, way: Way, rate_mib_s: u64) -> Result<Option<Run>> {
        let (trial, written) = (self.trial, self.settings.written.bytes());
        let mover = self.mover(way)?;
        match turn(trial, mover, way, rate_mib_s << 20, written) {
            Ok(run) => Ok(Some(run)),
            Err(error) => {
                eprintln!("  {}: the guest is lost: {error:#}", way.name());
                mover.anew().context("a new guest")?;
                Ok(None)
            }
        }
    }

    /// Moves the guest of a way once while it does not write, and compares the images.
    fn compare(&mut self, way: Way) -> Result<Compared> {
        let mover = self.mover(way)?;
        mover.guest().write_disks(0, 0)?;
        let same = match mover.move_by(way) {
            Ok(Moved { error: Some(why), .. }) => Err(anyhow!("the move failed: {why}")),
            Ok(_) => mover.expect_same_images(),
            Err(error) => {
                mover.anew().context("a new guest")?;
                Err(error)
            }
        };
        let difference = same.err().map(|error| format!("{error:#}"));
        mover.remove_former()?;
        Ok(Compared { way: way.name(), difference })
    }
}

/// Moves a guest while it writes, then stops the writes and checks its disks and its memory.
fn turn(
    trial: &Trial,
    mover: &mut dyn Mover,
    way: Way,
    bytes_per_s: u64,
    region_bytes: u64,
) -> Result<Run> {
    let from = mover.guest().host.clone();
    mover.guest().write_disks(bytes_per_s, region_bytes)?;
    until("the guest has written for a second", LIMIT, || {
        let written = mover.guest().disk_figures()?.written_bytes;
        Ok((written >= bytes_per_s).then_some(()))
    })?;
    let memory = mover.guest().status()?.memory.context("the guest does not know its memory")?;
    let in_use_bytes =
        mover.travelling_bytes(way) + memory.total_bytes.saturating_sub(memory.free_bytes);
    // From here on the writes are measured.
    mover.guest().write_disks(bytes_per_s, region_bytes)?;
    let begun = Instant::now();
    let sent_bytes = trial.lane_sent_bytes(&from)?.iter().sum::<u64>();
    let moved = mover.move_by(way)?;
    let wire_bytes = trial.lane_sent_bytes(&from)?.iter().sum::<u64>().saturating_sub(sent_bytes);
    let figures = mover.guest().disk_figures()?;
    let seconds = begun.elapsed().as_secs_f64();
    mover.guest().write_disks(0, 0)?;
    mover.guest().verify_disks()?;
    mover.guest().verify()?;
    mover.remove_former()?;
    #[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
    let written_bytes_per_s = figures.written_bytes as f64 / seconds;
    let longest_write_ms = figures.longest_write_ms;
    Ok(Run { moved, wire_bytes, in_use_bytes, longest_write_ms, written_bytes_per_s })
}
