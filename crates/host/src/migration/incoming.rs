//! The destination: shadow VMs that other hosts ask for, and what became of them.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use godwit_api::{
    ApiError, ErrorCode, IncomingAccepted, IncomingChecked, IncomingRequest, IncomingResume,
    IncomingState, IncomingStatus,
};
use godwit_lanes::Stream;
use godwit_migration::destination::Ending;
use godwit_migration::drive::page_in::PagingIn;
use godwit_migration::drive::{
    DestinationHypervisor, DestinationJob, Offer, WelcomedStream, receive,
};
use godwit_migration::{Failure, nanos};
use godwit_qemu::{Accelerator, Uuid};
use godwit_ram::{PageRange, Region};
use godwit_types::{EngineKind, FailureCode, Fault, Incarnation, Ownership, ReferenceUse};
use godwit_wire::{CONTROL_STREAM, MigrationId};
use tokio::sync::watch;

use super::doorman::{Doorman, Guard, NextDoor, Resumed};
use super::qemu_destination::QemuDestination;
use super::qemu_engine;
use crate::agent::Agent;
use crate::failure::{host_failed, spec_refused};
use crate::vm::{Begin, Vm};

/// How long a source may take from the answer to its request until its lane says hello.
const LANE_LIMIT: Duration = Duration::from_secs(30);
/// The longest that a shadow is kept after a cut, whatever its source asks for: its memory is promised to it meanwhile.
const MOST_CUT_LIMIT: Duration = Duration::from_secs(3600);
/// How long the answer to the source's word may take.
const RUN_LIMIT: Duration = Duration::from_secs(5);
/// Memory is allocated ahead of the pages in steps of this many pages (64 MiB).
const ALLOCATE_PAGES: u64 = 16 * 1024;
/// Ended migrations that are remembered, for sources that ask again.
const HISTORY: usize = 256;

/// The migrations that arrive or arrived at this host since the agent's start, the oldest first, bounded.
#[derive(Debug, Default)]
pub struct IncomingMigrations {
    all: Mutex<VecDeque<Arc<Entry>>>,
}

/// One of them.
#[derive(Debug)]
pub(super) struct Entry {
    id: MigrationId,
    vm: String,
    engine: EngineKind,
    begun: Instant,
    fate: watch::Sender<Fate>,
    /// The source's word that the guest may run (true) or stays paused (false); QEMU's own engine only.
    word: watch::Sender<Option<bool>>,
    /// Room for one: a second cancel adds nothing to one that waits.
    cancel: mpsc::SyncSender<()>,
    /// The source host.
    from: String,
    uuid: Uuid,
    ownership: Ownership,
    /// Takes the door of a further lane, in place of one that was cut.
    resume: Arc<NextDoor>,
    /// The control stream of the lane that there is.
    control: Mutex<Option<Stream>>,
}

/// What has become of an incoming guest.
#[derive(Clone, Debug)]
enum Fate {
    Receiving,
    /// It is this host's; its vCPUs run since then, where that is known.
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
    pub(super) fn id(&self) -> MigrationId {
        self.id
    }

    pub(super) fn runs(&self, since: Option<Instant>) {
        self.fate.send_replace(Fate::Runs(since));
    }

    pub(super) fn refused(&self, failure: &Failure) {
        self.fate.send_replace(Fate::Refused(failure.to_fault()));
    }

    pub(super) fn broken(&self) {
        self.fate.send_replace(Fate::Broken);
    }

    /// Returns with the source's word; never, where it does not come.
    pub(super) async fn word(&self) -> bool {
        let mut word = self.word.subscribe();
        match word.wait_for(Option::is_some).await.map(|word| *word) {
            Ok(Some(run)) => run,
            // The sender is this entry's own.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    fn is_over(&self) -> bool {
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
            failure,
            running_ns: running.map(since_begin),
            now_ns: since_begin(Instant::now()),
        }
    }
}

impl IncomingMigrations {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Entry>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, request: &IncomingRequest) -> Result<(Arc<Entry>, Orders), ApiError> {
        let (cancel, cancelled) = mpsc::sync_channel(1);
        let resume = Arc::<NextDoor>::default();
        let resumed = Resumed::of(&resume);
        let entry = Arc::new(Entry {
            id: fresh_id()?,
            vm: request.spec.name.to_string(),
            engine: request.engine,
            begun: Instant::now(),
            fate: watch::channel(Fate::Receiving).0,
            word: watch::channel(None).0,
            cancel,
            from: request.from.clone(),
            uuid: request.spec.uuid,
            ownership: request.offered(),
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

    /// The source host of one.
    pub(super) fn source_of(&self, id: &str) -> Result<String, ApiError> {
        Ok(self.find(id)?.from.clone())
    }

    /// Asks what arrives of a VM from a host to be forgotten; without effect once the guest is committed here, and on another life of
    /// the VM. Older releases leave the uuid out.
    pub(super) fn cancel_of(
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
            // One waits already, or the receiver is gone: then it is over.
            let _ = entry.cancel.try_send(());
        }
    }

    fn find(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        self.lock().iter().find(|entry| entry.id.to_string() == id).cloned().ok_or_else(|| {
            let remedy =
                "the agent may have restarted since: see `godwit vm list` for where the VM runs";
            ApiError::new(
                ErrorCode::NotFound,
                format!("no migration {id} arrives at this host"),
                remedy,
            )
        })
    }

    /// The VM that is arriving, if one is.
    #[must_use]
    pub fn under_way(&self) -> Option<String> {
        self.lock().iter().find(|entry| !entry.is_over()).map(|entry| entry.vm.clone())
    }

    /// Where one is.
    pub fn status(&self, id: &str) -> Result<IncomingStatus, ApiError> {
        Ok(self.find(id)?.status())
    }

    /// Takes the source's word that it has let go of the guest, and waits, at most for [`RUN_LIMIT`], for what comes of it.
    pub async fn run(&self, id: &str, run: bool) -> Result<IncomingStatus, ApiError> {
        let entry = self.find(id)?;
        if entry.engine != EngineKind::Qemu {
            return Err(ApiError::new(
                ErrorCode::WrongState,
                format!("migration {id} is told on its lane when the guest may run"),
                "",
            ));
        }
        let mut fate = entry.fate.subscribe();
        entry.word.send_replace(Some(run));
        let settled = fate.wait_for(|fate| !matches!(fate, Fate::Receiving));
        // Not settled yet: the status says so, and the source asks again.
        let _ = tokio::time::timeout(RUN_LIMIT, settled).await;
        Ok(entry.status())
    }

    /// Asks one to be forgotten; without effect once its guest is committed here.
    pub fn cancel(&self, id: &str) -> Result<(), ApiError> {
        // One waits already, or the receiver is gone: then it is over.
        let _ = self.find(id)?.cancel.try_send(());
        Ok(())
    }
}

/// What a migration that arrives is told from outside.
pub(super) struct Orders {
    pub(super) cancelled: mpsc::Receiver<()>,
    resumed: Resumed,
}

/// Another lane for a source whose lane was cut.
pub(super) fn resume(
    agent: &Arc<Agent>,
    id: &str,
    request: IncomingResume,
) -> Result<IncomingAccepted, ApiError> {
    let entry = agent.incoming().find(id)?;
    let over = || {
        let message = format!("migration {id} of VM \"{}\" is over here", entry.vm);
        ApiError::new(ErrorCode::WrongState, message, "begin another one")
    };
    if entry.is_over() || entry.ownership != request.offered() || entry.engine != EngineKind::Godwit
    {
        return Err(over());
    }
    let lane = fresh_id()?;
    let open = || {
        let listeners = listen(agent)?;
        let addresses: Result<Vec<_>, _> = listeners.iter().map(TcpListener::local_addr).collect();
        let addresses = addresses.map_err(|error| host_failed("the lane's address", &error))?;
        let guard =
            Guard { id: lane, from: entry.from.clone(), identity: agent.identity(), listeners };
        Ok::<_, ApiError>((Doorman::open(guard)?, addresses))
    };
    // Waits for the end of the door before it, if nobody has taken that.
    let addresses = tokio::task::block_in_place(|| entry.resume.replace(open))?.ok_or_else(over)?;
    // This end may not have noticed the cut.
    if let Some(control) = entry.control.lock().unwrap_or_else(PoisonError::into_inner).take() {
        control.close();
    }
    Ok(IncomingAccepted { id: lane.to_string(), addresses, references: None })
}

/// An id that nobody can guess.
pub(crate) fn fresh_id() -> Result<MigrationId, ApiError> {
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| host_failed("no random numbers", &error))?;
    Ok(MigrationId(id))
}

/// Makes a shadow VM for a source and waits for its lane, in a thread of its own.
pub(super) async fn prepare(
    agent: &Arc<Agent>,
    request: IncomingRequest,
) -> Result<IncomingAccepted, ApiError> {
    check(agent, &request).await?;
    let listeners = if request.engine == EngineKind::Godwit { listen(agent)? } else { Vec::new() };
    let runs_by_itself = request.engine == EngineKind::Qemu && request.qemu.runs_by_itself();
    let vm = agent
        .prepare_incoming(request.spec.clone(), request.offered(), &request.from, runs_by_itself)
        .await?;
    agent.probes().give_way(&vm.name);
    let begun = match agent.incoming().add(&request) {
        Ok((entry, orders)) => {
            let begun = match request.engine {
                EngineKind::Godwit => {
                    let from = request.from.clone();
                    // What either host does not want is not done.
                    let by = agent
                        .config()
                        .references
                        .by
                        .min(request.references.unwrap_or(ReferenceUse::None));
                    let cut_limit = Duration::from_millis(request.cut_limit_ms).min(MOST_CUT_LIMIT);
                    let doors = Doors { listeners, from, by, cut_limit };
                    begin(agent, &vm, Arc::clone(&entry), orders, doors).await
                }
                EngineKind::Qemu => {
                    let entry = Arc::clone(&entry);
                    qemu_engine::begin_incoming(agent, &vm, entry, orders.cancelled, &request.qemu)
                        .await
                }
            };
            if let Err(error) = &begun {
                entry.refused(&Failure::new(FailureCode::HypervisorFailed, error.message.clone()));
            }
            begun
        }
        Err(error) => Err(error),
    };
    if begun.is_err() {
        agent.discard(&vm).await;
    }
    begun
}

/// Whether a guest could arrive, without making anything: all that [`prepare`] would refuse before QEMU starts. Tells the addresses at
/// which it would.
pub(super) async fn could_arrive(
    agent: &Arc<Agent>,
    request: &IncomingRequest,
) -> Result<IncomingChecked, ApiError> {
    check(agent, request).await?;
    let listeners = if request.engine == EngineKind::Godwit { listen(agent)? } else { Vec::new() };
    agent.check_incoming(&request.spec, request.offered()).await?;
    let addresses: Result<Vec<_>, _> =
        listeners.iter().map(|listener| Ok(listener.local_addr()?.ip())).collect();
    let addresses =
        addresses.map_err(|error: std::io::Error| host_failed("the lane's address", &error))?;
    Ok(IncomingChecked { addresses })
}

/// What can be told before anything is made. What the VM needs of the host is checked with the shadow.
async fn check(agent: &Arc<Agent>, request: &IncomingRequest) -> Result<(), ApiError> {
    let host = &agent.config().name;
    request.spec.validate().map_err(|error| spec_refused(&error))?;
    let qemu = agent.qemu_of(&request.spec, Begin::Incoming).await?;
    if request.spec.accel == Accelerator::Kvm
        && let Err(error) = std::fs::File::open("/dev/kvm")
    {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            format!("the VM runs by KVM and host {host} has none: /dev/kvm: {error}"),
            "take a host with KVM",
        ));
    }
    if !qemu.machines.iter().any(|machine| machine.name == request.spec.machine) {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            format!(
                "the VM's machine type {} (QEMU {} on host {}) is not known to QEMU {} on host {host}",
                request.spec.machine,
                request.qemu_version,
                request.from,
                qemu.version_text()
            ),
            "upgrade QEMU on the destination, or create the VM with a machine type that both know",
        ));
    }
    agent.check_cpu(&request.spec, &qemu, &request.from).await?;
    if agent.config().migration_addresses.is_empty() {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            format!("host {host} has no address for migrations"),
            "set migration_addresses in its configuration",
        ));
    }
    if request.engine == EngineKind::Qemu && agent.identity().is_some() && !request.qemu.plaintext {
        let message = format!("host {host} takes no guest in the clear that nobody allowed to");
        return Err(ApiError::new(
            ErrorCode::Preflight,
            message,
            "add --plaintext to the migration",
        ));
    }
    Ok(())
}

/// Listens on every address that this host has at the moment: one that is gone (a NIC that was down has lost its IPv6
/// address) keeps no migration off the others.
pub(crate) fn listen(agent: &Agent) -> Result<Vec<TcpListener>, ApiError> {
    let mut listeners = Vec::new();
    let mut problem = None;
    for &address in &agent.config().migration_addresses {
        match godwit_lanes::listen(SocketAddr::new(address, 0)) {
            Ok(listener) => listeners.push(listener),
            Err(error) => {
                tracing::warn!(%address, %error, "no migration can arrive at this address");
                problem = Some(error);
            }
        }
    }
    match problem {
        Some(error) if listeners.is_empty() => {
            let remedy =
                "see that the host has one of the migration_addresses of its configuration";
            Err(ApiError::new(ErrorCode::HostFailed, error.to_string(), remedy))
        }
        _ => Ok(listeners),
    }
}

async fn begin(
    agent: &Arc<Agent>,
    vm: &Arc<Vm>,
    entry: Arc<Entry>,
    orders: Orders,
    doors: Doors,
) -> Result<IncomingAccepted, ApiError> {
    let failed = |failure: &Failure| {
        ApiError::new(ErrorCode::HypervisorFailed, failure.detail.clone(), failure.code.remedy())
    };
    let is_all = doors.by == ReferenceUse::All;
    let offer = if is_all { agent.references().offer(vm) } else { Offer::default() };
    let hypervisor =
        QemuDestination::new(Arc::clone(agent), Arc::clone(vm), doors.from.clone(), is_all)
            .await
            .map_err(|failure| failed(&failure))?;
    let addresses: Result<Vec<_>, _> =
        doors.listeners.iter().map(TcpListener::local_addr).collect();
    let addresses = addresses.map_err(|error| host_failed("the lane's address", &error))?;
    let accepted =
        IncomingAccepted { id: entry.id.to_string(), addresses, references: Some(doors.by) };
    let guard = Guard {
        id: entry.id,
        from: doors.from,
        identity: agent.identity(),
        listeners: doors.listeners,
    };
    let (host, arriving) = (Arc::clone(agent), Arc::clone(vm));
    let arrival = Arrival {
        doorman: Doorman::open(guard)?,
        ownership: vm.ownership(),
        regions: vm.regions.clone(),
        offer,
        orders,
        vm: Arc::clone(vm),
        entry: Arc::clone(&entry),
        cut_limit: doors.cut_limit,
    };
    std::thread::Builder::new()
        .name(format!("in-{}", vm.name))
        .spawn(move || {
            let (ending, page_in) = arrival.serve(hypervisor);
            match ending {
                Ending::Runs => entry.runs(None),
                Ending::Discarded(failure) | Ending::Cut(failure) => entry.refused(&failure),
            }
            if let Some(page_in) = page_in {
                host.page_ins().keep(&arriving.unasked(), &page_in);
            }
        })
        .map_err(|error| host_failed("no thread can be started", &error))?;
    Ok(accepted)
}

/// Where a source's streams come in.
struct Doors {
    listeners: Vec<TcpListener>,
    /// The source host.
    from: String,
    /// What pages may be told by.
    by: ReferenceUse,
    /// How long the shadow is kept after a cut.
    cut_limit: Duration,
}

/// A shadow VM that waits for its lanes and its pages.
struct Arrival {
    doorman: Doorman,
    ownership: Ownership,
    regions: Vec<Arc<Region>>,
    offer: Offer,
    orders: Orders,
    vm: Arc<Vm>,
    entry: Arc<Entry>,
    cut_limit: Duration,
}

impl Arrival {
    /// With what brings the pages that the guest lacks, where it runs without them.
    fn serve(mut self, mut hypervisor: QemuDestination) -> (Ending, Option<Arc<PagingIn>>) {
        let not_in_time = format!("the source did not connect within {} s", LANE_LIMIT.as_secs());
        let mut why = Failure::new(FailureCode::LaneLost, not_in_time);
        let mut limit = LANE_LIMIT;
        let mut is_first = true;
        loop {
            let control = match self.wait_for_control(limit, &why) {
                Ok(control) => control,
                Err(failure) => {
                    hypervisor.discard(&failure);
                    return (Ending::Discarded(failure), None);
                }
            };
            *self.entry.control.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(control.stream().clone());
            let (ending, page_in) =
                self.receive(control, &mut hypervisor, std::mem::take(&mut is_first));
            let Ending::Cut(failure) = ending else { return (ending, page_in) };
            // What was prepared for page-in is prepared anew.
            self.vm.files.remove_missing();
            if self.cut_limit.is_zero() {
                hypervisor.discard(&failure);
                return (Ending::Discarded(failure), None);
            }
            tracing::warn!(vm = self.vm.name.as_str(), %failure, "the link to the source is cut: what has come is kept");
            (why, limit) = (failure, self.cut_limit + LANE_LIMIT);
        }
    }

    /// One lane's part of it.
    fn receive(
        &mut self,
        control: WelcomedStream,
        hypervisor: &mut QemuDestination,
        is_first: bool,
    ) -> (Ending, Option<Arc<PagingIn>>) {
        let offer = std::mem::take(&mut self.offer);
        let Arrival { doorman, ownership, regions, orders, .. } = &*self;
        // Nothing is ever sent: its end is the word.
        let (stop, stopped) = mpsc::sync_channel(1);
        std::thread::scope(|scope| {
            let ahead = regions.clone();
            if is_first {
                scope.spawn(move || allocate_ahead(&ahead, &stopped));
            }
            let accept = || doorman.let_in();
            let regions = regions.clone();
            let job = DestinationJob {
                control,
                accept: &accept,
                ownership: *ownership,
                regions,
                offer,
                hypervisor,
            };
            let ending = receive(job, &orders.cancelled);
            drop(stop);
            ending
        })
    }

    /// The control stream of the first lane, or of one in place of another that was cut.
    fn wait_for_control(
        &mut self,
        limit: Duration,
        why: &Failure,
    ) -> Result<WelcomedStream, Failure> {
        let limit = Instant::now() + limit;
        while Instant::now() < limit {
            if self.orders.cancelled.try_recv().is_ok() {
                return Err(Failure::new(
                    FailureCode::Cancelled,
                    "cancelled before the source connected",
                ));
            }
            if let Some(doorman) = self.orders.resumed.take() {
                self.doorman = doorman;
            }
            if let Some(stream) = self.doorman.let_in()
                && stream.number == CONTROL_STREAM
            {
                return Ok(stream);
            }
        }
        Err(why.clone())
    }
}

/// Takes memory from the kernel ahead of the pages: four to ten times faster than page by page as they arrive. Ends early
/// when the migration is over.
fn allocate_ahead(regions: &[Arc<Region>], stopped: &mpsc::Receiver<()>) {
    for region in regions {
        let mut at = 0;
        while at < region.pages() {
            if matches!(stopped.try_recv(), Err(mpsc::TryRecvError::Disconnected)) {
                return;
            }
            let count = ALLOCATE_PAGES.min(region.pages() - at);
            if let Err(error) = region.allocate(PageRange { first: at, count }) {
                // The pages themselves will fail the same way, and that failure reaches the source.
                return tracing::warn!(%error, "memory could not be allocated ahead");
            }
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_about_another_life_forgets_nothing() {
        let uuid = Uuid::from_u128(1);
        let incarnation = Incarnation::new(7);
        let request: IncomingRequest = serde_json::from_value(serde_json::json!({
            "spec": {
                "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
                "machine": "pc-q35-7.2", "accel": "tcg", "kernel": "/boot/vmlinuz", "uuid": uuid,
            },
            "incarnation": incarnation, "epoch": 2, "from": "a", "qemu_version": "7.2.0", "engine": "godwit",
        }))
        .unwrap();
        let arriving = IncomingMigrations::default();
        let (_entry, orders) = arriving.add(&request).unwrap();
        let other = Uuid::from_u128(2);
        for (from, uuid, incarnation) in [
            ("a", Some(uuid), Incarnation::new(8)),
            // A source that knows no incarnations has no such VM.
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
