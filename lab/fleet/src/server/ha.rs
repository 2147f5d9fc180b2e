//! Guards of simulated hosts, and the heartbeats on their datastores. The production guard decides;
//! heartbeats are written when another host reads them.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use godwit_api::{
    ApiError, ChangeVm, CreateVm, ErrorCode, HaAnswer, HaForward, HaForwarded, HaHost, HaRenewal,
    HaStanding, HaVerdict, HeartbeatReading, HeartbeatSlot, HeartbeatState, OpenHeartbeat, OwnVm,
    ReadHeartbeats, ReleaseVms, ReleasedVm, START_CARRIED_OUT, StartProtected, TermHolder, VmInfo,
    VmState,
};
use godwit_ha::{Answer as JudgeAnswer, Grant, Guard, Mark, Order, Standing, Term, Timing};
use godwit_qemu::Uuid;

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{Agent, Answer, Refusal, Shared, body, no_host};
use crate::HeldClock;

/// Renewals whose answers are awaited, the newest ones.
const MOST_AWAITED: usize = 8;
/// Time for an answer that confirms the end of a VM's protection.
const ANSWER_LIMIT: Duration = Duration::from_secs(6);
/// Intervals for which a VM is named after its protection has ended.
const NAMED_INTERVALS: u32 = 10;

/// Guards of all hosts and the heartbeats on their datastores.
#[derive(Debug, Default)]
pub(crate) struct Guards {
    timing: Timing,
    hosts: BTreeMap<usize, Host>,
    blocks: HashMap<HeartbeatSlot, Mark>,
}

/// Guard of one host.
#[derive(Debug)]
struct Host {
    guard: Guard,
    holder: Option<TermHolder>,
    datastores: Vec<Uuid>,
    awaited: VecDeque<Awaited>,
    /// VMs whose protection is about to end, or has just ended.
    ending: BTreeMap<Uuid, Ending>,
    /// Attempts of starts that were carried out in this term.
    attempts: BTreeSet<Uuid>,
    /// Starts in progress.
    starting: usize,
    has_watchdog: bool,
    /// Whether only the manager does not reach its agent.
    is_cut_off: bool,
    released: Vec<ReleasedVm>,
    /// VMs that agents restart, as the host shows them, and its problems with them.
    own: (Vec<OwnVm>, Vec<String>),
}

/// A renewal whose answer is awaited.
#[derive(Debug)]
struct Awaited {
    nonce: u64,
    sent_at: Duration,
    ending: Vec<Uuid>,
}

/// How a VM is named in renewals.
#[derive(Debug)]
struct Ending {
    confirm: Option<oneshot::Sender<()>>,
    is_confirmed: bool,
    until: Duration,
}

impl Ending {
    fn new(confirm: Option<oneshot::Sender<()>>) -> Ending {
        Ending { confirm, is_confirmed: false, until: Duration::MAX }
    }

    fn confirm(&mut self) {
        self.is_confirmed = true;
        if let Some(confirm) = self.confirm.take() {
            // The change may have been given up.
            let _ = confirm.send(());
        }
    }
}

impl Guards {
    /// Sets the durations of all guards before their first term.
    pub(crate) fn set_timing(&mut self, timing: Timing) {
        *self = Guards { timing, ..Guards::default() };
    }

    pub(crate) fn set_watchdog(&mut self, at: usize, has_watchdog: bool) {
        self.host(at).has_watchdog = has_watchdog;
    }

    pub(crate) fn cut_off(&mut self, at: usize, is_cut_off: bool) {
        self.host(at).is_cut_off = is_cut_off;
    }

    pub(crate) fn is_cut_off(&mut self, at: usize) -> bool {
        self.host(at).is_cut_off
    }

    /// Sets what a host shows of VMs that agents restart.
    pub(crate) fn set_own(&mut self, at: usize, own: Vec<OwnVm>, problems: Vec<String>) {
        self.host(at).own = (own, problems);
    }

    /// Returns the VMs that a host had to give up: they were started elsewhere.
    pub(crate) fn released(&mut self, at: usize) -> Vec<ReleasedVm> {
        self.host(at).released.clone()
    }

    /// Has a host's renewals name these VMs and no others: their protection is about to end.
    pub(crate) fn end_protection(&mut self, at: usize, vms: Vec<Uuid>) {
        let host = self.host(at);
        // Answers to earlier renewals confirm nothing.
        host.awaited.clear();
        host.ending = vms.into_iter().map(|vm| (vm, Ending::new(None))).collect();
    }

    /// Returns whether the manager has answered a renewal that names these VMs.
    pub(crate) fn is_ending_confirmed(&mut self, at: usize) -> bool {
        self.host(at).ending.values().all(|ending| ending.is_confirmed)
    }

    fn host(&mut self, at: usize) -> &mut Host {
        let timing = self.timing;
        self.hosts.entry(at).or_insert_with(|| Host {
            guard: Guard::booted(timing, Term(0)),
            holder: None,
            datastores: Vec::new(),
            awaited: VecDeque::new(),
            ending: BTreeMap::new(),
            attempts: BTreeSet::new(),
            starting: 0,
            has_watchdog: true,
            is_cut_off: false,
            released: Vec::new(),
            own: (Vec::new(), Vec::new()),
        })
    }

    /// Writes the heartbeats of a host that are due.
    fn write(&mut self, at: usize, now: Duration) {
        let step_ns = self.timing.interval.as_nanos().max(1);
        let Guards { hosts, blocks, .. } = self;
        let Some(host) = hosts.get_mut(&at) else { return };
        let Some(TermHolder { cluster, host: id }) = host.holder else { return };
        let term = host.guard.term();
        for (place, datastore) in host.datastores.iter().enumerate() {
            if host.guard.check(now) != Order::Run {
                return;
            }
            let slot = HeartbeatSlot { cluster, host: id, datastore: *datastore };
            // Only over a block of its own term.
            let Some(mark) = blocks.get_mut(&slot).filter(|mark| mark.term == term) else {
                continue;
            };
            let due = u64::try_from(now.as_nanos() / step_ns).unwrap_or(u64::MAX);
            mark.sequence = mark.sequence.max(due.saturating_add(1));
            host.guard.written(now, now, term, place);
        }
    }
}

impl Host {
    /// Takes an answer. `is_unused`: no protected VM runs on the host.
    fn take(&mut self, timing: Timing, now: Duration, answer: HaAnswer, is_unused: bool) {
        let sent = self.awaited.iter().position(|sent| sent.nonce == answer.nonce);
        let Some(sent) = sent.and_then(|at| self.awaited.remove(at)) else { return };
        let (sent_at, former) = (sent.sent_at, self.guard.term());
        let is_over = *self.guard.standing() == Standing::Over;
        if self.holder.is_some_and(|holder| holder != answer.holder) && !is_over {
            return;
        }
        let is_rest = matches!(answer.verdict, HaVerdict::Rest { .. });
        let is_new_holder = self.holder.is_some_and(|holder| holder != answer.holder);
        let verdict = match answer.verdict {
            HaVerdict::Granted { term, datastores } => {
                if is_over {
                    self.datastores = datastores;
                }
                let datastores = self.datastores.len();
                JudgeAnswer::Granted(Grant { term: Term(term), datastores })
            }
            HaVerdict::Ended { term } => JudgeAnswer::Ended(Term(term)),
            HaVerdict::Unknown => JudgeAnswer::Unknown,
            HaVerdict::Rest { term } if Term(term) != former => JudgeAnswer::Unknown,
            HaVerdict::Rest { term } if is_unused && self.starting == 0 => {
                JudgeAnswer::Ended(Term(term))
            }
            HaVerdict::Rest { .. } => {
                let datastores = self.datastores.len();
                JudgeAnswer::Granted(Grant { term: former, datastores })
            }
        };
        if is_new_holder {
            self.guard = Guard::booted(timing, Term(0));
        }
        self.holder = Some(answer.holder);
        self.guard.answered(now, sent_at, verdict);
        if self.guard.term() != former {
            self.attempts.clear();
        }
        if !is_rest && !matches!(self.guard.standing(), Standing::Held(_)) {
            return;
        }
        for vm in &sent.ending {
            if let Some(ending) = self.ending.get_mut(vm) {
                ending.confirm();
            }
        }
    }
}

/// Returns the time on the clock of the guards.
fn now(shared: &Shared) -> Duration {
    let held = shared.clock_of_guards.get();
    held.map_or_else(|| shared.began.elapsed(), HeldClock::now)
}

/// Stops the protected VMs of a host whose term is lost.
fn enforce(shared: &Shared, at: usize) {
    let is_lost = shared.guards().host(at).guard.check(now(shared)) == Order::Stop;
    if !is_lost {
        return;
    }
    let mut world = shared.world();
    let vms = world.host(at).into_iter().flat_map(|host| host.vms.values());
    let protected = vms.filter(|vm| vm.spec.protect.is_some() && vm.state == VmState::Running);
    let names: Vec<String> = protected.map(|vm| vm.name.clone()).collect();
    for name in names {
        // It exists and does not migrate.
        let _ = world.power(at, &name, VmState::Failed);
    }
    drop(world);
    shared.guards().host(at).guard.vms_ended();
}

fn renewal_of(shared: &Shared, at: usize) -> HaRenewal {
    enforce(shared, at);
    let now = now(shared);
    let mut guards = shared.guards();
    let host = guards.host(at);
    let (nonce, _) = Uuid::new_v4().as_u64_pair();
    host.ending.retain(|_, ending| now < ending.until);
    let ending: Vec<Uuid> = host.ending.keys().copied().collect();
    host.awaited.push_back(Awaited { nonce, sent_at: now, ending: ending.clone() });
    if host.awaited.len() > MOST_AWAITED {
        host.awaited.pop_front();
    }
    let renewal = host.guard.renewal(now);
    let (holder, watchdog) = (host.holder, host.has_watchdog);
    HaRenewal {
        nonce,
        holder,
        term: renewal.term.0,
        over: renewal.over,
        watchdog,
        ending,
        here: None,
    }
}

fn take(shared: &Shared, at: usize, answer: HaAnswer) {
    let now = now(shared);
    let mut guards = shared.guards();
    let timing = guards.timing;
    let is_unused = {
        let world = shared.world();
        let mut vms = world.host(at).into_iter().flat_map(|host| host.vms.values());
        !vms.any(|vm| vm.spec.protect.is_some() && !vm.state.is_off())
    };
    guards.host(at).take(timing, now, answer, is_unused);
    drop(guards);
    enforce(shared, at);
}

pub(super) async fn show(State(agent): State<Agent>) -> Json<HaHost> {
    enforce(&agent.shared, agent.at);
    let now = now(&agent.shared);
    let mut guards = agent.shared.guards();
    let host = guards.host(agent.at);
    let left = host.guard.deadline().map(|deadline| deadline.saturating_sub(now).as_millis());
    let datastore = |datastore: &Uuid| HeartbeatState {
        datastore: *datastore,
        written_ms_ago: None,
        problem: None,
    };
    Json(HaHost {
        standing: match host.guard.standing() {
            Standing::Held(_) => HaStanding::Held,
            Standing::Stopping => HaStanding::Stopping,
            Standing::Over => HaStanding::Over,
        },
        term: host.guard.term().0,
        lease_left_ms: left.map(|left| u64::try_from(left).unwrap_or(u64::MAX)),
        watchdog: host.has_watchdog,
        watchdog_process: host.has_watchdog,
        answered_ms_ago: None,
        heartbeat_failures: 0,
        ending: Vec::new(),
        datastores: host.datastores.iter().map(datastore).collect(),
        vms: Vec::new(),
        own: host.own.0.clone(),
        own_problems: host.own.1.clone(),
    })
}

pub(super) async fn renewal(State(agent): State<Agent>) -> Json<HaRenewal> {
    Json(renewal_of(&agent.shared, agent.at))
}

pub(super) async fn answer(
    State(agent): State<Agent>,
    bytes: Bytes,
) -> Result<StatusCode, Refusal> {
    take(&agent.shared, agent.at, body(&bytes)?);
    Ok(StatusCode::NO_CONTENT)
}

/// Reaches every host whose agent responds, also one that the manager does not reach.
pub(super) async fn forward(State(agent): State<Agent>, bytes: Bytes) -> Answer<HaForwarded> {
    let HaForward { host, answer } = body(&bytes)?;
    let shared = &agent.shared;
    let at = shared.world().find(&host).ok_or_else(no_host)?;
    if shared.is_dead(at) {
        let message = format!("host {host} does not respond");
        return Err(ApiError::new(ErrorCode::PeerUnreachable, message, "").into());
    }
    let renewal = match answer {
        Some(answer) => {
            take(shared, at, answer);
            None
        }
        None => Some(renewal_of(shared, at)),
    };
    Ok(Json(HaForwarded { renewal }))
}

pub(super) async fn open_heartbeat(
    State(agent): State<Agent>,
    bytes: Bytes,
) -> Result<StatusCode, Refusal> {
    let OpenHeartbeat { slot, term } = body(&bytes)?;
    let mut guards = agent.shared.guards();
    let block = guards.blocks.entry(slot).or_insert(Mark { term: Term(term), sequence: 0 });
    if block.term < Term(term) {
        *block = Mark { term: Term(term), sequence: 0 };
    }
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn read_heartbeats(
    State(agent): State<Agent>,
    bytes: Bytes,
) -> Answer<Vec<HeartbeatReading>> {
    let ReadHeartbeats { slots } = body(&bytes)?;
    let now = now(&agent.shared);
    let alive: Vec<usize> = {
        let known: Vec<usize> = agent.shared.guards().hosts.keys().copied().collect();
        known.into_iter().filter(|at| !agent.shared.is_dead(*at)).collect()
    };
    let mut guards = agent.shared.guards();
    alive.into_iter().for_each(|at| guards.write(at, now));
    let found = slots.iter().map(|slot| match guards.blocks.get(slot) {
        Some(Mark { term, sequence }) => {
            HeartbeatReading::Block { term: term.0, sequence: *sequence }
        }
        None => HeartbeatReading::Failed { why: "there is no such file".to_owned() },
    });
    Ok(Json(found.collect()))
}

pub(super) async fn start(State(agent): State<Agent>, bytes: Bytes) -> Answer<VmInfo> {
    let request: StartProtected = body(&bytes)?;
    let (attempt, Agent { shared, at }) = (request.attempt, agent);
    let is_repeated = {
        let now = now(&shared);
        let mut guards = shared.guards();
        let host = guards.host(at);
        if !host.guard.may_start(now, Term(request.term)) {
            let StartProtected { spec, term, .. } = request;
            let message =
                format!("cannot start VM {}: this host does not hold term {term}", spec.name);
            return Err(refused(message).into());
        }
        host.starting += 1;
        !attempt.is_nil() && !host.attempts.insert(attempt)
    };
    let started = start_once(&shared, at, request, is_repeated);
    let mut guards = shared.guards();
    let host = guards.host(at);
    host.starting -= 1;
    if started.is_err() && !is_repeated {
        host.attempts.remove(&attempt);
    }
    Ok(Json(started?))
}

fn start_once(
    shared: &Shared,
    at: usize,
    request: StartProtected,
    is_repeated: bool,
) -> Result<VmInfo, ApiError> {
    let spec = request.spec;
    let mut world = shared.world();
    let known = world.host(at).and_then(|host| host.vms.get(&spec.name));
    match known.filter(|vm| vm.spec.uuid == spec.uuid) {
        Some(vm) if is_repeated => Ok(vm.clone()),
        Some(_) => world.power(at, &spec.name, VmState::Running),
        None if is_repeated => {
            let message = format!("cannot start VM {}: {START_CARRIED_OUT}", spec.name);
            Err(refused(message))
        }
        None => world.create_vm(at, CreateVm::new(spec, true)),
    }
}

fn refused(message: String) -> ApiError {
    ApiError::new(ErrorCode::WrongState, message, "see `godwit host ha`")
}

/// Waits until the manager has confirmed that the protection of a VM ends, if a change ends it.
pub(super) async fn admit_change(
    agent: &Agent,
    name: &str,
    request: &ChangeVm,
) -> Result<(), ApiError> {
    let Agent { shared, at } = agent;
    let Some((vm, is_stopped)) = unprotected_by(shared, *at, name, request) else {
        return Ok(());
    };
    let refusal = || {
        let why = "the manager has not confirmed it";
        refused(format!("cannot end the protection of VM {name}: {why}"))
    };
    let confirmed = {
        let mut guards = shared.guards();
        let host = guards.host(*at);
        if host.holder.is_none() {
            return Ok(());
        }
        match host.guard.check(now(shared)) {
            Order::Run => {}
            Order::Rest if is_stopped => {}
            Order::Rest | Order::Stop => return Err(refusal()),
        }
        let (confirm, confirmed) = oneshot::channel();
        host.ending.insert(vm, Ending::new(Some(confirm)));
        confirmed
    };
    let is_confirmed = matches!(timeout(ANSWER_LIMIT, confirmed).await, Ok(Ok(())));
    let mut guards = shared.guards();
    let until = now(shared) + guards.timing.interval * NAMED_INTERVALS;
    let ending = &mut guards.host(*at).ending;
    if !is_confirmed {
        ending.remove(&vm);
        return Err(refusal());
    }
    if let Some(named) = ending.get_mut(&vm) {
        named.until = until;
    }
    Ok(())
}

/// Returns the VM whose protection a change ends, and whether it is stopped.
fn unprotected_by(
    shared: &Shared,
    at: usize,
    name: &str,
    request: &ChangeVm,
) -> Option<(Uuid, bool)> {
    let world = shared.world();
    let vm = world.host(at)?.vms.get(name)?;
    let wanted = request.spec.apply_or_replace(&vm.spec, request.replace).ok()?;
    let ends = vm.spec.protect.is_some() && wanted.protect.is_none();
    Some((vm.spec.uuid?, vm.state == VmState::Stopped)).filter(|_| ends)
}

pub(super) async fn release(
    State(agent): State<Agent>,
    bytes: Bytes,
) -> Result<StatusCode, Refusal> {
    let ReleaseVms { vms } = body(&bytes)?;
    let Agent { shared, at } = agent;
    let mut world = shared.world();
    for vm in &vms {
        let known = world.host(at).and_then(|host| host.vms.get(&vm.name));
        if known.is_some_and(|known| known.incarnation == vm.incarnation) {
            world.power(at, &vm.name, VmState::Stopped)?;
            world.delete_vm(at, &vm.name)?;
        }
    }
    drop(world);
    shared.guards().host(at).released.extend(vms);
    Ok(StatusCode::NO_CONTENT)
}

/// Adds the routes of guards.
pub(super) fn routes(router: Router<Agent>) -> Router<Agent> {
    router
        .route("/v1/ha", get(show))
        .route("/v1/ha/renewal", post(renewal))
        .route("/v1/ha/answer", post(answer))
        .route("/v1/ha/forward", post(forward))
        .route("/v1/ha/heartbeats/open", post(open_heartbeat))
        .route("/v1/ha/heartbeats/read", post(read_heartbeats))
        .route("/v1/ha/start", post(start))
        .route("/v1/ha/release", post(release))
}

impl Shared {
    /// Has the guards count with `clock`. Further calls have no effect.
    pub(crate) fn set_clock_of_guards(&self, clock: HeldClock) {
        let _ = self.clock_of_guards.set(clock);
    }

    /// Returns whether nothing of a host responds and writes.
    fn is_dead(&self, at: usize) -> bool {
        let is_cut_off = self.guards().is_cut_off(at);
        self.world().is_silent(at) && !is_cut_off
    }
}
