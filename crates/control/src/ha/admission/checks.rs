//! Checks of the admission control. They try many combinations of hosts, so they run on threads of
//! their own and for a limited time: no request waits long, nor for those of others.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::VmInfo;
use godwit_planner::failover::{ProtectedVm, Shortfall, search};
use godwit_planner::placement::{Host, Rule};
use godwit_qemu::VmSpec;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::cluster::inventory::Inventory;
use crate::cluster::planner_input::{Arriving, placement_hosts};
use crate::cluster::state::State;
use crate::ha::restarts::{promise, protected_from};

/// Longest wait of a request for a check.
const WAIT_LIMIT: Duration = Duration::from_secs(1);
/// Longest duration of a check. A request that repeats the question gets its answer.
const SEARCH_LIMIT: Duration = Duration::from_secs(10);
/// Time for which an answer is kept: how much memory is free changes all the time.
const KEPT_FOR: Duration = Duration::from_secs(10);
/// Most answers that are kept.
const MOST_KEPT: usize = 64;
/// Most checks at the same time.
const MOST_AT_ONCE: usize = 2;

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// All VMs fit, whichever hosts fail.
    Fits,
    /// The worst failure that was found.
    Short(Shortfall),
    /// Nothing, and why the check did not end.
    Unknown(String),
}

/// Whether all VMs fit elsewhere with one more on a host.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Question {
    pub(super) spec: Box<VmSpec>,
    pub(super) host: String,
    /// Number of hosts that fail at once.
    pub(super) failures: u32,
}

/// An answer, which holds until the cluster changes.
#[derive(Debug)]
struct Kept {
    question: Question,
    cluster: u64,
    found: Found,
    at: Instant,
}

/// The checks in progress, and the latest answers.
#[derive(Clone, Debug)]
pub(super) struct Checks {
    kept: Arc<Mutex<Vec<Kept>>>,
    at_once: Arc<Semaphore>,
}

impl Default for Checks {
    fn default() -> Checks {
        Checks { kept: Arc::default(), at_once: Arc::new(Semaphore::new(MOST_AT_ONCE)) }
    }
}

impl Checks {
    /// Returns the answer to a question within [`WAIT_LIMIT`].
    pub(super) async fn ask(&self, state: &Arc<State>, question: Question) -> Found {
        let check = async {
            let turn = Arc::clone(&self.at_once).acquire_owned().await.ok()?;
            let (kept, state) = (Arc::clone(&self.kept), Arc::clone(state));
            let check = tokio::task::spawn_blocking(move || {
                let found = answer(&kept, &state, question);
                drop(turn);
                found
            });
            check.await.ok()
        };
        match timeout(WAIT_LIMIT, check).await {
            Ok(Some(found)) => found,
            Ok(None) => Found::Unknown("the check has failed".to_owned()),
            Err(_) => {
                let limit = WAIT_LIMIT.as_secs();
                Found::Unknown(format!("the check takes longer than {limit} s"))
            }
        }
    }
}

/// Returns the kept answer to a question, or searches for it.
fn answer(kept: &Mutex<Vec<Kept>>, state: &State, question: Question) -> Found {
    let (began, cluster) = (Instant::now(), fingerprint(&state.inventory()));
    {
        let mut kept = kept.lock();
        kept.retain(|kept| kept.cluster == cluster && kept.at.elapsed() < KEPT_FOR);
        if let Some(known) = kept.iter().find(|kept| kept.question == question) {
            return known.found.clone();
        }
    }
    let found = find(state, &question, &mut || began.elapsed() < SEARCH_LIMIT);
    if !matches!(found, Found::Unknown(_)) {
        let mut kept = kept.lock();
        kept.push(Kept { question, cluster, found: found.clone(), at: Instant::now() });
        let surplus = kept.len().saturating_sub(MOST_KEPT);
        kept.drain(..surplus);
    }
    found
}

/// Searches for the answer to a question, for as long as `goes_on`.
fn find(state: &State, question: &Question, goes_on: &mut dyn FnMut() -> bool) -> Found {
    let is_late = || {
        let limit = SEARCH_LIMIT.as_secs();
        Found::Unknown(format!("the check takes longer than {limit} s"))
    };
    let Some((vms, hosts, rules)) = with_vm(state, question, goes_on) else { return is_late() };
    let failures = usize::try_from(question.failures).unwrap_or(usize::MAX);
    let searched = search(&hosts, &rules, &vms, failures, goes_on);
    match searched.worst {
        Some(worst) => Found::Short(worst),
        None if searched.is_cut_short => is_late(),
        None => Found::Fits,
    }
}

/// Returns the protected VMs that run, with one more on a host, and the hosts and rules. `None`: it
/// takes too long. The inventory is locked for short times only: renewals need it meanwhile.
fn with_vm(
    state: &State,
    Question { spec, host, .. }: &Question,
    goes_on: &mut dyn FnMut() -> bool,
) -> Option<(Vec<ProtectedVm>, Vec<Host>, Vec<Rule>)> {
    let (mut hosts, rules, others, is_counted) = {
        let inventory = state.inventory();
        let hosts = placement_hosts(&Arriving::new(), &inventory.limits(), &inventory);
        let runs = |info: &&Arc<VmInfo>| {
            info.name != spec.name && info.spec.protect.is_some() && !info.state.is_off()
        };
        let others: Vec<Arc<VmInfo>> = inventory.all_vms().filter(runs).cloned().collect();
        let info = inventory.vm_at(host, &spec.name);
        let is_counted = info.is_some_and(|info| !info.state.is_off());
        (hosts, inventory.rules(), others, is_counted)
    };
    let mut vms = vec![protected_from(spec, host, &state.inventory())];
    for info in others {
        if !goes_on() {
            return None;
        }
        vms.push(protected_from(&info.spec, &info.host, &state.inventory()));
    }
    let target = hosts.iter_mut().find(|known| known.facts.name == *host);
    if let Some(target) = target.filter(|_| !is_counted) {
        promise(target, spec);
    }
    Some((vms, hosts, rules))
}

/// Returns a number that differs if something changed that decides about checks: VMs, hosts and
/// rules. Figures of their load do not count.
fn fingerprint(inventory: &Inventory) -> u64 {
    let mut hasher = DefaultHasher::new();
    for info in inventory.all_vms() {
        let runs = !info.state.is_off();
        (&info.name, &info.host, runs, info.memory_bytes, info.vcpus).hash(&mut hasher);
        (info.spec.protect, info.spec.tpm, &info.spec.extra_devices).hash(&mut hasher);
        info.spec.images().for_each(|image| image.hash(&mut hasher));
    }
    for (host, plan) in inventory.plans() {
        (host, inventory.is_up(host), plan.maintenance, &plan.labels).hash(&mut hasher);
        let info = inventory.host_info(host);
        info.map(|info| (info.memory_total_bytes, &info.vm_dirs)).hash(&mut hasher);
    }
    for Rule { name, strength, kind, vms } in inventory.rules() {
        format!("{strength:?} {kind:?}").hash(&mut hasher);
        (name, vms).hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use godwit_api::control::{AdmissionPolicy, HaSettings, ProblemCode};
    use godwit_planner::placement::{RuleKind, Strength};
    use godwit_qemu::RestartPriority;

    use super::*;
    use crate::ha::admission::{Admission, decide};
    use crate::rig;

    fn spec(name: &str, gib: u64) -> VmSpec {
        let spec = serde_json::json!({ "name": name, "memory": format!("{gib}G") });
        let spec: VmSpec = serde_json::from_value(spec).unwrap();
        VmSpec { protect: Some(RestartPriority::Normal), ..spec }
    }

    fn cluster() -> Arc<State> {
        let state = State::default();
        state.change(|inventory| {
            fill(inventory);
            None
        });
        Arc::new(state)
    }

    fn fill(inventory: &mut Inventory) {
        for name in ["a", "b"] {
            let mut vm = rig::vm(&format!("web-{name}"), name, None);
            vm.spec = spec(&vm.name, 40);
            vm.memory_bytes = 40 << 30;
            let mut info = rig::host(name, None);
            (info.memory_available_bytes, info.memory_committed_bytes) = (60 << 30, 40 << 30);
            rig::put_host(inventory, info, &[], vec![vm]);
        }
    }

    fn question(name: &str, gib: u64) -> Question {
        Question { spec: Box::new(spec(name, gib)), host: "a".to_owned(), failures: 1 }
    }

    #[tokio::test]
    async fn a_start_that_leaves_too_little_is_let_through_warned_about_or_refused() {
        let (state, admission) = (cluster(), Admission::default());
        let check = async |gib| admission.check(&state, &spec("db", gib), "a").await;
        assert_eq!(check(30).await, Ok(None), "not enabled");
        let settings = HaSettings { enabled: true, ..HaSettings::default() };
        admission.set(settings);
        assert_eq!(check(10).await, Ok(None));
        let warning = check(30).await.unwrap().unwrap();
        assert!(warning.contains("VM \"db\"") && warning.contains("not fit"), "{warning}");
        admission.set(HaSettings { admission: AdmissionPolicy::Refuse, ..settings });
        let refused = check(30).await.unwrap_err();
        assert_eq!(refused.code, ProblemCode::Conflict);
        assert!(refused.remedy.contains("admission"), "{}", refused.remedy);
        assert_eq!(check(10).await, Ok(None));
        let unprotected = VmSpec { protect: None, ..spec("db", 30) };
        assert_eq!(admission.check(&state, &unprotected, "a").await, Ok(None));
        admission.set(HaSettings { admission: AdmissionPolicy::Off, ..settings });
        assert_eq!(check(30).await, Ok(None));
    }

    #[test]
    fn a_check_without_time_knows_nothing_and_the_policy_decides() {
        let state = cluster();
        let whole = find(&state, &question("db", 30), &mut || true);
        assert!(matches!(whole, Found::Short(_)), "{whole:?}");
        for most in 0..4 {
            let mut steps = 0..most;
            let found = find(&state, &question("db", 10), &mut || steps.next().is_some());
            assert!(matches!(found, Found::Unknown(_)), "{most}: {found:?}");
        }
        let unknown = find(&state, &question("db", 10), &mut || false);
        let warning = decide(AdmissionPolicy::Warn, "db", unknown.clone()).unwrap().unwrap();
        assert!(warning.contains("unknown") && warning.contains("longer than"), "{warning}");
        let refused = decide(AdmissionPolicy::Refuse, "db", unknown).unwrap_err();
        assert_eq!(refused.code, ProblemCode::Conflict);
        assert!(refused.detail.contains("longer than"), "{}", refused.detail);
    }

    #[tokio::test]
    async fn a_request_does_not_wait_for_the_checks_of_others() {
        let (state, checks) = (cluster(), Checks::default());
        let all = u32::try_from(MOST_AT_ONCE).unwrap();
        let busy = Arc::clone(&checks.at_once).acquire_many_owned(all).await.unwrap();
        let found = checks.ask(&state, question("db", 10)).await;
        assert!(matches!(found, Found::Unknown(_)), "{found:?}");
        drop(busy);
        assert_eq!(checks.ask(&state, question("db", 10)).await, Found::Fits);
    }

    #[test]
    fn an_answer_holds_until_the_cluster_changes() {
        let (state, kept) = (cluster(), Mutex::default());
        let ask = |gib| answer(&kept, &state, question("db", gib));
        assert_eq!((ask(10), ask(10)), (Found::Fits, Found::Fits));
        assert_eq!(kept.lock().len(), 1);
        kept.lock()[0].found = Found::Unknown("kept".to_owned());
        assert_eq!(ask(10), Found::Unknown("kept".to_owned()));
        assert_eq!(ask(11), Found::Fits, "another question");
        state.change(|inventory| {
            let mut vm = rig::vm("web-c", "b", None);
            vm.spec = spec("web-c", 1);
            inventory.apply("b", godwit_api::HostEvent::Vm(Box::new(vm)), 2)
        });
        assert_eq!(ask(10), Found::Fits);
        assert_eq!(kept.lock().len(), 1, "all that was kept before is gone");
        for number in 0..2 * MOST_KEPT {
            answer(&kept, &state, question(&format!("db-{number}"), 1));
        }
        assert_eq!(kept.lock().len(), MOST_KEPT);
    }

    #[test]
    fn whatever_decides_about_a_check_is_in_the_fingerprint() {
        let state = cluster();
        let now = || fingerprint(&state.inventory());
        let before = now();
        assert_eq!(before, now());
        let rule = Rule {
            name: "apart".to_owned(),
            strength: Strength::Must,
            kind: RuleKind::Apart,
            vms: vec!["web-a".to_owned(), "web-b".to_owned()],
        };
        state.change(|inventory| inventory.plan_rule("apart", Some(rule)));
        assert_ne!(before, now());
        let before = now();
        state.lost("b", "it is silent");
        assert_ne!(before, now());
    }
}
