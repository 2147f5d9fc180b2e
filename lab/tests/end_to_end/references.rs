//! A guest that comes back finds its memory where it left it, and is the same guest all the same.

use anyhow::{Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::LabOptions;
use godwit_lab::trial::{Guest, GuestPlan, Trial, other_host};
use godwit_qemu::ByteSize;
use godwit_types::{EncodingName, ReferenceUse, Report};

use crate::{BUSY, check_report};

/// A guest whose pages no codec makes smaller.
fn plan(name: &str) -> GuestPlan {
    GuestPlan {
        memory: vec![ByteSize::from_mib(512)],
        fill: ByteSize::from_mib(320),
        mix: Some("zero=0,compressible=0".to_owned()),
        ..GuestPlan::new(name)
    }
}

fn move_and_check(trial: &Trial, guest: &mut Guest, references: ReferenceUse) -> Result<Report> {
    // On a busy machine that may take its time: it is done when nobody else wants the CPU.
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

fn told_pages(report: &Report) -> u64 {
    let told = report.encodings.iter().filter(|encoding| encoding.name == EncodingName::Reference);
    told.map(|encoding| encoding.pages).sum()
}

#[test]
fn the_way_back_is_short() -> Result<()> {
    let options = LabOptions { link: Some("1gbit".parse()?), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("references", options)? else { return Ok(()) };
    let mut guest = trial.guest("a", &plan("web"))?;
    let there = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(
        told_pages(&there) * 20 < there.guest_bytes >> 12,
        "there was nothing to tell it by: {there:#?}"
    );
    let back = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(
        back.wire_bytes * 10 < there.wire_bytes,
        "{} KiB of {}",
        back.wire_bytes >> 10,
        there.wire_bytes >> 10
    );
    // What the guest writes meanwhile is sent, and what it wrote since is found out.
    guest.workload(BUSY)?;
    let busy = move_and_check(&trial, &mut guest, ReferenceUse::All)?;
    ensure!(told_pages(&busy) > 0 && busy.wire_bytes < there.wire_bytes, "{busy:#?}");
    // Nothing is kept where nothing is to be: the way back is as long as the way there.
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
    let told = move_and_check(&trial, &mut second, ReferenceUse::All)?;
    ensure!(
        told.wire_bytes * 2 < sent.wire_bytes,
        "{} KiB of {}",
        told.wire_bytes >> 10,
        sent.wire_bytes >> 10
    );
    trial.expect_whole(&first)?;
    trial.finish()
}
