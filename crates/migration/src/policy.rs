//! Convergence: after each round, decides whether to go on or to switch over. Pure arithmetic on
//! measurements.
//!
//! The predicted pause is `fixed + round trip / 2 + remainder / bandwidth`, where the remainder
//! grows at the dirty rate until the guest has stopped. It is compared with the switchover budget.
//! If the budget is out of reach, the switchover happens at a local minimum of the remainder, if
//! that pause is bearable; at the last round, at any bearable pause.
//!
//! A guest that writes pages nearly as fast as the wire carries them does not converge by itself:
//! its writers are held to a share of what the wire carries. With a share *a*, each round leaves
//! *a* times what the round before it left, so all rounds together take 1 / (1 - a) times the
//! first. The guest loses (w - aB) / (1 - a) of its writes per second of that first round, where w
//! is what it would write and B what the wire carries: a lower share loses fewer writes in all, and
//! more at a time.

use std::collections::VecDeque;
use std::time::Duration;

use godwit_wire::PAGE_SIZE;

/// Limits of the switchover, and the means that are permitted.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// The pause requested.
    pub switchover_budget: Duration,
    /// The longest pause accepted if the budget is out of reach.
    pub switchover_limit: Duration,
    /// Number of rounds after which the migration is given up as soon as a round leaves no less
    /// than those before it.
    pub max_rounds: u32,
    /// Whether writers may be slowed if the guest does not converge.
    pub may_throttle: bool,
    /// When writers are slowed, and how far.
    pub throttling: Throttling,
    /// Time since the request by which the migration must end. Writers are slowed as far as that
    /// requires, and no further.
    pub deadline: Option<Duration>,
    /// When the guest is handed over while some of its pages are still here.
    pub page_in: PageIn,
}

/// When the guest is handed over while some of its pages are still at the source. It then depends
/// on both hosts until all pages have been fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageIn {
    /// Never: if nothing else helps, the guest stays where it is.
    Never,
    /// If nothing else helps: its writers cannot be slowed, or slowing is not enough, a deadline
    /// has passed, or too many rounds have.
    #[default]
    LastResort,
    /// If its writers would have to be slowed.
    InsteadOfThrottle,
    /// After the first round.
    Now,
}

/// When writers are slowed, and how far, as shares of what the wire carries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throttling {
    /// Dirty rate, as a share of what the wire carries, above which writers are slowed.
    pub above: f64,
    /// Share of what the wire carries to which writers are slowed.
    pub to: f64,
}

pub const DEFAULT_SWITCHOVER_BUDGET: Duration = Duration::from_millis(20);
/// QEMU's own downtime limit, which operators of KVM are used to.
pub const DEFAULT_SWITCHOVER_LIMIT: Duration = Duration::from_millis(300);
/// Longest budget that can be kept: a guest that is paused for a second or two longer without its
/// commit is resumed.
pub const MOST_SWITCHOVER_BUDGET: Duration = Duration::from_secs(8);
/// Number of rounds after which a guest that does not converge stays where it is.
const DEFAULT_MAX_ROUNDS: u32 = 40;

/// Cost of stop, device state, load and resume without any page: 8 to 12 ms measured with QEMU 7.2
/// (prototype).
const FIXED_COST: Duration = Duration::from_millis(8);
/// While the guest is paused, all of its memory is examined twice for dirty pages. [`FIXED_COST`]
/// contains this much of it, for guests of a GiB.
const SCANS_IN_FIXED_COST: Duration = Duration::from_millis(3);
/// Time from the decision until the guest is stopped: QEMU's set-up of its migration.
pub(crate) const TIME_TO_STOP: Duration = Duration::from_millis(4);
/// A remainder with a shorter transfer time is not worth another round, whatever the budget.
const NEGLIGIBLE_TRANSFER: Duration = Duration::from_micros(1500);
/// Nor is a remainder whose transfer takes less than this fraction of a round trip and a look at
/// all of the memory, because each round takes longer than both.
const NEGLIGIBLE_PART: u32 = 10;
/// As [`NEGLIGIBLE_PART`], after a brief round: another one leaves as much, and waiting for its
/// report more.
const NEGLIGIBLE_PART_OF_BRIEF: u32 = 4;
/// From this round trip on, waiting for the report of a short round takes longer than sending it,
/// and congestion windows must take the switchover in one flight.
pub(crate) const LONG_ROUND_TRIP: Duration = Duration::from_millis(2);
/// Number of rounds without progress after which the budget counts as out of reach.
const STALLED_ROUNDS: u32 = 2;
/// A guest that dirties more than 0.6 of what the wire carries will not finish soon: all rounds
/// together take more than two and a half times the first. Held to 0.2, they take one and a
/// quarter.
const DEFAULT_THROTTLING: Throttling = Throttling { above: 0.6, to: 0.2 };
/// Fraction of the time until a deadline that rounds are planned to take.
const PLANNED_SHARE: f64 = 0.9;
/// Highest share to throttle to. A higher one is hardly ever kept: rounds would get shorter by less
/// than the measurement error.
pub(crate) const MOST_THROTTLED_SHARE: f64 = 0.8;
/// Lowest share, to which a throttled guest that still does not converge is held.
pub(crate) const LEAST_THROTTLED_SHARE: f64 = 0.02;
/// A wire whose rate has grown by this factor counts as a different one.
const MUCH_FASTER: f64 = 1.5;
/// Number of rounds in which a minimum is sought: one lucky moment long ago is no measure.
const MINIMUM_ROUNDS: usize = 8;

impl Default for Policy {
    fn default() -> Self {
        Policy {
            switchover_budget: DEFAULT_SWITCHOVER_BUDGET,
            switchover_limit: DEFAULT_SWITCHOVER_LIMIT,
            max_rounds: DEFAULT_MAX_ROUNDS,
            may_throttle: true,
            throttling: DEFAULT_THROTTLING,
            deadline: None,
            page_in: PageIn::default(),
        }
    }
}

/// Measurements at the end of a round.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Pages that are dirty now.
    pub remaining_pages: u64,
    /// Pages dirtied per second.
    pub dirty_pages_per_s: f64,
    /// Bytes of pages that the wire carries per second: more than its own rate if pages are
    /// compressed.
    pub bandwidth_bytes_per_s: f64,
    /// Round trip of the lane.
    pub round_trip: Duration,
    /// Time since the request.
    pub elapsed: Duration,
    /// Time for examining all of the memory for dirty pages.
    pub scan: Duration,
    /// Whether the last round was brief ([`Measured::is_brief`]).
    pub is_brief_over: bool,
}

/// Returns the fixed cost of a switchover, without network and transfer, if a look at all of the
/// memory takes so long.
pub(crate) fn fixed_cost(scan: Duration) -> Duration {
    FIXED_COST.saturating_add((2 * scan).saturating_sub(SCANS_IN_FIXED_COST))
}

impl Measured {
    fn transfer(&self, pages: f64) -> Duration {
        let bytes = pages * f64::from(PAGE_SIZE);
        Duration::try_from_secs_f64(bytes / self.bandwidth_bytes_per_s.max(1.0))
            .unwrap_or(Duration::MAX)
    }

    /// Returns the pause that stopping the guest now would cause.
    #[must_use]
    pub fn predicted_switchover(&self) -> Duration {
        let at_stop =
            self.remaining_pages as f64 + self.dirty_pages_per_s * TIME_TO_STOP.as_secs_f64();
        self.fixed_cost().saturating_add(self.transfer(at_stop))
    }

    /// Returns whether the next round is brief: it takes less time than the report that it has been
    /// applied. Waiting for that report is not worthwhile: a busy guest writes as much again
    /// meanwhile.
    #[must_use]
    pub fn is_brief(&self) -> bool {
        self.round_trip >= LONG_ROUND_TRIP
            && self.transfer(self.remaining_pages as f64) <= self.round_trip
    }

    /// Returns the cost of the pause without pages.
    fn fixed_cost(&self) -> Duration {
        fixed_cost(self.scan).saturating_add(self.round_trip / 2)
    }

    /// Returns whether the pause would exceed `most`, and another round is worthwhile.
    fn exceeds(&self, most: Duration) -> bool {
        self.predicted_switchover() > most && !self.is_negligible(most)
    }

    /// Returns whether another round would cost more than what remains. If the round trip leaves
    /// room for pages, that counts.
    fn is_negligible(&self, budget: Duration) -> bool {
        let far = self.fixed_cost() > budget;
        let part = if self.is_brief_over { NEGLIGIBLE_PART_OF_BRIEF } else { NEGLIGIBLE_PART };
        let of_a_round = if far { (self.round_trip + self.scan) / part } else { Duration::ZERO };
        let negligible = NEGLIGIBLE_TRANSFER.max(of_a_round);
        self.transfer(self.remaining_pages as f64) <= negligible
    }
}

/// Next step of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Run another round.
    NextRound,
    /// Stop the guest now.
    Switchover,
    /// Stop the guest now, and run it at the destination while the remaining pages are fetched.
    PageIn,
    /// Give up: the guest will not converge.
    GiveUp,
}

/// State of the policy over a migration's rounds.
#[derive(Clone, Debug)]
pub struct Convergence {
    policy: Policy,
    rounds: u32,
    /// Pages that remained after each of the last rounds.
    recent: VecDeque<u64>,
    stalled: u32,
    may_throttle: bool,
    may_page_in: bool,
    throttle: Option<Throttle>,
}

/// Limit on the guest's writers.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Throttle {
    /// Share of what the wire carries.
    share: f64,
    pages_per_s: f64,
    /// Number of rounds under this limit.
    rounds: u32,
    /// Whether the policy's own share was not enough.
    lowered: bool,
    /// Rates before the limit: what the guest wrote, and what the wire carried, pages per second.
    unheld_pages_per_s: f64,
    carried_pages_per_s: f64,
}

impl Throttle {
    /// Returns the limit with half the share.
    fn lowered(self) -> Throttle {
        let share = (self.share / 2.0).max(LEAST_THROTTLED_SHARE);
        Throttle { share, rounds: self.rounds + 1, lowered: true, ..self }
    }
}

impl Convergence {
    /// Creates the state before the first round.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let (may_throttle, may_page_in) = (policy.may_throttle, policy.page_in != PageIn::Never);
        Convergence {
            policy,
            rounds: 0,
            recent: VecDeque::new(),
            stalled: 0,
            may_throttle,
            may_page_in,
            throttle: None,
        }
    }

    /// Returns whether so much remains that [`Convergence::decide`] cannot decide on a switchover
    /// now.
    #[must_use]
    pub fn is_far(&self, measured: &Measured) -> bool {
        let budget = self.policy.switchover_budget;
        let is_late = self.rounds + 1 >= self.policy.max_rounds || self.is_overdue(measured);
        let may_settle = self.stalled + 1 >= STALLED_ROUNDS || is_late;
        measured.exceeds(if may_settle { self.longest_pause() } else { budget })
    }

    /// Returns the longest pause that is ever accepted.
    fn longest_pause(&self) -> Duration {
        self.policy.switchover_limit.max(self.policy.switchover_budget)
    }

    /// Returns whether the deadline has passed.
    fn is_overdue(&self, measured: &Measured) -> bool {
        self.policy.deadline.is_some_and(|deadline| measured.elapsed > deadline)
    }

    /// Returns whether rounds no longer get shorter, and the pause for what remains would be too
    /// long.
    fn is_stuck(&self, measured: &Measured) -> bool {
        self.stalled >= STALLED_ROUNDS && measured.exceeds(self.longest_pause())
    }

    /// Returns the limit on writes in the next round, pages per second; `None`: no limit.
    #[must_use]
    pub fn throttle_pages_per_s(&self) -> Option<f64> {
        Some(self.throttle?.pages_per_s)
    }

    /// Notes that writers cannot be slowed here.
    pub fn cannot_throttle(&mut self) {
        (self.may_throttle, self.throttle) = (false, None);
    }

    /// Notes that the guest cannot run at the destination before all of its memory is there.
    pub fn cannot_page_in(&mut self) {
        self.may_page_in = false;
    }

    /// Returns the guest's dirty rate as a share of what the wire carries.
    fn dirty_share(measured: &Measured) -> f64 {
        let carried_pages_per_s = measured.bandwidth_bytes_per_s / f64::from(PAGE_SIZE);
        measured.dirty_pages_per_s / carried_pages_per_s.max(1.0)
    }

    /// Returns whether the running guest is to fetch what remains.
    fn pages_in(&self, measured: &Measured, last: bool) -> bool {
        let writes_too_much = || {
            let Throttling { above, .. } = self.throttling(measured);
            Self::dirty_share(measured) > above && measured.exceeds(self.longest_pause())
        };
        let stuck = self.is_stuck(measured);
        self.may_page_in
            && match self.policy.page_in {
                PageIn::Never => false,
                PageIn::Now => true,
                PageIn::InsteadOfThrottle => last || stuck || writes_too_much(),
                PageIn::LastResort => {
                    let at_its_least = |throttle: Throttle| throttle.share <= LEAST_THROTTLED_SHARE;
                    let cannot_slow_more =
                        !self.may_throttle || self.throttle.is_some_and(at_its_least);
                    last || self.is_overdue(measured) || (stuck && cannot_slow_more)
                }
            }
    }

    /// Slows writers if they write too much for rounds to get shorter, or if rounds do not get
    /// shorter. Slows them more if they still do so when slowed. Lifts the limit if the wire has
    /// come to carry what they wrote without it.
    fn adapt_throttle(&mut self, measured: &Measured) {
        let carried_pages_per_s = measured.bandwidth_bytes_per_s / f64::from(PAGE_SIZE);
        let (dirty_share, stuck) = (Self::dirty_share(measured), self.is_stuck(measured));
        let is_needed = self.stalled > 0 || measured.exceeds(self.policy.switchover_limit);
        let Throttling { above, to } = self.throttling(measured);
        let begins = |share, lowered| Throttle {
            share,
            pages_per_s: 0.0,
            rounds: 0,
            lowered,
            unheld_pages_per_s: measured.dirty_pages_per_s,
            carried_pages_per_s,
        };
        let is_done = |held: Throttle| {
            carried_pages_per_s > MUCH_FASTER * held.carried_pages_per_s
                && held.unheld_pages_per_s <= to * carried_pages_per_s
        };
        let throttle = match self.throttle {
            _ if !self.may_throttle => return,
            None if is_needed && dirty_share > above => begins(to, false),
            // The guest writes less than that, and still too much: a round takes longer than its
            // pages do.
            None if stuck => begins((dirty_share / 2.0).clamp(LEAST_THROTTLED_SHARE, to), true),
            None => return,
            Some(held) if is_done(held) => {
                self.throttle = None;
                return;
            }
            // Not all writes wait, or the wire carries less than before. In the first round memory
            // comes under the throttle only when the sweep reaches it.
            Some(held) if held.rounds > 0 && is_needed && dirty_share > 2.0 * held.share => {
                held.lowered()
            }
            Some(held) if held.rounds > 0 && stuck => {
                // The change needs time to show.
                self.stalled = 0;
                held.lowered()
            }
            Some(held) if held.lowered => {
                Throttle { share: held.share.min(to), rounds: held.rounds + 1, ..held }
            }
            Some(held) => Throttle { share: to, rounds: held.rounds + 1, ..held },
        };
        self.throttle =
            Some(Throttle { pages_per_s: throttle.share * carried_pages_per_s, ..throttle });
    }

    /// Returns when writers are slowed, and how far: by the policy, or as the remaining time
    /// requires. With a share *a* the rounds to come take 1 / (1 - a) times as long as sending the
    /// remainder once.
    fn throttling(&self, measured: &Measured) -> Throttling {
        let Some(deadline) = self.policy.deadline else { return self.policy.throttling };
        let left = PLANNED_SHARE * deadline.saturating_sub(measured.elapsed).as_secs_f64();
        let once = measured.transfer(measured.remaining_pages as f64).as_secs_f64();
        let share =
            (1.0 - once / left.max(1e-3)).clamp(LEAST_THROTTLED_SHARE, MOST_THROTTLED_SHARE);
        Throttling { above: share, to: share }
    }

    /// Decides at the end of a round.
    pub fn decide(&mut self, measured: &Measured) -> Decision {
        let remaining = measured.remaining_pages;
        let least = self.recent.iter().min().map_or(f64::INFINITY, |&least| least as f64);
        let progressed = (remaining as f64) < 0.9 * least;
        let at_minimum = remaining as f64 <= 1.1 * least;
        // A brief round always leaves less than a round that was awaited: the two do not compare.
        if !measured.is_brief_over {
            self.rounds += 1;
            self.stalled = if progressed { 0 } else { self.stalled + 1 };
            self.recent.push_back(remaining);
            if self.recent.len() > MINIMUM_ROUNDS {
                self.recent.pop_front();
            }
        }

        let predicted = measured.predicted_switchover();
        if predicted <= self.policy.switchover_budget
            || measured.is_negligible(self.policy.switchover_budget)
        {
            return Decision::Switchover;
        }
        // Finished work is not discarded while each round leaves less.
        let last = self.rounds >= self.policy.max_rounds && !progressed;
        let settles =
            last || self.is_overdue(measured) || (self.stalled >= STALLED_ROUNDS && at_minimum);
        if settles && predicted <= self.longest_pause() {
            return Decision::Switchover;
        }
        if self.pages_in(measured, last) {
            return Decision::PageIn;
        }
        if last {
            return Decision::GiveUp;
        }
        if !measured.is_brief_over {
            self.adapt_throttle(measured);
        }
        Decision::NextRound
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::{Intent, PageInUse};
    use proptest::prelude::*;

    fn measured(
        remaining_pages: u64,
        dirty_pages_per_s: f64,
        mb_per_s: f64,
        rtt_ms: u64,
    ) -> Measured {
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
        let mut convergence =
            Convergence::new(Policy { page_in: PageIn::Never, ..Policy::default() });
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
        let late =
            Measured { elapsed: Duration::from_secs(1), ..measured(65_536, 100_000.0, 25.0, 0) };
        assert_eq!(Convergence::new(overdue).decide(&late), Decision::PageIn);
    }

    #[test]
    fn little_is_never_paged_in() {
        let mut convergence =
            Convergence::new(Policy { page_in: PageIn::Now, ..Policy::default() });
        assert_eq!(convergence.decide(&measured(100, 5000.0, 1000.0, 0)), Decision::Switchover);
    }

    #[test]
    fn without_page_in_at_the_destination_rounds_continue() {
        let mut convergence =
            Convergence::new(Policy { page_in: PageIn::Now, ..Policy::default() });
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
            let rate = convergence
                .throttle_pages_per_s()
                .unwrap_or(f64::INFINITY)
                .min(0.5 * wire_pages_per_s);
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
        let late =
            Measured { elapsed: Duration::from_secs(1), ..measured(1000, 100_000.0, 125.0, 0) };
        assert!(!Convergence::new(overdue).is_far(&late));
        assert_eq!(Convergence::new(overdue).decide(&late), Decision::Switchover);
        let mut unable = Convergence::new(Policy::default());
        unable.cannot_throttle();
        let decisions = [1220, 1170, 1460, 1200]
            .map(|pages| unable.decide(&measured(pages, 30_000.0, 125.0, 0)));
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
        fn within_the_budget_it_never_waits(pages in 0u64..1000) {
            let now = measured(pages, 0.0, 1_000.0, 1);
            prop_assume!(now.predicted_switchover() <= DEFAULT_SWITCHOVER_BUDGET);
            prop_assert_eq!(Convergence::new(Policy::default()).decide(&now), Decision::Switchover);
        }
    }
}
