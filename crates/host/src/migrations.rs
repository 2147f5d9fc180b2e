//! The migrations that run or ran from this host: progress to watch, a way to cancel, the report at the end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use godwit_api::{ApiError, ErrorCode, MigrationRequest, MigrationStatus};
use godwit_lanes::pacing::MigrationPace;
use godwit_migration::Bandwidth;
use godwit_types::{BandwidthPoint, EngineKind, Phase, Progress, RateLimit, Report};
use tokio::sync::watch;

use crate::guest_trip::Trips;
use crate::metrics::Metrics;

/// Finished migrations that are remembered.
const HISTORY: usize = 256;

/// Every migration of this agent's life, the oldest first, bounded.
#[derive(Debug, Default)]
pub struct Migrations {
    all: Mutex<VecDeque<Arc<Entry>>>,
    count: AtomicU64,
    metrics: Metrics,
    /// Of those that began beside others.
    begun: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    id: String,
    vm: String,
    from: String,
    to: String,
    engine: EngineKind,
    started_unix_ms: u64,
    pace: MigrationPace,
    progress: watch::Receiver<Progress>,
    bandwidth: Arc<Mutex<Bandwidth>>,
    report: watch::Sender<Option<Report>>,
    cancel: watch::Sender<bool>,
}

/// What an engine is given: where to tell how far it is, and where it learns that it shall stop.
#[derive(Debug)]
pub struct MigrationControl {
    /// The migration's name.
    pub id: String,
    /// The limits that hold for it.
    pub pace: MigrationPace,
    progress: ProgressTeller,
    cancel: watch::Receiver<bool>,
    engine_began: Arc<AtomicBool>,
}

/// Shows how far a migration is, from any thread, and keeps what the report will tell of it.
#[derive(Clone, Debug)]
pub struct ProgressTeller {
    progress: watch::Sender<Progress>,
    /// What the whole migration was foreseen to take, once it has been.
    foreseen_ms: Arc<OnceLock<f64>>,
    bandwidth: Arc<Mutex<Bandwidth>>,
    /// How long the guest takes to answer.
    trips: Trips,
}

impl ProgressTeller {
    /// Shows how far it is.
    pub fn tell(&self, progress: Progress) {
        lock(&self.bandwidth)
            .take(BandwidthPoint { ms: progress.elapsed_ms, bytes: progress.sent_bytes });
        let foreseen_ms = self.foreseen_ms.get().copied();
        let guest_round_trip_ms = self.trips.take_ms();
        let progress =
            Progress { guest_round_trip_ms, ..progress.with_lane_rates(&self.progress.borrow()) };
        self.progress.send_replace(progress.with_foreseen(foreseen_ms));
    }
}

impl MigrationControl {
    /// The engine begins: from here on the guest may be stopped and handed over.
    pub fn engine_begins(&self) {
        self.engine_began.store(true, Ordering::Relaxed);
    }

    /// Tells whether [`MigrationControl::engine_begins`] was called, also when this is gone.
    #[must_use]
    pub fn engine_began(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.engine_began)
    }

    /// So long the whole of it was foreseen to take: how far it is, is told with that from here on.
    pub fn foresees(&self, migration_time_ms: f64) {
        // It is foreseen once.
        let _ = self.progress.foreseen_ms.set(migration_time_ms);
    }

    /// Shows how far it is.
    pub fn progress(&self, progress: Progress) {
        self.progress.tell(progress);
    }

    /// Returns when somebody asks to cancel; never, if nobody does.
    pub async fn cancelled(&self) {
        let mut cancel = self.cancel.clone();
        if cancel.wait_for(|cancelled| *cancelled).await.is_err() {
            // Nobody is left who could ask.
            std::future::pending::<()>().await;
        }
    }

    /// Shows that the link is cut, so long after the begin.
    pub fn reconnects(&self, elapsed_ms: f64) {
        let last = self.progress.progress.borrow().clone();
        self.progress.tell(Progress { phase: Phase::Reconnect, elapsed_ms, eta_ms: None, ..last });
    }

    /// Where how long the guest takes to answer is noted: it is told with how far it is.
    pub(crate) fn trips(&self) -> Trips {
        self.progress.trips.clone()
    }

    /// Shows the progress too, for another thread.
    #[must_use]
    pub fn progress_teller(&self) -> ProgressTeller {
        self.progress.clone()
    }
}

/// One migration as those see it who watch it.
#[derive(Clone, Debug)]
pub struct MigrationWatch {
    /// Where it is.
    pub progress: watch::Receiver<Progress>,
    /// How it ended; none until then.
    pub report: watch::Receiver<Option<Report>>,
}

impl Migrations {
    /// A name for the next migration: the second it begins in and a count, so that it differs from those of this
    /// agent's earlier lives too.
    #[must_use]
    pub fn fresh_id(&self) -> String {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        format!("m{:x}-{}", since_1970.as_secs(), self.count.fetch_add(1, Ordering::Relaxed))
    }

    /// Where in a guest's memory a migration begins, as a part of it: another place than those that run beside it, so that each finds
    /// at the destination what others have brought. Multiples of the golden ratio spread evenly, however many there are.
    #[must_use]
    pub fn place_to_begin(&self) -> f64 {
        const GOLDEN_RATIO: f64 = 0.618_033_988_749_895;
        let running =
            lock(&self.all).iter().filter(|entry| entry.report.borrow().is_none()).count();
        match running {
            0 | 1 => 0.0,
            _ => (self.begun.fetch_add(1, Ordering::Relaxed) as f64 * GOLDEN_RATIO).fract(),
        }
    }

    /// Whether a migration of that name is this one, of that VM to that host; none: there is none of that name.
    ///
    /// # Errors
    /// [`ErrorCode::AlreadyExists`]: it is another one.
    pub fn begun(&self, id: &str, vm: &str, to: &str) -> Result<bool, ApiError> {
        match self.find(id) {
            Err(_) => Ok(false),
            Ok(entry) if entry.vm == vm && entry.to == to => Ok(true),
            Ok(entry) => {
                let message =
                    format!("migration {id} is that of VM \"{}\" to host {}", entry.vm, entry.to);
                Err(ApiError::new(ErrorCode::AlreadyExists, message, "take another id"))
            }
        }
    }

    /// Takes a migration in that begins now.
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
        let teller = ProgressTeller {
            progress,
            foreseen_ms: Arc::default(),
            bandwidth: Arc::clone(&bandwidth),
            trips: Trips::default(),
        };
        let (cancel, cancel_watch) = watch::channel(false);
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let entry = Entry {
            id: id.to_owned(),
            vm: vm.to_owned(),
            from: from.to_owned(),
            to: request.to.clone(),
            engine: request.engine,
            started_unix_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
            pace: pace.clone(),
            progress: progress_watch,
            bandwidth,
            report: watch::channel(None).0,
            cancel,
        };
        let mut all = self.lock();
        while all.len() >= HISTORY {
            // Only what is over may be forgotten.
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
            progress: teller,
            cancel: cancel_watch,
            engine_began,
        }
    }

    /// Ends a migration; who watches it gets the report.
    pub fn finish(&self, id: &str, report: Report) {
        if let Ok(entry) = self.find(id) {
            let end = BandwidthPoint { ms: report.migration_time_ms, bytes: report.wire_bytes };
            let bandwidth = lock(&entry.bandwidth).end(end);
            let report = Report { bandwidth, ..report };
            self.metrics.ended(&report);
            entry.report.send_replace(Some(report));
        }
    }

    /// What is measured of them, and of their host.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// How far those are that run, by VM.
    pub(crate) fn running(&self) -> Vec<(String, Progress)> {
        let all = self.lock();
        let running = all.iter().filter(|entry| entry.report.borrow().is_none());
        running.map(|entry| (entry.vm.clone(), entry.progress.borrow().clone())).collect()
    }

    /// All of them, the newest first.
    #[must_use]
    pub fn list(&self) -> Vec<MigrationStatus> {
        self.lock().iter().rev().map(|entry| entry.status()).collect()
    }

    /// The VM that is leaving, if one is.
    #[must_use]
    pub fn under_way(&self) -> Option<String> {
        self.lock()
            .iter()
            .find(|entry| entry.report.borrow().is_none())
            .map(|entry| entry.vm.clone())
    }

    /// One of them.
    pub fn status(&self, id: &str) -> Result<MigrationStatus, ApiError> {
        self.find(id).map(|entry| entry.status())
    }

    /// One of them, to follow.
    pub fn watch(&self, id: &str) -> Result<MigrationWatch, ApiError> {
        let entry = self.find(id)?;
        Ok(MigrationWatch { progress: entry.progress.clone(), report: entry.report.subscribe() })
    }

    /// Asks one to roll back; an error when it is over, or its guest runs at the destination already.
    pub fn cancel(&self, id: &str) -> Result<(), ApiError> {
        let entry = self.find_running(id)?;
        if entry.engine == EngineKind::Godwit && entry.progress.borrow().phase == Phase::PageIn {
            return Err(entry.pages_are_kept());
        }
        entry.cancel.send_replace(true);
        Ok(())
    }

    /// Sets the limit of one; it holds from now on. An error when it is over.
    pub fn limit(&self, id: &str, limit: RateLimit) -> Result<MigrationStatus, ApiError> {
        let entry = self.find_running(id)?;
        entry.pace.set_limit(limit);
        tracing::info!(migration = id, %limit, "a migration's limit is set");
        Ok(entry.status())
    }

    fn find_running(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        let entry = self.find(id)?;
        if entry.report.borrow().is_none() {
            return Ok(entry);
        }
        let message = format!("migration {id} is over already");
        let remedy = format!("see its report with `godwit migration show {id}`");
        Err(ApiError::new(ErrorCode::WrongState, message, remedy))
    }

    fn find(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        self.lock().iter().find(|entry| entry.id == id).cloned().ok_or_else(|| {
            ApiError::new(
                ErrorCode::NotFound,
                format!("no migration {id} on this host"),
                format!("see `godwit migration list`; the last {HISTORY} since the agent's start are kept, on the source host"),
            )
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Entry>>> {
        lock(&self.all)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entry {
    /// Why it can't be undone any more.
    fn pages_are_kept(&self) -> ApiError {
        let Entry { id, vm, from, to, .. } = self;
        ApiError::new(
            ErrorCode::Busy,
            format!(
                "migration {id} can't be cancelled any more: VM \"{vm}\" runs at host {to}, or may, and host {from} keeps the pages that it lacks there"
            ),
            format!(
                "wait until host {to} has them; if that host is gone for good and powered off, so is the guest as it ran there: `godwit migration resolve {vm} --runs-on {from}`, then `godwit vm start` it anew from its disks"
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

#[cfg(test)]
pub(crate) mod tests {
    use godwit_lanes::pacing::Pacing;
    use godwit_types::Outcome;

    use super::*;

    pub(crate) fn report(vm: &str) -> Report {
        Report { migration_time_ms: 1.0, ..Report::blank(Outcome::Completed, vm, "a", "b") }
    }

    fn begin(migrations: &Migrations) -> MigrationControl {
        let id = migrations.fresh_id();
        let pace = Pacing::default().migration(RateLimit::NONE);
        migrations.register(&id, "web", "a", &MigrationRequest::to("b"), 1 << 20, pace)
    }

    #[tokio::test]
    async fn a_migration_is_watched_cancelled_and_over() {
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
        let told = watch.report.borrow().as_ref().unwrap().bandwidth.clone();
        assert_eq!(told, [(0.5, 5), (1.0, 9)].map(|(ms, bytes)| BandwidthPoint { ms, bytes }));
        assert_eq!(migrations.cancel(&control.id).unwrap_err().code, ErrorCode::WrongState);
        assert_eq!(migrations.cancel("m0").unwrap_err().code, ErrorCode::NotFound);
        assert_eq!(migrations.limit(&control.id, limit).unwrap_err().code, ErrorCode::WrongState);
        assert_eq!(migrations.limit("m0", limit).unwrap_err().code, ErrorCode::NotFound);
    }

    #[test]
    fn a_name_stands_for_one_migration() {
        let migrations = Migrations::default();
        let MigrationControl { id, .. } = begin(&migrations);
        assert_eq!(migrations.begun("another", "web", "b"), Ok(false));
        assert_eq!(migrations.begun(&id, "web", "b"), Ok(true));
        assert_eq!(migrations.begun(&id, "web", "c").unwrap_err().code, ErrorCode::AlreadyExists);
        assert_eq!(migrations.begun(&id, "db", "b").unwrap_err().code, ErrorCode::AlreadyExists);
    }

    #[test]
    fn what_lacks_pages_at_the_destination_is_not_cancelled() {
        let migrations = Migrations::default();
        let control = begin(&migrations);
        control.progress(Progress { phase: Phase::PageIn, ..Progress::begin(1 << 20) });
        let refused = migrations.cancel(&control.id).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy);
        assert!(
            refused.message.contains("host b") && refused.remedy.contains("gone for good"),
            "{refused}"
        );
        assert!(!*control.cancel.borrow());
    }

    #[test]
    fn the_history_is_bounded_and_keeps_what_runs() {
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
