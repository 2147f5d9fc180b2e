//! One restart: all hosts are asked for the VM, the start is recorded, then requested.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use godwit_api::control::{JournalKind, Problem};
use godwit_api::{StartProtected, VmInfo};
use godwit_planner::failover::Restart;
use godwit_types::Incarnation;
use tokio::time::{Instant, timeout};

use super::record::{RELEASES, ReleaseKey, SavedAttempt, SavedLeftAt, SavedRestart, SavedVm};
use super::releases::{Releases, release, releases};
use super::whereabouts::{Answer, Asked, Whereabouts, whereabouts};
use super::{NotStarted, Restarts};
use crate::cluster::inventory::Inventory;
use crate::cluster::state::State;
use crate::journal::entries::NewEntry;
use crate::storage::keeper::Writes;

/// Longest wait for a host's answer whether it has a VM.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for the answer to a start; after it the start is requested again.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Longest wait for the inventory to show a VM that was started.
const KNOWN_LIMIT: Duration = Duration::from_secs(3);
/// Pauses before another try: of the first tries, and of later ones.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
/// Most silent hosts that release a VM after its start, all in one transaction.
const MOST_SILENT: usize = 32;
/// Number of tries with the short pause.
const SHORT_PAUSES: u32 = 10;

/// What is next for a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) vm: String,
    /// Host that is to start it; none: the start that may have been requested is requested again.
    pub(super) to: Option<Restart>,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The restart is over.
    Done,
    /// It is tried again.
    Again { why: String },
    /// This host refused it; another one is next.
    Refused { host: String, why: String },
}

/// A host that has a VM, as it answered.
#[derive(Clone, Debug)]
struct Found {
    host: String,
    incarnation: Incarnation,
    /// Whether it runs there; otherwise somebody stopped it.
    runs: bool,
    is_protected: bool,
}

impl Found {
    fn among(asked: &[Asked], host: String, incarnation: Incarnation, runs: bool) -> Found {
        let is_protected = asked.iter().any(|of| {
            let info = if let Answer::Has(info) = &of.answer { Some(info) } else { None };
            of.host == host && info.is_some_and(|info| info.spec.protect.is_some())
        });
        Found { host, incarnation, runs, is_protected }
    }
}

/// Name that is reserved for the VM that a host starts, released on drop.
struct Expected<'a> {
    state: &'a State,
    vm: &'a str,
}

impl<'a> Expected<'a> {
    fn at(state: &'a State, vm: &'a str, host: &str) -> Expected<'a> {
        state.change(|inventory| inventory.expect_vm(vm, Some(host)));
        Expected { state, vm }
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.state.change(|inventory| inventory.expect_vm(self.vm, None));
    }
}

/// Carries out a step.
pub(super) async fn restart(restarts: Arc<Restarts>, step: Step) {
    let outcome = restarts.carry_out(&step).await.unwrap_or_else(|problem| {
        tracing::warn!(vm = step.vm, %problem, "cannot record a restart; retrying");
        Outcome::Again { why: problem.detail }
    });
    restarts.ended(&step.vm, outcome);
}

impl Restarts {
    /// Notes the result of a step.
    pub(super) fn ended(&self, vm: &str, outcome: Outcome) {
        let mut known = self.known();
        let Outcome::Done = outcome else {
            let tries = known.tries.entry(vm.to_owned()).or_default();
            (tries.is_busy, tries.target) = (false, None);
            tries.failures = tries.failures.saturating_add(1);
            match outcome {
                Outcome::Refused { host, why } => {
                    tracing::warn!(vm, host, why, "a host cannot start a protected VM");
                    tries.why = Some(format!("host {host} refused it: {why}"));
                    tries.refused.insert(host, why);
                    drop(known);
                    self.news.notify_one();
                }
                Outcome::Again { why } => {
                    let is_early = tries.failures <= SHORT_PAUSES;
                    let pause = if is_early { PAUSES[0] } else { PAUSES[1] };
                    tries.not_before = Some(Instant::now() + pause);
                    if tries.why.as_ref() != Some(&why) {
                        tracing::warn!(vm, why, "a protected VM does not start yet");
                    }
                    tries.why = Some(why);
                }
                Outcome::Done => {}
            }
            return;
        };
        known.tries.remove(vm);
    }

    pub(super) async fn carry_out(&self, step: &Step) -> Result<Outcome, Problem> {
        let again = |why: &str| Ok(Outcome::Again { why: why.to_owned() });
        let Some(_turn) = self.means.turns.take(&format!("vm {}", step.vm)) else {
            return again("another request is working on it");
        };
        let Some(vm) = self.known().vms.get(&step.vm).cloned() else { return Ok(Outcome::Done) };
        let Some(restart) = vm.restart.clone() else { return Ok(Outcome::Done) };
        let asked = self.ask_all(&vm).await;
        match whereabouts(&vm, &asked) {
            Whereabouts::Unknown { why } => Ok(Outcome::Again { why }),
            Whereabouts::Runs { host, incarnation } => {
                let found = Found::among(&asked, host, incarnation, true);
                self.found(&vm, &restart, found).await
            }
            Whereabouts::Off { host, incarnation } => {
                let found = Found::among(&asked, host, incarnation, false);
                self.found(&vm, &restart, found).await
            }
            Whereabouts::Nowhere { left_at } => match (&restart.attempt, &step.to) {
                (Some(attempt), _) if self.means.terms.has_ended(&attempt.host, attempt.term) => {
                    self.give_up_attempt(&vm, &restart, attempt).await
                }
                (Some(attempt), _) => self.start(&vm, &restart, attempt, None, left_at).await,
                (None, None) => again("it has no host yet"),
                (None, Some(to)) => {
                    let silent = self.silent_with(&vm, &asked);
                    self.start_first(vm, &restart, to, left_at, silent).await
                }
            },
        }
    }

    /// Asks all hosts whether they have a VM. An answer that differs from the host's reports or
    /// renewals is none, because the VM may be moving. Renewals must rule a host out before the
    /// questions and after them: meanwhile the VM may move from it to one that has answered.
    async fn ask_all(&self, vm: &SavedVm) -> Vec<Asked> {
        let name = &vm.spec.name;
        let (hosts, ruled_out): (Vec<(String, Option<String>)>, BTreeSet<String>) = {
            let inventory = self.means.state.inventory();
            let away = |host: &str| match inventory.why_away(host) {
                Some(why) => Some(why.to_owned()),
                None => (!inventory.is_up(host)).then(|| "it has not reported yet".to_owned()),
            };
            let planned = inventory.plans().map(|(host, _)| (host.to_owned(), away(host)));
            // A host that left the cluster may hold its term still.
            let left = self.means.terms.all().into_keys();
            let left = left.filter(|host| inventory.host_plan(host).is_none());
            let left = left.map(|host| (host, Some("it left the cluster".to_owned())));
            let ruled_out = inventory.plans().map(|(host, _)| host.to_owned());
            let ruled_out = ruled_out.filter(|host| self.is_ruled_out(vm, host, &inventory));
            (planned.chain(left).collect(), ruled_out.collect())
        };
        let ask = |(host, away): (String, Option<String>)| async move {
            let answer = match away {
                Some(why) => Answer::Silent(why),
                None => match timeout(ASK_LIMIT, self.means.agents.vm(&host, name)).await {
                    Ok(Ok(Some(info))) => Answer::Has(Box::new(info)),
                    Ok(Ok(None)) => Answer::HasNot,
                    Ok(Err(why)) => Answer::Silent(why),
                    Err(_) => Answer::Silent("its agent does not answer in time".to_owned()),
                },
            };
            (host, answer)
        };
        let answers = join_all(hosts.into_iter().map(ask)).await;
        let inventory = self.means.state.inventory();
        let known = self.known();
        // Without its protection it does not end with a term, and may have moved on to any host.
        let may_be_unprotected = known.endings.iter().any(|key| Some(key.vm) == vm.spec.uuid);
        let asked = answers.into_iter().map(|(host, answer)| {
            let is_reported = inventory.is_up(&host) && inventory.vm_at(&host, name).is_some();
            let is_named = vm.spec.uuid.is_some_and(|uuid| self.means.terms.names(&host, uuid));
            let answer = match answer {
                Answer::HasNot if is_reported || is_named => {
                    Answer::Silent("its answer and its reports differ".to_owned())
                }
                answer => answer,
            };
            // After the answers, so that a term that has begun meanwhile counts.
            let is_over = self.means.terms.is_over(&host) && !may_be_unprotected;
            let is_ruled_out = !may_be_unprotected
                && ruled_out.contains(&host)
                && self.is_ruled_out(vm, &host, &inventory);
            Asked { host, answer, is_over, is_ruled_out }
        });
        asked.collect()
    }

    /// Returns whether a host cannot have a VM although its term may go on: it starts no protected
    /// VM that is new to it before an answer to a renewal that names the VM, and none was requested
    /// from it. What runs without protection is known only from a host that has reported.
    fn is_ruled_out(&self, vm: &SavedVm, host: &str, inventory: &Inventory) -> bool {
        let attempt = vm.restart.as_ref().and_then(|restart| restart.attempt.as_ref());
        let is_known = inventory.host_plan(host).is_some()
            && inventory.host_info(host).is_some()
            && inventory.vm_at(host, &vm.spec.name).is_none()
            && host != vm.host
            && attempt.is_none_or(|attempt| attempt.host != host);
        is_known && vm.spec.uuid.is_some_and(|uuid| !self.means.terms.may_have(host, uuid))
    }

    /// Returns the hosts whose term is over, that do not respond, and that had a VM when they last
    /// reported, or have not reported to this manager. Its own host is recorded anyway.
    fn silent_with(&self, vm: &SavedVm, asked: &[Asked]) -> Vec<String> {
        let inventory = self.means.state.inventory();
        let silent = asked.iter().filter(|of| of.is_over && matches!(of.answer, Answer::Silent(_)));
        let may_have = |host: &str| {
            inventory.host_plan(host).is_some()
                && (inventory.vm_at(host, &vm.spec.name).is_some()
                    || inventory.host_info(host).is_none())
        };
        let hosts = silent.map(|of| of.host.as_str()).filter(|host| *host != vm.host);
        hosts.filter(|host| may_have(host)).take(MOST_SILENT).map(str::to_owned).collect()
    }

    /// Records a start, then requests it. So the next leader continues it.
    async fn start_first(
        &self,
        vm: SavedVm,
        restart: &SavedRestart,
        to: &Restart,
        left_at: Vec<(String, Incarnation)>,
        silent: Vec<String>,
    ) -> Result<Outcome, Problem> {
        let terms = &self.means.terms;
        let Some(term) = terms.open(&to.host) else {
            return Ok(Outcome::Again { why: format!("host {} lost its term", to.host) });
        };
        // The next leader, or a later request of this one, releases what these have.
        let answered = left_at.iter().map(|(at, incarnation)| (at.clone(), Some(*incarnation)));
        let former = answered.chain(silent.into_iter().map(|at| (at, None)));
        let former = former.filter(|(at, _)| *at != to.host);
        let former = former.map(|(host, incarnation)| SavedLeftAt { host, incarnation });
        let attempt = SavedAttempt::new(&to.host, term, former.collect());
        let vm = self.with_attempt(vm, Some(attempt.clone())).await?;
        // From the record on, hosts that had it get no term. They may have got one just before.
        let may_have_it = left_at.iter().any(|(at, _)| *at == vm.host)
            || !self.means.state.inventory().is_up(&vm.host);
        let own = (to.host != vm.host && may_have_it).then_some(&vm.host);
        let silent = attempt.left_at.iter().filter(|left| left.incarnation.is_none());
        let mut former = own.into_iter().chain(silent.map(|left| &left.host));
        let back = former.find(|host| self.known().is_returning(host, terms)).cloned();
        if let Some(host) = back {
            let why = format!("its host {host} is about to hold a term again");
            self.with_attempt(vm, None).await?;
            return Ok(Outcome::Again { why });
        }
        self.start(&vm, restart, &attempt, Some(&to.why), left_at).await
    }

    /// Records that no start of a VM is requested, or which one.
    async fn with_attempt(
        &self,
        vm: SavedVm,
        attempt: Option<SavedAttempt>,
    ) -> Result<SavedVm, Problem> {
        let name = vm.spec.name.clone();
        let restart = vm.restart.clone().map(|restart| SavedRestart { attempt, ..restart });
        let next = SavedVm { restart, ..vm };
        let _saving = self.saving.lock().await;
        self.save(&name, Some(next.clone()), Writes::default()).await?;
        Ok(next)
    }

    /// Ends an attempt whose term is over: whatever it started has ended. The host may have its
    /// definition.
    async fn give_up_attempt(
        &self,
        vm: &SavedVm,
        restart: &SavedRestart,
        attempt: &SavedAttempt,
    ) -> Result<Outcome, Problem> {
        let (name, host) = (&vm.spec.name, &attempt.host);
        let next = SavedVm {
            restart: Some(SavedRestart { attempt: None, ..restart.clone() }),
            ..vm.clone()
        };
        let _saving = self.saving.lock().await;
        let mut given_up = Releases::new();
        if *host != vm.host {
            given_up.extend([release(vm, host, None, "another host")]);
        }
        let writes = self.put_releases(Writes::default(), &given_up).await?;
        self.save(name, Some(next), writes).await?;
        self.know_releases(given_up);
        Ok(Outcome::Again { why: format!("host {host} failed while it started the VM") })
    }

    /// Requests a start that is recorded. `why` is the reason for the host, at the first request of
    /// it; only then a refusal is the answer to all that was requested.
    async fn start(
        &self,
        vm: &SavedVm,
        restart: &SavedRestart,
        attempt: &SavedAttempt,
        why: Option<&str>,
        left_at: Vec<(String, Incarnation)>,
    ) -> Result<Outcome, Problem> {
        let (name, host) = (&vm.spec.name, &attempt.host);
        // The next leader may have carried out what a stopped one has recorded.
        if !self.means.keeper.holds() {
            return Ok(Outcome::Again { why: "this manager no longer leads".to_owned() });
        }
        let (spec, term) = (vm.spec.clone(), attempt.term);
        // No renewal of the host need have named it.
        if let Some(uuid) = spec.uuid {
            self.means.terms.request(host, uuid, term);
        }
        let request = StartProtected { spec, term, attempt: attempt.id };
        let _expected = Expected::at(&self.means.state, name, host);
        let agents = &self.means.agents;
        let asked = match timeout(START_LIMIT, agents.start(host, &request)).await {
            Ok(asked) => asked.and_then(|info| credible(vm, info, why.is_none())),
            Err(_) => Err(NotStarted::Unanswered("there is no answer in time".to_owned())),
        };
        match asked {
            Ok(info) => {
                let because = why.unwrap_or("the start was requested again");
                self.started(vm, restart, attempt, info.incarnation, left_at, because).await?;
                Ok(Outcome::Done)
            }
            Err(NotStarted::Refused(refusal)) => {
                // A host that has it in spite of its refusal keeps the attempt.
                let left = timeout(ASK_LIMIT, agents.vm(host, name)).await;
                let is_without = match &left {
                    Ok(Ok(found)) => found.as_ref().is_none_or(|info| info.state.is_off()),
                    _ => false,
                };
                if why.is_none() || !is_without {
                    let why = format!("host {host} refuses to start it: {refusal}");
                    return Ok(Outcome::Again { why });
                }
                self.with_attempt(vm.clone(), None).await?;
                Ok(Outcome::Refused { host: host.clone(), why: refusal })
            }
            // It is somewhere else: all hosts are asked again before it starts anew.
            Err(NotStarted::HasLeft(refusal)) => {
                self.has_left(vm, restart, attempt, left_at).await?;
                let why = format!("it was started and has left host {host} since: {refusal}");
                Ok(Outcome::Again { why })
            }
            Err(NotStarted::Unanswered(silence)) => {
                let why = format!("host {host} may have started it: {silence}");
                Ok(Outcome::Again { why })
            }
        }
    }

    /// Ends an attempt that was carried out, after which the VM has left its host. Definitions from
    /// before are given up; the incarnation of the new life is unknown.
    async fn has_left(
        &self,
        vm: &SavedVm,
        restart: &SavedRestart,
        attempt: &SavedAttempt,
        left_at: Vec<(String, Incarnation)>,
    ) -> Result<(), Problem> {
        let given_up = releases(vm, attempt, left_at, &attempt.host);
        let next = SavedVm {
            incarnation: Incarnation::UNRECORDED,
            restart: Some(SavedRestart { attempt: None, ..restart.clone() }),
            ..vm.clone()
        };
        let _saving = self.saving.lock().await;
        let writes = self.put_releases(Writes::default(), &given_up).await?;
        self.save(&vm.spec.name, Some(next), writes).await?;
        self.know_releases(given_up);
        Ok(())
    }

    /// Takes a VM as a host has it: the start of the restart, or a move that had ended.
    async fn found(
        &self,
        vm: &SavedVm,
        restart: &SavedRestart,
        found: Found,
    ) -> Result<Outcome, Problem> {
        let Found { host, incarnation, runs, is_protected } = found;
        let attempt = restart.attempt.as_ref();
        if let Some(attempt) = attempt.filter(|attempt| runs && attempt.host == host) {
            let why = "the start was requested before";
            self.started(vm, restart, attempt, incarnation, Vec::new(), why).await?;
            return Ok(Outcome::Done);
        }
        // A VM of another incarnation is the one that the requested start made.
        let was_started = incarnation != vm.incarnation;
        let is_open = |attempt: &SavedAttempt| {
            !was_started && !self.means.terms.has_ended(&attempt.host, attempt.term)
        };
        if let Some(attempt) = attempt.filter(|attempt| is_open(attempt)) {
            let why = format!("host {host} has it, and host {} may start it too", attempt.host);
            return Ok(Outcome::Again { why });
        }
        let name = &vm.spec.name;
        let has = if runs { "runs it" } else { "has it, stopped" };
        let text = format!("VM {name} need not restart: host {host} {has}");
        let entry = NewEntry::info(JournalKind::VmRestarted, text)
            .about("vm", name)
            .about("host", &host)
            .because(Some(format!("term {} of host {} has ended", restart.term, vm.host)));
        let mut given_up = Releases::new();
        if let Some(attempt) = attempt {
            if was_started {
                given_up = releases(vm, attempt, Vec::new(), &host);
            }
            if attempt.host != host {
                given_up.extend([release(vm, &attempt.host, None, &host)]);
            }
        }
        let next = SavedVm { host: host.clone(), incarnation, runs, restart: None, ..vm.clone() };
        // A VM without protection is nobody's to restart.
        let next = is_protected.then_some(next);
        self.end_restart(name, &host, next, given_up, entry).await?;
        self.bind(name, &host);
        Ok(Outcome::Done)
    }

    /// Records that a VM runs on its new host, and what other ones must give up.
    async fn started(
        &self,
        vm: &SavedVm,
        restart: &SavedRestart,
        attempt: &SavedAttempt,
        incarnation: Incarnation,
        left_at: Vec<(String, Incarnation)>,
        why: &str,
    ) -> Result<(), Problem> {
        let (name, host) = (&vm.spec.name, &attempt.host);
        let text = format!(
            "VM {name} restarted on host {host}: term {} of host {} has ended",
            restart.term, vm.host
        );
        let entry = NewEntry::warning(JournalKind::VmRestarted, text)
            .about("vm", name)
            .about("host", host)
            .about("host", &vm.host)
            .because(Some(why));
        let given_up = releases(vm, attempt, left_at, host);
        let next = SavedVm { host: host.clone(), incarnation, restart: None, ..vm.clone() };
        self.end_restart(name, host, Some(next), given_up, entry).await?;
        self.until_reported(name, host).await;
        self.bind(name, host);
        Ok(())
    }

    async fn end_restart(
        &self,
        name: &str,
        host: &str,
        next: Option<SavedVm>,
        given_up: Releases,
        entry: NewEntry,
    ) -> Result<(), Problem> {
        let _saving = self.saving.lock().await;
        let writes = self.put_releases(self.means.keeper.noting(entry)?, &given_up).await?;
        let own = ReleaseKey::new(host, name);
        self.save(name, next, writes).await?;
        self.know_releases(given_up);
        if self.known().releases.contains_key(&own) {
            self.means.keeper.remove(RELEASES, &own.id()).await?;
            self.known().releases.remove(&own);
        }
        Ok(())
    }

    /// Waits until the inventory shows a VM at a host, for at most [`KNOWN_LIMIT`]. If it does not,
    /// the name is bound in a later round.
    async fn until_reported(&self, vm: &str, host: &str) {
        let mut news = self.means.state.events().listen(None);
        let reported = async {
            while self.means.state.inventory().vm_at(host, vm).is_none() {
                if news.next().await.is_none() {
                    return;
                }
            }
        };
        let _ = timeout(KNOWN_LIMIT, reported).await;
    }
}

/// Checks that an answer is about the VM that was to start. What an earlier request started may
/// have been stopped since.
fn credible(vm: &SavedVm, info: VmInfo, is_repeated: bool) -> Result<VmInfo, NotStarted> {
    let is_it = info.name == vm.spec.name
        && (vm.spec.uuid.is_none() || info.spec.uuid == vm.spec.uuid)
        && (is_repeated || !info.state.is_off());
    if is_it {
        return Ok(info);
    }
    let why = "its answer is about another VM, or one that does not run";
    Err(NotStarted::Unanswered(why.to_owned()))
}
