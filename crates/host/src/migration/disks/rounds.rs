//! The thread of a transfer of disks: rounds while the guest runs, the last one while it is
//! stopped, and the end. It owns the exports and the streams; orders come from
//! [`super::source::DiskTravel`].
//!
//! What is to be sent is never only in this thread's memory: until it is on the destination's disk,
//! a bitmap in QEMU says so, or the destination's own record lacks it. With mirrors it is in this
//! agent's memory: if the agent ends, so does the transfer, and the guest's disks are here.

mod before_stop;
mod stopping;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use godwit_api::ArrivingDisksAccepted;
use godwit_migration::disks::{Convergence, DiskRange, DiskStreams, Next, RoundCut, RoundSent};
use godwit_migration::{Failure, hold};
use godwit_types::{DiskMeans, FailureCode};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};

use super::connecting::Connecting;
use super::figures::Figures;
use super::pass::Pass;
use super::ranges::{bytes_of, merged, with_whole, without};
use super::stage::{Answer, Asker, Stage};
use super::tracking::Tracking;
use super::wires::{Wires, over, waits_for};
use crate::agent::Agent;
use crate::store::DiskTransferNote;
use crate::vm::Vm;
use before_stop::BeforeStop;

/// Time that the last round may take, with the guest stopped.
const LAST_ROUND_BUDGET: Duration = Duration::from_millis(100);
/// Interval between two rounds once little is left.
const IDLE: Duration = Duration::from_millis(100);
/// Longest wait, before little is left, until a mirror has sent enough for a round.
const FILL_LIMIT: Duration = Duration::from_millis(50);
/// Time for which rounds follow each other when a switchover is near.
const HURRY: Duration = Duration::from_secs(1);
/// Silence of the destination after which a round without anything to send has a sample: a cut
/// must be noticed before the guest is stopped.
const CONTACT_INTERVAL: Duration = Duration::from_secs(1);

/// What the thread is to do.
#[derive(Debug)]
pub(super) enum Order {
    /// A switchover may come soon.
    Hurry,
    /// The guest is about to be stopped: send what is left, then wait. An order to hurry ends that
    /// wait: the stop was put off.
    Settle(oneshot::Sender<Answer>),
    /// The guest is stopped: send the rest, and end the exports.
    Last(oneshot::Sender<Result<(), Failure>>),
    /// The destination runs the guest: wait until it has confirmed the end.
    Confirm(oneshot::Sender<Result<(), Failure>>),
    /// The guest stays here, or nobody knows: remove the exports and limits, and the bitmaps unless
    /// they are kept for a continuation.
    Clear { keeps_bitmaps: bool, done: oneshot::Sender<()> },
}

/// What the thread shows.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) stage: watch::Sender<Stage>,
    pub(super) figures: Figures,
    pub(super) wires: Arc<Wires>,
    /// Whether [`Order::Hurry`] waits to be read.
    pub(super) hurries: AtomicBool,
}

/// State of the thread.
pub(super) struct Rounds {
    parts: Parts,
    runtime: Handle,
    streams: DiskStreams,
    /// What is left: read from bitmaps, and not on the destination's disk.
    rest: Vec<DiskRange>,
    convergence: Convergence,
    /// The last rounds, until what is left after them is known.
    pass: Pass,
    is_ready: bool,
    hurries_until: Instant,
    /// Who waits until the guest may be stopped.
    asker: Asker,
    before_stop: BeforeStop,
    /// When the destination answered last.
    contact: Instant,
}

/// What the thread works with.
pub(super) struct Parts {
    pub(super) agent: Arc<Agent>,
    pub(super) vm: Arc<Vm>,
    pub(super) note: DiskTransferNote,
    pub(super) shown: Arc<Shown>,
    pub(super) connecting: Connecting,
    pub(super) tracking: Tracking,
    /// Time for which a cut link is waited for.
    pub(super) cut_limit: Duration,
}

impl Parts {
    /// Lists what travels of the disks, whatever the guest writes.
    ///
    /// # Errors
    /// QEMU cannot be asked, or has another disk.
    fn content(&self) -> Result<Vec<DiskRange>, Failure> {
        Ok(with_whole(self.tracking.allocated()?, &self.connecting.request.disks))
    }

    /// Connects once more after a cut, within its limit. Returns also what the destination has.
    ///
    /// # Errors
    /// `why` is no cut; the limit has passed; the destination does not go on.
    fn connect_again(
        &self,
        runtime: &Handle,
        why: &Failure,
    ) -> Result<(DiskStreams, ArrivingDisksAccepted), Failure> {
        let (vm, wires, cut_at) = (self.vm.name.as_str(), &self.shown.wires, Instant::now());
        wires.forget_streams();
        let again = wires.until_restored(self.cut_limit, why, || {
            self.connecting.again(runtime, &self.tracking)
        })?;
        tracing::info!(vm, took = ?cut_at.elapsed(), "streams of the disks restored");
        Ok(again)
    }
}

impl Rounds {
    /// Opens the streams of a transfer; waits for a link that is cut. `accepted`: what the
    /// destination has already. Blocks.
    ///
    /// # Errors
    /// No stream can be opened, or QEMU does not say what the images have.
    pub(super) fn new(
        parts: Parts,
        runtime: Handle,
        accepted: ArrivingDisksAccepted,
    ) -> Result<Rounds, Failure> {
        let opened = parts.connecting.open(&runtime, &parts.tracking, &accepted);
        let (streams, accepted) = match opened {
            Ok(streams) => (streams, accepted),
            Err(why) => {
                if waits_for(&why, parts.cut_limit) {
                    parts.shown.stage.send_replace(Stage::Cut);
                }
                parts.connect_again(&runtime, &why)?
            }
        };
        let (allocated, means) = (parts.content()?, parts.tracking.means());
        parts.shown.figures.means(means);
        let used = parts.connecting.request.disks.iter().map(|disk| disk.used_bytes);
        parts.shown.figures.total(match means {
            DiskMeans::Bitmaps => bytes_of(&allocated),
            DiskMeans::Mirror => used.fold(0, u64::saturating_add),
        });
        Ok(Rounds {
            runtime,
            streams,
            rest: without(allocated, &present(&accepted)),
            convergence: Convergence::new(LAST_ROUND_BUDGET),
            pass: Pass::default(),
            is_ready: false,
            hurries_until: Instant::now(),
            asker: Asker::default(),
            before_stop: BeforeStop::default(),
            contact: Instant::now(),
            parts,
        })
    }

    /// Carries out the transfer, until the end is ordered or nobody can order it any more.
    pub(super) fn run(mut self, orders: &Receiver<Order>) {
        let order = match self.rounds(orders) {
            Ok(order) => order,
            Err(failure) => {
                let vm = self.parts.vm.name.as_str();
                tracing::warn!(vm, %failure, "the transfer of the disks ended");
                self.parts.shown.stage.send_replace(Stage::Failed(failure));
                orders.recv().ok()
            }
        };
        self.end(order, orders);
    }

    /// Sends rounds until the guest is about to be stopped. Returns the order that follows; `None`
    /// if nobody can order anything.
    fn rounds(&mut self, orders: &Receiver<Order>) -> Result<Option<Order>, Failure> {
        loop {
            let idles = self.is_ready && Instant::now() >= self.hurries_until;
            match orders.recv_timeout(if idles { IDLE } else { Duration::ZERO }) {
                Err(RecvTimeoutError::Timeout) => {
                    if !self.is_ready {
                        self.parts.tracking.wait(FILL_LIMIT);
                    }
                    self.round()?;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Ok(Order::Hurry) => self.hurry(),
                Ok(Order::Settle(reply)) => match self.until_put_off(reply, orders)? {
                    ControlFlow::Continue(()) => {}
                    ControlFlow::Break(order) => return Ok(order),
                },
                Ok(order) => return Ok(Some(order)),
            }
            if self.parts.shown.wires.is_over() {
                return Err(over());
            }
        }
    }

    fn hurry(&mut self) {
        self.parts.shown.hurries.store(false, Ordering::SeqCst);
        self.hurries_until = Instant::now() + HURRY;
    }

    /// Sends what the guest has written since the last round, and decides how to go on.
    fn round(&mut self) -> Result<(), Failure> {
        self.list(false)?;
        self.send()
    }

    /// Lists what the guest has written since the last round, and decides how to go on after the
    /// round that sends it. `is_urgent`: the guest is about to be stopped.
    fn list(&mut self, is_urgent: bool) -> Result<(), Failure> {
        let dirty = self.parts.tracking.exchange(is_urgent)?;
        self.rest.extend(dirty);
        self.rest = merged(std::mem::take(&mut self.rest));
        let behind = self.parts.tracking.behind()?;
        self.parts.shown.figures.behind(behind.bytes);
        let bytes = bytes_of(&self.rest).saturating_add(behind.bytes);
        if let Some(last) = self.pass.take_whole(!behind.is_incomplete) {
            match self.convergence.after_round(bytes, &last) {
                Next::Round => self.is_ready = false,
                Next::Ready => self.is_ready = true,
                Next::Limit { bytes_per_s } => {
                    self.is_ready = false;
                    self.limit(bytes_per_s);
                }
                Next::GiveUp(failure) => return Err(failure),
            }
        } else if bytes == 0 {
            self.is_ready = true;
        }
        self.is_ready &= !behind.is_incomplete;
        self.pass.begins(bytes_of(&self.rest), behind.bytes);
        let stage = if self.is_ready { Stage::Ready } else { Stage::Rounds };
        self.parts.shown.stage.send_if_modified(|shown| {
            let is_new = *shown != stage;
            *shown = stage;
            is_new
        });
        Ok(())
    }

    /// Sends what is left, over a new connection after each cut.
    fn send(&mut self) -> Result<(), Failure> {
        let begun = Instant::now();
        let mut is_empty = self.rest.is_empty();
        while let Some(cut) = self.send_once(begun)? {
            self.reconnect(&cut)?;
            is_empty &= self.rest.is_empty();
        }
        self.parts.tracking.confirm();
        if !is_empty {
            hold::at("host", "disks-round-ended");
        }
        Ok(())
    }

    /// Sends what is left. Returns the cut after which something is left. `begun`: when the sending
    /// began.
    fn send_once(&mut self, begun: Instant) -> Result<Option<Failure>, Failure> {
        let mut planned = std::mem::take(&mut self.rest);
        let is_empty = planned.is_empty();
        if is_empty {
            // Before the stop is the last moment at which a cut costs nothing but time.
            let is_unseen = self.asker.waits() && self.contact < begun;
            let is_silent = is_unseen || self.contact.elapsed() >= CONTACT_INTERVAL;
            planned.extend(self.parts.tracking.sample().filter(|_| is_silent));
            if planned.is_empty() {
                self.parts.tracking.clean()?;
                return Ok(None);
            }
        }
        let Rounds { parts: Parts { shown, tracking, .. }, streams, .. } = self;
        let (figures, is_over) = (&shown.figures, &shown.wires.is_over);
        if !is_empty {
            figures.round_begins(bytes_of(&planned));
        }
        let progress = |bytes: u64| {
            if !is_empty {
                figures.done(bytes);
            }
        };
        let (sent, cleaned) = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("disks".to_owned());
            let cleaning = thread.spawn_scoped(scope, || tracking.clean());
            let sent = streams.send_round(&planned, &progress, is_over);
            let cleaned =
                cleaning.ok().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked())));
            (sent, cleaned)
        });
        // A host without a thread to spare does one after the other.
        cleaned.unwrap_or_else(|| self.parts.tracking.clean())?;
        let cut = self.ends(sent, is_empty);
        if cut.is_some() && self.parts.shown.wires.is_over() { Err(over()) } else { Ok(cut) }
    }

    /// Takes in what a round has sent; `is_empty`: it was a sample. Returns the cut that ended it.
    fn ends(&mut self, sent: Result<RoundSent, RoundCut>, is_empty: bool) -> Option<Failure> {
        let figures = &self.parts.shown.figures;
        match sent {
            Ok(sent) => {
                if !is_empty {
                    figures.round_ends(&sent);
                    self.pass.add(&sent);
                }
                self.contact = Instant::now();
                None
            }
            Err(cut) => {
                figures.cut(&cut.sent, bytes_of(&cut.unmarked));
                // Of what nothing was left, nothing is.
                self.rest = if is_empty { Vec::new() } else { merged(cut.unmarked) };
                Some(cut.failure)
            }
        }
    }

    /// Connects again after a cut, within its limit. Adds to what is left whatever the destination
    /// lacks. A stop of the guest is put off.
    fn reconnect(&mut self, why: &Failure) -> Result<(), Failure> {
        if waits_for(why, self.parts.cut_limit) {
            let (vm, rest_bytes) = (self.parts.vm.name.as_str(), bytes_of(&self.rest));
            tracing::warn!(vm, %why, rest_bytes, "streams of the disks cut");
            self.parts.shown.stage.send_replace(Stage::Cut);
            self.asker.answer(Ok(false));
            // The next agent may continue it: the cut may last.
            self.unsettle();
        }
        let (streams, accepted) = self.parts.connect_again(&self.runtime, why)?;
        let allocated = self.parts.content()?;
        self.rest.extend(without(allocated, &present(&accepted)));
        self.rest = merged(std::mem::take(&mut self.rest));
        self.streams = streams;
        Ok(())
    }

    /// Limits the guest's writes. Without the limit, the rounds may not end, which is noticed.
    fn limit(&mut self, bytes_per_s: u64) {
        let vm = self.parts.vm.name.as_str();
        if !self.parts.note.limited {
            let limited = DiskTransferNote { limited: true, ..self.parts.note.clone() };
            // An agent that starts later must lift it.
            if let Err(error) = self.parts.agent.note_disk_transfer(&self.parts.vm.name, &limited) {
                return tracing::warn!(vm, %error, "writes to the disks are not limited");
            }
            self.parts.note = limited;
        }
        match self.parts.tracking.limit_writes(bytes_per_s) {
            Ok(()) => {
                tracing::info!(vm, bytes_per_s, "writes to the disks are limited");
                self.parts.shown.figures.limited(Some(bytes_per_s));
            }
            Err(error) => tracing::warn!(vm, %error, "writes to the disks are not limited"),
        }
    }

    /// Carries out the orders that follow the rounds.
    fn end(mut self, first: Option<Order>, orders: &Receiver<Order>) {
        let mut next = first;
        while let Some(order) = next {
            match order {
                Order::Hurry => {}
                Order::Settle(reply) => drop(reply.send(Err(self.failure()))),
                Order::Last(reply) => {
                    let settled = self.parts.note.handed_over;
                    let sent = if settled { self.last_round() } else { Err(self.failure()) };
                    // The hand-over may have been undone meanwhile.
                    let _ = reply.send(sent);
                }
                Order::Confirm(reply) => {
                    let _ = reply.send(self.streams.confirmed());
                }
                Order::Clear { keeps_bitmaps, done } => {
                    self.clear(keeps_bitmaps);
                    let _ = done.send(());
                    return;
                }
            }
            next = orders.recv().ok();
        }
        // The migration's task is gone: whatever became of the guest, it must not stay limited.
        self.clear(!self.parts.note.handed_over);
    }

    fn failure(&self) -> Failure {
        match &*self.parts.shown.stage.borrow() {
            Stage::Failed(failure) => failure.clone(),
            _ => Failure::new(FailureCode::Internal, "the rounds of the disks have ended"),
        }
    }

    /// Removes what QEMU has of the transfer.
    fn clear(&mut self, keeps_bitmaps: bool) {
        self.parts.shown.wires.end();
        self.streams.close();
        self.parts.shown.figures.limited(None);
        if self.parts.vm.process.exit().is_some() || self.parts.vm.process.qmp.is_closed() {
            return;
        }
        let (agent, vm, note) = (&self.parts.agent, &self.parts.vm, &self.parts.note);
        if !self.runtime.block_on(agent.clear_disk_transfer(vm, note, keeps_bitmaps)) {
            // The next agent does it by the note.
            return;
        }
        if !keeps_bitmaps {
            agent.forget_disk_transfer(&vm.name);
        } else if note.limited || note.handed_over {
            // A hand-over that was only prepared has left no doubt.
            let lifted = DiskTransferNote { limited: false, handed_over: false, ..note.clone() };
            if let Err(error) = agent.note_disk_transfer(&vm.name, &lifted) {
                tracing::warn!(vm = vm.name.as_str(), %error, "the note of a transfer is old");
            }
        }
    }
}

impl Drop for Rounds {
    /// Nobody must wait for a thread that panicked.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.parts.shown.stage.send_replace(Stage::Failed(panicked()));
        }
    }
}

/// Returns for each disk what is on the destination's disk.
fn present(accepted: &ArrivingDisksAccepted) -> Vec<Vec<(u64, u64)>> {
    accepted.disks.iter().map(|disk| disk.present.clone()).collect()
}

fn panicked() -> Failure {
    Failure::new(FailureCode::Internal, "the thread of the disks panicked")
}
