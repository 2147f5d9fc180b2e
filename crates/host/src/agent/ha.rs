//! The orders of the guard ([`crate::ha`]), carried out on this host's VMs: protected VMs are
//! ended when the term is lost, and start only while one is held. Also what the manager asks for:
//! a start in a term, the deletion of VMs that run elsewhere, and requests to other hosts.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_api::{
    ApiError, ClientError, CreateVm, ErrorCode, HaForward, HaForwarded, MOST_RELEASED, ReleaseVms,
    ReleasedVm, START_CARRIED_OUT, StartProtected, VmInfo, VmState,
};
use godwit_ha::{Order, Term};
use godwit_qemu::{ResolvedSpec, Uuid, VmName, VmSpec};
use tokio::time::MissedTickBehavior;

use crate::agent::{Agent, Begun};
use crate::failure::{of_peer, spec_refused};
use crate::ha::{Ending, HaGuard, Protected, Starting};
use crate::vm::{Condition, Processes, Vm};
use crate::watchdog;
use crate::whole::whole;

/// Interval between two looks at the lease. Its clock also counts suspended time, which no timer
/// of the runtime does.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Time for which the agent's start waits for the QEMUs of a lost term.
const LOST_VMS_END: Duration = Duration::from_secs(2);
/// Time for another host to answer a forwarded request.
const FORWARD_LIMIT: Duration = Duration::from_secs(2);

/// Where QEMUs of protected VMs are looked for.
#[derive(Clone, Copy)]
enum Search<'a> {
    /// In the table and in the VMs' files.
    Recorded,
    /// Among all processes too.
    Among(&'a Processes),
}

impl Agent {
    /// Follows the guard until the agent ends: the protected VMs of a lost term end, heartbeats are
    /// written, and the watchdog gets its messages.
    pub(super) fn begin_to_guard(self: &Arc<Self>) {
        let (run_dir, guard) = (self.config.run_dir.clone(), self.ha());
        // The watchdog's first message names the QEMUs that this finds.
        tokio::task::block_in_place(|| self.list_recorded());
        let (guarded, own) = (guard.guarded(), self.own.guarded());
        tokio::spawn(watchdog::follow(run_dir, guarded, own, guard.watchdog().clone()));
        tokio::spawn(Agent::follow_guard(Arc::downgrade(self), guard.clone()));
        tokio::spawn(Agent::keep_heartbeats(Arc::downgrade(self)));
    }

    /// Waits for a short time until the QEMUs of a lost term have ended, so that they are found
    /// ended. One that hangs is found so, and keeps the term from being over.
    pub(super) async fn until_lost_vms_ended(&self) {
        let mut guarded = self.ha().guarded();
        let is_over = guarded.wait_for(|now| now.deadline != Some(Duration::ZERO));
        if tokio::time::timeout(LOST_VMS_END, is_over).await.is_err() {
            tracing::error!("protected VMs of a lost term of HA have not ended yet");
        }
    }

    /// Carries out the guard's orders until the agent ends.
    async fn follow_guard(agent: Weak<Agent>, guard: Arc<HaGuard>) {
        let mut every = tokio::time::interval(LOOK_AGAIN);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = every.tick() => {}
                () = guard.urgent() => {}
            }
            let Some(agent) = agent.upgrade() else { return };
            agent.look_at_lease().await;
        }
    }

    /// Carries out the guard's order once.
    async fn look_at_lease(&self) {
        let guard = self.ha();
        if guard.is_idle() || guard.is_forgotten() && !self.knows_protected() {
            return;
        }
        let (order, listed) = tokio::task::block_in_place(|| self.list_recorded());
        if order == Order::Run {
            return tokio::task::block_in_place(|| guard.save_lease());
        }
        self.end_protected(&listed).await;
        if order == Order::Stop {
            self.end_unrecorded().await;
        }
        tokio::task::block_in_place(|| guard.save_lease());
    }

    /// Whether a VM of this host is protected, running or not.
    fn knows_protected(&self) -> bool {
        self.table().values().any(|slot| slot.spec.protect.is_some())
    }

    /// Searches all processes for QEMUs of protected VMs that no file names, and ends them; without
    /// any, the lost term is over. The search takes long, so what is recorded has ended before it.
    async fn end_unrecorded(&self) {
        let left = tokio::task::block_in_place(|| {
            // A start that ends while they are read is in the next list.
            let contained = self.ha().begin_list();
            let all = Processes::read()?;
            std::io::Result::Ok(self.list_protected(contained, Search::Among(&all)).1)
        });
        match left {
            // No start begins any more, and those in progress keep the term from being over.
            Ok(left) if left.is_empty() => tokio::task::block_in_place(|| {
                if self.store.names().is_ok() {
                    self.ha().vms_ended();
                }
            }),
            Ok(left) => self.end_protected(&left).await,
            Err(error) => tracing::error!(%error, "cannot read /proc: the lost term is not over"),
        }
    }

    /// Lists the recorded QEMUs of protected VMs for the guard. Blocks.
    fn list_recorded(&self) -> (Order, Vec<Protected>) {
        self.list_protected(self.ha().begin_list(), Search::Recorded)
    }

    /// Lists the QEMUs of protected VMs for the guard; returns them with its order. `contained`:
    /// what [`HaGuard::begin_list`] returned before the search. Blocks.
    fn list_protected(&self, contained: usize, search: Search<'_>) -> (Order, Vec<Protected>) {
        let begun = self.ha().begin_here();
        let (processes, here) = self.protected_processes(search);
        self.ha().know_here(begun, here);
        (self.ha().order(contained, processes.clone()), processes)
    }

    /// Returns every QEMU of a protected VM: of guests, of shadows and of VMs in doubt. VMs that
    /// are not in the table yet count as their record says; until the term is over, those whose
    /// record cannot be read count as protected. Also returns the protected VMs of this host;
    /// `None`: not all are known. Blocks.
    fn protected_processes(&self, search: Search<'_>) -> (Vec<Protected>, Option<BTreeSet<Uuid>>) {
        let (mut known, mut protected, mut here) = (BTreeSet::new(), Vec::new(), BTreeSet::new());
        for (name, slot) in self.table().iter() {
            known.insert(name.clone());
            if slot.spec.protect.is_some() {
                here.insert(slot.spec.uuid);
                let process = slot.vm.as_ref().map(|vm| (vm.process.pid, vm.process.start_time));
                protected.push((name.clone(), process));
            }
        }
        let recorded = self.store.names();
        let mut are_all_known = recorded.is_ok();
        let recorded = recorded.unwrap_or_default();
        let recorded = recorded.into_iter().filter_map(|name| VmName::new(name.as_str()).ok());
        for name in recorded.filter(|name| !known.contains(name)) {
            match self.store.read(&name) {
                Ok(Some(record)) if record.spec.protect.is_some() => {
                    here.insert(record.spec.uuid);
                    protected.push((name, None));
                }
                Ok(_) => {}
                Err(_) => {
                    are_all_known = false;
                    if self.ha().has_term() {
                        protected.push((name, None));
                    }
                }
            }
        }
        let process_of = |(name, process): (VmName, Option<(i32, u64)>)| {
            let is_alive = |&(pid, start_time): &(i32, u64)| godwit_qemu::is_alive(pid, start_time);
            let files = self.places.vm(&name);
            let recorded = || files.read_pid().filter(is_alive);
            let searched = || match search {
                Search::Recorded => None,
                Search::Among(all) => files.find_process_among(all).filter(is_alive),
            };
            let found = process.filter(is_alive).or_else(recorded).or_else(searched);
            found.map(|(pid, start_time)| Protected { vm: name.to_string(), pid, start_time })
        };
        let processes = protected.into_iter().filter_map(process_of).collect();
        (processes, are_all_known.then_some(here))
    }

    /// Ends QEMUs of protected VMs with SIGKILL, all at once. What follows for each VM is decided
    /// where the end of its process is noticed.
    async fn end_protected(&self, processes: &[Protected]) {
        let guard = self.ha();
        let noted = |one: &&Protected| guard.note_ended(one.pid, one.start_time);
        let ended = processes.iter().filter(noted).map(|one| async move {
            let (vm, pid, start_time) = (&one.vm, one.pid, one.start_time);
            let say = guard.should_say(pid, start_time);
            if say {
                tracing::error!(vm, pid, "ending a protected VM: this host holds no term of HA");
            }
            if let Err(error) = godwit_qemu::end_process(pid, start_time).await {
                if say {
                    tracing::error!(vm, pid, %error, "cannot end a protected VM; retrying");
                }
                let hangs = error.kind() == std::io::ErrorKind::TimedOut;
                guard.try_again(pid, start_time, hangs);
            }
        });
        futures::future::join_all(ended).await;
    }

    /// Lets the start of a VM's process begin; `None` for a VM without protection.
    ///
    /// # Errors
    /// The VM is protected, and this host holds no term, or the manager does not confirm that it
    /// knows the VM here.
    pub(super) async fn starting(&self, spec: &ResolvedSpec) -> Result<Option<Starting>, ApiError> {
        if spec.protect.is_some() {
            let guard = self.ha();
            let named = guard.until_named(&spec.name, spec.uuid).await?;
            let starting = guard.starting(&spec.name, spec.uuid)?;
            return Ok(Some(starting.named(named)));
        }
        match self.guard_of(spec)? {
            Some(guard) => guard.starting(&spec.name, spec.uuid).map(Some),
            None => Ok(None),
        }
    }

    /// Checks that a VM may run here. `verb` says what is to be done with it.
    ///
    /// # Errors
    /// The VM is protected, and this host holds no term.
    pub(super) fn check_term(&self, verb: &str, spec: &ResolvedSpec) -> Result<(), ApiError> {
        match self.guard_of(spec)? {
            Some(guard) => guard.may_run(verb, &spec.name),
            None => Ok(()),
        }
    }

    /// Checks that a VM may be restarted here after a crash. A start that would wait in vain for
    /// the manager counts as none, so that it uses up no restart of the VM's policy.
    ///
    /// # Errors
    /// The VM is protected, and this host holds no term, or the manager has not answered yet.
    pub(super) fn check_restart(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        self.check_term("restart", spec)?;
        match spec.protect {
            Some(_) => self.ha().check_answered(&spec.name, spec.uuid),
            None => Ok(()),
        }
    }

    /// Lets a running VM become protected, if a change makes it so. The result must live until the
    /// change is in the table.
    ///
    /// # Errors
    /// This host holds no term.
    pub(super) fn admit_protection(
        &self,
        vm: &Vm,
        old: &ResolvedSpec,
        wanted: &VmSpec,
    ) -> Result<Option<Starting>, ApiError> {
        if old.protect.is_some() || wanted.protect.is_none() {
            return Ok(None);
        }
        self.ha().may_run("protect", &old.name)?;
        let starting = self.ha().starting(&old.name, old.uuid)?;
        starting.process(vm.process.pid, vm.process.start_time)?;
        Ok(Some(starting))
    }

    /// Lets the protection of a VM end, if a change ends it: then the manager has confirmed that it
    /// does not start the VM elsewhere. [`Ending::ended`] has to follow when the change is saved.
    ///
    /// # Errors
    /// The manager does not confirm it.
    pub(super) async fn admit_unprotection(
        &self,
        begun: &Begun,
        wanted: &VmSpec,
    ) -> Result<Option<Ending>, ApiError> {
        let (old, guard) = (&begun.spec, self.ha());
        match (old.protect, wanted.protect) {
            (Some(_), None) => {}
            (None, Some(_)) => {
                guard.keep_protection(old.uuid);
                return Ok(None);
            }
            (None, None) | (Some(_), Some(_)) => return Ok(None),
        }
        let is_stopped = begun.before == Condition::Stopped;
        let mut ending = guard.end_protection(&old.name, old.uuid, is_stopped)?;
        if let Some(ending) = &mut ending {
            ending.confirmed().await?;
        }
        Ok(ending)
    }

    /// Starts a protected VM in a term, for the manager. It is created unless this host has it.
    ///
    /// # Errors
    /// This host does not hold that term, or the VM does not start. Nothing of a new VM remains.
    pub(crate) async fn start_protected(
        self: &Arc<Self>,
        request: StartProtected,
    ) -> Result<VmInfo, ApiError> {
        let agent = self.clone();
        whole(async move {
            let StartProtected { spec, term, attempt } = request;
            let name = VmName::new(spec.name.as_str()).map_err(|error| spec_refused(&error))?;
            let Some(uuid) = spec.uuid.filter(|_| spec.protect.is_some()) else {
                let message = format!(
                    "cannot start VM \"{name}\" in a term: it has no uuid or no protection"
                );
                return Err(ApiError::new(ErrorCode::InvalidRequest, message, "see docs/api.md"));
            };
            let in_term = tokio::task::block_in_place(|| {
                agent.ha().may_start_in(&name, uuid, Term(term), attempt)
            })?;
            let is_here = agent.has_protected(&name, uuid)?;
            let started = match (is_here, in_term.is_repeated()) {
                (false, false) => {
                    tokio::task::block_in_place(|| {
                        let disks = spec.disks.iter().map(|disk| disk.path.as_path());
                        agent.refuse_left(&name, uuid, &disks.collect::<Vec<_>>())
                    })?;
                    agent.create(CreateVm::new(spec, true)).await?
                }
                (false, true) => return Err(has_left(&name)),
                (true, is_repeated) => match agent.vm_info(&name)? {
                    known if known.state == VmState::Running => known,
                    // It may have been stopped since.
                    known if is_repeated && !in_term.is_unfinished() => known,
                    _ => agent.start(&name).await?,
                },
            };
            tokio::task::block_in_place(|| in_term.carried_out());
            Ok(started)
        })
        .await
    }

    /// Whether this host has that VM, and it is protected here.
    fn has_protected(&self, name: &VmName, uuid: Uuid) -> Result<bool, ApiError> {
        let table = self.table();
        // Another VM of the name is refused by the creation.
        let Some(slot) = table.get(name).filter(|slot| slot.spec.uuid == uuid) else {
            return Ok(false);
        };
        if slot.spec.protect.is_some() {
            return Ok(true);
        }
        let message = format!("cannot start VM \"{name}\" in a term: it is not protected here");
        let remedy = format!("set it with `godwit vm set {name} --protect normal`");
        Err(ApiError::new(ErrorCode::WrongState, message, remedy))
    }

    /// Deletes the definitions of VMs that were started elsewhere after this host's term ended.
    ///
    /// # Errors
    /// A VM of them still has a process here, or another operation has it. Those before it in the
    /// request are deleted.
    pub(crate) async fn release_vms(self: &Arc<Self>, request: ReleaseVms) -> Result<(), ApiError> {
        if request.vms.len() > MOST_RELEASED {
            let message = format!("cannot release {} VMs at once", request.vms.len());
            let remedy = format!("name at most {MOST_RELEASED}");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        }
        for released in request.vms {
            self.release_vm(released).await?;
        }
        Ok(())
    }

    async fn release_vm(self: &Arc<Self>, released: ReleasedVm) -> Result<(), ApiError> {
        let ReleasedVm { name, incarnation, to } = released;
        let name = VmName::new(name.as_str()).map_err(|error| spec_refused(&error))?;
        let has_process = {
            let table = self.table();
            let slot = table.get(&name);
            // Another VM of the name, or another life of it, is left alone.
            let Some(slot) = slot.filter(|slot| slot.ownership.incarnation == incarnation) else {
                return Ok(());
            };
            slot.vm.is_some()
        };
        if has_process || self.places.vm(&name).living_process().is_some() {
            let message =
                format!("cannot release VM \"{name}\" to host {to}: it has a process here");
            let remedy = "see `godwit vm show` on this host: it may run on both";
            return Err(ApiError::new(ErrorCode::WrongState, message, remedy));
        }
        self.delete(&name, true).await?;
        tracing::warn!(vm = name.as_str(), to, "deleted: it was started on that host");
        Ok(())
    }

    /// Makes a request of the manager to another host, which the manager does not reach itself.
    ///
    /// # Errors
    /// The other host is no peer, is not reached in time either, or refuses the request.
    pub(crate) async fn forward_ha(&self, request: HaForward) -> Result<HaForwarded, ApiError> {
        let HaForward { host, answer } = request;
        let peer = self.peer(&host)?;
        let forwarded = async {
            let renewal = match &answer {
                None => Some(peer.ha_renewal().await?),
                Some(answer) => peer.ha_answer(answer).await.map(|()| None)?,
            };
            Ok::<_, ClientError>(HaForwarded { renewal })
        };
        match tokio::time::timeout(FORWARD_LIMIT, forwarded).await {
            Ok(done) => done.map_err(|error| of_peer(&host, error, |refused| refused)),
            Err(_) => Err(ApiError::new(
                ErrorCode::PeerUnreachable,
                format!("host {host} did not answer within {} s", FORWARD_LIMIT.as_secs()),
                "check the network between the two hosts",
            )),
        }
    }
}

fn has_left(name: &VmName) -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        format!("cannot start VM \"{name}\" again: {START_CARRIED_OUT}, and it has left since"),
        "see `godwit vm show` for where it is",
    )
}

#[cfg(test)]
mod tests {
    use godwit_api::{Client, Endpoint, HaAnswer, HaStanding, HaVerdict, TermHolder};
    use godwit_qemu::RestartPriority;

    use super::*;
    use crate::agent::writes_fail::support::{TestHost, arriving, until};

    const HOLDER: TermHolder = TermHolder { cluster: Uuid::from_u128(1), host: Uuid::from_u128(2) };

    fn answer(agent: &Agent, verdict: HaVerdict) {
        let nonce = agent.ha().renewal().nonce;
        let answer = HaAnswer { nonce, holder: HOLDER, verdict };
        tokio::task::block_in_place(|| agent.ha().answer(&answer)).unwrap();
    }

    async fn keep_granting(agent: &Agent, term: u64) {
        let mut turns = tokio::time::interval(Duration::from_millis(100));
        loop {
            turns.tick().await;
            answer(agent, HaVerdict::Granted { term, datastores: Vec::new() });
        }
    }

    /// Does work while a manager renews the lease, which a slow machine would outlast.
    async fn holding<T>(agent: &Agent, term: u64, work: impl Future<Output = T>) -> T {
        tokio::select! {
            done = work => done,
            () = keep_granting(agent, term) => panic!("it grants without end"),
        }
    }

    #[test]
    fn a_lease_is_renewed_before_the_vms_are_known() {
        let Some(host) = TestHost::new() else { return };
        host.run(async {
            let agent = Agent::guarding(host.config.clone()).unwrap();
            let path = host.path().join("early.sock");
            let listener = tokio::net::UnixListener::bind(&path).unwrap();
            let app = crate::server::router(agent.clone());
            tokio::spawn(async move { axum::serve(listener, app).await });
            let client = Client::new(Endpoint::Unix(path));
            until("the term is over", async || client.ha_renewal().await.unwrap().over).await;
            let other = client.clone();
            let list = tokio::spawn(async move { other.vms().await });
            for _ in 0..2 {
                let nonce = client.ha_renewal().await.unwrap().nonce;
                let verdict = HaVerdict::Granted { term: 1, datastores: Vec::new() };
                client.ha_answer(&HaAnswer { nonce, holder: HOLDER, verdict }).await.unwrap();
            }
            assert_eq!(client.ha().await.unwrap().standing, HaStanding::Held);
            assert!(!list.is_finished(), "the list is not complete");
            agent.find_vms().await.unwrap();
            assert!(list.await.unwrap().unwrap().is_empty());
        });
    }

    #[test]
    fn a_shadow_of_a_lost_term_ends_and_is_not_committed() {
        let Some(host) = TestHost::new() else { return };
        host.run(async {
            let agent = Agent::open(host.config.clone()).await.unwrap();
            answer(&agent, HaVerdict::Granted { term: 1, datastores: Vec::new() });
            let spec = VmSpec { protect: Some(RestartPriority::Low), ..host.spec("web") };
            let spec = agent.resolve(spec).await.unwrap();
            let made = agent.prepare_incoming(spec, arriving(2), "b", false, None);
            let shadow = holding(&agent, 1, made).await.unwrap();
            let process = (shadow.process.pid, shadow.process.start_time);
            assert_eq!(agent.ha().guarded().borrow().pids, [process]);

            answer(&agent, HaVerdict::Ended { term: 1 });
            let refused = agent.note_take_over(&shadow).unwrap_err();
            assert_eq!(refused.code, ErrorCode::WrongState);
            until("the term is over", async || agent.ha().renewal().over).await;
            assert!(host.qemus().is_empty());
        });
    }

    #[test]
    fn a_vm_whose_record_cannot_be_read_ends_with_the_term() {
        let Some(host) = TestHost::new() else { return };
        host.run(async {
            let agent = Agent::open(host.config.clone()).await.unwrap();
            answer(&agent, HaVerdict::Granted { term: 1, datastores: Vec::new() });
            for (name, protect) in [("web", Some(RestartPriority::Low)), ("db", None)] {
                let spec = VmSpec { protect, ..host.spec(name) };
                let made = agent.create(CreateVm::new(spec, true));
                holding(&agent, 1, made).await.unwrap();
            }
        });
        std::fs::write(host.path().join("state/vms/web/vm.json"), "{").unwrap();
        std::fs::remove_file(host.path().join("run/ha.json")).unwrap();
        host.run(async {
            let agent = Agent::open(host.config.clone()).await.unwrap();
            until("the term is over", async || agent.ha().renewal().over).await;
            assert_eq!(host.qemus().len(), 1, "the VM without protection runs");
            let db = agent.vm_info("db").unwrap();
            assert_eq!(db.state, VmState::Running);
        });
    }
}
