//! Create, start, stop, delete.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, CreateVm, ErrorCode, StopVm, VmInfo};
use godwit_qemu::{Accel, AccelProbe, ResolvedSpec, Uuid, VmName, VmSpec};
use godwit_types::{Incarnation, Ownership};

use crate::agent::host::Fit;
use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Begun, Slot};
use crate::failure::{host_failed, spec_refused, task_failed};
use crate::references::References;
use crate::store::{Desired, Role, SavedVm};
use crate::vm::{Begin, Condition, LaunchSite, Operation, Vm};

/// How long a guest may take after the power button before QEMU is ended. A guest without ACPI ignores the button.
pub(super) const STOP_GRACE: Duration = Duration::from_secs(90);

/// The first generation of a VM's ownership.
const FIRST_EPOCH: u64 = 1;

impl Agent {
    /// Defines a VM, and starts it if asked; if that fails, nothing is left of it.
    pub async fn create(self: &Arc<Self>, request: CreateVm) -> Result<VmInfo, ApiError> {
        let agent = self.clone();
        whole(async move {
            let mut spec = agent.resolve(request.spec).await?;
            let rule = if request.vm_dirs_only { FileRule::VmDirs } else { FileRule::Operator };
            agent.check_fits(&spec, rule).await?.files.record_chains(&mut spec);
            let name = spec.name.clone();
            // A new life: what any host has recorded of an older VM of this name or uuid says nothing of it.
            let incarnation = Incarnation::new(Uuid::new_v4().as_u128());
            let ownership = Ownership { incarnation, epoch: FIRST_EPOCH };
            agent.insert_new(Slot::new(spec.clone(), ownership, Condition::Stopped))?;
            let made = async {
                agent.save(&spec, Role::Owner, Desired::Stopped, ownership).await?;
                if request.start { agent.start_now(&name).await } else { Ok(()) }
            };
            if let Err(error) = made.await {
                agent.undo_create(&name);
                return Err(error);
            }
            tracing::info!(vm = name.as_str(), "created");
            agent.vm_info(&name)
        })
        .await
    }

    /// Starts a stopped VM, or lets a paused one go on.
    pub async fn start(self: &Arc<Self>, name: &VmName) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.to_owned());
        whole(async move {
            agent.start_now(&name).await?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Stops a VM: by the power button and, after the grace, by ending QEMU; with `force` at once.
    pub async fn stop(
        self: &Arc<Self>,
        name: &VmName,
        request: StopVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.to_owned());
        whole(async move {
            agent.stop_now(&name, request).await?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Forgets a stopped VM and all that was kept for it; with `force` one in doubt too, whose guest may be nowhere else.
    pub async fn delete(self: &Arc<Self>, name: &VmName, force: bool) -> Result<(), ApiError> {
        let (agent, name) = (self.clone(), name.to_owned());
        whole(async move { agent.delete_now(&name, force).await }).await
    }

    /// Settles what a specification leaves open, for this host.
    pub async fn resolve(&self, spec: VmSpec) -> Result<ResolvedSpec, ApiError> {
        spec.validate().map_err(|error| spec_refused(&error))?;
        self.check_name(&VmName::new(spec.name.as_str()).map_err(|error| spec_refused(&error))?)?;
        let qemu = self.qemu(spec.qemu.as_deref()).await?;
        // The probe takes seconds where KVM hangs: nobody waits for it who has chosen already.
        let accel = match spec.accel {
            Accel::Auto => self.accel(&qemu.path).await,
            Accel::Kvm | Accel::Tcg => AccelProbe { kvm: false, reason: String::new() },
        };
        spec.resolve(&qemu, &accel).map_err(|error| spec_refused(&error))
    }

    /// Puts a VM into the table that is new on this host, by creation or arrival.
    ///
    /// # Errors
    /// [`ErrorCode::AlreadyExists`]: another VM here has its name or its uuid.
    pub(super) fn insert_new(&self, slot: Slot) -> Result<(), ApiError> {
        let mut table = self.table();
        self.check_uuid(&table, &slot.spec, slot.ownership)?;
        self.put(&mut table, slot)
    }

    /// Refuses a second VM of one uuid. Definitions of earlier versions may lack a uuid: these are not told apart by it.
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
            true => "the same VM by another name",
            false => "another VM, or another life of it",
        };
        let message = format!(
            "cannot take VM \"{name}\" on host {}: VM \"{known}\" there has the same uuid {uuid} and is {which}",
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
                free.insert(slot);
                Ok(())
            }
        }
    }

    /// Whether there is no VM of that name here.
    pub(super) fn check_name(&self, name: &VmName) -> Result<(), ApiError> {
        if let Some(known) = self.table().get(name) {
            return Err(self.taken(name, &known.condition));
        }
        // One that the agent's start has left alone may run, and its record says whose it is.
        match self.store.record_of(name) {
            None => Ok(()),
            Some(path) => {
                let message = format!(
                    "there is a record of a VM \"{name}\" on host {}: {}",
                    self.config.name,
                    path.display()
                );
                let remedy = "the agent's log says why it is left alone; fix that and restart the agent, or remove the record's directory to forget the VM";
                Err(ApiError::new(ErrorCode::AlreadyExists, message, remedy))
            }
        }
    }

    fn taken(&self, name: &str, known: &Condition) -> ApiError {
        if matches!(known, Condition::MigratingIn { .. } | Condition::Deleting) {
            // A shadow: nobody may be told to delete anything here.
            let message =
                format!("VM \"{name}\" is arriving at host {}, or being removed", self.config.name);
            return ApiError::new(ErrorCode::Busy, message, "wait a moment, then try again");
        }
        ApiError::new(
            ErrorCode::AlreadyExists,
            format!("there is a VM \"{name}\" on host {} already", self.config.name),
            known.mend_of_name(),
        )
    }

    async fn start_now(self: &Arc<Self>, name: &VmName) -> Result<(), ApiError> {
        let begun = self.begin(name, &Operation::Start)?;
        match self.run(&begun).await {
            Ok(vm) => {
                if let Some(slot) = self.table().get_mut(name) {
                    slot.ownership.epoch = vm.epoch();
                    slot.spec = Arc::new(vm.spec.clone());
                }
                self.settle(name, Condition::Running, Some(vm), None);
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
        if let Some(vm) = &begun.vm {
            self.refuse_holes(vm)?;
            // That it shall run comes first: a guest that runs is not shown as one that stands still.
            self.save(&begun.spec, Role::Owner, Desired::Running, ownership).await?;
            vm.resume().await?;
            return Ok(vm.clone());
        }
        self.refuse_second_process(&begun.spec.name, &begun.before)?;
        let vm = self.launch(&begun.spec, ownership, Begin::Boot).await?;
        if let Err(error) = self.save(&vm.spec, Role::Owner, Desired::Running, ownership).await {
            vm.process.quit().await;
            vm.files.remove_all();
            return Err(error);
        }
        self.watch(&vm);
        Ok(vm)
    }

    /// A guest whose memory is not whole runs where somebody brings what is missing, and nowhere else.
    fn refuse_holes(&self, vm: &Vm) -> Result<(), ApiError> {
        if self.page_ins.state(&vm.name).is_some() || !vm.files.missing().exists() {
            return Ok(());
        }
        let from = vm.files.host_of_missing().unwrap_or_default();
        let lacks = Condition::LacksPages { from };
        lacks.admit(&vm.name, &Operation::Start).map(drop)
    }

    /// A QEMU that this agent could not adopt may still run the guest: nothing of it is touched.
    fn refuse_second_process(&self, name: &VmName, before: &Condition) -> Result<(), ApiError> {
        match self.places.vm(name).living_process() {
            None => Ok(()),
            Some((pid, _)) => Err(ApiError::new(
                ErrorCode::WrongState,
                format!("VM \"{name}\" has a QEMU already, process {pid}, which does not answer"),
                before.end_of_silent(pid),
            )),
        }
    }

    /// Starts QEMU for a VM; nothing is left where that fails. The backing chains of its disks are
    /// recorded in [`Vm::spec`] where they were not before.
    pub(super) async fn launch(
        self: &Arc<Self>,
        spec: &ResolvedSpec,
        ownership: Ownership,
        begin: Begin,
    ) -> Result<Arc<Vm>, ApiError> {
        let Fit { files, bridges } = self.check_fits(spec, FileRule::of(begin)).await?;
        let mut spec = spec.clone();
        files.record_chains(&mut spec);
        let qemu = self.qemu_of(&spec, begin).await?;
        let site = LaunchSite {
            host: &self.config.name,
            places: &self.places,
            qemu: &qemu.path,
            tracker: &self.config.tracker(),
            bridges: &bridges,
            sandbox: self.config.qemu_sandbox,
        };
        Vm::launch(&site, &spec, files, ownership, begin).await.map(Arc::new)
    }

    async fn stop_now(&self, name: &VmName, request: StopVm) -> Result<(), ApiError> {
        let begun = self.begin(name, &Operation::Stop { force: request.force })?;
        // A stop ends no doubt: the other host may run the guest all the same.
        let doubt = begun.before.is_in_doubt();
        // What is not written down is not done: an agent that is started anew would show the VM as failed.
        let ready = async {
            self.note_stop(name, &begun).await?;
            if begun.vm.is_none() { self.end_stray(name).await } else { Ok(()) }
        };
        if let Err(error) = ready.await {
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        let mut killed = None;
        if let Some(vm) = &begun.vm {
            // Vcpus that stand still hear no button.
            let listens = begun.before == Condition::Running && !request.force;
            let grace = request.grace_ms.map_or(STOP_GRACE, Duration::from_millis);
            if !vm.end(listens.then_some(grace)).await && listens {
                let waited = grace.as_secs_f64();
                killed = Some(format!(
                    "it did not answer the power button within {waited} s; its QEMU was ended"
                ));
            }
            vm.files.remove_runtime();
            References::withdraw(vm);
        }
        if doubt {
            self.settle(name, Condition::InDoubt { keeps_pages_for: None }, None, begun.reason);
        } else {
            self.settle(name, Condition::Stopped, None, killed);
        }
        Ok(())
    }

    /// Writes down that a VM shall not run. Of one in doubt all else stays as it is.
    async fn note_stop(&self, name: &VmName, begun: &Begun) -> Result<(), ApiError> {
        if !begun.before.is_in_doubt() {
            return self.save(&begun.spec, Role::Owner, Desired::Stopped, begun.ownership).await;
        }
        let record = self.read_record(name)?.ok_or_else(|| self.no_vm(name))?;
        self.save_record(&SavedVm { desired: Desired::Stopped, ..record }).await
    }

    /// Ends a QEMU that could not be adopted.
    pub(super) async fn end_stray(&self, name: &VmName) -> Result<(), ApiError> {
        let files = self.places.vm(name);
        let Some((pid, start_time)) = files.living_process() else { return Ok(()) };
        tracing::warn!(vm = name.as_str(), pid, "a QEMU that does not answer is ended");
        godwit_qemu::end_process(pid, start_time).await.map_err(|error| {
            host_failed(&format!("QEMU of VM \"{name}\" (process {pid}) can't be ended"), &error)
        })?;
        files.remove_runtime();
        Ok(())
    }

    /// Removes a VM that could not be created whole. It has never left this host: no other one will ask for it.
    fn undo_create(self: &Arc<Self>, name: &VmName) {
        let begun = self.begin(name, &Operation::Delete { force: false });
        let begun = begun.and_then(|begun| {
            let alone = self.refuse_second_process(name, &begun.before);
            alone.inspect_err(|_| self.settle(name, begun.before, begun.vm, begun.reason))
        });
        if let Err(error) = begun {
            return tracing::error!(vm = name.as_str(), %error, "a VM that was not created is left over");
        }
        self.places.vm(name).remove_all();
        self.drop_record(name);
    }

    async fn delete_now(&self, name: &VmName, force: bool) -> Result<(), ApiError> {
        let mut begun = self.begin(name, &Operation::Delete { force })?;
        let gone = async {
            // What never was this host's has not been here. A host that asks for what was must be answered, or it may run an old copy.
            let record = self.read_record(name)?;
            let owned = record
                .is_some_and(|record| !matches!(record.role, Role::Shadow | Role::TakingOver));
            if owned {
                self.note_gone(&begun).await?;
            }
            match (&begun.vm, &begun.before) {
                // In doubt, and its operator gives up what is here.
                (Some(vm), _) => {
                    vm.process.kill().await;
                    References::withdraw(vm);
                }
                (None, Condition::InDoubt { .. }) => self.end_stray(name).await?,
                (None, _) => self.refuse_second_process(name, &begun.before)?,
            }
            Ok::<_, ApiError>(tokio::task::block_in_place(|| self.store.remove(name))?)
        };
        if let Err(error) = gone.await {
            begun.lose_what_ended();
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        self.places.vm(name).remove_all();
        self.references.drop_bases_of(name);
        self.table().remove(name);
        tracing::info!(vm = name.as_str(), "deleted");
        Ok(())
    }
}

/// Carries an operation out in a task of its own: it ends whole also when the one who asked has gone.
pub(super) async fn whole<T: Send + 'static>(
    operation: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::spawn(operation).await.map_err(|error| task_failed(&error))?
}
