//! A bare QEMU's guest that is adopted onto another host in one step, and what undoes that: too
//! little memory, a cut link, a destination's QEMU that runs out of memory, agents that die.

use anyhow::{Context, Result, ensure};
use godwit_api::{AdoptGuest, Adoption, AdoptionState};
use godwit_lab::faults::MemoryGroup;
use godwit_lab::image;
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Traces, Trial, until};
use godwit_qemu::ByteSize;
use rustix::process::Signal;

use super::{BareQemu, ended, expect_where_it_was, holds};
use crate::drives::expect_blocks;

/// Memory that a QEMU may take beside what it has: less than its guest has in use.
const LITTLE_BYTES: u64 = 16 << 20;

fn onto(qemu: &BareQemu, host: &str) -> AdoptGuest {
    AdoptGuest { to: Some(host.to_owned()), ..qemu.request() }
}

/// Checks that the guest runs where it was and that nothing of it is on either host.
fn expect_undone(trial: &Trial, guest: &Guest, clean: &Traces) -> Result<()> {
    expect_where_it_was(trial, guest, &guest.name)?;
    trial.expect_traces("b", clean)
}

/// Checks that an adoption failed, for a reason that names `what`.
fn expect_failed(adoption: &Adoption, what: &str) -> Result<()> {
    let why = adoption.error.as_ref().map_or("", |error| error.message.as_str());
    ensure!(adoption.state == AdoptionState::Failed && why.contains(what), "{adoption:#?}");
    eprintln!("  refused: {why}");
    Ok(())
}

#[test]
fn a_bare_qemu_is_adopted_onto_another_host() -> Result<()> {
    let Some(trial) = Trial::begin_with("adoption-onto-host", holds())? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let plan = GuestPlan {
        workload: crate::BUSY.to_owned(),
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new("foreign")
    };
    let mut qemu = BareQemu::boot(&trial, &plan)?;
    let mut guest = trial.guest_elsewhere("a", &plan);
    expect_no_room(&trial, &plan)?;
    guest.wait_ready(plan.boot_limit)?;
    let agent = trial.agent("a");
    let found = trial.ask(agent.check_adoption(&onto(&qemu, "b")))?;
    ensure!(found.findings.is_empty(), "{found:#?}");
    for (host, why) in [("a", "is on that host"), ("z", "does not know")] {
        let found = trial.ask(agent.check_adoption(&onto(&qemu, host)))?.findings;
        ensure!(found.iter().any(|finding| finding.message.contains(why)), "{found:#?}");
    }

    undone_with_its_link(&trial, &onto(&qemu, "b"), &guest, &clean)?;
    undone_with_its_memory(&trial, &onto(&qemu, "b"), &guest, &clean)?;
    undone_with_its_agent(&trial, &qemu, &guest, &clean)?;

    // The agent there dies when the guest runs, before it has said so.
    let held = trial.hold("b", "host.promote")?;
    let begun = trial.ask(agent.adopt(&onto(&qemu, "b")))?;
    held.reached(LIMIT)?;
    trial.end_agent("b", Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    let adoption = ended(&trial, &begun.id)?;
    ensure!(adoption.state == AdoptionState::Completed, "{adoption:#?}");
    until("the other QEMU ends", LIMIT, || Ok((!qemu.lives()?).then_some(())))?;
    guest.host = "b".to_owned();
    trial.expect_whole(&guest)?;
    ensure!(trial.vm("b", "foreign")?.spec.topology.is_some(), "it has lost its devices");
    ensure!(trial.vm("a", "foreign").is_err(), "host a has it, too");
    trial.delete("b", "foreign")?;
    expect_blocks(&qemu.disk)?;
    trial.finish()
}

/// A guest with all of the machine's memory is refused by either host. It never runs.
fn expect_no_room(trial: &Trial, plan: &GuestPlan) -> Result<()> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let total = total.and_then(|total| total.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let mib = total.context("/proc/meminfo has no MemTotal")? >> 10;
    // The additional 64 KiB: see `GuestPlan::new`.
    let memory = vec![ByteSize::from_bytes(((mib - 1) << 20) + (64 << 10))];
    let plan = GuestPlan { memory, ..plan.clone() };
    let qemu = BareQemu::start(trial, &plan, "foreign1", &["-S"])?;
    for (request, host) in [(qemu.request(), "a"), (onto(&qemu, "b"), "b")] {
        let found = trial.ask(trial.agent("a").check_adoption(&request))?.findings;
        let why = format!("host {host} has ");
        ensure!(found.iter().any(|finding| finding.message.contains(&why)), "{host}: {found:#?}");
    }
    Ok(())
}

/// The link between the hosts is cut while memory is sent.
pub(super) fn undone_with_its_link(
    trial: &Trial,
    request: &AdoptGuest,
    guest: &Guest,
    clean: &Traces,
) -> Result<()> {
    let held = trial.hold("a", "host.adoption-sends")?;
    let begun = trial.ask(trial.agent("a").adopt(request))?;
    held.reached(LIMIT)?;
    trial.cut_lanes("b", true)?;
    held.open();
    expect_failed(&ended(trial, &begun.id)?, "onto host b: the link failed")?;
    expect_where_it_was(trial, guest, &guest.name)?;
    trial.cut_lanes("b", false)?;
    expect_undone(trial, guest, clean)
}

/// The destination's QEMU gets too little memory; where the machine has no such limit, it is
/// killed.
pub(super) fn undone_with_its_memory(
    trial: &Trial,
    request: &AdoptGuest,
    guest: &Guest,
    clean: &Traces,
) -> Result<()> {
    let held = trial.hold("a", "host.adoption-prepared")?;
    let begun = trial.ask(trial.agent("a").adopt(request))?;
    held.reached(LIMIT)?;
    let group = match MemoryGroup::missing() {
        None => Some(MemoryGroup::around(&trial.hypervisors("b")?, LITTLE_BYTES)?),
        Some(why) => {
            eprintln!("  no limit of memory: {why}");
            trial.kill_hypervisor("b", &guest.name)?;
            None
        }
    };
    held.open();
    let adoption = ended(trial, &begun.id)?;
    if let Some(group) = group {
        ensure!(group.has_killed()?, "its QEMU had enough memory: {adoption:#?}");
        group.remove()?;
    }
    expect_failed(&adoption, "onto host b: ")?;
    expect_undone(trial, guest, clean)
}

/// The agent here dies when everything is sent and host b was not asked to run the guest, although
/// the note says that it may have been.
fn undone_with_its_agent(
    trial: &Trial,
    qemu: &BareQemu,
    guest: &Guest,
    clean: &Traces,
) -> Result<()> {
    let held = trial.hold("a", "host.adoption-offered")?;
    let begun = trial.ask(trial.agent("a").adopt(&onto(qemu, "b")))?;
    held.reached(LIMIT)
        .with_context(|| format!("{:?}", trial.ask(trial.agent("a").adoption(&begun.id))))?;
    trial.end_agent("a", Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    until("the guest runs again", LIMIT, || Ok(guest.status().is_ok().then_some(())))?;
    expect_undone(trial, guest, clean)
}
