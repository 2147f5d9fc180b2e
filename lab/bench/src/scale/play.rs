//! A migration played through on a simulated clock: the engine's own state machine, policy, sweeps
//! and board, with a simulated guest and a wire that takes a time for each unit.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use godwit_migration::drive::Tracking;
use godwit_migration::drive::simulation::{Shared, SweepStep, Sweeps};
use godwit_migration::source::{Action, Counted, Event, Plan, Source};
use godwit_migration::{Measured, PageIn, Policy, millis};
use godwit_ram::PAGE_SIZE;
use serde::Serialize;

use super::cost::Cost;
use super::guest::{Guest, GuestPlan};

/// Time in which the destination prepares, while the guest's writes are tracked.
const PREPARE: Duration = Duration::from_millis(300);
/// Time from the decision until the guest is stopped (`migration/src/policy.rs`).
const TIME_TO_STOP: Duration = Duration::from_millis(4);
/// Bytes that frame a unit and its pages.
const UNIT_BYTES: u64 = 64;

/// Wire with one stream. Each page takes the time of its bytes, whatever it holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WirePlan {
    pub(crate) bytes_per_s: f64,
    pub(crate) round_trip: Duration,
}

struct Wire {
    plan: WirePlan,
    /// When it has taken the last unit.
    free_at: Duration,
    /// When the units that wait on the board were put there.
    pushed: VecDeque<Duration>,
    /// When the units on their way will be reported as applied.
    applied_at: VecDeque<Duration>,
    /// Units reported as applied.
    applied: u64,
}

/// Figures of one migration. Times of the simulated clock are named `simulated`.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Played {
    pub(crate) rounds: u32,
    /// From the request to the end of the pause.
    pub(crate) simulated_migration_s: f64,
    /// Pause that the policy predicts.
    pub(crate) simulated_pause_ms: f64,
    pub(crate) remaining_pages: u64,
    /// Time of the engine for round 0, and its CPU time per page of the guest.
    pub(crate) first_round_s: f64,
    pub(crate) first_round_ns_per_page: f64,
    pub(crate) dirty_pages: u64,
    /// CPU time of the later rounds per dirty page.
    pub(crate) dirty_ns_per_page: f64,
    /// Count of the dirty pages, at the end of a round.
    pub(crate) count_ms: f64,
    /// CPU time of the sweep for the last pages, which is in the pause.
    pub(crate) last_sweep_cpu_ms: f64,
    /// Sweep that finds nothing.
    pub(crate) clean_sweep_ms: f64,
    pub(crate) clean_sweep_cpu_ms: f64,
}

/// Migration under way.
pub(crate) struct Play<'a> {
    guest: Guest,
    sweeps: Sweeps<'a>,
    wire: Wire,
    machine: Source,
    /// Pages that remained at the last count, and the duration of that count.
    counted: Counted,
    first_round: Cost,
    later_rounds: Cost,
    dirty_pages: u64,
}

impl<'a> Play<'a> {
    pub(crate) fn new(shared: &'a Shared, guest: GuestPlan, wire: WirePlan) -> Play<'a> {
        let policy = Policy { page_in: PageIn::Never, ..Policy::default() };
        let plan = Plan { policy, preflight: Duration::ZERO, resumes: false, settles: false };
        Play {
            guest: Guest::new(guest),
            sweeps: Sweeps::new(shared),
            wire: Wire {
                plan: wire,
                free_at: Duration::ZERO,
                pushed: VecDeque::new(),
                applied_at: VecDeque::new(),
                applied: 0,
            },
            machine: Source::new(&plan),
            counted: Counted {
                pages: 0,
                filled_pages: 0,
                round_trip: wire.round_trip,
                limit_bytes_per_s: None,
                scan: Duration::ZERO,
                search: Duration::ZERO,
            },
            first_round: Cost::default(),
            later_rounds: Cost::default(),
            dirty_pages: 0,
        }
    }

    /// Plays rounds until the policy decides on the switchover, then the last sweep and one of
    /// clean memory.
    pub(crate) fn play(mut self, memory_pages: u64) -> Result<Played> {
        let mut event = Some((self.guest.clock, Event::Connected));
        while let Some((at, next)) = event.take() {
            let actions = self.machine.on(at, next);
            for action in actions {
                if action == (Action::BeginSwitchover { page_in: false }) {
                    return self.switch_over(memory_pages);
                }
                event = self.act(action)?.or(event);
            }
        }
        bail!("the migration waits in {:?}", self.machine.state())
    }

    /// Carries out an action. Returns its answer.
    fn act(&mut self, action: Action) -> Result<Option<(Duration, Event)>> {
        let event = match action {
            Action::StartTracking => {
                self.guest.start()?;
                return Ok(None);
            }
            Action::SendBegin => {
                self.guest.clock += PREPARE;
                Event::PeerReady
            }
            Action::CountRemaining => self.count()?,
            Action::SendRound { round, .. } => {
                let cost = self.sweep(|sweeps| sweeps.begin_round(round))?;
                let sent = self.sweeps.sent();
                match round {
                    0 => self.first_round = cost,
                    _ => {
                        self.later_rounds.add(cost);
                        self.dirty_pages += sent.pages;
                    }
                }
                Event::RoundSent(sent)
            }
            Action::Drain => {
                self.apply_all()?;
                let at = self.guest.clock;
                self.guest.check_notes()?;
                let round = self.machine.round();
                return Ok(Some((at, Event::RoundApplied { round, padding_bytes: 0 })));
            }
            Action::Throttle { pages_per_s } => {
                self.guest.throttle(Some(pages_per_s))?;
                return Ok(None);
            }
            Action::LetWritersGo => {
                self.guest.throttle(None)?;
                return Ok(None);
            }
            Action::AbortPeer(failure) => bail!("there is no switchover: {failure}"),
            _ => return Ok(None),
        };
        Ok(Some((self.guest.clock, event)))
    }

    fn count(&mut self) -> Result<Event> {
        let since = self.guest.clock;
        self.guest.look();
        let begun = Instant::now();
        let dirty = self.guest.count_dirty()?;
        let scan = begun.elapsed() + self.guest.clock.saturating_sub(since);
        let pages = self.sweeps.remaining(dirty);
        let (filled_pages, search) = (dirty.filled_pages, self.guest.search);
        self.counted = Counted { pages, filled_pages, scan, search, ..self.counted };
        Ok(Event::RemainingCounted(self.counted))
    }

    /// Plays a sweep until everything that it finds is on the wire. Returns the engine's cost.
    fn sweep(&mut self, begin: impl FnOnce(&mut Sweeps<'a>)) -> Result<Cost> {
        let before = self.guest.writing;
        self.guest.search = Duration::ZERO;
        let (cost, result) = Cost::of(|| {
            begin(&mut self.sweeps);
            self.sweep_to_end()
        });
        result?;
        Ok(cost.without(self.guest.writing.without(before)))
    }

    fn sweep_to_end(&mut self) -> Result<()> {
        loop {
            let before = self.sweeps.waiting();
            let step = self.sweeps.step(&mut self.guest)?;
            let clock = self.guest.clock;
            let pushed = self.sweeps.waiting().saturating_sub(before);
            self.wire.pushed.extend((0..pushed).map(|_| clock));
            let mut makes_room = false;
            while self.wire.next_at().is_some_and(|at| at <= clock) {
                self.send()?;
                makes_room = true;
            }
            match step {
                SweepStep::Progress => {}
                SweepStep::Full if makes_room => {}
                SweepStep::Sampled { pages } => {
                    self.machine.on(clock, Event::Sampled { pages });
                }
                SweepStep::Full => {
                    let next_at = self.wire.next_at().unwrap_or(clock);
                    self.guest.clock = clock.max(next_at);
                    self.send()?;
                }
                SweepStep::Done => break,
            }
        }
        while self.wire.next_at().is_some() {
            self.send()?;
        }
        self.guest.clock = self.guest.clock.max(self.wire.free_at);
        Ok(())
    }

    /// Puts the next unit of the board on the wire.
    fn send(&mut self) -> Result<()> {
        let Some(pushed) = self.wire.pushed.pop_front() else { return Ok(()) };
        let Some(unit) = self.sweeps.take() else { bail!("the board lost a unit") };
        let bytes = unit.page_count() * PAGE_SIZE + UNIT_BYTES;
        let begins = self.wire.free_at.max(pushed);
        self.wire.free_at =
            begins + Duration::from_secs_f64(bytes as f64 / self.wire.plan.bytes_per_s);
        self.wire.applied_at.push_back(self.wire.free_at + self.wire.plan.round_trip);
        self.sweeps.written(bytes);
        self.apply(begins)
    }

    /// Reports the units that are applied by a time.
    fn apply(&mut self, by: Duration) -> Result<()> {
        let before = self.wire.applied;
        while self.wire.applied_at.front().is_some_and(|at| *at <= by) {
            self.wire.applied_at.pop_front();
            self.wire.applied += 1;
        }
        if self.wire.applied > before {
            self.sweeps.applied(self.wire.applied)?;
        }
        Ok(())
    }

    /// Waits until everything sent is applied.
    fn apply_all(&mut self) -> Result<()> {
        let last = self.wire.applied_at.back().copied().unwrap_or_default();
        self.guest.clock = self.guest.clock.max(last);
        self.apply(self.guest.clock)
    }

    fn switch_over(mut self, memory_pages: u64) -> Result<Played> {
        let rates = self.machine.rates();
        let decided = Measured {
            remaining_pages: self.counted.pages,
            dirty_pages_per_s: rates.dirty_bytes_per_s / PAGE_SIZE as f64,
            bandwidth_bytes_per_s: rates.carried_bytes_per_s,
            round_trip: self.counted.round_trip,
            elapsed: self.guest.clock,
            scan: self.counted.scan,
            is_brief_over: false,
        };
        let pause = decided.predicted_switchover();
        let rounds = self.machine.round();
        let (count, _) = Cost::of(|| self.guest.count_dirty());
        self.guest.clock += TIME_TO_STOP;
        self.guest.stop();
        self.guest.let_stop();
        let last = self.sweep(|sweeps| sweeps.begin_last(rounds))?;
        self.apply_all()?;
        let clean = self.sweep(|sweeps| sweeps.begin_round(rounds + 1))?;
        let ns_per = |cost: Cost, pages: u64| cost.cpu.as_secs_f64() * 1e9 / pages.max(1) as f64;
        Ok(Played {
            // The last sweep counts as one.
            rounds: rounds + 1,
            simulated_migration_s: decided.elapsed.saturating_add(pause).as_secs_f64(),
            simulated_pause_ms: millis(pause),
            remaining_pages: self.counted.pages,
            first_round_s: self.first_round.cpu.as_secs_f64(),
            first_round_ns_per_page: ns_per(self.first_round, memory_pages),
            dirty_pages: self.dirty_pages,
            dirty_ns_per_page: ns_per(self.later_rounds, self.dirty_pages),
            count_ms: millis(count.wall),
            last_sweep_cpu_ms: millis(last.cpu),
            clean_sweep_ms: millis(clean.wall),
            clean_sweep_cpu_ms: millis(clean.cpu),
        })
    }

    /// Begins round 0 of a guest that has written for a while, calls `begun`, and plays the round.
    pub(crate) fn play_first_round(&mut self, begun: impl FnOnce()) -> Result<()> {
        self.guest.clock += PREPARE;
        self.sweep(|sweeps| {
            sweeps.begin_round(0);
            begun();
        })?;
        Ok(())
    }
}

impl Wire {
    /// Returns when it takes the next unit that waits, if one does.
    fn next_at(&self) -> Option<Duration> {
        Some(self.free_at.max(*self.pushed.front()?))
    }
}
