//! The driver's switchover: the guest is stopped, its last pages and its device state are sent, and
//! a pause that takes too long ends.

use std::time::{Duration, Instant};

use godwit_wire::{MAX_DEVICE_STATE_CHUNK, Message};

use super::driver::{CannotSend, Driver, StatePassage};
use crate::drive::hypervisor::SourceHypervisor;
use crate::drive::inbox::Input;
use crate::drive::tracking::Tracking;
use crate::failure::{Failure, FailureCode};
use crate::policy::{LONG_ROUND_TRIP, MOST_SWITCHOVER_BUDGET};
use crate::source::{Event, State};

/// Longest time that the guest is paused for a switchover that does not reach its commit.
const STOPPED_LIMIT: Duration = Duration::from_secs(10);
/// Longest look at all of the memory that is worth one more sweep while the guest is paused.
const QUICK_SCAN: Duration = Duration::from_millis(2);
const _: () = assert!(MOST_SWITCHOVER_BUDGET.as_secs() < STOPPED_LIMIT.as_secs());
/// Longest silence of the destination meanwhile, in addition to round trips: it answers pings every
/// 100 ms.
const SILENCE_LIMIT: Duration = Duration::from_millis(1500);
/// Longest time that a commit stays unanswered before the destination is queried on another
/// connection: more than the destination takes to give up loading.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

impl<H: SourceHypervisor, T: Tracking> Driver<'_, H, T> {
    /// Brings up to date what moves besides the memory.
    pub(super) fn settle(&mut self) {
        let event = match self.job.hypervisor.settle() {
            Ok(true) => Event::Settled,
            Ok(false) => Event::PutOff,
            Err(failure) => Event::Failed(failure),
        };
        // Behind what has come meanwhile: a lane that broke by now can be replaced, because the
        // guest runs.
        self.inputs.inbox.put_now(Input::Machine(event));
    }

    pub(super) fn begin_switchover(&mut self, page_in: bool) {
        self.switchover_since = Some(Instant::now());
        // A peer that stops reading must not keep the guest paused.
        if let Err(error) =
            self.peer.control.limit_sending(SILENCE_LIMIT + 4 * self.peer.round_trip())
        {
            tracing::debug!(%error, "sends of the switchover have no limit of their own");
        }
        // Before the tracker relies on notes of faults: this take also scans.
        let noted = if page_in { self.note_what_is_dirty() } else { Ok(()) };
        self.job.tracker.let_stop();
        let begun =
            noted.and_then(|()| self.job.hypervisor.begin_switchover(self.inputs.inbox, page_in));
        if let Err(failure) = begun {
            self.inputs.first(Event::Failed(failure));
        }
    }

    /// Opens the control stream's window towards the end of round 0.
    pub(super) fn warm_up(&mut self) {
        if self.machine.state() != State::Sending
            || self.machine.round() > 0
            || !self.windows.warm_up_is_due(self.peer.round_trip())
        {
            return;
        }
        let Some(left) = self.memory.time_left() else { return };
        let carried = self.lanes.carried_bytes_per_s();
        let warmed = self.windows.warm_up(left, carried, &self.job.pace, &mut self.peer);
        if let Err(error) = warmed {
            self.lane_broke(&error);
        }
    }

    /// Sends the last pages while the guest is paused.
    pub(super) fn send_last_pages(&mut self, round: u32) {
        self.job.pace.let_go();
        self.dispatch.set_round(round);
        let round_trip = self.peer.round_trip();
        if round_trip < LONG_ROUND_TRIP {
            self.dispatch.burst();
        }
        self.dispatch.hurry(&self.lanes.paces(round_trip), self.memory.fullest_chunk_pages);
        let failure = match self.dispatch.unseal() {
            Ok(0) => Some(Failure::new(FailureCode::LaneLost, "the last data stream broke")),
            Ok(_) => None,
            Err(error) => Some(Failure::new(FailureCode::ProtocolBroken, error.to_string())),
        };
        if let Some(failure) = failure {
            return self.inputs.first(Event::LaneLost(failure));
        }
        self.memory.begin_last(self.dispatch.chunk_pages());
    }

    /// Returns whether one more sweep, and the report that its pages have arrived, take less time
    /// than the device state takes to be written.
    pub(super) fn overlap_pays(&self) -> bool {
        let is_quick = self.job.tracker.fault_figures().by_faults || self.memory.scan <= QUICK_SCAN;
        is_quick && self.peer.round_trip() < LONG_ROUND_TRIP
    }

    /// Lets the device state go to the destination as it is written, once everything sent is in the
    /// destination's memory.
    pub(super) fn pass_device_state(&mut self) {
        if self.state_passage != StatePassage::AwaitsPages
            || self.machine.state() != State::LastPages
            || !self.dispatch.is_applied()
        {
            return;
        }
        self.state_passage = StatePassage::Open;
        // If the lane breaks here, a separate event reports it.
        drop(self.send_device_state());
    }

    /// Sends the device state that has arrived, while the guest may be paused for it.
    pub(super) fn send_device_state(&mut self) -> Result<(), CannotSend> {
        let bytes = self.inputs.inbox.take_device_state();
        self.device_state_bytes += bytes.len() as u64;
        for chunk in bytes.chunks(MAX_DEVICE_STATE_CHUNK as usize) {
            if self.switchover_since.is_some_and(|since| since.elapsed() > STOPPED_LIMIT) {
                self.inputs.first(Event::Failed(overdue_failure()));
                return Err(CannotSend);
            }
            self.send(&Message::DeviceState(chunk.to_vec()))?;
        }
        Ok(())
    }

    /// Ends an overlong pause of the guest, whether a link crawls or a peer only answers pings.
    pub(super) fn check_limits(&mut self) {
        let overdue = |limit| self.switchover_since.is_some_and(|since| since.elapsed() > limit);
        match self.machine.state() {
            state
                if state.holds_guest()
                    && overdue(SILENCE_LIMIT)
                    && self.peer.is_silent_for(SILENCE_LIMIT) =>
            {
                let detail = "the destination stopped responding while the guest was paused";
                self.handle(
                    Instant::now(),
                    Event::LaneLost(Failure::new(FailureCode::LaneLost, detail)),
                );
            }
            state if state.holds_guest() && overdue(STOPPED_LIMIT) => {
                self.handle(Instant::now(), Event::Failed(overdue_failure()));
            }
            State::Draining if self.windows.give_up(self.peer.round_trip()) => {
                tracing::debug!(
                    "the control stream's window is not known to be open: the switchover goes \
                    without"
                );
                self.check_streams(Instant::now());
            }
            State::Committed if overdue(ANSWER_LIMIT) => {
                let failure = Failure::new(
                    FailureCode::LaneLost,
                    "the destination does not say whether the guest runs",
                );
                self.handle(Instant::now(), Event::LaneLost(failure));
            }
            _ => {}
        }
    }
}

fn overdue_failure() -> Failure {
    let detail = format!(
        "the guest was paused for {} s and its last pages were not sent",
        STOPPED_LIMIT.as_secs()
    );
    Failure::new(FailureCode::NotConverging, detail)
}
