//! Adoptions of this host since the agent's start: progress, cancellation, outcome.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use godwit_api::{AdoptGuest, Adoption, AdoptionState, ApiError, ErrorCode, ForeignPlace};
use godwit_qemu::ResolvedSpec;
use godwit_types::{Fault, Phase};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Number of ended adoptions that are kept.
const HISTORY: usize = 64;
/// Most adoptions at once.
const MOST_AT_ONCE: usize = 8;

/// Adoptions, oldest first, bounded.
#[derive(Debug, Default)]
pub struct Adoptions {
    all: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: VecDeque<Arc<Entry>>,
    begun: u64,
}

#[derive(Debug)]
struct Entry {
    shown: Mutex<Adoption>,
    cancel: watch::Sender<bool>,
}

/// One adoption, for the task that carries it out.
#[derive(Debug)]
pub(crate) struct Course {
    entry: Arc<Entry>,
    begun: Instant,
}

impl Adoptions {
    /// Registers an adoption; refuses a second one of the same guest.
    pub(crate) fn begin(&self, request: &AdoptGuest) -> Result<(String, Course), ApiError> {
        let mut state = self.all.lock();
        let of_guest = |entry: &&Arc<Entry>| {
            let shown = entry.shown.lock();
            !shown.state.is_over() && shown.from == request.from
        };
        if let Some(entry) = state.entries.iter().find(of_guest) {
            let id = entry.shown.lock().id.clone();
            let message =
                format!("cannot adopt {}: adoption {id} of it is in progress", request.from);
            return Err(ApiError::new(ErrorCode::Busy, message, "wait for its end, or cancel it"));
        }
        let running = state.entries.iter().filter(|entry| !entry.shown.lock().state.is_over());
        if running.count() >= MOST_AT_ONCE {
            let message = format!("cannot adopt {}: {MOST_AT_ONCE} adoptions run", request.from);
            return Err(ApiError::new(ErrorCode::Busy, message, "wait for the end of one"));
        }
        state.begun += 1;
        let id = format!("adoption-{}", state.begun);
        let shown = Adoption {
            id: id.clone(),
            from: request.from.clone(),
            vm: request.name.clone().unwrap_or_default(),
            state: AdoptionState::Running,
            phase: Phase::Preflight,
            remaining_bytes: 0,
            total_bytes: 0,
            elapsed_ms: 0.0,
            pause_ms: None,
            notes: Vec::new(),
            findings: Vec::new(),
            error: None,
        };
        let entry = Arc::new(Entry { shown: Mutex::new(shown), cancel: watch::Sender::new(false) });
        state.entries.push_back(Arc::clone(&entry));
        let ended = |entry: &Arc<Entry>| entry.shown.lock().state.is_over();
        while state.entries.len() > HISTORY {
            let Some(at) = state.entries.iter().position(ended) else { break };
            state.entries.remove(at);
        }
        Ok((id, Course { entry, begun: Instant::now() }))
    }

    #[must_use]
    pub fn list(&self) -> Vec<Adoption> {
        self.all.lock().entries.iter().map(|entry| entry.shown.lock().clone()).collect()
    }

    pub fn show(&self, id: &str) -> Result<Adoption, ApiError> {
        self.find(id).map(|entry| entry.shown.lock().clone())
    }

    /// Cancels an adoption; no error if it is over.
    pub fn cancel(&self, id: &str) -> Result<(), ApiError> {
        self.find(id)?.cancel.send_replace(true);
        Ok(())
    }

    fn find(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        let state = self.all.lock();
        let found = state.entries.iter().find(|entry| entry.shown.lock().id == id);
        found.cloned().ok_or_else(|| {
            let message = format!("no adoption \"{id}\" on this host");
            ApiError::new(
                ErrorCode::NotFound,
                message,
                "check the ID: adoptions are forgotten when the agent restarts",
            )
        })
    }
}

impl Course {
    fn change(&self, change: impl FnOnce(&mut Adoption)) {
        let mut shown = self.entry.shown.lock();
        shown.elapsed_ms = self.begun.elapsed().as_secs_f64() * 1e3;
        change(&mut shown);
    }

    pub(crate) fn phase(&self, phase: Phase) {
        self.change(|shown| shown.phase = phase);
    }

    pub(crate) fn of_vm(&self, spec: &ResolvedSpec) {
        self.change(|shown| {
            shown.vm = spec.name.to_string();
            shown.total_bytes = spec.memory_bytes();
            shown.remaining_bytes = shown.total_bytes;
        });
    }

    pub(crate) fn remaining(&self, bytes: u64) {
        self.change(|shown| shown.remaining_bytes = bytes);
    }

    pub(crate) fn paused_ms(&self, ms: f64) {
        self.change(|shown| (shown.pause_ms, shown.remaining_bytes) = (Some(ms), 0));
    }

    pub(crate) fn notes(&self, notes: Vec<String>) {
        self.change(|shown| shown.notes = notes);
    }

    /// Returns the error of an adoption that the preflight refuses.
    pub(crate) fn refused(&self, from: &ForeignPlace, findings: Vec<Fault>) -> ApiError {
        let first = findings.first().cloned();
        let first = first.unwrap_or_else(|| Fault::new("preflight", "it has no specification", ""));
        let more = match findings.len() {
            0 | 1 => String::new(),
            count => format!(" (and {} more findings)", count - 1),
        };
        self.change(|shown| shown.findings = findings);
        let message = format!("cannot adopt {from}: {}{more}", first.message);
        ApiError::new(ErrorCode::Preflight, message, first.remedy)
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        *self.entry.cancel.borrow()
    }

    pub(crate) fn end(&self, ended: Result<(), ApiError>) {
        self.change(|shown| {
            shown.phase = Phase::Report;
            shown.state = match &ended {
                Ok(()) => AdoptionState::Completed,
                Err(error) if error.code == ErrorCode::Cancelled => AdoptionState::Cancelled,
                Err(_) => AdoptionState::Failed,
            };
            shown.error = ended.err().map(Fault::from);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_guest_has_one_adoption_at_a_time() {
        let all = Adoptions::default();
        let request = |name: &str| AdoptGuest {
            from: ForeignPlace::Libvirt(name.to_owned()),
            name: None,
            undefine: false,
            to: None,
        };
        let (id, course) = all.begin(&request("web")).unwrap();
        assert_eq!(all.begin(&request("web")).unwrap_err().code, ErrorCode::Busy);
        all.begin(&request("db")).unwrap();
        all.cancel(&id).unwrap();
        assert!(course.is_cancelled());
        course.end(Err(ApiError::new(ErrorCode::Cancelled, "cancelled", "")));
        assert_eq!(all.show(&id).unwrap().state, AdoptionState::Cancelled);
        all.begin(&request("web")).unwrap().1.end(Ok(()));
        assert_eq!(all.list().len(), 3);
        assert_eq!(all.show("adoption-9").unwrap_err().code, ErrorCode::NotFound);
    }
}
