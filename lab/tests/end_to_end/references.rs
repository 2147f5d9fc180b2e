//! References: a returning guest finds its memory at the host that it left.

use anyhow::{Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::LabOptions;
use godwit_lab::trial::{Guest, GuestPlan, Trial, other_host};
use godwit_qemu::ByteSize;
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
