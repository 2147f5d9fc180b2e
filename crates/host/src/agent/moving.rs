//! The agent's part in a migration: the marks on the source's VM, the shadow at the destination,
//! and the guest's owner afterwards. The engines are in `migration`.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode, IncomingFirmware};
use godwit_qemu::{ResolvedSpec, VmName, is_rbd};
use godwit_types::{Ownership, ReferenceUse};

use crate::agent::kept_pages::serve_again;
use crate::agent::recovery::keeps_pages;
use crate::agent::snapshots::refuse_any;
use crate::agent::{Agent, Begun, Slot};
use crate::failure::spec_refused;
use crate::hold::hold;
use crate::references::{Departed, References};
use crate::store::{Desired, OtherHost, Role, SavedVm};
use crate::vm::{Begin, Condition, Operation, Vm};
use crate::whole::whole;

/// Time that a source is kept waiting for an arrived VM's record to be saved. It is shorter than
/// the source's own time limit for the answer.
const SAVE_LIMIT: Duration = Duration::from_secs(30);
/// Retry interval for saving a record whose write failed.
const SAVE_AGAIN: Duration = Duration::from_secs(1);

impl Agent {
    /// Returns a VM whose migration could begin now. Changes nothing.
    pub(crate) fn could_migrate(&self, name: &VmName) -> Result<Arc<Vm>, ApiError> {
        let table = self.table();
        let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
        slot.condition.admit(name, &Operation::MigrateOut { migration: String::new() })?;
        self.check_whole(name)?;
        refuse_any(name, &slot.snapshots, "migrated")?;
        Agent::refuse_own("migrate", &slot.spec)?;
        let vm = slot.vm.clone().ok_or_else(|| no_process(name))?;
        Agent::refuse_lost_tpm(&vm)?;
        Ok(vm)
    }

    /// Refuses to migrate a guest that lacks pages: no host has all of its memory.
    pub(crate) fn check_whole(&self, name: &VmName) -> Result<(), ApiError> {
        if self.page_ins.state(name).is_none() && !self.places.vm(name).missing().exists() {
            return Ok(());
        }
        let message = format!(
            "cannot migrate VM \"{name}\": some of its pages are still on the host it came from"
        );
        let remedy = "wait until they have arrived: `godwit vm show` shows how many are missing";
        Err(ApiError::new(ErrorCode::Busy, message, remedy))
    }

    /// Marks a running VM as migrating: from here on, start, stop, delete and other migrations are
    /// refused.
    pub fn begin_migration(&self, name: &str, migration: &str) -> Result<Arc<Vm>, ApiError> {
        let begun = self.begin(name, &Operation::MigrateOut { migration: migration.to_owned() })?;
        let able = match &begun.vm {
            Some(vm) => Agent::refuse_lost_tpm(vm)
                .and_then(|()| Agent::refuse_own("migrate", &begun.spec))
                .map(|()| vm.clone()),
            None => Err(no_process(name)),
        };
        able.inspect_err(|_| {
            self.settle(&begun.spec.name, begun.before, begun.vm, begun.reason);
        })
    }

    /// Records that a shadow of the VM is about to be created at `to`. Must be called before
    /// requesting it.
    pub(crate) fn note_migrating(&self, vm: &Vm, to: &str) -> Result<(), ApiError> {
        let record =
            SavedVm::new(vm.spec().as_ref().clone(), Role::Owner, Desired::Running, vm.ownership());
        let other = OtherHost { name: to.to_owned(), needs_pages: false, runs: true };
        self.save_record(&record.with(other))
    }

    /// Records that the destination `to` may run the guest from here on. Must be called before the
    /// guest is stopped for the hand-over, and no earlier than needed: an agent that restarts after
    /// this and finds the guest paused does not resume it by itself. `needs_pages`: the guest will
    /// run there while some of its pages are here; `runs`: it is not paused.
    pub fn mark_hand_over(
        &self,
        vm: &Vm,
        to: &str,
        needs_pages: bool,
        runs: bool,
    ) -> Result<(), ApiError> {
        hold("mark-hand-over");
        let record = SavedVm::new(
            vm.spec().as_ref().clone(),
            Role::HandingOver,
            Desired::Running,
            vm.ownership(),
        );
        let other = OtherHost { name: to.to_owned(), needs_pages, runs };
        let marked = self.save_record(&record.with(other));
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
        let saved = self.save_over(stale.as_ref(), &record);
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
        firmware: Option<IncomingFirmware>,
    ) -> Result<Arc<Vm>, ApiError> {
        let (agent, from) = (self.clone(), from.to_owned());
        let begin = if runs_by_itself { Begin::IncomingRuns } else { Begin::Incoming };
        whole(async move {
            hold("prepare-incoming");
            spec.validate().map_err(|error| spec_refused(&error))?;
            let name = spec.name.clone();
            agent.check_name(&name)?;
            Agent::refuse_own("accept", &spec)?;
            agent.check_term("accept", &spec)?;
            let arriving = Condition::MigratingIn { from: from.clone() };
            agent.insert_new(Slot::new(spec.clone(), ownership, arriving))?;
            let made = async {
                // A QEMU that runs the guest by itself waits for no permission.
                let role = if runs_by_itself { Role::TakingOver } else { Role::Shadow };
                let other = OtherHost { name: from.clone(), needs_pages: false, runs: true };
                let record =
                    SavedVm::new(spec.clone(), role, Desired::Running, ownership).with(other);
                agent.save_record(&record)?;
                agent.save_arriving_variables(&spec, firmware.as_ref())?;
                tokio::task::block_in_place(|| {
                    agent.refuse_claimed(&spec)?;
                    let disks: Vec<_> = spec.disks.iter().map(|disk| disk.path.as_path()).collect();
                    agent.refuse_left(&spec.name, spec.uuid, &disks)
                })?;
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
    ///
    /// # Errors
    /// It cannot be recorded; the VM is protected, and this host holds no term.
    pub(crate) fn note_take_over(&self, vm: &Vm) -> Result<(), ApiError> {
        self.check_term("accept", &vm.spec())?;
        let shadow = self.record(&vm.name).filter(|record| record.ownership() == vm.ownership());
        match shadow {
            Some(record) => self.save_record(&SavedVm { role: Role::TakingOver, ..record }),
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
        let synced = self.sync_arrived_tpm(&vm.spec());
        if vm.process.exit().is_some() {
            if let Err(error) = synced {
                self.sync_tpm_of_ended(vm, error).await;
            }
            // While it was a shadow, its end was left to the migration.
            return self.process_ended(vm, vm.process.ended().await).await;
        }
        let tpm_waits = synced.is_err();
        let stale = self.record(&vm.name);
        let is_paused = vm.is_running().await == Some(false);
        if is_paused {
            // It was paused at the source.
            self.vcpus_changed(vm, false);
        }
        let record =
            SavedVm::new(vm.spec().as_ref().clone(), Role::Owner, Desired::Running, vm.ownership());
        let saved = synced.and_then(|()| self.save_over(stale.as_ref(), &record));
        if let Err(error) = saved {
            tracing::error!(
                vm = vm.name.as_str(),
                %error,
                "cannot save the record of the arrived VM; retrying"
            );
            let saving = tokio::spawn(self.clone().save_in_the_end(vm.clone(), stale));
            // When this returns, the source is notified and removes its guest. A running guest
            // proves by itself that this host owns it. For a paused one, only the record does. A
            // TPM's state that is not on the disk yet is only at the source.
            if is_paused || tpm_waits {
                let _ = saving.await;
            } else {
                let _ = tokio::time::timeout(SAVE_LIMIT, saving).await;
            }
        }
        hold("promoted");
        Agent::greet_arrived_guest(vm);
    }

    /// Repeats for a while to bring the TPM's state of a guest that has ended to the disk.
    async fn sync_tpm_of_ended(&self, vm: &Vm, mut error: ApiError) {
        let until = tokio::time::Instant::now() + SAVE_LIMIT;
        while tokio::time::Instant::now() < until {
            tracing::error!(vm = vm.name.as_str(), %error, "retrying");
            tokio::time::sleep(SAVE_AGAIN).await;
            match self.sync_arrived_tpm(&vm.spec()) {
                Ok(()) => return,
                Err(again) => error = again,
            }
        }
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
            let record =
                SavedVm::new(vm.spec().as_ref().clone(), role, Desired::Running, vm.ownership());
            let synced = match role {
                Role::Owner => self.sync_arrived_tpm(&record.spec),
                _ => Ok(()),
            };
            if synced.and_then(|()| self.save_over(stale.as_ref(), &record)).is_ok() {
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
        if let Err(error) = self.save(&vm.spec(), Role::Stranded, Desired::Running, vm.ownership())
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
        // A QEMU that a migration was entering may no longer respond, and has nothing to flush. But
        // a pool of Ceph takes a killed client for alive during 30 s, and the source waits for it.
        match vm.spec().disks.iter().any(|disk| is_rbd(&disk.path)) {
            true => vm.process.quit().await,
            false => vm.process.kill().await,
        }
        References::withdraw(vm);
        self.remove_moved(vm, None).await;
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
    /// and the record. Frees the memory, or retains as much of `keep` as possible for the guest's
    /// return.
    pub async fn release(
        self: &Arc<Self>,
        vm: &Arc<Vm>,
        keep: Option<Departed>,
    ) -> Result<(), ApiError> {
        hold("release");
        let begun = self.begin(&vm.name, &Operation::Release)?;
        if let Err(error) = self.note_gone(&begun) {
            self.keep_until_noted(&vm.name, begun, &error);
            return Err(error);
        }
        self.remove_moved(vm, keep).await;
        hold("released");
        Ok(())
    }

    /// Records that this host owned a VM, so that a host that asks later gets an answer. Must be
    /// called before anything of the VM is removed.
    pub(super) fn note_gone(&self, begun: &Begun) -> Result<(), ApiError> {
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

    async fn remove_moved(self: &Arc<Self>, vm: &Arc<Vm>, keep: Option<Departed>) {
        let (agent, vm) = (self.clone(), vm.clone());
        let removal = whole(async move {
            // swtpm writes beside the record, and its guest runs elsewhere.
            if vm.spec().tpm {
                vm.files.end_tpm();
            }
            // The record goes first. A crash after this leaves a process without a record, which
            // the next agent ends. If the record stays, the next agent reaches the same result from
            // it.
            let removed = tokio::task::block_in_place(|| agent.store.remove(&vm.name));
            vm.yield_the_cpu();
            vm.process.quit().await;
            // A base takes the memory's place: the memory must not count twice.
            drop(vm.withdraws());
            let retain = |departed: Departed| {
                let returning_bytes = agent.displaced_bytes(&vm.spec());
                let moves_guests = agent.moves_guests();
                tokio::task::block_in_place(|| {
                    agent.references.keep(&vm.name, &departed, returning_bytes, moves_guests)
                })
            };
            if agent.config.references.by == ReferenceUse::All {
                let (host, spec) = (agent.clone(), vm.spec());
                let images = move || host.images_to_read(&spec, Begin::Boot);
                agent.references.index_images(images, agent.moves_guests());
            }
            if keep.is_some_and(retain) {
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
