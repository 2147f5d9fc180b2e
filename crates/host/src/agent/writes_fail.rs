//! Fault injection for writes of the host's state. Each step of each write fails in turn: once
//! (EIO), or from then on (ENOSPC). Whatever operation was running, what the agent shows and
//! answers must agree with its disk, and a restarted agent must show the same.

#[allow(dead_code, reason = "these tests use only a part of it")]
#[path = "../../tests/support/mod.rs"]
pub(super) mod support;

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{
    ApiError, CreateVm, ForeignPlace, MigrationRequest, Resolve, SetPeers, StopVm, VmInfo, VmState,
};
use godwit_migration::handover::Known;
use godwit_qemu::{ByteSize, MemoryBlock, Uuid, VmName, VmSpec};
use godwit_types::{EngineKind, FailureCode, Incarnation, Outcome, Ownership};
use rustix::io::Errno;
use serde_json::json;

use self::support::{TestHost, until};
use crate::agent::Agent;
use crate::agent::ended::SHUT_ITSELF_DOWN;
use crate::store::{Desired, OtherHost, Role, SavedVm};
use crate::vm::Vm;

fn web() -> VmName {
    VmName::new("web").unwrap()
}

const UUID: Uuid = Uuid::from_u128(0x5eed);
const ARRIVING: Ownership = Ownership { incarnation: Incarnation::new(7), epoch: 2 };

/// Operation during which writes fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Create,
    CreateAndStart,
    Start,
    Resume,
    Stop,
    Delete,
    DeleteInDoubt,
    HandOver,
    EndHandOver,
    Release,
    TakeBack,
    GiveUp,
    Arrive,
    TakeOver,
    Promote,
    Strand,
    Discard,
    /// Shutdown by the guest itself.
    ShutDown,
    ShutDownMoving,
    ShutDownArriving,
}

impl Act {
    /// Brings a host into the state in which the operation begins.
    async fn prepare(self, host: &TestHost, agent: &Arc<Agent>) {
        let spec = VmSpec { uuid: Some(UUID), ..host.spec("web") };
        let start = !matches!(self, Act::Start | Act::Delete);
        match self {
            Act::Create | Act::CreateAndStart | Act::Arrive => return,
            Act::TakeOver | Act::Promote | Act::Strand | Act::Discard | Act::ShutDownArriving => {
                let spec = agent.resolve(spec).await.unwrap();
                let shadow =
                    agent.prepare_incoming(spec, ARRIVING, "b", false, None).await.unwrap();
                if self != Act::TakeOver {
                    agent.note_take_over(&shadow).unwrap();
                }
                return;
            }
            _ => drop(
                agent
                    .create(CreateVm { spec, start, vm_dirs_only: false, new_disks: Vec::new() })
                    .await
                    .unwrap(),
            ),
        }
        match self {
            Act::Resume => {
                agent.vm("web").unwrap().unwrap().process.qmp.stop().await.unwrap();
                until("the VM is paused", async || state(agent) == Some(VmState::Paused)).await;
            }
            Act::HandOver => drop(agent.begin_migration("web", "m1").unwrap()),
            Act::EndHandOver
            | Act::ShutDownMoving
            | Act::Release
            | Act::TakeBack
            | Act::GiveUp
            | Act::DeleteInDoubt => {
                let vm = agent.begin_migration("web", "m1").unwrap();
                agent.mark_hand_over(&vm, "b", false, true).unwrap();
                if self == Act::Release {
                    vm.process.qmp.stop().await.unwrap();
                }
                if !matches!(self, Act::EndHandOver | Act::ShutDownMoving | Act::Release) {
                    agent.hold_in_doubt(&web(), "b").await;
                }
            }
            _ => {}
        }
    }

    async fn carry_out(self, spec: VmSpec, agent: Arc<Agent>) -> Result<(), ApiError> {
        let word =
            |runs_on: &str, keep_memory| Resolve { runs_on: runs_on.to_owned(), keep_memory };
        let vm = agent.vm("web").ok().flatten();
        match (self, vm) {
            (Act::Create | Act::CreateAndStart, _) => {
                let start = self == Act::CreateAndStart;
                agent
                    .create(CreateVm { spec, start, vm_dirs_only: false, new_disks: Vec::new() })
                    .await
                    .map(drop)
            }
            (Act::Start | Act::Resume, _) => agent.start(&web()).await.map(drop),
            (Act::Stop, _) => {
                agent.stop(&web(), StopVm { force: true, grace_ms: None }).await.map(drop)
            }
            (Act::Delete, _) => agent.delete(&web(), false).await,
            (Act::DeleteInDoubt, _) => agent.delete(&web(), true).await,
            (Act::HandOver, Some(vm)) => {
                let marked = match agent.note_migrating(&vm, "b") {
                    Ok(()) => agent.mark_hand_over(&vm, "b", false, true),
                    Err(error) => Err(error),
                };
                if marked.is_err() {
                    agent.end_migration(&web()).await;
                }
                marked
            }
            (Act::EndHandOver, _) => {
                agent.end_migration(&web()).await;
                Ok(())
            }
            (Act::Release, Some(vm)) => agent.release(&vm, None).await,
            (Act::TakeBack, _) => agent.resolve_doubt(&web(), word("a", true)).await.map(drop),
            (Act::GiveUp, _) => agent.resolve_doubt(&web(), word("b", true)).await.map(drop),
            (Act::Arrive, _) => {
                let spec = agent.resolve(spec).await?;
                agent.prepare_incoming(spec, ARRIVING, "b", false, None).await.map(drop)
            }
            (Act::TakeOver, Some(vm)) => {
                let noted = agent.note_take_over(&vm);
                if noted.is_err() {
                    agent.discard(&vm).await;
                }
                noted
            }
            (Act::Promote, Some(vm)) => {
                agent.promote(&vm).await;
                Ok(())
            }
            (Act::Strand, Some(vm)) => {
                agent.strand(&vm).await;
                Ok(())
            }
            (Act::Discard, Some(vm)) => {
                agent.discard(&vm).await;
                Ok(())
            }
            (Act::ShutDown | Act::ShutDownMoving | Act::ShutDownArriving, Some(vm)) => {
                power_off(&vm).await;
                vm.process.ended().await;
                match self {
                    Act::ShutDownMoving => agent.end_migration(&web()).await,
                    Act::ShutDownArriving => agent.promote(&vm).await,
                    _ => {}
                }
                until_stopped(&agent).await;
                Ok(())
            }
            (_, None) => panic!("{self:?} has no process"),
        }
    }

    /// Whether the operation returns only once the disk has accepted its record.
    fn waits_for_the_disk(self) -> bool {
        matches!(self, Act::Promote | Act::Strand) || self.shuts_down()
    }

    fn shuts_down(self) -> bool {
        matches!(self, Act::ShutDown | Act::ShutDownMoving | Act::ShutDownArriving)
    }

    /// State after a success; `None`: the VM is gone.
    fn success(self) -> Option<VmState> {
        match self {
            Act::Create
            | Act::Stop
            | Act::ShutDown
            | Act::ShutDownMoving
            | Act::ShutDownArriving => Some(VmState::Stopped),
            Act::CreateAndStart | Act::Start | Act::Resume | Act::EndHandOver | Act::TakeBack => {
                Some(VmState::Running)
            }
            Act::HandOver => Some(VmState::MigratingOut),
            Act::Arrive | Act::TakeOver => Some(VmState::MigratingIn),
            Act::Promote | Act::Strand => Some(VmState::Paused),
            Act::Delete | Act::DeleteInDoubt | Act::Release | Act::GiveUp | Act::Discard => None,
        }
    }

    /// State after a refusal; `None`: no VM is left.
    fn refused(self) -> Option<VmState> {
        match self {
            Act::Start | Act::Delete => Some(VmState::Stopped),
            Act::Stop | Act::HandOver => Some(VmState::Running),
            Act::Resume | Act::DeleteInDoubt | Act::Release | Act::TakeBack | Act::GiveUp => {
                Some(VmState::Paused)
            }
            _ => None,
        }
    }
}

/// Powers the guest off through the registers of its machine, which the monitor writes in the
/// guest's place. Sets their base as firmware does (ICH9, LPC function: PMBASE at 0x40, its switch
/// at 0x44; PM1a control is 4 bytes above the base).
async fn power_off(vm: &Vm) {
    // Firmware writes the same registers. The guest begins after that, and prints a mark.
    if vm.is_running().await == Some(true) {
        let mut poll = tokio::time::interval(Duration::from_millis(20));
        let console = vm.files.console_log();
        while !std::fs::read_to_string(&console).is_ok_and(|text| text.contains('#')) {
            poll.tick().await;
        }
    }
    for line in
        ["o/w 0xcf8 0x8000f840", "o/w 0xcfc 0x601", "o/w 0xcf8 0x8000f844", "o/w 0xcfc 0x80"]
    {
        vm.process
            .qmp
            .execute("human-monitor-command", json!({"command-line": line}))
            .await
            .unwrap();
    }
    let sleep = json!({"command-line": "o/h 0x604 0x2000"});
    // QEMU ends on this command, possibly before it answers.
    let _ = vm.process.qmp.execute("human-monitor-command", sleep).await;
    vm.process.qmp.until_guest_shuts_down().await;
}

/// Waits until a VM is shown as stopped; the test's own limit bounds the wait.
async fn until_stopped(agent: &Agent) {
    let mut poll = tokio::time::interval(Duration::from_millis(20));
    while state(agent) != Some(VmState::Stopped) {
        poll.tick().await;
    }
}

/// Opens an agent as soon as the previous one has released its lock. A child that another test is
/// just starting holds the lock a moment longer.
pub(super) async fn opened(host: &TestHost) -> Arc<Agent> {
    let mut opened = None;
    until("the lock is free", async || {
        let agent = Agent::open(host.config.clone()).await;
        let is_locked = agent.as_ref().is_err_and(|error| error.message.contains("another agent"));
        opened = (!is_locked).then(|| agent.unwrap());
        opened.is_some()
    })
    .await;
    opened.unwrap()
}

fn state(agent: &Agent) -> Option<VmState> {
    agent.vm_info("web").ok().map(|info| info.state)
}

/// Returns the shown state that a restarted agent must show as well. Shadows and migrations end
/// with their agent.
fn shown(agent: &Agent) -> Option<(VmState, bool, Incarnation, u64)> {
    let VmInfo { state, in_doubt, incarnation, epoch, .. } = agent.vm_info("web").ok()?;
    (state != VmState::MigratingIn).then_some((state, in_doubt, incarnation, epoch))
}

/// Returns how the agent contradicts its disk or the running processes, if it does.
fn contradiction(host: &TestHost, agent: &Agent) -> Option<String> {
    let record = agent.store.read(&web()).unwrap();
    let info = agent.vm_info("web").ok();
    let (Some(record), Some(info)) = (&record, &info) else {
        let is_none = record.is_none() && info.is_none() && host.qemus().is_empty();
        return (!is_none).then(|| format!("recorded {record:?}, shown {info:?}"));
    };
    let shown = Ownership { incarnation: info.incarnation, epoch: info.epoch };
    let known = agent.known(&web(), UUID, info.incarnation).unwrap();
    let agrees = record.ownership() == shown
        && known == Known::Has(record.standing())
        && is_as_recorded(record, info)
        && host.qemus().len() == usize::from(info.pid.is_some());
    (!agrees).then(|| {
        format!("recorded {record:?}, answered {known:?}, shown {info:?}, {:?}", host.qemus())
    })
}

fn is_as_recorded(record: &SavedVm, info: &VmInfo) -> bool {
    let is_moving = |state| info.state == state || info.in_doubt;
    match (record.role, record.desired) {
        (Role::Owner, Desired::Running) => {
            let shall_run =
                [VmState::Running, VmState::Paused, VmState::Failed, VmState::MigratingOut];
            !info.in_doubt && shall_run.contains(&info.state)
        }
        (Role::Owner, Desired::Stopped) => !info.in_doubt && info.state == VmState::Stopped,
        (Role::Owner, Desired::Suspended) => info.state == VmState::Suspended,
        (Role::Owner, Desired::Template) => info.state == VmState::Template,
        (Role::HandingOver, _) => is_moving(VmState::MigratingOut),
        (Role::Shadow | Role::TakingOver, _) => is_moving(VmState::MigratingIn),
        (Role::Stranded, _) => info.in_doubt,
    }
}

/// Waits until what is shown and answered agrees with the disk.
async fn agree(what: &str, host: &TestHost, agent: &Agent) {
    let mut poll = tokio::time::interval(Duration::from_millis(20));
    let limit = tokio::time::Instant::now() + support::LIMIT;
    while let Some(why) = contradiction(host, agent) {
        assert!(tokio::time::Instant::now() < limit, "{what}: {why}");
        poll.tick().await;
    }
}

/// Makes one write step of `act` fail. Returns whether there was such a step.
fn fails(act: Act, step: usize, errno: Errno, lasts: bool) -> bool {
    let host = TestHost::new().unwrap();
    let what = format!("{act:?}, step {step}, {errno}");
    let (failed, before) = host.run(async {
        let agent = opened(&host).await;
        act.prepare(&host, &agent).await;
        let owned = agent.vm_info("web").ok().map(|info| info.incarnation);
        let faults = &agent.store.disk.faults;
        faults.plan(step, errno.raw_os_error(), lasts);
        let spec = VmSpec { uuid: Some(UUID), ..host.spec("web") };
        let acting = tokio::spawn(act.carry_out(spec, Arc::clone(&agent)));
        if act.waits_for_the_disk() {
            until("a fault or the end of the operation", async || {
                acting.is_finished() || faults.have_come()
            })
            .await;
            let failed = faults.have_come();
            faults.heal();
            acting.await.unwrap().unwrap();
            agree(&what, &host, &agent).await;
            assert_eq!(state(&agent), act.success(), "{what}");
            return (failed, shown(&agent));
        }
        let outcome = acting.await.unwrap();
        let failed = faults.have_come();
        faults.heal();
        // A failed write is repeated once the disk has space again.
        agree(&what, &host, &agent).await;
        let expected = if outcome.is_ok() { act.success() } else { act.refused() };
        assert_eq!(state(&agent), expected, "{what}: {outcome:?}");
        let is_remembered =
            matches!(act, Act::Delete | Act::DeleteInDoubt | Act::Release | Act::GiveUp);
        if is_remembered && outcome.is_ok() {
            let known = agent.known(&web(), UUID, owned.unwrap()).unwrap();
            assert!(matches!(known, Known::Gone(_)), "{what}: {known:?}");
        }
        (failed, shown(&agent))
    });
    host.run(async {
        let agent = opened(&host).await;
        agree(&what, &host, &agent).await;
        match before {
            // A VM that was being handed over runs here, in a new epoch.
            Some((VmState::MigratingOut, ..)) => {
                assert_eq!(state(&agent), Some(VmState::Running), "{what}");
            }
            _ => assert_eq!(shown(&agent), before, "{what}"),
        }
    });
    failed
}

fn every_write_fails(acts: &[Act]) {
    if TestHost::new().is_none() {
        return;
    }
    for &act in acts {
        for (errno, lasts) in [(Errno::IO, false), (Errno::NOSPC, true)] {
            let steps = (0..).take_while(|&step| fails(act, step, errno, lasts)).count();
            println!("{act:?}: {steps} write steps fail with {errno}");
            assert!(steps > 0, "{act:?} writes nothing");
        }
    }
}

#[test]
fn writes_fail_while_a_vm_is_created() {
    every_write_fails(&[Act::Create, Act::CreateAndStart]);
}

#[test]
fn writes_fail_while_a_vm_is_started_and_stopped() {
    every_write_fails(&[Act::Start, Act::Resume, Act::Stop]);
}

#[test]
fn writes_fail_while_a_vm_is_deleted() {
    every_write_fails(&[Act::Delete, Act::DeleteInDoubt]);
}

#[test]
fn writes_fail_while_a_guest_is_handed_over() {
    every_write_fails(&[Act::HandOver, Act::EndHandOver]);
}

#[test]
fn writes_fail_while_a_guest_is_released_or_taken_back() {
    every_write_fails(&[Act::Release, Act::TakeBack, Act::GiveUp]);
}

#[test]
fn writes_fail_while_a_guest_arrives() {
    every_write_fails(&[Act::Arrive, Act::TakeOver, Act::Promote, Act::Strand, Act::Discard]);
}

#[test]
fn writes_fail_while_a_guest_shuts_itself_down() {
    every_write_fails(&[Act::ShutDown, Act::ShutDownMoving, Act::ShutDownArriving]);
}

/// Checks that the shown end of a guest agrees with its record, also on a full disk.
async fn end_is_as_recorded(host: &TestHost, agent: &Agent, desired: Desired) {
    let record = agent.store.read(&web()).unwrap().unwrap();
    assert_eq!((record.role, record.desired), (Role::Owner, desired));
    assert_eq!(contradiction(host, agent), None);
}

#[test]
fn the_shown_end_agrees_with_the_record_on_a_full_disk() {
    let Some(host) = TestHost::new() else { return };
    let shuts_down_on_a_full_disk = async |agent: &Arc<Agent>| {
        agent.store.disk.faults.plan(0, Errno::NOSPC.raw_os_error(), true);
        power_off(&agent.vm("web").unwrap().unwrap()).await;
        until("the end is shown", async || state(agent) != Some(VmState::Running)).await;
        let info = agent.vm_info("web").unwrap();
        assert_eq!(info.state, VmState::Failed);
        let reason = info.reason.unwrap();
        assert!(
            reason.starts_with(SHUT_ITSELF_DOWN) && reason.contains("could not be saved"),
            "{reason}"
        );
        end_is_as_recorded(&host, agent, Desired::Running).await;
    };
    host.run(async {
        let agent = opened(&host).await;
        let spec = VmSpec { uuid: Some(UUID), ..host.spec("web") };
        agent.create(CreateVm::new(spec, true)).await.unwrap();
        shuts_down_on_a_full_disk(&agent).await;
        agent.store.disk.faults.heal();
        until("the end is saved", async || state(&agent) == Some(VmState::Stopped)).await;
        assert_eq!(agent.vm_info("web").unwrap().reason.as_deref(), Some(SHUT_ITSELF_DOWN));
        end_is_as_recorded(&host, &agent, Desired::Stopped).await;
        // Saving the end does not undo an operation that begins after it.
        agent.start(&web()).await.unwrap();
        shuts_down_on_a_full_disk(&agent).await;
        agent.store.disk.faults.heal();
        until("the VM starts again", async || agent.start(&web()).await.is_ok()).await;
        assert_eq!(state(&agent), Some(VmState::Running));
        end_is_as_recorded(&host, &agent, Desired::Running).await;
        shuts_down_on_a_full_disk(&agent).await;
    });
    host.run(async {
        let agent = opened(&host).await;
        assert_eq!(state(&agent), Some(VmState::Failed), "as the previous agent showed");
        end_is_as_recorded(&host, &agent, Desired::Running).await;
    });
}

#[test]
fn a_guest_that_shuts_itself_down_while_the_destination_prepares_ends_the_migration() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let memory = vec![MemoryBlock::shared(ByteSize::from_bytes((16 << 20) + 8192))];
        let spec = VmSpec { memory, uuid: Some(UUID), ..host.spec("web") };
        agent.create(CreateVm::new(spec, true)).await.unwrap();
        let destination = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", destination.local_addr().unwrap());
        agent.set_peers(SetPeers { peers: [("c".to_owned(), url)].into() }).unwrap();
        let request = MigrationRequest { engine: EngineKind::Qemu, ..MigrationRequest::to("c") };
        let id = crate::migration::migrate(&agent, &web(), request).unwrap().id;
        let (preparing, _) = destination.accept().await.unwrap();
        power_off(&agent.vm("web").unwrap().unwrap()).await;
        until("QEMU has ended", async || host.qemus().is_empty()).await;
        assert_eq!(state(&agent), Some(VmState::MigratingOut), "the migration owns the VM");
        drop((preparing, destination));
        let mut report = None;
        until("the migration ends", async || {
            report = agent.migrations().status(&id).unwrap().report;
            report.is_some()
        })
        .await;
        let report = report.unwrap();
        assert_eq!(report.outcome, Outcome::Failed);
        assert_eq!(report.error.unwrap().code, FailureCode::GuestShutDown.name());
        let info = agent.vm_info("web").unwrap();
        assert_eq!(
            (info.state, info.reason.as_deref()),
            (VmState::Stopped, Some(SHUT_ITSELF_DOWN))
        );
        end_is_as_recorded(&host, &agent, Desired::Stopped).await;
    });
}

#[test]
fn writes_fail_while_peers_are_set() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let named =
            || SetPeers { peers: [("c".to_owned(), "http://127.0.0.1:9".to_owned())].into() };
        let mut failed = 0;
        for step in 0.. {
            agent.store.disk.faults.plan(step, Errno::NOSPC.raw_os_error(), true);
            let outcome = agent.set_peers(named());
            agent.store.disk.faults.heal();
            if outcome.is_ok() {
                break;
            }
            failed += 1;
            assert!(
                agent.peer("c").is_err() && agent.store.load_peers().unwrap().is_empty(),
                "step {step}"
            );
        }
        assert!(failed > 0 && agent.peer("c").is_ok());
    });
}

#[test]
fn an_unreadable_record_decides_nothing() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        agent.create(CreateVm::new(host.spec("web"), true)).await.unwrap();
        let vm = agent.begin_migration("web", "m1").unwrap();
        agent.mark_hand_over(&vm, "b", false, true).unwrap();
        let path = host.path().join("state/vms/web/vm.json");
        let record = std::fs::read(&path).unwrap();
        std::fs::write(&path, "torn").unwrap();
        agent.hold_in_doubt(&web(), "b").await;
        let info = agent.vm_info("web").unwrap();
        assert!(
            info.in_doubt && vm.is_running().await == Some(false),
            "another host may run it: {info:?}"
        );
        agent.stop(&web(), StopVm { force: true, grace_ms: None }).await.unwrap_err();
        agent.delete(&web(), true).await.unwrap_err();
        assert!(vm.process.exit().is_none(), "this host may have the only copy");
        assert!(
            agent.known(&web(), vm.spec().uuid, vm.incarnation).is_err(),
            "the owner is unknown"
        );
        std::fs::write(&path, record).unwrap();
        let word = Resolve { runs_on: "a".to_owned(), keep_memory: true };
        let back = agent.resolve_doubt(&web(), word).await.unwrap().vm.unwrap();
        assert_eq!((back.state, back.epoch), (VmState::Running, 3));
    });
}

/// The host loses power after an adopted guest may have run, and its disk is full afterwards.
#[test]
fn an_adoption_is_decided_as_soon_as_the_disk_has_room() {
    let Some(host) = TestHost::new() else { return };
    let from = ForeignPlace::Qmp("/ended.qmp".to_owned());
    host.run(async {
        let agent = opened(&host).await;
        let spec = VmSpec { uuid: Some(UUID), ..host.spec("web") };
        let spec = agent.resolve(spec).await.unwrap();
        let other = OtherHost { name: from.to_string(), needs_pages: false, runs: true };
        let record = SavedVm::new(spec, Role::TakingOver, Desired::Running, ARRIVING).with(other);
        agent.save_record(&record).unwrap();
        let note = json!({
            "from": from, "pid": i32::MAX, "start_time": 1, "vm": "web", "ownership": ARRIVING,
            "undefine": false,
        });
        agent.store.save_adoption(&web(), &note).unwrap();
    });
    // Where the next record is written before it replaces this one.
    let full = host.path().join("state/vms/web/vm.json.new");
    std::fs::create_dir(&full).unwrap();
    host.run(async {
        let agent = opened(&host).await;
        until("the VM is in doubt", async || agent.vm_info("web").unwrap().in_doubt).await;
        assert_eq!(agent.store.read(&web()).unwrap().unwrap().role, Role::TakingOver);
        let faults = &agent.store.disk.faults;
        faults.plan(0, Errno::NOSPC.raw_os_error(), true);
        std::fs::remove_dir(&full).unwrap();
        until("another try fails", async || faults.have_come()).await;
        faults.heal();
        until("the adoption is decided", async || {
            agent.store.adoptions::<serde_json::Value>().is_empty()
        })
        .await;
        let info = agent.vm_info("web").unwrap();
        assert!(info.state == VmState::Failed && !info.in_doubt, "{info:?}");
        end_is_as_recorded(&host, &agent, Desired::Running).await;
    });
}
