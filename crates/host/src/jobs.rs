//! Long work of an agent (imports, exports, adoptions): progress, an end on request, and a bounded
//! history. A job ends with the agent; the next one removes what it left unfinished.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use godwit_api::{
    AdoptGuest, ApiError, ErrorCode, ExportVm, ImportFrom, ImportVm, JobKind, JobState, JobStatus,
    JobSummary, MoveDisk,
};
use godwit_qemu::{Uuid, VmName};
use godwit_types::Fault;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::failure::task_failed;

/// Most jobs of a registry that run at once. Copies wait for each other beside that.
const MOST_RUNNING: usize = 8;
/// Most jobs that are remembered.
const MOST_KNOWN: usize = 64;

/// What the API shows of a job.
pub(crate) trait JobReport: Clone + Send + Sync + 'static {
    /// What messages call such a job.
    const NOUN: &'static str;

    fn state(&self) -> JobState;

    fn end(&mut self, ended: Result<(), ApiError>);

    /// Fills in the VM, if it is known by now, the bytes and the error.
    fn summarize(&self, summary: &mut JobSummary);

    /// Takes the time since the job began, at each change.
    fn note_time(&mut self, _since: Duration) {}

    /// Returns why another job cannot begin while this one runs.
    fn refusal_of(&self, _other: &Self) -> Option<ApiError> {
        None
    }
}

/// What is known of a job from its request.
#[derive(Clone, Debug)]
pub(crate) struct JobRequest {
    pub(crate) kind: JobKind,
    /// Empty if only the work finds it out.
    pub(crate) vm: String,
    /// Where the VM comes from or goes to.
    pub(crate) place: String,
}

/// Jobs since the agent's start, the oldest first.
#[derive(Debug)]
pub(crate) struct Jobs<S = JobStatus>(Mutex<VecDeque<Arc<Job<S>>>>);

/// A job.
#[derive(Debug)]
pub(crate) struct Job<S = JobStatus> {
    id: String,
    about: JobRequest,
    begun: Instant,
    begun_unix_ms: u64,
    status: Mutex<S>,
    /// Whether it is to end.
    cancelled: watch::Sender<bool>,
    /// Why it is too late for that.
    committed: Mutex<Option<&'static str>>,
    /// When it has ended, in Unix time.
    ended: watch::Sender<Option<u64>>,
}

impl<S: JobReport> Job<S> {
    /// Changes the status.
    pub(crate) fn set(&self, change: impl FnOnce(&mut S)) {
        let mut status = self.status.lock();
        status.note_time(self.begun.elapsed());
        change(&mut status);
    }

    /// Returns whether it is to end, for work that waits without the runtime.
    pub(crate) fn cancelled(&self) -> watch::Receiver<bool> {
        self.cancelled.subscribe()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// Refuses every later request to end with this reason; returns false if there was one.
    pub(crate) fn commit(&self, why: &'static str) -> bool {
        let mut committed = self.committed.lock();
        let is_open = !self.is_cancelled();
        if is_open {
            *committed = Some(why);
        }
        is_open
    }

    fn status(&self) -> S {
        self.status.lock().clone()
    }

    fn state(&self) -> JobState {
        self.status.lock().state()
    }

    fn summary(&self) -> JobSummary {
        let JobRequest { kind, vm, place } = self.about.clone();
        let status = self.status();
        let mut summary = JobSummary {
            id: self.id.clone(),
            kind,
            vm,
            place,
            state: status.state(),
            done_bytes: 0,
            total_bytes: 0,
            begun_unix_ms: self.begun_unix_ms,
            ended_unix_ms: *self.ended.borrow(),
            error: None,
        };
        status.summarize(&mut summary);
        summary
    }

    /// Requests the end. No error if it has ended without a result.
    fn cancel(&self) -> Result<(), ApiError> {
        let committed = self.committed.lock();
        if let Some(why) = *committed
            && matches!(self.state(), JobState::Running | JobState::Done)
        {
            let message = format!("cannot cancel {} {}: {why}", S::NOUN, self.id);
            return Err(ApiError::new(ErrorCode::WrongState, message, "see `godwit job list`"));
        }
        self.cancelled.send_replace(true);
        Ok(())
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
                let left = match self.about.kind {
                    JobKind::WarmImport => "copies of earlier passes stay",
                    JobKind::Adoption | JobKind::LiveExport => "the guest runs on where it was",
                    _ => "nothing of it remains",
                };
                Err(ApiError::new(ErrorCode::Cancelled, format!("cancelled: {left}"), ""))
            }
            done = part => done,
        }
    }
}

impl<S> Default for Jobs<S> {
    fn default() -> Jobs<S> {
        Jobs(Mutex::default())
    }
}

impl<S: JobReport> Jobs<S> {
    /// Begins a job, which goes on in a task of its own. `status`: makes the status with its ID.
    ///
    /// # Errors
    /// Too many run, or one that runs refuses it.
    pub(crate) fn begin<F>(
        &self,
        about: JobRequest,
        status: impl FnOnce(String) -> S,
        work: impl FnOnce(Arc<Job<S>>) -> F,
    ) -> Result<S, ApiError>
    where
        F: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        let job = self.add(about, status)?;
        let status = job.status();
        let work = work(job.clone());
        tokio::spawn(async move {
            // A panic must not leave a job that never ends.
            let ended = tokio::spawn(work).await;
            let ended = ended.unwrap_or_else(|error| Err(task_failed(&error)));
            job.set(|status| status.end(ended));
            job.ended.send_replace(Some(now_unix_ms()));
        });
        Ok(status)
    }

    /// Adds a job, and forgets the oldest ones that have ended.
    fn add(
        &self,
        about: JobRequest,
        status: impl FnOnce(String) -> S,
    ) -> Result<Arc<Job<S>>, ApiError> {
        let id = Uuid::new_v4().to_string();
        let status = status(id.clone());
        let mut jobs = self.0.lock();
        let running = jobs.iter().filter(|job| job.state() == JobState::Running);
        let running: Vec<S> = running.map(|job| job.status()).collect();
        if let Some(refusal) = running.iter().find_map(|other| other.refusal_of(&status)) {
            return Err(refusal);
        }
        if running.len() >= MOST_RUNNING {
            let message =
                format!("cannot begin another {}: {MOST_RUNNING} run on this host", S::NOUN);
            return Err(ApiError::new(ErrorCode::Busy, message, "wait until one of them ends"));
        }
        let job = Arc::new(Job {
            id,
            about,
            begun: Instant::now(),
            begun_unix_ms: now_unix_ms(),
            status: Mutex::new(status),
            cancelled: watch::Sender::new(false),
            committed: Mutex::default(),
            ended: watch::Sender::new(None),
        });
        jobs.push_back(job.clone());
        while jobs.len() > MOST_KNOWN {
            let oldest = jobs.iter().position(|job| job.state() != JobState::Running);
            let Some(oldest) = oldest else { break };
            jobs.remove(oldest);
        }
        Ok(job)
    }

    pub(crate) fn list(&self) -> Vec<S> {
        self.0.lock().iter().map(|job| job.status()).collect()
    }

    pub(crate) fn summaries(&self) -> Vec<JobSummary> {
        self.0.lock().iter().map(|job| job.summary()).collect()
    }

    /// Returns the state of a job.
    ///
    /// # Errors
    /// It is not known.
    pub(crate) fn status(&self, id: &str) -> Result<S, ApiError> {
        Ok(self.find(id)?.status())
    }

    /// Requests the end of a job.
    ///
    /// # Errors
    /// It is not known, or cannot be undone any more.
    pub(crate) fn cancel(&self, id: &str) -> Result<(), ApiError> {
        self.find(id)?.cancel()
    }

    /// Waits for the end of a job.
    ///
    /// # Errors
    /// It is not known.
    pub(crate) async fn ended(&self, id: &str) -> Result<(), ApiError> {
        let mut ended = self.find(id)?.ended.subscribe();
        let _ = ended.wait_for(Option::is_some).await;
        Ok(())
    }

    fn find(&self, id: &str) -> Result<Arc<Job<S>>, ApiError> {
        let found = self.0.lock().iter().find(|job| job.id == id).cloned();
        found.ok_or_else(|| {
            let message = format!("cannot find {} \"{id}\" on this host", S::NOUN);
            let remedy = "check the ID: old ones are forgotten, and all when the agent restarts";
            ApiError::new(ErrorCode::NotFound, message, remedy)
        })
    }
}

impl JobReport for JobStatus {
    const NOUN: &'static str = "job";

    fn state(&self) -> JobState {
        self.state
    }

    fn end(&mut self, ended: Result<(), ApiError>) {
        self.state = match &ended {
            Ok(()) => JobState::Done,
            Err(error) if error.code == ErrorCode::Cancelled => JobState::Cancelled,
            Err(_) => JobState::Failed,
        };
        self.error = ended.err();
    }

    fn summarize(&self, summary: &mut JobSummary) {
        if let Some(plan) = &self.plan {
            summary.vm.clone_from(&plan.spec.name);
        }
        (summary.done_bytes, summary.total_bytes) = (self.done_bytes, self.total_bytes);
        summary.error = self.error.as_ref().map(Fault::from);
    }
}

impl JobRequest {
    pub(crate) fn import(request: &ImportVm) -> JobRequest {
        let kind = match &request.warm {
            _ if request.dry_run => JobKind::ImportCheck,
            Some(_) => JobKind::WarmImport,
            None => JobKind::Import,
        };
        let place = match &request.from {
            ImportFrom::Text(_) => "a definition that was sent".to_owned(),
            ImportFrom::File(path) => path.clone(),
            ImportFrom::Libvirt(name) => format!("libvirt's domain \"{name}\""),
        };
        JobRequest { kind, vm: request.name.clone().unwrap_or_default(), place }
    }

    pub(crate) fn export(vm: &VmName, request: &ExportVm) -> JobRequest {
        let place = request.to.display().to_string();
        JobRequest { kind: JobKind::Export, vm: vm.to_string(), place }
    }

    pub(crate) fn live_export(vm: &VmName) -> JobRequest {
        JobRequest { kind: JobKind::LiveExport, vm: vm.to_string(), place: "libvirt".to_owned() }
    }

    pub(crate) fn disk_move(vm: &VmName, request: &MoveDisk) -> JobRequest {
        let place = request.to.display().to_string();
        JobRequest { kind: JobKind::DiskMove, vm: vm.to_string(), place }
    }

    pub(crate) fn adoption(request: &AdoptGuest) -> JobRequest {
        let vm = request.name.clone().unwrap_or_default();
        JobRequest { kind: JobKind::Adoption, vm, place: request.from.to_string() }
    }
}

fn now_unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use godwit_api::Adoption;
    use proptest::prelude::*;
    use serde_json::json;
    use tokio::sync::oneshot;

    use super::*;
    use crate::adoptions::begun;

    type Ending = oneshot::Sender<Result<(), ApiError>>;

    fn guest(name: &str) -> AdoptGuest {
        serde_json::from_value(json!({ "from": { "libvirt": name } })).unwrap()
    }

    fn panics() -> Result<(), ApiError> {
        panic!("a test")
    }

    /// Begins a job that ends with what is sent.
    fn begin(jobs: &Jobs<Adoption>, name: &str) -> Result<(Adoption, Ending), ApiError> {
        let (ending, result) = oneshot::channel();
        let work = |_| async move { result.await.unwrap_or(Ok(())) };
        let about = JobRequest::adoption(&guest(name));
        Ok((jobs.begin(about, |id| begun(id, &guest(name)), work)?, ending))
    }

    fn run<T>(part: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(part)
    }

    fn cancelled() -> Result<(), ApiError> {
        Err(ApiError::new(ErrorCode::Cancelled, "cancelled", ""))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// However jobs begin and end, few run at once, few are known, none that runs is
        /// forgotten, and no ID comes twice.
        #[test]
        fn the_history_is_bounded_and_ids_are_unique(
            ends in prop::collection::vec(0..4_usize, 1..200),
        ) {
            run(async {
                let jobs = Jobs::default();
                let (mut ids, mut running) = (HashSet::new(), VecDeque::new());
                for (at, end) in ends.into_iter().enumerate() {
                    let one = begin(&jobs, &format!("vm{at}"));
                    prop_assert_eq!(one.is_ok(), running.len() < MOST_RUNNING);
                    if let Ok((status, ending)) = one {
                        prop_assert!(ids.insert(status.id.clone()));
                        running.push_back((status.id, ending));
                    }
                    for _ in 0..end.min(running.len()) {
                        let Some((id, ending)) = running.pop_front() else { break };
                        let _ = ending.send(Ok(()));
                        jobs.ended(&id).await.unwrap();
                    }
                    let known = jobs.list();
                    prop_assert!(known.len() <= MOST_KNOWN);
                    prop_assert!(running.iter().all(|(id, _)| jobs.status(id).is_ok()));
                }
                Ok(())
            })?;
        }
    }

    #[test]
    fn one_guest_has_one_adoption_at_a_time() {
        run(async {
            let jobs = Jobs::default();
            let (first, ending) = begin(&jobs, "web").unwrap();
            assert_eq!(begin(&jobs, "web").unwrap_err().code, ErrorCode::Busy);
            begin(&jobs, "db").unwrap();
            ending.send(cancelled()).unwrap();
            jobs.ended(&first.id).await.unwrap();
            assert_eq!(jobs.status(&first.id).unwrap().state(), JobState::Cancelled);
            let _running = begin(&jobs, "web").unwrap();
            let all = jobs.summaries();
            assert!(all.len() == 3 && all[0].id == first.id && all[0].ended_unix_ms.is_some());
            assert_eq!(all[0].error.as_ref().unwrap().code, "cancelled");
            assert_eq!((all[2].state, all[2].ended_unix_ms), (JobState::Running, None));
            assert_eq!(jobs.status("adoption-9").unwrap_err().code, ErrorCode::NotFound);
        });
    }

    #[test]
    fn a_job_is_cancelled_until_it_is_committed() {
        run(async {
            let jobs = Jobs::default();
            let (early, _ending) = begin(&jobs, "web").unwrap();
            for _ in 0..2 {
                jobs.cancel(&early.id).unwrap();
            }
            assert!(!jobs.find(&early.id).unwrap().commit("it is done"));

            let (late, ending) = begin(&jobs, "db").unwrap();
            assert!(jobs.find(&late.id).unwrap().commit("it is done"));
            let refused = jobs.cancel(&late.id).unwrap_err();
            assert!(refused.code == ErrorCode::WrongState && refused.message.contains("done"));
            assert!(!jobs.find(&late.id).unwrap().is_cancelled());
            // What has failed afterwards has no result that could be kept.
            ending.send(Err(ApiError::new(ErrorCode::HostFailed, "full", ""))).unwrap();
            jobs.ended(&late.id).await.unwrap();
            jobs.cancel(&late.id).unwrap();
        });
    }

    #[test]
    fn a_panic_ends_the_job() {
        run(async {
            let jobs = Jobs::default();
            let work = |_| async { panics() };
            let about = JobRequest::adoption(&guest("web"));
            let begun = jobs.begin(about, |id| begun(id, &guest("web")), work).unwrap();
            jobs.ended(&begun.id).await.unwrap();
            assert_eq!(jobs.status(&begun.id).unwrap().state(), JobState::Failed);
        });
    }
}
