//! Adoptions as jobs: what the API shows of one, and how its task changes that.

use std::time::Duration;

use godwit_api::{
    AdoptGuest, Adoption, AdoptionState, ApiError, ErrorCode, ForeignPlace, JobState, JobSummary,
};
use godwit_qemu::ResolvedSpec;
use godwit_types::{Fault, Phase};

use crate::jobs::{Job, JobReport};

/// One adoption, for the task that carries it out.
pub(crate) type Course = Job<Adoption>;

/// Returns an adoption that begins.
pub(crate) fn begun(id: String, request: &AdoptGuest) -> Adoption {
    Adoption {
        id,
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
    }
}

impl JobReport for Adoption {
    const NOUN: &'static str = "adoption";

    fn state(&self) -> JobState {
        match self.state {
            AdoptionState::Running => JobState::Running,
            AdoptionState::Completed => JobState::Done,
            AdoptionState::Failed => JobState::Failed,
            AdoptionState::Cancelled => JobState::Cancelled,
        }
    }

    fn end(&mut self, ended: Result<(), ApiError>) {
        self.phase = Phase::Report;
        self.state = match &ended {
            Ok(()) => AdoptionState::Completed,
            Err(error) if error.code == ErrorCode::Cancelled => AdoptionState::Cancelled,
            Err(_) => AdoptionState::Failed,
        };
        self.error = ended.err().map(Fault::from);
    }

    fn summarize(&self, summary: &mut JobSummary) {
        summary.vm.clone_from(&self.vm);
        summary.total_bytes = self.total_bytes;
        summary.done_bytes = self.total_bytes.saturating_sub(self.remaining_bytes);
        summary.error.clone_from(&self.error);
    }

    fn note_time(&mut self, since: Duration) {
        self.elapsed_ms = since.as_secs_f64() * 1e3;
    }

    fn refusal_of(&self, other: &Adoption) -> Option<ApiError> {
        (self.from == other.from).then(|| {
            let message =
                format!("cannot adopt {}: adoption {} of it is in progress", self.from, self.id);
            ApiError::new(ErrorCode::Busy, message, "wait for its end, or cancel it")
        })
    }
}

impl Course {
    pub(crate) fn phase(&self, phase: Phase) {
        self.set(|shown| shown.phase = phase);
    }

    pub(crate) fn of_vm(&self, spec: &ResolvedSpec) {
        self.set(|shown| {
            shown.vm = spec.name.to_string();
            shown.total_bytes = spec.memory_bytes();
            shown.remaining_bytes = shown.total_bytes;
        });
    }

    pub(crate) fn remaining(&self, bytes: u64) {
        self.set(|shown| shown.remaining_bytes = bytes);
    }

    pub(crate) fn paused_ms(&self, ms: f64) {
        self.set(|shown| (shown.pause_ms, shown.remaining_bytes) = (Some(ms), 0));
    }

    pub(crate) fn notes(&self, notes: Vec<String>) {
        self.set(|shown| shown.notes = notes);
    }

    /// Closes the adoption to cancellation; returns false if it is cancelled.
    pub(crate) fn hand_over(&self) -> bool {
        self.commit("the guest is handed over, and Godwit runs it")
    }

    /// Returns the error of an adoption that the preflight refuses.
    pub(crate) fn refused(&self, from: &ForeignPlace, findings: Vec<Fault>) -> ApiError {
        let first = findings.first().cloned();
        let first = first.unwrap_or_else(|| Fault::new("preflight", "it has no specification", ""));
        let more = match findings.len() {
            0 | 1 => String::new(),
            count => format!(" (and {} more findings)", count - 1),
        };
        self.set(|shown| shown.findings = findings);
        let message = format!("cannot adopt {from}: {}{more}", first.message);
        ApiError::new(ErrorCode::Preflight, message, first.remedy)
    }
}
