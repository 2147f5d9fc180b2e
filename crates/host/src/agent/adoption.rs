//! Adoption of guests that run under another program's QEMU (libvirt's, or one with a QMP socket),
//! without a stop. docs/adopt.md is the walk-through.
//!
//! A new QEMU gets the same devices, with its memory where Godwit's engine can reach it. The other
//! QEMU migrates to it, through the agent: the stream ends with the agent. Who may run the guest:
//!
//! | step | may run | after a crash of the agent |
//! |---|---|---|
//! | note and record (`shadow`) saved, new QEMU started | other QEMU | undone |
//! | memory and device state sent | other QEMU, paused at the end | undone, and resumed there |
//! | record `taking-over` saved | other QEMU | undone, and resumed there |
//! | **`.unrun` removed: the commit point**, vCPUs started | new QEMU | Godwit's |
//! | record `owner` saved | new QEMU | Godwit's |
//! | other QEMU ended, note removed | new QEMU | – |
//!
//! Both QEMUs are processes of one host, so a loss of power ends both, and the guest boots from the
//! same disks on either side. QEMU's locks on images keep the two from writing at once. In an
//! adoption onto another host (`onto_host`) the new QEMU is there.

mod facts;
mod findings;
mod found;
mod live_export;
mod monitor;
mod note;
mod onto_host;
mod transfer;
mod virsh;

use std::path::Path;
use std::sync::Arc;

use godwit_api::{AdoptGuest, Adoption, ApiError, ErrorCode, ForeignGuest, ForeignPlace};
use godwit_qemu::{ForeignTap, ForeignVm, ResolvedSpec, Uuid, VmName, read_foreign};
use godwit_types::{Fault, Incarnation, Ownership, Phase};

use crate::adoptions::{Course, begun};
use crate::agent::lifecycle::FIRST_EPOCH;
use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Slot};
use crate::failure::{host_failed, spec_refused};
use crate::jobs::JobRequest;
use crate::libvirt;
use crate::state_stream::is_sound;
use crate::store::{Desired, OtherHost, Role, SavedVm};
use crate::vm::{Begin, Condition, Vm};

use facts::Facts;
use findings::refusal;
use found::ForeignProcess;
use monitor::Monitor;
use note::Note;
use transfer::Transfer;

/// Longest variables of a firmware that are read (`crate::firmware`).
const MOST_VARIABLES_BYTES: u64 = 640 << 10;

/// What is known of a guest before its adoption.
struct Candidate {
    process: ForeignProcess,
    /// Version of its QEMU.
    qemu_version: (u32, u32, u32),
    vm: Option<ForeignVm>,
    /// Its specification for this host, if nothing prevents the adoption.
    spec: Option<ResolvedSpec>,
    findings: Vec<Fault>,
    name: String,
    uuid: Option<Uuid>,
}

impl Agent {
    /// Lists the guests of the host's libvirt; none if there is no libvirt. Only reads.
    pub async fn foreign_guests(&self) -> Vec<ForeignGuest> {
        let domains = match libvirt::domains(&self.config.libvirt).await {
            Ok(domains) => domains,
            Err(error) => {
                tracing::debug!(%error, "no guests of libvirt are listed");
                return Vec::new();
            }
        };
        let mut guests = Vec::with_capacity(domains.len());
        for domain in domains {
            guests.push(self.describe_domain(domain).await);
        }
        guests
    }

    async fn describe_domain(&self, domain: libvirt::Domain) -> ForeignGuest {
        let mut guest = ForeignGuest {
            from: ForeignPlace::Libvirt(domain.name.clone()),
            name: domain.name.clone(),
            uuid: Some(domain.uuid),
            state: domain.state,
            pid: None,
            memory_bytes: None,
            vcpus: None,
            findings: Vec::new(),
        };
        let read = found::of_domain(&self.config.libvirt, &domain.name, domain.uuid)
            .and_then(|process| Ok((process.arguments()?, process)));
        let (arguments, process) = match read {
            Ok(read) => read,
            Err(fault) => {
                guest.findings.push(fault);
                return guest;
            }
        };
        guest.pid = Some(process.pid);
        match read_foreign(&arguments, &found::named_machine(&arguments), None) {
            Ok(mut vm) => {
                let bytes = vm.spec.memory.iter().map(|block| block.size.bytes());
                guest.memory_bytes = Some(bytes.fold(0, u64::saturating_add));
                guest.vcpus = Some(vm.spec.vcpus);
                guest.findings.extend(self.name_networks(&process, &mut vm).await);
            }
            Err(findings) => guest.findings.extend(findings),
        }
        guest
    }

    /// Checks whether a guest could be adopted now; changes nothing.
    pub async fn check_adoption(
        self: &Arc<Self>,
        request: &AdoptGuest,
    ) -> Result<ForeignGuest, ApiError> {
        let monitor = Monitor::open(&self.config.libvirt, &request.from, None).await?;
        let candidate = self.examine(request, &monitor).await?;
        Ok(candidate.shown(&request.from))
    }

    /// Begins an adoption, which goes on in a task of its own.
    pub fn adopt_guest(self: &Arc<Self>, request: AdoptGuest) -> Result<Adoption, ApiError> {
        let (agent, named) = (Arc::clone(self), request.clone());
        self.adoptions.begin(
            JobRequest::adoption(&named),
            |id| begun(id, &named),
            |course| async move {
                let ended = agent.run_adoption(&request, &course).await;
                match &ended {
                    Ok(()) => tracing::info!(from = %request.from, "adopted"),
                    Err(error) => tracing::warn!(from = %request.from, %error, "not adopted"),
                }
                ended
            },
        )
    }

    /// Adopts a guest: the steps of the table above.
    async fn run_adoption(
        self: &Arc<Self>,
        request: &AdoptGuest,
        course: &Course,
    ) -> Result<(), ApiError> {
        course.phase(Phase::Preflight);
        let monitor = Monitor::open(&self.config.libvirt, &request.from, None).await?;
        let candidate = self.examine(request, &monitor).await?;
        let spec = match candidate.spec.clone() {
            Some(spec) if candidate.findings.is_empty() => spec,
            _ => return Err(course.refused(&request.from, candidate.findings)),
        };
        course.of_vm(&spec);
        let process = &candidate.process;
        let _claim = self.claims.take(&spec.name, (process.pid, process.start_time))?;
        let note = Note::of(request, monitor.uuid(), process, &spec, new_ownership());
        self.check_notes(&note)?;
        if let Some(to) = &note.onto {
            return self.adopt_onto_host(&candidate, &spec, (&note, to), monitor, course).await;
        }
        course.phase(Phase::Prepare);
        let vm = self.prepare_adoption(&candidate, &spec, &note).await?;
        let transfer = Transfer { agent: self, monitor: &monitor, vm: &vm, course };
        let handed_over = transfer.run().await;
        if let Err(error) = handed_over {
            self.note_undone(&note);
            // The new QEMU goes first: it may hold locks on the disks.
            self.discard(&vm).await;
            if vm.process.exit().is_none() {
                tracing::error!(vm = vm.name.as_str(), "the new QEMU is not a shadow: ending it");
                vm.process.kill().await;
            }
            let undone = monitor.take_back().await;
            return Err(match undone {
                Ok(()) => {
                    self.drop_note(&note.vm);
                    error
                }
                Err(undo) => not_undone(&request.from, &error, &undo),
            });
        }
        course.phase(Phase::Announce);
        // Before the VM can move away or be deleted.
        let committed = self.commit_note(&note).await;
        self.promote(&vm).await;
        drop(monitor);
        let mut notes = self.finish_adoption(&note).await;
        if let Err(error) = committed {
            tracing::error!(vm = vm.name.as_str(), %error, "cannot note the end of an adoption");
            notes.push(format!("the end of the adoption could not be noted: {}", error.message));
        }
        course.notes(notes);
        Ok(())
    }

    /// Examines a guest: its process, what QEMU says of it, and whether this host can run it.
    async fn examine(
        self: &Arc<Self>,
        request: &AdoptGuest,
        monitor: &Monitor,
    ) -> Result<Candidate, ApiError> {
        let process = monitor.process().map_err(refusal)?;
        let facts = Facts::ask(monitor).await?;
        let mut candidate = Candidate {
            process,
            qemu_version: facts.version,
            vm: None,
            spec: None,
            findings: facts.findings.clone(),
            name: request.name.clone().unwrap_or_default(),
            uuid: None,
        };
        candidate.findings.extend(monitor.findings().await);
        let arguments = candidate.process.arguments().map_err(refusal)?;
        let mut vm = match read_foreign(&arguments, &facts.machine, request.name.as_deref()) {
            Ok(vm) => vm,
            Err(findings) => {
                candidate.findings.extend(findings);
                return Ok(candidate);
            }
        };
        candidate.findings.extend(facts.compare(&mut vm));
        candidate.findings.extend(self.name_networks(&candidate.process, &mut vm).await);
        candidate.name.clone_from(&vm.spec.name);
        candidate.uuid = vm.spec.uuid;
        candidate.vm = Some(vm.clone());
        match self.resolve_adopted(&candidate, &vm, &facts, request.to.as_deref()).await {
            Ok(spec) => candidate.spec = Some(spec),
            Err(error) => candidate.findings.push(Fault::from(error)),
        }
        Ok(candidate)
    }

    /// Resolves the specification, and checks that a QEMU of this host, or of the host `to`, can
    /// take the guest.
    async fn resolve_adopted(
        self: &Arc<Self>,
        candidate: &Candidate,
        vm: &ForeignVm,
        facts: &Facts,
        to: Option<&str>,
    ) -> Result<ResolvedSpec, ApiError> {
        let name = VmName::new(vm.spec.name.as_str()).map_err(|error| spec_refused(&error))?;
        self.check_name(&name)?;
        if to.is_none() {
            facts.check_versions(&self.qemu(None).await?)?;
        }
        if vm.spec.nics.iter().any(|nic| nic.network.is_empty()) {
            // Said already, NIC by NIC.
            let why = "a NIC has no network of this host";
            return Err(ApiError::new(ErrorCode::Preflight, why, "see the other findings"));
        }
        let mut spec = self.resolve_choices(vm.spec.clone()).await?;
        if !is_sound(&spec, facts.version) {
            let message = "its QEMU is older than 9.0 and runs it under TCG: it loses writes to \
                           the guest's memory while it migrates";
            let remedy = "stop the guest and use `godwit vm import` (docs/engines.md)";
            return Err(ApiError::new(ErrorCode::Preflight, message, remedy));
        }
        self.check_uuid(&self.table(), &spec, new_ownership())?;
        if let Some(to) = to {
            let files = self.open_files_of_running(&spec, FileRule::Operator)?;
            candidate.process.check_files(&spec, &files)?;
            self.check_conflicts(&spec, &files)?;
            // The other host accepts these backing files and no others.
            files.record_chains(&mut spec);
            drop(files);
            self.check_there(to, candidate, &spec).await?;
            return Ok(spec);
        }
        self.check_memory(&spec, 0)?;
        let fit = self.check_fits(&spec, FileRule::Operator).await?;
        candidate.process.check_files(&spec, &fit.files)?;
        self.check_conflicts(&spec, &fit.files)?;
        self.check_adopted_firmware(&spec, vm)?;
        Ok(spec)
    }

    /// Gives each NIC the network of the bridge that its tap is on. Returns what prevents that.
    async fn name_networks(&self, process: &ForeignProcess, vm: &mut ForeignVm) -> Vec<Fault> {
        let mut findings = Vec::new();
        for (nic, foreign) in vm.spec.nics.iter_mut().zip(&vm.nics) {
            let tap = match &foreign.tap {
                ForeignTap::Name(name) => process.has_tap(name).then(|| name.clone()),
                ForeignTap::Descriptor(number) => process.tap_of(*number),
            };
            let bridge = match &tap {
                Some(tap) => crate::network::bridge_of(tap).await.ok().flatten(),
                None => None,
            };
            let known = |bridge: &String| {
                let mut networks = self.config.networks.iter();
                networks.find(|(_, network)| network.bridge == *bridge).map(|(name, _)| name)
            };
            match bridge.as_ref().map(|bridge| (bridge, known(bridge))) {
                Some((_, Some(network))) => nic.network.clone_from(network),
                Some((bridge, None)) => findings.push(Fault::new(
                    "adoption-network",
                    format!(
                        "its NIC {} is on bridge {bridge}, which is no network of host {}",
                        foreign.id, self.config.name
                    ),
                    "add a network with that bridge to [networks] in the host's configuration",
                )),
                None => findings.push(Fault::new(
                    "adoption-network",
                    format!(
                        "its NIC {} is on no bridge of host {}, or its QEMU does not have the tap \
                         that it names",
                        foreign.id, self.config.name
                    ),
                    "put its tap on a bridge that is a network of the host",
                )),
            }
        }
        findings
    }

    /// Checks that this host's firmware has the sizes of the guest's, whose content QEMU sends.
    fn check_adopted_firmware(&self, spec: &ResolvedSpec, vm: &ForeignVm) -> Result<(), ApiError> {
        let (Some(theirs), Some(ours)) = (&vm.firmware, self.firmware_images(spec)?) else {
            return Ok(());
        };
        for (what, path, bytes) in [
            ("code", &theirs.code, ours.code_bytes),
            ("variables", &theirs.variables, ours.template_bytes),
        ] {
            let found = file_bytes(path).map_err(|error| {
                host_failed(&format!("cannot read firmware {}", path.display()), &error)
            })?;
            if found != bytes {
                let message = format!(
                    "the {what} of its firmware, {}, has {found} bytes, and that of host {} has \
                     {bytes}",
                    path.display(),
                    self.config.name
                );
                let remedy = "set [firmware] in the host's configuration to the build that the \
                              guest has";
                return Err(ApiError::new(ErrorCode::Preflight, message, remedy));
            }
        }
        Ok(())
    }

    /// Saves the note and the record of a shadow, and starts its QEMU. On failure, nothing remains.
    async fn prepare_adoption(
        self: &Arc<Self>,
        candidate: &Candidate,
        spec: &ResolvedSpec,
        note: &Note,
    ) -> Result<Arc<Vm>, ApiError> {
        let (name, ownership) = (spec.name.clone(), note.ownership);
        let arriving = || Condition::MigratingIn { from: note.from.to_string() };
        self.insert_new(Slot::new(spec.clone(), ownership, arriving()))?;
        let made = async {
            self.save_note(note)?;
            let other = OtherHost { name: note.from.to_string(), needs_pages: false, runs: true };
            let record = SavedVm::new(spec.clone(), Role::Shadow, Desired::Running, ownership);
            self.save_record(&record.with(other))?;
            self.save_adopted_variables(candidate, spec)?;
            let fit = self.check_fits(spec, FileRule::Operator).await?;
            candidate.process.check_files(spec, &fit.files)?;
            self.check_conflicts(spec, &fit.files)?;
            let vm = self.launch_fit(spec, ownership, Begin::Incoming, fit).await?;
            if let Err(error) = vm.files.note_unrun() {
                vm.process.kill().await;
                return Err(host_failed("cannot record that the guest has not run", &error));
            }
            Ok::<_, ApiError>(vm)
        };
        match made.await {
            Ok(vm) => {
                self.know_spec(&vm);
                let reason = format!("being adopted from {}, where it still runs", note.from);
                self.settle(&name, arriving(), Some(vm.clone()), Some(reason));
                self.watch(&vm);
                Ok(vm)
            }
            Err(error) => {
                self.places.vm(&name).remove_all();
                self.drop_record(&name);
                self.drop_note(&name);
                Err(error)
            }
        }
    }

    fn save_adopted_variables(
        &self,
        candidate: &Candidate,
        spec: &ResolvedSpec,
    ) -> Result<(), ApiError> {
        let firmware = candidate.vm.as_ref().and_then(|vm| vm.firmware.as_ref());
        let Some(firmware) = firmware else { return Ok(()) };
        let path = &firmware.variables;
        let content = candidate.process.read_open_file(path, MOST_VARIABLES_BYTES)?;
        Ok(tokio::task::block_in_place(|| self.store.save_variables(spec, &content))?)
    }
}

impl Candidate {
    fn shown(self, from: &ForeignPlace) -> ForeignGuest {
        let spec = self.vm.as_ref().map(|vm| &vm.spec);
        let bytes = |spec: &godwit_qemu::VmSpec| {
            spec.memory.iter().map(|block| block.size.bytes()).fold(0, u64::saturating_add)
        };
        ForeignGuest {
            from: from.clone(),
            name: self.name,
            uuid: self.uuid,
            state: "running".to_owned(),
            pid: Some(self.process.pid),
            memory_bytes: spec.map(bytes),
            vcpus: spec.map(|spec| spec.vcpus),
            findings: self.findings,
        }
    }
}

/// Returns the ownership of a VM that is new at Godwit.
fn new_ownership() -> Ownership {
    let incarnation = Incarnation::new(Uuid::new_v4().as_u128());
    Ownership { incarnation, epoch: FIRST_EPOCH }
}

fn file_bytes(path: &Path) -> std::io::Result<u64> {
    std::fs::metadata(path).map(|data| data.len())
}

/// Error of an adoption whose guest may be paused where it was.
fn not_undone(from: &ForeignPlace, error: &ApiError, undo: &ApiError) -> ApiError {
    let remedy = match from {
        ForeignPlace::Libvirt(name) => format!("`virsh resume {name}` runs it again"),
        ForeignPlace::Qmp(path) => {
            format!("run it again: `qm resume ID` on Proxmox VE, otherwise QMP `cont` on {path}")
        }
    };
    ApiError::new(
        ErrorCode::HypervisorFailed,
        format!("{}; {from} may be paused: {}", error.message, undo.message),
        remedy,
    )
}
