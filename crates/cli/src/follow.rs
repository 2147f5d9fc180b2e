//! Follows long work of a host (an import, an export, the move of a disk, an adoption) to its end.

use std::time::{Duration, Instant};

use godwit_api::{Adoption, JobKind, JobState, JobStatus};
use indicatif::ProgressBar;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::Failure;
use crate::output::{Output, spinner};
use crate::target::HostTarget;
use crate::units::{byte_count, millis};

/// Poll interval for the progress.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time after which the speed says something about the rest.
const SETTLING: Duration = Duration::from_secs(1);

/// Returns the time, in milliseconds, that the rest takes at the speed so far; `None` at the
/// beginning.
fn rest_ms((done, left): (u64, u64), elapsed: Duration) -> Option<f64> {
    let has_settled = elapsed >= SETTLING && done > 0;
    has_settled.then(|| elapsed.as_secs_f64() * 1000.0 * left as f64 / done as f64)
}

/// Long work, as its host last reported it.
pub(crate) trait LongWork: Sized {
    fn is_over(&self) -> bool;

    /// Returns a line for the progress of work of this kind.
    fn progress(&self, kind: JobKind) -> String;

    /// Returns the bytes that are done, and those that are left.
    fn bytes(&self) -> (u64, u64);

    async fn refresh(&self, at: &HostTarget) -> Result<Self, Failure>;

    async fn cancel(&self, at: &HostTarget) -> Result<(), Failure>;
}

/// Returns what a cancellation leaves of work of this kind.
fn undone(kind: JobKind) -> &'static str {
    match kind {
        JobKind::Adoption | JobKind::LiveExport => "the guest runs on where it was",
        JobKind::WarmImport => "copies of earlier passes stay",
        JobKind::Import | JobKind::ImportCheck | JobKind::Export | JobKind::DiskMove => {
            "nothing of it will remain"
        }
    }
}

/// Turns Ctrl-C into a cancellation, from before the work begins.
#[derive(Debug)]
pub(crate) struct Follower {
    kind: JobKind,
    interrupts: Signal,
    line: Option<ProgressBar>,
    output: Output,
}

impl Follower {
    /// From here on, Ctrl-C does not end the process.
    pub(crate) fn new(kind: JobKind, output: Output) -> Result<Follower, Failure> {
        let line = spinner().filter(|_| !output.is_json());
        Ok(Follower { line, ..Follower::silent(kind, output)? })
    }

    /// As [`Follower::new`], without a line for the progress.
    pub(crate) fn silent(kind: JobKind, output: Output) -> Result<Follower, Failure> {
        Ok(Follower { kind, interrupts: signal(SignalKind::interrupt())?, line: None, output })
    }

    /// Waits for Ctrl-C.
    pub(crate) async fn interrupted(&mut self) {
        self.interrupts.recv().await;
    }

    /// Follows the work to its end. Ctrl-C cancels it, if it is not too late.
    pub(crate) async fn wait_for<W: LongWork>(
        mut self,
        at: &HostTarget,
        begun: W,
    ) -> Result<W, Failure> {
        let (mut work, since) = (begun, Instant::now());
        while !work.is_over() {
            if let Some(line) = &self.line {
                let rest = rest_ms(work.bytes(), since.elapsed());
                let rest = rest.map_or(String::new(), |ms| format!(", {} left", millis(ms)));
                line.set_message(format!("{}{rest}", work.progress(self.kind)));
                line.tick();
            }
            tokio::select! {
                _ = self.interrupts.recv() => {
                    self.output.note(&format!("cancelling: {}", undone(self.kind)));
                    if let Err(failure) = work.cancel(at).await {
                        self.output.note(&format!("note: {failure}"));
                    }
                }
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
            work = work.refresh(at).await?;
        }
        if let Some(line) = self.line {
            line.finish_and_clear();
        }
        Ok(work)
    }
}

impl LongWork for JobStatus {
    fn is_over(&self) -> bool {
        self.state != JobState::Running
    }

    fn progress(&self, kind: JobKind) -> String {
        let (done, total) = (byte_count(self.done_bytes), byte_count(self.total_bytes));
        let what = if kind == JobKind::LiveExport { "memory" } else { "disks" };
        format!("{done} of {total} of the {what}")
    }

    fn bytes(&self) -> (u64, u64) {
        (self.done_bytes, self.total_bytes.saturating_sub(self.done_bytes))
    }

    async fn refresh(&self, at: &HostTarget) -> Result<JobStatus, Failure> {
        Ok(match at {
            HostTarget::Agent(agent) => agent.job(&self.id).await?,
            HostTarget::Manager(manager, host) => manager.job(host, &self.id).await?,
        })
    }

    async fn cancel(&self, at: &HostTarget) -> Result<(), Failure> {
        at.cancel_job(&self.id).await
    }
}

impl LongWork for Adoption {
    fn is_over(&self) -> bool {
        self.state.is_over()
    }

    fn progress(&self, _kind: JobKind) -> String {
        let done = self.total_bytes.saturating_sub(self.remaining_bytes);
        let (done, total) = (byte_count(done), byte_count(self.total_bytes));
        format!("adopting {}: {}, {done} of {total}", self.from, self.phase)
    }

    fn bytes(&self) -> (u64, u64) {
        (self.total_bytes.saturating_sub(self.remaining_bytes), self.remaining_bytes)
    }

    async fn refresh(&self, at: &HostTarget) -> Result<Adoption, Failure> {
        at.adoption(&self.id).await
    }

    async fn cancel(&self, at: &HostTarget) -> Result<(), Failure> {
        at.cancel_adoption(&self.id).await
    }
}

impl HostTarget {
    pub(crate) async fn cancel_job(&self, id: &str) -> Result<(), Failure> {
        match self {
            HostTarget::Agent(agent) => agent.cancel_job(id).await?,
            HostTarget::Manager(manager, host) => manager.cancel_job(host, id).await?,
        }
        Ok(())
    }

    pub(crate) async fn adoption(&self, id: &str) -> Result<Adoption, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.adoption(id).await?,
            HostTarget::Manager(manager, host) => manager.adoption(host, id).await?,
        })
    }

    pub(crate) async fn cancel_adoption(&self, id: &str) -> Result<(), Failure> {
        match self {
            HostTarget::Agent(agent) => agent.cancel_adoption(id).await?,
            HostTarget::Manager(manager, host) => manager.cancel_adoption(host, id).await?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_cancellation_leaves_depends_on_the_kind() {
        assert_eq!(undone(JobKind::Import), "nothing of it will remain");
        assert_eq!(undone(JobKind::WarmImport), "copies of earlier passes stay");
        assert_eq!(undone(JobKind::LiveExport), undone(JobKind::Adoption));
    }

    #[test]
    fn the_rest_takes_as_long_as_the_bytes_before() {
        assert_eq!(rest_ms((25, 75), Duration::from_secs(2)), Some(6000.0));
        assert_eq!(rest_ms((25, 0), Duration::from_secs(2)), Some(0.0));
        assert_eq!(rest_ms((0, 75), Duration::from_secs(2)), None);
        assert_eq!(rest_ms((25, 75), Duration::from_millis(10)), None);
    }
}
