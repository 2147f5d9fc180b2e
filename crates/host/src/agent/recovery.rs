//! The agent's start: finds the VMs again that earlier agents left, running or dead, and removes what belongs to
//! nobody.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use godwit_api::ApiError;
use godwit_migration::Failure;
use godwit_migration::handover::{Found as GuestFound, Recovery, recover};
use godwit_qemu::{VmGroups, VmName};
use godwit_ram::RamDir;

use crate::agent::{Agent, Slot};
use crate::config::Config;
use crate::datastores::Datastores;
use crate::failure::{host_failed, ram_failed};
use crate::lanes_seen::LanesSeen;
use crate::limits::HostLimits;
use crate::migration::{IncomingMigrations, PageIns, serve_again, take_up};
use crate::migrations::Migrations;
use crate::peers::Peers;
use crate::probe::Probes;
use crate::protection::Protection;
use crate::references::References;
use crate::store::{Desired, Role, SavedVm, Store};
use crate::user::QemuUsers;
use crate::vm::{Condition, Places, UnaskedVm, Vm};

/// How long a shadow's QEMU is asked whether its guest runs before pages are fetched for it: a guest that has not run is the source's,
/// which is to learn so by the shadow's end.
const SHADOW_LIMIT: Duration = Duration::from_secs(5);
/// Between two attempts to save what was found, on a disk that did not take it.
const SAVE_AGAIN: Duration = Duration::from_secs(1);
/// Between two attempts to speak to a QEMU that waits for a missing page, or says nothing.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// The longest such wait for one that has said nothing for long.
const ASK_AGAIN_MOST: Duration = Duration::from_secs(10);

/// A VM that is taken into the table.
#[derive(Clone)]
struct TakingIn {
    record: SavedVm,
    /// What came of page-in, where it was tried already.
    taken_up: Option<Result<(), Failure>>,
    /// Its place in the table, where it has one already, for as long as its QEMU is waited for.
    place: Option<Arc<()>>,
}

/// What became of a VM's process since the last agent.
#[derive(Clone)]
enum Found {
    /// It runs.
    Answers(Arc<Vm>, Vcpus),
    /// It has ended.
    Gone,
    /// It runs, and can't be spoken to.
    Silent(String),
}

/// What a QEMU says of its vCPUs.
#[derive(Clone, Copy)]
struct Vcpus {
    run: bool,
    /// They run, or have run in this process, by what it stands still for.
    have_run: bool,
}

impl Agent {
    /// An agent with the VMs of its predecessors.
    pub async fn open(config: Config) -> Result<Arc<Agent>, ApiError> {
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
        places.prepare().map_err(|error| host_failed("run_dir can't be prepared", &error))?;
        let limits = HostLimits::new(&config);
        let host_bytes = crate::memory::total_bytes()
            .map_err(|error| host_failed("/proc/meminfo can't be read", &error))?;
        let references = Arc::new(References::new(&config.references, host_bytes));
        let agent = Arc::new(Agent {
            config,
            store,
            peers,
            ram,
            places,
            slots: Mutex::default(),
            migrations: Migrations::default(),
            incoming: IncomingMigrations::default(),
            page_ins: PageIns::default(),
            probes: Probes::default(),
            limits,
            lanes_seen: LanesSeen::default(),
            datastores: Datastores::default(),
            protection,
            references,
            qemus: tokio::sync::Mutex::default(),
            accels: tokio::sync::Mutex::default(),
            cpus: tokio::sync::Mutex::default(),
        });
        agent.adopt_all().await?;
        tokio::spawn(agent.clone().end_left_helpers());
        Ok(agent)
    }

    /// Ends the QEMUs that an earlier agent asked something. One that hangs in the kernel keeps no VM from its agent.
    async fn end_left_helpers(self: Arc<Self>) {
        if let Err(error) =
            godwit_qemu::end_left_helpers(|uid| self.places.users.include(uid)).await
        {
            tracing::warn!(%error, "cannot end QEMUs that an earlier agent asked: they take memory until they end");
        }
    }

    async fn adopt_all(self: &Arc<Self>) -> Result<(), ApiError> {
        let (records, problems) = self.store.load_all()?;
        for problem in problems {
            tracing::error!(%problem, "a VM is left alone");
        }
        // Also those whose record can't be read: what runs of them is not touched.
        let known = self.store.names()?;
        for record in records {
            let name = record.spec.name.clone();
            if let Some((pid, _)) = self.places.vm(&name).living_process() {
                let_vcpus_go(&name, pid);
            }
            match self.lacking(&record) {
                Some(process) => self.take_in_lacking(record, process).await?,
                None => {
                    let found = self.find(&record, None).await;
                    let taking = TakingIn { record, taken_up: None, place: None };
                    if let Err(error) = self.take_in(taking, found).await {
                        // One VM keeps no other from being managed. What it has and runs is not touched.
                        tracing::error!(vm = name.as_str(), %error, "a VM is left alone");
                    }
                }
            }
        }
        godwit_qemu::remove_ended_vcpu_groups();
        self.remove_orphans(&known)
            .await
            .map_err(|error| host_failed("run_dir can't be cleaned", &error))
    }

    /// Nobody stays slowed without an agent that could let it go: what a migration under way took from processors they have back, as it ends
    /// with this process.
    pub(crate) fn let_all_vcpus_go(&self) {
        let running = |slot: &Slot| Some((slot.spec.name.clone(), slot.vm.as_ref()?.process.pid));
        let running: Vec<_> = self.table().values().filter_map(running).collect();
        running.iter().for_each(|(name, pid)| let_vcpus_go(name, *pid));
    }

    /// The process of a VM whose memory is not whole yet; none where it is, or can't be looked at.
    fn lacking(&self, record: &SavedVm) -> Option<UnaskedVm> {
        let files = self.places.vm(&record.spec.name);
        if !files.missing().exists() {
            return None;
        }
        let name = &record.spec.name;
        let process = UnaskedVm::find(files, &record.spec);
        process
            .inspect_err(
                |error| tracing::error!(vm = name.as_str(), %error, "its memory can't be opened"),
            )
            .ok()?
    }

    /// Takes page-in up before QEMU is asked anything: its main loop may itself wait for a page that is missing, and answers nobody
    /// until that has come. It is spoken to beside what this agent does meanwhile.
    async fn take_in_lacking(
        self: &Arc<Self>,
        record: SavedVm,
        process: UnaskedVm,
    ) -> Result<(), ApiError> {
        let is_shadow = matches!(record.role, Role::Shadow | Role::TakingOver);
        let condition = match is_shadow {
            true => {
                Condition::MigratingIn { from: process.files.host_of_missing().unwrap_or_default() }
            }
            false => Condition::Adopting,
        };
        let mut slot = Slot::new(record.spec.clone(), record.ownership(), condition);
        slot.reason = Some(format!(
            "its QEMU (process {}) has not answered this agent yet; pages of its memory are missing",
            process.pid
        ));
        let place = Some(Arc::clone(&slot.identity));
        self.insert(slot)?;
        let taken_up = if is_shadow { None } else { Some(take_up(self, &process, true).await) };
        if let Some(Err(failure)) = &taken_up {
            // Known now: QEMU may never answer while nobody brings what it waits for.
            let from = process.files.host_of_missing().unwrap_or_default();
            tracing::error!(vm = process.name.as_str(), %failure, "page-in can't go on");
            self.settle(
                &process.name,
                Condition::LacksPages { from },
                None,
                Some(cannot_fetch(failure)),
            );
        }
        tokio::spawn(self.clone().adopt_lacking(TakingIn { record, taken_up, place }, process));
        Ok(())
    }

    async fn adopt_lacking(self: Arc<Self>, mut taking: TakingIn, process: UnaskedVm) {
        let name = taking.record.spec.name.clone();
        let asked_of = taking.clone();
        let mut finding = std::pin::pin!(self.find_patiently(&asked_of, &process));
        let soon = match taking.taken_up {
            Some(_) => None,
            None => tokio::time::timeout(SHADOW_LIMIT, &mut finding).await.ok(),
        };
        let found = match soon {
            Some(found) => found,
            None => {
                if taking.taken_up.is_none() {
                    // The source keeps its copy all the same, until it is known that the guest runs here.
                    taking.taken_up = Some(take_up(&self, &process, false).await);
                }
                finding.await
            }
        };
        self.take_in_in_the_end(&name, taking, found).await;
    }

    /// As [`Agent::take_in`], as soon as the disk takes what is to be saved.
    async fn take_in_in_the_end(self: &Arc<Self>, name: &VmName, taking: TakingIn, found: Found) {
        let mut every = tokio::time::interval(SAVE_AGAIN);
        while self.has_place(&taking) {
            every.tick().await;
            match self.take_in(taking.clone(), found.clone()).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(vm = name.as_str(), %error, "it can't be taken in yet")
                }
            }
        }
        tracing::info!(
            vm = name.as_str(),
            "it was ended before its QEMU answered, or before that could be saved"
        );
    }

    /// As [`Agent::find`], for as long as pages come that QEMU may wait for.
    async fn find_patiently(&self, taking: &TakingIn, process: &UnaskedVm) -> Found {
        let name = &process.name;
        let mut every = tokio::time::interval(ASK_AGAIN);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let lacked = self.page_ins.state(name).is_some();
            match self.find(&taking.record, Some((process.pid, process.start_time))).await {
                // Also where pages have begun to come while it was asked, as for a shadow.
                Found::Silent(why)
                    if (lacked || self.page_ins.state(name).is_some())
                        && self.has_place(taking) =>
                {
                    tracing::warn!(
                        vm = name.as_str(),
                        why,
                        "its QEMU does not answer while pages are missing"
                    );
                }
                found => return found,
            }
        }
    }

    /// Whether what is taken in may have its place: one that it has already is its own, and nobody has ended it meanwhile.
    fn has_place(&self, taking: &TakingIn) -> bool {
        let Some(place) = &taking.place else { return true };
        let table = self.table();
        let slot = table.get(&taking.record.spec.name);
        slot.is_some_and(|slot| Arc::ptr_eq(&slot.identity, place) && is_waited_for(slot))
    }

    /// `process`: the one that is meant, where it is known; else the one that its files tell of.
    async fn find(&self, record: &SavedVm, process: Option<(i32, u64)>) -> Found {
        let files = self.places.vm(&record.spec.name);
        match Vm::adopt(files, &record.spec, record.ownership(), process).await {
            Ok(None) => Found::Gone,
            Err(error) => Found::Silent(error.to_string()),
            Ok(Some(vm)) => match vm.process.qmp.status().await.ok() {
                Some(state) => {
                    let vcpus = Vcpus { run: state.is_running(), have_run: state.has_run() };
                    Found::Answers(Arc::new(vm), vcpus)
                }
                // It may run the guest: nothing is ended or let go on a guess.
                None => Found::Silent(format!(
                    "its QEMU (process {}) does not say whether the guest runs",
                    vm.process.pid
                )),
            },
        }
    }

    async fn take_in(self: &Arc<Self>, taking: TakingIn, found: Found) -> Result<(), ApiError> {
        match found {
            Found::Answers(vm, vcpus) => self.take_in_running(taking, vm, vcpus).await,
            Found::Gone => self.take_in_ended(taking),
            Found::Silent(why) => match taking.taken_up {
                // It stays what it is: one that lacks pages.
                Some(Err(failure)) if taking.record.role == Role::Owner => {
                    tracing::error!(vm = taking.record.spec.name.as_str(), why, %failure, "it could not be paused");
                    Ok(())
                }
                _ => self.take_in_unknown(taking, why).await,
            },
        }
    }

    fn take_in_ended(self: &Arc<Self>, taking: TakingIn) -> Result<(), ApiError> {
        self.check_place(&taking)?;
        let TakingIn { record, place, .. } = taking;
        let name = record.spec.name.clone();
        let files = self.places.vm(&name);
        let found = if files.is_unrun() { GuestFound::GoneUnrun } else { GuestFound::Gone };
        let recovery = recover(record.role, found);
        if recovery == Recovery::Discard {
            return self.remove_shadow(&name, place.as_ref());
        }
        let words =
            files.last_words().map_or(String::new(), |words| format!("; its last words: {words}"));
        let doubt = match recovery {
            // Its process is gone, the doubt is not: the other host may have run the guest all the while.
            Recovery::AskDestination => Some(
                "it was being handed over when this host or its agent stopped; another host may run it, and is asked",
            ),
            Recovery::AskSource => Some(
                "it was being taken over when this host stopped: it may have run here; its source is asked",
            ),
            _ if record.role == Role::Stranded => {
                Some("its post-copy broke off, and its QEMU has ended since")
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
            slot.reason = Some(format!(
                "QEMU had ended when the agent started (did the host restart?){words}"
            ));
        }
        // Nobody begins anything with it before its files are gone.
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

    fn check_place(&self, taking: &TakingIn) -> Result<(), ApiError> {
        if self.has_place(taking) { Ok(()) } else { Err(self.no_vm(&taking.record.spec.name)) }
    }

    /// Puts a VM into the table: in its own `place`, where it has one, and nobody else's.
    fn take_place(&self, slot: Slot, place: Option<&Arc<()>>) -> Result<(), ApiError> {
        let Some(place) = place else { return self.insert(slot) };
        let name = slot.spec.name.clone();
        match self.table().get_mut(&name) {
            Some(known) if Arc::ptr_eq(&known.identity, place) && is_waited_for(known) => {
                *known = slot;
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

    /// A VM whose QEMU can't be spoken to. What the record says of other hosts stays true.
    async fn take_in_unknown(
        self: &Arc<Self>,
        taking: TakingIn,
        why: String,
    ) -> Result<(), ApiError> {
        let TakingIn { record, place, .. } = taking;
        if record.role == Role::Shadow {
            // That it may run was never written down: it has not, and is the source's alone.
            tracing::warn!(
                vm = record.spec.name.as_str(),
                why,
                "a shadow that does not answer is removed"
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
        let taking = TakingIn { record, taken_up: None, place: Some(place_of_it) };
        tokio::spawn(self.clone().find_again(taking));
        Ok(())
    }

    /// A QEMU that did not answer may answer later: it has hung on a disk, or another program had its monitor. Until then it is asked, as
    /// long as it lives and nobody has begun anything with the VM.
    async fn find_again(self: Arc<Self>, taking: TakingIn) {
        let name = taking.record.spec.name.clone();
        let files = self.places.vm(&name);
        let Some(process) = files.living_process() else { return };
        let mut wait = ASK_AGAIN;
        loop {
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(ASK_AGAIN_MOST);
            let is_same = files.living_process() == Some(process)
                && self.record(&name).as_ref() == Some(&taking.record);
            if !is_same || !self.has_place(&taking) {
                return;
            }
            let Found::Answers(vm, vcpus) = self.find(&taking.record, Some(process)).await else {
                continue;
            };
            match self.take_in_running(taking.clone(), vm, vcpus).await {
                Ok(()) => return tracing::info!(vm = name.as_str(), "its QEMU answers again"),
                Err(error) => {
                    tracing::error!(vm = name.as_str(), %error, "it can't be taken in yet")
                }
            }
        }
    }

    /// Removes what is left of a guest that is its source's.
    fn remove_shadow(&self, name: &VmName, place: Option<&Arc<()>>) -> Result<(), ApiError> {
        self.store.remove(name)?;
        self.places.vm(name).remove_all();
        self.give_up_place(name, place);
        Ok(())
    }

    async fn take_in_running(
        self: &Arc<Self>,
        taking: TakingIn,
        vm: Arc<Vm>,
        vcpus: Vcpus,
    ) -> Result<(), ApiError> {
        self.check_place(&taking)?;
        let TakingIn { mut record, taken_up, place } = taking;
        let (name, as_found) = (record.spec.name.clone(), record.clone());
        // One that was stopped for its hand-over has run before, of course.
        let ran = if record.role == Role::HandingOver { vcpus.run } else { vcpus.have_run };
        let recovery = recover(record.role, if ran { GuestFound::Ran } else { GuestFound::Still });
        let mut saved = Ok(());
        match recovery {
            Recovery::TakeOver | Recovery::TakeBack => {
                if recovery == Recovery::TakeBack {
                    record.epoch = record.ownership().taken_back().epoch;
                    vm.set_epoch(record.epoch);
                }
                let (spec, ownership) = (record.spec.clone(), record.ownership());
                let mine = SavedVm::new(spec, Role::Owner, Desired::Running, ownership);
                saved = self.save_over(Some(&as_found), &mine).await;
            }
            // Its source runs the guest, or waits to be told that this host does not. It has its copy: it is told that all pages are
            // here only of a guest that is known to run here.
            Recovery::Discard | Recovery::AskSource => {
                tracing::warn!(
                    vm = name.as_str(),
                    "a shadow is left from before the agent's start: it is removed"
                );
                vm.process.kill().await;
                return self.remove_shadow(&name, place.as_ref());
            }
            Recovery::Keep | Recovery::AskDestination => {}
        }
        let (condition, reason) = as_recovered(recovery, &record, vcpus.run);
        tracing::info!(vm = name.as_str(), pid = vm.process.pid, state = %condition.state(), "adopted");
        // Nobody sees it as one that could be started meanwhile.
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
        if vm.files.missing().exists() {
            self.page_in_further(&vm, taken_up).await;
        }
        if let Err(error) = saved {
            // It runs: an agent that is started before that is saved finds the same.
            tracing::error!(vm = name.as_str(), %error, "that it is this host's could not be saved; it is tried again");
            tokio::spawn(self.clone().save_in_the_end(Arc::clone(&vm), Some(as_found.clone())));
        }
        self.go_on(&vm, as_found, recovery);
        // A disk may have kept this waiting since it was asked.
        if vcpus.run && place.is_some() && vm.is_running().await == Some(false) {
            self.vcpus_changed(&vm, false);
        }
        Ok(())
    }

    /// Goes on with what the last agent had under way with other hosts, of a VM that is taken in.
    fn go_on(self: &Arc<Self>, vm: &Arc<Vm>, as_found: SavedVm, recovery: Recovery) {
        let name = &vm.name;
        if matches!(as_found.role, Role::Shadow | Role::TakingOver) {
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
            // It may wait for a lane of an agent that is no more.
            (Some(other), Recovery::TakeBack) => self.forget_at(vm, other.name),
            _ => {
                if let Some(to) = migrating_to {
                    self.undo_migration(name, to);
                }
            }
        }
    }

    /// A guest that lacks pages waits for this agent. One that nobody holds back from what is missing must not run on.
    async fn page_in_further(
        self: &Arc<Self>,
        vm: &Arc<Vm>,
        taken_up: Option<Result<(), Failure>>,
    ) {
        let taken_up = match taken_up {
            Some(taken_up) => taken_up,
            None => take_up(self, &vm.unasked(), true).await,
        };
        let Err(failure) = taken_up else { return };
        tracing::error!(vm = vm.name.as_str(), %failure, "pages of it are missing and can't be fetched: it is paused");
        let reason = cannot_fetch(&failure);
        let from = vm.files.host_of_missing().unwrap_or_default();
        let lacks = |slot: &mut Slot| {
            let ours = slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm));
            let free = ours
                && matches!(
                    slot.condition,
                    Condition::Running | Condition::Paused | Condition::LacksPages { .. }
                );
            if free {
                (slot.condition, slot.reason) = (Condition::LacksPages { from }, Some(reason));
            }
            free
        };
        // Whoever has begun to end it meanwhile goes on.
        if !self.table().get_mut(&vm.name).is_some_and(lacks) {
            return;
        }
        // A processor that waits for a page does not stop before it has it: nothing else has to wait for that.
        if let Err(error) = vm.process.qmp.stop().await {
            tracing::error!(vm = vm.name.as_str(), %error, "it could not be paused");
        }
    }

    /// Ends processes and removes files that no record speaks of: an agent crashed between making them and saying so.
    async fn remove_orphans(&self, known: &[String]) -> std::io::Result<()> {
        for name in self.places.vm_names()? {
            if known.iter().any(|known| name == known.as_str()) {
                continue;
            }
            let files = self.places.vm(&name);
            if let Some((pid, start_time)) = files.living_process() {
                tracing::warn!(vm = name.as_str(), pid, "a QEMU without a record is ended");
                match godwit_qemu::QemuProcess::adopt(files.dir.clone(), pid, start_time).await {
                    Ok(process) => process.quit().await,
                    Err(_) => godwit_qemu::end_process(pid, start_time).await?,
                }
            }
            files.remove_all();
        }
        for path in self.places.orphaned_memory(known)? {
            tracing::warn!(path = %path.display(), "guest memory without a VM is removed");
            std::fs::remove_file(&path)?;
        }
        Ok(())
    }
}

/// The cgroup for those of VMs, where this host has one.
fn cgroups(config: &Config) -> Option<VmGroups> {
    let root = config.vm_cgroup.clone().or_else(VmGroups::packaged)?;
    let opened = VmGroups::open(&root);
    opened
        .inspect_err(
            |error| tracing::warn!(%error, "VMs have no cgroups: address spaces are bounded"),
        )
        .ok()
}

/// Whether what becomes of a VM waits for its QEMU's word.
fn is_waited_for(slot: &Slot) -> bool {
    let is_silent = slot.vm.is_none()
        && matches!(slot.condition, Condition::Failed | Condition::InDoubt { .. });
    slot.condition.is_being_adopted() || is_silent
}

/// The host to which an owner's guest was on its way.
fn of_owner(record: &SavedVm) -> Option<String> {
    let other = record.other.as_ref().filter(|_| record.role == Role::Owner);
    other.map(|other| other.name.clone())
}

/// What is said of a VM whose missing pages nobody brings.
fn cannot_fetch(failure: &Failure) -> String {
    format!("pages of it are missing and can't be fetched: {failure}")
}

/// What is said of a VM that another host fetches pages of.
pub(super) fn keeps_pages(to: &str) -> String {
    format!("host {to} runs it, or may, and fetches pages of it from here")
}

/// Takes the limit away that a migration had put on a VM's processors, where one is left.
fn let_vcpus_go(vm: &str, pid: i32) {
    match godwit_qemu::put_back_vcpus(pid) {
        Ok(false) => {}
        Ok(true) => tracing::info!(vm, pid, "its vCPUs have all their CPU time again"),
        Err(error) => tracing::error!(vm, pid, %error, "its vCPUs may be slowed on"),
    }
}

/// What people are told of a QEMU that lives and can't be spoken to: nobody ends a healthy guest for that.
fn what_lives(pid: i32) -> String {
    let mounts = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/mnt")).ok();
    let place = match (mounts("self"), mounts(&pid.to_string())) {
        (Some(own), Some(its)) if own != its => {
            ", in another mount namespace than this agent, which may not see its files: start the agent where it does"
        }
        _ => "",
    };
    format!("its process {pid} lives{place}, and its guest may run")
}

/// What a VM is whose QEMU was found, and why.
fn as_recovered(recovery: Recovery, record: &SavedVm, runs: bool) -> (Condition, Option<String>) {
    match (recovery, record.pages_kept_for()) {
        (Recovery::Keep, _) if record.role == Role::Stranded => {
            let reason =
                "its post-copy broke off: the newest of its memory is here, the rest at the source";
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
                "{to} may run it: the link or an agent was lost at the hand-over; {to} is asked until it answers"
            );
            (Condition::InDoubt { keeps_pages_for: None }, Some(reason))
        }
        _ if runs => (Condition::Running, None),
        _ => (Condition::Paused, Some("it was paused when the agent started".to_owned())),
    }
}
