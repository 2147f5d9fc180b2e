//! Outgoing migrations of this host, running and ended: progress, cancellation and final report.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use godwit_api::{ApiError, ErrorCode, MigrationRequest, MigrationStatus};
use godwit_lanes::pacing::MigrationPace;
use godwit_migration::Bandwidth;
use godwit_migration::drive::Course;
use godwit_types::{BandwidthPoint, EngineKind, Phase, Progress, RateLimit, Report};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::guest_trip::Trips;
use crate::metrics::Metrics;

/// Number of finished migrations that are kept.
const HISTORY: usize = 256;

/// Every migration since the agent's start, oldest first, bounded.
#[derive(Debug, Default)]
pub struct Migrations {
    all: Mutex<VecDeque<Arc<Entry>>>,
    count: AtomicU64,
    metrics: Metrics,
}

#[derive(Debug)]
struct Entry {
    id: String,
    vm: String,
    from: String,
    to: String,
    engine: EngineKind,
    started_unix_ms: u64,
    /// Number of its course: no other migration to that host has it while it runs.
    course: u64,
    pace: MigrationPace,
    progress: watch::Receiver<Progress>,
    bandwidth: Arc<Mutex<Bandwidth>>,
    report: watch::Sender<Option<Report>>,
    cancel: watch::Sender<bool>,
}

/// Interface of an engine to its migration: reports progress and receives cancellation.
#[derive(Debug)]
pub struct MigrationControl {
    /// ID of the migration.
    pub id: String,
    /// Bandwidth limits that apply to it.
    pub pace: MigrationPace,
    /// Order in which it visits the guest's memory. It differs from those of other migrations that
    /// run and go to the same host.
    pub course: Course,
    progress: ProgressReporter,
    cancel: watch::Receiver<bool>,
    engine_began: Arc<AtomicBool>,
}

/// Reports a migration's progress from any thread, and collects figures for the final report.
#[derive(Clone, Debug)]
pub struct ProgressReporter {
    progress: watch::Sender<Progress>,
    /// Predicted duration of the whole migration, once known.
    predicted_ms: Arc<OnceLock<f64>>,
    bandwidth: Arc<Mutex<Bandwidth>>,
    /// Response times of the guest.
    trips: Trips,
}

impl ProgressReporter {
    /// Publishes the progress.
    pub fn send(&self, progress: Progress) {
        self.bandwidth
            .lock()
            .add(BandwidthPoint { ms: progress.elapsed_ms, bytes: progress.sent_bytes });
        let predicted_ms = self.predicted_ms.get().copied();
        let guest_round_trip_ms = self.trips.take_ms();
        let progress =
            Progress { guest_round_trip_ms, ..progress.with_lane_rates(&self.progress.borrow()) };
        self.progress.send_replace(progress.with_predicted(predicted_ms));
    }
}

impl MigrationControl {
    /// Records that the engine begins: from here on, the guest may be paused and handed over.
    pub fn engine_begins(&self) {
        self.engine_began.store(true, Ordering::Relaxed);
    }

    /// Returns whether [`MigrationControl::engine_begins`] was called; the flag outlives this
    /// value.
    #[must_use]
    pub fn engine_began(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.engine_began)
    }

    /// Sets the predicted duration of the whole migration, which later progress includes.
    pub fn set_predicted(&self, migration_time_ms: f64) {
        // Only the first prediction counts.
        let _ = self.progress.predicted_ms.set(migration_time_ms);
    }

    /// Publishes the progress.
    pub fn progress(&self, progress: Progress) {
        self.progress.send(progress);
    }

    /// Waits until the migration is cancelled; never returns if it is not.
    pub async fn cancelled(&self) {
        let mut cancel = self.cancel.clone();
        if cancel.wait_for(|cancelled| *cancelled).await.is_err() {
            // No one is left to cancel it.
            std::future::pending::<()>().await;
        }
    }

    /// Publishes that the link is cut, `elapsed_ms` after the start.
    pub fn reconnects(&self, elapsed_ms: f64) {
        let last = self.progress.progress.borrow().clone();
        self.progress.send(Progress { phase: Phase::Reconnect, elapsed_ms, eta_ms: None, ..last });
    }

    /// Returns the record of the guest's response times, which progress includes.
    pub(crate) fn trips(&self) -> Trips {
        self.progress.trips.clone()
    }

    /// Returns a second reporter of progress, for another thread.
    #[must_use]
    pub fn progress_reporter(&self) -> ProgressReporter {
        self.progress.clone()
    }
}

/// A migration as its observers see it.
#[derive(Clone, Debug)]
pub struct MigrationWatch {
    /// Current progress.
    pub progress: watch::Receiver<Progress>,
    /// Final report; `None` until the end.
    pub report: watch::Receiver<Option<Report>>,
}

impl Migrations {
    /// Returns the ID of the next migration: the second of its start and a count, so that it
    /// differs from those of earlier agents.
    #[must_use]
    pub fn fresh_id(&self) -> String {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        format!("m{:x}-{}", since_1970.as_secs(), self.count.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether the migration of that ID exists and is the one of that VM to that host; false if the
    /// ID is unused.
    ///
    /// # Errors
    /// [`ErrorCode::AlreadyExists`]: the ID belongs to another migration.
    pub fn begun(&self, id: &str, vm: &str, to: &str) -> Result<bool, ApiError> {
        match self.find(id) {
            Err(_) => Ok(false),
            Ok(entry) if entry.vm == vm && entry.to == to => Ok(true),
            Ok(entry) => {
                let message =
                    format!("migration {id} is one of VM \"{}\" to host {}", entry.vm, entry.to);
                Err(ApiError::new(ErrorCode::AlreadyExists, message, "use another id"))
            }
        }
    }

    /// Registers a migration that begins now.
    pub fn register(
        &self,
        id: &str,
        vm: &str,
        from: &str,
        request: &MigrationRequest,
        total_bytes: u64,
        pace: MigrationPace,
    ) -> MigrationControl {
        let (progress, progress_watch) = watch::channel(Progress::begin(total_bytes));
        let bandwidth = Arc::default();
        let reporter = ProgressReporter {
            progress,
            predicted_ms: Arc::default(),
            bandwidth: Arc::clone(&bandwidth),
            trips: Trips::default(),
        };
        let (cancel, cancel_watch) = watch::channel(false);
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut all = self.lock();
        let course = free_course(&all, &request.to);
        let entry = Entry {
            id: id.to_owned(),
            vm: vm.to_owned(),
            from: from.to_owned(),
            to: request.to.clone(),
            engine: request.engine,
            started_unix_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
            course,
            pace: pace.clone(),
            progress: progress_watch,
            bandwidth,
            report: watch::channel(None).0,
            cancel,
        };
        while all.len() >= HISTORY {
            // Only finished migrations may be removed.
            let Some(oldest) = all.iter().position(|entry| entry.report.borrow().is_some()) else {
                break;
            };
            all.remove(oldest);
        }
        all.push_back(Arc::new(entry));
        let engine_began = Arc::default();
        MigrationControl {
            id: id.to_owned(),
            pace,
            course: Course::of(course),
            progress: reporter,
            cancel: cancel_watch,
            engine_began,
        }
    }

    /// Ends a migration and publishes its report. `server/follow.rs` polls [`Migrations::list`] and
    /// sends the report to managers.
    pub fn finish(&self, id: &str, report: Report) {
        if let Ok(entry) = self.find(id) {
            let end = BandwidthPoint { ms: report.migration_time_ms, bytes: report.wire_bytes };
            let bandwidth = entry.bandwidth.lock().end(end);
            let report = Report { bandwidth, ..report };
            self.metrics.ended(&report);
            entry.report.send_replace(Some(report));
        }
    }

    /// Returns the metrics of the migrations and of the host.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns the progress of running migrations, by VM.
    pub(crate) fn running(&self) -> Vec<(String, Progress)> {
        let all = self.lock();
        let running = all.iter().filter(|entry| entry.report.borrow().is_none());
        running.map(|entry| (entry.vm.clone(), entry.progress.borrow().clone())).collect()
    }

    /// Returns all migrations, newest first.
    #[must_use]
    pub fn list(&self) -> Vec<MigrationStatus> {
        self.lock().iter().rev().map(|entry| entry.status()).collect()
    }

    /// Returns a VM that is migrating out, if any.
    #[must_use]
    pub fn under_way(&self) -> Option<String> {
        self.lock()
            .iter()
            .find(|entry| entry.report.borrow().is_none())
            .map(|entry| entry.vm.clone())
    }

    /// Returns the status of a migration.
    pub fn status(&self, id: &str) -> Result<MigrationStatus, ApiError> {
        self.find(id).map(|entry| entry.status())
    }

    /// Returns a migration's progress and report, to follow.
    pub fn watch(&self, id: &str) -> Result<MigrationWatch, ApiError> {
        let entry = self.find(id)?;
        Ok(MigrationWatch { progress: entry.progress.clone(), report: entry.report.subscribe() })
    }

    /// Asks a migration to roll back. Fails if it is over, or if its guest already runs at the
    /// destination.
    pub fn cancel(&self, id: &str) -> Result<(), ApiError> {
        let entry = self.find_running(id)?;
        if entry.engine == EngineKind::Godwit && entry.progress.borrow().phase == Phase::PageIn {
            return Err(entry.pages_are_kept());
        }
        entry.cancel.send_replace(true);
        Ok(())
    }

    /// Sets the bandwidth limit of a migration, effective at once. Fails if the migration is over.
    pub fn limit(&self, id: &str, limit: RateLimit) -> Result<MigrationStatus, ApiError> {
        let entry = self.find_running(id)?;
        entry.pace.set_limit(limit);
        tracing::info!(migration = id, %limit, "bandwidth limit of a migration set");
        Ok(entry.status())
    }

    fn find_running(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        let entry = self.find(id)?;
        if entry.report.borrow().is_none() {
            return Ok(entry);
        }
        let message = format!("migration {id} is already over");
        let remedy = format!("see its report with `godwit migration show {id}`");
        Err(ApiError::new(ErrorCode::WrongState, message, remedy))
    }

    fn find(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        self.lock().iter().find(|entry| entry.id == id).cloned().ok_or_else(|| {
            ApiError::new(
                ErrorCode::NotFound,
                format!("no migration {id} on this host"),
                format!(
                    "see `godwit migration list`; the source host keeps the last {HISTORY} since \
                     its agent's start"
                ),
            )
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Entry>>> {
        self.all.lock()
    }
}

impl Entry {
    /// Returns the error of a cancellation that comes too late.
    fn pages_are_kept(&self) -> ApiError {
        let Entry { id, vm, from, to, .. } = self;
        ApiError::new(
            ErrorCode::Busy,
            format!(
                "cannot cancel migration {id}: VM \"{vm}\" may run on host {to} and lacks pages \
                 that only host {from} has"
            ),
            format!(
                "wait until host {to} has them; if that host is permanently lost and powered off, \
                 the guest as it ran there is lost too: run `godwit migration resolve {vm} \
                 --runs-on {from}`, then `godwit vm start` to boot it from its disks"
            ),
        )
    }

    fn status(&self) -> MigrationStatus {
        MigrationStatus {
            id: self.id.clone(),
            vm: self.vm.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
            engine: self.engine,
            started_unix_ms: self.started_unix_ms,
            bandwidth_limit: self.pace.limit(),
            progress: self.progress.borrow().clone(),
            report: self.report.borrow().clone(),
        }
    }
}

/// Returns the lowest number of a course that no running migration to a host has.
fn free_course(all: &VecDeque<Arc<Entry>>, to: &str) -> u64 {
    let running = |entry: &&Arc<Entry>| entry.to == to && entry.report.borrow().is_none();
    let used: Vec<u64> = all.iter().filter(running).map(|entry| entry.course).collect();
    (0..).find(|number| !used.contains(number)).unwrap_or(0)
}

#[cfg(test)]
pub(crate) mod tests {
    use godwit_lanes::pacing::Pacing;
    use godwit_types::Outcome;

    use super::*;

    pub(crate) fn report(vm: &str) -> Report {
        Report { migration_time_ms: 1.0, ..Report::blank(Outcome::Completed, vm, "a", "b") }
    }

    fn begin(migrations: &Migrations) -> MigrationControl {
        begin_to(migrations, "b")
    }

    fn begin_to(migrations: &Migrations, to: &str) -> MigrationControl {
        let id = migrations.fresh_id();
        let pace = Pacing::default().migration(RateLimit::NONE);
        migrations.register(&id, "web", "a", &MigrationRequest::to(to), 1 << 20, pace)
    }

    #[test]
    fn migrations_to_one_host_have_different_courses() {
        let migrations = Migrations::default();
        let [first, second] = [(); 2].map(|()| begin(&migrations));
        assert_eq!([&first, &second].map(|one| one.course), [0, 1].map(Course::of));
        assert_eq!(begin_to(&migrations, "c").course, Course::of(0));
        migrations.finish(&first.id, report("web"));
        let [third, fourth] = [(); 2].map(|()| begin(&migrations));
        assert_eq!([&third, &fourth].map(|one| one.course), [0, 2].map(Course::of));
    }

    #[tokio::test]
    async fn a_migration_is_watched_cancelled_and_ended() {
        let migrations = Migrations::default();
        let control = begin(&migrations);
        let mut watch = migrations.watch(&control.id).unwrap();
        control.progress(Progress {
            round: 3,
            sent_bytes: 5,
            elapsed_ms: 0.5,
            ..Progress::begin(1 << 20)
        });
        watch.progress.changed().await.unwrap();
        assert_eq!(migrations.status(&control.id).unwrap().progress.round, 3);
        let limit: RateLimit = "2gbit".parse().unwrap();
        assert_eq!(migrations.limit(&control.id, limit).unwrap().bandwidth_limit, limit);
        assert_eq!(control.pace.limit(), limit);
        migrations.cancel(&control.id).unwrap();
        control.cancelled().await;
        assert!(*control.cancel.borrow());
        migrations.finish(&control.id, Report { wire_bytes: 9, ..report("web") });
        assert!(watch.report.wait_for(Option::is_some).await.is_ok());
        let samples = watch.report.borrow().as_ref().unwrap().bandwidth.clone();
        assert_eq!(samples, [(0.5, 5), (1.0, 9)].map(|(ms, bytes)| BandwidthPoint { ms, bytes }));
        assert_eq!(migrations.cancel(&control.id).unwrap_err().code, ErrorCode::WrongState);
        assert_eq!(migrations.cancel("m0").unwrap_err().code, ErrorCode::NotFound);
        assert_eq!(migrations.limit(&control.id, limit).unwrap_err().code, ErrorCode::WrongState);
        assert_eq!(migrations.limit("m0", limit).unwrap_err().code, ErrorCode::NotFound);
    }

    #[test]
    fn an_id_identifies_one_migration() {
        let migrations = Migrations::default();
        let MigrationControl { id, .. } = begin(&migrations);
        assert_eq!(migrations.begun("another", "web", "b"), Ok(false));
        assert_eq!(migrations.begun(&id, "web", "b"), Ok(true));
        assert_eq!(migrations.begun(&id, "web", "c").unwrap_err().code, ErrorCode::AlreadyExists);
        assert_eq!(migrations.begun(&id, "db", "b").unwrap_err().code, ErrorCode::AlreadyExists);
    }

    #[test]
    fn a_migration_in_page_in_is_not_cancelled() {
        let migrations = Migrations::default();
        let control = begin(&migrations);
        control.progress(Progress { phase: Phase::PageIn, ..Progress::begin(1 << 20) });
        let refused = migrations.cancel(&control.id).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy);
        assert!(
            refused.message.contains("host b") && refused.remedy.contains("permanently lost"),
            "{refused}"
        );
        assert!(!*control.cancel.borrow());
    }

    #[test]
    fn the_history_is_bounded_and_keeps_running_migrations() {
        let migrations = Migrations::default();
        let first = begin(&migrations);
        for _ in 0..2 * HISTORY {
            let control = begin(&migrations);
            migrations.finish(&control.id, report("web"));
        }
        assert_eq!(migrations.list().len(), HISTORY);
        assert!(migrations.status(&first.id).is_ok());
        let ids: std::collections::BTreeSet<_> =
            migrations.list().into_iter().map(|status| status.id).collect();
        assert_eq!(ids.len(), HISTORY);
    }
}
