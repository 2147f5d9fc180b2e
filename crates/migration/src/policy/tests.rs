//! Tests of the policy.

use super::*;
use godwit_types::{Intent, PageInUse};
use proptest::prelude::*;

fn measured(remaining_pages: u64, dirty_pages_per_s: f64, mb_per_s: f64, rtt_ms: u64) -> Measured {
    Measured {
        remaining_pages,
        dirty_pages_per_s,
        bandwidth_bytes_per_s: mb_per_s * 1e6,
        elapsed: Duration::ZERO,
        round_trip: Duration::from_millis(rtt_ms),
        scan: Duration::from_millis(1),
        is_brief_over: false,
    }
}

#[test]
fn one_lucky_moment_does_not_spoil_the_rest() {
    let mut convergence = Convergence::new(Policy::default());
    // Two pages once, sixteen thousand ever after: 40 ms, which is bearable.
    let lucky = Measured { remaining_pages: 2000, ..measured(0, 1e7, 100.0, 0) };
    assert_eq!(convergence.decide(&lucky), Decision::NextRound);
    let busy = measured(16_384, 590_000.0, 2400.0, 0);
    let decisions: Vec<_> = (0..12).map(|_| convergence.decide(&busy)).collect();
    assert!(decisions.contains(&Decision::Switchover), "{decisions:?}");
}

#[test]
fn little_left_means_switchover() {
    let mut convergence = Convergence::new(Policy::default());
    assert_eq!(convergence.decide(&measured(100, 5_000.0, 1_000.0, 0)), Decision::Switchover);
}

#[test]
fn a_round_that_shortens_the_pause_noticeably_is_run() {
    // 9 MB take 4.6 ms of the pause; 73 pages are written during the round that sends them.
    let many = measured(2264, 5000.0, 2000.0, 0);
    assert!(many.predicted_switchover() < DEFAULT_SWITCHOVER_BUDGET);
    let mut convergence = Convergence::new(Policy::default());
    assert_eq!(convergence.decide(&many), Decision::NextRound);
    assert_eq!(convergence.decide(&measured(73, 5000.0, 2000.0, 0)), Decision::Switchover);
    // The guest writes as much during the round.
    let busy = measured(2264, 150_000.0, 2000.0, 0);
    assert_eq!(Convergence::new(Policy::default()).decide(&busy), Decision::Switchover);
    // The round would take a round trip.
    let far = measured(500, 1000.0, 2000.0, 10);
    assert_eq!(Convergence::new(Policy::default()).decide(&far), Decision::Switchover);
    // The migration is late already.
    let late = Policy { deadline: Some(Duration::from_secs(1)), ..Policy::default() };
    let overdue = Measured { elapsed: Duration::from_secs(2), ..many };
    assert_eq!(Convergence::new(late).decide(&overdue), Decision::Switchover);
}

#[test]
fn much_left_means_another_round() {
    let mut convergence = Convergence::new(Policy::default());
    assert_eq!(convergence.decide(&measured(100_000, 5_000.0, 125.0, 0)), Decision::NextRound);
}

#[test]
fn a_round_trip_beyond_the_budget_does_not_keep_the_guest_from_moving() {
    let mut convergence = Convergence::new(Policy::default());
    assert_eq!(convergence.decide(&measured(20, 0.0, 125.0, 100)), Decision::Switchover);
}

#[test]
fn what_a_brief_round_leaves_is_little_for_a_long_path() {
    let after = |is_brief_over, remaining_pages| {
        let measured = measured(remaining_pages, 5_000.0, 300.0, 40);
        Convergence::new(Policy::default()).decide(&Measured { is_brief_over, ..measured })
    };
    assert!(measured(600, 5_000.0, 300.0, 40).is_brief());
    assert_eq!(after(false, 600), Decision::NextRound);
    assert_eq!(after(true, 600), Decision::Switchover);
    assert_eq!(after(true, 2000), Decision::NextRound);
    // On a short path each round is awaited.
    assert!(!measured(600, 5_000.0, 300.0, 1).is_brief());
}

#[test]
fn awaited_rounds_are_compared_with_awaited_ones() {
    let mut convergence = Convergence::new(Policy::default());
    for remaining_pages in [6000, 5000, 4000, 3000] {
        let awaited = measured(remaining_pages, 5_000.0, 300.0, 40);
        assert_eq!(convergence.decide(&awaited), Decision::NextRound);
        let brief = Measured { is_brief_over: true, remaining_pages: 2000, ..awaited };
        assert_eq!(convergence.decide(&brief), Decision::NextRound);
        assert_eq!(convergence.stalled, 0);
    }
    assert_eq!(convergence.rounds, 4);
}

#[test]
fn a_round_after_one_of_the_first_stops_that_were_put_off_counts_for_nothing() {
    let policy = Policy { max_rounds: 3, ..Policy::default() };
    let mut convergence = Convergence::new(policy);
    let (little, much) = (measured(100, 40_000.0, 125.0, 0), measured(90_000, 40_000.0, 125.0, 0));
    // A stop that is put off again and again, with all that the guest wrote meanwhile.
    for _ in 0..MOST_FREE_PUT_OFFS {
        assert_eq!(convergence.decide(&little), Decision::Switchover);
        convergence.put_off();
        let (rounds, stalled) = (convergence.rounds, convergence.stalled);
        assert_eq!(convergence.decide(&much), Decision::NextRound);
        assert_eq!((convergence.rounds, convergence.stalled), (rounds, stalled));
        assert_eq!(convergence.throttle_pages_per_s(), None);
    }
    // It is still stopped if little is left. Further ones count.
    let before = convergence.rounds;
    convergence.put_off();
    assert_eq!(convergence.decide(&little), Decision::Switchover);
    assert_eq!(convergence.rounds, before + 1);
    // The next round counts.
    let mut convergence = Convergence::new(Policy { page_in: PageIn::Never, ..policy });
    convergence.put_off();
    assert_eq!(convergence.decide(&much), Decision::NextRound);
    let decisions: Vec<_> = (0..10).map(|_| convergence.decide(&much)).collect();
    assert!(decisions.contains(&Decision::GiveUp), "{decisions:?}");
}

#[test]
fn a_stall_within_the_limit_uses_its_minimum() {
    let mut convergence = Convergence::new(Policy::default());
    // 20 MB at 125 MB/s: 160 ms, over the budget and under the limit, and it does not decrease.
    let busy = measured(5_000, 40_000.0, 125.0, 0);
    assert_eq!(convergence.decide(&busy), Decision::NextRound);
    assert_eq!(convergence.decide(&busy), Decision::NextRound);
    let worse = measured(9_000, 40_000.0, 125.0, 0);
    assert_eq!(convergence.decide(&worse), Decision::NextRound);
    assert_eq!(convergence.decide(&busy), Decision::Switchover);
}

/// Runs the rounds of a guest that writes all over `set_pages` at `pages_per_s`, on a wire of
/// `mb_per_s`. Returns the time of all rounds except the first, in seconds, and whether it ends
/// with a switchover.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of pages")]
fn run(
    mut convergence: Convergence,
    set_pages: f64,
    pages_per_s: f64,
    mb_per_s: f64,
) -> (f64, bool) {
    let wire_pages_per_s = mb_per_s * 1e6 / 4096.0;
    let (mut remaining, mut took) = (set_pages, 0.0);
    loop {
        let limit = convergence.throttle_pages_per_s().unwrap_or(f64::INFINITY);
        let rate = pages_per_s.min(limit);
        let elapsed = Duration::from_secs_f64(took);
        let measured = Measured { elapsed, ..measured(remaining as u64, rate, mb_per_s, 0) };
        match convergence.decide(&measured) {
            Decision::Switchover => return (took, true),
            Decision::GiveUp | Decision::PageIn => return (took, false),
            Decision::NextRound => {}
        }
        let round = remaining / wire_pages_per_s;
        took += round;
        let rate = pages_per_s.min(convergence.throttle_pages_per_s().unwrap_or(f64::INFINITY));
        remaining = (rate * round).min(set_pages);
    }
}

#[test]
fn a_guest_that_writes_faster_than_the_link_is_slowed_within_two_rounds() {
    for times in [2.0, 5.0, 20.0] {
        for mb_per_s in [25.0, 125.0] {
            let writes = times * mb_per_s * 1e6 / 4096.0;
            let set_pages = 65_536.0;
            let (took, moved) =
                run(Convergence::new(Policy::default()), set_pages, writes, mb_per_s);
            let once = set_pages / (mb_per_s * 1e6 / 4096.0);
            assert!(
                moved && took < 2.5 * once,
                "{times} times at {mb_per_s} MB/s: {took} s, once {once} s"
            );
        }
    }
}

#[test]
fn each_intent_moves_it_in_its_own_time() {
    // Once over the wire: 2.1 s.
    let run = |intent: Intent| {
        let policy = Policy::of(intent, DEFAULT_SWITCHOVER_BUDGET, PageInUse::Never);
        run(Convergence::new(policy), 65_536.0, 150_000.0, 125.0)
    };
    let (auto, moved) = run(Intent::Auto);
    assert!(moved);
    let (fast, moved) = run(Intent::FastEvacuation);
    assert!(moved && fast < auto, "{fast} s, auto {auto} s");
    let (gentle, moved) = run(Intent::MinimalImpact);
    assert!(moved && gentle > auto, "{gentle} s, auto {auto} s");
    let (short, moved) = run(Intent::MinimalPause);
    assert!(moved && short < 1.2 * auto, "{short} s, auto {auto} s");
    for deadline_s in [4, 8, 15] {
        let (took, moved) = run(Intent::Deadline(Duration::from_secs(deadline_s)));
        assert!(moved && took <= deadline_s as f64, "{took} s of {deadline_s}");
    }
    // A deadline that cannot be met: as fast as possible.
    let (took, moved) = run(Intent::Deadline(Duration::from_millis(1)));
    assert!(moved && took < 1.05 * fast, "{took} s, evacuation {fast} s");
}

#[test]
fn a_guest_that_meets_its_deadline_is_not_slowed() {
    let policy = Policy::of(
        Intent::Deadline(Duration::from_secs(60)),
        DEFAULT_SWITCHOVER_BUDGET,
        PageInUse::Never,
    );
    let mut convergence = Convergence::new(policy);
    convergence.decide(&measured(200_000, 17_000.0, 125.0, 0));
    assert_eq!(convergence.throttle_pages_per_s(), None);
}

#[test]
fn a_guest_that_converges_is_not_slowed() {
    let mut convergence = Convergence::new(Policy::default());
    // The wire carries 30,500 pages per second.
    for remaining in [200_000, 110_000, 60_000, 30_000, 15_000] {
        convergence.decide(&measured(remaining, 17_000.0, 125.0, 0));
        assert_eq!(convergence.throttle_pages_per_s(), None);
    }
}

#[test]
fn a_guest_that_must_not_be_slowed_is_not() {
    let forbidden = Policy { may_throttle: false, page_in: PageIn::Never, ..Policy::default() };
    let mut unable = Convergence::new(Policy::default());
    unable.cannot_throttle();
    for convergence in [Convergence::new(forbidden), unable] {
        let (_, moved) = run(convergence, 65_536.0, 200_000.0, 25.0);
        assert!(!moved);
    }
}

#[test]
fn a_guest_that_never_converges_is_left_alone() {
    let mut convergence = Convergence::new(Policy { page_in: PageIn::Never, ..Policy::default() });
    let hopeless = measured(200_000, 400_000.0, 25.0, 0);
    let decisions: Vec<_> = (0..40).map(|_| convergence.decide(&hopeless)).collect();
    assert_eq!(decisions.last(), Some(&Decision::GiveUp));
    assert!(decisions[..39].iter().all(|decision| *decision == Decision::NextRound));
}

/// Returns the decision about a guest that writes sixteen times what the wire carries, and the
/// number of rounds before it.
fn decided(policy: Policy, can_throttle: bool) -> (u32, Decision) {
    let mut convergence = Convergence::new(policy);
    if !can_throttle {
        convergence.cannot_throttle();
    }
    let busy = measured(65_536, 100_000.0, 25.0, 0);
    let mut decisions = (1..).map(|round| (round, convergence.decide(&busy)));
    decisions.find(|(_, decision)| *decision != Decision::NextRound).unwrap()
}

#[test]
fn a_guest_that_does_not_converge_is_paged_in_where_allowed() {
    let with = |page_in| Policy { page_in, ..Policy::default() };
    assert_eq!(decided(with(PageIn::Now), true), (1, Decision::PageIn));
    assert_eq!(decided(with(PageIn::InsteadOfThrottle), true), (1, Decision::PageIn));
    // A guest that cannot be slowed does not converge within two more rounds.
    assert_eq!(decided(with(PageIn::LastResort), false), (3, Decision::PageIn));
    let (rounds, decision) = decided(with(PageIn::LastResort), true);
    assert_eq!(decision, Decision::PageIn);
    assert!(rounds > 4, "slowing is tried first, as far as it goes: {rounds}");
    assert_eq!(decided(with(PageIn::Never), true), (40, Decision::GiveUp));
    let overdue = Policy { deadline: Some(Duration::ZERO), ..Policy::default() };
    let late = Measured { elapsed: Duration::from_secs(1), ..measured(65_536, 100_000.0, 25.0, 0) };
    assert_eq!(Convergence::new(overdue).decide(&late), Decision::PageIn);
}

#[test]
fn little_is_never_paged_in() {
    let mut convergence = Convergence::new(Policy { page_in: PageIn::Now, ..Policy::default() });
    assert_eq!(convergence.decide(&measured(100, 5000.0, 1000.0, 0)), Decision::Switchover);
}

#[test]
fn without_page_in_at_the_destination_rounds_continue() {
    let mut convergence = Convergence::new(Policy { page_in: PageIn::Now, ..Policy::default() });
    let busy = measured(65_536, 100_000.0, 25.0, 0);
    assert_eq!(convergence.decide(&busy), Decision::PageIn);
    convergence.cannot_page_in();
    assert_eq!(convergence.decide(&busy), Decision::NextRound);
}

#[test]
fn a_guest_that_stalls_below_the_share_is_slowed_as_far_as_its_pause_needs() {
    // Each round takes 40 ms in addition to its pages. Half of what the wire carries leaves 27
    // ms, and the budget is 20 ms.
    let policy = Policy::of(Intent::MinimalPause, DEFAULT_SWITCHOVER_BUDGET, PageInUse::Never);
    let mut convergence = Convergence::new(policy);
    let (wire_pages_per_s, mut remaining) = (30_500.0, 50_000.0);
    let ended = (0..30).find_map(|_| {
        let rate =
            convergence.throttle_pages_per_s().unwrap_or(f64::INFINITY).min(0.5 * wire_pages_per_s);
        remaining = (remaining / wire_pages_per_s + 0.04) * rate;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count of pages"
        )]
        let decision = convergence.decide(&measured(remaining as u64, rate, 125.0, 10));
        (decision != Decision::NextRound).then_some(decision)
    });
    assert_eq!(ended, Some(Decision::Switchover));
    assert!(convergence.throttle_pages_per_s().is_some());
}

#[test]
fn an_acceptable_pause_is_preferred_to_page_in() {
    let overdue = Policy { deadline: Some(Duration::from_millis(1)), ..Policy::default() };
    // 40 ms.
    let late = Measured { elapsed: Duration::from_secs(1), ..measured(1000, 100_000.0, 125.0, 0) };
    assert!(!Convergence::new(overdue).is_far(&late));
    assert_eq!(Convergence::new(overdue).decide(&late), Decision::Switchover);
    let mut unable = Convergence::new(Policy::default());
    unable.cannot_throttle();
    let decisions =
        [1220, 1170, 1460, 1200].map(|pages| unable.decide(&measured(pages, 30_000.0, 125.0, 0)));
    assert_eq!(decisions.last(), Some(&Decision::Switchover), "{decisions:?}");
}

#[test]
fn a_guest_is_released_when_the_link_carries_its_writes() {
    let mut convergence = Convergence::new(Policy::default());
    for _ in 0..3 {
        convergence.decide(&measured(200_000, 20_000.0, 12.5, 0));
    }
    assert!(convergence.throttle_pages_per_s().unwrap() <= 0.2 * 12.5e6 / 4096.0);
    // A bandwidth limit is lifted.
    convergence.decide(&measured(100_000, 600.0, 1250.0, 0));
    assert_eq!(convergence.throttle_pages_per_s(), None);
}

#[test]
fn rounds_go_on_as_long_as_there_is_less_each_time() {
    let mut convergence =
        Convergence::new(Policy { max_rounds: 5, may_throttle: false, ..Policy::default() });
    let mut remaining = 1 << 24;
    for _ in 0..9 {
        remaining = remaining * 4 / 5;
        assert_eq!(
            convergence.decide(&measured(remaining, 20_000.0, 125.0, 0)),
            Decision::NextRound
        );
    }
    assert_eq!(convergence.decide(&measured(remaining, 20_000.0, 125.0, 0)), Decision::PageIn);
}

#[test]
fn a_large_guest_is_scanned_twice_while_it_is_paused() {
    let small = measured(100, 0.0, 1000.0, 0);
    let large = Measured { scan: Duration::from_millis(130), ..small };
    let more = large.predicted_switchover().checked_sub(small.predicted_switchover()).unwrap();
    assert_eq!(more, Duration::from_millis(257));
}

proptest! {
    #[test]
    fn it_always_ends(
        remaining in prop::collection::vec(0u64..1 << 30, 40),
        mb in 0.0f64..10_000.0,
        rtt in 0u64..500,
    ) {
        let mut convergence = Convergence::new(Policy::default());
        // Then the remainder no longer decreases.
        let rest = std::iter::repeat_n(remaining.last().unwrap_or(&0), 40);
        let ended = remaining.iter().chain(rest).any(|&pages| {
            convergence.decide(&measured(pages, 1e5, mb, rtt)) != Decision::NextRound
        });
        prop_assert!(ended);
    }

    #[test]
    fn a_distant_convergence_causes_no_switchover(
        pages in prop::collection::vec(0u64..1 << 22, 1..40),
        mb in 0.1f64..10_000.0,
    ) {
        let mut convergence = Convergence::new(Policy::default());
        for pages in pages {
            let now = measured(pages, 0.0, mb, 1);
            let far = convergence.is_far(&now);
            prop_assert!(!(convergence.decide(&now) == Decision::Switchover && far));
        }
    }

    #[test]
    fn within_the_budget_it_switches_over_after_two_more_rounds_at_most(
        pages in prop::collection::vec(0u64..2000, 3),
        dirty in 0.0f64..50_000.0,
    ) {
        let mut convergence = Convergence::new(Policy::default());
        let mut decisions = Vec::new();
        for pages in pages {
            let now = measured(pages, dirty, 1_000.0, 1);
            prop_assume!(now.predicted_switchover() <= DEFAULT_SWITCHOVER_BUDGET);
            decisions.push(convergence.decide(&now));
        }
        prop_assert!(decisions.contains(&Decision::Switchover), "{:?}", decisions);
    }
}
