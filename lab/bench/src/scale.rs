//! Scale: what guests of 64 GiB to 1 TiB cost the engine, without such a guest. A migration is
//! played through with the engine's own state machine, policy, sweeps, board and sets of pages, on
//! a simulated clock with simulated writes and a simulated wire. The tracker's scans are measured
//! on real page tables of that size.

mod bend;
mod cost;
mod guest;
mod picture;
mod play;
mod print;
mod tables;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use godwit_lab::BitRate;
use godwit_migration::drive::simulation::Shared;
use godwit_migration::drive::tracks_by_faults;
use godwit_qemu::ByteSize;
use godwit_ram::{PAGE_SIZE, Region, ScanCores};
use godwit_types::TrackingUse;
use serde::Serialize;

use crate::faults::tracking;
use crate::figures::Spread;
use crate::footprint::status_bytes;
use crate::machine::Machine;
use crate::results::{self, as_text};
use crate::size::available_bytes;
use crate::svg;
use guest::{GuestPlan, WorkingSet};
use play::{Play, Played, WirePlan};
use tables::{TablePlan, TableTimes};

/// tmpfs for the sparse files, which are removed as soon as they are mapped.
const FOLDER: &str = "/dev/shm";
const ROUND_TRIP: Duration = Duration::from_micros(200);
/// Most data in a sparse file. The rest of a larger working set holds none.
const MOST_DATA_BYTES: u64 = 1 << 30;
/// Most runs on real page tables: each takes some seconds for 1 TiB.
const MOST_TABLE_RUNS: u32 = 3;
/// Memory that stays free beside what page tables and data take.
const RESERVE_BYTES: u64 = 1 << 30;
/// Bytes of memory for one byte of page tables.
const TABLE_RATIO: u64 = 512;
/// Time of a scan of a GiB where none is measured.
const ASSUMED_SCAN_A_GIB: Duration = Duration::from_millis(1);

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Sizes of the guest, ascending
    #[arg(
        long,
        value_name = "SIZE",
        value_delimiter = ',',
        default_values = ["64GiB", "128GiB", "256GiB", "512GiB", "1TiB"],
    )]
    #[serde(skip)]
    memory: Vec<ByteSize>,
    /// Runs for each size
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Memory that the guest writes to, in pieces of 2 MiB all over its memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    #[serde(serialize_with = "as_text")]
    working_set: ByteSize,
    /// Writes per second, each to a random page of that memory
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    dirty_pages_per_s: u32,
    /// Rate of the simulated wire
    #[arg(long, value_name = "RATE", default_value = "25gbit")]
    #[serde(serialize_with = "as_text")]
    link: BitRate,
    /// How dirty pages are found in the simulated migration: auto, faults or scans
    #[arg(long, value_name = "MEANS", default_value = "auto", value_parser = tracking)]
    tracking: TrackingUse,
    /// Threads that scan real page tables [default: as many as for a guest, all cores but one
    /// while it runs and all while it is paused]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    scan_threads: Option<u8>,
    /// Leave out the real page tables, which take 2 MiB of memory a GiB of the guest
    #[arg(long)]
    no_page_tables: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

/// Figures of one size.
#[derive(Debug, Serialize)]
struct Row {
    memory: String,
    gib: f64,
    by_faults: bool,
    /// Memory of the engine that grows with the guest, resident at its maximum in round 0.
    engine_bytes: u64,
    /// Time that the simulation takes for a scan of all memory.
    scan_ms: f64,
    runs: Vec<Played>,
    tables_by_faults: Option<TableTimes>,
    tables_by_scans: Option<TableTimes>,
}

impl Row {
    fn spread(&self, of: impl Fn(&Played) -> f64) -> Option<Spread> {
        Spread::of(self.runs.iter().map(of))
    }
}

/// Measures, prints, writes.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::inspect("qemu-system-x86_64".as_ref());
    print!("{machine}");
    println!(
        "settings  simulated guests of {:?}, {} random writes/s to {}; simulated wire of {}, round \
         trip {:.1} ms; {} runs; {} threads scan, {} in the pause",
        settings.memory.iter().map(ToString::to_string).collect::<Vec<_>>(),
        settings.dirty_pages_per_s,
        settings.working_set,
        settings.link,
        godwit_migration::millis(ROUND_TRIP),
        settings.runs,
        settings.scan_cores().running,
        settings.scan_cores().paused,
    );
    let mut engine_bytes = Vec::new();
    measure_memory(settings, &settings.memory, &mut engine_bytes)?;
    let mut rows = Vec::new();
    for (memory, engine_bytes) in settings.memory.iter().zip(engine_bytes) {
        rows.push(measure(settings, *memory, engine_bytes)?);
    }
    let curves = print::print(&rows);
    let picture = svg::write(&settings.out, "scale", &print::picture(&rows, &curves))?;
    println!("\ngrowth with the size: {}", picture.display());
    let measured = serde_json::json!({ "rows": rows, "curves": curves });
    results::write(&settings.out, "scale", &machine, settings, &measured)?;
    Ok(true)
}

impl Settings {
    fn guest(&self, memory: ByteSize, scan: Duration) -> GuestPlan {
        let memory_pages = memory.bytes() / PAGE_SIZE;
        GuestPlan {
            memory_pages,
            working_set: WorkingSet::new(memory_pages, self.working_set.bytes() / PAGE_SIZE),
            dirty_pages_per_s: self.dirty_pages_per_s.into(),
            by_faults: tracks_by_faults(self.tracking, memory.bytes()),
            scan,
        }
    }

    fn scan_cores(&self) -> ScanCores {
        let cores = ScanCores::of_this_machine();
        let threads = self.scan_threads.map(usize::from);
        let (running, paused) = (threads.unwrap_or(cores.running), threads.unwrap_or(cores.paused));
        ScanCores { running, paused, ..cores }
    }

    fn wire(&self) -> WirePlan {
        let bytes_per_s = self.link.bits_per_second() as f64 / 8.0;
        WirePlan { bytes_per_s, round_trip: ROUND_TRIP }
    }
}

/// Measures the engine's memory for each size. All sizes stay allocated to the end: memory that
/// was freed and is used again would not show.
fn measure_memory(settings: &Settings, sizes: &[ByteSize], found: &mut Vec<u64>) -> Result<()> {
    let Some((memory, larger)) = sizes.split_first() else { return Ok(()) };
    let shared = Shared::new(vec![Arc::new(sparse(*memory)?)]);
    let before = status_bytes("self", "RssAnon")?;
    let plan = settings.guest(*memory, assumed_scan(*memory));
    let mut play = Play::new(&shared, plan, settings.wire());
    let mut begun = Ok(0);
    play.play_first_round(|| begun = status_bytes("self", "RssAnon"))?;
    let most = begun?.max(status_bytes("self", "RssAnon")?);
    found.push(most.saturating_sub(before));
    measure_memory(settings, larger, found)
}

fn measure(settings: &Settings, memory: ByteSize, engine_bytes: u64) -> Result<Row> {
    let region = Arc::new(sparse(memory)?);
    let plan = settings.guest(memory, assumed_scan(memory));
    let tables = |by_faults| measure_tables(settings, &region, by_faults);
    let (by_faults, by_scans) = (tables(true)?, tables(false)?);
    let of_use = if plan.by_faults { &by_faults } else { &by_scans };
    let measured = of_use.as_ref().and_then(|times| times.clean_ms);
    let scan = measured.map_or(plan.scan, |ms| Duration::from_secs_f64(ms.median / 1e3));
    let plan = GuestPlan { scan, ..plan };
    let runs = (0..settings.runs).map(|_| {
        let shared = Shared::new(vec![Arc::clone(&region)]);
        Play::new(&shared, plan, settings.wire()).play(plan.memory_pages)
    });
    Ok(Row {
        memory: memory.to_string(),
        gib: memory.bytes() as f64 / f64::from(1 << 30),
        by_faults: plan.by_faults,
        engine_bytes,
        scan_ms: godwit_migration::millis(scan),
        runs: runs.collect::<Result<_>>()?,
        tables_by_faults: by_faults,
        tables_by_scans: by_scans,
    })
}

/// Measures the tracker on real page tables. Returns `None`, and prints the reason, if there is no
/// memory for them.
fn measure_tables(
    settings: &Settings,
    region: &Arc<Region>,
    by_faults: bool,
) -> Result<Option<TableTimes>> {
    if settings.no_page_tables {
        return Ok(None);
    }
    let data = settings.working_set.bytes().min(MOST_DATA_BYTES);
    let needed = region.size_bytes() / TABLE_RATIO + data + RESERVE_BYTES;
    if available_bytes()? < needed {
        println!("note      no page tables of {} bytes: too little memory", region.size_bytes());
        return Ok(None);
    }
    let working_set = WorkingSet::new(region.pages(), data / PAGE_SIZE);
    tables::populate(region, working_set)?;
    let socket = PathBuf::from(format!("{FOLDER}/godwit-bench-scale-{}.sock", std::process::id()));
    let runs = settings.runs.min(MOST_TABLE_RUNS);
    let plan = TablePlan { working_set, runs, by_faults, cores: settings.scan_cores() };
    let times = tables::measure(region, &socket, plan);
    Ok(Some(times.context("cannot track this process's own memory")?))
}

fn assumed_scan(memory: ByteSize) -> Duration {
    ASSUMED_SCAN_A_GIB.mul_f64(memory.bytes() as f64 / f64::from(1 << 30))
}

/// Maps a sparse file of that size, of which nothing is touched.
fn sparse(memory: ByteSize) -> Result<Region> {
    let name = format!("godwit-bench-scale-{}", std::process::id());
    let path = Path::new(FOLDER).join(name);
    let region = Region::create(&path, memory.bytes(), None)?;
    std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    Ok(region)
}
