//! Devices: an installed Debian with all kinds of devices moves back and forth, and QEMU traces how
//! long it writes and loads the state of each.

mod trace;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use godwit_lab::installed::{self, VM};
use godwit_lab::trial::Trial;
use godwit_qemu::Video;
use godwit_types::Report;
use serde::Serialize;

use crate::figures::Spread;
use crate::machine::Machine;
use crate::results::{self, as_text};
use crate::switchover::parse_video;
use trace::Times;

/// Sections that take less than this on each side share a row.
const SHOWN_MS: f64 = 0.1;
/// Name of that row.
const OTHERS: &str = "all others";

/// Program in the place of QEMU. The library of the memory's tracker is loaded into Perl too, and
/// takes itself out of the environment: it is put back for QEMU, with its descriptor kept open.
const WRAPPER: &str = r#"#!/usr/bin/perl
if ("@ARGV" =~ /guest=VM,/) {
  open my $environment, "<", "/proc/self/environ" or die;
  local $/ = "\0";
  while (<$environment>) {
    chomp;
    $ENV{$1} = $2 if /^(LD_PRELOAD|GODWIT_TRACKER_\w+)=(.*)$/s;
  }
  open our $listener, "<&=", $ENV{GODWIT_TRACKER_FD} or die;
  fcntl $listener, 2, 0 or die;  # F_SETFD
  push @ARGV, (map { ("-trace", $_) } qw(EVENTS)), "-msg", "timestamp=on", "-D", "TRACES/$$";
}
exec "qemu-system-x86_64", @ARGV;
"#;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Moves of the guest
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// The guest's screen: vga or virtio
    #[arg(long, value_name = "VIDEO", value_parser = parse_video, default_value = "vga")]
    #[serde(serialize_with = "as_text")]
    video: Video,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

/// Figures of one device, or of several that take little time.
#[derive(Debug, Serialize)]
struct Row {
    device: String,
    saved_ms: Option<Spread>,
    loaded_ms: Option<Spread>,
}

/// Contents of the JSON file.
#[derive(Debug, Serialize)]
struct Measured {
    rows: Vec<Row>,
    reports: Vec<Report>,
}

/// Measures, prints, writes.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let Settings { runs, video, .. } = settings;
    println!("settings  installed Debian with all devices, video {video}, TLS; {runs} moves");
    let folder = tempfile::Builder::new().prefix("godwit-devices-").tempdir_in("/var/tmp")?;
    let traces = folder.path().join("traces");
    let wrapper = wrap_qemu(folder.path(), &traces)?;
    let trial = Trial::begin("bench")?.context("cannot start a lab here")?;
    for host in trial.hosts() {
        let path = wrapper.to_str().context("the path is not UTF-8")?.to_owned();
        trial.reconfigure(&host, |config| drop(config.insert("qemu".to_owned(), path.into())))?;
    }
    installed::boot(&trial, folder.path(), *video)?;
    let (mut host, mut reports) = ("a".to_owned(), Vec::new());
    for _ in 0..*runs {
        let report = installed::move_on(&trial, &host)?;
        host.clone_from(&report.to);
        reports.push(report);
    }
    trial.delete(&host, VM)?;
    trial.finish()?;
    let mut times = BTreeMap::new();
    for entry in fs::read_dir(&traces)? {
        trace::add(&String::from_utf8_lossy(&fs::read(entry?.path())?), &mut times);
    }
    let rows = rows(&times);
    print_rows(&rows);
    print!("{}", installed::describe_pauses(&reports));
    results::write(&settings.out, "devices", &machine, settings, &Measured { rows, reports })?;
    Ok(true)
}

/// Writes a program that runs QEMU with a trace, a file for each process. QEMU's own user writes
/// these files.
fn wrap_qemu(folder: &Path, traces: &Path) -> Result<PathBuf> {
    fs::create_dir(traces)?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    fs::set_permissions(traces, fs::Permissions::from_mode(0o1777))?;
    let events = trace::EVENTS.join(" ");
    let path = folder.join("qemu");
    let text = WRAPPER
        .replace("VM", VM)
        .replace("EVENTS", &events)
        .replace("TRACES", &traces.to_string_lossy());
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// Returns the rows, those that take longest first.
fn rows(times: &BTreeMap<String, Times>) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut others = Times::default();
    for (name, times) in times {
        let is_long = |times: &Vec<f64>| {
            Spread::of(times.iter().copied()).is_some_and(|spread| spread.median >= SHOWN_MS)
        };
        if is_long(&times.saved_ms) || is_long(&times.loaded_ms) {
            rows.push(Row::new(name, times));
        } else {
            add_each(&mut others.saved_ms, &times.saved_ms);
            add_each(&mut others.loaded_ms, &times.loaded_ms);
        }
    }
    let sum_ms = |row: &Row| {
        [row.saved_ms, row.loaded_ms].iter().flatten().map(|spread| spread.median).sum::<f64>()
    };
    rows.sort_by(|a, b| sum_ms(b).total_cmp(&sum_ms(a)));
    rows.push(Row::new(OTHERS, &others));
    rows
}

/// Adds the times of each move.
fn add_each(sums: &mut Vec<f64>, times: &[f64]) {
    if sums.len() < times.len() {
        sums.resize(times.len(), 0.0);
    }
    sums.iter_mut().zip(times).for_each(|(sum, time)| *sum += time);
}

impl Row {
    fn new(device: &str, times: &Times) -> Row {
        let spread = |times: &[f64]| Spread::of(times.iter().copied());
        let (saved_ms, loaded_ms) = (spread(&times.saved_ms), spread(&times.loaded_ms));
        Row { device: device.to_owned(), saved_ms, loaded_ms }
    }
}

fn print_rows(rows: &[Row]) {
    println!("\n{:<44} {:>18} {:>18}", "section", "saved ms", "loaded ms");
    let text = |spread: &Option<Spread>| {
        spread.map_or_else(
            || "-".to_owned(),
            |of| format!("{:.2} ({:.2}-{:.2})", of.median, of.min, of.max),
        )
    };
    for Row { device, saved_ms, loaded_ms } in rows {
        println!("{device:<44} {:>18} {:>18}", text(saved_ms), text(loaded_ms));
    }
}
