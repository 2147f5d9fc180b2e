//! Tests of one situation each, with its result and its text.

use super::*;

#[test]
fn the_link_limits_outgoing_moves_and_the_others_have_a_reason() {
    let given = Given::new((0..10).map(|n| job(&format!("vm{n}"))).collect());
    let schedule = given.schedule();
    assert_eq!(schedule.starts.len(), 8);
    let WaitReason::SourceLimit { host, line } = &wait_of(&schedule, "vm9").reason else {
        panic!()
    };
    assert_eq!((host.as_str(), line.limit, line.running, line.place), ("a", 8, 8, 2));
    assert_eq!(wait_of(&schedule, "vm9").position, Some(2));
    assert_eq!(
        wait_of(&schedule, "vm8").text,
        "moves out of a: 8 of 8 at once (vm0, vm1, vm2, vm3, vm4, vm5, vm6 and vm7); place 1 in \
        line"
    );
}

#[test]
fn a_blocked_job_is_passed_by_others() {
    let mut given =
        Given::new(vec![job("first"), WaitingJob { source: "c".into(), ..job("other") }]);
    given.limits.hosts.insert("a".into(), HostLimit { out: Some(0), into: None });
    given.waiting[0].priority = MovePriority::Urgent;
    let schedule = given.schedule();
    assert_eq!(started(&schedule), ["other"]);
    assert_eq!(
        wait_of(&schedule, "first").text,
        "moves out of a: the limit is 0 (place 1 in line)"
    );
}

#[test]
fn each_limit_has_its_own_reason() {
    let mut given = Given::new(vec![job("x")]);
    let by_hand =
        RunningMove { group: None, ..running(&WaitingJob { source: "c".into(), ..job("y") }, "b") };
    given.running.push(by_hand);
    given.limits.hosts.insert("b".into(), HostLimit { out: None, into: Some(1) });
    let text = |given: &Given| given.schedule().waits[0].text.clone();
    assert_eq!(
        text(&given),
        "moves into target b: 1 of 1 at once (y), 1 started at an agent; place 1 in line"
    );
    given.limits.datastores.insert("ceph".into(), 1);
    assert_eq!(
        text(&given),
        "moves on datastore ceph: 1 of 1 at once (y), 1 started at an agent; place 1 in line"
    );
    given.limits.in_all = Some(1);
    assert_eq!(
        text(&given),
        "moves in all: 1 of 1 at once (y), 1 started at an agent; place 1 in line"
    );
}

#[test]
fn reserved_memory_is_not_free() {
    let mut given = Given::new(vec![job("x")]);
    (given.host("b").memory_free_bytes, given.host("b").memory_promised_bytes) = (6 * GIB, 3 * GIB);
    let text = given.schedule().waits[0].text.clone();
    assert_eq!(text, "memory at target b: it needs 4 GiB, 3 GiB are left");
    given.host("b").memory_total_bytes = 2 * GIB;
    let text = given.schedule().waits[0].text.clone();
    assert!(text.ends_with("the host has 2 GiB in all, so it never fits there"), "{text}");
    given.host("b").memory_promised_bytes = 0;
    assert_eq!(started(&given.schedule()), ["x"]);
}

#[test]
fn unavailable_hosts_are_named() {
    let reason = |change: fn(&mut Given)| {
        let mut given = Given::new(vec![job("x")]);
        change(&mut given);
        let wait = given.schedule().waits.remove(0);
        assert_eq!(wait.position, None, "{}", wait.text);
        wait.text
    };
    let away = |given: &mut Given| given.host("a").presence = Presence::Away;
    assert_eq!(reason(away), "source a is away: its agent does not answer");
    let unknown = |given: &mut Given| given.host("b").presence = Presence::Unknown;
    assert_eq!(reason(unknown), "target b has not reported since this manager started");
    let maintenance = |given: &mut Given| given.host("b").maintenance = true;
    assert_eq!(reason(maintenance), "target b is in maintenance and accepts no VMs");
    let nowhere = |given: &mut Given| given.waiting[0].targets.clear();
    assert_eq!(reason(nowhere), "no target is named");
    let gone = |given: &mut Given| given.waiting[0].source = "z".into();
    assert_eq!(reason(gone), "source z is not in the inventory");
    let there = |given: &mut Given| given.waiting[0].targets = vec!["a".into()];
    assert_eq!(reason(there), "the VM already runs on its target a");
}

#[test]
fn the_first_available_target_is_taken() {
    let mut given = Given::new(vec![job("x")]);
    given.waiting[0].targets = ["b", "c", "d"].map(String::from).into();
    given.host("b").maintenance = true;
    assert_eq!(given.schedule().starts[0].target, "c");
    given.host("c").memory_free_bytes = GIB;
    given.host("d").presence = Presence::Away;
    let schedule = given.schedule();
    assert_eq!(
        schedule.waits[0].text,
        "no target is available (1 without enough memory, 1 away, 1 in maintenance); best: memory \
        at target c: it needs 4 GiB, 1 GiB are left"
    );
}

#[test]
fn jobs_of_one_vm_run_one_at_a_time_in_the_order_of_submission() {
    let later = WaitingJob {
        id: "x2".into(),
        submitted_ms: NOW + 1,
        priority: MovePriority::Urgent,
        ..job("x")
    };
    let mut given = Given::new(vec![later, job("x")]);
    let schedule = given.schedule();
    assert_eq!(started(&schedule), ["x"]);
    assert_eq!(schedule.waits[0].text, "job x of the same VM was submitted before it");
    given.start();
    let schedule = given.schedule();
    assert_eq!(schedule.waits[0].text, "the VM is moving already, from a to b (migration m-x)");
}

#[test]
fn a_failed_job_waits_for_its_time() {
    let mut given = Given::new(vec![WaitingJob {
        failed_attempts: 2,
        not_before_ms: Some(NOW + 90_000),
        last_failure: Some("lane-lost".into()),
        ..job("x")
    }]);
    assert_eq!(
        given.schedule().waits[0].text,
        "retry in 1 min 30 s: 2 attempts failed, the last with lane-lost (the migration network \
        between the two hosts was cut)"
    );
    given.now_ms += 90_000;
    assert_eq!(started(&given.schedule()), ["x"]);
}

#[test]
fn a_reason_is_typed_in_json() {
    let given = Given::new((0..9).map(|n| job(&format!("vm{n}"))).collect());
    let json = serde_json::to_value(given.schedule()).unwrap();
    assert_eq!(json["waits"][0]["reason"]["kind"], "source-limit");
    assert_eq!(json["waits"][0]["reason"]["line"]["limit"], 8);
    let back: Schedule = serde_json::from_value(json).unwrap();
    assert_eq!(back, given.schedule());
}

#[test]
fn short_moves_go_first_and_clones_after_the_first_of_them() {
    let clone = |vm: &str, minutes: u64| WaitingJob {
        reference_group: Some("debian".into()),
        estimate_ms: minutes * MINUTE,
        ..job(vm)
    };
    let mut given = Given::new(vec![
        clone("clone1", 2),
        clone("clone2", 2),
        WaitingJob { estimate_ms: 9 * MINUTE, ..job("long") },
        WaitingJob { estimate_ms: 3 * MINUTE, ..job("short") },
    ]);
    assert_eq!(started(&given.schedule()), ["clone1", "short", "long", "clone2"]);
    // Once one of them is there, the others are treated like any job, together.
    given.host("b").reference_groups.insert("debian".into());
    assert_eq!(started(&given.schedule()), ["clone1", "clone2", "short", "long"]);
}

#[test]
fn a_clone_prefers_a_host_with_another_one() {
    let mut given = Given::new(vec![WaitingJob {
        reference_group: Some("debian".into()),
        targets: ["b", "c"].map(String::from).into(),
        ..job("x")
    }]);
    assert_eq!(given.schedule().starts[0].target, "b");
    given.host("c").reference_groups.insert("debian".into());
    assert_eq!(given.schedule().starts[0].target, "c");
}
