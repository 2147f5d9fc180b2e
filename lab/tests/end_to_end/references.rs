//! References: a returning guest finds its memory at the host that it left, in memory and on a
//! disk, and a guest finds there what it has read from its disk.

use std::fs::File;
use std::time::Duration;

use anyhow::{Result, ensure};
use godwit_api::{MigrationRequest, ReferencesInfo};
use godwit_lab::trial::{Guest, GuestPlan, Trial, other_host, until};
use godwit_lab::{Hooks, LabOptions};
use godwit_qemu::{ByteSize, Disk, DiskFormat};
use godwit_types::{EncodingName, ReferenceUse, Report};

use crate::{BUSY, check_report};

/// Plans a guest with incompressible pages.
fn plan(name: &str) -> GuestPlan {
    GuestPlan {
        memory: vec![ByteSize::from_mib(512)],
        fill: ByteSize::from_mib(320),
        mix: Some("zero=0,compressible=0".to_owned()),
        ..GuestPlan::new(name)
    }
}

fn move_and_check(trial: &Trial, guest: &mut Guest, references: ReferenceUse) -> Result<Report> {
    // This may take long on a busy machine, because the digests are made only while the CPU is
    // idle.
    trial.wait_digested(other_host(&guest.host))?;
    let request = MigrationRequest { references, ..guest.to_other_host() };
    let report = trial.move_guest(guest, &request)?.report;
    check_report(&report)?;
    trial.expect_whole(guest)?;
    eprintln!(
        "  {} to {} by {references:?}: {:.0} ms, {} KiB, {:?}, {} missing",
        report.from,
        report.to,
        report.migration_time_ms,
        report.wire_bytes >> 10,
        report.encodings,
        report.missing_pages
    );
    Ok(report)
}

fn referenced_pages(report: &Report) -> u64 {
    let encodings = report.encodings.iter();
    let references = encodings.filter(|encoding| encoding.name == EncodingName::Reference);
    references.map(|encoding| encoding.pages).sum()
}

#[test]
fn the_way_back_is_short() -> Result<()> {
    let options = LabOptions { link: Some("1gbit".parse()?), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("references", options)? else { return Ok(()) };
    let mut guest = trial.guest("a", &plan("web"))?;
    let there = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(
        referenced_pages(&there) * 20 < there.guest_bytes >> 12,
        "pages were sent by reference on the first move: {there:#?}"
    );
    let back = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(
        back.wire_bytes * 10 < there.wire_bytes,
        "{} KiB of {}",
        back.wire_bytes >> 10,
        there.wire_bytes >> 10
    );
    // Pages written during the move are sent, and pages written since the last move are found.
    guest.workload(BUSY)?;
    let busy = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(referenced_pages(&busy) > 0 && busy.wire_bytes < there.wire_bytes, "{busy:#?}");
    // Without kept memory the way back is as long as the way there.
    guest.workload("idle")?;
    move_and_check(&trial, &mut guest, ReferenceUse::None)?;
    let after_none = move_and_check(&trial, &mut guest, ReferenceUse::Own)?;
    ensure!(after_none.wire_bytes * 2 > there.wire_bytes, "{after_none:#?}");
    trial.finish()
}

#[test]
fn a_second_guest_finds_the_first_ones_memory() -> Result<()> {
    let options = LabOptions { link: Some("1gbit".parse()?), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("clones", options)? else { return Ok(()) };
    let mut first = trial.clone_guest("a", &plan("web"))?;
    let mut second = trial.clone_guest("a", &GuestPlan { number: 22, ..plan("api") })?;
    let sent = move_and_check(&trial, &mut first, ReferenceUse::All)?;
    let referenced = move_and_check(&trial, &mut second, ReferenceUse::All)?;
    ensure!(
        referenced.wire_bytes * 2 < sent.wire_bytes,
        "{} KiB of {}",
        referenced.wire_bytes >> 10,
        sent.wire_bytes >> 10
    );
    trial.expect_whole(&first)?;
    trial.finish()
}

/// Returns a trial whose agents have these settings for references.
fn begin(name: &str, settings: &str) -> Result<Option<Trial>> {
    let hooks = Hooks { settings: format!("[references]\n{settings}\n"), ..Hooks::default() };
    let link = Some("1gbit".parse()?);
    Trial::begin_with(name, LabOptions { link, hooks, ..LabOptions::default() })
}

/// Time limit for work of the lowest priority.
const LIMIT: Duration = Duration::from_secs(120);

fn small(name: &str) -> GuestPlan {
    GuestPlan { memory: vec![ByteSize::from_mib(256)], fill: ByteSize::from_mib(128), ..plan(name) }
}

/// The part of a guest's memory that an image of its disk holds, too. That a guest has read it from
/// there makes no difference.
#[test]
fn pages_of_a_disk_are_taken_from_the_disk() -> Result<()> {
    let Some(trial) = begin("disk-pages", "base_memory = \"none\"")? else { return Ok(()) };
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let path = folder.path().join("disk.img");
    File::create(&path)?.set_len(256 << 20)?;
    let disks = vec![Disk::new(&path, DiskFormat::Raw).readonly()];
    let mut guest = trial.guest("a", &GuestPlan { disks, ..small("web") })?;
    let ram = trial.paths().host("a").join("ram/web.0.ram");
    std::io::copy(&mut File::open(ram)?, &mut File::options().write(true).open(&path)?)?;
    let there = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    until_references(&trial, "a", |known| known.disk_pages >= 190 << 8)?;
    let back = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(back.referenced.disk > 100 << 8 && back.referenced.memory == 0, "{back:#?}");
    ensure!(
        back.wire_bytes * 3 < there.guest_bytes / 2,
        "{} KiB of {}",
        back.wire_bytes >> 10,
        there.guest_bytes >> 10
    );
    // Somebody writes to the disk: its pages are sent.
    std::fs::write(&path, vec![7; 256 << 20])?;
    let changed = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(changed.wire_bytes > 100 << 20 && changed.wire_bytes > back.wire_bytes, "{changed:#?}");
    trial.finish()
}

#[test]
fn what_does_not_fit_in_memory_is_found_on_a_disk() -> Result<()> {
    let disk = tempfile::tempdir_in("/var/tmp")?;
    let room = rustix::fs::statvfs(disk.path())?;
    let free_blocks = room.f_bavail.saturating_sub(room.f_blocks / 10);
    if free_blocks.saturating_mul(room.f_frsize) < 512 << 20 {
        eprintln!("skipped: spilled-pages: the disk of /var/tmp is nearly full");
        return Ok(());
    }
    let dir = disk.path().display();
    let settings = format!("base_memory = \"32MiB\"\nspill_size = \"1GiB\"\nspill_dir = \"{dir}\"");
    let Some(trial) = begin("spilled-pages", &settings)? else { return Ok(()) };
    let mut guest = trial.guest("a", &small("web"))?;
    let there = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    // A guest that returns while pages are still being moved finds only those that have been.
    until_references(&trial, "a", |known| {
        known.spilled_bytes >= 90 << 20 && known.base_bytes <= 32 << 20
    })?;
    let back = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(back.referenced.spilled > 80 << 8 && back.referenced.memory > 0, "{back:#?}");
    // Not fewer: a stream sends pages itself while the disk is slower than the wire, as it is on a
    // busy machine.
    ensure!(
        back.wire_bytes * 3 < there.wire_bytes,
        "{} KiB of {}",
        back.wire_bytes >> 10,
        there.wire_bytes >> 10
    );
    trial.finish()
}

fn until_references(
    trial: &Trial,
    host: &str,
    is_so: impl Fn(&ReferencesInfo) -> bool,
) -> Result<()> {
    until(&format!("host {host} knows what it offers"), LIMIT, || {
        let known = trial.ask(trial.agent(host).host())?.references;
        Ok(is_so(&known).then_some(()))
    })
}
