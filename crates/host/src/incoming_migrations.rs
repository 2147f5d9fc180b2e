//! The incoming migrations of this host: who asked for each, and what became of it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use godwit_api::{
    ApiError, ErrorCode, IncomingAccepted, IncomingRequest, IncomingState, IncomingStatus,
};
use godwit_lanes::Stream;
use godwit_migration::{Failure, nanos};
use godwit_qemu::Uuid;
use godwit_types::{EngineKind, Fault, Incarnation, Ownership};
use godwit_wire::MigrationId;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::doorman::{NextDoor, Resumed, fresh_id};

/// Time limit for the answer to the source's decision.
const RUN_LIMIT: Duration = Duration::from_secs(5);
/// Number of ended migrations that are kept, for sources that ask again.
const HISTORY: usize = 256;

/// Incoming migrations of this host since the agent's start, oldest first, bounded.
#[derive(Debug, Default)]
pub struct IncomingMigrations {
    all: Mutex<VecDeque<Arc<Entry>>>,
}

/// One incoming migration.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) id: MigrationId,
    pub(crate) vm: String,
    pub(crate) engine: EngineKind,
    begun: Instant,
    fate: watch::Sender<Fate>,
    /// QEMU has loaded the guest; QEMU's own engine only.
    loaded: AtomicBool,
    /// The source's decision that the guest may run (true) or stays paused (false); QEMU's own
    /// engine only.
    word: watch::Sender<Option<bool>>,
    /// Capacity of one: a second cancellation adds nothing to a pending one.
    cancel: mpsc::SyncSender<()>,
    /// The source host.
    pub(crate) from: String,
    uuid: Uuid,
    pub(crate) ownership: Ownership,
    /// ID of the source's attempt, if it repeats its request.
    attempt: Option<MigrationId>,
    /// Answer to the source's request.
    accepted: OnceLock<IncomingAccepted>,
    /// Accepts the doorman of a further lane, in place of one that was cut.
    pub(crate) resume: Arc<NextDoor>,
    /// Control stream of the current lane.
    pub(crate) control: Mutex<Option<Stream>>,
}

/// Outcome of an incoming guest.
#[derive(Clone, Debug)]
enum Fate {
    Receiving,
    /// This host owns the guest; its vCPUs have run since then, if known.
    Runs(Option<Instant>),
    Refused(Fault),
    Broken,
}

impl Fate {
    fn state(&self) -> IncomingState {
        match self {
            Fate::Receiving => IncomingState::Receiving,
            Fate::Runs(_) => IncomingState::Runs,
            Fate::Refused(_) => IncomingState::Refused,
            Fate::Broken => IncomingState::Broken,
        }
    }
}

impl Entry {
    /// Notes the answer to the source's request.
    pub(crate) fn answered(&self, answer: &IncomingAccepted) {
        // There is only one.
        let _ = self.accepted.set(answer.clone());
    }

    pub(crate) fn runs(&self, since: Option<Instant>) {
        self.fate.send_replace(Fate::Runs(since));
    }

    pub(crate) fn refused(&self, failure: &Failure) {
        self.fate.send_replace(Fate::Refused(failure.to_fault()));
    }

    pub(crate) fn broken(&self) {
        self.fate.send_replace(Fate::Broken);
    }

    pub(crate) fn loaded(&self) {
        self.loaded.store(true, Ordering::Relaxed);
    }

    /// Waits for the source's decision; never returns if it does not arrive.
    pub(crate) async fn word(&self) -> bool {
        let mut word = self.word.subscribe();
        match word.wait_for(Option::is_some).await.map(|word| *word) {
            Ok(Some(run)) => run,
            // Cannot happen: this entry owns the sender.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        !matches!(*self.fate.borrow(), Fate::Receiving)
    }

    fn status(&self) -> IncomingStatus {
        let fate = self.fate.borrow().clone();
        let since_begin = |at: Instant| nanos(at.saturating_duration_since(self.begun));
        let state = fate.state();
        let (running, failure) = match fate {
            Fate::Runs(since) => (since, None),
            Fate::Refused(failure) => (None, Some(failure)),
            Fate::Receiving | Fate::Broken => (None, None),
        };
        IncomingStatus {
            id: self.id.to_string(),
            vm: self.vm.clone(),
            incarnation: self.ownership.incarnation,
            state,
            loaded: self.loaded.load(Ordering::Relaxed),
            failure,
            running_ns: running.map(since_begin),
            now_ns: since_begin(Instant::now()),
        }
    }
}

impl IncomingMigrations {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Entry>>> {
        self.all.lock()
    }

    pub(crate) fn add(&self, request: &IncomingRequest) -> Result<(Arc<Entry>, Orders), ApiError> {
        let (cancel, cancelled) = mpsc::sync_channel(1);
        let resume = Arc::<NextDoor>::default();
        let resumed = Resumed::of(&resume);
        let entry = Arc::new(Entry {
            id: fresh_id()?,
            vm: request.spec.name.to_string(),
            engine: request.engine,
            begun: Instant::now(),
            fate: watch::channel(Fate::Receiving).0,
            loaded: AtomicBool::new(false),
            word: watch::channel(None).0,
            cancel,
            from: request.from.clone(),
            uuid: request.spec.uuid,
            ownership: request.offered(),
            attempt: attempt_of(request),
            accepted: OnceLock::new(),
            resume,
            control: Mutex::default(),
        });
        let mut all = self.lock();
        while all.len() >= HISTORY {
            let Some(oldest) = all.iter().position(|entry| entry.is_over()) else { break };
            all.remove(oldest);
        }
        all.push_back(Arc::clone(&entry));
        Ok((entry, Orders { cancelled, resumed }))
    }

    /// Removes a migration whose shadow could not be made.
    pub(crate) fn remove(&self, entry: &Arc<Entry>) {
        self.lock().retain(|known| !Arc::ptr_eq(known, entry));
    }

    /// Returns the answer to an earlier request of the same attempt, if its shadow still waits for
    /// the source.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`]: the earlier request has no answer yet.
    pub(crate) fn repeated(
        &self,
        request: &IncomingRequest,
    ) -> Result<Option<IncomingAccepted>, ApiError> {
        let Some(attempt) = attempt_of(request) else { return Ok(None) };
        let is_it = |entry: &&Arc<Entry>| {
            entry.attempt == Some(attempt)
                && (&entry.from, entry.uuid) == (&request.from, request.spec.uuid)
                && entry.ownership == request.offered()
                && !entry.is_over()
        };
        let Some(entry) = self.lock().iter().find(is_it).cloned() else { return Ok(None) };
        let answer = entry.accepted.get().cloned().ok_or_else(|| {
            let message = format!("the shadow of VM \"{}\" is being made", entry.vm);
            ApiError::new(ErrorCode::Busy, message, "wait a moment, then retry")
        });
        answer.map(Some)
    }

    /// Returns the source host of a migration.
    pub(crate) fn source_of(&self, id: &str) -> Result<String, ApiError> {
        Ok(self.find(id)?.from.clone())
    }

    /// Cancels what is arriving of a VM from a host. Has no effect once the guest is committed
    /// here, or on another incarnation of the VM. Older releases omit the UUID.
    pub(crate) fn cancel_of(
        &self,
        vm: &str,
        from: &str,
        uuid: Option<Uuid>,
        incarnation: Incarnation,
    ) {
        let all = self.lock();
        let is_meant = |entry: &&Arc<Entry>| {
            entry.vm == vm
                && entry.from == from
                && uuid.is_none_or(|uuid| entry.uuid == uuid)
                && entry.ownership.incarnation == incarnation
        };
        for entry in all.iter().filter(is_meant).filter(|entry| !entry.is_over()) {
            // A full channel has a pending cancellation; a closed one belongs to an ended
            // migration.
            let _ = entry.cancel.try_send(());
        }
    }

    pub(crate) fn find(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        self.lock().iter().find(|entry| entry.id.to_string() == id).cloned().ok_or_else(|| {
            let remedy =
                "its agent may have restarted: see `godwit vm list` for the host that runs the VM";
            ApiError::new(
                ErrorCode::NotFound,
                format!("no incoming migration {id} on this host"),
                remedy,
            )
        })
    }

    /// Returns a VM that is arriving, if any.
    #[must_use]
    pub fn under_way(&self) -> Option<String> {
        self.lock().iter().find(|entry| !entry.is_over()).map(|entry| entry.vm.clone())
    }

    /// Returns the status of a migration.
    pub fn status(&self, id: &str) -> Result<IncomingStatus, ApiError> {
        Ok(self.find(id)?.status())
    }

    /// Accepts the source's decision after it has released the guest. Waits up to [`RUN_LIMIT`] for
    /// the outcome.
    pub async fn run(&self, id: &str, run: bool) -> Result<IncomingStatus, ApiError> {
        let entry = self.find(id)?;
        if entry.engine != EngineKind::Qemu {
            return Err(ApiError::new(
                ErrorCode::WrongState,
                format!("migration {id} decides on its lane when the guest may run"),
                "",
            ));
        }
        let mut fate = entry.fate.subscribe();
        entry.word.send_replace(Some(run));
        let settled = fate.wait_for(|fate| !matches!(fate, Fate::Receiving));
        // If it is not settled yet, the status says so, and the source asks again.
        let _ = tokio::time::timeout(RUN_LIMIT, settled).await;
        Ok(entry.status())
    }

    /// Cancels a migration; has no effect once its guest is committed here.
    pub fn cancel(&self, id: &str) -> Result<(), ApiError> {
        // A full channel has a pending cancellation; a closed one belongs to an ended migration.
        let _ = self.find(id)?.cancel.try_send(());
        Ok(())
    }
}

/// Returns the ID of a source's attempt; `None` also for an invalid one, which is not repeated.
fn attempt_of(request: &IncomingRequest) -> Option<MigrationId> {
    request.attempt.as_ref().and_then(|attempt| attempt.parse().ok())
}

/// Commands from outside to an incoming migration.
pub(crate) struct Orders {
    pub(crate) cancelled: mpsc::Receiver<()>,
    pub(crate) resumed: Resumed,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uuid: Uuid, incarnation: Incarnation) -> IncomingRequest {
        serde_json::from_value(serde_json::json!({
            "spec": {
                "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1,
                "cpu_model": "Westmere-v1", "machine": "pc-q35-7.2", "accel": "tcg",
                "kernel": "/boot/vmlinuz", "uuid": uuid,
            },
            "incarnation": incarnation, "epoch": 2, "from": "a", "qemu_version": "7.2.0",
            "engine": "godwit",
        }))
        .unwrap()
    }

    #[test]
    fn a_request_whose_answer_was_lost_gets_it_when_it_is_repeated() {
        let arriving = IncomingMigrations::default();
        let (uuid, incarnation) = (Uuid::from_u128(1), Incarnation::new(7));
        let attempt = Some("0123456789abcdef0123456789abcdef".to_owned());
        let first = IncomingRequest { attempt, ..request(uuid, incarnation) };
        assert_eq!(arriving.repeated(&first).unwrap(), None);
        let (entry, _orders) = arriving.add(&first).unwrap();
        assert_eq!(arriving.repeated(&first).unwrap_err().code, ErrorCode::Busy);
        let answer = IncomingAccepted {
            id: entry.id.to_string(),
            addresses: vec!["127.0.0.1:7".parse().unwrap()],
            references: None,
            contents: Vec::new(),
        };
        entry.answered(&answer);
        assert_eq!(arriving.repeated(&first).unwrap(), Some(answer));
        for other in [
            IncomingRequest { attempt: None, ..first.clone() },
            IncomingRequest { attempt: Some("f".repeat(32)), ..first.clone() },
            IncomingRequest { attempt: Some("an attempt".to_owned()), ..first.clone() },
            IncomingRequest { from: "b".to_owned(), ..first.clone() },
            IncomingRequest { epoch: 3, ..first.clone() },
            IncomingRequest { incarnation: Incarnation::new(8), ..first.clone() },
        ] {
            assert_eq!(arriving.repeated(&other).unwrap(), None, "{other:?}");
        }
        // The shadow has ended: the next request makes another one.
        entry.refused(&Failure::new(godwit_types::FailureCode::LaneLost, "not in time"));
        assert_eq!(arriving.repeated(&first).unwrap(), None);
    }

    #[test]
    fn a_migration_without_a_shadow_is_known_until_its_request_is_refused() {
        let arriving = IncomingMigrations::default();
        let (uuid, incarnation) = (Uuid::from_u128(1), Incarnation::new(7));
        let request = request(uuid, incarnation);
        let (entry, orders) = arriving.add(&request).unwrap();
        arriving.cancel_of("web", "a", Some(uuid), incarnation);
        assert!(orders.cancelled.try_recv().is_ok());
        let (other, _orders) = arriving.add(&request).unwrap();
        arriving.remove(&entry);
        assert!(arriving.status(&entry.id.to_string()).is_err());
        assert_eq!(arriving.under_way().as_deref(), Some("web"));
        arriving.remove(&other);
        assert_eq!(arriving.under_way(), None);
    }

    #[test]
    fn a_message_about_another_incarnation_cancels_nothing() {
        let uuid = Uuid::from_u128(1);
        let incarnation = Incarnation::new(7);
        let request = request(uuid, incarnation);
        let arriving = IncomingMigrations::default();
        let (_entry, orders) = arriving.add(&request).unwrap();
        let other = Uuid::from_u128(2);
        for (from, uuid, incarnation) in [
            ("a", Some(uuid), Incarnation::new(8)),
            // A source of a release without incarnations does not have this VM.
            ("a", None, Incarnation::UNRECORDED),
            ("a", Some(other), incarnation),
            ("b", Some(uuid), incarnation),
        ] {
            arriving.cancel_of("web", from, uuid, incarnation);
            assert!(orders.cancelled.try_recv().is_err(), "{from}, {uuid:?}, {incarnation}");
        }
        arriving.cancel_of("web", "a", Some(uuid), incarnation);
        assert!(orders.cancelled.try_recv().is_ok());
    }
}
