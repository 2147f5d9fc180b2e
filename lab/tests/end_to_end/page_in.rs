//! Page-in: a guest runs at the destination while pages of its memory are still at the source. It
//! gets each page, whatever is cut or dies meanwhile.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use godwit_api::{ClientError, ErrorCode, MigrationRequest, VmInfo, VmState};
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Migration, Trial, until};
use godwit_qemu::ByteSize;
use godwit_types::{Outcome, PageInUse, Phase};
use rustix::process::Signal;

use crate::{check_report, move_and_check, set_link, slow_link};

/// 80 MB/s of incompressible pages, spread over 48 MiB: three times what 200 Mb/s carry.
const TOO_MUCH: &str = "dirty:rate=20000,ws=48M,order=random,zero=0,compressible=0";

/// Longest time that an agent waits for the greeting of a silent QEMU.
const QMP_LIMIT: Duration = Duration::from_secs(30);

fn too_busy() -> GuestPlan {
    GuestPlan {
        workload: TOO_MUCH.to_owned(),
        fill: ByteSize::from_mib(64),
        ..GuestPlan::new("web")
    }
}

fn now(to: &str) -> MigrationRequest {
    MigrationRequest { page_in: PageInUse::Now, ..MigrationRequest::to(to) }
}

/// Starts a migration and waits until the guest runs at b and lacks pages.
fn begun<'a>(trial: &'a Trial, guest: &mut Guest) -> Result<Migration<'a>> {
    let mut migration = trial.begin_migration("web", "a", &now("b"))?;
    let seen = migration.until(|progress| progress.phase == Phase::PageIn)?;
    seen.context("the migration was over too early")?;
    "b".clone_into(&mut guest.host);
    Ok(migration)
}

/// Waits until the guest has all of its memory at b and a has released it.
fn complete(trial: &Trial, guest: &Guest) -> Result<()> {
    until("all pages are at b", LIMIT, || {
        let there = trial.vm("b", "web")?;
        let gone = matches!(
            trial.vm("a", "web"),
            Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound
        );
        Ok((there.page_in.is_none() && gone).then_some(()))
    })?;
    trial.expect_whole(guest)?;
    Ok(())
}

#[test]
fn a_guest_runs_before_its_memory_is_there() -> Result<()> {
    let Some(trial) = Trial::begin_with("page-in", slow_link()?)? else { return Ok(()) };
    let clean = trial.traces("a")?;
    let mut guest = trial.guest("a", &too_busy())?;
    let watched = trial.move_guest(&mut guest, &now("b"))?;
    let report = &watched.report;
    check_report(report)?;
    let page_in = report
        .page_in
        .as_ref()
        .with_context(|| format!("the guest lacked no page: {report:#?}"))?;
    ensure!(page_in.pages > 1000 && page_in.demanded_pages > 0 && page_in.cuts == 0, "{page_in:?}");
    ensure!(
        page_in.waits.iter().map(|class| class.waits).sum::<u64>() == page_in.demanded_pages,
        "{page_in:?}"
    );
    eprintln!("  switchover {:?} ms, {page_in:?}", report.switchover_ms);
    trial.expect_whole(&guest)?;
    trial.expect_traces("a", &clean)?;
    // And back, with page-in as the policy decides.
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}

#[test]
fn a_cut_link_costs_time_and_no_page() -> Result<()> {
    let Some(trial) = Trial::begin_with("page-in-cut", slow_link()?)? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    let migration = begun(&trial, &mut guest)?;
    set_link(&trial, "down")?;
    until("the agent notices the cut", LIMIT, || {
        Ok(trial.vm("b", "web")?.page_in.is_some_and(|page_in| !page_in.connected).then_some(()))
    })?;
    ensure!(trial.vm("b", "web")?.state == VmState::Running);
    let refused = trial.begin_migration("web", "b", &MigrationRequest::to("a"));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error)) if error.code == ErrorCode::Busy),
        "a guest that lacks pages was migrated: {refused:?}"
    );
    let late = trial.ask(trial.agent("a").cancel_migration(&migration.id));
    ensure!(
        matches!(
            &late,
            Err(ClientError::Refused(error))
                if error.code == ErrorCode::Busy && error.remedy.contains("permanently lost")
        ),
        "{late:?}"
    );
    set_link(&trial, "up")?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    ensure!(report.page_in.is_some_and(|page_in| page_in.cuts > 0));
    complete(&trial, &guest)?;
    trial.finish()
}

#[test]
fn the_destinations_agent_dies() -> Result<()> {
    let Some(trial) = Trial::begin_with("page-in-b-dies", slow_link()?)? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    let migration = begun(&trial, &mut guest)?;
    trial.end_agent("b", Signal::KILL)?;
    trial.start_missing()?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    complete(&trial, &guest)?;
    trial.finish()
}

/// Returns whether a QEMU's main loop waits for a missing page, or for the big lock held by a
/// thread that does.
fn is_blocked(pid: i32) -> Result<bool> {
    let waits_in =
        |thread: &str| std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/wchan"));
    let main = waits_in(&pid.to_string())?;
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
    let mut each = threads.filter_map(|entry| waits_in(entry.file_name().to_str()?).ok());
    let waits_for_page = |function: &str| function == "handle_userfault";
    Ok(waits_for_page(&main)
        || main.starts_with("futex") && each.any(|function| waits_for_page(&function)))
}

/// Makes a QEMU without an agent read all of its guest's memory, as a device might, and waits until
/// it blocks at a missing page.
fn block_at_a_missing_page(trial: &Trial, pid: i32) -> Result<()> {
    let mut qmp = UnixStream::connect(trial.paths().host("b").join("run/vms/web/qmp.sock"))?;
    let dump =
        r#"{"execute":"pmemsave","arguments":{"val":0,"size":134217728,"filename":"/dev/null"}}"#;
    write!(qmp, "{{\"execute\":\"qmp_capabilities\"}}\n{dump}\n")?;
    let mut looks = 0;
    until("QEMU's main loop waits for a page", LIMIT, || {
        // Several polls in a row: a QEMU that holds the big lock for a moment looks the same once.
        looks = if is_blocked(pid)? { looks + 1 } else { 0 };
        Ok((looks >= 10).then_some(()))
    })
}

/// QEMU's main loop waits for a missing page as well and answers nobody.
#[test]
fn the_destinations_agent_dies_while_its_qemu_waits_for_a_page() -> Result<()> {
    let Some(trial) = Trial::begin_with("page-in-qemu-waits", slow_link()?)? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    let migration = begun(&trial, &mut guest)?;
    trial.cut_lanes("b", true)?;
    let pid = trial.vm("b", "web")?.pid.context("the VM has no process")?;
    trial.end_agent("b", Signal::KILL)?;
    block_at_a_missing_page(&trial, pid)?;
    let asked = Instant::now();
    trial.start_missing()?;
    let vm = trial.vm("b", "web")?;
    ensure!(asked.elapsed() < QMP_LIMIT, "the agent waited for QEMU: {:?}", asked.elapsed());
    ensure!(
        vm.state == VmState::Running && vm.page_in.is_some_and(|page_in| page_in.missing_pages > 0),
        "{vm:#?}"
    );
    ensure!(is_blocked(pid)?, "QEMU continued without the missing page");
    trial.cut_lanes("b", false)?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    complete(&trial, &guest)?;
    let vm = trial.vm("b", "web")?;
    ensure!(vm.state == VmState::Running && vm.pid == Some(pid), "{vm:#?}");
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}

fn start(trial: &Trial) -> Result<VmInfo, ClientError> {
    trial.ask(trial.agent("b").start_vm("web"))
}

/// Pages that cannot be fetched are not replaced by zeros, whatever the operator requests.
#[test]
fn a_guest_does_not_run_without_its_pages() -> Result<()> {
    let Some(trial) = Trial::begin_with("page-in-forced", slow_link()?)? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    drop(begun(&trial, &mut guest)?);
    trial.cut_lanes("b", true)?;
    trial.end_agent("b", Signal::KILL)?;
    let note = trial.paths().host("b").join("ram/web.missing");
    let noted = std::fs::read(&note)?;
    std::fs::write(&note, "no note")?;
    trial.start_missing()?;
    until("the guest is paused", LIMIT, || {
        Ok((trial.vm("b", "web")?.state == VmState::Paused).then_some(()))
    })?;
    let refused = start(&trial);
    ensure!(
        matches!(
            &refused,
            Err(ClientError::Refused(error))
                if error.message.contains("still") && error.message.contains("host a")
        ),
        "{refused:?}"
    );
    // As the remedy says: the cause is fixed and the agent restarted.
    trial.end_agent("b", Signal::KILL)?;
    std::fs::write(&note, noted)?;
    trial.start_missing()?;
    trial.cut_lanes("b", false)?;
    let state = until("all pages are at b", LIMIT, || {
        let vm = trial.vm("b", "web")?;
        Ok(vm.page_in.is_none().then_some(vm.state))
    })?;
    // A QEMU that waits for a page may take no command. It was not paused then, and runs on once it
    // has all of its pages.
    ensure!(matches!(state, VmState::Paused | VmState::Running), "{state:?}");
    if state == VmState::Paused {
        start(&trial)?;
    }
    complete(&trial, &guest)?;
    trial.finish()
}

#[test]
fn the_sources_agent_dies() -> Result<()> {
    let Some(trial) = Trial::begin_with("page-in-a-dies", slow_link()?)? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    drop(begun(&trial, &mut guest)?);
    trial.end_agent("a", Signal::KILL)?;
    trial.start_missing()?;
    complete(&trial, &guest)?;
    trial.finish()
}

#[test]
fn a_destination_that_is_dead_for_good_is_given_up() -> Result<()> {
    let Some(trial) = Trial::begin_with("page-in-b-gone", slow_link()?)? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    let migration = begun(&trial, &mut guest)?;
    set_link(&trial, "down")?;
    trial.end_agent("b", Signal::KILL)?;
    trial.kill_hypervisor("a", "web")?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::InDoubt, "{report:#?}");
    until("the VM is in doubt", LIMIT, || Ok(trial.vm("a", "web")?.in_doubt.then_some(())))?;
    // It may be the only copy of the guest, so giving it up takes a separate request.
    let agent = trial.agent("a");
    let refused = trial.ask(agent.delete_vm("web")).err().context("a VM in doubt was deleted")?;
    ensure!(refused.code() == Some(ErrorCode::InDoubt), "{refused}");
    trial.ask(agent.give_up_vm("web"))?;
    trial.finish()
}

#[test]
fn a_guest_that_refuses_it_moves_by_rounds() -> Result<()> {
    let Some(trial) = Trial::begin_with("page-in-refused", slow_link()?)? else { return Ok(()) };
    let plan = too_busy();
    let mut spec = plan.spec(trial.image());
    spec.refuses_page_in = true;
    let mut guest = trial.guest_of("a", &plan, spec)?;
    let watched = trial.move_guest(&mut guest, &now("b"))?;
    ensure!(
        watched.report.page_in.is_none() && watched.report.throttle.is_some(),
        "{:#?}",
        watched.report
    );
    trial.expect_whole(&guest)?;
    trial.finish()
}
