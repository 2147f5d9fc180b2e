//! Tests of the order among many jobs, and that no job waits forever.

use proptest::prelude::*;

use super::*;

/// A drain of many VMs, and one move of another user, submitted after it.
fn drain_and_one(limit: u32) -> Given {
    let mut waiting: Vec<_> = (0..50).map(|n| job(&format!("vm{n:02}"))).collect();
    waiting.push(WaitingJob { group: "alice".into(), submitted_ms: NOW + 1000, ..job("single") });
    let mut given = Given::new(waiting);
    given.limits.hosts.insert("a".into(), HostLimit { out: Some(limit), into: None });
    given
}

/// Ends the oldest move, a minute after the last one.
fn end_one(given: &mut Given) {
    given.now_ms += MINUTE;
    if !given.running.is_empty() {
        let ended = given.running.remove(0);
        let group = ended.group.unwrap_or_default();
        given.served(&ended.source, &group);
    }
}

#[test]
fn a_drain_does_not_keep_a_single_move_waiting() {
    for limit in [1, 2, 8] {
        let mut given = drain_and_one(limit);
        let single = given.waiting.pop().unwrap();
        given.start();
        given.waiting.push(single);
        let drained = given.running.len();
        end_one(&mut given);
        assert_eq!(started(&given.schedule()), ["single"], "limit {limit}, {drained} before");
    }
}

#[test]
fn a_drain_of_many_hosts_does_not_use_up_the_limit_in_all() {
    let mut given = Given::new(Vec::new());
    given.limits.in_all = Some(4);
    for n in 0..20 {
        given.hosts.push(host(&format!("h{n}")));
        given.waiting.push(WaitingJob { source: format!("h{n}"), ..job(&format!("vm{n}")) });
    }
    let single = WaitingJob {
        group: "alice".into(),
        submitted_ms: NOW + 1000,
        source: "c".into(),
        ..job("x")
    };
    given.waiting.push(single);
    assert!(started(&given.schedule()).contains(&"x"));
}

#[test]
fn a_drain_of_many_hosts_into_one_does_not_age_past_other_groups() {
    let mut given = Given::new(Vec::new());
    for n in 0..20 {
        given.hosts.push(host(&format!("h{n}")));
        given.waiting.push(WaitingJob { source: format!("h{n}"), ..job(&format!("vm{n}")) });
    }
    assert_eq!(given.start().len(), 8);
    given.now_ms += 120 * MINUTE;
    let single = |id: &str, priority| {
        let (group, source) = (id.to_owned(), "c".to_owned());
        WaitingJob { group, source, priority, submitted_ms: NOW + 120 * MINUTE, ..job(id) }
    };
    given.waiting.push(single("alice", MovePriority::Normal));
    end_one(&mut given);
    assert_eq!(started(&given.schedule()), ["alice"]);
    given.waiting.push(single("bob", MovePriority::Urgent));
    assert_eq!(started(&given.schedule()), ["bob"]);
    // Without another group that wants a place, the drain continues.
    given.waiting.retain(|job| job.group == "drain a");
    assert_eq!(given.schedule().starts.len(), 1);
}

#[test]
fn an_urgent_move_overtakes() {
    let mut given = drain_and_one(1);
    given.waiting.push(WaitingJob {
        priority: MovePriority::Urgent,
        submitted_ms: NOW + 2000,
        estimate_ms: 60 * MINUTE,
        ..job("urgent")
    });
    assert_eq!(started(&given.schedule()), ["urgent"]);
}

#[test]
fn a_low_move_starts_despite_a_stream_of_high_ones() {
    let mut given = Given::new(vec![WaitingJob {
        priority: MovePriority::Low,
        group: "bob".into(),
        ..job("low")
    }]);
    given.limits.hosts.insert("a".into(), HostLimit { out: Some(1), into: None });
    for n in 0.. {
        assert!(n < 24 * 60, "it has waited for a day");
        let high = WaitingJob {
            priority: MovePriority::High,
            submitted_ms: given.now_ms,
            ..job(&format!("h{n}"))
        };
        given.waiting.push(high);
        if given.start().iter().any(|start| start.job == "low") {
            break;
        }
        given.host("b").memory_promised_bytes = 0;
        end_one(&mut given);
    }
}

#[test]
fn a_long_move_starts_despite_a_stream_of_short_ones_of_its_group() {
    let mut given = Given::new(vec![WaitingJob { estimate_ms: 60 * MINUTE, ..job("long") }]);
    given.limits.hosts.insert("a".into(), HostLimit { out: Some(1), into: None });
    for n in 0.. {
        assert!(n < 24 * 60, "it has waited for a day");
        given.waiting.push(WaitingJob { submitted_ms: given.now_ms, ..job(&format!("s{n}")) });
        if given.start().iter().any(|start| start.job == "long") {
            break;
        }
        given.host("b").memory_promised_bytes = 0;
        end_one(&mut given);
    }
}

#[test]
fn a_large_vm_is_not_passed_by_small_ones_forever() {
    let mut given = Given::new(vec![WaitingJob {
        memory_bytes: 16 * GIB,
        group: "bob".into(),
        ..job("large")
    }]);
    given.host("b").memory_free_bytes = 16 * GIB;
    given.host("b").memory_promised_bytes = 16 * GIB;
    let before = ["x1", "x2", "x3", "x4"].map(|id| WaitingJob { source: "c".into(), ..job(id) });
    given.running = before.map(|job| running(&job, "b")).into();
    let mut kept = false;
    for n in 0.. {
        assert!(n < 24 * 60, "it has waited for a day");
        // Two small ones come per minute, and one that has arrived is stopped there.
        for small in 0..2 {
            let id = format!("s{n}-{small}");
            given.waiting.push(WaitingJob {
                source: "c".into(),
                submitted_ms: given.now_ms,
                ..job(&id)
            });
        }
        if given.start().iter().any(|start| start.job == "large") {
            break;
        }
        kept |= given
            .schedule()
            .waits
            .iter()
            .any(|wait| wait.text.contains("is reserved for job large"));
        end_one(&mut given);
        given.host("b").memory_promised_bytes = given.running.len() as u64 * 4 * GIB;
    }
    assert!(kept);
}

#[test]
fn a_job_that_lacks_memory_leaves_places_to_others() {
    let large = WaitingJob { memory_bytes: 16 * GIB, group: "bob".into(), ..job("large") };
    let other = WaitingJob { source: "c".into(), targets: vec!["d".into()], ..job("other") };
    let mut given = Given::new(vec![large, other]);
    given.limits.in_all = Some(1);
    given.host("b").memory_free_bytes = 15 * GIB;
    given.now_ms = NOW + 15 * MINUTE;
    assert_eq!(started(&given.schedule()), ["other"]);
}

#[test]
fn a_reservation_that_cannot_be_met_is_not_permanent() {
    // No VM leaves b: the large one waits in vain, and small ones get their turn anyway.
    let large = WaitingJob { memory_bytes: 16 * GIB, group: "bob".into(), ..job("large") };
    let mut given = Given::new(vec![large, WaitingJob { source: "c".into(), ..job("small") }]);
    given.waiting[1].submitted_ms = NOW + 5 * MINUTE;
    given.host("b").memory_free_bytes = 15 * GIB;
    given.now_ms = NOW + 15 * MINUTE;
    let kept = given.schedule();
    assert_eq!(
        wait_of(&kept, "small").text,
        "waits for its turn: free capacity at target b is reserved for job large, which has waited \
        longer"
    );
    given.now_ms = NOW + 45 * MINUTE;
    assert_eq!(started(&given.schedule()), ["small"]);
}

/// An arriving job: group, priority, minutes, whether from another source, and datastores.
type Comes = (u8, u8, u64, bool, u8);

/// Jobs that arrive repeatedly, two whenever one ends.
fn stream() -> impl Strategy<Value = Vec<Comes>> {
    prop::collection::vec((0..3u8, 0..4u8, 1..30u64, prop::bool::weighted(0.3), 0..4u8), 1..12)
}

fn comes(
    id: &str,
    (group, priority, minutes, other, datastores): Comes,
    now_ms: u64,
) -> WaitingJob {
    const PRIORITIES: [MovePriority; 4] =
        [MovePriority::Low, MovePriority::Normal, MovePriority::High, MovePriority::Urgent];
    let on =
        ["ceph", "nfs"].into_iter().enumerate().filter(|(bit, _)| datastores & (1 << bit) != 0);
    WaitingJob {
        source: if other { "c" } else { "a" }.into(),
        group: format!("g{group}"),
        priority: PRIORITIES[usize::from(priority)],
        estimate_ms: minutes * MINUTE,
        submitted_ms: now_ms,
        datastores: on.map(|(_, datastore)| datastore.to_owned()).collect(),
        ..job(id)
    }
}

fn tight_limits() -> impl Strategy<Value = Limits> {
    (1..3u32, 1..3u32, 1..3u32, prop::option::of(1..3u32)).prop_map(
        |(out, into, per_datastore, in_all)| {
            let at = |host: &str, out, into| (host.to_owned(), HostLimit { out, into });
            let hosts = [at("a", Some(out), None), at("b", None, Some(into))].into();
            Limits { in_all, per_datastore, hosts, ..Limits::default() }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_job_waits_forever_under_any_stream(
        stream in stream(),
        (group, priority, minutes) in (0..3u8, 0..4u8, 1..120u64),
        limits in tight_limits(),
    ) {
        // It needs a place at its source, at its target and on two datastores at once.
        let victim = comes("victim", (group, priority, minutes, false, 3), NOW);
        let mut given = Given::new(vec![victim]);
        given.limits = limits;
        // The jobs before it delay it from the first moment on.
        for n in 0..3 {
            let before = comes(&format!("before{n}"), (2, 3, 5, n == 2, 3), NOW);
            given.running.push(running(&before, "b"));
        }
        let mut stream = stream.iter().cycle().zip(0..);
        let mut waits = true;
        // Four days, five minutes at a time: a low job can be passed for a day and an hour by
        // urgent ones of its group.
        for _ in 0..4 * 24 * 12 {
            for (next, n) in stream.by_ref().take(2) {
                if given.waiting.len() < 6 {
                    given.waiting.push(comes(&format!("s{n}"), *next, given.now_ms));
                }
            }
            if given.start().iter().any(|start| start.job == "victim") {
                waits = false;
                break;
            }
            given.host("b").memory_promised_bytes = 0;
            end_one(&mut given);
            given.now_ms += 4 * MINUTE;
        }
        prop_assert!(!waits, "{:?}", given.schedule().waits);
    }
}
