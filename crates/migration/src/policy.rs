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
/// Least pause that a round within the budget must save to be worthwhile. It makes the migration
/// longer by about [`BESIDES_TRANSFER`].
const LEAST_SAVED: Duration = Duration::from_millis(2);
/// Duration of a short round besides its transfer: a scan, and the wait for the report that it has
/// been applied. 10 ms measured on loopback (`godwit-bench switchover`).
const BESIDES_TRANSFER: Duration = Duration::from_millis(10);
/// Most rounds within the budget: each leaves less than the one before it, and saves less.
const MOST_SHORTENING_ROUNDS: u32 = 2;
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
/// Stops that may be put off before the rounds that follow them count.
const MOST_FREE_PUT_OFFS: u32 = 5;

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

    /// Returns by how much another round would shorten the pause. Over a long path it takes a round
    /// trip and saves nothing.
    fn saved_by_a_round(&self) -> Duration {
        if self.round_trip >= LONG_ROUND_TRIP {
            return Duration::ZERO;
        }
        let now = self.transfer(self.remaining_pages as f64);
        let round = now.saturating_add(BESIDES_TRANSFER);
        now.saturating_sub(self.transfer(self.dirty_pages_per_s * round.as_secs_f64()))
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
    /// Rounds that were run although the pause was within the budget.
    shortening: u32,
    /// Whether the round under way follows a stop that was put off.
    is_put_off: bool,
    /// Stops that were put off.
    put_offs: u32,
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
            shortening: 0,
            is_put_off: false,
            put_offs: 0,
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

    /// Notes that a switchover was decided and put off, for a reason that is not in the memory. The
    /// guest wrote memory meanwhile, so the next round leaves more, and says nothing about whether
    /// rounds become shorter. Only the first few do not count: a link may fail again and again.
    pub fn put_off(&mut self) {
        self.put_offs = self.put_offs.saturating_add(1);
        self.is_put_off = self.put_offs <= MOST_FREE_PUT_OFFS;
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
        // Nor does a round after a stop that was put off.
        let is_put_off = std::mem::take(&mut self.is_put_off);
        if !measured.is_brief_over && !is_put_off {
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
            return self.switch_over_or_shorten(measured);
        }
        // Finished work is not discarded while each round leaves less.
        let last = self.rounds >= self.policy.max_rounds && !progressed;
        let settles =
            last || self.is_overdue(measured) || (self.stalled >= STALLED_ROUNDS && at_minimum);
        if settles && predicted <= self.longest_pause() {
            return Decision::Switchover;
        }
        if is_put_off {
            return Decision::NextRound;
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

    /// Decides within the budget: another round is worthwhile if it shortens the pause noticeably.
    fn switch_over_or_shorten(&mut self, measured: &Measured) -> Decision {
        let shortens = self.shortening < MOST_SHORTENING_ROUNDS
            && !self.is_overdue(measured)
            && measured.saved_by_a_round() >= LEAST_SAVED;
        if !shortens {
            return Decision::Switchover;
        }
        self.shortening += 1;
        Decision::NextRound
    }
}

#[cfg(test)]
mod tests;
