//! The destination: shadow VMs that other hosts request, and what became of them.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{
    ApiError, ErrorCode, IncomingAccepted, IncomingChecked, IncomingRequest, IncomingResume,
    OfferedContent,
};
use godwit_migration::Failure;
use godwit_migration::destination::Ending;
use godwit_migration::drive::page_in::PagingIn;
use godwit_migration::drive::{
    DestinationHypervisor, DestinationJob, Offer, WelcomedStream, receive,
};
use godwit_qemu::{Accelerator, PciFunction};
use godwit_ram::Region;
use godwit_types::{EngineKind, FailureCode, Ownership, ReferenceUse};
use godwit_wire::CONTROL_STREAM;

use super::qemu_destination::QemuDestination;
use super::qemu_engine;
use crate::agent::Agent;
use crate::block_devices::other_here;
use crate::disk_arrivals::DiskArrival;
use crate::doorman::{Doorman, Guard, fresh_id, listen};
use crate::failure::{host_failed, spec_refused};
use crate::incoming_migrations::{Entry, Orders};
use crate::vm::{Begin, Vm};

/// Time from the answer to a source's request to the hello on its lane.
const LANE_LIMIT: Duration = Duration::from_secs(30);
/// Longest time that a shadow is kept after a cut, whatever its source requests: its memory is
/// reserved meanwhile.
const MOST_CUT_LIMIT: Duration = Duration::from_secs(3600);

/// Opens a new lane for a source whose lane was cut.
pub(crate) fn resume(
    agent: &Arc<Agent>,
    id: &str,
    request: IncomingResume,
) -> Result<IncomingAccepted, ApiError> {
    let entry = agent.incoming().find(id)?;
    let over = || {
        let message = format!("migration {id} of VM \"{}\" has ended on this host", entry.vm);
        ApiError::new(ErrorCode::WrongState, message, "begin another migration")
    };
    if entry.is_over() || entry.ownership != request.offered() || entry.engine != EngineKind::Godwit
    {
        return Err(over());
    }
    let lane = fresh_id()?;
    let open = || {
        let listeners = listen(&agent.config().migration_addresses)?;
        let addresses: Result<Vec<_>, _> = listeners.iter().map(TcpListener::local_addr).collect();
        let addresses =
            addresses.map_err(|error| host_failed("cannot read the lane's address", &error))?;
        let guard =
            Guard { id: lane, from: entry.from.clone(), identity: agent.identity(), listeners };
        Ok::<_, ApiError>((Doorman::open(guard)?, addresses))
    };
    // Waits for the end of the previous doorman, if it was never used.
    let addresses = tokio::task::block_in_place(|| entry.resume.replace(open))?.ok_or_else(over)?;
    // This end may not have noticed the cut yet.
    if let Some(control) = entry.control.lock().take() {
        control.close();
    }
    let (id, contents) = (lane.to_string(), Vec::new());
    Ok(IncomingAccepted { id, addresses, references: None, contents })
}

/// Creates a shadow VM for a source and waits for its lane, on a thread of its own.
pub(crate) async fn prepare(
    agent: &Arc<Agent>,
    request: IncomingRequest,
) -> Result<IncomingAccepted, ApiError> {
    if let Some(accepted) = agent.incoming().repeated(&request)? {
        return Ok(accepted);
    }
    check(agent, &request).await?;
    let disks = tokio::task::block_in_place(|| agent.disks_of_arriving(&request))?;
    let listeners = if request.engine == EngineKind::Godwit || request.relayed {
        listen(&agent.config().migration_addresses)?
    } else {
        Vec::new()
    };
    let runs_by_itself = request.engine == EngineKind::Qemu && request.qemu.runs_by_itself();
    // Before the shadow exists, so that a cancellation finds it while it is being made.
    let (entry, orders) = agent.incoming().add(&request)?;
    let made = agent
        .prepare_incoming(
            request.spec.clone(),
            request.offered(),
            &request.from,
            runs_by_itself,
            request.firmware.clone(),
        )
        .await;
    let vm = made.inspect_err(|_| agent.incoming().remove(&entry))?;
    agent.probes().give_way(&vm.name);
    let begun = match request.engine {
        EngineKind::Godwit => {
            let from = request.from.clone();
            // A reference must be permitted by both hosts.
            let by =
                agent.config().references.by.min(request.references.unwrap_or(ReferenceUse::None));
            let cut_limit = Duration::from_millis(request.cut_limit_ms).min(MOST_CUT_LIMIT);
            // A source that repeats its request connects when the link is back.
            let waits = if request.attempt.is_some() { cut_limit } else { Duration::ZERO };
            let (pci, first_limit) = (request.pci, waits + LANE_LIMIT);
            let options =
                ArrivalOptions { listeners, from, by, first_limit, cut_limit, pci, disks };
            begin(agent, &vm, Arc::clone(&entry), orders, options).await
        }
        EngineKind::Qemu => {
            let way = match request.relayed {
                true => qemu_engine::Way::Agents(listeners),
                false => qemu_engine::Way::Direct(&request.qemu),
            };
            let entry = Arc::clone(&entry);
            qemu_engine::begin_incoming(agent, &vm, entry, orders.cancelled, way).await
        }
    };
    if let Err(error) = &begun {
        entry.refused(&Failure::new(FailureCode::HypervisorFailed, error.message.clone()));
        agent.discard(&vm).await;
    }
    begun
}

/// Checks whether a guest could arrive, without creating anything: everything that [`prepare`]
/// would refuse before QEMU starts. Returns the addresses on which it would listen.
pub(crate) async fn could_arrive(
    agent: &Arc<Agent>,
    request: &IncomingRequest,
) -> Result<IncomingChecked, ApiError> {
    check(agent, request).await?;
    let listeners = if request.engine == EngineKind::Godwit || request.relayed {
        listen(&agent.config().migration_addresses)?
    } else {
        Vec::new()
    };
    agent.check_incoming(&request.spec, request.offered()).await?;
    let addresses: Result<Vec<_>, _> =
        listeners.iter().map(|listener| Ok(listener.local_addr()?.ip())).collect();
    let addresses = addresses
        .map_err(|error: std::io::Error| host_failed("cannot read the lane's address", &error))?;
    Ok(IncomingChecked { addresses })
}

/// Checks what needs no resources. The shadow's start checks the resources that the VM needs.
async fn check(agent: &Arc<Agent>, request: &IncomingRequest) -> Result<(), ApiError> {
    let host = &agent.config().name;
    request.spec.validate().map_err(|error| spec_refused(&error))?;
    let qemu = agent.qemu_of(&request.spec, Begin::Incoming).await?;
    if request.spec.accel == Accelerator::Kvm
        && let Err(error) = std::fs::File::open("/dev/kvm")
    {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            format!("cannot accept a VM that uses KVM: host {host}: /dev/kvm: {error}"),
            "use a host with KVM",
        ));
    }
    if !qemu.machines.iter().any(|machine| machine.name == request.spec.machine) {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            format!(
                "cannot accept the VM: its machine type {} (QEMU {} on host {}) is unknown to QEMU \
                 {} on host {host}",
                request.spec.machine,
                request.qemu_version,
                request.from,
                qemu.version_text()
            ),
            "upgrade QEMU on the destination, or create the VM with a machine type that both \
             versions have",
        ));
    }
    agent.check_cpu(&request.spec, &qemu, &request.from).await?;
    check_devices(host, request)?;
    agent.check_incoming_firmware(&request.spec, &request.from, request.firmware.as_ref())?;
    if agent.config().migration_addresses.is_empty() {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            format!("cannot accept a VM: host {host} has no address for migrations"),
            "set migration_addresses in its configuration",
        ));
    }
    if request.relayed {
        return qemu_engine::check_relayed(host, request, &qemu);
    }
    if request.engine == EngineKind::Qemu && agent.identity().is_some() && !request.qemu.plaintext {
        let message = format!("cannot accept an unencrypted migration on host {host}");
        return Err(ApiError::new(
            ErrorCode::Preflight,
            message,
            "add --plaintext to the migration",
        ));
    }
    Ok(())
}

/// Checks that the block devices which the source has under these paths are not others here.
fn check_devices(host: &str, request: &IncomingRequest) -> Result<(), ApiError> {
    let Some(path) = other_here(request.spec.images(), &request.devices) else { return Ok(()) };
    let (path, from) = (path.display(), &request.from);
    let message = format!(
        "cannot accept the VM: {path} on host {host} is another block device than on host {from}"
    );
    let remedy = "move the disks with the VM (--with-disks), or give both hosts the same device";
    Err(ApiError::new(ErrorCode::Preflight, message, remedy))
}

async fn begin(
    agent: &Arc<Agent>,
    vm: &Arc<Vm>,
    entry: Arc<Entry>,
    orders: Orders,
    options: ArrivalOptions,
) -> Result<IncomingAccepted, ApiError> {
    let failed = |failure: &Failure| {
        ApiError::new(ErrorCode::HypervisorFailed, failure.detail.clone(), failure.code.remedy())
    };
    let is_all = options.by == ReferenceUse::All;
    let offer = if is_all { offer(agent, vm) } else { Offer::default() };
    let contents = offer.contents.iter().map(|content| OfferedContent {
        kind: content.kind(),
        read_bytes_per_s: content.read_bytes_per_s(),
    });
    let contents = contents.collect();
    let hypervisor = QemuDestination::new(
        Arc::clone(agent),
        Arc::clone(vm),
        options.from.clone(),
        is_all,
        options.pci,
        options.disks,
    )
    .await
    .map_err(|failure| failed(&failure))?;
    let addresses: Result<Vec<_>, _> =
        options.listeners.iter().map(TcpListener::local_addr).collect();
    let addresses =
        addresses.map_err(|error| host_failed("cannot read the lane's address", &error))?;
    let (id, references) = (entry.id.to_string(), Some(options.by));
    let accepted = IncomingAccepted { id, addresses, references, contents };
    entry.answered(&accepted);
    let guard = Guard {
        id: entry.id,
        from: options.from,
        identity: agent.identity(),
        listeners: options.listeners,
    };
    let (host, arriving) = (Arc::clone(agent), Arc::clone(vm));
    let arrival = Arrival {
        doorman: Doorman::open(guard)?,
        ownership: vm.ownership(),
        regions: vm.regions(),
        offer,
        orders,
        vm: Arc::clone(vm),
        entry: Arc::clone(&entry),
        first_limit: options.first_limit,
        cut_limit: options.cut_limit,
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
        .map_err(|error| host_failed("cannot start a thread", &error))?;
    Ok(accepted)
}

/// Returns what the source may refer to. The files were opened for the VM's start by the same rule.
fn offer(agent: &Arc<Agent>, vm: &Vm) -> Offer {
    tokio::task::block_in_place(|| {
        let images = agent.images_to_read(&vm.spec(), Begin::Incoming);
        agent.references().offer(vm, images)
    })
}

/// How a source's streams are accepted.
struct ArrivalOptions {
    listeners: Vec<TcpListener>,
    /// The source host.
    from: String,
    /// Permitted references.
    by: ReferenceUse,
    /// Time until the first hello.
    first_limit: Duration,
    /// Time for which the shadow is kept after a cut.
    cut_limit: Duration,
    /// Where the source's PCI devices are mapped.
    pci: Vec<PciFunction>,
    /// Disks that arrive with the VM.
    disks: Option<Arc<DiskArrival>>,
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
    first_limit: Duration,
    cut_limit: Duration,
}

impl Arrival {
    /// Receives the guest. Also returns its page-in, if it runs before all pages have arrived.
    fn serve(mut self, mut hypervisor: QemuDestination) -> (Ending, Option<Arc<PagingIn>>) {
        let mut limit = self.first_limit;
        let not_in_time = format!("the source did not connect within {} s", limit.as_secs());
        let mut why = Failure::new(FailureCode::LaneLost, not_in_time);
        loop {
            let control = match self.wait_for_control(limit, &why) {
                Ok(control) => control,
                Err(failure) => {
                    hypervisor.discard(&failure);
                    return (Ending::Discarded(failure), None);
                }
            };
            *self.entry.control.lock() = Some(control.stream().clone());
            let (ending, page_in) = self.receive(control, &mut hypervisor);
            let Ending::Cut(failure) = ending else { return (ending, page_in) };
            // Page-in is prepared again on the next lane.
            self.vm.files.remove_missing();
            if self.cut_limit.is_zero() {
                hypervisor.discard(&failure);
                return (Ending::Discarded(failure), None);
            }
            let vm = self.vm.name.as_str();
            tracing::warn!(vm, %failure, "link to the source cut: keeping what has arrived");
            (why, limit) = (failure, self.cut_limit + LANE_LIMIT);
        }
    }

    /// Receives over one lane.
    fn receive(
        &mut self,
        control: WelcomedStream,
        hypervisor: &mut QemuDestination,
    ) -> (Ending, Option<Arc<PagingIn>>) {
        let offer = std::mem::take(&mut self.offer);
        let Arrival { doorman, ownership, regions, orders, .. } = &*self;
        let accept = || doorman.let_in();
        let job = DestinationJob {
            control,
            accept: &accept,
            ownership: *ownership,
            regions: regions.clone(),
            offer,
            hypervisor,
        };
        receive(job, &orders.cancelled)
    }

    /// Waits for the control stream of the first lane, or of one in place of a lane that was cut.
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
