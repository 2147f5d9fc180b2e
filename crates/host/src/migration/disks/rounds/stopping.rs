//! From the last rounds before a stop of the guest to the round that is sent while it is stopped.

use std::ops::ControlFlow;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use godwit_migration::{Failure, hold};
use godwit_types::FailureCode;
use tokio::sync::oneshot;

use super::super::ranges::{bytes_of, merged};
use super::super::stage::{Answer, Asker};
use super::before_stop::Then;
use super::{HURRY, Order, Parts, Rounds, panicked};
use crate::store::DiskTransferNote;

impl Rounds {
    /// Settles, and waits for what follows. Goes on with rounds if the stop is put off; otherwise
    /// returns the next order.
    pub(super) fn until_put_off(
        &mut self,
        mut reply: oneshot::Sender<Answer>,
        orders: &Receiver<Order>,
    ) -> Result<ControlFlow<Option<Order>>, Failure> {
        while self.settle(reply)? {
            match orders.recv().ok() {
                Some(Order::Settle(again)) => {
                    self.unsettle();
                    reply = again;
                }
                Some(Order::Hurry) => {
                    self.unsettle();
                    self.hurry();
                    break;
                }
                order => return Ok(ControlFlow::Break(order)),
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Prepares the stop of the guest for who waits for it. Returns whether the guest may be
    /// stopped: nobody may wait any more, and a cut puts the stop off.
    fn settle(&mut self, reply: oneshot::Sender<Answer>) -> Result<bool, Failure> {
        self.asker = Asker::new(reply);
        let prepared = self.prepare_stop();
        let is_settled = self.asker.answer(prepared.clone().map(|()| true)) && prepared.is_ok();
        if !is_settled {
            self.unsettle();
        }
        prepared.map(|()| is_settled)
    }

    /// Notes that the hand-over begins, and sends rounds until little is left, for a moment. Puts
    /// the stop off if too much is left. When it returns, nothing of the rounds is under way in
    /// QEMU, which is about to drain its disks.
    fn prepare_stop(&mut self) -> Result<(), Failure> {
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
            // A cut puts the stop off.
            self.send()?;
            if then == Then::Stop {
                if self.asker.waits() {
                    self.parts.tracking.settled();
                }
                break;
            }
        }
        Ok(())
    }

    fn note_hand_over(&mut self) -> Result<(), Failure> {
        let note = DiskTransferNote { handed_over: true, ..self.parts.note.clone() };
        self.parts.agent.note_disk_transfer(&self.parts.vm.name, &note).map_err(|error| {
            Failure::new(FailureCode::Internal, format!("cannot note the transfer: {error}"))
        })?;
        self.parts.note = note;
        Ok(())
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
    /// from the destination.**
    pub(super) fn last_round(&mut self) -> Result<(), Failure> {
        let begun = Instant::now();
        self.parts.tracking.stopped()?;
        let dirty = self.parts.tracking.exchange(true)?;
        let listed = begun.elapsed();
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
