//! Storage: a guest moves with its disks, which it writes all the time: by Godwit, and by QEMU's
//! own mirror and migration, the ways taking turns over one link.

mod clones;
mod content;
mod images;
mod kept;
mod peer;
mod subject;
mod table;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, Subcommand, ValueEnum};
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_lab::{BitRate, LabOptions, Rtt};
use godwit_qemu::ByteSize;
use godwit_types::{Outcome, Report};
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::results::{Output, as_text};
use crate::schedule;
use content::{BLOCK_BYTES, Content, FOLDERS, FileContent};
use images::{Folders, Sizes};
use kept::{Compared, Place, Record};
use peer::Peer;
use subject::Subject;
use table::{Held, Part, WayFigures};

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
    /// What the disks hold, apart from what the guest rewrites
    #[arg(long, value_name = "KIND", default_value = "files")]
    content: Content,
    /// Content of each disk, without the base of the first
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    used: ByteSize,
    /// Random part of that content on each disk, pieces of which the guest rewrites
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
    /// File of a run that was stopped: its moves are not repeated, and the others are added to it.
    /// The remaining options must be those of that run
    #[arg(long = "continue", value_name = "FILE")]
    continued: Option<PathBuf>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) moved: Moved,
    /// Bytes that the source's NIC sent, frames and all.
    pub(crate) wire_bytes: u64,
    /// Content of travelling disks and memory in use, without compression: what has to travel once.
    pub(crate) in_use_bytes: u64,
    /// The guest's longest write during the move, by its own clock.
    pub(crate) longest_write_ms: f64,
    /// Rate at which the guest wrote during the move.
    pub(crate) written_bytes_per_s: f64,
}

/// Contents of the JSON file.
#[derive(Debug, Serialize)]
struct Measured<'a> {
    #[serde(flatten)]
    record: &'a Record,
    parts: &'a [Part],
}

/// Results so far, in a file that is replaced after each move.
struct Book<'a> {
    output: Output<'a, Settings>,
    held: Held,
    record: Record,
    parts: Vec<Part>,
}

impl Book<'_> {
    fn save(&self) -> Result<()> {
        self.output.save(&Measured { record: &self.record, parts: &self.parts })
    }

    /// Prints and keeps the figures of a rate.
    fn end_part(&mut self, settings: &Settings, place: Place) -> Result<()> {
        let figures =
            |way: &Way| WayFigures::new(*way, settings.link, self.record.runs(place, *way));
        let ways: Vec<WayFigures> = settings.ways.iter().map(figures).collect();
        let part = Part::new(place, self.held, ways, self.record.comparisons(place));
        print!("{}", table::render(&part));
        self.parts.push(part);
        self.save()
    }
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    if let Some(Case::Clones(settings)) = &settings.case {
        return clones::run(settings);
    }
    let record = match &settings.continued {
        Some(file) => Record::read(file, settings)?,
        None => Record::default(),
    };
    let machine = Machine::ready()?;
    let folder = tempfile::Builder::new().prefix("godwit-content-").tempdir_in("/var/tmp")?;
    let content = settings.write_content(&folder.path().join("content.raw"))?.map(Rc::new);
    let zstd_ratio = content.as_ref().map(|content| content.zstd_ratio);
    let held = Held { content: settings.content, zstd_ratio };
    let mut output = Output::new(&settings.out, "storage", &machine, settings)?;
    if let Some(path) = &settings.continued {
        output = output.with_path(path.clone());
    }
    let mut book = Book { output, held, record, parts: Vec::new() };
    for rtt in &settings.rtt {
        if settings.is_measured(*rtt, &book.record) {
            for rate_mib_s in &settings.rates {
                book.end_part(settings, Place { rtt: *rtt, rate_mib_s: *rate_mib_s })?;
            }
        } else {
            measure_lab(settings, *rtt, content.as_ref(), &mut book)?;
        }
    }
    print!("{}", table::summary(&book.parts));
    book.output.print_path();
    let all_met = book.parts.iter().flat_map(|part| &part.goals).all(|goal| goal.met);
    Ok(all_met || !settings.check)
}

impl Settings {
    /// Writes the files that the disks hold, if they hold files.
    fn write_content(&self, path: &Path) -> Result<Option<FileContent>> {
        if self.content == Content::Random {
            return Ok(None);
        }
        let sizes = [self.base, self.used, self.written].map(ByteSize::bytes);
        let [_, used, written] = sizes;
        ensure!(
            sizes.iter().all(|bytes| bytes.is_multiple_of(BLOCK_BYTES as u64)) && written < used,
            "disks with files need `--base`, `--used` and `--written` in multiples of 64 KiB, and \
             `--written` below `--used`"
        );
        FileContent::write(path, &FOLDERS, 2, used - written).map(Some)
    }

    /// Ways whose images can be compared.
    fn compared_ways(&self) -> impl Iterator<Item = Way> {
        self.ways.iter().copied().filter(|way| *way != Way::WithoutDisks)
    }

    /// Returns whether nothing is left to do on a link.
    fn is_measured(&self, rtt: Rtt, record: &Record) -> bool {
        self.rates.iter().all(|rate_mib_s| {
            let place = Place { rtt, rate_mib_s: *rate_mib_s };
            let has_runs =
                |way: &Way| (1..=self.runs).all(|round| record.has_run(place, *way, round));
            self.ways.iter().all(has_runs)
                && self.compared_ways().all(|way| record.has_comparison(place, way))
        })
    }
}

/// Measures all rates in one lab.
fn measure_lab(
    settings: &Settings,
    rtt: Rtt,
    content: Option<&Rc<FileContent>>,
    book: &mut Book<'_>,
) -> Result<()> {
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
    let folders = Folders::make(&root.path().join("godwit"), sizes, content.cloned())?;
    // Both directories at both hosts, so that the guest can also move without its disks.
    for host in trial.hosts() {
        allow_folders(&trial, &host, &[folders.at("a"), folders.at("b")])?;
    }
    let limit = Duration::from_secs(settings.limit_s);
    let subject = Subject::new(&trial, &plan("storage", 21), folders, limit)?;
    let accel = trial.vm("a", "storage")?.accel;
    println!("{}", describe(settings, rtt, &accel, book.held));
    let peer = if settings.ways.iter().any(|way| way.is_qemu()) {
        let folders = Folders::make(&root.path().join("peer"), sizes, content.cloned())?;
        Some(Peer::new(&trial, &plan("peer", 22), folders, limit)?)
    } else {
        None
    };
    let mut lab = Lab { settings, trial: &trial, subject, peer };
    for way in &settings.ways {
        lab.move_once(*way, 5).context("warming up")?;
    }
    for rate_mib_s in &settings.rates {
        let place = Place { rtt, rate_mib_s: *rate_mib_s };
        lab.measure(place, book)?;
        book.end_part(settings, place)?;
    }
    drop(lab);
    trial.finish()
}

fn describe(settings: &Settings, rtt: Rtt, accel: &str, held: Held) -> String {
    let Settings { link, virtual_size, used, written, base, runs, .. } = settings;
    let memory = GuestPlan::new("");
    let tls = if settings.tls { "Godwit over TLS, QEMU in the clear" } else { "all in the clear" };
    format!(
        "settings  guest of {} MiB with {} in use, 1 vCPU by {accel}; two disks of {virtual_size}, \
         qcow2 on a base with {base} that both hosts have, and raw, each with {used} of its own \
         ({}), of which {written} are random and rewritten in pieces of 64 KiB at random, \
         O_DIRECT; link {link}, round trip {rtt}, {tls}; {runs} moves by each way; mirrors: NBD \
         to the destination's QEMU, max-bandwidth unlimited, downtime-limit as Godwit's budget, \
         one stream, sync=top for the overlay",
        memory.memory.iter().map(|size| size.bytes()).sum::<u64>() >> 20,
        memory.fill,
        held.describe(),
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
    /// Measures all ways at one rate, then compares the images of one more move by each, without
    /// what the book has.
    fn measure(&mut self, place: Place, book: &mut Book<'_>) -> Result<()> {
        let settings = self.settings;
        let ways = &settings.ways;
        let turns = schedule::turns(&vec![settings.runs; ways.len()]);
        let mut rounds = vec![0; ways.len()];
        for (number, turn) in turns.iter().enumerate() {
            let way = ways[*turn];
            rounds[*turn] += 1;
            let round = rounds[*turn];
            if book.record.has_run(place, way, round) {
                continue;
            }
            let run = self.move_once(way, place.rate_mib_s)?;
            eprintln!("  {}/{} {}", number + 1, turns.len(), describe_run(way, run.as_ref()));
            book.record.add_run(place, way, round, run);
            book.save()?;
        }
        for way in settings.compared_ways() {
            if !book.record.has_comparison(place, way) {
                book.record.add_comparison(place, self.compare(way)?);
                book.save()?;
            }
        }
        Ok(())
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
        Ok(Compared { way, difference })
    }
}

fn describe_run(way: Way, run: Option<&Run>) -> String {
    let name = way.name();
    let Some(Run { moved, longest_write_ms, .. }) = run else {
        return format!("{name}: the guest was lost");
    };
    format!(
        "{name}: {:.0} ms, switchover {:.1} ms, longest write {longest_write_ms:.1} ms{}",
        moved.migration_ms,
        moved.switchover_ms.unwrap_or(f64::NAN),
        moved.error.as_ref().map_or(String::new(), |why| format!(": {why}")),
    )
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
