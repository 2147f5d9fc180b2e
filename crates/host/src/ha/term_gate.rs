//! Admission of protected VMs: they start, arrive and continue only while the host holds a term.

use std::io;
use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode};
use godwit_ha::Term;
use godwit_qemu::Uuid;
use tokio::time::timeout;

use super::guarding::{Gate, HaGuard};
use super::named::ANSWER_LIMIT;
use super::state::{MOST_ATTEMPTS, SavedAttempts};
use crate::failure::host_failed;

/// A VM that renewals name, because it is about to start.
#[derive(Debug)]
pub(crate) struct NamedHere {
    guard: Arc<HaGuard>,
    vm: Uuid,
}

impl Drop for NamedHere {
    fn drop(&mut self) {
        self.guard.state.lock().here.end(self.vm);
    }
}

/// A start of a protected VM that is in progress. While it exists, the host does not report that
/// its term is over.
#[derive(Debug)]
pub(crate) struct Starting {
    guard: Arc<HaGuard>,
    number: u64,
    vm: String,
    named: Option<NamedHere>,
}

impl Starting {
    /// Lets renewals name the VM until its start has ended.
    pub(crate) fn named(mut self, named: NamedHere) -> Starting {
        self.named = Some(named);
        self
    }

    /// Takes note of the VM's process. Must be called before the guest runs, so that a watchdog
    /// knows it.
    ///
    /// # Errors
    /// The host has lost its term meanwhile; the process must end.
    pub(crate) fn process(&self, pid: i32, start_time: u64) -> Result<(), ApiError> {
        let mut state = self.guard.state.lock();
        state.gate.starts.insert(self.number, Some((pid, start_time)));
        let held = self.guard.holds(&mut state);
        self.guard.publish(&state);
        if held { Ok(()) } else { Err(refusal("start", &self.vm)) }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let mut state = self.guard.state.lock();
        if let Some(Some(process)) = state.gate.starts.remove(&self.number) {
            state.keep_until_listed(&self.vm, process);
        }
        self.guard.publish(&state);
        drop(state);
        // It locks the state, too.
        drop(self.named.take());
    }
}

/// What is known of an attempt of a start in this term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// It begins now, and is forgotten if it fails.
    Nothing,
    /// An earlier agent has begun it, and has ended before it had the VM running.
    Begun,
    CarriedOut,
}

impl Gate {
    /// Notes that an attempt begins; returns what was known of it.
    fn begin_attempt(&mut self, attempt: Uuid) -> Known {
        if self.attempts.contains(&attempt) {
            let is_begun = self.unfinished.contains(&attempt);
            return if is_begun { Known::Begun } else { Known::CarriedOut };
        }
        // Managers of earlier versions had saved none.
        if !attempt.is_nil() {
            if self.attempts.len() == MOST_ATTEMPTS
                && let Some(oldest) = self.attempts.pop_front()
            {
                self.unfinished.remove(&oldest);
            }
            self.attempts.push_back(attempt);
            self.unfinished.insert(attempt);
        }
        Known::Nothing
    }

    fn forget_attempt(&mut self, attempt: Uuid) {
        self.attempts.retain(|known| *known != attempt);
        self.unfinished.remove(&attempt);
    }
}

/// A start that the manager has requested in a term.
#[derive(Debug)]
pub(crate) struct StartInTerm {
    guard: Arc<HaGuard>,
    vm: Uuid,
    attempt: Uuid,
    known: Known,
}

impl StartInTerm {
    /// Whether this attempt was begun in this term before. It may have been carried out.
    pub(crate) fn is_repeated(&self) -> bool {
        self.known != Known::Nothing
    }

    /// Whether an earlier agent has begun this attempt, and has not noted that the VM runs.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.known == Known::Begun
    }

    /// Notes that the VM has started: the attempt starts nothing again. Blocks.
    pub(crate) fn carried_out(mut self) {
        self.known = Known::CarriedOut;
        let is_new = self.guard.state.lock().gate.unfinished.remove(&self.attempt);
        if is_new && let Err(error) = self.guard.save_attempts() {
            // If the VM is stopped, the next agent may start it once more.
            tracing::error!(%error, "cannot record that a VM has started");
        }
    }
}

impl Drop for StartInTerm {
    fn drop(&mut self) {
        let mut state = self.guard.state.lock();
        state.gate.wanted.remove(&self.vm);
        if self.known == Known::Nothing {
            state.gate.forget_attempt(self.attempt);
        }
    }
}

impl HaGuard {
    /// Checks that protected VMs may run.
    ///
    /// # Errors
    /// This host holds no term. `verb` says what was to be done with the VM.
    pub(crate) fn may_run(&self, verb: &str, vm: &str) -> Result<(), ApiError> {
        let mut state = self.state.lock();
        let held = self.holds(&mut state);
        if held { Ok(()) } else { Err(refusal(verb, vm)) }
    }

    /// Waits until the manager has answered a renewal that names a VM, which is about to start. A
    /// start that the manager itself has requested does not wait.
    ///
    /// # Errors
    /// This host holds no term, or the manager does not answer in time.
    pub(crate) async fn until_named(
        self: &Arc<Self>,
        vm: &str,
        uuid: Uuid,
    ) -> Result<NamedHere, ApiError> {
        let (mut confirmed, is_requested) = {
            let mut state = self.state.lock();
            if !self.holds(&mut state) {
                return Err(refusal("start", vm));
            }
            (state.here.begin(uuid), state.gate.wanted.contains_key(&uuid))
        };
        let named = NamedHere { guard: Arc::clone(self), vm: uuid };
        let is_known = is_requested || {
            let answered = confirmed.wait_for(|confirmed| *confirmed);
            timeout(ANSWER_LIMIT, answered).await.is_ok_and(|answered| answered.is_ok())
        };
        if is_known { Ok(named) } else { Err(unanswered(vm)) }
    }

    /// Checks that a start of a VM does not have to wait for the manager.
    ///
    /// # Errors
    /// Renewals name the VM, and none of them has been answered.
    pub(crate) fn check_answered(&self, vm: &str, uuid: Uuid) -> Result<(), ApiError> {
        let is_awaited = self.state.lock().here.is_unconfirmed(uuid);
        if is_awaited { Err(unanswered(vm)) } else { Ok(()) }
    }

    /// Begins the start of a process for a protected VM.
    ///
    /// # Errors
    /// This host holds no term, or not the one in which the start was requested.
    pub(crate) fn starting(self: &Arc<Self>, vm: &str, uuid: Uuid) -> Result<Starting, ApiError> {
        let mut state = self.state.lock();
        if !self.holds(&mut state) {
            return Err(refusal("start", vm));
        }
        if let Some(wanted) = state.gate.wanted.get(&uuid)
            && *wanted != state.guard.term()
        {
            return Err(other_term(vm, *wanted));
        }
        let number = state.gate.next;
        state.gate.next += 1;
        state.gate.starts.insert(number, None);
        Ok(Starting { guard: Arc::clone(self), number, vm: vm.to_owned(), named: None })
    }

    /// Notes that a VM shall start in this term and in no other, until the result is dropped.
    /// `attempt` counts as carried out from now on, so that it is known before the VM can leave,
    /// also to the next agent: it is on the disk when this returns. Blocks.
    ///
    /// # Errors
    /// This host does not hold that term, another request for the VM is in progress, or the attempt
    /// cannot be recorded.
    pub(crate) fn may_start_in(
        self: &Arc<Self>,
        vm: &str,
        uuid: Uuid,
        term: Term,
        attempt: Uuid,
    ) -> Result<StartInTerm, ApiError> {
        let in_term = self.begin_start_in(vm, uuid, term, attempt)?;
        if in_term.known == Known::Nothing && !attempt.is_nil() {
            let saved = self.save_attempts();
            saved.map_err(|error| host_failed("cannot record the start of a VM", &error))?;
        }
        Ok(in_term)
    }

    /// Saves the attempts of starts in the newest term.
    fn save_attempts(&self) -> io::Result<()> {
        let _alone = self.recording.lock();
        let attempts = {
            let state = self.state.lock();
            let Some(holder) = state.holder else { return Ok(()) };
            let Gate { attempts, unfinished, .. } = &state.gate;
            SavedAttempts::new(holder, state.guard.term(), attempts, unfinished)
        };
        self.files.save_attempts(&attempts)
    }

    fn begin_start_in(
        self: &Arc<Self>,
        vm: &str,
        uuid: Uuid,
        term: Term,
        attempt: Uuid,
    ) -> Result<StartInTerm, ApiError> {
        let mut state = self.state.lock();
        if !self.holds(&mut state) {
            return Err(refusal("start", vm));
        }
        if state.guard.term() != term {
            return Err(other_term(vm, term));
        }
        if state.gate.wanted.contains_key(&uuid) {
            let message = format!("cannot start VM \"{vm}\": a start of it is in progress");
            return Err(ApiError::new(ErrorCode::Busy, message, "wait until it has ended"));
        }
        state.gate.wanted.insert(uuid, term);
        let known = state.gate.begin_attempt(attempt);
        Ok(StartInTerm { guard: Arc::clone(self), vm: uuid, attempt, known })
    }
}

fn refusal(verb: &str, vm: &str) -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        format!("cannot {verb} VM \"{vm}\": this host holds no term of HA"),
        "see `godwit control ha show` for why",
    )
}

fn unanswered(vm: &str) -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        format!("cannot start VM \"{vm}\": it is new to this agent, and the manager is silent"),
        "retry while `godwit control ha show` shows a renewal of this host; a new VM can be \
         created without protection",
    )
}

fn other_term(vm: &str, term: Term) -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        format!("cannot start VM \"{vm}\": this host does not hold {term} of HA"),
        "see `godwit control ha show`; the manager tries again in the term that the host holds",
    )
}
