//! The guard of this host, with the clock, the files and the processes that its rules act on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{
    ApiError, ErrorCode, HaAnswer, HaHost, HaRenewal, HaStanding, HaVerdict, HeartbeatState,
    MOST_HEARTBEAT_DATASTORES, TermHolder,
};
use godwit_ha::{Answer, Grant, Guard, Order, Standing, Term, Timing};
use godwit_qemu::Uuid;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::here::Here;
use super::named::{Endings, Named};
use super::state::{HaFiles, SavedLease};
use super::{Guarded, HeartbeatDuty, WatchdogStatus, boot_clock};
use crate::failure::host_failed;

/// Renewals that may be under way at once: an answer to an older one is refused.
const MOST_RENEWALS: usize = 8;

/// Time without an answer after which a host without protected VMs is no longer watched for orders.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Interval of messages about a process that cannot be ended, and of tries to end one that hangs in
/// the kernel: its end is pending already.
const SAY_AGAIN: Duration = Duration::from_secs(60);
/// Interval of other tries to end a process.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// A QEMU of a protected VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Protected {
    pub(crate) vm: String,
    pub(crate) pid: i32,
    pub(crate) start_time: u64,
}

/// A heartbeat datastore of the term.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Beats {
    datastore: Uuid,
    /// Start of the last confirmed write.
    written_at: Option<Duration>,
    /// Why the last write failed.
    problem: Option<String>,
}

/// A renewal without an answer.
#[derive(Debug)]
struct Sent {
    nonce: u64,
    /// The moment before it was sent.
    at: Duration,
    ending: Vec<Named>,
    here: Vec<Named>,
}

/// A QEMU that was ended because a term was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ended {
    term: Term,
    /// When it is tried again, after a failure.
    again_at: Option<Duration>,
}

/// A term that an answer opens.
#[derive(Debug)]
struct Opened {
    holder: TermHolder,
    term: Term,
    datastores: Vec<Uuid>,
    /// What the renewal named.
    ending: Vec<Named>,
    here: Vec<Named>,
}

/// The boot clock; tests can stop and advance it.
#[derive(Debug, Default)]
struct Clock {
    #[cfg(test)]
    ahead_ms: std::sync::atomic::AtomicU64,
    #[cfg(test)]
    stopped_at: std::sync::OnceLock<Duration>,
}

impl Clock {
    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "tests advance it")]
    fn now(&self) -> Duration {
        boot_clock()
    }

    #[cfg(test)]
    fn now(&self) -> Duration {
        let ahead = self.ahead_ms.load(std::sync::atomic::Ordering::SeqCst);
        let at = self.stopped_at.get().copied().unwrap_or_else(boot_clock);
        at + Duration::from_millis(ahead)
    }
}

/// The guard of this host. Without a manager that uses HA, it holds no term and writes no file.
#[derive(Debug)]
pub(crate) struct HaGuard {
    clock: Clock,
    began: Duration,
    pub(super) files: HaFiles,
    watchdog: Arc<WatchdogStatus>,
    pub(super) state: Mutex<State>,
    /// Held while an answer is taken: a term is recorded before the next answer.
    answering: Mutex<()>,
    /// Held while the lease is saved, so that no older one replaces it. Never taken to check the
    /// lease: a disk that hangs keeps no VM running.
    saving: Mutex<Option<SavedLease>>,
    /// Held while attempts of starts are saved, so that no older list replaces a newer one. Taken
    /// before the state.
    pub(super) recording: Mutex<()>,
    heartbeats: watch::Sender<Option<HeartbeatDuty>>,
    guarded: watch::Sender<Guarded>,
    /// Wakes the task that carries out the guard's orders.
    changed: Notify,
}

/// What changes.
#[derive(Debug)]
pub(super) struct State {
    pub(super) guard: Guard,
    /// Cluster and host of the newest term.
    pub(super) holder: Option<TermHolder>,
    /// Heartbeat datastores of the term.
    datastores: Vec<Beats>,
    renewals: VecDeque<Sent>,
    pub(super) endings: Endings,
    pub(super) here: Here,
    /// QEMUs of protected VMs.
    processes: Vec<Protected>,
    /// QEMUs of starts that have ended since the last list was begun.
    unlisted: Vec<Protected>,
    /// QEMUs that were ended because a term was lost.
    ended: BTreeMap<(i32, u64), Ended>,
    /// When it was last said of a process that it is ended.
    said: BTreeMap<(i32, u64), Duration>,
    /// When a manager last answered.
    heard_at: Option<Duration>,
    /// Heartbeats that could not be written.
    heartbeat_failures: u64,
    pub(super) gate: Gate,
}

/// Starts of protected VMs that are in progress, or that the manager has requested.
#[derive(Debug, Default)]
pub(super) struct Gate {
    pub(super) next: u64,
    /// Processes of the starts in progress, from the moment at which they are known.
    pub(super) starts: BTreeMap<u64, Option<(i32, u64)>>,
    /// Terms in which the manager has requested starts, by the VM's UUID.
    pub(super) wanted: BTreeMap<Uuid, Term>,
    /// Attempts of starts in this term that were carried out, or are in progress; the newest last.
    /// Also those that an earlier agent has begun: it may have carried them out.
    pub(super) attempts: VecDeque<Uuid>,
    /// Those of them whose VM is not known to have started.
    pub(super) unfinished: BTreeSet<Uuid>,
}

impl State {
    fn datastores(&self) -> Vec<Uuid> {
        self.datastores.iter().map(|beats| beats.datastore).collect()
    }

    /// Returns the processes that must not outlive the lease.
    fn pids(&self) -> Vec<(i32, u64)> {
        let listed = self.processes.iter().chain(&self.unlisted);
        let listed = listed.map(|one| (one.pid, one.start_time));
        let pids: BTreeSet<(i32, u64)> =
            listed.chain(self.gate.starts.values().copied().flatten()).collect();
        pids.into_iter().collect()
    }

    /// Returns what an answer says to the guard.
    fn verdict_of(&self, verdict: &HaVerdict) -> Answer {
        match verdict {
            HaVerdict::Granted { term, datastores } => {
                Answer::Granted(Grant { term: Term(*term), datastores: datastores.len() })
            }
            HaVerdict::Ended { term } => Answer::Ended(Term(*term)),
            HaVerdict::Unknown => Answer::Unknown,
            HaVerdict::Rest { term } if Term(*term) != self.guard.term() => Answer::Unknown,
            // Nothing starts in a term that is given up, so it is over as soon as that is proven.
            HaVerdict::Rest { term } if self.is_unused() => Answer::Ended(Term(*term)),
            HaVerdict::Rest { term } => {
                Answer::Granted(Grant { term: Term(*term), datastores: self.datastores.len() })
            }
        }
    }

    /// Whether no protected VM runs, arrives or starts.
    fn is_unused(&self) -> bool {
        self.processes.is_empty()
            && self.unlisted.is_empty()
            && self.gate.starts.is_empty()
            && self.gate.wanted.is_empty()
    }

    /// Whether the manager has noted what the renewal named, by its answer, which was taken.
    fn is_confirmed_by(&self, verdict: &HaVerdict) -> bool {
        match verdict {
            HaVerdict::Granted { term, .. } => {
                let is_held = matches!(self.guard.standing(), Standing::Held(_));
                is_held && Term(*term) == self.guard.term()
            }
            HaVerdict::Rest { term } => Term(*term) == self.guard.term(),
            HaVerdict::Ended { .. } | HaVerdict::Unknown => false,
        }
    }

    /// Keeps the process of a start that has ended until the next list has it.
    pub(super) fn keep_until_listed(&mut self, vm: &str, (pid, start_time): (i32, u64)) {
        self.unlisted.push(Protected { vm: vm.to_owned(), pid, start_time });
    }
}

fn beats_of(datastores: &[Uuid]) -> Vec<Beats> {
    let of = |&datastore: &Uuid| Beats { datastore, written_at: None, problem: None };
    datastores.iter().map(of).collect()
}

impl HaGuard {
    /// Opens the guard that an earlier agent left.
    pub(crate) fn open(state_dir: &Path, run_dir: &Path, boot_id: String) -> HaGuard {
        let files = HaFiles::new(state_dir, run_dir, boot_id);
        let left = files.left(Timing::default());
        let state = State {
            guard: left.guard,
            holder: left.holder,
            datastores: beats_of(&left.datastores),
            renewals: VecDeque::new(),
            endings: Endings::default(),
            here: Here::default(),
            processes: Vec::new(),
            unlisted: Vec::new(),
            ended: BTreeMap::new(),
            said: BTreeMap::new(),
            heard_at: None,
            heartbeat_failures: 0,
            gate: Gate { attempts: left.attempts, unfinished: left.unfinished, ..Gate::default() },
        };
        let guard = HaGuard {
            clock: Clock::default(),
            began: Clock::default().now(),
            files,
            watchdog: Arc::default(),
            state: Mutex::new(state),
            answering: Mutex::default(),
            saving: Mutex::default(),
            recording: Mutex::default(),
            heartbeats: watch::Sender::new(None),
            guarded: watch::Sender::new(Guarded::default()),
            changed: Notify::new(),
        };
        guard.publish(&guard.state.lock());
        guard
    }

    /// Returns what the watchdog process says, for its client to set.
    pub(crate) fn watchdog(&self) -> &Arc<WatchdogStatus> {
        &self.watchdog
    }

    /// Follows the heartbeats that this host has to write; `None`: none.
    pub(crate) fn heartbeats(&self) -> watch::Receiver<Option<HeartbeatDuty>> {
        self.heartbeats.subscribe()
    }

    /// Follows what a watchdog has to end, and when.
    pub(crate) fn guarded(&self) -> watch::Receiver<Guarded> {
        self.guarded.subscribe()
    }

    /// Makes a renewal. The lease counts from the moment before it is sent.
    pub(crate) fn renewal(&self) -> HaRenewal {
        let mut state = self.state.lock();
        let now = self.clock.now();
        let renewal = state.guard.renewal(now);
        let nonce = Uuid::new_v4().as_u64_pair().0;
        if state.renewals.len() == MOST_RENEWALS {
            state.renewals.pop_front();
        }
        let (ending, here) = (state.endings.named(now), state.here.named());
        let named = ending.iter().map(|(vm, _)| *vm).collect();
        state.renewals.push_back(Sent { nonce, at: now, ending, here });
        self.publish(&state);
        HaRenewal {
            nonce,
            holder: state.holder,
            term: renewal.term.0,
            over: renewal.over,
            watchdog: self.watchdog.kernel(),
            ending: named,
            here: state.here.shown(),
        }
    }

    /// Returns the time on this guard's clock.
    pub(super) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Takes the answer to a renewal. A new term is on the disk when this returns. Blocks.
    ///
    /// # Errors
    /// The answer belongs to no renewal that is under way, or to another cluster; the term cannot
    /// be recorded. Nothing has changed then.
    pub(crate) fn answer(&self, answer: &HaAnswer) -> Result<(), ApiError> {
        check_datastores(&answer.verdict)?;
        let _alone = self.answering.lock();
        let (sent_at, next) = self.would_follow(answer)?;
        let Some(Opened { holder, term, datastores, ending, here }) = next else {
            self.save_lease();
            return Ok(());
        };
        if let Err(error) = self.files.save_term(holder, term) {
            return Err(host_failed("cannot record the term of HA", &error));
        }
        {
            let mut state = self.state.lock();
            let now = self.clock.now();
            if state.holder != Some(holder) {
                state.guard = Guard::booted(Timing::default(), Term(0));
                state.holder = Some(holder);
            }
            // The disk may have taken so long that the lease has run out already.
            let grant = Grant { term, datastores: datastores.len() };
            state.guard.answered(now, sent_at, Answer::Granted(grant));
            if state.guard.term() == term {
                state.endings.confirmed(&ending);
                state.here.confirmed(&here);
                state.datastores = beats_of(&datastores);
                state.gate.attempts.clear();
                state.gate.unfinished.clear();
                state.said.clear();
                // Their ends have been noticed before the former term was over.
                state.ended.retain(|_, ended| ended.term.next() >= term);
                tracing::info!(%term, "a term of HA is held: protected VMs may run");
            }
            self.publish(&state);
        }
        self.save_lease();
        Ok(())
    }

    /// Takes an answer that opens no term. Returns the moment of the renewal, and the term that the
    /// answer would open.
    fn would_follow(&self, answer: &HaAnswer) -> Result<(Duration, Option<Opened>), ApiError> {
        let mut state = self.state.lock();
        let now = self.clock.now();
        let at = state.renewals.iter().position(|sent| sent.nonce == answer.nonce);
        let Some(sent) = at.and_then(|at| state.renewals.remove(at)) else {
            return Err(ApiError::new(
                ErrorCode::WrongState,
                "cannot take an answer to a renewal that is not under way",
                "the next renewal makes up for it",
            ));
        };
        let Sent { at: sent_at, ending, here, .. } = sent;
        state.heard_at = Some(now);
        state.guard.check(now);
        let of_other = state.holder != Some(answer.holder);
        let is_over = *state.guard.standing() == Standing::Over;
        if of_other && !(is_over && matches!(answer.verdict, HaVerdict::Granted { .. })) {
            let is_new = state.holder.is_none();
            self.publish(&state);
            return if is_new { Ok((sent_at, None)) } else { Err(other_cluster(answer)) };
        }
        let verdict = state.verdict_of(&answer.verdict);
        let mut next = match of_other {
            true => Guard::booted(Timing::default(), Term(0)),
            false => state.guard.clone(),
        };
        next.answered(now, sent_at, verdict);
        if let HaVerdict::Granted { datastores, .. } = &answer.verdict
            && (of_other || next.term() != state.guard.term())
        {
            self.publish(&state);
            let opens = matches!(next.standing(), Standing::Held(_));
            let opened = opens.then(|| Opened {
                holder: answer.holder,
                term: next.term(),
                datastores: datastores.clone(),
                ending,
                here,
            });
            return Ok((sent_at, opened));
        }
        state.guard = next;
        if state.is_confirmed_by(&answer.verdict) {
            state.endings.confirmed(&ending);
            state.here.confirmed(&here);
        }
        self.publish(&state);
        Ok((sent_at, None))
    }

    /// Takes the confirmation of a heartbeat whose write began at `started_at`. `datastore`: its
    /// place in [`HeartbeatDuty::datastores`].
    pub(crate) fn confirm_written(&self, term: Term, datastore: usize, started_at: Duration) {
        let mut state = self.state.lock();
        let now = self.clock.now();
        state.guard.written(now, started_at, term, datastore);
        if term == state.guard.term()
            && let Some(beats) = state.datastores.get_mut(datastore)
        {
            beats.written_at = beats.written_at.max(Some(started_at));
            beats.problem = None;
        }
        self.publish(&state);
    }

    /// Notes that a heartbeat could not be written.
    pub(crate) fn write_failed(&self, term: Term, datastore: usize, why: String) {
        let mut state = self.state.lock();
        state.heartbeat_failures += 1;
        if term == state.guard.term()
            && let Some(beats) = state.datastores.get_mut(datastore)
        {
            beats.problem = Some(why);
        }
    }

    /// Returns how the guard stands.
    pub(crate) fn state(&self) -> HaHost {
        let mut state = self.state.lock();
        let now = self.clock.now();
        state.guard.check(now);
        self.publish(&state);
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let beats = |beats: &Beats| HeartbeatState {
            datastore: beats.datastore,
            written_ms_ago: beats.written_at.map(|at| millis(now.saturating_sub(at))),
            problem: beats.problem.clone(),
        };
        let held = matches!(state.guard.standing(), Standing::Held(_));
        let shown: &[Beats] = if held { &state.datastores } else { &[] };
        let processes = state.processes.iter().chain(&state.unlisted);
        let vms: BTreeSet<String> = processes.map(|one| one.vm.clone()).collect();
        HaHost {
            standing: match state.guard.standing() {
                Standing::Held(_) => HaStanding::Held,
                Standing::Stopping => HaStanding::Stopping,
                Standing::Over => HaStanding::Over,
            },
            term: state.guard.term().0,
            lease_left_ms: state.guard.deadline().map(|end| millis(end.saturating_sub(now))),
            watchdog: self.watchdog.kernel(),
            watchdog_process: self.watchdog.process(),
            answered_ms_ago: state.heard_at.map(|at| millis(now.saturating_sub(at))),
            heartbeat_failures: state.heartbeat_failures,
            ending: state.endings.in_progress(),
            datastores: shown.iter().map(beats).collect(),
            vms: vms.into_iter().collect(),
            own: Vec::new(),
            own_problems: Vec::new(),
        }
    }

    /// Whether VMs may run now.
    pub(super) fn holds(&self, state: &mut State) -> bool {
        let held = state.guard.check(self.clock.now()) == Order::Run;
        if !held {
            self.publish(state);
        }
        held
    }

    /// Notifies all that follow the guard of what has changed.
    pub(super) fn publish(&self, state: &State) {
        let held = matches!(state.guard.standing(), Standing::Held(_));
        let duty = state.holder.filter(|_| held && !state.datastores.is_empty()).map(|holder| {
            HeartbeatDuty { holder, term: state.guard.term(), datastores: state.datastores() }
        });
        set_if_new(&self.heartbeats, duty);
        let guarded = match state.guard.standing() {
            Standing::Held(_) => Guarded { deadline: state.guard.deadline(), pids: state.pids() },
            Standing::Stopping => Guarded { deadline: Some(Duration::ZERO), pids: state.pids() },
            Standing::Over => Guarded::default(),
        };
        let is_lost = guarded.deadline == Some(Duration::ZERO);
        if set_if_new(&self.guarded, guarded) && is_lost {
            self.changed.notify_one();
        }
    }
}

/// Orders, and how they are carried out.
impl HaGuard {
    /// Waits until the guard has an order that cannot wait.
    pub(crate) async fn urgent(&self) {
        self.changed.notified().await;
    }

    /// Whether there is nothing to do: no manager has ever given a term, and none is being lost.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.holder.is_none() && *state.guard.standing() == Standing::Over
    }

    /// Whether no manager uses this host any more, by all that is known: its term is over, no
    /// protected VM runs, and no answer has come for long.
    pub(crate) fn is_forgotten(&self) -> bool {
        let state = self.state.lock();
        let unheard = self.clock.now().saturating_sub(state.heard_at.unwrap_or(self.began));
        *state.guard.standing() == Standing::Over && state.is_unused() && unheard >= FORGOTTEN
    }

    /// Whether there is a term that is not over.
    pub(crate) fn has_term(&self) -> bool {
        let state = self.state.lock();
        state.holder.is_some() && *state.guard.standing() != Standing::Over
    }

    /// Must be called before the QEMUs of protected VMs are listed for [`HaGuard::order`]. Returns
    /// how many starts the list has to contain.
    pub(crate) fn begin_list(&self) -> usize {
        self.state.lock().unlisted.len()
    }

    /// Returns the QEMUs that were listed last, and those of starts that have ended since.
    pub(crate) fn processes(&self) -> Vec<Protected> {
        let state = self.state.lock();
        state.processes.iter().chain(&state.unlisted).cloned().collect()
    }

    /// Must be called before the protected VMs are listed for [`HaGuard::know_here`].
    pub(crate) fn begin_here(&self) -> u64 {
        self.state.lock().here.begin_list()
    }

    /// Takes the protected VMs that this host has, for renewals; `None`: not all are known. `begun`
    /// is what [`HaGuard::begin_here`] returned.
    pub(crate) fn know_here(&self, begun: u64, vms: Option<BTreeSet<Uuid>>) {
        self.state.lock().here.list(begun, vms);
    }

    /// Takes the list of QEMUs of protected VMs; returns what to do with them. `contained`: what
    /// [`HaGuard::begin_list`] returned.
    pub(crate) fn order(&self, contained: usize, processes: Vec<Protected>) -> Order {
        let mut state = self.state.lock();
        let contained = contained.min(state.unlisted.len());
        state.unlisted.drain(..contained);
        state.processes = processes;
        let order = state.guard.check(self.clock.now());
        self.publish(&state);
        order
    }

    /// Notes that a process is ended because the term was lost. Returns false if it was noted
    /// before and is not to be tried again yet.
    pub(crate) fn note_ended(&self, pid: i32, start_time: u64) -> bool {
        let mut state = self.state.lock();
        let (now, term) = (self.clock.now(), state.guard.term());
        let known = state.ended.get(&(pid, start_time));
        let is_noted = known.is_some_and(|ended| ended.again_at.is_none_or(|again| now < again));
        if !is_noted {
            state.ended.insert((pid, start_time), Ended { term, again_at: None });
        }
        !is_noted
    }

    /// Whether it should be said that a process is ended: at the first try, and then each minute.
    pub(crate) fn should_say(&self, pid: i32, start_time: u64) -> bool {
        let mut state = self.state.lock();
        let now = self.clock.now();
        let last = state.said.get(&(pid, start_time));
        let should = last.is_none_or(|last| now.saturating_sub(*last) >= SAY_AGAIN);
        if should {
            state.said.insert((pid, start_time), now);
        }
        should
    }

    /// Notes that a process could not be ended. `hangs`: it has not ended in time.
    pub(crate) fn try_again(&self, pid: i32, start_time: u64, hangs: bool) {
        let mut state = self.state.lock();
        let again_at = self.clock.now() + if hangs { SAY_AGAIN } else { TRY_AGAIN };
        if let Some(ended) = state.ended.get_mut(&(pid, start_time)) {
            ended.again_at = Some(again_at);
        }
    }

    /// Returns why a process has ended, if the loss of the term was the cause.
    pub(crate) fn cause_of_end(&self, pid: i32, start_time: u64) -> Option<String> {
        let ended = self.state.lock().ended.get(&(pid, start_time)).copied();
        ended.map(|ended| loss_of(ended.term))
    }

    /// Returns why a protected VM was killed by another process, if this host holds no term: the
    /// watchdog's clock may be the first to pass the deadline.
    pub(crate) fn cause_of_kill(&self) -> Option<String> {
        let mut state = self.state.lock();
        let held = self.holds(&mut state);
        (!held).then(|| loss_of(state.guard.term()))
    }

    /// Takes the report that no QEMU of a protected VM runs. The term is over once that is saved.
    /// Blocks.
    pub(crate) fn vms_ended(&self) {
        let over = {
            let state = self.state.lock();
            let starts = !state.gate.starts.is_empty() || !state.unlisted.is_empty();
            if *state.guard.standing() != Standing::Stopping || starts {
                return;
            }
            self.lease_of(&state).map(SavedLease::over)
        };
        let mut saved = self.saving.lock();
        if let Some(over) = over {
            if let Err(error) = self.files.save_lease(&over) {
                tracing::error!(%error, "cannot save that the term of HA is over; retrying");
                return;
            }
            *saved = Some(over);
        }
        let mut state = self.state.lock();
        // No start begins while the term is being lost.
        state.guard.vms_ended();
        if state.holder.is_some() {
            tracing::info!(term = state.guard.term().0, "a term of HA is over");
        }
        self.publish(&state);
    }

    /// Saves the lease for an agent that starts again in this boot, if it has changed. Blocks.
    pub(crate) fn save_lease(&self) {
        let mut saved = self.saving.lock();
        let Some(lease) = self.lease_of(&self.state.lock()) else { return };
        if saved.as_ref() == Some(&lease) {
            return;
        }
        match self.files.save_lease(&lease) {
            Ok(()) => *saved = Some(lease),
            Err(error) => tracing::error!(%error, "cannot save the lease of HA; retrying"),
        }
    }

    fn lease_of(&self, state: &State) -> Option<SavedLease> {
        let holder = state.holder?;
        let lease = SavedLease::new(&self.files.boot_id, holder, &state.guard, state.datastores());
        Some(lease)
    }
}

/// Sets what is followed; returns whether it is new.
fn set_if_new<T: PartialEq>(sender: &watch::Sender<T>, value: T) -> bool {
    sender.send_if_modified(|known| {
        let is_new = *known != value;
        if is_new {
            *known = value;
        }
        is_new
    })
}

fn loss_of(term: Term) -> String {
    format!("stopped: the host lost its lease of HA ({term})")
}

fn check_datastores(verdict: &HaVerdict) -> Result<(), ApiError> {
    let HaVerdict::Granted { datastores, .. } = verdict else { return Ok(()) };
    let distinct: BTreeSet<&Uuid> = datastores.iter().collect();
    if datastores.len() <= MOST_HEARTBEAT_DATASTORES && distinct.len() == datastores.len() {
        return Ok(());
    }
    let message = format!("cannot use {} heartbeat datastores", datastores.len());
    let remedy = format!("name at most {MOST_HEARTBEAT_DATASTORES}, each once");
    Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
}

fn other_cluster(answer: &HaAnswer) -> ApiError {
    let cluster = answer.holder.cluster;
    tracing::error!(%cluster, "ignored an answer about HA of another cluster");
    ApiError::new(
        ErrorCode::WrongState,
        "cannot take an answer about HA: another cluster holds this host's term",
        "remove the host from one of the two managers",
    )
}

#[cfg(test)]
mod tests;
