//! One cause each.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_of_an_ended_term_starts_once_on_another_host() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.dies("a");
    assert!(rig.step().await.is_empty(), "the term is not over");
    rig.ends("a").await;
    assert_eq!(rig.restarts.status().vms[0].restart.as_deref(), Some("waits for its turn"));
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts(), [("b".to_owned(), 1)]);
    rig.ends("a").await;
    rig.restarts.follow().await.unwrap();
    assert!(rig.step().await.is_empty());
    let record = rig.record();
    assert_eq!((record.host.as_str(), record.runs, record.restart), ("b", true, None));
    {
        let inventory = rig.state().inventory();
        assert_eq!((inventory.holder(WEB), inventory.conflict_count()), (Some("b"), 0));
        assert_eq!(inventory.vm_info(WEB).unwrap().host, "b");
    }
    let journal = rig.store.read("journal/").await.unwrap().items;
    assert!(journal.iter().any(|item| item.value.contains("vm-restarted")));
    // The host that comes back gives up its definition.
    let released = rig.restarts.take_releases("a").await.unwrap();
    assert_eq!((released.len(), released[0].incarnation), (1, Incarnation::new(1)));
    assert_eq!((released[0].name.as_str(), released[0].to.as_str()), (WEB, "b"));
    rig.returns("a").await;
    assert_eq!(rig.restarts.take_releases("a").await.unwrap(), []);
    rig.restarts.follow().await.unwrap();
    assert_eq!(rig.record().host, "b");
    assert_eq!(rig.world().running(), ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_may_have_it_holds_the_restart_up() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.dies("a");
    rig.state().lost("c", "no route to host");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "host c does not respond"));
    assert_eq!(rig.starts(), []);
    rig.dies("c");
    rig.ends("c").await;
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts(), [("b".to_owned(), 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_left_the_cluster_with_its_term_may_have_it() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.state().change(|inventory| inventory.forget_host("c"));
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "it left the cluster"));
    assert_eq!(rig.starts(), []);
    rig.ends("c").await;
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts(), [("b".to_owned(), 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_else_starts_a_vm_that_is_being_restarted() {
    let mut rig = Rig::begin(&["a", "b", "c"]).await;
    let check = |rig: &Rig| rig.restarts.means.admission.check_restart(WEB);
    assert_eq!(check(&rig), Ok(()));
    rig.world().replies.insert("b".to_owned(), Reply::StartsUnanswered);
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "may have started it"));
    // Its former host would start it as well: it has its definition, and a new term.
    rig.returns("a").await;
    let refused = check(&rig).unwrap_err();
    assert!(refused.detail.contains("being restarted"), "{}", refused.detail);
    rig.next_leader().await;
    assert!(check(&rig).is_err());
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(check(&rig), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_nobody_saw_end_is_taken_as_the_truth() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.dies("a");
    rig.world().vms.insert(("c".to_owned(), WEB.to_owned()), VmInfo { epoch: 4, ..web("c") });
    rig.ends("a").await;
    assert_eq!(rig.step().await, [Outcome::Done]);
    let record = rig.record();
    assert_eq!((rig.starts(), record.host.as_str(), record.restart), (vec![], "c", None));
    // Its former host settles the move itself.
    assert_eq!(rig.restarts.take_releases("a").await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_in_doubt_or_arriving_waits() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.dies("a");
    let key = ("c".to_owned(), WEB.to_owned());
    let arriving = VmInfo { state: VmState::MigratingIn, ..web("c") };
    rig.world().vms.insert(key.clone(), arriving);
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "was arriving at host c"));
    let doubtful = VmInfo { state: VmState::Paused, in_doubt: true, ..web("c") };
    rig.world().vms.insert(key.clone(), doubtful);
    assert!(waits(&rig.step().await, "in doubt"));
    let mut another = web("c");
    another.spec.uuid = Some(Uuid::from_u128(8));
    rig.world().vms.insert(key.clone(), another);
    assert!(waits(&rig.step().await, "another VM of that name"));
    assert_eq!(rig.starts(), []);
    rig.world().vms.remove(&key);
    assert_eq!(rig.step().await, [Outcome::Done]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_binds_the_start_to_its_host_until_that_term_ends() {
    let mut rig = Rig::begin(&["a", "b", "c"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::Delayed);
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "host b may have started it"));
    rig.next_leader().await;
    // A refusal is no answer to the request before.
    rig.world().replies.insert("b".to_owned(), Reply::Refuses);
    assert!(waits(&rig.step().await, "host b refuses"));
    rig.dies("b");
    assert!(waits(&rig.step().await, "host b does not respond"));
    assert!(rig.starts().iter().all(|(host, _)| host == "b"));
    rig.ends("b").await;
    assert!(waits(&rig.step().await, "failed while it started"));
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts().last(), Some(&("c".to_owned(), 1)));
    // What it may have is asked for before it holds a term.
    rig.restarts.take_releases("b").await.unwrap_err();
    rig.world().dead.remove("b");
    assert_eq!(rig.restarts.take_releases("b").await.unwrap(), []);
    assert_eq!(rig.restarts.releases_of("b").len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_whose_answer_was_lost_is_found() {
    let mut rig = Rig::begin(&["a", "b", "c"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::StartsUnanswered);
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "may have started"));
    rig.next_leader().await;
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts().len(), 1);
    assert_eq!((rig.record().host.as_str(), rig.world().running()), ("b", vec!["b"]));
    assert_eq!(rig.restarts.take_releases("a").await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_starts_what_one_refuses() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::Refuses);
    rig.dies("a");
    rig.ends("a").await;
    let refused = rig.step().await;
    assert!(matches!(&refused[..], [Outcome::Refused { host, .. }] if host == "b"), "{refused:?}");
    let shown = rig.restarts.status().vms[0].restart.clone().unwrap();
    assert!(shown.contains("it has no memory"), "{shown}");
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts(), [("b".to_owned(), 1), ("c".to_owned(), 1)]);
    // When all refuse, all get another turn.
    let rig = Rig::begin(&["a", "b"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::Refuses);
    rig.dies("a");
    rig.ends("a").await;
    rig.step().await;
    assert!(rig.step().await.is_empty());
    rig.world().replies.clear();
    assert_eq!(rig.step().await, [Outcome::Done]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_back_first_starts_its_vm_itself() {
    let rig = Rig::begin(&["a", "b"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::Refuses);
    rig.dies("a");
    rig.ends("a").await;
    rig.step().await;
    rig.returns("a").await;
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts().last(), Some(&("a".to_owned(), 2)));
    assert_eq!(rig.restarts.take_releases("a").await.unwrap(), []);
    assert_eq!(rig.record().host, "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_gets_no_term_while_its_vm_may_start_elsewhere() {
    let rig = Rig::begin(&["a", "b"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::Delayed);
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "may have started"));
    let refused = rig.restarts.take_releases("a").await.unwrap_err();
    assert!(refused.detail.contains("host b may start VM \"web\""), "{refused}");
    rig.world().replies.clear();
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.restarts.take_releases("a").await.unwrap().len(), 1);
    // A host that is about to hold a term keeps its VM.
    let rig = Rig::begin(&["a", "b"]).await;
    rig.dies("a");
    rig.ends("a").await;
    assert_eq!(rig.restarts.take_releases("a").await.unwrap(), []);
    assert!(waits(&rig.step().await, "is about to hold a term again"));
    assert_eq!((rig.starts(), rig.record().restart.unwrap().attempt), (vec![], None));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_vms_that_should_run_restart() {
    let rig = Rig::begin(&["a", "b"]).await;
    let report = |info: VmInfo| rig.state().apply("a", HostEvent::Vm(Box::new(info)));
    report(VmInfo { state: VmState::Stopped, ..web("a") });
    rig.ends("a").await;
    assert_eq!(rig.record().restart, None);
    rig.terms.set("a", HostTerm { term: 1, phase: HaPhase::Watching });
    report(web("a"));
    rig.restarts.follow().await.unwrap();
    // Its guard has ended it.
    report(VmInfo { state: VmState::Failed, ..web("a") });
    rig.restarts.follow().await.unwrap();
    assert!(rig.record().runs);
    rig.ends("a").await;
    assert!(rig.record().restart.is_some());
    // A VM that is no longer protected, and one that is deleted, are forgotten.
    let rig = Rig::begin(&["a", "b"]).await;
    let mut unprotected = web("a");
    unprotected.spec.protect = None;
    rig.state().apply("a", HostEvent::Vm(Box::new(unprotected)));
    rig.restarts.follow().await.unwrap();
    assert_eq!(rig.restarts.protected(), [""; 0]);
    rig.state().apply("a", HostEvent::Vm(Box::new(web("a"))));
    rig.restarts.follow().await.unwrap();
    assert_eq!(rig.restarts.protected(), [WEB]);
    rig.state().apply("a", HostEvent::VmGone(WEB.to_owned()));
    rig.restarts.follow().await.unwrap();
    assert_eq!(PROTECTED.read_all(&rig.store).await.unwrap().records.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_with_a_local_disk_or_a_tpm_is_named() {
    let rig = Rig::begin(&["a", "b"]).await;
    rig.restarts.find_problems();
    assert_eq!(rig.restarts.status().vms[0].problem, None);
    let report = |info: VmInfo| rig.state().apply("a", HostEvent::Vm(Box::new(info)));
    let mut local = web("a");
    let disks = serde_json::json!([{ "path": "/srv/vms/web.raw", "format": "raw" }]);
    local.spec.disks = serde_json::from_value(disks).unwrap();
    report(local);
    rig.restarts.follow().await.unwrap();
    rig.restarts.find_problems();
    let problem = rig.restarts.status().vms[0].problem.clone().unwrap();
    assert!(problem.contains("no other host has /srv/vms/web.raw"), "{problem}");
    rig.restarts.report_troubles();
    let troubles = rig.restarts.means.troubles.all();
    assert_eq!((troubles.len(), troubles[0].object.as_str()), (1, "vm:web"));
    rig.dies("a");
    rig.ends("a").await;
    assert!(rig.step().await.is_empty());
    let shown = rig.restarts.status().vms[0].restart.clone().unwrap();
    assert!(shown.contains("it does not have /srv/vms/web.raw"), "{shown}");
    let mut tpm = web("a");
    tpm.spec.tpm = true;
    let inventory = rig.state().inventory();
    let problem = protected_from(&tpm.spec, "a", &inventory).host_devices;
    assert_eq!(problem, ["the TPM"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_disk_is_known_although_its_host_never_reported_to_this_leader() {
    let rig = Rig::begin(&["a", "b"]).await;
    let identity = "1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10";
    for host in ["a", "b"] {
        let mut info = rig::host(host, None);
        info.vm_dirs = vec!["/srv/vms".into()];
        let found = serde_json::json!({ "/srv/vms": {
            "total_bytes": 100, "free_bytes": 40, "identity": identity,
        } });
        info.datastores = serde_json::from_value(found).unwrap();
        rig.state().apply(host, HostEvent::Host(Box::new(info)));
    }
    let mut shared = web("a");
    let disks = serde_json::json!([{ "path": "/srv/vms/web.raw", "format": "raw" }]);
    shared.spec.disks = serde_json::from_value(disks).unwrap();
    rig.state().apply("a", HostEvent::Vm(Box::new(shared)));
    rig.restarts.follow().await.unwrap();
    let record = rig.record();
    let mut inventory = crate::cluster::inventory::Inventory::default();
    let info = HostInfo::clone(rig.state().inventory().host_info("b").unwrap());
    rig::put_host(&mut inventory, info, &[], Vec::new());
    assert_eq!(following::images_missing_at("b", &record, &inventory), [""; 0]);
    let other = SavedVm { datastores: BTreeMap::new(), ..record };
    assert_eq!(following::images_missing_at("b", &other, &inventory).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_whose_protection_is_about_to_end_starts_nowhere_else() {
    let mut rig = Rig::begin(&["a", "b"]).await;
    rig.unprotects("a").await.unwrap();
    rig.next_leader().await;
    rig.dies("a");
    rig.ends("a").await;
    assert!(rig.step().await.is_empty());
    assert_eq!((rig.record().restart, rig.starts()), (None, vec![]));
    let shown = rig.restarts.status().vms[0].problem.clone().unwrap();
    assert!(shown.contains("about to end"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_stays_until_the_host_says_that_the_vm_is_protected() {
    let rig = Rig::begin(&["a", "b"]).await;
    let is_marked = || !rig.restarts.known().endings.is_empty();
    let vm = web("a").spec.uuid.unwrap();
    // The manager has not heard of the change.
    let changed = rig.unprotects("a").await.unwrap();
    rig.settle("a").await;
    assert!(is_marked());
    let key = ("a".to_owned(), WEB.to_owned());
    rig.world().vms.insert(key.clone(), web("a"));
    rig.restarts.settle_endings("a", &[vm], Duration::from_secs(60)).await.unwrap();
    assert!(is_marked(), "the renewal names it");
    rig.world().dead.insert("a".to_owned());
    rig.settle("a").await;
    assert!(is_marked(), "the host does not answer");
    rig.world().dead.clear();
    rig.settle("a").await;
    assert!(!is_marked() && ENDINGS.read_all(&rig.store).await.unwrap().records.is_empty());
    // A change that the manager has heard of needs no mark.
    rig.unprotects("a").await.unwrap();
    rig.state().apply("a", HostEvent::Vm(Box::new(changed)));
    rig.restarts.follow().await.unwrap();
    rig.settle("a").await;
    assert!(!is_marked());
    let many: Vec<Uuid> = (0..=64).map(Uuid::from_u128).collect();
    rig.restarts.note_endings("a", &many).await.unwrap_err();
    assert!(!is_marked());
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_to_an_agent_that_hangs_do_not_cost_a_lease() {
    let rig = Rig::begin(&["a", "b"]).await;
    let record = rig.record();
    let mut marked = Vec::new();
    for number in 20..25 {
        let mut vm = record.clone();
        vm.spec.name = format!("vm-{number}");
        vm.spec.uuid = Some(Uuid::from_u128(number));
        marked.extend(vm.spec.uuid);
        rig.restarts.known().vms.insert(vm.spec.name.clone(), vm);
    }
    rig.restarts.note_endings("a", &marked).await.unwrap();
    rig.world().hanging.insert("a".to_owned(), 0);
    let limit = Duration::from_millis(20);
    rig.restarts.settle_endings("a", &[], limit).await.unwrap();
    // None, if this machine has stalled for as long.
    assert!(rig.world().hanging["a"] <= 1, "all questions together have one limit");
    assert_eq!(rig.restarts.endings_of("a").len(), marked.len());
    // What it may have made without an answer: it is asked which life that is.
    let (key, release) = releases::release(&record, "a", None, "b");
    rig.restarts.known().releases.insert(key, release);
    rig.restarts.take_releases("a").await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_host_where_the_protection_ended_holds_the_restart_up() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::StartsUnanswered);
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "may have started"));
    rig.unprotects("b").await.unwrap();
    rig.dies("b");
    rig.ends("b").await;
    let outcomes = rig.step().await;
    assert!(waits(&outcomes, "does not respond"), "{outcomes:?}");
    assert_eq!(rig.world().running(), ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_whose_protection_ended_may_have_moved_to_any_silent_host() {
    let rig = Rig::begin(&["a", "b", "c", "d"]).await;
    // The manager hears of neither move.
    rig.world().moves("a", "b").unwrap();
    rig.unprotects("b").await.unwrap();
    rig.world().moves("b", "c").unwrap();
    for host in ["a", "c"] {
        rig.dies(host);
        rig.ends(host).await;
    }
    assert!(waits(&rig.step().await, "does not respond"));
    assert_eq!(rig.world().running(), ["c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_report_of_a_silent_host_starts_nothing() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    // The manager hears from host a that the VM moves to b, and nothing after that.
    let mut leaving = web("a");
    (leaving.state, leaving.migration) = (VmState::MigratingOut, Some("m1".to_owned()));
    rig.state().apply("a", HostEvent::Vm(Box::new(leaving)));
    let begun = MigrationStatus::begun("m1", WEB, "a", "b", 1);
    rig.state().apply("a", HostEvent::Migration(Box::new(begun)));
    let moved = rig.world().moves("a", "b").unwrap();
    rig.loses("a");
    rig.state().apply("b", HostEvent::Vm(Box::new(moved)));
    rig.restarts.follow().await.unwrap();
    assert_eq!(rig.record().host, "b");
    // Its protection ends there, and nothing that could start it elsewhere seems to be left.
    let unprotected = rig.unprotects("b").await.unwrap();
    rig.state().apply("b", HostEvent::Vm(Box::new(unprotected)));
    rig.restarts.follow().await.unwrap();
    rig.settle("b").await;
    assert!(rig.restarts.endings_of("b").is_empty());
    assert!(!rig.restarts.known().vms.contains_key(WEB));
    // It returns to a, whose last report is of the time when it was protected.
    rig.world().moves("b", "a").unwrap();
    rig.state().apply("b", HostEvent::VmGone(WEB.to_owned()));
    rig.ends("a").await;
    rig.step().await;
    assert_eq!(rig.starts(), []);
    assert_eq!(rig.world().running(), ["a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_was_carried_out_and_left_is_looked_for() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::StartsUnanswered);
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "may have started"));
    let attempt = rig.record().restart.unwrap().attempt.unwrap();
    // It moves on and is deleted there: no host has it, and host b starts it no more.
    rig.world().moves("b", "c").unwrap();
    rig.state().apply("b", HostEvent::VmGone(WEB.to_owned()));
    rig.world().vms.remove(&("c".to_owned(), WEB.to_owned()));
    assert!(waits(&rig.step().await, "has left host b"));
    assert_eq!(rig.record().restart.unwrap().attempt, None);
    rig.world().replies.clear();
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts().len(), 3);
    assert_eq!(rig.world().running().len(), 1);
    // A late repetition of the first request starts nothing.
    let request = StartProtected { spec: web("b").spec, term: 1, attempt: attempt.id };
    let late = rig.world().start("b", &request);
    assert!(matches!(late, Err(NotStarted::HasLeft(_))) || rig.record().host == "b");
    assert_eq!(rig.world().running().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_was_carried_out_and_stopped_is_over() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.world().replies.insert("b".to_owned(), Reply::StartsUnanswered);
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "may have started"));
    let key = ("b".to_owned(), WEB.to_owned());
    rig.world().vms.get_mut(&key).unwrap().state = VmState::Stopped;
    rig.world().replies.clear();
    assert_eq!(rig.step().await, [Outcome::Done]);
    let record = rig.record();
    assert_eq!((record.host.as_str(), record.restart), ("b", None));
    rig.restarts.follow().await.unwrap();
    assert!(!rig.record().runs);
    assert_eq!(rig.world().running().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn definitions_that_hosts_had_before_a_start_are_released_after_a_lost_answer() {
    let mut rig = Rig::begin(&["a", "b", "c", "d"]).await;
    let former = |host: &str, number| VmInfo {
        state: VmState::Failed,
        incarnation: Incarnation::new(number),
        ..web(host)
    };
    // Host c answers that it has one; host d, whose term is over, does not answer.
    for (host, number) in [("c", 31), ("d", 41)] {
        let info = former(host, number);
        rig.world().vms.insert((host.to_owned(), WEB.to_owned()), info.clone());
        rig.state().apply(host, HostEvent::Vm(Box::new(info)));
    }
    for host in ["a", "d"] {
        rig.dies(host);
        rig.ends(host).await;
    }
    rig.world().replies.insert("b".to_owned(), Reply::StartsUnanswered);
    rig.world().replies.insert("c".to_owned(), Reply::Refuses);
    while rig.record().restart.is_none_or(|restart| restart.attempt.is_none()) {
        rig.step().await;
    }
    assert!(rig.record().restart.unwrap().attempt.is_some_and(|attempt| attempt.host == "b"));
    // Until the start is certain, none of them may start what it has.
    for host in ["a", "c", "d"] {
        rig.restarts.take_releases(host).await.unwrap_err();
    }
    rig.next_leader().await;
    assert_eq!(rig.step().await, [Outcome::Done]);
    for (host, number) in [("a", 1), ("c", 31), ("d", 41)] {
        rig.world().dead.remove(host);
        let released = rig.restarts.take_releases(host).await.unwrap();
        let of_host: Vec<_> = released.iter().map(|vm| (vm.incarnation, vm.to.as_str())).collect();
        assert_eq!(of_host, [(Incarnation::new(number), "b")], "{host}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_host_holds_up_only_vms_that_it_may_have() {
    // Its last renewal named nothing.
    let rig = Rig::begin(&["a", "b", "c"]).await;
    rig.renews("c").await;
    rig.loses("c");
    rig.dies("a");
    rig.ends("a").await;
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.world().running(), ["b"]);
    // The VM was arriving there, or its agent is of an earlier version, or this leader is new.
    for (silent, arrives, is_new_leader) in
        [("c", true, false), (EARLIER, false, false), ("c", false, true)]
    {
        let mut rig = Rig::begin(&["a", "b", silent]).await;
        if arrives {
            assert!(rig.world().moves_by_agents("a", silent).is_none(), "it waits");
        }
        rig.renews(silent).await;
        rig.loses(silent);
        if is_new_leader {
            rig.next_leader().await;
        }
        rig.dies("a");
        rig.ends("a").await;
        let outcomes = rig.step().await;
        assert!(waits(&outcomes, "does not respond"), "{silent}: {outcomes:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_renewal_names_a_vm_has_it_whatever_it_answers() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    // It was asked for the VM before the VM began to arrive there.
    assert!(rig.world().moves_by_agents("a", "c").is_none(), "it waits");
    rig.renews("c").await;
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "its answer and its reports differ"));
    rig.world().arriving.remove("c");
    rig.renews("c").await;
    assert_eq!(rig.step().await, [Outcome::Done]);
    assert_eq!(rig.starts().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_host_that_was_asked_to_start_a_vm_holds_it_up() {
    let rig = Rig::begin(&["a", "b", "c"]).await;
    for host in ["b", "c"] {
        rig.renews(host).await;
    }
    rig.world().replies.insert("b".to_owned(), Reply::StartsUnanswered);
    rig.dies("a");
    rig.ends("a").await;
    assert!(waits(&rig.step().await, "may have started"));
    rig.loses("b");
    let outcomes = rig.step().await;
    assert!(waits(&outcomes, "does not respond"), "{outcomes:?}");
    assert_eq!(rig.world().running(), ["b"]);
}
