//! Start of the agent: finds the VMs that earlier agents left, running or ended, and removes what
//! belongs to no VM.

mod lacking;

use std::sync::Arc;
use std::time::Duration;

use godwit_api::ApiError;
use godwit_migration::Failure;
use godwit_migration::handover::{Found as GuestFound, Recovery, recover};
use godwit_qemu::{VmGroups, VmName};
use godwit_ram::RamDir;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::agent::autostart::boot_id;
use crate::agent::kept_pages::serve_again;
use crate::agent::{Agent, Slot};
use crate::config::Config;
use crate::datastores::{Datastores, Pools, ThinPools};
use crate::failure::{host_failed, ram_failed};
use crate::ha::HaGuard;
use crate::ha::heartbeats::Heartbeats;
use crate::ha::own::OwnVms;
use crate::incoming_migrations::IncomingMigrations;
use crate::lanes_seen::LanesSeen;
use crate::limits::HostLimits;
use crate::load::NewestLoad;
use crate::migrations::Migrations;
use crate::network::filter::Filters;
use crate::peers::Peers;
use crate::probes::Probes;
use crate::protection::Protection;
use crate::qemu_users::QemuUsers;
use crate::references::References;
use crate::store::{Desired, Role, SavedVm, Store};
use crate::vm::{Condition, Places, Vm};

use lacking::cannot_fetch;

/// Retry interval for saving what was found, after a failed write.
const SAVE_AGAIN: Duration = Duration::from_secs(1);
/// First retry interval for a QEMU that waits for a missing page or does not respond.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Longest retry interval for a QEMU that does not respond.
const ASK_AGAIN_MOST: Duration = Duration::from_secs(10);

/// A VM that is being added to the table.
#[derive(Clone)]
struct Adoption {
    record: SavedVm,
    /// Result of resuming page-in, if it was already tried.
    taken_up: Option<Result<(), Failure>>,
    /// The VM's entry in the table, if it has one already while its QEMU is awaited.
    place: Option<Arc<()>>,
}

/// State of a VM's process since the last agent.
#[derive(Clone)]
enum Found {
    /// It runs.
    Answers(Arc<Vm>, Vcpus),
    /// It has ended.
    Gone,
    /// It runs but does not respond.
    Silent(String),
}

impl Found {
    /// Asks a VM's QEMU whether the guest runs.
    async fn of(vm: Arc<Vm>) -> Found {
        match vm.process.qmp.status().await.ok() {
            Some(state) => {
                let vcpus = Vcpus { run: state.is_running(), have_run: state.has_run() };
                Found::Answers(vm, vcpus)
            }
            // It may run the guest: nothing is ended or released on a guess.
            None => Found::Silent(format!(
                "its QEMU (process {}) does not report whether the guest runs",
                vm.process.pid
            )),
        }
    }
}

/// State of the vCPUs, as QEMU reports it.
#[derive(Clone, Copy)]
struct Vcpus {
    run: bool,
    /// The vCPUs run, or have run in this process, judging by the state that they are paused in.
    have_run: bool,
}

impl Agent {
    /// Opens an agent with the VMs of its predecessors.
    ///
    /// # Errors
    /// The configuration or the agent's state is unusable.
    pub async fn open(config: Config) -> Result<Arc<Agent>, ApiError> {
        let agent = Agent::guarding(config)?;
        agent.find_vms().await?;
        Ok(agent)
    }

    /// Opens an agent that guards this host's lease and does not know its VMs yet: with many QEMUs
    /// it takes longer than a lease to find them. [`Agent::find_vms`] has to follow.
    ///
    /// # Errors
    /// The configuration or the agent's state is unusable.
    pub(crate) fn guarding(config: Config) -> Result<Arc<Agent>, ApiError> {
        let users = Arc::new(QemuUsers::of(&config)?);
        let protect = |tls| Protection::load(tls, &config.state_dir);
        let protection = config.tls.as_ref().map(protect).transpose().map_err(|error| {
            let remedy = error
                .remedy_and("correct [tls] in the configuration; `godwit pki` makes certificates");
            ApiError::new(godwit_api::ErrorCode::InvalidRequest, error.to_string(), remedy)
        })?;
        let store = Store::open(&config.state_dir)?;
        let peers = Peers::open(&config, &store)?;
        let ram = RamDir::open(&config.ram_dir()).map_err(|error| ram_failed(&error))?;
        let groups = cgroups(&config);
        let places =
            Places { run_dir: config.run_dir.clone(), ram_dir: config.ram_dir(), users, groups };
        places.prepare().map_err(|error| host_failed("cannot prepare run_dir", &error))?;
        let limits = HostLimits::new(&config);
        let host_bytes = crate::memory::total_bytes()
            .map_err(|error| host_failed("cannot read /proc/meminfo", &error))?;
        let references =
            Arc::new(References::new(&config.references, host_bytes, &config.state_dir));
        let (state_dir, run_dir) = (&config.state_dir, &config.run_dir);
        let ha = Arc::new(HaGuard::open(state_dir, run_dir, boot_id()));
        let own = OwnVms::open(state_dir, run_dir, boot_id(), &config.name)
            .map_err(|error| host_failed("cannot open the guards of VMs", &error))?;
        let agent = Arc::new(Agent {
            config,
            store,
            peers,
            ram,
            places,
            slots: Mutex::default(),
            migrations: Migrations::default(),
            incoming: IncomingMigrations::default(),
            arrivals: Default::default(),
            page_ins: Arc::default(),
            probes: Probes::default(),
            limits,
            lanes_seen: LanesSeen::default(),
            datastores: Datastores::default(),
            real_paths: Default::default(),
            pools: Pools::default(),
            thin_pools: ThinPools::default(),
            heartbeats: Heartbeats::default(),
            load: NewestLoad::default(),
            ha,
            own,
            knows_vms: watch::Sender::new(false),
            protection,
            references,
            filters: Filters::default(),
            screens: Default::default(),
            claims: Default::default(),
            jobs: Default::default(),
            adoptions: Default::default(),
            qemus: tokio::sync::Mutex::default(),
            accels: tokio::sync::Mutex::default(),
            swtpm: tokio::sync::Mutex::default(),
            cpus: tokio::sync::Mutex::default(),
        });
        agent.begin_own()?;
        agent.begin_to_guard();
        Ok(agent)
    }

    /// Finds the VMs that earlier agents left, and begins what an agent does beside requests.
    ///
    /// # Errors
    /// The agent's state cannot be read, or `run_dir` cannot be cleaned.
    pub(crate) async fn find_vms(self: &Arc<Self>) -> Result<(), ApiError> {
        self.until_lost_vms_ended().await;
        self.until_lost_own_ended().await;
        self.filters.sweep().await;
        self.remove_staged();
        let adoptions = self.settle_adoptions();
        let exports = self.settle_live_exports().await;
        self.adopt_all().await?;
        self.find_disk_arrivals();
        tokio::task::block_in_place(|| self.learn_real_paths());
        self.end_adoptions(adoptions);
        self.end_live_exports(exports);
        self.resume_all_after_snapshots();
        self.restart_found();
        self.start_with_host();
        tokio::spawn(Agent::keep_filters(Arc::downgrade(self)));
        tokio::spawn(Agent::sample_load(Arc::downgrade(self)));
        tokio::spawn(Agent::watch_own(Arc::downgrade(self)));
        tokio::spawn(Agent::keep_disk_arrivals(Arc::downgrade(self)));
        tokio::spawn(Agent::watch_kept_disks(Arc::downgrade(self)));
        tokio::spawn(self.clone().end_left_helpers());
        self.knows_vms.send_replace(true);
        Ok(())
    }

    /// Waits until the VMs that earlier agents left are known.
    pub(crate) async fn until_vms_known(&self) {
        // The sender lives as long as the agent.
        let _ = self.knows_vms.subscribe().wait_for(|known| *known).await;
    }

    /// Ends the QEMUs that an earlier agent started for queries. One that hangs in the kernel does
    /// not delay the agent's start.
    async fn end_left_helpers(self: Arc<Self>) {
        if let Err(error) =
            godwit_qemu::end_left_helpers(|uid| self.places.users.include(uid)).await
        {
            tracing::warn!(
                %error,
                "cannot end QEMUs that an earlier agent queried: they take memory until they end"
            );
        }
    }

    async fn adopt_all(self: &Arc<Self>) -> Result<(), ApiError> {
        let (records, problems) = self.store.load_all()?;
        for problem in problems {
            tracing::error!(%problem, "VM left alone");
        }
        // Includes VMs whose record cannot be read: their processes are not touched.
        let known = self.store.names()?;
        for record in records {
            let name = record.spec.name.clone();
            if let Some((pid, _)) = self.places.vm(&name).living_process() {
                let_vcpus_go(&name, pid);
            }
            if record.desired != Desired::Suspended {
                // It runs, or was stopped since.
                self.store.forget_resumption(&name);
            }
            match self.lacking(&record) {
                Some(process) => self.resume_lacking(record, process).await?,
                None if record.desired == Desired::Suspended => {
                    if let Err(error) = self.adopt_suspended(record).await {
                        tracing::error!(vm = name.as_str(), %error, "VM left alone");
                    }
                }
                None if record.desired == Desired::Template => {
                    if let Err(error) = self.adopt_template(record) {
                        tracing::error!(vm = name.as_str(), %error, "VM left alone");
                    }
                }
                None => {
                    let found = self.find_continued(&record, None).await;
                    let adoption = Adoption { record, taken_up: None, place: None };
                    if let Err(error) = self.adopt(adoption, found).await {
                        // One VM must not block the others. Its files and its process are not
                        // touched.
                        tracing::error!(vm = name.as_str(), %error, "VM left alone");
                    }
                }
            }
        }
        godwit_qemu::remove_ended_vcpu_groups();
        self.remove_orphans(&known)
            .await
            .map_err(|error| host_failed("cannot clean run_dir", &error))
    }

    /// Lifts every throttle from vCPUs. Without an agent nothing else would lift them, and a
    /// running migration ends with this process.
    pub(crate) fn let_all_vcpus_go(&self) {
        let running = |slot: &Slot| Some((slot.spec.name.clone(), slot.vm.as_ref()?.process.pid));
        let running: Vec<_> = self.table().values().filter_map(running).collect();
        running.iter().for_each(|(name, pid)| let_vcpus_go(name, *pid));
    }

    /// Retries [`Agent::adopt`] until the disk accepts what must be saved.
    async fn adopt_with_retries(self: &Arc<Self>, name: &VmName, adoption: Adoption, found: Found) {
        let mut every = tokio::time::interval(SAVE_AGAIN);
        while self.has_place(&adoption) {
            every.tick().await;
            match self.adopt(adoption.clone(), found.clone()).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(vm = name.as_str(), %error, "cannot adopt the VM yet");
                }
            }
        }
        tracing::info!(
            vm = name.as_str(),
            "the VM was ended before its QEMU responded, or before that could be saved"
        );
    }

    /// Whether a VM may take its entry: an entry it already has must still be its own and still
    /// await its QEMU.
    fn has_place(&self, adoption: &Adoption) -> bool {
        let Some(place) = &adoption.place else { return true };
        let table = self.table();
        let slot = table.get(&adoption.record.spec.name);
        slot.is_some_and(|slot| Arc::ptr_eq(&slot.identity, place) && is_waited_for(slot))
    }

    /// Finds the process of a VM as [`Agent::find`] does, and undoes a suspension that was cut off.
    async fn find_continued(&self, record: &SavedVm, process: Option<(i32, u64)>) -> Found {
        let found = self.find(record, process).await;
        match &found {
            // QEMU serves one monitor at a time: this connection is kept.
            Found::Answers(vm, _) if self.undo_suspension(record, vm).await => {
                Found::of(vm.clone()).await
            }
            Found::Gone => {
                self.forget_suspension(record);
                found
            }
            _ => found,
        }
    }

    /// Finds the process of a VM. `process`: its PID and start time, if known; otherwise the VM's
    /// files identify it.
    async fn find(&self, record: &SavedVm, process: Option<(i32, u64)>) -> Found {
        let files = self.places.vm(&record.spec.name);
        match Vm::adopt(files, &record.spec, record.ownership(), process).await {
            Ok(None) => Found::Gone,
            Err(error) => Found::Silent(error.to_string()),
            Ok(Some(vm)) => Found::of(Arc::new(vm)).await,
        }
    }

    async fn adopt(self: &Arc<Self>, adoption: Adoption, found: Found) -> Result<(), ApiError> {
        match found {
            Found::Answers(vm, vcpus) => self.adopt_running(adoption, vm, vcpus).await,
            Found::Gone => self.adopt_ended(adoption),
            Found::Silent(why) => match adoption.taken_up {
                // The VM keeps its condition: it lacks pages.
                Some(Err(failure)) if adoption.record.role == Role::Owner => {
                    let vm = adoption.record.spec.name.as_str();
                    tracing::error!(vm, why, %failure, "cannot pause the guest");
                    Ok(())
                }
                _ => self.adopt_unknown(adoption, why).await,
            },
        }
    }

    fn adopt_ended(self: &Arc<Self>, adoption: Adoption) -> Result<(), ApiError> {
        self.check_place(&adoption)?;
        let Adoption { record, place, .. } = adoption;
        let name = record.spec.name.clone();
        let files = self.places.vm(&name);
        // The record names the image that counts.
        tokio::task::block_in_place(|| self.end_disk_move(&record.spec));
        let found = if files.is_unrun() { GuestFound::GoneUnrun } else { GuestFound::Gone };
        let recovery = recover(record.role, found);
        if recovery == Recovery::Discard {
            return self.remove_shadow(&name, place.as_ref());
        }
        let words =
            files.last_words().map_or(String::new(), |words| format!("; last log lines: {words}"));
        let doubt = match recovery {
            // Its process has ended, but the doubt remains: the other host may have run the guest
            // since.
            Recovery::AskDestination => Some(
                "its host or agent stopped during a hand-over; another host may run it, querying \
                 that host",
            ),
            Recovery::AskSource => Some(
                "its host stopped during a take-over; it may have run here, querying its source",
            ),
            _ if record.role == Role::Stranded => {
                Some("its post-copy failed, and its QEMU has ended since")
            }
            _ => None,
        };
        let migrating_to = of_owner(&record);
        let failed = record.desired == Desired::Running && doubt.is_none();
        let ownership = record.ownership();
        let mut slot = Slot::new(record.spec, ownership, Condition::Stopped);
        if let Some(doubt) = doubt {
            slot.condition = Condition::InDoubt { keeps_pages_for: None };
            slot.reason = Some(doubt.into());
        }
        if failed {
            slot.condition = Condition::Failed;
            // Another program may have, or get, the guest of a VM that was being given away.
            slot.ended_unseen = files.are_of_this_boot(&slot.spec)
                && !self.store.is_shared_with_other_program(&name);
            let process = files.read_pid();
            let lost = process.and_then(|(pid, since)| self.ha().cause_of_end(pid, since));
            slot.ended_unseen &= lost.is_none();
            slot.reason = Some(lost.unwrap_or_else(|| {
                format!("QEMU had ended when the agent started (did the host restart?){words}")
            }));
        }
        // No operation begins before the files are removed.
        let condition = std::mem::replace(&mut slot.condition, Condition::Stopping);
        let reason = slot.reason.clone();
        self.take_place(slot, place.as_ref())?;
        files.remove_runtime();
        self.settle(&name, condition, None, reason);
        self.settle_doubt(&name);
        if let Some(to) = migrating_to {
            self.undo_migration(&name, to);
        }
        Ok(())
    }

    fn check_place(&self, adoption: &Adoption) -> Result<(), ApiError> {
        if self.has_place(adoption) { Ok(()) } else { Err(self.no_vm(&adoption.record.spec.name)) }
    }

    /// Puts a VM into the table: into its own entry `place` if it has one, and never into
    /// another's.
    fn take_place(&self, slot: Slot, place: Option<&Arc<()>>) -> Result<(), ApiError> {
        let Some(place) = place else { return self.insert(slot) };
        let name = slot.spec.name.clone();
        match self.table().get_mut(&name) {
            Some(known) if Arc::ptr_eq(&known.identity, place) && is_waited_for(known) => {
                // These were read when it came into the table.
                let (snapshots, crashes) = (known.snapshots.clone(), known.crashes.clone());
                *known = Slot { snapshots, crashes, ..slot };
                Ok(())
            }
            _ => Err(self.no_vm(&name)),
        }
    }

    fn give_up_place(&self, name: &str, place: Option<&Arc<()>>) {
        let mut table = self.table();
        let ours = |slot: &Slot| place.is_some_and(|place| Arc::ptr_eq(&slot.identity, place));
        if table.get(name).is_some_and(ours) {
            table.remove(name);
        }
    }

    /// Adds a VM whose QEMU does not respond. What its record says of other hosts stays valid.
    async fn adopt_unknown(
        self: &Arc<Self>,
        adoption: Adoption,
        why: String,
    ) -> Result<(), ApiError> {
        let Adoption { record, place, .. } = adoption;
        if record.role == Role::Shadow {
            // No record ever said that it may run. So it has not run, and belongs to the source
            // alone.
            tracing::warn!(
                vm = record.spec.name.as_str(),
                why,
                "removing a shadow that does not respond"
            );
            self.end_stray(&record.spec.name).await?;
            return self.remove_shadow(&record.spec.name, place.as_ref());
        }
        let condition = match record.role {
            Role::Owner => Condition::Failed,
            Role::Shadow | Role::TakingOver | Role::HandingOver | Role::Stranded => {
                Condition::InDoubt { keeps_pages_for: record.pages_kept_for().map(str::to_owned) }
            }
        };
        let name = record.spec.name.clone();
        let mut slot = Slot::new(record.spec.clone(), record.ownership(), condition);
        slot.reason = Some(match self.places.vm(&name).living_process() {
            Some((pid, _)) => format!("{why}; {}", what_lives(pid)),
            None => why,
        });
        let place_of_it = Arc::clone(&slot.identity);
        self.take_place(slot, place.as_ref())?;
        self.settle_doubt(&name);
        let adoption = Adoption { record, taken_up: None, place: Some(place_of_it) };
        tokio::spawn(self.clone().find_again(adoption));
        Ok(())
    }

    /// Retries a QEMU that did not respond; it may have hung on a disk, or another program had its
    /// monitor. Ends when the process ends or another operation on the VM begins.
    async fn find_again(self: Arc<Self>, adoption: Adoption) {
        let name = adoption.record.spec.name.clone();
        let files = self.places.vm(&name);
        let Some(process) = files.living_process() else { return };
        let mut wait = ASK_AGAIN;
        loop {
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(ASK_AGAIN_MOST);
            let is_same = files.living_process() == Some(process)
                && self.record(&name).as_ref() == Some(&adoption.record);
            if !is_same || !self.has_place(&adoption) {
                return;
            }
            let found = self.find_continued(&adoption.record, Some(process)).await;
            let Found::Answers(vm, vcpus) = found else { continue };
            match self.adopt_running(adoption.clone(), vm, vcpus).await {
                Ok(()) => return tracing::info!(vm = name.as_str(), "QEMU responds again"),
                Err(error) => {
                    tracing::error!(vm = name.as_str(), %error, "cannot adopt the VM yet");
                }
            }
        }
    }

    /// Removes what is left of a guest that its source owns.
    fn remove_shadow(&self, name: &VmName, place: Option<&Arc<()>>) -> Result<(), ApiError> {
        // swtpm writes beside the record.
        self.places.vm(name).end_tpm();
        self.store.remove(name)?;
        self.places.vm(name).remove_all();
        self.give_up_place(name, place);
        Ok(())
    }

    async fn adopt_running(
        self: &Arc<Self>,
        adoption: Adoption,
        vm: Arc<Vm>,
        vcpus: Vcpus,
    ) -> Result<(), ApiError> {
        self.check_place(&adoption)?;
        let Adoption { mut record, taken_up, place } = adoption;
        let (name, as_found) = (record.spec.name.clone(), record.clone());
        // What its QEMU has, if an agent ended while it added something or moved a disk.
        let is_settled = self.settle_disks(&vm).await;
        record.spec = vm.spec().as_ref().clone();
        // A guest that was stopped for its hand-over has run before in any case.
        let ran = if record.role == Role::HandingOver { vcpus.run } else { vcpus.have_run };
        let recovery = recover(record.role, if ran { GuestFound::Ran } else { GuestFound::Still });
        let (mut saved, mut tpm_waits) = (Ok(()), false);
        match recovery {
            Recovery::TakeBack => {
                record.epoch = record.ownership().taken_back().epoch;
                vm.set_epoch(record.epoch);
                saved = self.save_as_own(&record, &as_found);
            }
            Recovery::TakeOver => {
                let synced = self.sync_arrived_tpm(&record.spec);
                tpm_waits = synced.is_err();
                saved = synced.and_then(|()| self.save_as_own(&record, &as_found));
            }
            // The source runs the guest, or waits for the notice that this host does not. The
            // source has its own copy: the notice that all pages are here is sent only for a guest
            // that is known to run here.
            Recovery::Discard | Recovery::AskSource => {
                tracing::warn!(
                    vm = name.as_str(),
                    "removing a shadow left from before the agent's start"
                );
                if recovery == Recovery::Discard {
                    self.note_never_ran(&as_found);
                }
                vm.process.kill().await;
                return self.remove_shadow(&name, place.as_ref());
            }
            Recovery::Keep if record != as_found => {
                saved = self.save_over(Some(&as_found), &record);
            }
            Recovery::Keep | Recovery::AskDestination => {}
        }
        if is_settled && saved.is_ok() {
            tokio::task::block_in_place(|| self.end_disk_move(&record.spec));
        }
        let (condition, reason) = as_recovered(recovery, &record, vcpus.run);
        let pid = vm.process.pid;
        tracing::info!(vm = name.as_str(), pid, state = %condition.state(), "adopted");
        // The VM must not appear startable meanwhile.
        let (condition, reason) = match &taken_up {
            Some(Err(failure)) if matches!(condition, Condition::Running | Condition::Paused) => {
                let from = vm.files.host_of_missing().unwrap_or_default();
                (Condition::LacksPages { from }, Some(cannot_fetch(failure)))
            }
            _ => (condition, reason),
        };
        let ownership = record.ownership();
        let mut slot = Slot::new(record.spec, ownership, condition);
        slot.reason = reason;
        slot.vm = Some(vm.clone());
        self.take_place(slot, place.as_ref())?;
        self.watch(&vm);
        self.renew_filters(&vm).await;
        if vm.files.missing().exists() {
            self.page_in_further(&vm, taken_up).await;
        }
        if let Err(error) = saved {
            // The guest runs: an agent that starts before this is saved finds the same state.
            tracing::error!(
                vm = name.as_str(),
                %error,
                "cannot save that this host owns the guest; retrying"
            );
            let saving = self.clone().save_in_the_end(Arc::clone(&vm), Some(as_found.clone()));
            let (agent, name) = (self.clone(), name.clone());
            tokio::spawn(async move {
                saving.await;
                if tpm_waits {
                    agent.page_ins.let_source_go(&name);
                }
            });
        }
        self.go_on(&vm, as_found, recovery, tpm_waits);
        // A disk may have delayed this since the state was read.
        if vcpus.run && place.is_some() && vm.is_running().await == Some(false) {
            self.vcpus_changed(&vm, false);
        }
        Ok(())
    }

    /// Saves that this host owns a guest, over the record of its recovery.
    fn save_as_own(&self, record: &SavedVm, as_found: &SavedVm) -> Result<(), ApiError> {
        let (spec, ownership) = (record.spec.clone(), record.ownership());
        let mine = SavedVm::new(spec, Role::Owner, Desired::Running, ownership);
        self.save_over(Some(as_found), &mine)
    }

    /// Continues what the last agent had in progress with other hosts, for an adopted VM. With
    /// `tpm_waits`, its source must keep the TPM's state.
    fn go_on(
        self: &Arc<Self>,
        vm: &Arc<Vm>,
        as_found: SavedVm,
        recovery: Recovery,
        tpm_waits: bool,
    ) {
        let name = &vm.name;
        if matches!(as_found.role, Role::Shadow | Role::TakingOver) && !tpm_waits {
            self.page_ins.let_source_go(name);
        }
        let keeps_pages_for =
            as_found.pages_kept_for().filter(|_| recovery == Recovery::AskDestination);
        if let Some(host) = keeps_pages_for {
            serve_again(self, vm, host.to_owned());
        }
        self.settle_doubt(name);
        let migrating_to = of_owner(&as_found);
        match (as_found.other, recovery) {
            // The other host may wait for a lane of an agent that has ended.
            (Some(other), Recovery::TakeBack) => self.forget_at(vm, other.name),
            _ => {
                if let Some(to) = migrating_to {
                    self.undo_migration(name, to);
                }
            }
        }
    }

    /// Ends processes and removes files without a record: an agent crashed after creating them and
    /// before recording them.
    async fn remove_orphans(&self, known: &[String]) -> std::io::Result<()> {
        for name in self.places.vm_names()? {
            if known.iter().any(|known| name == known.as_str()) {
                continue;
            }
            let files = self.places.vm(&name);
            if let Some((pid, start_time)) = files.living_process() {
                tracing::warn!(vm = name.as_str(), pid, "ending a QEMU without a record");
                match godwit_qemu::QemuProcess::adopt(files.dir.clone(), pid, start_time).await {
                    Ok(process) => process.quit().await,
                    Err(_) => godwit_qemu::end_process(pid, start_time).await?,
                }
            }
            files.remove_all();
        }
        for path in self.places.orphaned_memory(known)? {
            tracing::warn!(path = %path.display(), "removing guest memory without a VM");
            std::fs::remove_file(&path)?;
        }
        Ok(())
    }
}

/// Returns the parent cgroup of the VMs' cgroups, if this host has one.
fn cgroups(config: &Config) -> Option<VmGroups> {
    let root = config.vm_cgroup.clone().or_else(VmGroups::packaged)?;
    let opened = VmGroups::open(&root);
    opened
        .inspect_err(
            |error| tracing::warn!(%error, "VMs have no cgroups: address spaces are bounded"),
        )
        .ok()
}

/// Whether the VM's condition still depends on an answer of its QEMU.
fn is_waited_for(slot: &Slot) -> bool {
    let is_silent = slot.vm.is_none()
        && matches!(slot.condition, Condition::Failed | Condition::InDoubt { .. });
    slot.condition.is_being_adopted() || is_silent
}

/// Returns the destination of an interrupted migration, if this host owns the guest.
pub(super) fn of_owner(record: &SavedVm) -> Option<String> {
    let other = record.other.as_ref().filter(|_| record.role == Role::Owner);
    other.map(|other| other.name.clone())
}

/// Reason of a VM whose pages another host fetches.
pub(super) fn keeps_pages(to: &str) -> String {
    format!("host {to} may run it and fetches its pages from here")
}

/// Lifts the throttle that a migration left on a VM's vCPUs, if any.
fn let_vcpus_go(vm: &str, pid: i32) {
    match godwit_qemu::put_back_vcpus(pid) {
        Ok(false) => {}
        Ok(true) => tracing::info!(vm, pid, "throttle of the vCPUs lifted"),
        Err(error) => tracing::error!(vm, pid, %error, "cannot lift the throttle of the vCPUs"),
    }
}

/// Describes a QEMU that lives and does not respond, so that no operator ends a healthy guest
/// because of it.
fn what_lives(pid: i32) -> String {
    let mounts = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/mnt")).ok();
    let place = match (mounts("self"), mounts(&pid.to_string())) {
        (Some(own), Some(its)) if own != its => {
            ", in another mount namespace than this agent, which may not see its files: start the \
             agent in that namespace"
        }
        _ => "",
    };
    format!("its process {pid} lives{place}; its guest may run")
}

/// Returns the condition, and its reason, of a VM whose QEMU was found.
fn as_recovered(recovery: Recovery, record: &SavedVm, runs: bool) -> (Condition, Option<String>) {
    match (recovery, record.pages_kept_for()) {
        (Recovery::Keep, _) if record.role == Role::Stranded => {
            let reason =
                "its post-copy failed: its newest memory is here, the rest is at the source";
            (Condition::InDoubt { keeps_pages_for: None }, Some(reason.to_owned()))
        }
        (Recovery::AskDestination, Some(to)) => {
            (Condition::KeepsPages { to: to.to_owned() }, Some(keeps_pages(to)))
        }
        (Recovery::AskDestination, None) => {
            let to = record
                .other
                .as_ref()
                .map_or("another host".to_owned(), |other| format!("host {}", other.name));
            let reason = format!(
                "{to} may run it: the link or an agent was lost at the hand-over; querying {to} \
                 until it answers"
            );
            (Condition::InDoubt { keeps_pages_for: None }, Some(reason))
        }
        _ if runs => (Condition::Running, None),
        _ => (Condition::Paused, Some("it was paused when the agent started".to_owned())),
    }
}
