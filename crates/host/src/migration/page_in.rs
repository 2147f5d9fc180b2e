//! Page-in at both hosts: what a source's agent asks the destination's when a session was cut or one of them has been started anew
//! (`POST /v1/page-ins/{name}`), and the guests that run here while pages of them are elsewhere.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// Between two attempts to reach the destination.
const AGAIN_INTERVAL: Duration = Duration::from_millis(300);
/// How long it may take to answer: across a link that is cut it never does.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// How long a QEMU whose memory is gone may take to be gone itself: the kernel frees that memory.
const ENDING_LIMIT: Duration = Duration::from_secs(5);

/// The guests that run here while pages of them are missing.
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
        // One insertion or removal each.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, vm: &str) -> Option<Arc<PagingIn>> {
        self.lock().get(vm).cloned()
    }

    /// What a VM still lacks; none: nothing.
    #[must_use]
    pub fn state(&self, vm: &str) -> Option<PageInState> {
        let paging_in = self.of(vm)?;
        Some(PageInState {
            missing_pages: paging_in.missing_pages(),
            connected: paging_in.is_connected(),
        })
    }

    /// The guest runs here for sure: its source may forget it once all pages are here.
    pub(crate) fn let_source_go(&self, vm: &str) {
        if let Some(paging_in) = self.of(vm) {
            paging_in.let_source_go();
        }
    }

    /// Keeps to a guest's page-in until nothing is missing, or the guest is gone. For a thread of its own.
    pub(super) fn keep(&self, vm: &UnaskedVm, paging_in: &Arc<PagingIn>) {
        self.lock().insert(vm.name.clone(), Arc::clone(paging_in));
        match paging_in.until_complete() {
            Ok(figures) => {
                tracing::info!(
                    vm = vm.name.as_str(),
                    pages = figures.pages,
                    "all of its memory is here"
                );
            }
            Err(failure) => {
                tracing::error!(vm = vm.name.as_str(), %failure, "page-in has ended before all pages were here");
                // Its memory is gone before its process is.
                if !vm.ends_within(ENDING_LIMIT) {
                    // Whoever comes to a missing page waits still. The note stays: it says that this memory is not whole, and
                    // an agent that is started anew goes on.
                    return;
                }
            }
        }
        {
            let mut all = self.lock();
            if all.get(&vm.name).is_some_and(|known| Arc::ptr_eq(known, paging_in)) {
                // The note first: an agent that starts now finds a guest like any other.
                vm.files.remove_missing();
                all.remove(&vm.name);
            }
        }
        paging_in.close();
    }
}

/// A session for a source that asks for one.
pub(super) async fn session(
    agent: &Arc<Agent>,
    name: &VmName,
    request: PageInRequest,
) -> Result<PageInAnswer, ApiError> {
    let info = agent.vm_info(name)?;
    let (here, asked) =
        (Ownership { incarnation: info.incarnation, epoch: info.epoch }, request.ownership());
    if here != asked {
        let message = format!("VM \"{name}\" is in {here} here, not in {asked}");
        return Err(ApiError::new(
            ErrorCode::NotFound,
            message,
            "see `godwit vm list` for where it runs",
        ));
    }
    let Some(paging_in) = agent.page_ins().of(name) else {
        // Not arrived yet, or perhaps not, or pages are missing that nobody fetches: what the source has is all that there is.
        let arrived = info.state != VmState::MigratingIn && !info.in_doubt;
        if !arrived || agent.files(name)?.missing().exists() {
            let message = format!("VM \"{name}\" is {} and can't take pages now", info.state);
            return Err(ApiError::new(ErrorCode::Busy, message, "ask again"));
        }
        // It has all of its memory; or it has ended meanwhile, and needs none.
        return Ok(PageInAnswer { complete: true, id: None, addresses: Vec::new() });
    };
    if agent.files(name)?.host_of_missing().as_ref() != Some(&request.from) {
        let message =
            format!("the pages that VM \"{name}\" lacks are not at host {}", request.from);
        return Err(ApiError::new(
            ErrorCode::Forbidden,
            message,
            "the host that it came from asks for itself",
        ));
    }
    let listeners = listen(agent)?;
    let addresses: Result<Vec<_>, _> =
        listeners.iter().map(std::net::TcpListener::local_addr).collect();
    let addresses = addresses.map_err(|error| host_failed("the lane's address", &error))?;
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
        .map_err(|error| host_failed("no thread can be started", &error))?;
    Ok(PageInAnswer { complete: false, id: Some(id.to_string()), addresses })
}

/// At the destination, after a restart of its agent: whoever comes to a missing page waits for this. QEMU is not asked anything: its main
/// loop may be among those who wait. `runs_here`: its guest is this host's; else the source is held until it is known to be
/// ([`PageIns::let_source_go`]).
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
            // All of it came just before the other agent ended, or the guest was not handed over yet.
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
            "page-in goes on when its source asks"
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
    // Known from here on, and not when the thread has come to run.
    agent.page_ins().lock().insert(vm.name.clone(), Arc::clone(&paging_in));
    let agent = Arc::clone(agent);
    let spawned = std::thread::Builder::new()
        .name(name)
        .spawn(move || agent.page_ins().keep(&vm, &paging_in));
    spawned.map(drop).map_err(|error| {
        Failure::new(FailureCode::Internal, format!("no thread can be started: {error}"))
    })
}

/// A guest whose pages are kept here for the destination that runs it.
pub(super) struct Serving<'a> {
    pub(super) agent: &'a Arc<Agent>,
    pub(super) vm: &'a str,
    pub(super) to: &'a str,
    pub(super) peer: &'a Client,
    /// The destination's.
    pub(super) offered: Ownership,
    pub(super) runtime: &'a Handle,
    /// The limits that hold for its pages.
    pub(super) pace: MigrationPace,
    /// The VM, whatever has its name since.
    pub(super) uuid: Uuid,
}

impl Serving<'_> {
    /// Another session, asked for until there is one or none is needed.
    pub(super) fn again(&self, is_over: &dyn Fn() -> bool) -> Again {
        loop {
            if is_over() {
                return Again::Lost(Failure::new(
                    FailureCode::Cancelled,
                    "its pages are needed no more, or are gone",
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
                        tracing::warn!(vm = self.vm, %failure, "no session for page-in yet")
                    }
                },
                Ok(Err(ClientError::Refused(error))) if error.code == ErrorCode::NotFound => {
                    let decided = without_session(self.peer, self.vm, self.uuid, self.offered);
                    if let Some(decided) = self.runtime.block_on(decided) {
                        return decided;
                    }
                }
                Ok(Err(error)) => {
                    tracing::warn!(vm = self.vm, %error, "the destination gives no session for page-in yet");
                }
                Err(_) => {
                    tracing::debug!(vm = self.vm, to = self.to, "the destination does not answer")
                }
            }
            self.runtime.block_on(async { tokio::time::sleep(AGAIN_INTERVAL).await });
        }
    }

    fn open(&self, answer: &PageInAnswer) -> Result<Vec<SessionStream>, Failure> {
        let broken = || Failure::new(FailureCode::ProtocolBroken, "the destination's id is none");
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
        // Whatever has cut the session before, small segments pass.
        open_session(&connect, count, &Interrupt::default(), hello, Carries::PagesNarrowly)
    }
}

/// At the source, after a restart of its agent: goes on serving a guest that the destination `to` runs, in a task of its own, until it
/// needs nothing any more; then it is let go.
pub(crate) fn serve_again(agent: &Arc<Agent>, vm: &Arc<Vm>, to: String) {
    let (agent, vm) = (Arc::clone(agent), Arc::clone(vm));
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let peer = match agent.peer(&to) {
            Ok(peer) => peer,
            Err(error) => {
                return tracing::error!(vm = vm.name.as_str(), %error, "its pages can't be served");
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
                tracing::info!(vm = vm.name.as_str(), to, "the destination has all of its memory");
                if let Err(error) = runtime.block_on(agent.release(&vm, false)) {
                    tracing::error!(vm = vm.name.as_str(), %error, "the moved VM's remains could not be removed");
                }
            }
            // An operator has decided meanwhile.
            Err(_) if !agent.keeps_pages(&vm) => {}
            Err(failure) => {
                tracing::error!(vm = vm.name.as_str(), %failure, "its pages are kept, and nobody fetches them");
                runtime.block_on(agent.hold_in_doubt(&vm.name, &to));
                agent.settle_doubt(&vm.name);
            }
        }
    });
}
