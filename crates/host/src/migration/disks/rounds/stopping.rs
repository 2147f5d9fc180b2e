//! From the last rounds before a stop of the guest to the round that is sent while it is stopped.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use godwit_migration::disks::DiskRange;
use godwit_migration::{Failure, hold};
use godwit_types::{DiskMeans, FailureCode};
use tokio::sync::oneshot;

use super::super::ranges::{bytes_of, merged};
use super::super::stage::{Answer, Asker};
use super::super::tracking::Tracking;
use super::before_stop::{LITTLE_BYTES, Then};
use super::{HURRY, Order, Parts, Rounds, panicked};
use crate::store::DiskTransferNote;

/// Longest time that a round took, of which the next one may be sent while the hand-over begins.
/// The stopped guest would wait for a slower one.
const LONGEST_BEFORE_AHEAD: Duration = Duration::from_millis(40);
/// Longest time for which the stopped guest waits for the round before the last one to be
/// confirmed: as long as for any other answer (docs/handover.md).
const LONGEST_AHEAD: Duration = Duration::from_millis(1500);

/// How a stop was prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Settled {
    /// All rounds are on the destination's disk.
    Sent,
    /// The last one remains to be sent.
    Listed,
}

/// What the stopped guest has written last.
pub(super) struct Last {
    dirty: Vec<DiskRange>,
    /// When its listing began.
    begun: Instant,
    /// How long that took.
    listed: Duration,
}

impl Rounds {
    /// Settles, and waits for what follows. Goes on with rounds if the stop is put off; otherwise
    /// returns the next order.
    pub(super) fn until_put_off(
        &mut self,
        mut reply: oneshot::Sender<Answer>,
        orders: &Receiver<Order>,
    ) -> Result<ControlFlow<Option<Order>>, Failure> {
        while let Some(settled) = self.settle(reply)? {
            let order = match settled {
                Settled::Sent => orders.recv().ok(),
                Settled::Listed => self.send_ahead(orders),
            };
            match order {
                Some(Order::Settle(again)) => {
                    if let Err(failure) = self.go_on() {
                        let _ = again.send(Err(failure.clone()));
                        return Err(failure);
                    }
                    reply = again;
                }
                Some(Order::Hurry) => {
                    self.go_on()?;
                    self.hurry();
                    break;
                }
                order => return Ok(ControlFlow::Break(order)),
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Prepares the stop of the guest for who waits for it. Returns how it was prepared; `None`: it
    /// is put off, by a cut or because nobody waits any more.
    fn settle(&mut self, reply: oneshot::Sender<Answer>) -> Result<Option<Settled>, Failure> {
        self.asker = Asker::new(reply);
        let prepared = self.prepare_stop();
        let answer = prepared.as_ref().map(|_| true).map_err(Failure::clone);
        let is_settled = self.asker.answer(answer) && prepared.is_ok();
        if !is_settled {
            self.unsettle();
        }
        Ok(Some(prepared?).filter(|_| is_settled))
    }

    /// Notes that the hand-over begins, and sends rounds until little is left, for a moment. Puts
    /// the stop off if too much is left. The last of them may remain to be sent.
    fn prepare_stop(&mut self) -> Result<Settled, Failure> {
        // First: what the guest writes meanwhile is in the rounds.
        self.note_hand_over()?;
        let begun = Instant::now();
        self.before_stop.begins();
        while self.asker.waits() {
            self.list(true)?;
            let (bytes, rate) = (bytes_of(&self.rest), self.convergence.bytes_per_s());
            let then = self.before_stop.before_round(bytes, begun.elapsed(), rate);
            if then == Then::PutOff {
                let vm = self.parts.vm.name.as_str();
                tracing::info!(vm, bytes, "stop put off: much is left of the disks");
                self.asker.answer(Ok(false));
                self.hurries_until = Instant::now() + HURRY;
                break;
            }
            if then == Then::Stop && self.may_send_ahead(bytes, begun) {
                return Ok(Settled::Listed);
            }
            // A cut puts the stop off.
            self.send()?;
            if then == Then::Stop {
                if self.asker.waits() {
                    self.parts.tracking.settled();
                }
                break;
            }
        }
        Ok(Settled::Sent)
    }

    /// Whether a round may be sent while the hand-over begins: the destination will probably have
    /// confirmed it before the guest is stopped. `begun`: when the preparation of the stop began.
    fn may_send_ahead(&self, bytes: u64, begun: Instant) -> bool {
        let is_little = (1..=LITTLE_BYTES).contains(&bytes);
        // The streams have carried something just now, and will once more.
        let is_quick = self.contact >= begun && self.took <= LONGEST_BEFORE_AHEAD;
        is_little && is_quick && self.parts.tracking.means() == DiskMeans::Bitmaps
    }

    /// Sends the round that is listed while the hand-over begins, so that the guest writes less
    /// until it is stopped. Returns the next order. If that is for the last round, its list is made
    /// before the destination has confirmed this one. It is not sent before: the same part of a
    /// disk may be in both, and the streams have no order among them.
    fn send_ahead(&mut self, orders: &Receiver<Order>) -> Option<Order> {
        let planned = std::mem::take(&mut self.rest);
        let Rounds { parts: Parts { shown, tracking, .. }, streams, last, .. } = self;
        let (figures, is_over) = (&shown.figures, &shown.wires.is_over);
        figures.round_begins(bytes_of(&planned));
        let progress = |bytes: u64| figures.done(bytes);
        let (ending, ended) = sync_channel::<()>(0);
        let mut is_late = false;
        let (sent, order) = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("disks".to_owned());
            let planned = &planned;
            let sending = thread.spawn_scoped(scope, move || {
                // Dropped at the end.
                let _ending = ending;
                hold::at("host", "disks-ahead");
                streams.send_round(planned, &progress, is_over)
            });
            // An error comes again with the next list.
            let _ = tracking.remove_dirty();
            let order = orders.recv().ok();
            if matches!(order, Some(Order::Last(_))) {
                let listed = list_last(tracking);
                // The guest waits from here on. If it must be resumed, it waits for nothing.
                let limit = if listed.is_ok() { LONGEST_AHEAD } else { Duration::ZERO };
                *last = Some(listed);
                is_late = ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
                if is_late {
                    shown.wires.end();
                }
            }
            let sent = sending.map(|sending| sending.join().map_err(|_| panicked()));
            (sent, order)
        });
        self.cut = match sent {
            Ok(Ok(sent)) => match self.ends(sent, false) {
                Some(cut) if !is_late || cut.code == FailureCode::DiskFailed => Some(cut),
                _ if is_late => Some(late()),
                _ => None,
            },
            Ok(Err(panicked)) => Some(panicked),
            // There is no thread to spare: the next round has it, too.
            Err(_) => {
                self.rest = planned;
                None
            }
        };
        order
    }

    fn note_hand_over(&mut self) -> Result<(), Failure> {
        let note = DiskTransferNote { handed_over: true, ..self.parts.note.clone() };
        self.parts.agent.note_disk_transfer(&self.parts.vm.name, &note).map_err(|error| {
            Failure::new(FailureCode::Internal, format!("cannot note the transfer: {error}"))
        })?;
        self.parts.note = note;
        Ok(())
    }

    /// Goes on after a stop that was put off.
    fn go_on(&mut self) -> Result<(), Failure> {
        self.unsettle();
        match self.cut.take() {
            Some(cut) => self.reconnect(&cut),
            None => Ok(()),
        }
    }

    /// Notes that the transfer can be continued again.
    pub(super) fn unsettle(&mut self) {
        if !self.parts.note.handed_over {
            return;
        }
        let (vm, note) = (&self.parts.vm.name, &self.parts.note);
        let note = DiskTransferNote { handed_over: false, ..note.clone() };
        match self.parts.agent.note_disk_transfer(vm, &note) {
            Ok(()) => self.parts.note = note,
            // It goes on all the same. Another agent would not continue it.
            Err(error) => {
                tracing::warn!(vm = vm.as_str(), %error, "the note of a transfer is old");
            }
        }
    }

    /// Sends what the stopped guest has written last. **The hand-over waits for it, and for nothing
    /// from the destination** but that it has confirmed the round that was sent ahead.
    pub(super) fn last_round(&mut self) -> Result<(), Failure> {
        let (last, cut) = (self.last.take(), self.cut.take());
        // QEMU's refusal is the cause, if there was one.
        if let (Some(cut), None | Some(Ok(_))) = (cut, &last) {
            return Err(cut);
        }
        let last = last.unwrap_or_else(|| list_last(&mut self.parts.tracking));
        let Last { begun, listed, dirty } = last?;
        self.rest.extend(dirty);
        let rest = merged(std::mem::take(&mut self.rest));
        let Rounds { parts: Parts { tracking, .. }, streams, .. } = self;
        let (sent, removed) = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("disks".to_owned());
            let removing = thread.spawn_scoped(scope, || tracking.remove_dirty());
            let sent = streams.send_last(&rest);
            // A host without a thread to spare does it afterwards.
            let removed =
                removing.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| Err(panicked())));
            (sent, removed)
        });
        let sent = sent?;
        removed?;
        let emitted = begun.elapsed();
        self.parts.tracking.close()?;
        let (vm, whole) = (self.parts.vm.name.as_str(), begun.elapsed());
        tracing::debug!(vm, ?listed, ?emitted, ?whole, "last round of the disks");
        self.parts.shown.figures.last_round_ends(&sent, begun.elapsed());
        hold::at("host", "disks-last-round-sent");
        Ok(())
    }
}

/// Lists what the stopped guest has written last.
fn list_last(tracking: &mut Tracking) -> Result<Last, Failure> {
    let begun = Instant::now();
    tracking.stopped()?;
    let dirty = tracking.exchange(true)?;
    Ok(Last { dirty, begun, listed: begun.elapsed() })
}

fn late() -> Failure {
    let limit = LONGEST_AHEAD.as_secs_f64();
    let detail = format!("the destination did not confirm a round of the disks within {limit} s");
    Failure::new(FailureCode::LaneLost, detail)
}
