//! The source's sweeps over guest memory, in rounds and while the guest is paused, and the work
//! that goes on beside them.

use std::time::{Duration, Instant};

use godwit_lanes::StreamSender;
use godwit_lanes::pacing::MigrationPace;
use godwit_ram::PAGE_SIZE;
use godwit_wire::Message;

use super::figures::{SentSoFar, progress_of};
use super::lanes::Lanes;
use super::streams::wire_number;
use super::waiting::Waiting;
use super::{Awaited, CannotSend, Driver, PING_INTERVAL, STOPPED_LIMIT};
use crate::clock::PeerClock;
use crate::drive::dispatch::Dispatch;
use crate::drive::sweep::{Sample, Scope, Sweeper, memory_failure};
use crate::drive::{Events, Input, SourceHypervisor, Tracking, lane_failure};
use crate::failure::{Failure, FailureCode};
use crate::ledger::Sweep;
use crate::report::nanos;
use crate::source::{Event, Source};
use godwit_types::Progress;

/// From this round trip on, congestion windows must take the switchover in one flight.
pub(crate) const LONG_ROUND_TRIP: Duration = Duration::from_millis(2);
/// Time limit for the arrival of the control stream's padding, in addition to
/// [`WINDOW_ROUND_TRIPS`].
const WINDOW_LIMIT: Duration = Duration::from_secs(2);
/// Slow start from ten segments to [`DEVICE_STATE_ROOM`], and as much again.
const WINDOW_ROUND_TRIPS: u32 = 10;
/// Device state of a usual VM, with a margin: 0.2 MiB measured.
const DEVICE_STATE_ROOM: u64 = 384 * 1024;
/// Size of the last pages of an idle guest, with a margin: 0.6 MiB measured.
pub(crate) const LEAST_LAST_PAGES: u64 = 1024 * 1024;
/// Beyond this, padding costs more than it gains: the wire's rate matters, not the window.
pub(crate) const MOST_LAST_PAGES: u64 = 16 * 1024 * 1024;

impl<H: SourceHypervisor, T: Tracking> Driver<'_, H, T> {
    pub(super) fn send_round(&mut self, round: u32) {
        self.dispatch.set_round(round);
        (self.padding_before, self.control_padding) = (self.dispatch.padding_bytes(), 0);
        let scope = if round == 0 && self.sends_all { Scope::Untouched } else { Scope::Dirty };
        let swept = self.sweep(scope);
        self.swept_all(swept, Awaited::Sent);
    }

    /// Sends the last pages while the guest is paused. Inputs that interrupt it are handled before
    /// the commit can be reached.
    pub(super) fn send_last_pages(&mut self, round: u32) {
        self.job.pace.let_go();
        self.dispatch.set_round(round);
        let round_trip = self.round_trip();
        if round_trip < LONG_ROUND_TRIP {
            self.dispatch.burst();
        }
        self.dispatch.hurry(&self.lanes.paces(round_trip), self.fullest_chunk_pages);
        let failure = match self.dispatch.unseal() {
            Ok(0) => Some(Failure::new(FailureCode::LaneLost, "the last data stream broke")),
            Ok(_) => None,
            Err(error) => Some(Failure::new(FailureCode::ProtocolBroken, error.to_string())),
        };
        if let Some(failure) = failure {
            return self.later(Event::LaneLost(failure));
        }
        let swept = self.sweep(Scope::Last);
        // Messages that arrived during the sweep have not been examined yet.
        self.last_heard = Instant::now();
        self.swept_all(swept, Awaited::LastSent);
    }

    /// Sweeps memory. Returns false if an input has made the sweep pointless.
    fn sweep(&mut self, scope: Scope) -> Result<bool, Failure> {
        let total_pages = self.job.regions.iter().map(|region| region.pages()).sum();
        let (dispatch, referring) = (self.dispatch, self.referring);
        // Round 0 is over when all memory has been examined, and later ones when so many pages have
        // been sent.
        let round =
            (scope != Scope::Untouched).then_some((self.remaining_pages, self.counted.pages));
        let Driver {
            job,
            sender,
            lanes,
            events,
            waiting,
            clock,
            last_heard,
            last_ping,
            machine,
            heat,
            unswept,
            ..
        } = self;
        let mut beside = Beside {
            round,
            begun: job.begun,
            progress: job.progress,
            pace: &job.pace,
            total_pages,
            stopped_since: self.switchover_since,
            sender,
            dispatch,
            lanes,
            events,
            waiting,
            clock,
            last_heard,
            last_ping,
            machine,
        };
        let mut sample = Sample::default();
        let sweeper = Sweeper {
            regions: &job.regions,
            tracker: &mut job.tracker,
            dispatch,
            referring,
            chunk_pages: dispatch.chunk_pages(),
            begin_at: job.begin_at,
            heat,
            sample: &mut sample,
            unswept,
        };
        let swept = sweeper.run(scope, |looked_at| beside.goes_on(looked_at));
        if let Some((at, pages)) = sample.taken {
            self.waiting.push_front(at, Input::Machine(Event::Sampled { pages }));
        }
        swept
    }

    /// Handles the end of the sweep: everything is on the board, or an input has interrupted it.
    fn swept_all(&mut self, swept: Result<bool, Failure>, awaited: Awaited) {
        match swept {
            Ok(true) => {
                self.awaited = Some(awaited);
                // The streams may have been faster.
                self.waiting.push_back(Instant::now(), Input::Moved);
            }
            // The interrupting input waits in the queue, and ends the migration.
            Ok(false) => {}
            Err(failure) => self.sweep_failed(failure),
        }
    }

    /// Handles a failed sweep. A broken lane and a failure of this host are different events.
    fn sweep_failed(&mut self, failure: Failure) {
        let local = matches!(failure.code, FailureCode::MemoryFailed | FailureCode::NotConverging);
        self.later(if local { Event::Failed(failure) } else { Event::LaneLost(failure) });
    }

    /// Returns what has been sent since the last call.
    pub(super) fn swept(&mut self) -> Sweep {
        let sent = self.dispatch.sent();
        let before = std::mem::replace(&mut self.counted, sent);
        Sweep {
            // Work that a broken stream gives back is counted when it is sent again.
            pages: sent.pages.saturating_sub(before.pages),
            zero_pages: sent.zero_pages - before.zero_pages,
            told_pages: sent.told_pages - before.told_pages,
            referred_pages: sent.referred_pages - before.referred_pages,
            bytes: sent.bytes - before.bytes,
        }
    }

    pub(super) fn count_remaining(&mut self) {
        let (round_trip, begun) = (self.round_trip(), Instant::now());
        match self.job.tracker.count_dirty() {
            Ok(dirty) => {
                let pages = dirty.pages + self.referring.waiting();
                self.remaining_pages = pages;
                self.fullest_chunk_pages = dirty.fullest_chunk_pages;
                let limit_bytes_per_s = self.job.pace.data_bytes_per_s();
                let scan = begun.elapsed();
                self.later(Event::RemainingCounted { pages, round_trip, limit_bytes_per_s, scan });
            }
            Err(error) => self.later(Event::Failed(memory_failure(&error))),
        }
    }

    /// Opens congestion windows on a long path. After a small round, the switchover would have to
    /// open them while the guest is paused. Padding opens them before: on the control stream for
    /// the device state, on each data stream for its share of what the last sweep would send. The
    /// round is over when the padding has arrived.
    pub(super) fn open_windows(&mut self) -> Result<(), CannotSend> {
        if self.round_trip() < LONG_ROUND_TRIP {
            return Ok(());
        }
        let last_pages =
            (self.remaining_pages * PAGE_SIZE).clamp(LEAST_LAST_PAGES, MOST_LAST_PAGES);
        self.dispatch.pad(last_pages.min(self.limited_window()));
        // The control stream never waits for a limit, so that it can always send; the data streams
        // wait for its bytes.
        self.control_padding = DEVICE_STATE_ROOM.min(self.limited_window());
        if let Err(error) = self.sender.pad(self.control_padding) {
            self.lane_broke(&error);
            return Err(CannotSend);
        }
        if let Ok(near) = self.job.control.local() {
            self.job.pace.charge(near.ip(), self.control_padding);
        }
        self.ping()?;
        self.window_ping = Some((self.clock_ns(self.last_ping), self.last_ping));
        Ok(())
    }

    /// Returns how long to wait for the padding's arrival: it must save time, not cost it.
    pub(super) fn window_limit(&self) -> Duration {
        WINDOW_LIMIT + WINDOW_ROUND_TRIPS * self.round_trip()
    }

    /// Returns the largest useful window. A window beyond what two round trips carry at the limit
    /// is useless, and slow to open. So is one beyond what the lanes carry. Twice the rate seen is
    /// allowed for, because the full rate may not have shown yet: on a slow wire padding would
    /// delay each round.
    fn limited_window(&self) -> u64 {
        let round_trip_ns = self.round_trip().as_nanos();
        let within = |round_trips: u128, bytes_per_s: u64| {
            let bytes = u128::from(bytes_per_s) * round_trips * round_trip_ns / 1_000_000_000;
            u64::try_from(bytes).unwrap_or(u64::MAX)
        };
        let limited = self.job.pace.data_bytes_per_s().map_or(u64::MAX, |limit| within(2, limit));
        let carried =
            self.lanes.carried_bytes_per_s().map_or(u64::MAX, |carried| within(4, carried));
        limited.min(carried)
    }
}

/// Work beside a sweep: pings to the destination, progress reports, evaluation of the lanes.
struct Beside<'d, 'a> {
    /// Pages that were dirty when the round began, and pages sent before it; `None` in round 0.
    round: Option<(u64, u64)>,
    begun: Instant,
    progress: &'a (dyn Fn(Progress) + Sync),
    pace: &'d MigrationPace,
    total_pages: u64,
    /// When the guest was asked to stop.
    stopped_since: Option<Instant>,
    sender: &'d mut StreamSender,
    dispatch: &'a Dispatch,
    lanes: &'d mut Lanes<'a>,
    events: &'d Events,
    waiting: &'d mut Waiting,
    clock: &'d mut PeerClock,
    last_heard: &'d mut Instant,
    last_ping: &'d mut Instant,
    machine: &'d Source,
}

impl Beside<'_, '_> {
    /// Does the work. It is called repeatedly with the number of pages examined so far. Returns
    /// false if the sweep is pointless.
    fn goes_on(&mut self, looked_at: u64) -> Result<bool, Failure> {
        if self.stopped_since.is_some_and(|since| since.elapsed() > STOPPED_LIMIT) {
            return Err(overdue_failure());
        }
        if self.interrupted()? {
            return Ok(false);
        }
        if self.last_ping.elapsed() < PING_INTERVAL {
            return Ok(true);
        }
        *self.last_ping = Instant::now();
        let sent_ns = nanos(self.last_ping.saturating_duration_since(self.begun));
        let (now, stopped) = (self.begun.elapsed(), self.stopped_since.is_some());
        let asks = self.dispatch.asks();
        let pinged = if asks { self.sender.send(&Message::Ping { sent_ns }) } else { Ok(()) };
        let round_trip = self.clock.round_trip().unwrap_or_default();
        let looked = pinged.and_then(|()| self.lanes.look(now, round_trip, stopped, self.sender));
        looked.map_err(|error| lane_failure(&error))?;
        self.tell(looked_at);
        Ok(true)
    }

    /// Takes the inputs that have arrived meanwhile. Two kinds are handled at once: a broken
    /// stream, because the sweep waits for its work, and answers to pings, because there may be
    /// many. Returns true if the sweep is pointless.
    fn interrupted(&mut self) -> Result<bool, Failure> {
        for (at, input) in self.events.receiver.try_iter() {
            match input {
                Input::StreamBroke { number } => {
                    let message = Message::CloseStream { stream: wire_number(number) };
                    self.sender.send(&message).map_err(|error| lane_failure(&error))?;
                }
                Input::Lane(Message::Pong { sent_ns, answered_ns }) => {
                    *self.last_heard = at;
                    self.dispatch.took_answer();
                    let received_ns = nanos(at.saturating_duration_since(self.begun));
                    self.clock.pong(sent_ns, answered_ns, received_ns);
                }
                other => self.waiting.push_back(at, other),
            }
        }
        Ok(self.waiting.interrupt())
    }

    fn tell(&self, looked_at: u64) {
        let bytes = self.sender.sent_bytes() + self.dispatch.handed_bytes();
        let sent = SentSoFar { bytes, expansion: self.dispatch.encodings().expansion() };
        let remaining = match self.round {
            Some((pages, sent_before)) => {
                pages.saturating_sub(self.dispatch.sent().pages.saturating_sub(sent_before))
            }
            None => self.total_pages - looked_at,
        };
        let told = progress_of(
            self.machine,
            self.total_pages,
            remaining,
            sent,
            self.dispatch.lanes(),
            self.begun,
        );
        (self.progress)(Progress { bandwidth_limit: self.pace.holding(), ..told });
    }
}

pub(super) fn overdue_failure() -> Failure {
    let detail = format!(
        "the guest stood still for {} s and its last pages had not gone",
        STOPPED_LIMIT.as_secs()
    );
    Failure::new(FailureCode::NotConverging, detail)
}
