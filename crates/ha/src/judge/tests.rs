//! Tests of the judge: what it grants, when it ends a term, and what it never concludes.

use proptest::prelude::*;

use super::*;

/// A silence of exactly 5 s.
const TIMING: Timing = Timing {
    interval: Duration::from_secs(1),
    lease: Duration::from_secs(4),
    grace: Duration::from_secs(1),
    drift_ppm: 0,
};
const FACTS: Facts = Facts { datastores: 1, watchdog: true, fencing: false };

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn renewal(term: u64, over: bool) -> Renewal {
    Renewal { term: Term(term), over }
}

fn granted(term: u64) -> Answer {
    Answer::Granted(Grant { term: Term(term), datastores: 1 })
}

/// Returns a judge that opened term 1 at second 10.
fn opened(facts: Facts) -> Judge {
    let mut judge = Judge::new(TIMING, Record::NEW, at(0));
    assert!(judge.open_term().is_none() && judge.check(at(100)).is_none());
    let datastores = facts.datastores;
    let answer = Answer::Granted(Grant { term: Term(1), datastores });
    assert_eq!(judge.renewal(at(10), renewal(0, true), facts), answer);
    assert_eq!(judge.record(), Record { term: Term(1), over: false, facts });
    assert!(judge.is_over(Term(0)) && !judge.is_over(Term(1)));
    judge
}

fn mark(sequence: u64) -> Option<Mark> {
    Some(Mark { term: Term(1), sequence })
}

#[test]
fn a_silent_host_with_an_unchanged_block_is_released() {
    let mut judge = opened(FACTS);
    judge.read(at(10), at(11), 0, mark(1));
    assert_eq!(judge.renewal(at(12), renewal(1, false), FACTS), granted(1));
    judge.read(at(16), at(16), 0, mark(1));
    assert_eq!(judge.check(at(16)), None, "the renewal is 4 s ago");
    judge.read(at(17), at(18), 0, mark(1));
    assert_eq!(judge.check(at(18)), Some(Action::Release(Term(1))));
    assert!(judge.is_over(Term(1)) && judge.record().over && judge.open_term().is_none());
    assert_eq!(judge.check(at(30)), None);
    assert_eq!(judge.renewal(at(30), renewal(1, false), FACTS), Answer::Ended(Term(1)));
    assert_eq!(judge.renewal(at(30), renewal(1, true), FACTS), granted(2));
}

#[test]
fn a_heartbeat_or_a_datastore_that_cannot_be_read_ends_nothing() {
    let mut judge = opened(FACTS);
    assert_eq!(judge.check(at(1000)), None, "no reading");
    judge.read(at(1000), at(1000), 0, None);
    judge.read(at(1004), at(1006), 0, None);
    assert_eq!(judge.check(at(1006)), None, "counted from the start of the last reading");
    judge.read(at(1005), at(1006), 0, mark(1));
    assert_eq!(judge.check(at(2000)), None, "changed");
    judge.read(at(2000), at(2000), 7, mark(1));
    assert_eq!(judge.check(at(2000)), None, "no such datastore");
}

#[test]
fn silences_that_do_not_overlap_prove_nothing() {
    let mut judge = opened(FACTS);
    judge.read(at(10), at(10), 0, mark(1));
    judge.read(at(15), at(15), 0, mark(1));
    // Writes failed until 15 while renewals arrived; then the reverse.
    assert_eq!(judge.renewal(at(14), renewal(1, false), FACTS), granted(1));
    assert_eq!(judge.check(at(19)), None);
    let facts = Facts { datastores: 3, ..FACTS };
    let mut judge = opened(facts);
    for (datastore, from) in [(0, 10), (1, 14), (2, 18)] {
        judge.read(at(from), at(from), datastore, mark(1));
        judge.read(at(from + 5), at(from + 5), datastore, mark(1));
        assert_eq!(judge.check(at(30)), None, "datastore {datastore}");
    }
    judge.read(at(19), at(19), 0, mark(1));
    assert_eq!(judge.check(at(30)), Some(Action::Release(Term(1))), "0 and 1 from 14 to 19");
}

#[test]
fn without_a_watchdog_a_fencing_device_or_an_operator_decides() {
    let fenced = Facts { datastores: 0, watchdog: false, fencing: true };
    let mut judge = opened(fenced);
    assert_eq!(judge.fenced(Term(1), Fencing::Off), None, "fencing shortens no wait");
    assert_eq!(judge.check(at(14)), None);
    assert_eq!(judge.check(at(15)), Some(Action::Fence(Term(1))));
    assert_eq!(judge.check(at(16)), None);
    assert_eq!(judge.fenced(Term(0), Fencing::Off), None, "of another term");
    assert_eq!(judge.fenced(Term(1), Fencing::Failed), Some(Action::AskOperator(Term(1))));
    assert!(!judge.is_over(Term(1)));
    assert_eq!(judge.confirmed_off(Term(0)), None);
    assert_eq!(judge.confirmed_off(Term(1)), Some(Action::Release(Term(1))));
    assert_eq!(judge.confirmed_off(Term(1)), None);

    let mut judge = opened(fenced);
    judge.check(at(15));
    assert_eq!(judge.fenced(Term(1), Fencing::Off), Some(Action::Release(Term(1))));

    let mut judge = opened(Facts { watchdog: true, ..fenced });
    judge.check(at(15));
    assert_eq!(judge.fenced(Term(1), Fencing::Failed), Some(Action::Release(Term(1))));

    let mut judge = opened(Facts { fencing: false, ..fenced });
    assert_eq!(judge.check(at(15)), Some(Action::AskOperator(Term(1))));
}

#[test]
fn a_host_that_returns_before_its_term_has_ended_keeps_it() {
    let facts = Facts { datastores: 0, watchdog: false, fencing: true };
    let mut judge = opened(facts);
    judge.check(at(15));
    let answer = Answer::Granted(Grant { term: Term(1), datastores: 0 });
    assert_eq!(judge.renewal(at(16), renewal(1, false), facts), answer);
    assert_eq!((judge.phase(), judge.check(at(20))), (Phase::Watching, None));
    assert_eq!(judge.check(at(21)), Some(Action::Fence(Term(1))));
}

#[test]
fn an_old_message_ends_no_newer_term() {
    let mut judge = opened(FACTS);
    assert_eq!(judge.renewal(at(11), renewal(1, true), FACTS), granted(2));
    assert!(judge.is_over(Term(1)) && !judge.is_over(Term(2)));
    assert_eq!(judge.renewal(at(11), renewal(1, true), FACTS), granted(2), "offered again");
    assert_eq!(judge.renewal(at(11), renewal(1, false), FACTS), Answer::Ended(Term(1)));
    assert_eq!(judge.renewal(at(11), renewal(3, true), FACTS), Answer::Unknown);
    assert!(!judge.is_over(Term(2)));
}

#[test]
fn a_new_leader_counts_from_its_takeover() {
    let record = opened(Facts { datastores: 0, ..FACTS }).record();
    let mut judge = Judge::new(TIMING, record, at(100));
    assert_eq!(judge.check(at(104)), None);
    assert_eq!(judge.check(at(105)), Some(Action::Release(Term(1))));
    let judge = Judge::new(TIMING, judge.record(), at(200));
    assert!(judge.is_over(Term(1)));
}

/// Whether some span of 5 s up to `now` is common to the renewals and `needed` datastores.
fn has_common_span(judge: &Judge, needed: usize, now: u64) -> bool {
    (0..=now.saturating_sub(5)).any(|from| {
        let is_in =
            |sighting: &&Sighting| sighting.since <= at(from) && at(from + 5) <= sighting.until;
        judge.heard_at <= at(from)
            && judge.sightings.iter().flatten().filter(is_in).count() >= needed
    })
}

proptest! {
    #[test]
    fn a_term_ends_exactly_with_a_common_span_of_silence(
        datastores in 0_usize..5,
        events in prop::collection::vec((0_u64..3, 0_usize..6, 0_u64..3, 0_u64..3), 1..80),
    ) {
        let facts = Facts { datastores, ..FACTS };
        let mut judge = opened(facts);
        let mut now = 10;
        for (passed, what, sequence, took) in events {
            now += passed;
            if what < 5 {
                judge.read(at(now.saturating_sub(took)), at(now), what, mark(sequence / 2));
            } else if sequence == 0 {
                judge.renewal(at(now), renewal(1, false), facts);
            }
            let expected = has_common_span(&judge, blocking(datastores), now);
            prop_assert_eq!(judge.check(at(now)).is_some(), expected);
            if expected {
                break;
            }
        }
    }
}
