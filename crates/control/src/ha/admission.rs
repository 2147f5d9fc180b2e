//! Admission control: whether all protected VMs would still fit after failures of hosts, with one
//! more (docs/ha.md).

use std::collections::BTreeSet;
use std::sync::Arc;

use godwit_api::VmInfo;
use godwit_api::control::{AdmissionPolicy, HaSettings, Problem, ProblemCode};
use godwit_planner::failover::{ProtectedVm, Shortfall, shortfall};
use godwit_planner::placement::{Host, Rule};
use godwit_qemu::VmSpec;
use parking_lot::RwLock;

use super::restarts::{promise, protected_from};
use crate::cluster::inventory::Inventory;
use crate::cluster::planner_input::{Arriving, placement_hosts};
use crate::cluster::state::State;

/// The admission control, with the settings of the cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Admission {
    settings: Arc<RwLock<HaSettings>>,
    /// VMs that are to start elsewhere, or that may have: nobody else may start them.
    restarting: Arc<RwLock<BTreeSet<String>>>,
}

impl Admission {
    /// Applies the settings of the cluster.
    pub(crate) fn set(&self, settings: HaSettings) {
        *self.settings.write() = settings;
    }

    pub(crate) fn settings(&self) -> HaSettings {
        *self.settings.read()
    }

    /// Replaces the VMs that are being restarted: those of a new leadership.
    pub(crate) fn set_restarting(&self, vms: BTreeSet<String>) {
        *self.restarting.write() = vms;
    }

    /// Notes whether a VM is being restarted.
    pub(crate) fn note_restart(&self, vm: &str, is_restarting: bool) {
        let mut restarting = self.restarting.write();
        if is_restarting {
            restarting.insert(vm.to_owned());
        } else {
            restarting.remove(vm);
        }
    }

    /// Refuses the start of a VM that is being restarted: another host may run it already.
    ///
    /// # Errors
    /// [`ProblemCode::WrongState`].
    pub(crate) fn check_restart(&self, vm: &str) -> Result<(), Problem> {
        if !self.restarting.read().contains(vm) {
            return Ok(());
        }
        let detail = format!("cannot start VM \"{vm}\": it is being restarted on another host");
        let remedy = "wait until it runs: `godwit control ha show` has the state of its restart";
        Err(Problem::new(ProblemCode::WrongState, detail, remedy))
    }

    /// Checks the start of a protected VM on a host. Returns a warning if the VMs would not fit
    /// elsewhere and the settings allow that.
    ///
    /// # Errors
    /// [`ProblemCode::Conflict`]: the settings refuse it.
    pub(crate) fn check(
        &self,
        state: &State,
        spec: &VmSpec,
        host: &str,
    ) -> Result<Option<String>, Problem> {
        let settings = self.settings();
        let is_checked = settings.enabled && settings.admission != AdmissionPolicy::Off;
        if spec.protect.is_none() || !is_checked {
            return Ok(None);
        }
        let (vms, hosts, rules) = with_vm(&state.inventory(), spec, host);
        // Without the inventory's lock: renewals need it meanwhile.
        let Some(found) = shortfall_now(&rules, settings, &vms, &hosts) else { return Ok(None) };
        let name = &spec.name;
        if settings.admission == AdmissionPolicy::Warn {
            return Ok(Some(format!("with VM \"{name}\", {found}")));
        }
        let detail = format!("cannot start protected VM \"{name}\": with it, {found}");
        let remedy = "add a host or memory, protect fewer VMs, or change the admission control: \
            `godwit control ha set --admission warn`";
        Err(Problem::new(ProblemCode::Conflict, detail, remedy))
    }
}

/// Returns the worst failure that leaves VMs without a place.
pub(crate) fn shortfall_now(
    rules: &[Rule],
    settings: HaSettings,
    vms: &[ProtectedVm],
    hosts: &[Host],
) -> Option<Shortfall> {
    if !settings.enabled {
        return None;
    }
    let failures = usize::try_from(settings.failures).unwrap_or(usize::MAX);
    shortfall(hosts, rules, vms, failures)
}

/// Returns the protected VMs that run, with one more on a host, and the hosts and rules.
fn with_vm(
    inventory: &Inventory,
    spec: &VmSpec,
    host: &str,
) -> (Vec<ProtectedVm>, Vec<Host>, Vec<Rule>) {
    let mut hosts = placement_hosts(&Arriving::new(), &inventory.limits(), inventory);
    let runs = |info: &&Arc<VmInfo>| {
        info.name != spec.name && info.spec.protect.is_some() && !info.state.is_off()
    };
    let others = inventory.all_vms().filter(runs);
    let mut vms: Vec<ProtectedVm> =
        others.map(|info| protected_from(&info.spec, &info.host, inventory)).collect();
    let is_counted = inventory.vm_at(host, &spec.name).is_some_and(|info| !info.state.is_off());
    if let Some(host) = hosts.iter_mut().find(|known| known.facts.name == host && !is_counted) {
        promise(host, spec);
    }
    vms.push(protected_from(spec, host, inventory));
    (vms, hosts, inventory.rules())
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod decisions {
    use godwit_qemu::RestartPriority;

    use super::*;
    use crate::rig;

    fn spec(name: &str, gib: u64) -> VmSpec {
        let spec = serde_json::json!({ "name": name, "memory": format!("{gib}G") });
        let spec: VmSpec = serde_json::from_value(spec).unwrap();
        VmSpec { protect: Some(RestartPriority::Normal), ..spec }
    }

    fn cluster() -> State {
        let state = State::default();
        state.change(|inventory| {
            fill(inventory);
            None
        });
        state
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

    #[test]
    fn a_start_that_leaves_too_little_is_let_through_warned_about_or_refused() {
        let (state, admission) = (cluster(), Admission::default());
        let check = |gib| admission.check(&state, &spec("db", gib), "a");
        assert_eq!(check(30), Ok(None), "not enabled");
        let settings = HaSettings { enabled: true, ..HaSettings::default() };
        admission.set(settings);
        assert_eq!(check(10), Ok(None));
        let warning = check(30).unwrap().unwrap();
        assert!(warning.contains("VM \"db\"") && warning.contains("not fit"), "{warning}");
        admission.set(HaSettings { admission: AdmissionPolicy::Refuse, ..settings });
        let refused = check(30).unwrap_err();
        assert_eq!(refused.code, ProblemCode::Conflict);
        assert!(refused.remedy.contains("admission"), "{}", refused.remedy);
        assert_eq!(check(10), Ok(None));
        let unprotected = VmSpec { protect: None, ..spec("db", 30) };
        assert_eq!(admission.check(&state, &unprotected, "a"), Ok(None));
        admission.set(HaSettings { admission: AdmissionPolicy::Off, ..settings });
        assert_eq!(check(30), Ok(None));
    }
}
