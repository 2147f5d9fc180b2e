//! VMs that are made, started, stopped and deleted by the manager: what is asked is written down, then the VM's agent is asked, and where that
//! says no nothing of it remains. What the agent does it says itself; the list follows what agents tell.

mod baseline;
pub(crate) mod bindings;
pub(crate) mod consoles;
pub(crate) mod http;
mod place;
pub(crate) mod record;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_api::control::{
    CreateManagedVm, HostedVm, MoveState, PlannedPower, Problem, ProblemCode, Role, StartManagedVm,
    StopManagedVm,
};
use godwit_api::{Client, ClientError, CreateVm, ErrorCode, StopVm, VmInfo, VmState};
use godwit_qemu::{Uuid, VmSpec};
use tokio::time::timeout;

use crate::access::Caller;
use crate::access::known_tokens::KnownTokens;
use crate::agents::Hosts;
use crate::cluster::inventory::VmPlan;
use crate::cluster::names::check_labels;
use crate::cluster::state::State;
use crate::moves::requests::MoveRequests;
use crate::storage::keeper::Keeper;
use crate::storage::planning::Planning;
use crate::storage::planning::whole;
use crate::storage::term::Term;
use crate::storage::turns::{Turn, Turns};
use crate::vms::record::{SavedVm, VMS};

use baseline::{exceeds, hold_to_baseline};
use place::no_vm;

/// How long the manager's own list may take to tell of what an agent has answered.
const KNOWN_LIMIT: Duration = Duration::from_secs(3);
/// The longest grace of a stop.
const MOST_GRACE_MS: u64 = 3_600_000;

/// VMs that are being made, by name: placement counts them before their hosts tell of them.
#[derive(Clone, Debug, Default)]
struct BeingMade(Arc<Mutex<BTreeMap<String, Room>>>);

/// What one takes of its host.
#[derive(Clone, Debug)]
struct Room {
    host: String,
    memory_bytes: u64,
    vcpus: u32,
}

/// The room of one, until this is dropped.
#[derive(Debug)]
struct Kept {
    all: BeingMade,
    name: String,
}

impl BeingMade {
    fn rooms(&self) -> MutexGuard<'_, BTreeMap<String, Room>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all.rooms().remove(&self.name);
    }
}

/// A name that is reserved for a host, until this is dropped.
struct Expected<'a> {
    state: &'a State,
    vm: String,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.state.change(|inventory| inventory.expect_vm(&self.vm, None));
    }
}

/// A VM and the agent of its host.
struct Located {
    client: Client,
    info: Arc<VmInfo>,
}

/// VMs, as people ask for them.
#[derive(Clone)]
pub(crate) struct Vms {
    state: Arc<State>,
    agents: Arc<Hosts>,
    turns: Turns,
    tokens: Arc<KnownTokens>,
    keeper: Arc<Term<Keeper>>,
    planning: Planning,
    requests: MoveRequests,
    being_made: BeingMade,
}

/// What [`Vms`] works with.
pub(crate) struct VmMeans {
    pub(crate) state: Arc<State>,
    pub(crate) agents: Arc<Hosts>,
    pub(crate) turns: Turns,
    pub(crate) tokens: Arc<KnownTokens>,
    pub(crate) keeper: Arc<Term<Keeper>>,
    pub(crate) planning: Planning,
    pub(crate) requests: MoveRequests,
}

impl Vms {
    pub(crate) fn new(means: VmMeans) -> Vms {
        let VmMeans { state, agents, turns, tokens, keeper, planning, requests } = means;
        let being_made = BeingMade::default();
        Vms { state, agents, turns, tokens, keeper, planning, requests, being_made }
    }

    /// What is known of the cluster.
    pub(crate) fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// Makes a VM. Where that fails nothing of it remains, but where its host fell silent meanwhile: then the answer says so.
    pub(crate) async fn create_vm(
        &self,
        request: CreateManagedVm,
        caller: &Caller,
    ) -> Result<HostedVm, Problem> {
        let (vms, caller) = (self.clone(), caller.clone());
        whole(async move { vms.make_vm(request, &caller).await }).await
    }

    /// Starts a stopped VM, or lets a paused one go on.
    pub(crate) async fn start_vm(
        &self,
        vm: &str,
        request: StartManagedVm,
    ) -> Result<VmInfo, Problem> {
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let Located { client, info, .. } = vms.locate(&vm)?;
            if matches!(info.state, VmState::Stopped | VmState::Failed) && !request.skip_preflight {
                exceeds(&vms.state.inventory(), &info.spec, &info.host)
                    .map_or(Ok(()), |excess| Err(excess.of_stopped(&vm)))?;
            }
            vms.with_power(&info, PlannedPower::On, client.start_vm(&vm)).await
        })
        .await
    }

    /// Stops a VM; the answer comes when it is stopped.
    pub(crate) async fn stop_vm(
        &self,
        vm: &str,
        request: StopManagedVm,
    ) -> Result<VmInfo, Problem> {
        let StopManagedVm { force, grace_ms } = request;
        if grace_ms.is_some_and(|grace| grace > MOST_GRACE_MS) {
            let detail = format!("a grace is at most {MOST_GRACE_MS} ms");
            return Err(Problem::new(
                ProblemCode::InvalidRequest,
                detail,
                "give less, or stop it with force",
            ));
        }
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let located = vms.locate(&vm)?;
            vms.refuse_under_way(&located.info, "stopped", false)?;
            let stop = located.client.stop_vm(&vm, StopVm { force, grace_ms });
            vms.with_power(&located.info, PlannedPower::Off, stop).await
        })
        .await
    }

    /// Deletes a stopped VM; with `force` one that runs too, which is ended, and one in doubt, which is given up. Disks are left alone.
    pub(crate) async fn delete_vm(&self, vm: &str, force: bool) -> Result<(), Problem> {
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let is_unknown = {
                let inventory = vms.state.inventory();
                inventory.seen_vm(&vm).is_none() && inventory.holder(&vm).is_none()
            };
            if is_unknown {
                return vms.forget_vm(&vm, force).await;
            }
            let Located { client, info } = vms.locate(&vm)?;
            vms.refuse_under_way(&info, "deleted", true)?;
            if force {
                end(&client, &vm).await?;
            }
            let deleted =
                if force { client.give_up_vm(&vm).await } else { client.delete_vm(&vm).await };
            match deleted {
                Err(error) if error.code() != Some(ErrorCode::NotFound) => {
                    return Err(of_host(error));
                }
                _ => vms.until_known(&vm, &info.host, None).await,
            }
            vms.plan_vm(&vm, None).await
        })
        .await
    }

    async fn make_vm(
        &self,
        request: CreateManagedVm,
        caller: &Caller,
    ) -> Result<HostedVm, Problem> {
        let CreateManagedVm { mut spec, host, labels, start } = request;
        spec.validate().map_err(|error| {
            Problem::new(ProblemCode::InvalidRequest, error.to_string(), error.remedy())
        })?;
        check_labels(&labels)?;
        let name = spec.name.clone();
        let _turn = self.turn_of_vm(&name)?;
        self.check_free(&name)?;
        hold_to_baseline(&self.state.inventory(), &mut spec, host.as_deref())?;
        // What tells it from another of that name, where its host's answer is lost.
        let uuid = *spec.uuid.get_or_insert_with(Uuid::new_v4);
        let (chosen, _room) = self.place_vm(&spec, host.as_deref(), caller.role)?;
        let client = self.agents.client_of(&chosen.host)?;
        // The host alone sees links and images' headers.
        let vm_dirs_only = caller.role < Role::Admin;
        let power = if start { PlannedPower::On } else { PlannedPower::Off };
        self.save_vm_plan(&name, Some(&VmPlan { power, labels: labels.clone() })).await?;
        let _name = self.expect_vm(&name, &chosen.host);
        let asked = client.create_vm(&CreateVm { spec, start, vm_dirs_only }).await;
        match settled(&client, &name, uuid, asked).await {
            Ok(info) => {
                self.know_vm_plan(&name, Some(VmPlan { power, labels }));
                self.until_known(&name, &chosen.host, Some(info.state)).await;
                Ok(HostedVm { info, host_reason: chosen.why })
            }
            Err(problem) => {
                if let Err(error) = self.save_vm_plan(&name, None).await {
                    // The next one of that name takes its place.
                    tracing::warn!(vm = name, %error, "what was planned of a VM that was not made can't be forgotten");
                }
                self.know_vm_plan(&name, None);
                Err(problem)
            }
        }
    }

    /// Reserves the name of a VM that is being made for its host.
    fn expect_vm(&self, vm: &str, host: &str) -> Expected<'_> {
        self.state.change(|inventory| inventory.expect_vm(vm, Some(host)));
        Expected { state: &self.state, vm: vm.to_owned() }
    }

    /// One operation at a time on a VM.
    fn turn_of_vm(&self, vm: &str) -> Result<Turn, Problem> {
        self.keeper.get()?;
        self.turns.take(&format!("vm {vm}")).ok_or_else(|| {
            let detail = format!("another request works on VM \"{vm}\"");
            Problem::new(
                ProblemCode::WrongState,
                detail,
                "wait for its end, then look and ask again",
            )
        })
    }

    /// Refuses a name that a VM has, or may have.
    fn check_free(&self, name: &str) -> Result<(), Problem> {
        let inventory = self.state.inventory();
        let taken = |detail: String| {
            let remedy = "take another name, or delete that VM first";
            Err(Problem::new(ProblemCode::AlreadyExists, detail, remedy))
        };
        if let Some(vm) = inventory.seen_vm(name) {
            return taken(format!("there is a VM \"{name}\" on host {} already", vm.info.host));
        }
        if let Some(host) = inventory.holder(name) {
            return taken(format!("host {host}, which is not heard, holds the name \"{name}\""));
        }
        if let Some(host) = inventory.awaited_host() {
            let detail =
                format!("host {host} has not told yet which VMs it has: \"{name}\" may be there");
            return Err(Problem::new(ProblemCode::HostAway, detail, "ask again in some seconds"));
        }
        if let (Some(_), Some(host)) = (inventory.vm_plan(name), inventory.unheard_host()) {
            return taken(format!(
                "a VM \"{name}\" was made here; no host tells of it, and host {host} is not heard, which may have it"
            ));
        }
        Ok(())
    }

    /// Where a VM is, by what agents tell.
    fn locate(&self, vm: &str) -> Result<Located, Problem> {
        let info = {
            let inventory = self.state.inventory();
            let Some(seen) = inventory.seen_vm(vm) else {
                return Err(inventory
                    .holder(vm)
                    .map_or_else(|| no_vm(vm), |host| unheard(vm, host)));
            };
            let host = &seen.info.host;
            if !seen.is_current {
                return Err(unheard(vm, host));
            }
            let mut others = inventory.others_with(vm, host);
            others.retain(|other| !inventory.is_conflict(other, vm));
            if seen.in_doubt && !others.is_empty() {
                let detail = format!(
                    "VM \"{vm}\" is in doubt: hosts {host} and {} have it",
                    others.join(", ")
                );
                let remedy =
                    format!("make sure of it, then `godwit migration resolve {vm} --runs-on HOST`");
                let problem = Problem::new(ProblemCode::WrongState, detail, remedy);
                return Err(Problem { cause: Some(ErrorCode::InDoubt), ..problem });
            }
            Arc::clone(seen.info)
        };
        Ok(Located { client: self.agents.client_of(&info.host)?, info })
    }

    /// Refuses what would end a VM that is under way; `waiting`: also where its move has not begun.
    fn refuse_under_way(&self, info: &VmInfo, verb: &str, waiting: bool) -> Result<(), Problem> {
        let vm = &info.name;
        let refused = |why: String, remedy: String| {
            let detail = format!("VM \"{vm}\" can't be {verb}: {why}");
            Err(Problem::new(ProblemCode::WrongState, detail, remedy))
        };
        let planned = self.state.inventory().planned_move(vm).map(str::to_owned);
        if let Some(id) = planned {
            let state = self.requests.moves()?.all().get(&id).map(|one| one.state);
            if waiting || state != Some(MoveState::Waiting) {
                let remedy =
                    format!("wait for its end, or call it off: `godwit control move cancel {id}`");
                return refused(format!("move {id} has it"), remedy);
            }
        }
        match (info.state, &info.migration) {
            (VmState::MigratingOut | VmState::MigratingIn, Some(id)) => {
                let remedy =
                    format!("wait for its end, or cancel it: `godwit migration cancel {id}`");
                refused(format!("migration {id} has it"), remedy)
            }
            (VmState::MigratingOut | VmState::MigratingIn, None) => {
                refused("a migration has it".to_owned(), "wait for its end".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Asks its agent for what is planned of its power from now on; where that says no, what was planned before holds.
    async fn with_power(
        &self,
        before: &VmInfo,
        power: PlannedPower,
        ask: impl Future<Output = Result<VmInfo, ClientError>>,
    ) -> Result<VmInfo, Problem> {
        let (vm, host) = (before.name.as_str(), before.host.as_str());
        let before = self.state.inventory().vm_plan(vm).cloned();
        let labels = before.as_ref().map(|plan| plan.labels.clone()).unwrap_or_default();
        let plan = VmPlan { power, labels };
        let is_news = before.as_ref() != Some(&plan);
        if is_news {
            self.plan_vm(vm, Some(plan)).await?;
        }
        let asked = ask.await;
        if is_news && matches!(asked, Err(ClientError::Refused(_))) {
            self.plan_vm(vm, before).await?;
        }
        let now = asked.map_err(of_host)?;
        self.until_known(vm, host, Some(now.state)).await;
        Ok(now)
    }

    /// Forgets what is planned of a VM that no host tells of.
    async fn forget_vm(&self, vm: &str, force: bool) -> Result<(), Problem> {
        let unheard = {
            let inventory = self.state.inventory();
            inventory.vm_plan(vm).ok_or_else(|| no_vm(vm))?;
            inventory.unheard_host().map(str::to_owned)
        };
        if let Some(host) = unheard.filter(|_| !force) {
            let detail = format!(
                "no host tells of VM \"{vm}\", and host {host} is not heard, which may have it"
            );
            let remedy = "see that its agent runs; with force the manager forgets what was planned of the VM";
            return Err(Problem::new(ProblemCode::HostAway, detail, remedy));
        }
        self.plan_vm(vm, None).await
    }

    /// Writes what is planned of a VM, and knows it.
    async fn plan_vm(&self, vm: &str, plan: Option<VmPlan>) -> Result<(), Problem> {
        self.save_vm_plan(vm, plan.as_ref()).await?;
        self.know_vm_plan(vm, plan);
        Ok(())
    }

    async fn save_vm_plan(&self, vm: &str, plan: Option<&VmPlan>) -> Result<(), Problem> {
        let keeper = self.keeper.get()?;
        match plan.map(SavedVm::from) {
            Some(saved) if keeper.has(VMS, vm) => keeper.replace(VMS, vm, &saved).await,
            Some(saved) => keeper.insert(VMS, vm, &saved).await,
            None if keeper.has(VMS, vm) => keeper.remove(VMS, vm).await,
            None => Ok(()),
        }
    }

    fn know_vm_plan(&self, vm: &str, plan: Option<VmPlan>) {
        self.state.change(|inventory| inventory.plan_vm(vm, plan));
    }

    /// Waits until the list has a VM in the state that its agent has answered, or without it: who asked finds it so, and what they ask next is
    /// judged by it. Agents tell it by their watch, a moment later than by the answer, and in the right order there.
    async fn until_known(&self, vm: &str, host: &str, state: Option<VmState>) {
        let mut news = self.state.events().listen(None);
        let known = async {
            while self.state.inventory().vm_at(host, vm).map(|info| info.state) != state {
                if news.next().await.is_none() {
                    return;
                }
            }
        };
        // It is so all the same, and will be told.
        let _ = timeout(KNOWN_LIMIT, known).await;
    }
}

/// Ends a VM at once that has a process by its agent's own word: what that told last may be a moment old. One in doubt stays as it is.
async fn end(client: &Client, vm: &str) -> Result<(), Problem> {
    let now = match client.vm(vm).await {
        Err(error) if error.code() == Some(ErrorCode::NotFound) => return Ok(()),
        now => now.map_err(of_host)?,
    };
    if !now.in_doubt && !matches!(now.state, VmState::Stopped | VmState::Failed) {
        client.stop_vm(vm, StopVm { force: true, grace_ms: None }).await.map_err(of_host)?;
    }
    Ok(())
}

/// What has become of a creation: where its answer was lost, its agent is asked for the VM.
async fn settled(
    client: &Client,
    name: &str,
    uuid: Uuid,
    asked: Result<VmInfo, ClientError>,
) -> Result<VmInfo, Problem> {
    let lost = match asked {
        Ok(info) => return Ok(info),
        Err(ClientError::Refused(error)) => return Err(Problem::of_agent(error)),
        Err(lost) => lost,
    };
    let problem = of_host(lost);
    match client.vm(name).await {
        Ok(info) if info.spec.uuid == Some(uuid) => Ok(info),
        Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => Err(Problem {
            remedy: "nothing was made; ask again when it answers".to_owned(),
            ..problem
        }),
        _ => {
            let remedy = format!(
                "whether it was made is not known: `godwit vm show {name}` says so when its host answers"
            );
            Err(Problem { remedy, ..problem })
        }
    }
}

/// The host that holds a VM's name is not heard.
fn unheard(vm: &str, host: &str) -> Problem {
    let detail = format!("host {host} has VM \"{vm}\", and its agent does not answer");
    let remedy = "see that its agent runs and can be reached";
    Problem::new(ProblemCode::HostAway, detail, remedy)
}

/// What an agent's answer is to who asked.
fn of_host(error: ClientError) -> Problem {
    match error {
        ClientError::Refused(error) => Problem::of_agent(error),
        away => {
            Problem::new(ProblemCode::HostAway, away.to_string(), "see `godwit control host list`")
        }
    }
}

/// All of its memory, bytes.
fn memory_bytes(spec: &VmSpec) -> u64 {
    spec.memory.iter().map(|block| block.size.bytes()).fold(0, u64::saturating_add)
}
