//! Create, start, stop and delete of VMs.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, CreateVm, ErrorCode, StopVm, VmInfo};
use godwit_qemu::{Accel, AccelProbe, ResolvedSpec, Uuid, VmName, VmSpec};
use godwit_types::{Incarnation, Ownership};

use crate::agent::host::Fit;
use crate::agent::images::NewImages;
use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Begun, Slot};
use crate::failure::{file_unusable, host_failed, spec_refused};
use crate::references::References;
use crate::store::{Desired, Role, SavedVm};
use crate::vm::{Begin, Condition, LaunchSite, Operation, Vm};
use crate::whole::whole;

/// Time for a guest to shut down after the power button before its QEMU is ended. A guest without
/// ACPI ignores the button.
pub(super) const STOP_GRACE: Duration = Duration::from_secs(90);

/// First epoch of a VM's ownership.
pub(super) const FIRST_EPOCH: u64 = 1;

impl Agent {
    /// Defines a VM and, if requested, starts it. If that fails, nothing of the VM remains.
    pub async fn create(self: &Arc<Self>, request: CreateVm) -> Result<VmInfo, ApiError> {
        let agent = self.clone();
        whole(async move {
            let (mut request, mut made_disks) = (request, NewImages::default());
            agent.make_disks(&mut request, &mut made_disks).await?;
            let mut spec = agent.resolve(request.spec).await?;
            let rule = if request.vm_dirs_only { FileRule::VmDirs } else { FileRule::Operator };
            let files = agent.check_fits(&spec, rule).await?.files;
            files
                .check_raw(std::iter::repeat(true))
                .map_err(|error| file_unusable(&spec.name, &error))?;
            agent.check_pools(&spec.name, &files).await?;
            // A term of a VM that agents restart is claimed when it starts.
            if request.start && !spec.protect_by_agents {
                agent.check_term("start", &spec)?;
            }
            tokio::task::block_in_place(|| agent.check_own(&spec.to_vm_spec()))?;
            files.record_chains(&mut spec);
            let name = spec.name.clone();
            // A new incarnation: no host's record of an older VM of this name or UUID applies to
            // it.
            let incarnation = Incarnation::new(Uuid::new_v4().as_u128());
            let ownership = Ownership { incarnation, epoch: FIRST_EPOCH };
            // Nothing else begins before it is complete.
            agent.insert_new(Slot::new(spec.clone(), ownership, Condition::Changing))?;
            let made = tokio::task::block_in_place(|| {
                agent.check_conflicts(&spec, &files)?;
                agent.check_order_of_start(&spec)?;
                drop(files);
                agent.save(&spec, Role::Owner, Desired::Stopped, ownership)
            });
            agent.end_creation(&name, made)?;
            if request.start {
                made_disks = agent.start_created(&name, made_disks).await?;
            }
            made_disks.keep();
            tracing::info!(vm = name.as_str(), "created");
            agent.vm_info(&name)
        })
        .await
    }

    /// Starts a stopped VM, or resumes a paused one.
    pub async fn start(self: &Arc<Self>, name: &VmName) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.to_owned());
        whole(async move {
            agent.start_now(&name).await?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Stops a VM with the power button and, after the grace period, by ending QEMU; with `force`,
    /// ends QEMU at once.
    pub async fn stop(
        self: &Arc<Self>,
        name: &VmName,
        request: StopVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.to_owned());
        whole(async move {
            agent.stop_now(&name, request).await?;
            agent.note_own_stopped(&name).await;
            agent.vm_info(&name)
        })
        .await
    }

    /// Deletes a stopped VM and everything retained for it. With `force`, also a VM in doubt, whose
    /// guest may exist nowhere else.
    pub async fn delete(self: &Arc<Self>, name: &VmName, force: bool) -> Result<(), ApiError> {
        let (agent, name) = (self.clone(), name.to_owned());
        whole(async move { agent.delete_now(&name, force).await }).await
    }

    /// Resolves the open choices of a new VM's specification for this host.
    pub async fn resolve(&self, spec: VmSpec) -> Result<ResolvedSpec, ApiError> {
        self.check_name(&VmName::new(spec.name.as_str()).map_err(|error| spec_refused(&error))?)?;
        self.resolve_choices(spec).await
    }

    pub(super) async fn resolve_choices(&self, spec: VmSpec) -> Result<ResolvedSpec, ApiError> {
        spec.validate().map_err(|error| spec_refused(&error))?;
        let qemu = self.qemu(spec.qemu.as_deref()).await?;
        // The probe takes seconds if KVM hangs, so a request that names its accelerator skips it.
        let accel = match spec.accel {
            Accel::Auto => self.accel(&qemu.path).await,
            Accel::Kvm | Accel::Tcg => AccelProbe { kvm: false, reason: String::new() },
        };
        let spec = spec.resolve(&qemu, &accel).map_err(|error| spec_refused(&error))?;
        self.check_vcpus(&spec, &qemu).await?;
        Ok(spec)
    }

    /// Adds to the table a VM that is new on this host, by creation or arrival.
    ///
    /// # Errors
    /// [`ErrorCode::AlreadyExists`]: another VM here has its name or its UUID.
    pub(super) fn insert_new(&self, slot: Slot) -> Result<(), ApiError> {
        let mut table = self.table();
        self.check_uuid(&table, &slot.spec, slot.ownership)?;
        if !table.contains_key(&slot.spec.name) {
            // Nothing of an older VM of that name may become this one's.
            self.store.remove_leftovers(&slot.spec.name)?;
        }
        self.put(&mut table, slot)
    }

    /// Refuses a second VM of the same UUID. Definitions of earlier versions may lack a UUID and
    /// are not compared.
    pub(super) fn check_uuid(
        &self,
        table: &BTreeMap<VmName, Slot>,
        spec: &ResolvedSpec,
        ownership: Ownership,
    ) -> Result<(), ApiError> {
        let (uuid, name) = (spec.uuid, &spec.name);
        let has_it = |(known, slot): &(&VmName, &Slot)| slot.spec.uuid == uuid && *known != name;
        let Some((known, slot)) = table.iter().find(has_it).filter(|_| !uuid.is_nil()) else {
            return Ok(());
        };
        let which = match slot.ownership.incarnation == ownership.incarnation {
            true => "the same VM under another name",
            false => "another VM, or another incarnation of it",
        };
        let message = format!(
            "cannot accept VM \"{name}\" on host {}: VM \"{known}\" there has the same uuid {uuid} \
             and is {which}",
            self.config.name
        );
        let remedy = "delete one of the two, or create this one with another uuid";
        Err(ApiError::new(ErrorCode::AlreadyExists, message, remedy))
    }

    pub(super) fn insert(&self, slot: Slot) -> Result<(), ApiError> {
        self.put(&mut self.table(), slot)
    }

    fn put(&self, table: &mut BTreeMap<VmName, Slot>, slot: Slot) -> Result<(), ApiError> {
        let name = slot.spec.name.clone();
        match table.entry(name.clone()) {
            Entry::Occupied(known) => Err(self.taken(&name, &known.get().condition)),
            Entry::Vacant(free) => {
                let mut slot = slot;
                if slot.snapshots.is_empty() {
                    slot.snapshots = Arc::new(self.load_snapshots(&name));
                }
                if slot.crashes.is_none() {
                    slot.crashes = Some(self.known_crashes(&slot));
                }
                free.insert(slot);
                Ok(())
            }
        }
    }

    /// Checks that there is no VM of that name here.
    pub(super) fn check_name(&self, name: &VmName) -> Result<(), ApiError> {
        if let Some(known) = self.table().get(name) {
            return Err(self.taken(name, &known.condition));
        }
        // A VM that the agent left alone at its start may run; its record says who owns it.
        match self.store.record_of(name) {
            None => Ok(()),
            Some(path) => {
                let message = format!(
                    "a record of a VM \"{name}\" exists on host {}: {}",
                    self.config.name,
                    path.display()
                );
                let remedy = "see the agent's log for why the VM was left alone; fix that and \
                              restart the agent, or remove the record's directory to forget the VM";
                Err(ApiError::new(ErrorCode::AlreadyExists, message, remedy))
            }
        }
    }

    fn taken(&self, name: &str, known: &Condition) -> ApiError {
        if matches!(known, Condition::MigratingIn { .. } | Condition::Deleting) {
            // A shadow: no remedy may suggest deleting anything here.
            let message =
                format!("VM \"{name}\" is arriving at host {}, or being removed", self.config.name);
            return ApiError::new(ErrorCode::Busy, message, "wait a moment, then retry");
        }
        ApiError::new(
            ErrorCode::AlreadyExists,
            format!("VM \"{name}\" already exists on host {}", self.config.name),
            known.remedy_for_name(),
        )
    }

    pub(super) async fn start_now(self: &Arc<Self>, name: &VmName) -> Result<(), ApiError> {
        self.start_as(name, &Operation::Start).await
    }

    /// Starts a VM by one of the operations that do.
    pub(super) async fn start_as(
        self: &Arc<Self>,
        name: &VmName,
        operation: &Operation,
    ) -> Result<(), ApiError> {
        let begun = self.begin(name, operation)?;
        match self.run(&begun).await {
            Ok(vm) => {
                if let Some(slot) = self.table().get_mut(name) {
                    slot.ownership.epoch = vm.epoch();
                    slot.spec = vm.spec();
                }
                self.settle(name, Condition::Running, Some(vm.clone()), None);
                // One that has ended meanwhile, perhaps with the host's term, was in no condition
                // that could show it.
                if begun.before == Condition::Suspended || vm.process.exit().is_some() {
                    self.notice_process(&vm).await;
                }
                Ok(())
            }
            Err(error) => {
                self.settle(name, begun.before, begun.vm, begun.reason);
                Err(error)
            }
        }
    }

    async fn run(self: &Arc<Self>, begun: &Begun) -> Result<Arc<Vm>, ApiError> {
        let ownership = begun.ownership;
        self.ready_to_start(&begun.spec).await?;
        if let Some(vm) = &begun.vm {
            self.refuse_holes(vm)?;
            // The desired state is saved first: a running guest must not be shown as stopped after
            // a restart.
            self.save(&begun.spec, Role::Owner, Desired::Running, ownership)?;
            vm.resume().await?;
            return Ok(vm.clone());
        }
        self.refuse_second_process(&begun.spec.name, &begun.before)?;
        if begun.before == Condition::Suspended {
            return self.resume_saved(begun).await;
        }
        let vm = self.launch(&begun.spec, ownership, Begin::Boot).await?;
        if let Err(error) = self.save(&vm.spec(), Role::Owner, Desired::Running, ownership) {
            vm.process.quit().await;
            vm.files.remove_all();
            return Err(error);
        }
        self.watch(&vm);
        Ok(vm)
    }

    /// Refuses to start a guest whose memory is incomplete, unless page-in fetches the missing
    /// pages.
    fn refuse_holes(&self, vm: &Vm) -> Result<(), ApiError> {
        if self.page_ins.state(&vm.name).is_some() || !vm.files.missing().exists() {
            return Ok(());
        }
        let from = vm.files.host_of_missing().unwrap_or_default();
        let lacks = Condition::LacksPages { from };
        lacks.admit(&vm.name, &Operation::Start).map(drop)
    }

    /// Refuses to start a second QEMU. A QEMU that this agent could not adopt may still run the
    /// guest.
    pub(super) fn refuse_second_process(
        &self,
        name: &VmName,
        before: &Condition,
    ) -> Result<(), ApiError> {
        match self.places.vm(name).living_process() {
            None => Ok(()),
            Some((pid, _)) => Err(ApiError::new(
                ErrorCode::WrongState,
                format!("VM \"{name}\" already has a QEMU (process {pid}), which does not answer"),
                before.end_of_silent(pid),
            )),
        }
    }

    /// Starts QEMU for a VM; if that fails, nothing remains. Records in [`Vm::spec`] any backing
    /// chain of a disk that was not recorded before.
    pub(super) async fn launch(
        self: &Arc<Self>,
        spec: &ResolvedSpec,
        ownership: Ownership,
        begin: Begin,
    ) -> Result<Arc<Vm>, ApiError> {
        let fit = self.check_fits(spec, FileRule::of(begin)).await?;
        self.launch_fit(spec, ownership, begin, fit).await
    }

    /// Starts QEMU for a VM with the resources that were found for it.
    pub(super) async fn launch_fit(
        self: &Arc<Self>,
        spec: &ResolvedSpec,
        ownership: Ownership,
        begin: Begin,
        fit: Fit,
    ) -> Result<Arc<Vm>, ApiError> {
        let Fit { mut files, bridges } = fit;
        files.firmware = tokio::task::block_in_place(|| self.open_firmware(spec, begin))?;
        let mut spec = spec.clone();
        files.record_chains(&mut spec);
        let qemu = self.qemu_of(&spec, begin).await?;
        let starting = self.starting(&spec).await?;
        let site = LaunchSite {
            host: &self.config.name,
            places: &self.places,
            qemu: &qemu.path,
            tracker: &self.config.tracker(),
            bridges: &bridges,
            filters: &self.filters,
            sandbox: self.config.qemu_sandbox,
            tpm: self.tpm_site(&spec)?,
            starting: starting.as_ref(),
        };
        Vm::launch(&site, &spec, files, ownership, begin).await.map(Arc::new)
    }

    pub(super) async fn stop_now(&self, name: &VmName, request: StopVm) -> Result<(), ApiError> {
        let begun = self.begin(name, &Operation::Stop { force: request.force })?;
        // A stop does not end a doubt: the other host may still run the guest.
        let doubt = begun.before.is_in_doubt();
        // The stop is saved first. Otherwise a restarted agent would show the VM as failed.
        let ready = async {
            self.note_stop(name, &begun)?;
            if begun.vm.is_none() { self.end_stray(name).await } else { Ok(()) }
        };
        if let Err(error) = ready.await {
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        let mut killed = None;
        if let Some(vm) = &begun.vm {
            // A guest whose vCPUs are stopped does not notice the button.
            let listens = begun.before == Condition::Running && !request.force;
            let grace = request.grace_ms.map_or(STOP_GRACE, Duration::from_millis);
            if !vm.end(listens.then_some(grace)).await && listens {
                let waited = grace.as_secs_f64();
                killed = Some(format!(
                    "the guest did not react to the power button within {waited} s; its QEMU was \
                     ended"
                ));
            }
            vm.files.remove_runtime();
            References::withdraw(vm);
        }
        if begun.before == Condition::Suspended {
            self.saved_file(name).remove();
            self.store.forget_resumption(name);
        }
        if doubt {
            self.settle(name, Condition::InDoubt { keeps_pages_for: None }, None, begun.reason);
        } else {
            self.settle(name, Condition::Stopped, None, killed);
        }
        Ok(())
    }

    /// Saves that a VM shall not run. For a VM in doubt, changes nothing else in the record.
    fn note_stop(&self, name: &VmName, begun: &Begun) -> Result<(), ApiError> {
        if !begun.before.is_in_doubt() {
            return self.save(&begun.spec, Role::Owner, Desired::Stopped, begun.ownership);
        }
        let record = self.read_record(name)?.ok_or_else(|| self.no_vm(name))?;
        self.save_record(&SavedVm { desired: Desired::Stopped, ..record })
    }

    /// Ends a QEMU that could not be adopted.
    pub(super) async fn end_stray(&self, name: &VmName) -> Result<(), ApiError> {
        let files = self.places.vm(name);
        let Some((pid, start_time)) = files.living_process() else { return Ok(()) };
        tracing::warn!(vm = name.as_str(), pid, "ending a QEMU that does not answer");
        godwit_qemu::end_process(pid, start_time).await.map_err(|error| {
            host_failed(&format!("cannot end QEMU of VM \"{name}\" (process {pid})"), &error)
        })?;
        files.remove_runtime();
        Ok(())
    }

    /// Lets operations on a new VM begin, or removes it if it could not be made. Until then, its
    /// condition is that of a change.
    pub(super) fn end_creation(
        self: &Arc<Self>,
        name: &VmName,
        made: Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        if made.is_ok() {
            self.settle(name, Condition::Stopped, None, None);
        } else {
            self.settle(name, Condition::Deleting, None, None);
            self.forget_created(name);
        }
        made
    }

    /// Starts a new VM. If that fails, nothing of the VM remains, unless another operation on it
    /// has begun meanwhile: its images then stay, too.
    pub(super) async fn start_created(
        self: &Arc<Self>,
        name: &VmName,
        images: NewImages,
    ) -> Result<NewImages, ApiError> {
        let Err(error) = self.start_now(name).await else { return Ok(images) };
        let spec = self.table().get(name).map(|slot| slot.spec.clone());
        let begun = self.begin(name, &Operation::Delete { force: false });
        let begun = begun.and_then(|begun| {
            let alone = self.refuse_second_process(name, &begun.before);
            alone.inspect_err(|_| self.settle(name, begun.before, begun.vm, begun.reason))
        });
        match begun {
            Ok(()) => {
                if let Some(spec) = spec {
                    self.end_own_of_failed_creation(&spec).await;
                }
                self.forget_created(name);
            }
            Err(error) => {
                images.keep();
                let vm = name.as_str();
                tracing::error!(vm, %error, "cannot remove a VM whose first start failed");
            }
        }
        Err(error)
    }

    /// Removes a VM whose creation failed. It has never left this host, so no other host will ask
    /// about it.
    fn forget_created(self: &Arc<Self>, name: &VmName) {
        self.places.vm(name).remove_all();
        self.drop_record(name);
    }

    async fn delete_now(&self, name: &VmName, force: bool) -> Result<(), ApiError> {
        let begun = self.begin(name, &Operation::Delete { force })?;
        let gone = async {
            if !force {
                self.refuse_snapshots(name, "deleted")?;
            }
            self.end_own_before_deletion(&begun.spec, force).await?;
            // A shadow was never this host's VM and needs no note. A VM that this host owned needs
            // one: a host that asks later must get an answer, or it may run an old copy.
            let record = self.read_record(name)?;
            let owned = record
                .is_some_and(|record| !matches!(record.role, Role::Shadow | Role::TakingOver));
            if owned {
                self.note_gone(&begun)?;
            }
            match (&begun.vm, &begun.before) {
                // In doubt: the operator gives up this host's copy.
                (Some(vm), _) => {
                    vm.process.kill().await;
                    References::withdraw(vm);
                }
                (None, Condition::InDoubt { .. }) => self.end_stray(name).await?,
                (None, _) => self.refuse_second_process(name, &begun.before)?,
            }
            // swtpm writes beside the record.
            self.places.vm(name).end_tpm();
            Ok::<_, ApiError>(tokio::task::block_in_place(|| self.store.remove(name))?)
        };
        let gone = gone.await;
        self.end_deletion(name, begun, gone)?;
        tracing::info!(vm = name.as_str(), "deleted");
        Ok(())
    }

    /// Removes a VM from the table once its record is gone, or restores its entry on failure.
    pub(super) fn end_deletion(
        &self,
        name: &VmName,
        mut begun: Begun,
        gone: Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        if let Err(error) = gone {
            begun.lose_what_ended();
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        self.places.vm(name).remove_all();
        self.saved_file(name).remove();
        self.forget_snapshots(name);
        self.references.drop_bases_of(name);
        self.table().remove(name);
        Ok(())
    }
}
