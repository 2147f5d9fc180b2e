//! Clones of one base move to a host that has the base: only what is each clone's own travels.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use godwit_api::TravellingDisks;
use godwit_lab::trial::{Guest, GuestPlan, Trial, write_base};
use godwit_lab::{BitRate, LabOptions};
use godwit_qemu::{ByteSize, Disk, DiskFormat};
use godwit_types::{DisksReport, Outcome, Report};
use serde::Serialize;

use crate::machine::Machine;
use crate::results;
use crate::results::as_text;
use crate::switchover::ODD_BYTES;

/// Most bytes on the wire, as a share of the disks' virtual sizes, in percent.
const GOAL_PERCENT: f64 = 10.0;
/// First of the address numbers that the lab has for guests.
const FIRST_NUMBER: u8 = 21;
/// Memory of a clone, in MiB: enough for the guest's kernel.
const MEMORY_MIB: u64 = 160;
/// Time limit of a move.
const LIMIT: Duration = Duration::from_secs(600);

/// Options of the case.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct Settings {
    /// Number of clones
    #[arg(
        long,
        value_name = "N",
        default_value_t = 12,
        value_parser = clap::value_parser!(u8).range(1..=70),
    )]
    clones: u8,
    /// Size of each disk that the guest sees
    #[arg(long = "virtual", value_name = "SIZE", default_value = "1GiB")]
    #[serde(serialize_with = "as_text")]
    virtual_size: ByteSize,
    /// Content of the base, which both hosts have
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    base: ByteSize,
    /// Content of each clone's own
    #[arg(long, value_name = "SIZE", default_value = "32MiB")]
    #[serde(serialize_with = "as_text")]
    own: ByteSize,
    /// Rate of the migration network's links
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    link: BitRate,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if the goal is missed
    #[arg(long)]
    check: bool,
}

/// Contents of the JSON file.
#[derive(Debug, Serialize)]
struct Measured {
    /// Size of all disks that the guests see.
    virtual_bytes: u64,
    /// Bytes that the disks' streams carried.
    disk_wire_bytes: u64,
    /// Bytes that the source's NIC sent, the memory's and all frames included.
    nic_bytes: u64,
    percent: f64,
    goal_percent: f64,
    met: bool,
    reports: Vec<Report>,
}

/// Measures, prints, writes. Returns false if the goal was missed and goals are checked.
pub(super) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let Settings { clones, virtual_size, base, own, link, .. } = settings;
    println!(
        "settings  {clones} clones of {MEMORY_MIB} MiB, each with a disk of {virtual_size} on one \
         base of {base}, {own} of its own; link {link}, TLS; one move after the other"
    );
    let root = tempfile::Builder::new().prefix("godwit-clones-").tempdir_in("/var/tmp")?;
    let options = LabOptions { link: Some(*link), ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let folders = ["a", "b"].map(|name| root.path().join(name));
    for folder in &folders {
        std::fs::create_dir(folder)?;
        write_base(&folder.join("base.raw"), 0, base.bytes(), base.bytes())?;
    }
    for (host, folder) in ["a", "b"].into_iter().zip(&folders) {
        super::allow_folders(&trial, host, std::slice::from_ref(folder))?;
    }
    let mut guests = boot(settings, &trial, &folders[0])?;
    let sent = |trial: &Trial| Ok::<u64, anyhow::Error>(trial.lane_sent_bytes("a")?.iter().sum());
    let before = sent(&trial)?;
    let reports: Vec<Report> = guests
        .iter_mut()
        .map(|guest| move_one(&trial, guest, &folders[1]))
        .collect::<Result<_>>()?;
    let nic_bytes = sent(&trial)?.saturating_sub(before);
    for guest in &guests {
        guest.verify_disks().with_context(|| guest.name.clone())?;
        trial.expect_whole(guest)?;
    }
    trial.finish()?;
    let disks: Vec<&DisksReport> =
        reports.iter().filter_map(|report| report.disks.as_ref()).collect();
    let measured = Measured::new(&disks, nic_bytes, reports.clone());
    print!("{}", render(&measured, usize::from(*clones)));
    let met = measured.met;
    results::write(&settings.out, "storage-clones", &machine, settings, &measured)?;
    Ok(met || !settings.check)
}

impl Measured {
    fn new(disks: &[&DisksReport], nic_bytes: u64, reports: Vec<Report>) -> Measured {
        let of_disks = disks.iter().flat_map(|report| &report.disks);
        let virtual_bytes = of_disks.map(|disk| disk.virtual_bytes).sum::<u64>();
        let disk_wire_bytes = disks.iter().map(|report| report.wire_bytes).sum::<u64>();
        #[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
        let percent = disk_wire_bytes as f64 * 100.0 / virtual_bytes.max(1) as f64;
        let met = virtual_bytes > 0 && percent <= GOAL_PERCENT;
        let goal_percent = GOAL_PERCENT;
        Measured { virtual_bytes, disk_wire_bytes, nic_bytes, percent, goal_percent, met, reports }
    }
}

/// Boots the clones at host a, each with content of its own on the base.
fn boot(settings: &Settings, trial: &Trial, folder: &Path) -> Result<Vec<Guest>> {
    let plan = |clone: u8| -> Result<GuestPlan> {
        let path = folder.join(format!("clone-{clone}.qcow2"));
        let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw"];
        let size = settings.virtual_size.bytes().to_string();
        let made = Command::new("qemu-img").args(create).arg(&path).arg(size).status()?;
        ensure!(made.success(), "qemu-img create failed");
        Ok(GuestPlan {
            number: FIRST_NUMBER + clone,
            memory: vec![ByteSize::from_bytes((MEMORY_MIB << 20) + ODD_BYTES)],
            fill: ByteSize::from_mib(8),
            disks: vec![Disk::new(path, DiskFormat::Qcow2)],
            boot_limit: LIMIT,
            ..GuestPlan::new(&format!("clone-{clone}"))
        })
    };
    let plans = (0..settings.clones).map(plan).collect::<Result<Vec<GuestPlan>>>()?;
    let guests = trial.guests("a", &plans)?;
    let bytes = settings.base.bytes() + settings.own.bytes();
    for guest in &guests {
        guest.fill_disks(&[("vda", bytes)]).with_context(|| guest.name.clone())?;
    }
    Ok(guests)
}

/// Moves a clone with its disk.
fn move_one(trial: &Trial, guest: &mut Guest, to: &Path) -> Result<Report> {
    let mut request = guest.to_other_host();
    request.disks = Some(TravellingDisks { to: Some(to.to_owned()), ..TravellingDisks::default() });
    let migration = trial.begin_migration(&guest.name, &guest.host, &request)?;
    let report = migration.report_within(LIMIT, |_| {})?;
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    let disks = report.disks.as_ref().context("the report has no disks")?;
    ensure!(disks.disks.iter().all(|disk| disk.base_was_there), "the base travelled: {disks:?}");
    guest.host.clone_from(&request.to);
    eprintln!("  {}: {:.0} ms", guest.name, report.migration_time_ms);
    Ok(report)
}

fn render(measured: &Measured, clones: usize) -> String {
    let Measured { virtual_bytes, disk_wire_bytes, nic_bytes, percent, met, .. } = measured;
    let verdict = if *met { "pass" } else { "FAIL" };
    format!(
        "\n{clones} clones with disks of {} MiB in all: {} MiB on the wire for the disks, {} MiB \
         with memory and frames\n  {verdict}  {percent:.1} % of their virtual bytes, at most \
         {GOAL_PERCENT:.0} %\n",
        virtual_bytes >> 20,
        disk_wire_bytes >> 20,
        nic_bytes >> 20,
    )
}

#[cfg(test)]
mod tests {
    use godwit_types::DiskReport;

    use super::*;

    #[test]
    fn the_share_of_the_virtual_bytes_is_judged() {
        let of = |virtual_bytes, wire_bytes| DisksReport {
            disks: vec![DiskReport { virtual_bytes, ..DiskReport::default() }],
            wire_bytes,
            ..DisksReport::default()
        };
        let (one, other) = (of(1 << 30, 50 << 20), of(1 << 30, 100 << 20));
        let good = Measured::new(&[&one, &other], 1 << 30, Vec::new());
        assert!(good.met && (7.0..8.0).contains(&good.percent), "{good:?}");
        assert!(render(&good, 2).contains("pass  7.3 %"), "{}", render(&good, 2));
        assert!(!Measured::new(&[&of(1 << 30, 200 << 20)], 0, Vec::new()).met);
        // Nothing measured is no success.
        assert!(!Measured::new(&[], 0, Vec::new()).met);
    }
}
