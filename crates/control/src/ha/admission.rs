//! Admission control: whether all protected VMs would still fit after failures of hosts, with one
//! more (docs/ha.md).

mod checks;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use godwit_api::control::{AdmissionPolicy, HaSettings, Problem, ProblemCode};
use godwit_planner::failover::{ProtectedVm, Shortfall, shortfall};
use godwit_planner::placement::{Host, Rule};
use godwit_qemu::VmSpec;
use parking_lot::RwLock;

use crate::cluster::state::State;
use checks::{Checks, Found, Question};

/// The admission control, with the settings of the cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Admission {
    settings: Arc<RwLock<HaSettings>>,
    /// VMs that are to start elsewhere, or that may have: nobody else may start them.
    restarting: Arc<RwLock<BTreeSet<String>>>,
    checks: Checks,
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
    /// elsewhere, or if that cannot be determined soon, and the settings allow that.
    ///
    /// # Errors
    /// [`ProblemCode::Conflict`]: the settings refuse it.
    pub(crate) async fn check(
        &self,
        state: &Arc<State>,
        spec: &VmSpec,
        host: &str,
    ) -> Result<Option<String>, Problem> {
        let settings = self.settings();
        let is_checked = settings.enabled && settings.admission != AdmissionPolicy::Off;
        if spec.protect.is_none() || !is_checked {
            return Ok(None);
        }
        let (spec_of, host) = (Box::new(spec.clone()), host.to_owned());
        let question = Question { spec: spec_of, host, failures: settings.failures };
        let found = self.checks.ask(state, question).await;
        decide(settings.admission, &spec.name, found)
    }
}

/// Returns what happens to a start, by what a check has found.
fn decide(policy: AdmissionPolicy, vm: &str, found: Found) -> Result<Option<String>, Problem> {
    let (short, unknown) = match found {
        Found::Fits => return Ok(None),
        Found::Short(shortfall) => (Some(shortfall), String::new()),
        Found::Unknown(why) => (None, why),
    };
    if policy == AdmissionPolicy::Warn {
        return Ok(Some(match short {
            Some(found) => format!("with VM \"{vm}\", {found}"),
            None => format!(
                "it is unknown whether the protected VMs fit elsewhere with VM \"{vm}\": {unknown}"
            ),
        }));
    }
    let (why, remedy) = match short {
        Some(found) => (
            format!("with it, {found}"),
            "add a host or memory, protect fewer VMs, or change the admission control: \
             `godwit control ha set --admission warn`",
        ),
        None => (
            format!("it is unknown whether the protected VMs fit elsewhere with it: {unknown}"),
            "try again in some seconds, or change the admission control: \
             `godwit control ha set --admission warn`",
        ),
    };
    let detail = format!("cannot start protected VM \"{vm}\": {why}");
    Err(Problem::new(ProblemCode::Conflict, detail, remedy))
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
