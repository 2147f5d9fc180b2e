//! VMs that agents restart among themselves ([`crate::ha::own`]), carried out on this host: its own
//! VMs end when their term is lost, and those of silent hosts start here.

mod changes;

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::join_all;
use godwit_api::{ApiError, CreateVm, ErrorCode, HaHost, HaStanding};
use godwit_ha::own::End;
use godwit_ha::{Order, Term};
use godwit_qemu::{ResolvedSpec, Uuid, VmName, VmSpec};
use tokio::time::MissedTickBehavior;

use changes::{refused, spec_elsewhere};

use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Slot};
use crate::failure::{host_failed, spec_refused};
use crate::ha::own::{Me, OwnError, OwnGuard, OwnRecord, Place, check_images};
use crate::ha::{HaGuard, Protected, boot_clock};
use crate::vm::Condition;

/// Interval between two looks at the leases.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Looks at the leases per heartbeat.
const LOOKS_PER_BEAT: u32 = 5;
/// Interval between two looks at the datastores.
const SCAN_AGAIN: Duration = Duration::from_secs(1);
/// Shortest time between two attempts of this host to start a VM.
const TRY_AGAIN: Duration = Duration::from_secs(30);
/// Time for which the agent's start waits for the QEMUs of lost terms.
const LOST_VMS_END: Duration = Duration::from_secs(2);

/// A VM of this host, as its table has it.
#[derive(Debug)]
struct Here {
    name: VmName,
    is_own: bool,
    has_process: bool,
    condition: Condition,
}

impl Here {
    /// Whether the VM shall not run, and does not.
    fn is_stopped(&self) -> bool {
        let is_stopped = matches!(
            self.condition,
            Condition::Stopped | Condition::Suspended | Condition::Template
        );
        is_stopped && !self.has_process
    }

    /// Whether the VM should run, and does not.
    fn has_failed(&self) -> bool {
        self.condition == Condition::Failed && !self.has_process
    }
}

impl Agent {
    /// Follows the terms of this host's own VMs until the agent ends. Blocks.
    ///
    /// # Errors
    /// A VM cannot be guarded: it may run without a term.
    pub(super) fn begin_own(self: &Arc<Self>) -> Result<(), ApiError> {
        let names = self.store.names()?;
        for name in names.iter().filter_map(|name| VmName::new(name.as_str()).ok()) {
            // One whose record cannot be read is known by its guard's files.
            if let Ok(Some(record)) = self.store.read(&name)
                && record.spec.protect_by_agents
            {
                self.own_guard(&record.spec)?;
            }
        }
        // The watchdog's first message names the QEMUs that this finds.
        self.own.all().iter().for_each(|own| drop(self.list_own(own)));
        self.own.publish();
        tokio::spawn(Agent::follow_own(Arc::downgrade(self)));
        Ok(())
    }

    /// Waits for a short time until the QEMUs of lost terms have ended.
    pub(super) async fn until_lost_own_ended(&self) {
        if tokio::time::timeout(LOST_VMS_END, self.look_at_own()).await.is_err() {
            tracing::error!("VMs of lost terms of agents have not ended yet");
        }
    }

    /// Looks at the datastores for VMs that agents restart, until the agent ends.
    pub(super) async fn watch_own(agent: Weak<Agent>) {
        let mut every = tokio::time::interval(SCAN_AGAIN);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let Some(agent) = agent.upgrade() else { return };
            agent.scan_own().await;
        }
    }

    async fn follow_own(agent: Weak<Agent>) {
        let mut every = tokio::time::interval(LOOK_AGAIN);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks = 0_u32;
        loop {
            every.tick().await;
            let Some(agent) = agent.upgrade() else { return };
            if looks.is_multiple_of(LOOKS_PER_BEAT) {
                tokio::task::block_in_place(|| agent.beat_own());
            }
            looks = looks.wrapping_add(1);
            // A QEMU that does not end holds up no heartbeat.
            let _ = tokio::time::timeout(LOOK_AGAIN, agent.look_at_own()).await;
        }
    }

    /// Begins to write the next block of each term that is held.
    fn beat_own(&self) {
        let held = self.own.all().into_iter().filter_map(|own| {
            let held = own.held()?;
            Some((own, held))
        });
        let held: Vec<_> = held.collect();
        if held.is_empty() {
            return;
        }
        let directories = self.datastore_directories();
        let watchdog = self.ha().watchdog().kernel_of_own();
        for (own, held) in held {
            self.own.beat(&own, held, directories.get(&held.datastore), watchdog);
        }
    }

    /// Carries out the orders of the guards of own VMs.
    async fn look_at_own(&self) {
        let all = self.own.all();
        let mut looks = Vec::with_capacity(all.len());
        for own in &all {
            looks.push(self.look_at_own_guard(own));
        }
        join_all(looks).await;
    }

    async fn look_at_own_guard(&self, own: &OwnGuard) {
        let guard = &own.guard;
        let (order, processes) = tokio::task::block_in_place(|| self.list_own(own));
        if order != Order::Run {
            end_own(guard, &processes).await;
            tokio::task::block_in_place(|| {
                if order == Order::Stop && self.own_processes(own).is_empty() {
                    guard.vms_ended();
                }
            });
        }
        tokio::task::block_in_place(|| guard.save_lease());
    }

    /// Lists the QEMU of a VM for its guard; returns it with the guard's order. Blocks.
    fn list_own(&self, own: &OwnGuard) -> (Order, Vec<Protected>) {
        let _listing = own.listing.lock();
        let contained = own.guard.begin_list();
        let processes = self.own_processes(own);
        (own.guard.order(contained, processes.clone()), processes)
    }

    /// Returns the QEMU of a VM that agents restart, if it has one here. A VM whose record cannot
    /// be read counts. Blocks.
    fn own_processes(&self, own: &OwnGuard) -> Vec<Protected> {
        let known = {
            let table = self.table();
            let slot = table.values().find(|slot| slot.spec.uuid == own.vm);
            slot.map(|slot| {
                let process = slot.vm.as_ref().map(|vm| (vm.process.pid, vm.process.start_time));
                let name = slot.spec.protect_by_agents.then(|| slot.spec.name.clone());
                name.map(|name| (name, process))
            })
        };
        let is_in_table = known.is_some();
        let found = match known {
            Some(found) => found,
            None => own.name().filter(|name| self.may_be_own(name, own.vm)).map(|it| (it, None)),
        };
        let is_alive = |&(pid, start_time): &(i32, u64)| godwit_qemu::is_alive(pid, start_time);
        let Some((name, process)) = found else {
            if is_in_table {
                return Vec::new();
            }
            // Nothing is left of a VM whose start has failed, but its QEMU may not have ended.
            let mut left = own.guard.processes();
            left.retain(|one| is_alive(&(one.pid, one.start_time)));
            return left;
        };
        let files = self.places.vm(&name);
        // A search among all processes takes long. Before the term is over, it must be made.
        let is_lost = own.guard.state().standing == HaStanding::Stopping;
        let found = process.filter(is_alive).or_else(|| match is_lost {
            true => files.living_process(),
            false => files.read_pid().filter(is_alive),
        });
        let protected = |(pid, start_time)| Protected { vm: name.to_string(), pid, start_time };
        found.map(protected).into_iter().collect()
    }

    /// Whether a VM that is not in the table may be this one.
    fn may_be_own(&self, name: &VmName, vm: Uuid) -> bool {
        match self.store.read(name) {
            Ok(record) => record.is_some_and(|it| it.spec.uuid == vm && it.spec.protect_by_agents),
            Err(_) => true,
        }
    }

    /// Returns the guard that decides whether a VM may run here; `None`: none does. Blocks.
    ///
    /// # Errors
    /// The guard of a VM that agents restart cannot be opened.
    pub(super) fn guard_of(&self, spec: &ResolvedSpec) -> Result<Option<Arc<HaGuard>>, ApiError> {
        if spec.protect.is_some() {
            return Ok(Some(Arc::clone(self.ha())));
        }
        match spec.protect_by_agents {
            true => Ok(Some(Arc::clone(&self.own_guard(spec)?.guard))),
            false => Ok(None),
        }
    }

    /// Returns the guard of a VM that agents restart. Blocks.
    fn own_guard(&self, spec: &ResolvedSpec) -> Result<Arc<OwnGuard>, ApiError> {
        let opened = self.own.guard_of(spec.uuid, Some(&spec.name));
        opened.map_err(|error| host_failed("cannot open the guard of a VM", &error))
    }

    /// Shows this host's guard, with the VMs that agents restart.
    pub(crate) fn shown_ha(&self) -> HaHost {
        let (own, own_problems) = self.own.shown();
        HaHost { own, own_problems, ..self.ha().state() }
    }

    /// Takes an operator's confirmation that the host of a VM's term is off.
    ///
    /// # Errors
    /// This host does not know the VM, or does not wait for that confirmation.
    pub(crate) fn confirm_own_off(&self, vm: &str, term: u64) -> Result<HaHost, ApiError> {
        let known = self.own.shown().0.into_iter().filter(|own| own.vm == vm);
        let known: Vec<_> = known.collect();
        if known.is_empty() {
            let message = format!("cannot confirm that the host of VM \"{vm}\" is off: no such VM");
            let remedy = "see `godwit host ha` for the VMs that agents restart";
            return Err(ApiError::new(ErrorCode::NotFound, message, remedy));
        }
        let took = known.iter().any(|own| {
            let took = self
                .own
                .with_watched(own.datastore, own.uuid, |watched| watched.confirm_off(Term(term)));
            took == Some(true)
        });
        if !took {
            let message = format!(
                "cannot confirm that the host of VM \"{vm}\" is off: term {term} does not wait \
                 for that"
            );
            let remedy = "see `godwit host ha` for its newest term, and how it stands";
            return Err(ApiError::new(ErrorCode::WrongState, message, remedy));
        }
        tracing::warn!(vm, term, "an operator has confirmed that the VM's host is off");
        Ok(self.shown_ha())
    }

    /// Looks at all datastores, and does what follows for each VM there.
    async fn scan_own(self: &Arc<Self>) {
        let directories = tokio::task::block_in_place(|| self.datastore_directories());
        self.own.keep_datastores(&directories);
        let scans = directories.into_iter().map(|(datastore, dir)| self.own.scan(dir, datastore));
        join_all(scans).await;
        self.give_up_unused();
        let all = self.own.watched();
        if all.is_empty() {
            return;
        }
        let host = match tokio::task::block_in_place(|| self.own.host()) {
            Ok(host) => host,
            Err(error) => return tracing::error!(%error, "cannot read this host's identity"),
        };
        for (datastore, vm) in all {
            self.follow_own_vm(datastore, vm, host).await;
        }
    }

    /// Gives up the terms of VMs that shall not run, or that are not protected by agents any more.
    fn give_up_unused(&self) {
        for own in self.own.all() {
            let Ok(_working) = own.working.try_lock() else { continue };
            // No start begins while the table is locked, and no older list of processes is used.
            let _listing = own.listing.lock();
            let table = self.table();
            let slot = table.values().find(|slot| slot.spec.uuid == own.vm);
            let is_used = match slot {
                None => own.name().is_some_and(|name| self.store.record_of(&name).is_some()),
                Some(slot) => slot.spec.protect_by_agents && !here(slot).is_stopped(),
            };
            if !is_used && own.held().is_some() {
                // The process of a VM that is not protected any more goes on.
                own.list_none();
                own.lose();
            }
        }
    }

    fn here(&self, vm: Uuid) -> Option<Here> {
        self.table().values().find(|slot| slot.spec.uuid == vm).map(here)
    }

    /// Does what follows from what was seen of a VM.
    async fn follow_own_vm(self: &Arc<Self>, datastore: Uuid, vm: Uuid, host: Uuid) {
        let own = self.own.known(vm);
        let here = self.here(vm);
        let me = Me { host, is_over: own.as_ref().is_none_or(|own| own.is_over()) };
        let seen = self.own.with_watched(datastore, vm, |watched| {
            let claims = watched.claim_after(boot_clock(), me);
            let (place, term, end) = (watched.place.clone(), watched.term, watched.end());
            let (is_of, of_other) = (watched.is_of(host), watched.is_of_other(host));
            let seen = (place, term, end, (is_of, of_other), claims, watched.record.clone());
            // A datastore that hangs holds up no VM of another one.
            watched.answers.then_some(seen)
        });
        let Some((place, term, end, (is_of, of_other), claims, record)) = seen.flatten() else {
            return;
        };
        if of_other {
            let held = own.as_ref().and_then(|own| Some((own, own.held()?)));
            if let Some((own, held)) = held
                && held.datastore == datastore
                && held.term < term
            {
                own.lose();
            }
            if me.is_over && record.is_some() {
                self.delete_former(here.as_ref(), &place).await;
            }
        }
        if is_of && me.is_over {
            self.end_own_term(&place, (term, end), here.as_ref(), record.as_ref()).await;
        }
        if let Some(own) = own.filter(|own| is_of && own.held().is_some()) {
            self.keep_own_record(&own, &place, record.as_ref()).await;
        }
        let may = match &here {
            None => true,
            // One that a user has stopped stays so; a former definition is deleted first.
            Some(here) => is_of && here.is_own && here.has_failed(),
        };
        if let (Some(after), Some(record)) = (claims, record)
            && may
        {
            tokio::spawn(self.clone().restart_own(place, after, record, is_of));
        }
    }

    /// Deletes the stopped definition of a VM that this host has held and another one has claimed
    /// since. What a protection that ended has left behind, also on another datastore, deletes
    /// none.
    async fn delete_former(self: &Arc<Self>, here: Option<&Here>, place: &Place) {
        let Some(here) = here.filter(|here| here.is_own) else { return };
        if !here.is_stopped() && !here.has_failed() {
            return;
        }
        let vm = place.vm;
        let own = self.own.known(vm).filter(|own| own.guard.state().term > 0);
        let Some(own) = own.filter(|_| self.is_place_of(&here.name, place)) else { return };
        if self.places.vm(&here.name).living_process().is_some() {
            return;
        }
        let Ok(_working) = own.working.try_lock() else { return };
        match self.delete(&here.name, true).await {
            Ok(()) => {
                tracing::warn!(vm = here.name.as_str(), "deleted: another host has claimed it");
                tokio::task::block_in_place(|| self.own.forget(vm));
            }
            Err(error) => {
                tracing::error!(vm = here.name.as_str(), %error, "cannot delete a VM that left");
            }
        }
    }

    /// Whether a VM's disks are on the datastore of a place.
    fn is_place_of(&self, name: &VmName, place: &Place) -> bool {
        let spec = self.table().get(name).map(|slot| slot.spec.to_vm_spec());
        let found = spec.map(|spec| tokio::task::block_in_place(|| self.own_place(&spec)));
        found.is_some_and(|found| found.is_ok_and(|found| found.datastore == place.datastore))
    }

    /// Writes how this host's term ended, and removes the folder of a VM that is not protected any
    /// more.
    async fn end_own_term(
        &self,
        place: &Place,
        (term, end): (Term, Option<End>),
        here: Option<&Here>,
        record: Option<&OwnRecord>,
    ) {
        let is_gone = || {
            let named = record.and_then(|record| VmName::new(record.spec.name.as_str()).ok());
            let known = self.own.known(place.vm).and_then(|own| own.name());
            let mut names = named.iter().chain(&known);
            names.all(|name| self.store.record_of(name).is_none())
        };
        let done = match (end, here) {
            (Some(End::None), Some(here)) if !here.is_own || here.is_stopped() => {
                self.own.end(place, term, End::Stopped).await
            }
            (Some(End::Stopped | End::Resting), Some(here)) if !here.is_own => {
                self.remove_own(place, term).await
            }
            // Its definition was deleted here.
            (Some(End::Stopped), None) if is_gone() => self.remove_own(place, term).await,
            _ => return,
        };
        if let Err(error) = done {
            tracing::warn!(vm = %place.vm, %error, "cannot write the end of a VM's term");
        }
    }

    async fn remove_own(&self, place: &Place, term: Term) -> Result<(), OwnError> {
        let own = self.own.known(place.vm);
        let working = own.as_ref().map(|own| own.working.try_lock());
        if working.as_ref().is_some_and(Result::is_err) {
            // A term is just being claimed.
            return Ok(());
        }
        self.own.remove(place, term).await?;
        tokio::task::block_in_place(|| self.own.forget(place.vm));
        Ok(())
    }

    /// Writes the record of a VM that runs here if it differs.
    async fn keep_own_record(&self, own: &OwnGuard, place: &Place, there: Option<&OwnRecord>) {
        let Some(held) = own.held() else { return };
        let now = {
            let table = self.table();
            let slot = table.values().find(|slot| slot.spec.uuid == own.vm);
            let Some(slot) = slot.filter(|slot| slot.spec.protect_by_agents) else { return };
            let spec = spec_elsewhere(slot.spec.to_vm_spec());
            let mut record = OwnRecord::new(spec, held.term.0, &self.config.name);
            record.incarnation = Some(slot.ownership.incarnation);
            record
        };
        if there == Some(&now) {
            return;
        }
        if let Err(error) = self.own.write_record(place, now).await {
            tracing::warn!(vm = %own.vm, %error, "cannot write the record of a VM");
        }
    }

    /// Claims the next term of a VM and starts it here. If that fails, the term is over.
    async fn restart_own(
        self: Arc<Self>,
        place: Place,
        after: Term,
        record: OwnRecord,
        is_of: bool,
    ) {
        let vm = record.spec.name.clone();
        let restarted = self.try_restart_own(&place, after, record, is_of).await;
        if let Err(error) = restarted {
            tracing::error!(vm, error = error.message, "cannot restart a VM of a silent host");
            self.own.with_watched(place.datastore, place.vm, |watched| {
                let why = format!("this host cannot start it: {}", error.message);
                watched.refuse(why, boot_clock().saturating_add(TRY_AGAIN));
            });
        }
    }

    async fn try_restart_own(
        self: &Arc<Self>,
        place: &Place,
        after: Term,
        record: OwnRecord,
        is_of: bool,
    ) -> Result<(), ApiError> {
        let spec = record.spec;
        let name = VmName::new(spec.name.as_str()).map_err(|error| spec_refused(&error))?;
        // The name is noted when the VM has it: another one of that name is not touched.
        let opened = tokio::task::block_in_place(|| self.own.guard_of(place.vm, None));
        let own = opened.map_err(|error| host_failed("cannot open the guard of a VM", &error))?;
        // A new guard holds nothing before it is known that nothing runs.
        let Ok(_working) = own.working.clone().try_lock_owned() else { return Ok(()) };
        if own.guard.state().standing != HaStanding::Over || !self.own.is_current(&own) {
            return Ok(());
        }
        let here = self.here(place.vm);
        let may = here.as_ref().is_none_or(Here::has_failed);
        // A user may have stopped or deleted it since the last look.
        if !may || !self.is_still_free(place, &name, after).await? {
            return Ok(());
        }
        self.check_could_start(place, &spec, here.as_ref().map(|here| (here, is_of))).await?;
        let watchdog = self.ha().watchdog().kernel_of_own();
        let term = match self.own.claim(&own, place, (after, false), watchdog).await {
            Ok(term) => term,
            // Another host was faster.
            Err(OwnError::Claimed(_)) => return Ok(()),
            Err(error) => return Err(refused("claim", &name, &error)),
        };
        tracing::warn!(vm = name.as_str(), %term, "starting a VM whose last term is over");
        let claimed = OwnRecord::new(spec.clone(), term.0, &self.config.name);
        let started = async {
            let written = self.own.write_record(place, claimed.clone()).await;
            written.map_err(|error| refused("start", &name, &error))?;
            match here {
                Some(here) => self.start(&here.name).await,
                None => {
                    let request = CreateVm { vm_dirs_only: true, ..CreateVm::new(spec, true) };
                    self.create(request).await
                }
            }
        };
        let Err(error) = started.await else { return Ok(()) };
        let failed = claimed.failed(&format!("host {}: {}", self.config.name, error.message));
        self.give_up_own(&own, place, (term, End::Failed)).await;
        if let Err(error) = self.own.write_record(place, failed).await {
            tracing::warn!(vm = name.as_str(), %error, "cannot write why a VM did not start");
        }
        Err(error)
    }

    /// Looks again whether this host should start a VM of which nothing runs here.
    async fn is_still_free(
        &self,
        place: &Place,
        name: &VmName,
        after: Term,
    ) -> Result<bool, ApiError> {
        let host = tokio::task::block_in_place(|| self.own.host());
        let host = host.map_err(|error| host_failed("cannot read this host's identity", &error))?;
        let looked = self.own.look(place).await;
        looked.map_err(|error| refused("start", name, &error))?;
        let me = Me { host, is_over: true };
        let claims = self.own.with_watched(place.datastore, place.vm, |watched| {
            watched.claim_after(boot_clock(), me)
        });
        Ok(claims.flatten() == Some(after))
    }

    /// Ends a term in which nothing runs.
    async fn give_up_own(&self, own: &OwnGuard, place: &Place, (term, end): (Term, End)) {
        tokio::task::block_in_place(|| own.lose());
        self.look_at_own_guard(own).await;
        if own.guard.state().standing != HaStanding::Over {
            return;
        }
        if let Err(error) = self.own.end(place, term, end).await {
            tracing::warn!(vm = %own.vm, %error, "cannot write the end of a VM's term");
        }
    }

    /// Checks that a VM could start here, before its term is claimed.
    async fn check_could_start(
        self: &Arc<Self>,
        place: &Place,
        spec: &VmSpec,
        here: Option<(&Here, bool)>,
    ) -> Result<(), ApiError> {
        let outside = |why: String| {
            let message = format!("cannot start VM \"{}\": {why}", spec.name);
            ApiError::new(ErrorCode::Preflight, message, "see docs/ha.md for what it may use")
        };
        check_images(spec, &place.directory).map_err(outside)?;
        let resolved = match here {
            Some((_, false)) => {
                return Err(outside("its former definition is still on this host".to_owned()));
            }
            Some((here, true)) => {
                let resolved = self.table().get(&here.name).map(|slot| slot.spec.clone());
                resolved.ok_or_else(|| self.no_vm(&here.name))?.as_ref().clone()
            }
            None => self.resolve(spec.clone()).await?,
        };
        self.check_fits(&resolved, FileRule::VmDirs).await.map(drop)
    }
}

fn here(slot: &Slot) -> Here {
    Here {
        name: slot.spec.name.clone(),
        is_own: slot.spec.protect_by_agents,
        has_process: slot.vm.is_some(),
        condition: slot.condition.clone(),
    }
}

/// Ends the QEMU of a VM whose term is lost.
async fn end_own(guard: &HaGuard, processes: &[Protected]) {
    for one in processes.iter().filter(|one| guard.note_ended(one.pid, one.start_time)) {
        let (vm, pid) = (&one.vm, one.pid);
        let say = guard.should_say(pid, one.start_time);
        if say {
            tracing::error!(vm, pid, "ending a VM: this host does not hold its term");
        }
        if let Err(error) = godwit_qemu::end_process(pid, one.start_time).await {
            if say {
                tracing::error!(vm, pid, %error, "cannot end a VM; retrying");
            }
            let hangs = error.kind() == std::io::ErrorKind::TimedOut;
            guard.try_again(pid, one.start_time, hangs);
        }
    }
}
