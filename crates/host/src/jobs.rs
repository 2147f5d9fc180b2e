//! Imports and exports: operations that take as long as disks, with progress and an end on
//! request. A job ends with the agent; the next one removes what it left unfinished.

use std::collections::BTreeMap;
use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode, JobState, JobStatus};
use godwit_qemu::Uuid;
use parking_lot::Mutex;
use tokio::sync::watch;

/// Most jobs that run at once. Copies wait for each other beside that.
const MOST_RUNNING: usize = 8;
/// Most jobs that are remembered.
const MOST_KNOWN: usize = 64;

/// The jobs of an agent, by when they began.
#[derive(Debug, Default)]
pub(crate) struct Jobs(Mutex<BTreeMap<u64, Arc<Job>>>);

/// A job.
#[derive(Debug)]
pub(crate) struct Job {
    status: Mutex<JobStatus>,
    /// Whether it is to end.
    cancelled: watch::Sender<bool>,
    /// Whether it has ended.
    ended: watch::Sender<bool>,
}

impl Job {
    /// Changes the status.
    pub(crate) fn set(&self, change: impl FnOnce(&mut JobStatus)) {
        change(&mut self.status.lock());
    }

    /// Returns whether it is to end, for work that waits without the runtime.
    pub(crate) fn cancelled(&self) -> watch::Receiver<bool> {
        self.cancelled.subscribe()
    }

    fn status(&self) -> JobStatus {
        self.status.lock().clone()
    }

    /// Runs a part that leaves nothing behind when it is dropped; ends it on request.
    ///
    /// # Errors
    /// That of the part, or the request to end.
    pub(crate) async fn until_cancelled<T>(
        &self,
        part: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let mut cancelled = self.cancelled.subscribe();
        tokio::select! {
            biased;
            _ = cancelled.wait_for(|cancelled| *cancelled) => {
                Err(ApiError::new(ErrorCode::Cancelled, "cancelled: nothing of it remains", ""))
            }
            done = part => done,
        }
    }
}

impl Jobs {
    /// Begins a job.
    ///
    /// # Errors
    /// Too many run.
    pub(crate) fn begin<F>(&self, work: impl FnOnce(Arc<Job>) -> F) -> Result<JobStatus, ApiError>
    where
        F: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        let status = JobStatus {
            id: Uuid::new_v4().to_string(),
            state: JobState::Running,
            done_bytes: 0,
            total_bytes: 0,
            written_bytes: 0,
            findings: Vec::new(),
            plan: None,
            vm: None,
            files: Vec::new(),
            error: None,
        };
        let job = Arc::new(Job {
            status: Mutex::new(status.clone()),
            cancelled: watch::channel(false).0,
            ended: watch::channel(false).0,
        });
        let mut jobs = self.0.lock();
        let runs = |job: &Arc<Job>| job.status.lock().state == JobState::Running;
        if jobs.values().filter(|job| runs(job)).count() >= MOST_RUNNING {
            let message = "cannot begin: too many imports and exports run on this host";
            return Err(ApiError::new(ErrorCode::Busy, message, "wait until one of them ends"));
        }
        let oldest = jobs.iter().find(|(_, job)| !runs(job)).map(|(number, _)| *number);
        if let Some(oldest) = oldest.filter(|_| jobs.len() >= MOST_KNOWN) {
            jobs.remove(&oldest);
        }
        let number = jobs.last_key_value().map_or(0, |(number, _)| number + 1);
        jobs.insert(number, job.clone());
        drop(jobs);
        let work = work(job.clone());
        tokio::spawn(async move {
            // A panic must not leave a job that never ends.
            let done = tokio::spawn(work).await;
            let done = done.unwrap_or_else(|error| Err(crate::failure::task_failed(&error)));
            job.set(|status| match done {
                Ok(()) => status.state = JobState::Done,
                Err(error) => {
                    let cancelled = error.code == ErrorCode::Cancelled;
                    status.state = if cancelled { JobState::Cancelled } else { JobState::Failed };
                    status.error = Some(error);
                }
            });
            job.ended.send_replace(true);
        });
        Ok(status)
    }

    /// Returns the state of a job.
    ///
    /// # Errors
    /// It is not known.
    pub(crate) fn status(&self, id: &str) -> Result<JobStatus, ApiError> {
        Ok(self.find(id)?.status())
    }

    /// Ends a job; returns when nothing of it remains, or it was done before.
    ///
    /// # Errors
    /// It is not known.
    pub(crate) async fn cancel(&self, id: &str) -> Result<(), ApiError> {
        let job = self.find(id)?;
        job.cancelled.send_replace(true);
        let _ = job.ended.subscribe().wait_for(|ended| *ended).await;
        Ok(())
    }

    fn find(&self, id: &str) -> Result<Arc<Job>, ApiError> {
        let jobs = self.0.lock();
        let found = jobs.values().find(|job| job.status.lock().id == id);
        found.cloned().ok_or_else(|| {
            let message = format!("no import or export {id} on this host");
            let remedy = "check the ID: old jobs are forgotten, and all when the agent restarts";
            ApiError::new(ErrorCode::NotFound, message, remedy)
        })
    }
}
