//! Restarts with hosts that die, lie, lose answers and come back, and leaders that change.

use godwit_api::control::HaPhase;
use godwit_api::{HostEvent, HostInfo, MigrationStatus, VmState};
use godwit_qemu::{RestartPriority, Uuid};
use godwit_store::{Candidate, MemoryStore, Store};
use godwit_types::Incarnation;
use proptest::prelude::*;

use super::starting::Outcome;
use super::*;
use crate::ha::terms::HostTerm;
use crate::rig;

mod lives;
mod scenes;

const WEB: &str = "web";
/// Host with an agent of an earlier version, whose renewals name no VMs.
const EARLIER: &str = "d";

/// What becomes of a request to start a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Reply {
    #[default]
    Starts,
    StartsUnanswered,
    /// The request arrives later, or never.
    Delayed,
    Refuses,
}

/// Hosts as they are, whatever the manager knows of them.
#[derive(Default)]
struct World {
    vms: BTreeMap<(String, String), VmInfo>,
    terms: BTreeMap<String, u64>,
    /// Hosts that hold their term.
    held: BTreeSet<String>,
    dead: BTreeSet<String>,
    /// Hosts whose agents answer no question, and how many they were asked.
    hanging: BTreeMap<String, usize>,
    replies: BTreeMap<String, Reply>,
    /// Requests that were received, in order.
    starts: Vec<(String, u64)>,
    delayed: Vec<(String, StartProtected)>,
    /// Starts that hosts have carried out in their terms.
    carried_out: BTreeSet<(String, Uuid)>,
    incarnations: u128,
    /// Hosts that run on and that the manager does not reach.
    cut: BTreeSet<String>,
    /// Hosts at which the VM waits for an answer to a renewal that names it, to arrive.
    arriving: BTreeSet<String>,
    /// Hosts that may run the VM, because a renewal that named it was answered.
    confirmed: BTreeSet<String>,
}

impl World {
    /// Starts a VM as an agent does: only in the term that the host holds.
    fn start(&mut self, host: &str, request: &StartProtected) -> Result<VmInfo, NotStarted> {
        if !self.held.contains(host) || self.terms.get(host) != Some(&request.term) {
            return Err(NotStarted::Refused("it does not hold that term".to_owned()));
        }
        let key = (host.to_owned(), request.spec.name.clone());
        if !self.carried_out.insert((host.to_owned(), request.attempt)) {
            let has_left = || NotStarted::HasLeft("it has left".to_owned());
            return self.vms.get(&key).cloned().ok_or_else(has_left);
        }
        let known = self.vms.get(&key).map(|info| info.incarnation);
        self.incarnations += 1;
        let incarnation = known.unwrap_or(Incarnation::new(100 + self.incarnations));
        let spec = request.spec.clone();
        let info = VmInfo { spec, incarnation, ..rig::vm(WEB, host, None) };
        self.vms.insert(key, info.clone());
        Ok(info)
    }

    /// Returns whether renewals of a host name the VM.
    fn names(&self, host: &str) -> bool {
        let info = self.vms.get(&(host.to_owned(), WEB.to_owned()));
        self.arriving.contains(host) || info.is_some_and(|info| info.spec.protect.is_some())
    }

    /// Returns whether an agent would let a VM that it has, or that arrives, run by itself.
    fn may_run(&self, host: &str, info: &VmInfo) -> bool {
        info.spec.protect.is_none() || host == EARLIER || self.confirmed.contains(host)
    }

    /// Moves the VM as agents do, without the manager: a protected one arrives after an answer to a
    /// renewal that names it. Returns what arrived.
    fn moves_by_agents(&mut self, from: &str, to: &str) -> Option<VmInfo> {
        let info = self.vms.get(&(from.to_owned(), WEB.to_owned())).cloned();
        if let Some(info) = info.filter(|info| !info.state.is_off() && from != to)
            && !self.may_run(to, &info)
        {
            self.arriving.insert(to.to_owned());
            return None;
        }
        let moved = self.moves(from, to);
        self.arriving.remove(to);
        let left = if moved.is_some() { from } else { to };
        if !self.names(left) {
            self.confirmed.remove(left);
        }
        moved
    }

    /// Moves what a host runs to another one that has no such VM.
    fn moves(&mut self, from: &str, to: &str) -> Option<VmInfo> {
        let at = |host: &str| (host.to_owned(), WEB.to_owned());
        let is_running = self.vms.get(&at(from)).is_some_and(|info| !info.state.is_off());
        let are_well = self.held.contains(from) && self.held.contains(to);
        if !is_running || !are_well || self.vms.contains_key(&at(to)) {
            return None;
        }
        let mut info = self.vms.remove(&at(from))?;
        (info.host, info.epoch) = (to.to_owned(), info.epoch + 1);
        self.vms.insert(at(to), info.clone());
        Some(info)
    }

    fn running(&self) -> Vec<&str> {
        let runs = self.vms.iter().filter(|(_, info)| !info.state.is_off());
        runs.map(|((host, _), _)| host.as_str()).collect()
    }

    /// Ends the protected VMs of a host, as its guard does.
    fn end_vms(&mut self, host: &str) {
        let at_host = self.vms.iter_mut().filter(|((at, _), _)| at == host);
        for (_, info) in at_host.filter(|(_, info)| info.spec.protect.is_some()) {
            info.state = VmState::Failed;
        }
    }
}

/// Agents of the world, whose reports reach the manager at once.
struct Agents {
    world: Mutex<World>,
    state: Arc<State>,
    store: MemoryStore,
}

#[async_trait]
impl RestartAgents for Agents {
    async fn vm(&self, host: &str, vm: &str) -> Result<Option<VmInfo>, String> {
        let hangs = self.world.lock().hanging.get_mut(host).map(|asked| *asked += 1);
        if hangs.is_some() {
            std::future::pending::<()>().await;
        }
        let world = self.world.lock();
        if world.dead.contains(host) {
            return Err("no route to host".to_owned());
        }
        Ok(world.vms.get(&(host.to_owned(), vm.to_owned())).cloned())
    }

    async fn start(&self, host: &str, request: &StartProtected) -> Result<VmInfo, NotStarted> {
        // The record is written before the request.
        let saved = PROTECTED.read_all(&self.store).await.unwrap().records;
        let saved = saved.into_iter().find(|kept| kept.id == request.spec.name).unwrap();
        let attempt = saved.record.restart.unwrap().attempt.unwrap();
        assert_eq!((attempt.host.as_str(), attempt.term), (host, request.term));
        assert_eq!(attempt.id, request.attempt);
        let mut world = self.world.lock();
        world.starts.push((host.to_owned(), request.term));
        let lost = || Err(NotStarted::Unanswered("the connection was lost".to_owned()));
        if world.dead.contains(host) {
            return lost();
        }
        let reply = world.replies.get(host).copied().unwrap_or_default();
        let started = match reply {
            Reply::Refuses => return Err(NotStarted::Refused("it has no memory".to_owned())),
            Reply::Delayed => {
                world.delayed.push((host.to_owned(), request.clone()));
                return lost();
            }
            Reply::Starts | Reply::StartsUnanswered => world.start(host, request)?,
        };
        drop(world);
        self.state.apply(host, HostEvent::Vm(Box::new(started.clone())));
        if reply == Reply::StartsUnanswered { lost() } else { Ok(started) }
    }
}

/// A manager's restarts and the world.
struct Rig {
    restarts: Arc<Restarts>,
    agents: Arc<Agents>,
    terms: Arc<Terms>,
    keeper: Arc<Keeper>,
    store: MemoryStore,
}

fn web(host: &str) -> VmInfo {
    let mut info = VmInfo { incarnation: Incarnation::new(1), ..rig::vm(WEB, host, None) };
    info.spec.uuid = Some(Uuid::from_u128(7));
    info.spec.protect = Some(RestartPriority::Normal);
    info
}

impl Rig {
    /// Returns a cluster of hosts that hold a term each, with a protected VM on the first one.
    async fn begin(hosts: &[&str]) -> Rig {
        let store = MemoryStore::new();
        let candidate = Candidate { name: "m1".to_owned(), address: "http://m1:7800".to_owned() };
        let leadership = Arc::new(store.lead(&candidate).await.unwrap());
        let keeper = Arc::new(Keeper::new(Arc::new(store.clone()), leadership, candidate));
        let state = Arc::<State>::default();
        let world = Mutex::new(World::default());
        let agents = Arc::new(Agents { world, state: Arc::clone(&state), store: store.clone() });
        let terms = Arc::new(Terms::default());
        for (index, host) in hosts.iter().enumerate() {
            let vms = if index == 0 { vec![web(host)] } else { Vec::new() };
            state.change(|inventory| {
                rig::put_host(inventory, rig::host(host, None), &[], vms.clone());
                None
            });
            let mut world = agents.world.lock();
            world.terms.insert((*host).to_owned(), 1);
            world.held.insert((*host).to_owned());
            for info in vms {
                world.vms.insert(((*host).to_owned(), WEB.to_owned()), info);
            }
            terms.set(host, HostTerm { term: 1, phase: HaPhase::Watching });
        }
        let restarts = restarts_of(&keeper, &agents, &terms).await;
        restarts.follow().await.unwrap();
        Rig { restarts, agents, terms, keeper, store }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.agents.world.lock()
    }

    fn state(&self) -> &State {
        &self.agents.state
    }

    fn record(&self) -> SavedVm {
        self.restarts.known().vms[WEB].clone()
    }

    /// Lets another leader take over. What renewals have named is unknown to it.
    async fn next_leader(&mut self) {
        let terms = self.terms.all();
        self.terms.clear();
        terms.iter().for_each(|(host, term)| self.terms.set(host, *term));
        self.restarts = restarts_of(&self.keeper, &self.agents, &self.terms).await;
    }

    /// Lets a host die. Its term is not over yet.
    fn dies(&self, host: &str) {
        let mut world = self.world();
        world.dead.insert(host.to_owned());
        world.held.remove(host);
        world.arriving.remove(host);
        world.confirmed.remove(host);
        world.end_vms(host);
        drop(world);
        self.state().lost(host, "no route to host");
    }

    /// Ends the term of a host.
    async fn ends(&self, host: &str) {
        let term = self.world().terms[host];
        self.terms.set(host, HostTerm { term, phase: HaPhase::Over });
        self.restarts.released(host, term).await.unwrap();
    }

    /// Lets a dead host come back, give up what it must and hold its next term.
    async fn returns(&self, host: &str) {
        let vms = {
            let mut world = self.world();
            world.dead.remove(host);
            world.cut.remove(host);
            let own = world.vms.iter().filter(|((at, _), _)| at == host);
            own.map(|(_, info)| info.clone()).collect::<Vec<_>>()
        };
        self.state().change(|inventory| {
            rig::put_host(inventory, rig::host(host, None), &[], vms);
            None
        });
        // It may have to wait until a start elsewhere is certain.
        if !self.delivers_releases(host).await {
            return;
        }
        let term = {
            let mut world = self.world();
            world.held.insert(host.to_owned());
            world.carried_out.retain(|(at, _)| at != host);
            let term = world.terms.get_mut(host).unwrap();
            *term += 1;
            *term
        };
        self.terms.set(host, HostTerm { term, phase: HaPhase::Watching });
    }

    /// Has a host delete what it must give up. Returns false if that is not certain yet.
    async fn delivers_releases(&self, host: &str) -> bool {
        let Ok(released) = self.restarts.take_releases(host).await else { return false };
        for vm in &released {
            let key = (host.to_owned(), vm.name.clone());
            let mut world = self.world();
            if world.vms.get(&key).is_some_and(|info| info.incarnation == vm.incarnation) {
                assert!(world.vms[&key].state.is_off(), "a running VM is released");
                world.vms.remove(&key);
                world.confirmed.remove(host);
                drop(world);
                self.state().apply(host, HostEvent::VmGone(vm.name.clone()));
            }
        }
        self.restarts.delivered(host, &released).await.unwrap();
        true
    }

    /// Has the manager answer a renewal of a host.
    async fn renews(&self, host: &str) {
        {
            let mut world = self.world();
            if !world.held.contains(host) || world.cut.contains(host) {
                return;
            }
            let names = world.names(host);
            let named: Vec<Uuid> = web(host).spec.uuid.filter(|_| names).into_iter().collect();
            self.terms.name(host, Some(named.as_slice()).filter(|_| host != EARLIER));
            if names {
                world.confirmed.insert(host.to_owned());
            }
        }
        if self.restarts.has_releases(host) {
            self.delivers_releases(host).await;
        }
    }

    /// Lets the manager lose its connection to a host that runs on.
    fn loses(&self, host: &str) {
        self.world().cut.insert(host.to_owned());
        self.state().lost(host, "no route to host");
    }

    /// Carries out what is due, without the pauses. Returns the results.
    async fn step(&self) -> Vec<Outcome> {
        for tries in self.restarts.known().tries.values_mut() {
            tries.not_before = None;
        }
        let mut outcomes = Vec::new();
        for step in self.restarts.due(MOST_STARTS) {
            let outcome = self.restarts.carry_out(&step).await.unwrap();
            outcomes.push(outcome.clone());
            self.restarts.ended(&step.vm, outcome);
        }
        outcomes
    }

    /// Has the manager see a renewal of a host that names no VM.
    async fn settle(&self, host: &str) {
        self.restarts.settle_endings(host, &[], Duration::from_secs(60)).await.unwrap();
    }

    /// Ends the protection of what a host runs, as its agent does: after the answer to a renewal.
    async fn unprotects(&self, host: &str) -> Option<VmInfo> {
        let key = (host.to_owned(), WEB.to_owned());
        let is_running = {
            let world = self.world();
            let runs = world.vms.get(&key).is_some_and(|info| !info.state.is_off());
            runs && world.held.contains(host)
        };
        if !is_running {
            return None;
        }
        let named = [web(host).spec.uuid.unwrap()];
        self.restarts.note_endings(host, &named).await.unwrap();
        let mut world = self.world();
        let info = world.vms.get_mut(&key)?;
        info.spec.protect = None;
        Some(info.clone())
    }

    fn starts(&self) -> Vec<(String, u64)> {
        self.world().starts.clone()
    }
}

async fn restarts_of(
    keeper: &Arc<Keeper>,
    agents: &Arc<Agents>,
    terms: &Arc<Terms>,
) -> Arc<Restarts> {
    let means = Means {
        keeper: Arc::clone(keeper),
        state: Arc::clone(&agents.state),
        agents: Arc::clone(agents) as Arc<dyn RestartAgents>,
        turns: Turns::default(),
        terms: Arc::clone(terms),
        troubles: Arc::default(),
        admission: Admission::default(),
    };
    Restarts::begin(means).await.unwrap()
}

fn waits(outcomes: &[Outcome], why: &str) -> bool {
    matches!(outcomes, [Outcome::Again { why: is }] if is.contains(why))
}
