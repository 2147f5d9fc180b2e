//! A guard with its files, on a clock that only the test advances.

use std::fs;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::Poll;

use godwit_api::{ErrorCode, MOST_ENDING};
use proptest::prelude::*;
use rustix::io::Errno;

use super::*;
use crate::ha::{Ending, Starting};

const BOOT: &str = "boot-1";
const WEB: Uuid = Uuid::from_u128(0x5eed);
const PROCESS: (i32, u64) = (4711, 815);

fn holder(cluster: u128) -> TermHolder {
    TermHolder { cluster: Uuid::from_u128(cluster), host: Uuid::from_u128(1) }
}

fn stores(count: u128) -> Vec<Uuid> {
    (1..=count).map(Uuid::from_u128).collect()
}

fn granted(term: u64) -> HaVerdict {
    HaVerdict::Granted { term, datastores: stores(1) }
}

/// Directories of a host.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Host {
        Host(tempfile::tempdir().unwrap())
    }

    fn guard(&self, boot_id: &str) -> Arc<HaGuard> {
        for dir in ["state", "run"] {
            fs::create_dir_all(self.0.path().join(dir)).unwrap();
        }
        let (state, run) = (self.0.path().join("state"), self.0.path().join("run"));
        let guard = HaGuard::open(&state, &run, boot_id.to_owned());
        guard.clock.stopped_at.set(boot_clock()).unwrap();
        Arc::new(guard)
    }

    /// Returns a guard that holds term 1.
    fn holding(&self) -> Arc<HaGuard> {
        let guard = self.guard(BOOT);
        rest(&guard);
        answer(&guard, holder(1), granted(1)).unwrap();
        assert_eq!(guard.state().standing, HaStanding::Held);
        guard
    }

    /// Has the lease of the next agent last an hour longer, however slow the machine is.
    fn lengthen_lease(&self) {
        let path = self.0.path().join("run/ha.json");
        let mut saved: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let counts_from = saved["counts_from"]["secs"].as_u64().unwrap() + 3600;
        saved["counts_from"]["secs"] = counts_from.into();
        fs::write(&path, saved.to_string()).unwrap();
    }

    fn files(&self) -> Vec<std::path::PathBuf> {
        let of = |dir: &str| fs::read_dir(self.0.path().join(dir)).unwrap();
        let all = ["state", "run"].into_iter().flat_map(of);
        all.map(|entry| entry.unwrap().path()).collect()
    }
}

/// Carries out what an agent without VMs does at its start.
fn rest(guard: &HaGuard) {
    assert_eq!(look(guard, &[]), Order::Stop);
    guard.vms_ended();
    assert_eq!(look(guard, &[]), Order::Rest);
}

fn look(guard: &HaGuard, processes: &[(i32, u64)]) -> Order {
    let of = |&(pid, start_time): &(i32, u64)| Protected { vm: "web".into(), pid, start_time };
    let contained = guard.begin_list();
    guard.order(contained, processes.iter().map(of).collect())
}

fn answer(guard: &HaGuard, holder: TermHolder, verdict: HaVerdict) -> Result<(), ApiError> {
    let nonce = guard.renewal().nonce;
    guard.answer(&HaAnswer { nonce, holder, verdict })
}

fn pass(guard: &HaGuard, seconds: u64) {
    guard.clock.ahead_ms.fetch_add(seconds * 1000, Ordering::SeqCst);
}

fn start(guard: &Arc<HaGuard>) -> Result<Starting, ApiError> {
    guard.starting("web", WEB)
}

#[test]
fn without_a_manager_nothing_is_written_and_no_protected_vm_starts() {
    let host = Host::new();
    let guard = host.guard(BOOT);
    assert!(!guard.is_idle(), "an earlier agent may have left protected VMs");
    rest(&guard);
    guard.save_lease();
    assert!(guard.is_idle() && host.files().is_empty());
    let renewal = guard.renewal();
    assert_eq!((renewal.holder, renewal.term, renewal.over), (None, 0, true));
    let error = start(&guard).unwrap_err();
    assert_eq!(error.message, "cannot start VM \"web\": this host holds no term of HA");
    assert!(error.remedy.contains("godwit control ha show"), "{error}");
    for verdict in [HaVerdict::Ended { term: 0 }, HaVerdict::Unknown, granted(0)] {
        answer(&guard, holder(1), verdict).unwrap();
        assert!(guard.is_idle() && host.files().is_empty());
    }
}

#[test]
fn a_term_is_on_the_disk_before_it_is_held() {
    let host = Host::new();
    let guard = host.guard(BOOT);
    rest(&guard);
    guard.files.disk.faults.plan(0, Errno::NOSPC.raw_os_error(), true);
    let error = answer(&guard, holder(1), granted(1)).unwrap_err();
    assert_eq!(error.code, ErrorCode::HostFailed);
    assert!(guard.is_idle() && start(&guard).is_err());
    guard.files.disk.faults.heal();
    answer(&guard, holder(1), granted(1)).unwrap();
    drop(start(&guard).unwrap());
    let text = fs::read_to_string(host.0.path().join("state/ha.json")).unwrap();
    assert!(text.contains("\"term\":1"), "{text}");
}

#[test]
fn a_lease_that_runs_out_ends_the_vms_before_the_term_is_over() {
    let host = Host::new();
    let guard = host.holding();
    let guarded = guard.guarded();
    let starting = start(&guard).unwrap();
    starting.process(PROCESS.0, PROCESS.1).unwrap();
    assert_eq!(guarded.borrow().pids, [PROCESS], "before it is in the table");
    assert!(guarded.borrow().deadline.is_some_and(|deadline| deadline > guard.clock.now()));
    drop(starting);
    assert_eq!(guarded.borrow().pids, [PROCESS], "until it is listed");
    assert_eq!(look(&guard, &[PROCESS]), Order::Run);
    assert_eq!((guard.state().vms, guard.state().term), (vec!["web".to_owned()], 1));
    assert_eq!(guard.cause_of_kill(), None);

    pass(&guard, 5);
    answer(&guard, holder(1), granted(1)).unwrap();
    pass(&guard, 6);
    assert_eq!(look(&guard, &[PROCESS]), Order::Run);
    pass(&guard, 2);
    assert_eq!(look(&guard, &[PROCESS]), Order::Stop);
    let lost = Guarded { deadline: Some(Duration::ZERO), pids: vec![PROCESS] };
    assert_eq!(*guarded.borrow(), lost);
    assert!(!guard.renewal().over && start(&guard).is_err());
    assert!(guard.note_ended(PROCESS.0, PROCESS.1) && !guard.note_ended(PROCESS.0, PROCESS.1));
    let cause = guard.cause_of_end(PROCESS.0, PROCESS.1);
    assert_eq!(cause.as_deref(), Some("stopped: the host lost its lease of HA (term 1)"));
    assert_eq!(guard.cause_of_end(PROCESS.0, 0), None, "another process");
    assert_eq!(guard.cause_of_kill(), cause, "the watchdog was first");

    assert_eq!(look(&guard, &[]), Order::Stop);
    guard.vms_ended();
    let renewal = guard.renewal();
    assert_eq!((renewal.holder, renewal.term, renewal.over), (Some(holder(1)), 1, true));
    assert_eq!(*guarded.borrow(), Guarded::default());
}

#[test]
fn a_start_in_progress_keeps_the_term_from_being_over() {
    let host = Host::new();
    let guard = host.holding();
    let (early, late) = (start(&guard).unwrap(), start(&guard).unwrap());
    early.process(PROCESS.0, PROCESS.1).unwrap();
    answer(&guard, holder(1), HaVerdict::Ended { term: 1 }).unwrap();
    assert_eq!(late.process(12, 12).unwrap_err().code, ErrorCode::WrongState);
    assert!(start(&guard).is_err());
    for starting in [early, late] {
        look(&guard, &[]);
        guard.vms_ended();
        assert!(!guard.renewal().over);
        drop(starting);
    }
    guard.vms_ended();
    assert!(!guard.renewal().over, "not listed since");
    assert_eq!(look(&guard, &[]), Order::Stop);
    guard.vms_ended();
    assert!(guard.renewal().over);
}

#[test]
fn a_start_in_a_term_begins_in_no_other() {
    let host = Host::new();
    let guard = host.holding();
    for term in [0, 2] {
        assert!(guard.may_start_in("web", WEB, Term(term), Uuid::nil()).is_err());
    }
    let wanted = guard.may_start_in("web", WEB, Term(1), Uuid::nil()).unwrap();
    let second = guard.may_start_in("web", WEB, Term(1), Uuid::nil()).unwrap_err();
    assert_eq!(second.code, ErrorCode::Busy);
    drop(start(&guard).unwrap());
    answer(&guard, holder(1), HaVerdict::Ended { term: 1 }).unwrap();
    look(&guard, &[]);
    guard.vms_ended();
    answer(&guard, holder(1), granted(2)).unwrap();
    assert!(start(&guard).unwrap_err().message.contains("does not hold term 1"));
    drop(guard.starting("db", Uuid::from_u128(2)).unwrap());
    drop(wanted);
    drop(start(&guard).unwrap());
}

#[test]
fn an_attempt_that_was_carried_out_is_known_until_the_term_ends() {
    let host = Host::new();
    let guard = host.holding();
    let (first, second) = (Uuid::from_u128(11), Uuid::from_u128(12));
    let begin =
        |term: u64, attempt: Uuid| guard.may_start_in("web", WEB, Term(term), attempt).unwrap();
    let repeats = |term: u64, attempt: Uuid| begin(term, attempt).is_repeated();
    let failed = begin(1, first);
    assert!(guard.may_start_in("web", WEB, Term(1), first).is_err(), "it is in progress");
    drop(failed);
    let started = begin(1, first);
    assert!(!started.is_repeated());
    started.carried_out();
    for _ in 0..2 {
        assert!(repeats(1, first) && !repeats(1, second));
    }
    begin(1, first).carried_out();
    begin(1, Uuid::nil()).carried_out();
    assert!(!repeats(1, Uuid::nil()), "a manager that saved none");
    assert_eq!(guard.state.lock().gate.attempts, [first]);
    let older = (100..5099).map(Uuid::from_u128);
    guard.state.lock().gate.attempts = older.rev().take(4096).collect();
    begin(1, Uuid::from_u128(5099)).carried_out();
    assert!(repeats(1, Uuid::from_u128(5099)));
    assert_eq!(guard.state.lock().gate.attempts.len(), 4096);
    answer(&guard, holder(1), HaVerdict::Ended { term: 1 }).unwrap();
    look(&guard, &[]);
    guard.vms_ended();
    answer(&guard, holder(1), granted(2)).unwrap();
    assert!(guard.may_start_in("web", WEB, Term(1), first).is_err());
    assert!(!repeats(2, Uuid::from_u128(5099)));
}

#[test]
fn the_next_agent_knows_the_attempts_of_the_term() {
    let host = Host::new();
    drop(host.holding());
    host.lengthen_lease();
    let guard = host.guard(BOOT);
    let (first, second) = (Uuid::from_u128(11), Uuid::from_u128(12));
    let begin =
        |guard: &Arc<HaGuard>, attempt: Uuid| guard.may_start_in("web", WEB, Term(1), attempt);
    guard.files.disk.faults.plan(0, Errno::NOSPC.raw_os_error(), true);
    let error = begin(&guard, first).unwrap_err();
    assert_eq!(error.code, ErrorCode::HostFailed);
    guard.files.disk.faults.heal();
    let begun = begin(&guard, first).unwrap();
    assert!(!begun.is_repeated(), "it was not begun");
    // The agent ends in the middle.
    let next = host.guard(BOOT);
    assert!(begin(&next, first).unwrap().is_unfinished(), "it may have been carried out");
    begin(&next, first).unwrap().carried_out();
    assert!(!begin(&host.guard(BOOT), first).unwrap().is_unfinished());
    assert!(!begin(&next, second).unwrap().is_repeated());
    drop(begun);

    let path = host.0.path().join("state/ha-attempts.json");
    let saved = fs::read_to_string(&path).unwrap();
    let repeats = |text: &str| {
        fs::write(&path, text).unwrap();
        begin(&host.guard(BOOT), first).unwrap().is_repeated()
    };
    assert!(repeats(&saved));
    for other in [
        String::new(),
        "{}".to_owned(),
        saved.replace("\"term\":1", "\"term\":2"),
        saved.replace("\"format\":1", "\"format\":2"),
    ] {
        assert!(!repeats(&other), "{other}");
    }
    let many: Vec<Uuid> = (1..=5000).rev().map(Uuid::from_u128).collect();
    let mut long: serde_json::Value = serde_json::from_str(&saved).unwrap();
    long["attempts"] = serde_json::to_value(many).unwrap();
    fs::write(&path, long.to_string()).unwrap();
    let bounded = host.guard(BOOT);
    assert_eq!(bounded.state.lock().gate.attempts.len(), 4096);
    assert!(begin(&bounded, first).unwrap().is_repeated(), "the newest stay");
    fs::remove_file(&path).unwrap();
    assert!(!begin(&host.guard(BOOT), first).unwrap().is_repeated(), "an earlier version");
}

#[test]
fn a_process_that_does_not_end_is_said_once_a_minute() {
    let host = Host::new();
    let guard = host.holding();
    let say = || guard.should_say(PROCESS.0, PROCESS.1);
    assert!(say() && !say());
    pass(&guard, 50);
    assert!(!say() && guard.should_say(PROCESS.0, 0), "another process");
    pass(&guard, 10);
    assert!(say() && !say());
    let ends = || guard.note_ended(PROCESS.0, PROCESS.1);
    for (hangs, wait, rest) in [(true, 50, 10), (false, 0, 1)] {
        assert!(ends() && !ends());
        guard.try_again(PROCESS.0, PROCESS.1, hangs);
        pass(&guard, wait);
        assert!(!ends());
        pass(&guard, rest);
    }
    assert!(ends() && guard.cause_of_end(PROCESS.0, PROCESS.1).is_some());
}

#[test]
fn a_host_that_no_manager_asks_any_more_is_idle_again() {
    let host = Host::new();
    let guard = host.holding();
    pass(&guard, 601);
    assert!(!guard.is_forgotten(), "a term is held");
    look(&guard, &[PROCESS]);
    assert!(!guard.is_forgotten(), "it is being lost");
    look(&guard, &[]);
    guard.vms_ended();
    assert!(guard.is_forgotten() && !guard.is_idle());
    answer(&guard, holder(1), HaVerdict::Unknown).unwrap();
    assert!(!guard.is_forgotten());
    pass(&guard, 590);
    assert!(!guard.is_forgotten());
    pass(&guard, 10);
    assert!(guard.is_forgotten());
    look(&guard, &[PROCESS]);
    assert!(!guard.is_forgotten(), "a protected VM runs");
}

#[test]
fn answers_that_belong_to_nothing_change_nothing() {
    let host = Host::new();
    let guard = host.holding();
    let before = guard.files.left(Timing::default());
    let nonce = guard.renewal().nonce;
    for (nonce, verdict) in [
        (nonce.wrapping_add(1), granted(1)),
        (nonce, HaVerdict::Granted { term: 1, datastores: stores(4) }),
        (nonce, HaVerdict::Granted { term: 1, datastores: vec![Uuid::nil(); 2] }),
    ] {
        guard.answer(&HaAnswer { nonce, holder: holder(1), verdict }).unwrap_err();
    }
    let taken = HaAnswer { nonce, holder: holder(1), verdict: granted(1) };
    guard.answer(&taken).unwrap();
    assert_eq!(guard.answer(&taken).unwrap_err().code, ErrorCode::WrongState, "taken once");
    let old = guard.renewal().nonce;
    for _ in 0..MOST_RENEWALS {
        guard.renewal();
    }
    guard.answer(&HaAnswer { nonce: old, ..taken }).unwrap_err();
    assert_eq!(guard.state().standing, HaStanding::Held);
    assert_eq!(guard.files.left(Timing::default()).holder, before.holder);
}

#[test]
fn another_cluster_gets_a_host_whose_term_is_over_and_no_other() {
    let host = Host::new();
    let guard = host.holding();
    for verdict in [granted(9), HaVerdict::Ended { term: 1 }, HaVerdict::Unknown] {
        let error = answer(&guard, holder(2), verdict).unwrap_err();
        assert!(error.message.contains("another cluster"), "{error}");
        assert_eq!((guard.state().standing, guard.state().term), (HaStanding::Held, 1));
    }
    pass(&guard, 8);
    answer(&guard, holder(2), granted(9)).unwrap_err();
    look(&guard, &[]);
    guard.vms_ended();
    answer(&guard, holder(2), HaVerdict::Ended { term: 1 }).unwrap_err();
    answer(&guard, holder(2), granted(1)).unwrap();
    let renewal = guard.renewal();
    assert_eq!((renewal.holder, renewal.term, renewal.over), (Some(holder(2)), 1, false));
}

fn is_confirmed(ending: &mut Ending) -> bool {
    ending.answered.try_recv().is_ok()
}

/// Polls a future once. Returns whether it waits.
async fn waits(future: &mut (impl Future + Unpin)) -> bool {
    std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_pending()))
        .await
}

#[tokio::test]
async fn a_vm_that_is_new_to_a_host_waits_for_an_answer_to_a_renewal_that_names_it() {
    let host = Host::new();
    let guard = host.guard(BOOT);
    rest(&guard);
    guard.until_named("web", WEB).await.unwrap_err();
    let guard = host.holding();
    assert_eq!(guard.renewal().here, None, "nothing is listed yet");
    guard.know_here(guard.begin_here(), Some(BTreeSet::new()));
    let early = guard.renewal();
    assert_eq!(early.here, Some(Vec::new()));
    let mut naming = Box::pin(guard.until_named("web", WEB));
    assert!(waits(&mut naming).await && guard.check_answered("web", WEB).is_err());
    let late = HaAnswer { nonce: early.nonce, holder: holder(1), verdict: granted(1) };
    guard.answer(&late).unwrap();
    assert!(waits(&mut naming).await);
    answer(&guard, holder(1), HaVerdict::Unknown).unwrap();
    assert!(waits(&mut naming).await);
    assert_eq!(guard.renewal().here, Some(vec![WEB]));
    answer(&guard, holder(1), granted(1)).unwrap();
    guard.check_answered("web", WEB).unwrap();
    let starting = start(&guard).unwrap().named(naming.await.unwrap());
    guard.know_here(guard.begin_here(), Some(BTreeSet::new()));
    assert_eq!(guard.renewal().here, Some(vec![WEB]), "its start lasts");
    drop(starting);
    guard.know_here(guard.begin_here(), Some(BTreeSet::new()));
    assert_eq!(guard.renewal().here, Some(Vec::new()));
    // What the manager itself has requested does not wait.
    let in_term = guard.may_start_in("web", WEB, Term(1), Uuid::from_u128(1)).unwrap();
    drop(guard.until_named("web", WEB).await.unwrap());
    in_term.carried_out();
    assert_eq!(guard.renewal().here, Some(vec![WEB]));
}

#[test]
fn protection_ends_once_the_manager_has_answered_a_renewal_that_names_the_vm() {
    let host = Host::new();
    let guard = host.guard(BOOT);
    assert!(guard.end_protection("web", WEB, false).unwrap().is_none(), "no manager uses HA");
    let guard = host.holding();
    let early = guard.renewal();
    let mut ending = guard.end_protection("web", WEB, false).unwrap().unwrap();
    let late = HaAnswer { nonce: early.nonce, holder: holder(1), verdict: granted(1) };
    guard.answer(&late).unwrap();
    assert!(early.ending.is_empty() && !is_confirmed(&mut ending));
    assert_eq!((guard.renewal().ending, guard.state().ending), (vec![WEB], vec!["web".into()]));
    answer(&guard, holder(1), HaVerdict::Unknown).unwrap();
    assert!(!is_confirmed(&mut ending));
    answer(&guard, holder(1), granted(1)).unwrap();
    assert!(is_confirmed(&mut ending));
    ending.ended();
    pass(&guard, 7);
    answer(&guard, holder(1), granted(1)).unwrap();
    assert_eq!(guard.renewal().ending, [WEB], "until the manager sees it");
    assert!(guard.state().ending.is_empty());
    pass(&guard, 4);
    assert!(guard.renewal().ending.is_empty());
}

#[test]
fn protection_that_does_not_end_is_not_named_and_not_confirmed() {
    let host = Host::new();
    let guard = host.holding();
    drop(guard.end_protection("web", WEB, false).unwrap());
    assert!(guard.renewal().ending.is_empty());
    let first = guard.end_protection("web", WEB, false).unwrap().unwrap();
    let named = guard.renewal();
    assert_eq!(named.ending, [WEB]);
    first.ended();
    guard.keep_protection(WEB);
    assert!(guard.renewal().ending.is_empty());
    let mut second = guard.end_protection("web", WEB, false).unwrap().unwrap();
    let late = HaAnswer { nonce: named.nonce, holder: holder(1), verdict: granted(1) };
    guard.answer(&late).unwrap();
    assert!(!is_confirmed(&mut second), "the manager has seen it protected since");
    let other = |number: usize| Uuid::from_u128(number as u128);
    let others: Vec<_> =
        (1..MOST_ENDING).map(|at| guard.end_protection("db", other(at), false).unwrap()).collect();
    let refused = guard.end_protection("db", other(MOST_ENDING), false).unwrap_err();
    assert_eq!((refused.code, others.len() + 1), (ErrorCode::Busy, MOST_ENDING));
    assert_eq!(guard.renewal().ending.len(), MOST_ENDING);
}

#[test]
fn without_a_term_only_the_protection_of_a_stopped_vm_ends() {
    let host = Host::new();
    let guard = host.holding();
    answer(&guard, holder(1), HaVerdict::Ended { term: 1 }).unwrap();
    for is_stopped in [true, false] {
        let error = guard.end_protection("web", WEB, is_stopped).unwrap_err();
        assert_eq!(error.code, ErrorCode::WrongState, "it may still run");
    }
    look(&guard, &[]);
    guard.vms_ended();
    let error = guard.end_protection("web", WEB, false).unwrap_err();
    assert!(error.message.ends_with("the manager has not confirmed it"), "{error}");
    let mut ending = guard.end_protection("web", WEB, true).unwrap().unwrap();
    answer(&guard, holder(1), HaVerdict::Ended { term: 1 }).unwrap();
    answer(&guard, holder(1), granted(1)).unwrap();
    assert!(!is_confirmed(&mut ending));
    answer(&guard, holder(1), HaVerdict::Rest { term: 1 }).unwrap();
    assert!(is_confirmed(&mut ending) && guard.renewal().over);
    drop(ending);
    let mut ending = guard.end_protection("web", WEB, true).unwrap().unwrap();
    answer(&guard, holder(1), granted(2)).unwrap();
    assert!(is_confirmed(&mut ending), "a new term");
}

#[test]
fn a_host_without_protected_vms_gives_its_term_up_to_rest() {
    let host = Host::new();
    let guard = host.holding();
    let rests = |term: u64| {
        answer(&guard, holder(1), HaVerdict::Rest { term }).unwrap();
        guard.state().standing != HaStanding::Held
    };
    let starting = start(&guard).unwrap();
    assert!(!rests(1), "one starts");
    starting.process(PROCESS.0, PROCESS.1).unwrap();
    drop(starting);
    assert!(!rests(1), "it is not listed yet");
    look(&guard, &[PROCESS]);
    for _ in 0..3 {
        pass(&guard, 5);
        assert!(!rests(1), "one runs, and the term is renewed");
    }
    look(&guard, &[]);
    let wanted = guard.may_start_in("web", WEB, Term(1), Uuid::nil()).unwrap();
    assert!(!rests(1), "the manager starts one");
    drop(wanted);
    assert!(!rests(0) && !rests(2), "another term");
    assert!(rests(1) && start(&guard).is_err());
    assert!(!guard.renewal().over, "not proven yet");
    assert_eq!(look(&guard, &[]), Order::Stop);
    guard.vms_ended();
    assert!(guard.renewal().over && rests(1) && rests(2));
    answer(&guard, holder(1), granted(2)).unwrap();
    drop(start(&guard).unwrap());
}

#[test]
fn heartbeats_are_written_while_the_term_is_held_and_prolong_it() {
    let host = Host::new();
    let guard = host.holding();
    let duty = guard.heartbeats().borrow().clone().unwrap();
    assert_eq!((duty.holder, duty.term, duty.datastores), (holder(1), Term(1), stores(1)));
    pass(&guard, 6);
    guard.confirm_written(Term(1), 0, guard.clock.now());
    guard.confirm_written(Term(1), 7, guard.clock.now());
    pass(&guard, 6);
    guard.write_failed(Term(1), 0, "it hangs".to_owned());
    let shown = guard.state();
    assert_eq!(shown.standing, HaStanding::Held);
    assert!(shown.lease_left_ms.is_some_and(|left| left <= 2000), "{shown:?}");
    assert!(shown.datastores[0].written_ms_ago.is_some_and(|ago| ago >= 6000), "{shown:?}");
    assert_eq!(shown.datastores[0].problem.as_deref(), Some("it hangs"));
    assert_eq!(shown.heartbeat_failures, 1);
    assert!(shown.answered_ms_ago.is_some_and(|ago| ago >= 12000), "{shown:?}");
    pass(&guard, 2);
    guard.confirm_written(Term(1), 0, guard.clock.now());
    assert_eq!(guard.state().standing, HaStanding::Stopping);
    assert_eq!(*guard.heartbeats().borrow(), None);
}

#[test]
fn an_agent_started_again_holds_the_lease_and_a_booted_host_does_not() {
    let host = Host::new();
    drop(host.holding());
    let again = host.guard(BOOT);
    assert_eq!((again.state().standing, again.state().term), (HaStanding::Held, 1));
    assert_eq!(again.heartbeats().borrow().as_ref().unwrap().datastores, stores(1));
    for boot_id in ["boot-2", ""] {
        let booted = host.guard(boot_id);
        assert_eq!((booted.state().standing, booted.state().term), (HaStanding::Stopping, 1));
        assert!(!booted.renewal().over, "protected VMs may still run");
        answer(&booted, holder(1), granted(2)).unwrap();
        assert!(start(&booted).is_err());
    }
    let booted = host.guard("boot-2");
    rest(&booted);
    assert!(booted.renewal().over);
    answer(&booted, holder(1), granted(1)).unwrap();
    assert!(start(&booted).is_err(), "a term is held once");
    answer(&booted, holder(1), granted(2)).unwrap();
    drop(start(&booted).unwrap());
}

#[test]
fn a_lost_term_that_cannot_be_saved_is_not_reported_over() {
    let host = Host::new();
    let guard = host.holding();
    answer(&guard, holder(1), HaVerdict::Ended { term: 1 }).unwrap();
    look(&guard, &[]);
    guard.files.disk.faults.plan(0, Errno::IO.raw_os_error(), true);
    guard.vms_ended();
    assert!(!guard.renewal().over);
    guard.files.disk.faults.heal();
    // Without the file, the next agent ends all protected VMs.
    guard.files.disk.faults.plan(0, Errno::IO.raw_os_error(), false);
    guard.vms_ended();
    assert!(guard.renewal().over);
    assert!(!host.0.path().join("run/ha.json").exists());
}

#[test]
fn damaged_files_give_no_term() {
    let host = Host::new();
    drop(host.holding());
    let (state, run) = (host.0.path().join("state/ha.json"), host.0.path().join("run/ha.json"));
    let (term, lease) = (fs::read(&state).unwrap(), fs::read(&run).unwrap());
    for damaged in [&b""[..], b"{}", b"null", b"\xff\xff", &lease[..lease.len() - 1]] {
        fs::write(&run, damaged).unwrap();
        assert_eq!(host.guard(BOOT).state().standing, HaStanding::Stopping);
    }
    fs::write(&run, &lease).unwrap();
    assert_eq!(host.guard(BOOT).state().standing, HaStanding::Held);
    let text = String::from_utf8(term).unwrap();
    for other in [
        text.replace("\"term\":1", "\"term\":2"),
        text.replace("\"format\":1", "\"format\":2"),
        text.replace("0001", "0002"),
        String::new(),
    ] {
        fs::write(&state, other).unwrap();
        assert_eq!(host.guard(BOOT).state().standing, HaStanding::Stopping);
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Granted(u64),
    Ended(u64),
    Rests(u64),
    StartBegins,
    StartEnds,
    Attempted(u128, bool),
    Passed(u64),
    Looked,
    Saved,
    AgentStarted,
    Booted(u64),
    DiskFails(usize),
    DiskHeals,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0_u64..5).prop_map(Event::Granted),
        1 => (0_u64..5).prop_map(Event::Ended),
        2 => (0_u64..5).prop_map(Event::Rests),
        2 => Just(Event::StartBegins),
        2 => Just(Event::StartEnds),
        3 => (1_u128..4, any::<bool>()).prop_map(|(id, starts)| Event::Attempted(id, starts)),
        3 => (0_u64..5).prop_map(Event::Passed),
        4 => Just(Event::Looked),
        2 => Just(Event::Saved),
        2 => Just(Event::AgentStarted),
        1 => (0_u64..3).prop_map(Event::Booted),
        1 => (0_usize..6).prop_map(Event::DiskFails),
        1 => Just(Event::DiskHeals),
    ]
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Fetched,
    Answered(usize),
    Began,
    Saved,
    GivenUp,
    Protected,
    Passed(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Fetched),
        4 => (0_usize..4).prop_map(Step::Answered),
        3 => Just(Step::Began),
        3 => Just(Step::Saved),
        1 => Just(Step::GivenUp),
        2 => Just(Step::Protected),
        2 => (0_u64..5).prop_map(Step::Passed),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// With agents that end at any moment, boots and disks that fail: a term that was lost or given
    /// up is never held again, none is held before it is on the disk, none is over while a VM
    /// starts in it, and no attempt of a start is carried out twice in it.
    #[test]
    fn a_term_is_held_once_by_all_agents_of_a_host(
        events in prop::collection::vec(event(), 1..40),
    ) {
        let host = Host::new();
        let mut boot = BOOT.to_owned();
        let mut guard = host.guard(&boot);
        let (mut over, mut starting) = (Term(0), None);
        let mut carried_out = BTreeSet::new();
        for event in events {
            match event {
                Event::Granted(term) => drop(answer(&guard, holder(1), granted(term))),
                Event::Ended(term) => {
                    drop(answer(&guard, holder(1), HaVerdict::Ended { term }));
                }
                Event::Rests(term) => {
                    drop(answer(&guard, holder(1), HaVerdict::Rest { term }));
                }
                Event::StartBegins => starting = start(&guard).ok(),
                Event::StartEnds => starting = None,
                Event::Attempted(id, starts) => {
                    let term = guard.renewal().term;
                    let begun = guard.may_start_in("web", WEB, Term(term), Uuid::from_u128(id));
                    if let Ok(begun) = begun
                        && !begun.is_repeated()
                        && starts
                    {
                        prop_assert!(carried_out.insert((term, id)), "{id} in {term}");
                        begun.carried_out();
                    }
                }
                Event::Passed(seconds) => pass(&guard, seconds),
                Event::Looked => {
                    if look(&guard, &[]) != Order::Run {
                        guard.vms_ended();
                    }
                }
                Event::Saved => guard.save_lease(),
                Event::AgentStarted => {
                    starting = None;
                    let ahead = guard.clock.ahead_ms.load(Ordering::SeqCst);
                    guard = host.guard(&boot);
                    guard.clock.ahead_ms.store(ahead, Ordering::SeqCst);
                }
                Event::Booted(number) => {
                    starting = None;
                    boot = format!("boot-of-{number}-after-{boot}");
                    guard = host.guard(&boot);
                }
                Event::DiskFails(step) => {
                    guard.files.disk.faults.plan(step, Errno::IO.raw_os_error(), true);
                }
                Event::DiskHeals => guard.files.disk.faults.heal(),
            }
            let renewal = guard.renewal();
            let held = guard.state().standing == HaStanding::Held;
            prop_assert!(!held || Term(renewal.term) > over, "{renewal:?}, over {over}");
            if held {
                let text = fs::read_to_string(host.0.path().join("state/ha.json")).unwrap();
                prop_assert!(text.contains(&format!("\"term\":{}", renewal.term)), "{text}");
            }
            if renewal.over {
                prop_assert!(starting.is_none());
                prop_assert!(Term(renewal.term) >= over, "{renewal:?}, over {over}");
                over = Term(renewal.term);
            }
        }
    }

    /// Whatever is lost, late or given up: protection ends only after the manager has noted that it
    /// does, and the manager's note stays.
    #[test]
    fn the_manager_knows_of_each_end_of_a_protection(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let host = Host::new();
        let guard = host.holding();
        let (mut is_noted, mut is_protected) = (false, true);
        let (mut answers, mut ending) = (Vec::new(), None);
        for step in steps {
            match step {
                Step::Fetched => {
                    let renewal = guard.renewal();
                    is_noted = renewal.ending.contains(&WEB) || is_noted && !is_protected;
                    answers.push(renewal.nonce);
                }
                Step::Answered(_) if answers.is_empty() => {}
                Step::Answered(at) => {
                    let nonce = answers.remove(at % answers.len());
                    let answer = HaAnswer { nonce, holder: holder(1), verdict: granted(1) };
                    drop(guard.answer(&answer));
                }
                Step::Began if is_protected && ending.is_none() => {
                    ending = guard.end_protection("web", WEB, false).ok().flatten();
                }
                Step::Saved => {
                    if let Some(confirmed) = ending.take_if(is_confirmed) {
                        is_protected = false;
                        confirmed.ended();
                    }
                }
                Step::GivenUp => ending = None,
                Step::Protected if !is_protected => {
                    guard.keep_protection(WEB);
                    is_protected = true;
                }
                Step::Began | Step::Protected => {}
                Step::Passed(seconds) => pass(&guard, seconds),
            }
            prop_assert!(is_protected || is_noted);
        }
    }
}
