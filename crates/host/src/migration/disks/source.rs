//! Disks that travel with a VM, at the source: the handle by which the migration of the memory goes
//! together with them.
//!
//! The states in which the agent may end, and what the next one finds:
//! - before the hand-over: the note and QEMU's bitmaps. The guest runs here. The next agent lifts
//!   limits and ends exports; a repeated migration continues the transfer. Mirrors are ended, too,
//!   and their transfer is not continued.
//! - from the hand-over on, which begins before the last rounds that precede the stop: the note
//!   says so, until the stop is put off. If the guest stays here after all, the bitmaps are
//!   removed: the guest may have written the destination's images there.
//! - after the guest has left: nothing. The note goes with the VM's record, the rest with QEMU.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use godwit_migration::{Failure, millis};
use godwit_qemu::ResolvedSpec;
use godwit_types::{
    DiskReport, DisksProgress, DisksReport, FailureCode, Fault, Outcome, Phase, PhaseReport,
    Progress, Report,
};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};

use super::departure::Departure;
use super::rounds::{Order, Shown};
use super::stage::{Settling, Stage};
use crate::agent::ended::shut_down;
use crate::config::KeepTime;
use crate::migrations::MigrationControl;

/// Interval of progress while nothing but disks travels.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time for the rounds right before the guest is stopped.
const SETTLE_LIMIT: Duration = Duration::from_secs(4);
/// Longest time for the destination to confirm the end, which it had before it ran the guest.
const CONFIRM_LIMIT: Duration = Duration::from_secs(10);
/// Longest time to remove from QEMU what it has of a transfer.
const CLEAR_LIMIT: Duration = Duration::from_secs(60);
/// Longest time for which the end of a migration waits for the deletion of images here, which looks
/// at all of the host's storage.
const DELETE_LIMIT: Duration = Duration::from_secs(60);

/// Disks that travel, from the first request to the end of the migration.
pub(crate) struct DiskTravel {
    pub(super) departure: Departure,
    pub(super) transfer: String,
    /// Whether a later migration can continue it.
    pub(super) can_continue: bool,
    /// The VM as it will be at the destination.
    pub(super) spec_there: ResolvedSpec,
    /// The disks, without their figures.
    pub(super) disks: Vec<DiskReport>,
    pub(super) shown: Arc<Shown>,
    pub(super) stage: watch::Receiver<Stage>,
    pub(super) orders: SyncSender<Order>,
    pub(super) settling: Settling,
    /// Whether the hand-over has begun.
    pub(super) handed_over: AtomicBool,
    pub(super) begun: Instant,
    /// Time until the memory's migration began.
    pub(super) alone: Mutex<Option<Duration>>,
}

impl DiskTravel {
    /// Returns the ID of the transfer.
    pub(crate) fn transfer(&self) -> &str {
        &self.transfer
    }

    /// Returns the VM as it will be at the destination.
    pub(crate) fn spec_there(&self) -> &ResolvedSpec {
        &self.spec_there
    }

    /// Returns the progress of the disks.
    pub(crate) fn progress(&self) -> DisksProgress {
        self.shown.figures.progress()
    }

    /// Waits until so little is left that the memory's migration can begin. Publishes progress.
    ///
    /// # Errors
    /// The transfer has ended, the migration is cancelled, or the guest's QEMU has ended.
    pub(crate) async fn until_ready(&self, control: &MigrationControl) -> Result<(), Fault> {
        let (mut stage, vm) = (self.stage.clone(), &self.departure.vm);
        let mut every = tokio::time::interval(PROGRESS_INTERVAL);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let now = stage.borrow_and_update().clone();
            match now {
                Stage::Ready => {
                    *self.alone.lock() = Some(self.begun.elapsed());
                    return Ok(());
                }
                Stage::Failed(failure) => return Err(failure.to_fault()),
                Stage::Rounds | Stage::Cut => {}
            }
            tokio::select! {
                _ = every.tick() => control.progress(self.progress_alone(control)),
                changed = stage.changed() => if changed.is_err() {
                    return Err(lost().to_fault());
                },
                () = control.cancelled() => return Err(cancelled().to_fault()),
                () = vm.process.qmp.until_guest_shuts_down() => {
                    return Err(shut_down(&vm.name).to_fault());
                }
                _ = vm.process.exited() => {
                    let detail = "QEMU ended while its disks travelled";
                    let ended = Failure::new(FailureCode::HypervisorFailed, detail);
                    return Err(ended.to_fault());
                }
            }
        }
    }

    fn progress_alone(&self, control: &MigrationControl) -> Progress {
        let disks = self.progress();
        let is_cut = self.shown.figures.is_cut();
        let rate = disks.bytes_per_s;
        let eta_ms = (rate > 0.0).then(|| disks.remaining_bytes as f64 / rate * 1e3);
        Progress {
            phase: if is_cut { Phase::Reconnect } else { Phase::Disks },
            bandwidth_bytes_per_s: rate,
            bandwidth_limit: control.pace.holding(),
            eta_ms: eta_ms.filter(|_| !is_cut),
            elapsed_ms: millis(self.departure.begun.elapsed()),
            disks: Some(disks),
            ..Progress::begin(self.departure.vm.spec().memory_bytes())
        }
    }

    /// Waits until the transfer fails; forever if it does not.
    pub(crate) async fn failed(&self) -> Failure {
        let mut stage = self.stage.clone();
        let is_over = |stage: &Stage| matches!(stage, Stage::Failed(_));
        let failed = stage.wait_for(is_over).await.map(|stage| stage.clone());
        match failed {
            Ok(Stage::Failed(failure)) => failure,
            Ok(_) => lost(),
            // The thread ends when it was ordered to.
            Err(_) => std::future::pending().await,
        }
    }

    /// Has rounds follow each other closely, because a switchover may come soon. Does not wait.
    pub(crate) fn hurry(&self) {
        if !self.shown.hurries.swap(true, Ordering::SeqCst) {
            // A thread that has ended has said why.
            let _ = self.orders.try_send(Order::Hurry);
        }
    }

    /// Notes that the hand-over begins, and sends what the guest has written until now, before it
    /// is stopped. Returns false if the stop must be put off: the link is cut, or what is left
    /// takes too long. Blocks.
    ///
    /// # Errors
    /// The transfer has ended, or too much is left again and again.
    pub(crate) fn settle(&self, runtime: &Handle) -> Result<bool, Failure> {
        let order = |reply| self.order(Order::Settle(reply));
        let settled =
            runtime.block_on(self.settling.ask(self.stage.clone(), order, SETTLE_LIMIT))?;
        if settled {
            self.handed_over.store(true, Ordering::SeqCst);
        }
        Ok(settled)
    }

    /// Goes on after a cut of the memory's lane before the guest was stopped: a stop that was
    /// prepared is put off.
    pub(crate) fn go_on(&self) {
        if self.handed_over.swap(false, Ordering::SeqCst) {
            self.hurry();
        }
    }

    /// Sends what the stopped guest has written last, and ends the exports. It does not wait for
    /// the destination, which runs the guest only when all of it is on its disk.
    ///
    /// # Errors
    /// It cannot be sent. The guest must be resumed here.
    pub(crate) async fn last_round(&self) -> Result<(), Failure> {
        let (reply, answer) = oneshot::channel();
        self.order(Order::Last(reply))?;
        answer.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Ends everything that the transfer waits for: the guest is to be resumed here. Does not wait.
    pub(crate) fn stop(&self) {
        self.shown.wires.end();
    }

    /// Ends the transfer with the migration, and adds it to the report.
    pub(crate) async fn end(&self, report: Report) -> Report {
        let mut kept_until_unix_ms = None;
        match report.outcome {
            Outcome::Completed => kept_until_unix_ms = self.completed().await,
            // The guest may run there, and use the images.
            Outcome::InDoubt => self.clear(false).await,
            Outcome::Failed | Outcome::Cancelled => {
                let is_whole = !self.handed_over.load(Ordering::SeqCst);
                let is_worth_it = self.shown.figures.has_sent();
                let keeps = report.outcome == Outcome::Failed && is_whole && is_worth_it;
                self.give_up(keeps && self.can_continue).await;
            }
        }
        let figures = self.shown.figures.report(&self.disks);
        let disks = Some(DisksReport { kept_until_unix_ms, ..figures });
        let alone = self.alone.lock().unwrap_or_else(|| self.begun.elapsed());
        Report { disks, phases: with_disks(report.phases.clone(), millis(alone)), ..report }
    }

    /// Ends a transfer whose guest has left. Returns the time from which this host may remove the
    /// images that it still has, in Unix milliseconds.
    async fn completed(&self) -> Option<u64> {
        let (reply, answer) = oneshot::channel();
        let ordered = self.order(Order::Confirm(reply));
        let confirmed = match ordered {
            Ok(()) => tokio::time::timeout(CONFIRM_LIMIT, answer).await,
            Err(_) => Ok(Ok(Err(lost()))),
        };
        let vm = self.departure.vm.name.as_str();
        let is_confirmed = match confirmed {
            Ok(Ok(Ok(()))) => true,
            Ok(Ok(Err(failure))) => {
                tracing::warn!(vm, %failure, "the end of the disks' streams was not confirmed");
                false
            }
            Ok(Err(_)) | Err(_) => {
                tracing::warn!(vm, "the end of the disks' streams was not confirmed in time");
                false
            }
        };
        self.stop();
        let Departure { agent, request, .. } = &self.departure;
        let how = request.disks.as_ref();
        let deletes = how.is_some_and(|how| how.delete_source);
        if deletes && is_confirmed && self.delete_images().await {
            return None;
        }
        let time = match how {
            // The destination is asked again first.
            _ if deletes => KeepTime::For(Duration::ZERO),
            Some(how) if how.keep_source => KeepTime::Forever,
            _ => agent.config().keep_source_disks,
        };
        agent.keep_departed(&self.departure.vm, &request.to, &self.disks, time)
    }

    /// Deletes the images of the disks. Returns whether that has ended; it goes on if not.
    async fn delete_images(&self) -> bool {
        let agent = Arc::clone(&self.departure.agent);
        let images: Vec<PathBuf> = self.disks.iter().map(|disk| disk.from.clone().into()).collect();
        let deleting = tokio::spawn(async move {
            for image in images {
                agent.delete_departed(&image).await;
            }
        });
        let is_over = tokio::time::timeout(DELETE_LIMIT, deleting).await.is_ok();
        if !is_over {
            let vm = self.departure.vm.name.as_str();
            tracing::warn!(vm, "images of the disks stay for now: their deletion has not ended");
        }
        is_over
    }

    /// Ends a transfer whose guest stays here. With `keeps`, a later migration can continue it.
    pub(crate) async fn give_up(&self, keeps: bool) {
        self.clear(keeps).await;
        if !keeps {
            self.departure.forget_there(&self.departure.request.to, &self.transfer).await;
        }
    }

    /// Removes from QEMU what it has of the transfer, and waits for that.
    async fn clear(&self, keeps_bitmaps: bool) {
        self.stop();
        let (done, cleared) = oneshot::channel();
        let ordered = self.order(Order::Clear { keeps_bitmaps, done });
        if ordered.is_err() || tokio::time::timeout(CLEAR_LIMIT, cleared).await.is_err() {
            let vm = self.departure.vm.name.as_str();
            tracing::error!(vm, "the transfer of the disks is not removed from QEMU yet");
        }
    }

    fn order(&self, order: Order) -> Result<(), Failure> {
        self.orders.try_send(order).map_err(|_| lost())
    }
}

/// Returns the phases of a migration with that of the disks, which was counted as preflight.
fn with_disks(mut phases: Vec<PhaseReport>, alone_ms: f64) -> Vec<PhaseReport> {
    if let Some(first) = phases.first_mut().filter(|first| first.phase == Phase::Preflight) {
        first.duration_ms = (first.duration_ms - alone_ms).max(0.0);
    }
    let at = phases.len().min(1);
    phases.insert(at, PhaseReport { phase: Phase::Disks, duration_ms: alone_ms });
    phases
}

pub(crate) fn cancelled() -> Failure {
    Failure::new(FailureCode::Cancelled, "cancelled while the disks travelled")
}

fn lost() -> Failure {
    Failure::new(FailureCode::Internal, "the thread of the disks ended without a result")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(phase: Phase, duration_ms: f64) -> PhaseReport {
        PhaseReport { phase, duration_ms }
    }

    #[test]
    fn the_time_of_the_disks_is_a_phase_of_its_own() {
        let phases = vec![phase(Phase::Preflight, 105.0), phase(Phase::PreCopy, 7.0)];
        let with = with_disks(phases, 100.0);
        let expected =
            [phase(Phase::Preflight, 5.0), phase(Phase::Disks, 100.0), phase(Phase::PreCopy, 7.0)];
        assert_eq!(with, expected);
        assert_eq!(with_disks(Vec::new(), 9.0), [phase(Phase::Disks, 9.0)]);
    }
}
