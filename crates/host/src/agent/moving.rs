//! The agent's part in a migration: the marks on the source's VM, the shadow at the destination,
//! and the guest's owner afterwards. The engines are in [`crate::migration`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode, MAX_STREAMS_A_LANE, MigrationAccepted, MigrationRequest};
use godwit_migration::{MOST_SWITCHOVER_BUDGET, millis};
use godwit_qemu::{ResolvedSpec, VmName};
use godwit_types::{
    Compression, DryRun, EngineKind, FailureCode, Fault, Outcome, Ownership, ReferenceUse, Report,
};

use crate::agent::ended::explain_shut_down;
use crate::agent::lifecycle::whole;
use crate::agent::recovery::keeps_pages;
use crate::agent::{Agent, Begun, Slot};
use crate::failure::spec_refused;
use crate::guest_trip::{GuestProber, GuestTarget};
use crate::hold::hold;
use crate::migration::{blank_report, serve_again};
use crate::migrations::MigrationControl;
use crate::network::attach_watcher;
use crate::references::References;
use crate::store::{Desired, OtherHost, Role, SavedVm};
use crate::vm::{Begin, Condition, Operation, Vm};

/// Longest downtime limit that QEMU accepts (`downtime-limit`).
const MOST_QEMU_BUDGET: Duration = Duration::from_secs(2000);
/// Time that a source is kept waiting for an arrived VM's record to be saved. It is shorter than
/// the source's own time limit for the answer.
const SAVE_LIMIT: Duration = Duration::from_secs(30);
/// Longest migration ID that a client may choose, in bytes.
const MAX_ID_BYTES: usize = 64;
/// Retry interval for saving a record whose write failed.
const SAVE_AGAIN: Duration = Duration::from_secs(1);

impl Agent {
    /// Begins a migration of a VM that runs here. It continues in its own task;
    /// [`Agent::migrations`] reports on it.
    pub fn migrate(
        self: &Arc<Self>,
        name: &VmName,
        request: MigrationRequest,
    ) -> Result<MigrationAccepted, ApiError> {
        self.check_request(&request)?;
        let id = match &request.id {
            Some(id) if self.migrations.begun(id, name, &request.to)? => {
                return Ok(MigrationAccepted { id: id.clone() });
            }
            Some(id) => id.clone(),
            None => self.migrations.fresh_id(),
        };
        self.check_whole(name)?;
        let vm = self.begin_migration(name, &id)?;
        let bytes = vm.spec.memory_bytes();
        self.probes.give_way(name);
        let pace = self.limits.migration(request.bandwidth_limit);
        let control = self.migrations.register(&id, name, &self.config.name, &request, bytes, pace);
        tokio::spawn(self.clone().carry_out(vm, request, control));
        Ok(MigrationAccepted { id })
    }

    /// Predicts a migration of a VM that runs here. Moves nothing and does not block a migration of
    /// the VM.
    ///
    /// # Errors
    /// The errors of [`Agent::migrate`]; a refusal that a migration would meet later is part of the
    /// result. Also [`ErrorCode::Busy`]: a migration of the VM has begun, or another dry run
    /// examines it.
    pub async fn dry_run(
        self: &Arc<Self>,
        name: &VmName,
        request: MigrationRequest,
    ) -> Result<DryRun, ApiError> {
        self.check_request(&request)?;
        if request.engine != EngineKind::Godwit {
            let message = "cannot predict a migration by QEMU's own engine";
            let remedy = "leave out engine: qemu";
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        }
        let (agent, name) = (self.clone(), name.to_owned());
        // It completes within seconds, even if the client disconnects.
        whole(async move { crate::migration::dry_run(&agent, &name, request).await }).await
    }

    /// Returns a VM whose migration could begin now. Changes nothing.
    pub(crate) fn could_migrate(&self, name: &VmName) -> Result<Arc<Vm>, ApiError> {
        let table = self.table();
        let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
        slot.condition.admit(name, &Operation::MigrateOut { migration: String::new() })?;
        self.check_whole(name)?;
        slot.vm.clone().ok_or_else(|| no_process(name))
    }

    /// Refuses to migrate a guest that lacks pages: no host has all of its memory.
    fn check_whole(&self, name: &VmName) -> Result<(), ApiError> {
        if self.page_ins.state(name).is_none() && !self.places.vm(name).missing().exists() {
            return Ok(());
        }
        let message = format!(
            "cannot migrate VM \"{name}\": some of its pages are still on the host it came from"
        );
        let remedy = "wait until they have arrived: `godwit vm show` shows how many are missing";
        Err(ApiError::new(ErrorCode::Busy, message, remedy))
    }

    /// Checks what is independent of the VM in a request.
    fn check_request(&self, request: &MigrationRequest) -> Result<(), ApiError> {
        check_budget(request)?;
        check_id(request.id.as_deref())?;
        if let Some(streams) = request.streams
            && !(1..=MAX_STREAMS_A_LANE).contains(&streams)
        {
            let message = format!("cannot use {streams} streams for each lane");
            let remedy = format!("give 1 to {MAX_STREAMS_A_LANE}");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        }
        if request.engine == EngineKind::Qemu && request.compression != Compression::default() {
            return Err(ApiError::new(
                ErrorCode::InvalidRequest,
                "only Godwit's own engine accepts compression",
                "leave it out; for QEMU's engine set qemu.compression with qemu.multifd_channels",
            ));
        }
        // A request for no references matches what QEMU's engine does anyway.
        if request.engine == EngineKind::Qemu && request.references == ReferenceUse::Own {
            return Err(ApiError::new(
                ErrorCode::InvalidRequest,
                "only Godwit's own engine accepts references",
                "leave them out",
            ));
        }
        self.peer(&request.to).map(drop)
    }

    async fn carry_out(
        self: Arc<Self>,
        vm: Arc<Vm>,
        request: MigrationRequest,
        control: MigrationControl,
    ) {
        let id = control.id.clone();
        let (engine_began, begun) = (control.engine_began(), Instant::now());
        tracing::info!(
            vm = vm.name.as_str(),
            migration = id,
            to = request.to,
            engine = ?request.engine,
            "migration begins"
        );
        vm.tracking.take().await;
        let asking = self.ask_guest(&vm, &control);
        let run =
            tokio::spawn(crate::migration::run(self.clone(), vm.clone(), request.clone(), control));
        let run = run.await;
        if let Some(asking) = asking {
            asking.end().await;
        }
        // After a panic of the migration's task, the engine's thread may still run; it serves the
        // pages itself.
        let engine_ended = run.is_ok();
        let report = match run {
            Ok(report) => report,
            Err(error) => {
                self.defect(&vm, &request, begun, &error, engine_began.load(Ordering::Relaxed))
            }
        };
        let report = explain_shut_down(&vm, report).await;
        match report.outcome {
            // The engine has released the VM.
            Outcome::Completed => {}
            Outcome::Failed | Outcome::Cancelled => {
                self.end_migration(&vm.name).await;
                let unnoticed =
                    [FailureCode::LaneLost, FailureCode::GuestShutDown].map(FailureCode::name);
                let unnoticed = report
                    .error
                    .as_ref()
                    .is_some_and(|error| unnoticed.contains(&error.code.as_str()));
                if unnoticed || report.outcome == Outcome::Cancelled {
                    // The destination may not know that the migration ended.
                    self.forget_at(&vm, request.to.clone());
                }
            }
            Outcome::InDoubt => {
                self.hold_in_doubt(&vm.name, &request.to).await;
                if engine_ended {
                    self.settle_doubt(&vm.name);
                }
            }
        }
        self.lanes_seen.carried(&report);
        // One line with the whole report, for searches in logs.
        let line = serde_json::to_string(&report).unwrap_or_default();
        tracing::info!(
            vm = vm.name.as_str(),
            migration = id,
            outcome = ?report.outcome,
            report = line,
            "migration ends"
        );
        self.migrations.finish(&id, report);
    }

    /// Measures the guest's response time until the result is dropped; `None` if the guest has no
    /// address to probe.
    fn ask_guest(&self, vm: &Vm, control: &MigrationControl) -> Option<GuestProber> {
        let mut nics = vm.spec.nics.iter();
        let (nic, asked) = nics.find_map(|nic| Some((nic.clone(), GuestTarget::by(nic)?)))?;
        let network = self.config.networks.get(&nic.network)?.clone();
        let (host, vm) = (self.config.name.clone(), vm.name.to_string());
        let tap = async move {
            let tap = attach_watcher(&host, &vm, &nic, &network).await;
            tap.inspect_err(
                |error| tracing::warn!(vm, %error, "response time of the guest not measured"),
            )
            .ok()
        };
        Some(asked.ask(tap, control.trips()))
    }

    /// Returns the report of a migration whose task panicked. If its engine had begun, the guest's
    /// owner is unknown.
    fn defect(
        &self,
        vm: &Vm,
        request: &MigrationRequest,
        begun: Instant,
        error: &tokio::task::JoinError,
        engine_began: bool,
    ) -> Report {
        let outcome = if engine_began { Outcome::InDoubt } else { Outcome::Failed };
        let error = Fault {
            code: ErrorCode::HostFailed.to_string(),
            message: format!("the engine failed: {error}"),
            remedy:
                "this is a defect; see the agent's log, and `godwit vm list` for the host that \
                     runs the guest"
                    .into(),
        };
        Report { error: Some(error), ..blank_report(self, vm, request, begun, outcome) }
    }

    /// Marks a running VM as migrating: from here on, start, stop, delete and other migrations are
    /// refused.
    pub fn begin_migration(&self, name: &str, migration: &str) -> Result<Arc<Vm>, ApiError> {
        let begun = self.begin(name, &Operation::MigrateOut { migration: migration.to_owned() })?;
        match begun.vm {
            Some(vm) => Ok(vm),
            None => {
                self.settle(&begun.spec.name, begun.before, None, begun.reason);
                Err(no_process(name))
            }
        }
    }

    /// Records that a shadow of the VM is about to be created at `to`. Must be called before
    /// requesting it.
    pub(crate) async fn note_migrating(&self, vm: &Vm, to: &str) -> Result<(), ApiError> {
        let record = SavedVm::new(vm.spec.clone(), Role::Owner, Desired::Running, vm.ownership());
        let other = OtherHost { name: to.to_owned(), needs_pages: false, runs: true };
        self.save_record(&record.with(other)).await
    }

    /// Records that the destination `to` may run the guest from here on. Must be called before the
    /// guest is stopped for the hand-over, and no earlier than needed: an agent that restarts after
    /// this and finds the guest paused does not resume it by itself. `needs_pages`: the guest will
    /// run there while some of its pages are here; `runs`: it is not paused.
    pub async fn mark_hand_over(
        &self,
        vm: &Vm,
        to: &str,
        needs_pages: bool,
        runs: bool,
    ) -> Result<(), ApiError> {
        hold("mark-hand-over");
        let record =
            SavedVm::new(vm.spec.clone(), Role::HandingOver, Desired::Running, vm.ownership());
        let other = OtherHost { name: to.to_owned(), needs_pages, runs };
        let marked = self.save_record(&record.with(other)).await;
        hold("hand-over-marked");
        marked
    }

    /// Removes the marks of a migration whose guest stays here; a guest that was offered gets a new
    /// epoch. The state of its vCPUs decides whether it runs or is paused. Has no effect on a VM
    /// that is not migrating (its process has ended meanwhile, or it has been released).
    pub async fn end_migration(self: &Arc<Self>, name: &VmName) {
        let ended = self.vm(name).ok().flatten().filter(|vm| vm.process.exit().is_some());
        if let Some(vm) = ended {
            return self.end_migration_of_ended(&vm).await;
        }
        let Ok(begun) = self.begin(name, &Operation::EndMigration) else {
            return;
        };
        hold("end-migration");
        let stale = self.record(name);
        // An unreadable record may belong to a guest that was offered: no epoch is used twice.
        let offered = stale.as_ref().is_none_or(|record| record.role == Role::HandingOver);
        let ownership = if offered { begun.ownership.taken_back() } else { begun.ownership };
        if let Some(vm) = &begun.vm {
            self.new_epoch(vm, ownership.epoch);
        }
        let record = SavedVm::new((*begun.spec).clone(), Role::Owner, Desired::Running, ownership);
        let saved = self.save_over(stale.as_ref(), &record).await;
        hold("migration-ended");
        let Some(vm) = &begun.vm else { return };
        if let Err(error) = saved {
            tracing::error!(
                vm = name.as_str(),
                %error,
                "cannot save the end of a hand-over; retrying"
            );
            tokio::spawn(self.clone().save_in_the_end(vm.clone(), stale));
        }
        if vm.process.exit().is_some() {
            // It ended while the migration owned the VM.
            self.process_ended(vm, vm.process.ended().await).await;
        } else if vm.is_running().await == Some(false) {
            self.vcpus_changed(vm, false);
        }
    }

    /// Keeps a VM paused whose guest may run at `to`, also across restarts of the agent, until the
    /// owner is known ([`Agent::settle_doubt`]). If the guest was not offered to that host, there
    /// is no doubt.
    pub async fn hold_in_doubt(self: &Arc<Self>, name: &VmName, to: &str) {
        let record = match self.read_record(name) {
            Ok(Some(record)) if record.role == Role::HandingOver => Some(record),
            Ok(_) => return self.end_migration(name).await,
            // Whether the guest was offered is unknown, so it must not run on a guess.
            Err(error) => {
                tracing::error!(vm = name.as_str(), %error, "cannot read the VM's record");
                None
            }
        };
        let Ok(begun) = self.begin(name, &Operation::HoldInDoubt) else {
            return;
        };
        let vm = begun.vm.filter(|vm| vm.process.exit().is_none());
        if let Some(vm) = &vm
            && let Err(error) = vm.process.qmp.stop().await
        {
            tracing::error!(
                vm = name.as_str(),
                %error,
                "cannot pause the guest, although host {to} may run it"
            );
        }
        // Pages that the guest lacks there are retained while this process lives.
        let keeps_pages_for = record
            .as_ref()
            .and_then(SavedVm::pages_kept_for)
            .filter(|_| vm.is_some())
            .map(str::to_owned);
        let reason = match &keeps_pages_for {
            None => format!(
                "host {to} may run it: the link or an agent was lost at the hand-over; querying \
                 host {to} until it answers"
            ),
            Some(to) => format!("host {to} may run it and lacks pages that only this host retains"),
        };
        self.settle(name, Condition::InDoubt { keeps_pages_for }, vm, Some(reason));
    }

    /// Continues to serve the pages that a VM in doubt retains for another host, until that host
    /// reports that it has no such VM.
    pub(super) fn serve_what_is_kept(self: &Arc<Self>, name: &VmName) {
        let kept = {
            let mut table = self.table();
            let Some(slot) = table.get_mut(name) else { return };
            let Condition::InDoubt { keeps_pages_for: Some(to) } = slot.condition.clone() else {
                return;
            };
            let Some(vm) = slot.vm.clone() else { return };
            slot.condition = Condition::KeepsPages { to: to.clone() };
            slot.reason = Some(keeps_pages(&to));
            (vm, to)
        };
        serve_again(self, &kept.0, kept.1);
    }

    /// At the destination: creates a shadow of a VM that `from` runs. It is shown as migrating in
    /// until [`Agent::promote`] or [`Agent::discard`] and admits no other operation. Its QEMU waits
    /// with `-incoming defer`. With `runs_by_itself`, QEMU runs the guest as soon as it has
    /// arrived. On failure, nothing remains.
    pub async fn prepare_incoming(
        self: &Arc<Self>,
        spec: ResolvedSpec,
        ownership: Ownership,
        from: &str,
        runs_by_itself: bool,
    ) -> Result<Arc<Vm>, ApiError> {
        let (agent, from) = (self.clone(), from.to_owned());
        let begin = if runs_by_itself { Begin::IncomingRuns } else { Begin::Incoming };
        whole(async move {
            hold("prepare-incoming");
            spec.validate().map_err(|error| spec_refused(&error))?;
            let name = spec.name.clone();
            agent.check_name(&name)?;
            let arriving = Condition::MigratingIn { from: from.clone() };
            agent.insert_new(Slot::new(spec.clone(), ownership, arriving))?;
            let made = async {
                // A QEMU that runs the guest by itself waits for no permission.
                let role = if runs_by_itself { Role::TakingOver } else { Role::Shadow };
                let other = OtherHost { name: from.clone(), needs_pages: false, runs: true };
                let record =
                    SavedVm::new(spec.clone(), role, Desired::Running, ownership).with(other);
                agent.save_record(&record).await?;
                let vm = agent.launch(&spec, ownership, begin).await?;
                if !runs_by_itself && let Err(error) = vm.files.note_unrun() {
                    // The note only saves queries later.
                    tracing::warn!(
                        vm = vm.name.as_str(),
                        %error,
                        "cannot record that the guest has not run"
                    );
                }
                Ok(vm)
            };
            match made.await {
                Ok(vm) => {
                    agent.know_spec(&vm);
                    agent.settle(&name, Condition::MigratingIn { from }, Some(vm.clone()), None);
                    agent.watch(&vm);
                    hold("incoming-prepared");
                    Ok(vm)
                }
                Err(error) => {
                    agent.drop_record(&name);
                    Err(error)
                }
            }
        })
        .await
    }

    /// At the destination, before the guest can run here: records that it may run from here on.
    /// Until then, whatever remains of it after a crash belongs to the source.
    pub(crate) async fn note_take_over(&self, vm: &Vm) -> Result<(), ApiError> {
        let shadow = self.record(&vm.name).filter(|record| record.ownership() == vm.ownership());
        match shadow {
            Some(record) => self.save_record(&SavedVm { role: Role::TakingOver, ..record }).await,
            None => Err(self.no_vm(&vm.name)),
        }
    }

    /// At the destination, once the guest runs here: turns the shadow into this host's VM, also on
    /// disk. If the write fails, the VM is promoted all the same, and the agent retries.
    pub async fn promote(self: &Arc<Self>, vm: &Arc<Vm>) {
        hold("promote");
        if let Err(error) = self.begin(&vm.name, &Operation::Promote) {
            return tracing::error!(
                vm = vm.name.as_str(),
                %error,
                "cannot promote an arrived guest: it is no longer a shadow"
            );
        }
        self.settle(&vm.name, Condition::Running, Some(vm.clone()), None);
        if vm.process.exit().is_some() {
            // While it was a shadow, its end was left to the migration.
            return self.process_ended(vm, vm.process.ended().await).await;
        }
        let stale = self.record(&vm.name);
        let is_paused = vm.is_running().await == Some(false);
        if is_paused {
            // It was paused at the source.
            self.vcpus_changed(vm, false);
        }
        let record = SavedVm::new(vm.spec.clone(), Role::Owner, Desired::Running, vm.ownership());
        if let Err(error) = self.save_over(stale.as_ref(), &record).await {
            tracing::error!(
                vm = vm.name.as_str(),
                %error,
                "cannot save the record of the arrived VM; retrying"
            );
            let saving = tokio::spawn(self.clone().save_in_the_end(vm.clone(), stale));
            // When this returns, the source is notified and removes its guest. A running guest
            // proves by itself that this host owns it. For a paused one, only the record does.
            if is_paused {
                let _ = saving.await;
            } else {
                let _ = tokio::time::timeout(SAVE_LIMIT, saving).await;
            }
        }
        hold("promoted");
    }

    /// Saves that this host owns a VM as soon as the disk accepts it, in place of the record
    /// `stale`. Ends when another operation has the VM, since that one saves its own outcome.
    pub(super) async fn save_in_the_end(self: Arc<Self>, vm: Arc<Vm>, stale: Option<SavedVm>) {
        let is_ours =
            |condition: &Condition| matches!(condition, Condition::Running | Condition::Paused);
        self.save_while(&vm, Role::Owner, stale, is_ours).await;
    }

    async fn save_while(
        &self,
        vm: &Arc<Vm>,
        role: Role,
        stale: Option<SavedVm>,
        is_meant: fn(&Condition) -> bool,
    ) {
        let mut every = tokio::time::interval(SAVE_AGAIN);
        let still_here = || {
            let table = self.table();
            table.get(&vm.name).is_some_and(|slot| {
                is_meant(&slot.condition)
                    && slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm))
            })
        };
        loop {
            every.tick().await;
            if !still_here() {
                return;
            }
            let record = SavedVm::new(vm.spec.clone(), role, Desired::Running, vm.ownership());
            if self.save_over(stale.as_ref(), &record).await.is_ok() {
                return tracing::info!(vm = vm.name.as_str(), "record of the VM saved");
            }
        }
    }

    /// At the destination, after QEMU's post-copy failed: the guest has begun to run here and
    /// cannot continue without the memory that is still at the source.
    pub async fn strand(self: &Arc<Self>, vm: &Arc<Vm>) {
        if self.begin(&vm.name, &Operation::HoldInDoubt).is_err() {
            return;
        }
        let reason = "its post-copy failed: its newest memory is here, the rest is at the source";
        let doubt = Condition::InDoubt { keeps_pages_for: None };
        self.settle(&vm.name, doubt, Some(vm.clone()), Some(reason.into()));
        if let Err(error) =
            self.save(&vm.spec, Role::Stranded, Desired::Running, vm.ownership()).await
        {
            tracing::error!(
                vm = vm.name.as_str(),
                %error,
                "cannot save that the VM is stranded; retrying"
            );
            let stale = self.record(&vm.name);
            // The source is notified when this returns.
            self.save_while(vm, Role::Stranded, stale, Condition::is_in_doubt).await;
        }
    }

    /// At the destination, after a failed migration: removes the shadow completely. Has no effect
    /// on a VM that is not a shadow.
    pub async fn discard(self: &Arc<Self>, vm: &Arc<Vm>) {
        if self.begin(&vm.name, &Operation::Discard).is_err() {
            return;
        }
        // A QEMU that a migration was entering may no longer respond, and has nothing to flush.
        vm.process.kill().await;
        References::withdraw(vm);
        self.remove_moved(vm, false).await;
    }

    /// Returns a function that reports whether guests are leaving or entering this host, for as
    /// long as the agent exists.
    pub(crate) fn moves_guests(self: &Arc<Self>) -> impl Fn() -> bool + Send + use<> {
        let agent = Arc::downgrade(self);
        let moves = |agent: &Arc<Agent>| {
            agent.migrations().under_way().is_some() || agent.incoming().under_way().is_some()
        };
        move || agent.upgrade().as_ref().is_some_and(moves)
    }

    /// At the destination: checks whether a VM could arrive here now, as far as possible without
    /// creating anything.
    ///
    /// # Errors
    /// The errors of [`Agent::prepare_incoming`].
    pub(crate) async fn check_incoming(
        self: &Arc<Self>,
        spec: &ResolvedSpec,
        ownership: Ownership,
    ) -> Result<(), ApiError> {
        spec.validate().map_err(|error| spec_refused(&error))?;
        self.check_name(&spec.name)?;
        self.check_uuid(&self.table(), spec, ownership)?;
        self.check_could_fit(spec).await
    }

    /// At the source, once the guest runs at the destination: ends QEMU and removes taps, sockets
    /// and the record. Frees the memory, unless `keep` is set and the memory may be retained for
    /// the guest's return.
    pub async fn release(self: &Arc<Self>, vm: &Arc<Vm>, keep: bool) -> Result<(), ApiError> {
        hold("release");
        let begun = self.begin(&vm.name, &Operation::Release)?;
        if let Err(error) = self.note_gone(&begun).await {
            self.keep_until_noted(&vm.name, begun, &error);
            return Err(error);
        }
        self.remove_moved(vm, keep).await;
        hold("released");
        Ok(())
    }

    /// Records that this host owned a VM, so that a host that asks later gets an answer. Must be
    /// called before anything of the VM is removed.
    pub(super) async fn note_gone(&self, begun: &Begun) -> Result<(), ApiError> {
        let record =
            SavedVm::new((*begun.spec).clone(), Role::Owner, Desired::Stopped, begun.ownership);
        Ok(tokio::task::block_in_place(|| self.store.note_gone(&record))?)
    }

    /// Retains this host's copy of a guest that another host runs, until its departure can be
    /// recorded. Its record stays as it is, and the other host is queried again.
    fn keep_until_noted(self: &Arc<Self>, name: &VmName, begun: Begun, error: &ApiError) {
        tracing::error!(
            vm = name.as_str(),
            %error,
            "cannot save that the VM is gone; keeping it, retrying"
        );
        let kept_for =
            self.record(name).and_then(|record| record.pages_kept_for().map(str::to_owned));
        let keeps_pages_for = kept_for.filter(|_| begun.vm.is_some());
        let reason = format!(
            "another host runs it; it stays here until that can be saved: {}",
            error.message
        );
        self.settle(name, Condition::InDoubt { keeps_pages_for }, begun.vm, Some(reason));
        let (agent, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(SAVE_AGAIN).await;
            agent.settle_doubt(&name);
        });
    }

    /// Removes the record of a VM of which nothing else is left, and its entry in the table. If the
    /// disk refuses, the name stays taken, and the agent retries.
    pub(super) fn drop_record(self: &Arc<Self>, name: &VmName) {
        let Err(error) = tokio::task::block_in_place(|| self.store.remove(name)) else {
            self.table().remove(name);
            return;
        };
        tracing::error!(vm = name.as_str(), %error, "cannot remove the VM's record; retrying");
        self.settle(
            name,
            Condition::Deleting,
            None,
            Some(format!("cannot remove its record: {error}")),
        );
        let (agent, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            let mut every = tokio::time::interval(SAVE_AGAIN);
            // No other operation begins meanwhile: this task owns the entry.
            loop {
                every.tick().await;
                if tokio::task::block_in_place(|| agent.store.remove(&name)).is_ok() {
                    agent.table().remove(&name);
                    return tracing::info!(vm = name.as_str(), "record of the VM removed");
                }
            }
        });
    }

    async fn remove_moved(self: &Arc<Self>, vm: &Arc<Vm>, keep: bool) {
        let (agent, vm) = (self.clone(), vm.clone());
        let removal = whole(async move {
            // The record goes first. A crash after this leaves a process without a record, which
            // the next agent ends. If the record stays, the next agent reaches the same result from
            // it.
            let removed = tokio::task::block_in_place(|| agent.store.remove(&vm.name));
            vm.yield_the_cpu();
            vm.process.quit().await;
            // A base takes the memory's place: the memory must not count twice.
            drop(vm.withdraws());
            if keep
                && agent.references.keep(
                    &vm.name,
                    &vm.regions,
                    vm.memory_taken_bytes(),
                    agent.moves_guests(),
                )
            {
                vm.files.remove_all();
            } else {
                vm.files.remove_all_and_free_later();
            }
            match removed {
                Ok(()) => drop(agent.table().remove(&vm.name)),
                Err(_) => agent.drop_record(&vm.name),
            }
            Ok(())
        });
        if let Err(error) = removal.await {
            tracing::error!(%error, "cannot remove a VM that has moved");
        }
    }
}

fn no_process(name: &str) -> ApiError {
    ApiError::new(ErrorCode::WrongState, format!("VM \"{name}\" has no process"), "start it first")
}

/// Checks a migration ID that a client chose: it appears in paths and logs.
fn check_id(id: Option<&str>) -> Result<(), ApiError> {
    let is_plain = |id: &str| {
        (1..=MAX_ID_BYTES).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    if id.is_none_or(is_plain) {
        return Ok(());
    }
    let remedy = format!("use letters, digits and -, at most {MAX_ID_BYTES}");
    Err(ApiError::new(ErrorCode::InvalidRequest, "that is not a valid migration id", remedy))
}

/// Checks that the engine can keep the switchover budget. Godwit's engine releases a guest that has
/// been stopped for ten seconds.
fn check_budget(request: &MigrationRequest) -> Result<(), ApiError> {
    let most = match request.engine {
        EngineKind::Godwit => MOST_SWITCHOVER_BUDGET,
        EngineKind::Qemu => MOST_QEMU_BUDGET,
    };
    let budget = request.switchover_budget_ms;
    if budget.is_finite() && budget > 0.0 && budget <= millis(most) {
        return Ok(());
    }
    let message = format!("cannot use a switchover budget of {budget} ms");
    let remedy = format!("use a time above zero and at most {} s, such as 20ms", most.as_secs());
    Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_must_be_one_that_the_engine_can_keep() {
        let check = |engine, switchover_budget_ms| {
            check_budget(&MigrationRequest {
                engine,
                switchover_budget_ms,
                ..MigrationRequest::to("b")
            })
        };
        for good in [0.5, 20.0, 8000.0] {
            check(EngineKind::Godwit, good).unwrap();
            check(EngineKind::Qemu, good).unwrap();
        }
        check(EngineKind::Qemu, 2e6).unwrap();
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 2e6 + 1.0] {
            check(EngineKind::Qemu, bad).unwrap_err();
        }
        let error = check(EngineKind::Godwit, 9000.0).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert!(error.message.contains("9000 ms") && error.remedy.contains("8 s"), "{error:?}");
    }
}
