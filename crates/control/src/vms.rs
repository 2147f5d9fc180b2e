//! Creation, start, stop and deletion of VMs by the manager. It saves the request, then asks the
//! VM's agent; if the agent refuses, nothing of a creation remains. The agent reports the result,
//! and the list follows the agents' reports.

mod baseline;
pub(crate) mod bindings;
mod change;
mod clone;
pub(crate) mod consoles;
mod disk_moves;
#[cfg(test)]
mod elsewhere_tests;
mod guest;
pub(crate) mod http;
mod imports;
mod place;
pub(crate) mod record;
mod snapshots;
#[cfg(test)]
pub(crate) mod tests;
mod unknown;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::{
    CreateManagedVm, HostedVm, JournalKind, MoveState, PlannedPower, Problem, ProblemCode, Role,
    StartManagedVm, StopManagedVm,
};
use godwit_api::{
    Client, ClientError, CreateVm, ErrorCode, StopVm, VmImages, VmInfo, VmState, with_new_disks,
};
use godwit_qemu::{ClaimedNic, SpecError, Uuid, VmSpec};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::timeout;

use crate::access::Caller;
use crate::access::known_tokens::KnownTokens;
use crate::agents::AgentClients;
use crate::cluster::inventory::VmPlan;
use crate::cluster::names::check_labels;
use crate::cluster::state::State;
use crate::ha::admission::Admission;
use crate::journal::entries::NewEntry;
use crate::moves::requests::MoveRequests;
use crate::problems::{AWAY_REMEDY, no_vm};
use crate::storage::keeper::Keeper;
use crate::storage::planning::Planning;
use crate::storage::planning::whole;
use crate::storage::term::Term;
use crate::storage::turns::{Turn, Turns};
use crate::vms::record::{SavedVm, VMS};

use baseline::{exceeds, hold_to_baseline};

/// Longest wait for the manager's own list to show an agent's answer.
const KNOWN_LIMIT: Duration = Duration::from_secs(3);
/// Longest grace period of a stop, milliseconds.
const MOST_GRACE_MS: u64 = 3_600_000;

/// VMs in creation, by name. Placement counts them before their hosts report them.
#[derive(Clone, Debug, Default)]
struct PendingVms(Arc<Mutex<BTreeMap<String, Room>>>);

/// Resources that a VM takes on its host.
#[derive(Clone, Debug)]
struct Room {
    host: String,
    memory_bytes: u64,
    vcpus: u32,
    nics: Vec<ClaimedNic>,
}

/// Reserved resources of a VM in creation, released on drop.
#[derive(Debug)]
struct Reservation {
    all: PendingVms,
    name: String,
}

impl PendingVms {
    fn rooms(&self) -> MutexGuard<'_, BTreeMap<String, Room>> {
        self.0.lock()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.all.rooms().remove(&self.name);
    }
}

/// Name that is reserved for a host, released on drop.
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

fn check_grace(request: StopManagedVm) -> Result<StopManagedVm, Problem> {
    if request.grace_ms.is_none_or(|grace| grace <= MOST_GRACE_MS) {
        return Ok(request);
    }
    let detail = format!("the grace period is at most {MOST_GRACE_MS} ms");
    let remedy = "use a shorter one, or stop the VM with force";
    Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy))
}

/// Returns the planned power state of a new VM.
fn power(start: bool) -> PlannedPower {
    if start { PlannedPower::On } else { PlannedPower::Off }
}

fn invalid_spec(error: &SpecError) -> Problem {
    Problem::new(ProblemCode::InvalidRequest, error.to_string(), error.remedy())
}

/// Service for VMs.
#[derive(Clone)]
pub(crate) struct Vms {
    state: Arc<State>,
    agents: Arc<AgentClients>,
    turns: Turns,
    tokens: Arc<KnownTokens>,
    keeper: Arc<Term<Keeper>>,
    planning: Planning,
    requests: MoveRequests,
    admission: Admission,
    pending: PendingVms,
}

/// Dependencies of [`Vms`].
pub(crate) struct VmMeans {
    pub(crate) state: Arc<State>,
    pub(crate) agents: Arc<AgentClients>,
    pub(crate) turns: Turns,
    pub(crate) tokens: Arc<KnownTokens>,
    pub(crate) keeper: Arc<Term<Keeper>>,
    pub(crate) planning: Planning,
    pub(crate) requests: MoveRequests,
    pub(crate) admission: Admission,
}

impl Vms {
    pub(crate) fn new(means: VmMeans) -> Vms {
        let VmMeans { state, agents, turns, tokens, keeper, planning, requests, admission } = means;
        let pending = PendingVms::default();
        Vms { state, agents, turns, tokens, keeper, planning, requests, admission, pending }
    }

    /// Returns the state of the cluster.
    pub(crate) fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// Creates a VM. If that fails, nothing of the VM remains. The exception is a host that stops
    /// answering; the problem then says so.
    pub(crate) async fn create_vm(
        &self,
        request: CreateManagedVm,
        caller: &Caller,
    ) -> Result<HostedVm, Problem> {
        let (vms, caller) = (self.clone(), caller.clone());
        whole(async move { vms.make_vm(request, &caller).await }).await
    }

    /// Starts a stopped VM, or resumes a paused one.
    pub(crate) async fn start_vm(
        &self,
        vm: &str,
        request: StartManagedVm,
    ) -> Result<HostedVm, Problem> {
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_to_start(&vm)?;
            let Located { client, info, .. } = vms.locate(&vm)?;
            if info.state.is_off() && !request.skip_preflight {
                exceeds(&vms.state.inventory(), &info.spec, &info.host)
                    .map_or(Ok(()), |excess| Err(excess.of_stopped(&vm)))?;
            }
            let warning = match info.state.is_off() {
                true => vms.admit(&info.spec, &info.host).await?,
                false => None,
            };
            let info = vms.with_power(&info, PlannedPower::On, client.start_vm(&vm)).await?;
            Ok(HostedVm { warning, ..HostedVm::from(info) })
        })
        .await
    }

    /// Stops a VM. Returns when it is stopped.
    pub(crate) async fn stop_vm(
        &self,
        vm: &str,
        request: StopManagedVm,
    ) -> Result<VmInfo, Problem> {
        let StopManagedVm { force, grace_ms } = check_grace(request)?;
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

    /// Deletes a stopped VM. With `force`, also ends a running VM and gives up one in doubt. With
    /// `disks`, also its own images; returns what became of them. Otherwise they are kept.
    pub(crate) async fn delete_vm(
        &self,
        vm: &str,
        force: bool,
        disks: bool,
    ) -> Result<VmImages, Problem> {
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let is_unknown = {
                let inventory = vms.state.inventory();
                inventory.seen_vm(&vm).is_none() && inventory.holder(&vm).is_none()
            };
            if is_unknown {
                return vms.forget_vm(&vm, force).await.map(|()| VmImages::default());
            }
            let Located { client, info } = vms.locate(&vm)?;
            vms.refuse_under_way(&info, "deleted", true)?;
            let images = match disks {
                true => vms.images_of(&client, &info).await?,
                false => VmImages::default(),
            };
            if force {
                end(&client, &vm).await?;
            }
            let deleted =
                if force { client.give_up_vm(&vm).await } else { client.delete_vm(&vm).await };
            match deleted {
                Err(error) if error.code() != Some(ErrorCode::NotFound) => {
                    return Err(error.into());
                }
                _ => vms.until_known(&vm, &info.host, None).await,
            }
            vms.plan_vm(&vm, None).await?;
            Ok(client.delete_images(images).await)
        })
        .await
    }

    async fn make_vm(
        &self,
        request: CreateManagedVm,
        caller: &Caller,
    ) -> Result<HostedVm, Problem> {
        let CreateManagedVm { mut spec, host, labels, start, mut new_disks } = request;
        with_new_disks(&spec, &new_disks).validate().map_err(|error| invalid_spec(&error))?;
        check_labels(&labels)?;
        let name = spec.name.clone();
        let _turn = self.turn_to_start(&name)?;
        self.check_free(&name)?;
        hold_to_baseline(&self.state.inventory(), &mut spec, host.as_deref())?;
        // Identifies this VM among others of its name if the host's answer is lost.
        let uuid = *spec.uuid.get_or_insert_with(Uuid::new_v4);
        let (chosen, _room) = self.place_vm(&spec, host.as_deref(), caller.role)?;
        let warning = if start { self.admit(&spec, &chosen.host).await? } else { None };
        let client = self.agents.reachable(&chosen.host)?;
        let disk_reasons = self.place_disks(&chosen.host, &mut new_disks)?;
        for base in new_disks.iter().filter_map(|disk| disk.base.as_ref()) {
            self.agents.check_not_written(&chosen.host, base)?;
        }
        // Only the host sees links and the headers of images.
        let vm_dirs_only = caller.role < Role::Admin;
        let plan = VmPlan { power: power(start), labels };
        let create = CreateVm { spec, start, vm_dirs_only, new_disks };
        let asked = client.create_vm(&create);
        let info = self.made(&client, (&name, uuid), &chosen.host, plan, asked).await?;
        Ok(HostedVm { info, host_reason: chosen.why, disk_reasons, warning })
    }

    /// Applies the admission control to a VM that is to run on a host, or to become protected
    /// there. Returns its warning, which the journal has too.
    async fn admit(&self, spec: &VmSpec, host: &str) -> Result<Option<String>, Problem> {
        let warning = self.admission.check(&self.state, spec, host).await?;
        if let Some(warning) = &warning {
            let text = format!("room for failures of hosts: {warning}");
            let entry = NewEntry::warning(JournalKind::VmStarted, text).about("vm", &spec.name);
            self.keeper.get()?.journal(entry.about("host", host));
        }
        Ok(warning)
    }

    /// Saves the plan of a VM in creation while its host is asked for it. If that fails, nothing of
    /// the plan remains.
    async fn made(
        &self,
        client: &Client,
        (name, uuid): (&str, Uuid),
        host: &str,
        plan: VmPlan,
        asked: impl Future<Output = Result<VmInfo, ClientError>>,
    ) -> Result<VmInfo, Problem> {
        self.save_vm_plan(name, Some(&plan)).await?;
        let _name = self.expect_vm(name, host);
        let asked = asked.await;
        match settled(client, name, uuid, asked).await {
            Ok(info) => {
                self.know_vm_plan(name, Some(plan));
                self.until_known(name, host, Some(info.state)).await;
                Ok(info)
            }
            Err(problem) => {
                if let Err(error) = self.save_vm_plan(name, None).await {
                    // The next VM with this name replaces the plan.
                    tracing::warn!(vm = name, %error, "cannot remove the plan of an uncreated VM");
                }
                self.know_vm_plan(name, None);
                Err(problem)
            }
        }
    }

    /// Reserves the name of a VM in creation for its host.
    fn expect_vm(&self, vm: &str, host: &str) -> Expected<'_> {
        self.state.change(|inventory| inventory.expect_vm(vm, Some(host)));
        Expected { state: &self.state, vm: vm.to_owned() }
    }

    /// Takes the turn of a VM that is to start. The restarts take it as well, so none begins before
    /// it is given back.
    fn turn_to_start(&self, vm: &str) -> Result<Turn, Problem> {
        let turn = self.turn_of_vm(vm)?;
        self.admission.check_restart(vm)?;
        Ok(turn)
    }

    /// Takes the lock of a VM, which allows one operation at a time.
    fn turn_of_vm(&self, vm: &str) -> Result<Turn, Problem> {
        self.keeper.get()?;
        self.turns.take(&format!("vm {vm}")).ok_or_else(|| {
            let detail = format!("another request is working on VM \"{vm}\"");
            Problem::new(
                ProblemCode::WrongState,
                detail,
                "wait for its end, then check the VM and try again",
            )
        })
    }

    /// Refuses a name that a VM has or may have.
    fn check_free(&self, name: &str) -> Result<(), Problem> {
        let inventory = self.state.inventory();
        let taken = |detail: String| {
            let remedy = "choose another name, or delete that VM first";
            Err(Problem::new(ProblemCode::AlreadyExists, detail, remedy))
        };
        if let Some(vm) = inventory.seen_vm(name) {
            return taken(format!("VM \"{name}\" already exists on host {}", vm.info.host));
        }
        if let Some(host) = inventory.holder(name) {
            return taken(format!("host {host}, which is unreachable, holds the name \"{name}\""));
        }
        if let Some(host) = inventory.awaited_host() {
            let detail =
                format!("host {host} has not reported its VMs yet: \"{name}\" may be there");
            return Err(Problem::new(ProblemCode::HostAway, detail, "try again in a few seconds"));
        }
        if let (Some(_), Some(host)) = (inventory.vm_plan(name), inventory.unreachable_host()) {
            return taken(format!(
                "VM \"{name}\" was created here; no host reports it, but host {host}, which is \
                 unreachable, may have it"
            ));
        }
        Ok(())
    }

    /// Returns where a VM is, according to the agents.
    fn locate(&self, vm: &str) -> Result<Located, Problem> {
        let info = {
            let inventory = self.state.inventory();
            let Some(seen) = inventory.seen_vm(vm) else {
                return Err(inventory
                    .holder(vm)
                    .map_or_else(|| no_vm(vm), |host| host_away(vm, host)));
            };
            let host = &seen.info.host;
            if !seen.is_current {
                return Err(host_away(vm, host));
            }
            let mut others = inventory.others_with(vm, host);
            others.retain(|other| !inventory.is_conflict(other, vm));
            if seen.in_doubt && !others.is_empty() {
                let detail = format!(
                    "VM \"{vm}\" is in doubt: hosts {host} and {} have it",
                    others.join(", ")
                );
                let remedy = format!(
                    "find out which host runs it, then \
                     `godwit migration resolve {vm} --runs-on HOST`"
                );
                let problem = Problem::new(ProblemCode::WrongState, detail, remedy);
                return Err(Problem { cause: Some(ErrorCode::InDoubt), ..problem });
            }
            Arc::clone(seen.info)
        };
        Ok(Located { client: self.agents.reachable(&info.host)?, info })
    }

    /// Refuses an operation on a VM that is moving. With `waiting`, also if its move has not begun.
    fn refuse_under_way(&self, info: &VmInfo, verb: &str, waiting: bool) -> Result<(), Problem> {
        let vm = &info.name;
        let refused = |why: String, remedy: String| {
            let detail = format!("VM \"{vm}\" cannot be {verb}: {why}");
            Err(Problem::new(ProblemCode::WrongState, detail, remedy))
        };
        let planned = self.state.inventory().planned_move(vm).map(str::to_owned);
        if let Some(id) = planned {
            let state = self.requests.moves()?.all().get(&id).map(|one| one.state);
            if waiting || state != Some(MoveState::Waiting) {
                let remedy =
                    format!("wait for its end, or cancel it: `godwit control move cancel {id}`");
                return refused(format!("move {id} is in progress"), remedy);
            }
        }
        match (info.state, &info.migration) {
            (VmState::MigratingOut | VmState::MigratingIn, Some(id)) => {
                let remedy =
                    format!("wait for its end, or cancel it: `godwit migration cancel {id}`");
                refused(format!("migration {id} is in progress"), remedy)
            }
            (VmState::MigratingOut | VmState::MigratingIn, None) => {
                refused("a migration is in progress".to_owned(), "wait for its end".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Saves the planned power state and asks the agent for it. If the agent refuses, the earlier
    /// plan is restored.
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
        let now = asked?;
        self.until_known(vm, host, Some(now.state)).await;
        Ok(now)
    }

    /// Removes the plan of a VM that no host reports.
    async fn forget_vm(&self, vm: &str, force: bool) -> Result<(), Problem> {
        let unreachable = {
            let inventory = self.state.inventory();
            inventory.vm_plan(vm).ok_or_else(|| no_vm(vm))?;
            inventory.unreachable_host().map(str::to_owned)
        };
        if let Some(host) = unreachable.filter(|_| !force) {
            let detail = format!(
                "no host reports VM \"{vm}\", but host {host}, which is unreachable, may have it"
            );
            let remedy =
                "check that its agent runs; with force, the manager removes its plan of the VM";
            return Err(Problem::new(ProblemCode::HostAway, detail, remedy));
        }
        self.plan_vm(vm, None).await
    }

    /// Saves the plan of a VM and applies it in memory.
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

    /// Waits until the list shows the VM in the state of its agent's answer, or without it. So the
    /// caller sees the result, and its next request is judged by it. Agents report changes in
    /// order, but shortly after their answer.
    async fn until_known(&self, vm: &str, host: &str, state: Option<VmState>) {
        self.until_seen(vm, host, |info| info.map(|info| info.state) == state).await;
    }

    /// Waits until the list shows the VM so that the condition holds, for at most [`KNOWN_LIMIT`].
    async fn until_seen(&self, vm: &str, host: &str, holds: impl Fn(Option<&VmInfo>) -> bool) {
        let mut news = self.state.events().listen(None);
        let known = async {
            while !holds(self.state.inventory().vm_at(host, vm).map(Arc::as_ref)) {
                if news.next().await.is_none() {
                    return;
                }
            }
        };
        // The agent's answer holds anyway, and the list will show it.
        let _ = timeout(KNOWN_LIMIT, known).await;
    }
}

/// Ends a VM at once if its agent now says that it has a process; the last report may be outdated.
/// A VM in doubt stays as it is.
async fn end(client: &Client, vm: &str) -> Result<(), Problem> {
    let now = match client.vm(vm).await {
        Err(error) if error.code() == Some(ErrorCode::NotFound) => return Ok(()),
        now => now?,
    };
    if !now.in_doubt && !now.state.is_off() {
        client.stop_vm(vm, StopVm { force: true, grace_ms: None }).await?;
    }
    Ok(())
}

/// Determines the outcome of a creation. If the answer was lost, asks the agent for the VM.
async fn settled(
    client: &Client,
    name: &str,
    uuid: Uuid,
    asked: Result<VmInfo, ClientError>,
) -> Result<VmInfo, Problem> {
    let lost = match asked {
        Ok(info) => return Ok(info),
        Err(ClientError::Refused(error)) => return Err(error.into()),
        Err(lost) => Problem::from(lost),
    };
    match client.vm(name).await {
        Ok(info) if info.spec.uuid == Some(uuid) => Ok(info),
        Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => Err(Problem {
            remedy: "nothing was created; try again when the host answers".to_owned(),
            ..lost
        }),
        _ => {
            let remedy = format!(
                "it is not known whether the VM was created: `godwit vm show {name}` shows it \
                 once its host answers"
            );
            Err(Problem { remedy, ..lost })
        }
    }
}

/// Returns the problem of an unreachable host that holds a VM's name.
fn host_away(vm: &str, host: &str) -> Problem {
    let detail = format!("host {host} has VM \"{vm}\", and its agent does not answer");
    Problem::new(ProblemCode::HostAway, detail, AWAY_REMEDY)
}

/// Returns the VM's whole memory in bytes.
fn memory_bytes(spec: &VmSpec) -> u64 {
    spec.memory.iter().map(|block| block.size.bytes()).fold(0, u64::saturating_add)
}
