//! Page-in at both hosts: the requests of a source's agent to the destination's after a session was
//! cut or one of the agents has restarted (`POST /v1/page-ins/{name}`), and the guests that run
//! here while some of their pages are elsewhere.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{
    ApiError, Client, ClientError, ErrorCode, PageInAnswer, PageInRequest, PageInState, VmState,
};
use godwit_lanes::pacing::MigrationPace;
use godwit_lanes::{Carries, Interrupt};
use godwit_migration::Failure;
use godwit_migration::drive::page_in::{Again, KeptPages, PagingIn, open_session, serve};
use godwit_migration::drive::{Hello, SessionStream};
use godwit_qemu::{Uuid, VmName};
use godwit_ram::{MissingPages, PageIn};
use godwit_types::{FailureCode, Ownership};
use godwit_wire::{CONTROL_STREAM, MigrationId, SUPPORTED};
use tokio::runtime::Handle;

use super::incoming::{fresh_id, listen};
use super::outgoing::Paths;
use super::verdict::without_session;
use super::{Doorman, Guard};
use crate::agent::Agent;
use crate::failure::host_failed;
use crate::vm::{UnaskedVm, Vm};

/// Interval between two attempts to reach the destination.
const AGAIN_INTERVAL: Duration = Duration::from_millis(300);
/// Time limit for an answer: over a cut link it never arrives.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Time for a QEMU whose memory is gone to end; the kernel frees that memory.
const ENDING_LIMIT: Duration = Duration::from_secs(5);

/// Guests that run here while pages of them are missing.
#[derive(Default)]
pub struct PageIns {
    all: Mutex<BTreeMap<VmName, Arc<PagingIn>>>,
}

impl std::fmt::Debug for PageIns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.lock().keys()).finish()
    }
}

impl PageIns {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmName, Arc<PagingIn>>> {
        // Each change is one insertion or removal.
        self.all.lock()
    }

    fn of(&self, vm: &str) -> Option<Arc<PagingIn>> {
        self.lock().get(vm).cloned()
    }

    /// Returns the pages that a VM lacks; `None` if it lacks none.
    #[must_use]
    pub fn state(&self, vm: &str) -> Option<PageInState> {
        let paging_in = self.of(vm)?;
        Some(PageInState {
            missing_pages: paging_in.missing_pages(),
            connected: paging_in.is_connected(),
        })
    }

    /// Lets the source delete its copy once all pages are here: the guest is known to run here.
    pub(crate) fn let_source_go(&self, vm: &str) {
        if let Some(paging_in) = self.of(vm) {
            paging_in.let_source_go();
        }
    }

    /// Follows a guest's page-in until no page is missing or the guest is gone. Blocks; call it on
    /// a thread of its own.
    pub(super) fn keep(&self, vm: &UnaskedVm, paging_in: &Arc<PagingIn>) {
        self.lock().insert(vm.name.clone(), Arc::clone(paging_in));
        match paging_in.until_complete() {
            Ok(figures) => {
                tracing::info!(
                    vm = vm.name.as_str(),
                    pages = figures.pages,
                    "all memory of the guest has arrived"
                );
            }
            Err(failure) => {
                let name = vm.name.as_str();
                tracing::error!(vm = name, %failure, "page-in ended before all pages arrived");
                // The memory disappears before the process does.
                if !vm.ends_within(ENDING_LIMIT) {
                    // Threads that touch a missing page still wait. The note stays: it says that
                    // this memory is incomplete, so that a restarted agent continues.
                    return;
                }
            }
        }
        {
            let mut all = self.lock();
            if all.get(&vm.name).is_some_and(|known| Arc::ptr_eq(known, paging_in)) {
                // The note goes first: an agent that starts now finds an ordinary guest.
                vm.files.remove_missing();
                all.remove(&vm.name);
            }
        }
        paging_in.close();
    }
}

/// Opens a session for a source that asks for one.
pub(super) async fn session(
    agent: &Arc<Agent>,
    name: &VmName,
    request: PageInRequest,
) -> Result<PageInAnswer, ApiError> {
    let info = agent.vm_info(name)?;
    let (here, asked) =
        (Ownership { incarnation: info.incarnation, epoch: info.epoch }, request.ownership());
    if here != asked {
        let message = format!("VM \"{name}\" has {here} on this host, not {asked}");
        return Err(ApiError::new(
            ErrorCode::NotFound,
            message,
            "see `godwit vm list` for the host that runs it",
        ));
    }
    let Some(paging_in) = agent.page_ins().of(name) else {
        // The guest has not arrived, may not have, or lacks pages that nothing fetches: the
        // source's copy is the only one.
        let arrived = info.state != VmState::MigratingIn && !info.in_doubt;
        if !arrived || agent.files(name)?.missing().exists() {
            let message = format!("cannot take pages for VM \"{name}\" now: it is {}", info.state);
            return Err(ApiError::new(ErrorCode::Busy, message, "retry later"));
        }
        // The guest has all of its memory, or has ended meanwhile and needs none.
        return Ok(PageInAnswer { complete: true, id: None, addresses: Vec::new() });
    };
    if agent.files(name)?.host_of_missing().as_ref() != Some(&request.from) {
        let message = format!(
            "cannot take pages for VM \"{name}\" from host {}: another host has them",
            request.from
        );
        return Err(ApiError::new(
            ErrorCode::Forbidden,
            message,
            "only the host that the VM came from may ask",
        ));
    }
    let listeners = listen(agent)?;
    let addresses: Result<Vec<_>, _> =
        listeners.iter().map(std::net::TcpListener::local_addr).collect();
    let addresses =
        addresses.map_err(|error| host_failed("cannot read the lane's address", &error))?;
    let id = fresh_id()?;
    let doorman =
        Doorman::open(Guard { id, from: request.from, identity: agent.identity(), listeners })?;
    let next = Arc::clone(&paging_in);
    let session = tokio::task::spawn_blocking(move || next.new_session());
    let session = session.await.map_err(|error| crate::failure::task_failed(&error))?;
    std::thread::Builder::new()
        .name(format!("page-in-{name}"))
        .spawn(move || {
            while paging_in.is_session(session) {
                if let Some(stream) = doorman.let_in() {
                    paging_in.admit(session, stream);
                }
            }
        })
        .map_err(|error| host_failed("cannot start a thread", &error))?;
    Ok(PageInAnswer { complete: false, id: Some(id.to_string()), addresses })
}

/// At the destination, after a restart of its agent: resumes page-in, which every thread that
/// touches a missing page waits for. Does not query QEMU, whose main loop may be waiting too.
/// `runs_here`: this host owns the guest; otherwise the source must keep its copy until that is
/// certain ([`PageIns::let_source_go`]).
pub(crate) async fn take_up(
    agent: &Arc<Agent>,
    vm: &UnaskedVm,
    runs_here: bool,
) -> Result<(), Failure> {
    let (agent, vm) = (Arc::clone(agent), vm.clone());
    let taken_up = tokio::task::spawn_blocking(move || {
        let failed = |why: String| Failure::new(FailureCode::MemoryFailed, why);
        let noted =
            MissingPages::open(&vm.files.missing()).map_err(|error| failed(error.to_string()))?;
        if noted.count() == 0 {
            // All pages arrived just before the other agent ended, or the guest was not handed over
            // yet.
            vm.files.remove_missing();
            return Ok(());
        }
        drop(noted);
        let faults = PageIn::attach_again(&vm.files.tracker_socket, vm.pid, &vm.regions)
            .map_err(|error| failed(error.to_string()))?;
        let paging_in =
            PagingIn::resume(Box::new(faults), vm.regions.clone(), &vm.files.missing())?;
        if !runs_here {
            paging_in.hold_source();
        }
        tracing::warn!(
            vm = vm.name.as_str(),
            missing = paging_in.missing_pages(),
            "page-in resumes when the source asks"
        );
        keep_on_a_thread(&agent, vm, paging_in)
    });
    taken_up
        .await
        .unwrap_or_else(|error| Err(Failure::new(FailureCode::Internal, error.to_string())))
}

fn keep_on_a_thread(
    agent: &Arc<Agent>,
    vm: UnaskedVm,
    paging_in: Arc<PagingIn>,
) -> Result<(), Failure> {
    let name = format!("in-{}", vm.name);
    // Registered now, and not only once the thread runs.
    agent.page_ins().lock().insert(vm.name.clone(), Arc::clone(&paging_in));
    let agent = Arc::clone(agent);
    let spawned = std::thread::Builder::new()
        .name(name)
        .spawn(move || agent.page_ins().keep(&vm, &paging_in));
    spawned.map(drop).map_err(|error| {
        Failure::new(FailureCode::Internal, format!("cannot start a thread: {error}"))
    })
}

/// A guest whose pages are retained here for the destination that runs it.
pub(super) struct Serving<'a> {
    pub(super) agent: &'a Arc<Agent>,
    pub(super) vm: &'a str,
    pub(super) to: &'a str,
    pub(super) peer: &'a Client,
    /// The destination's ownership.
    pub(super) offered: Ownership,
    pub(super) runtime: &'a Handle,
    /// Bandwidth limits of its pages.
    pub(super) pace: MigrationPace,
    /// UUID of the VM, since another VM may have its name by now.
    pub(super) uuid: Uuid,
}

impl Serving<'_> {
    /// Asks for another session until there is one or none is needed.
    pub(super) fn again(&self, is_over: &dyn Fn() -> bool) -> Again {
        loop {
            if is_over() {
                return Again::Lost(Failure::new(
                    FailureCode::Cancelled,
                    "the pages are no longer needed, or are gone",
                ));
            }
            let answer = self.runtime.block_on(async {
                let Ownership { incarnation, epoch } = self.offered;
                let from = self.agent.config().name.clone();
                let request = PageInRequest { incarnation, epoch, from };
                let path = format!("/v1/page-ins/{}", self.vm);
                tokio::time::timeout(
                    ANSWER_LIMIT,
                    self.peer.post::<_, PageInAnswer>(&path, &request),
                )
                .await
            });
            match answer {
                Ok(Ok(PageInAnswer { complete: true, .. })) => return Again::Complete,
                Ok(Ok(answer)) => match self.open(&answer) {
                    Ok(streams) => return Again::Session(streams),
                    Err(failure) => {
                        tracing::warn!(vm = self.vm, %failure, "no page-in session yet");
                    }
                },
                Ok(Err(ClientError::Refused(error))) if error.code == ErrorCode::NotFound => {
                    let decided = without_session(self.peer, self.vm, self.uuid, self.offered);
                    if let Some(decided) = self.runtime.block_on(decided) {
                        return decided;
                    }
                }
                Ok(Err(error)) => {
                    tracing::warn!(vm = self.vm, %error, "no page-in session from the destination");
                }
                Err(_) => {
                    tracing::debug!(vm = self.vm, to = self.to, "the destination does not answer");
                }
            }
            self.runtime.block_on(async { tokio::time::sleep(AGAIN_INTERVAL).await });
        }
    }

    fn open(&self, answer: &PageInAnswer) -> Result<Vec<SessionStream>, Failure> {
        let detail = "the destination returned an invalid migration ID";
        let broken = || Failure::new(FailureCode::ProtocolBroken, detail);
        let id: MigrationId =
            answer.id.as_deref().and_then(|id| id.parse().ok()).ok_or_else(broken)?;
        let ours =
            self.runtime.block_on(crate::network::near(&self.agent.config().migration_addresses));
        let lanes = godwit_lanes::pair(&ours, &answer.addresses);
        let count = lanes.len();
        let pace = self.pace.clone();
        let paths =
            Paths { lanes, host: self.to.to_owned(), identity: self.agent.identity(), pace };
        let hello = Hello { migration: id, stream: CONTROL_STREAM, versions: SUPPORTED };
        let connect = |lane: usize, carries: Carries, interrupt: &Interrupt| {
            paths.data(lane, carries, interrupt)
        };
        // Small segments pass, whatever cut the previous session.
        open_session(&connect, count, &Interrupt::default(), hello, Carries::PagesNarrowly)
    }
}

/// At the source, after a restart of its agent: serves the pages of a guest that the destination
/// `to` runs, in its own task, until the destination needs none; then releases the guest.
pub(crate) fn serve_again(agent: &Arc<Agent>, vm: &Arc<Vm>, to: String) {
    let (agent, vm) = (Arc::clone(agent), Arc::clone(vm));
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let peer = match agent.peer(&to) {
            Ok(peer) => peer,
            Err(error) => {
                let name = vm.name.as_str();
                return tracing::error!(vm = name, %error, "cannot serve pages of the guest");
            }
        };
        let serving = Serving {
            agent: &agent,
            vm: &vm.name,
            to: &to,
            peer: &peer,
            offered: vm.ownership().offered(),
            runtime: &runtime,
            pace: agent.limits().migration(None),
            uuid: vm.spec.uuid,
        };
        let kept = KeptPages::new(vm.regions.clone());
        let is_gone = || vm.process.exit().is_some() || !agent.keeps_pages(&vm);
        match serve(&kept, None, &|is_over| serving.again(&|| is_over() || is_gone())) {
            Ok(_) => {
                tracing::info!(
                    vm = vm.name.as_str(),
                    to,
                    "the destination has all memory of the guest"
                );
                if let Err(error) = runtime.block_on(agent.release(&vm, false)) {
                    let name = vm.name.as_str();
                    tracing::error!(vm = name, %error, "cannot remove what is left of the VM");
                }
            }
            // An operator has decided meanwhile.
            Err(_) if !agent.keeps_pages(&vm) => {}
            Err(failure) => {
                let name = vm.name.as_str();
                tracing::error!(vm = name, %failure, "retaining pages that nothing fetches");
                runtime.block_on(agent.hold_in_doubt(&vm.name, &to));
                agent.settle_doubt(&vm.name);
            }
        }
    });
}
