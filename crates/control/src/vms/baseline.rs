//! Comparison of a VM's CPU model with the cluster's baseline (docs/cpu.md).

use godwit_api::HostCpuInfo;
use godwit_api::control::{Check, CheckName, Problem, ProblemCode, Verdict};
use godwit_planner::words::some_features;
use godwit_qemu::{Baseline, CpuFeatures, CpuModel, DEFAULT_CPU_MODEL, VmSpec};

use crate::cluster::inventory::Inventory;

/// Features of a model beyond the baseline.
#[derive(Debug)]
pub(super) enum Excess {
    /// The features.
    Features { model: String, baseline: String, features: CpuFeatures },
    /// No host knows the features of the model.
    Unknown { model: String, baseline: String },
}

/// Sets the baseline as the model of a VM without one, and refuses a VM whose model exceeds it.
pub(super) fn hold_to_baseline(
    inventory: &Inventory,
    spec: &mut VmSpec,
    host: Option<&str>,
) -> Result<(), Problem> {
    let Some(baseline) = inventory.baseline() else { return Ok(()) };
    if spec.cpu_model.is_none() {
        spec.cpu_model = inventory.guest_cpu_model().map(str::to_owned);
        return Ok(());
    }
    excess(inventory, baseline, spec, host).map_or(Ok(()), |excess| Err(excess.of_new(&spec.name)))
}

/// Returns what the model of a VM on a host has beyond the baseline. `None`: nothing, or there is
/// no baseline.
pub(super) fn exceeds(inventory: &Inventory, spec: &VmSpec, host: &str) -> Option<Excess> {
    excess(inventory, inventory.baseline()?, spec, Some(host))
}

fn excess(
    inventory: &Inventory,
    baseline: &Baseline,
    spec: &VmSpec,
    host: Option<&str>,
) -> Option<Excess> {
    let model = CpuModel::parse(spec.cpu_model.as_deref().unwrap_or(DEFAULT_CPU_MODEL));
    if model == baseline.model() {
        return None;
    }
    let (name, of) = (model.to_string(), baseline.cpu_model.clone());
    let hosts = inventory.seen_hosts().filter(|seen| host.is_none_or(|host| seen.name == host));
    let cpus = hosts.filter_map(|seen| seen.info?.cpu.as_ref());
    let Some(has) = features_of(&model, cpus).or_else(|| {
        // Another host may know the features of a model that its own cannot run.
        let all = inventory.seen_hosts().filter_map(|seen| seen.info?.cpu.as_ref());
        features_of(&model, all)
    }) else {
        return Some(Excess::Unknown { model: name, baseline: of });
    };
    let features: CpuFeatures = has.difference(&baseline.features).cloned().collect();
    (!features.is_empty()).then_some(Excess::Features { model: name, baseline: of, features })
}

/// Returns the features that a guest gets from a model on any of these hosts. `None`: no host knows
/// them.
fn features_of<'a>(
    model: &CpuModel,
    mut cpus: impl Iterator<Item = &'a HostCpuInfo>,
) -> Option<CpuFeatures> {
    if !model.is_hosts_own() {
        return cpus.find_map(|cpu| cpu.to_host_cpu().features_of(model));
    }
    // The model differs by host: assume the union of all.
    let mut has: Option<CpuFeatures> = None;
    for cpu in cpus {
        has.get_or_insert_default().extend(cpu.features.iter().cloned());
    }
    has.map(|has| has.difference(&model.without).chain(&model.with).cloned().collect())
}

impl Excess {
    fn of_new(self, vm: &str) -> Problem {
        self.problem(vm, "omit the model to use the baseline, or choose one within the baseline")
    }

    pub(super) fn of_stopped(self, vm: &str) -> Problem {
        let remedy = format!(
            "give it the baseline's model (`godwit vm set {vm} --unset cpu`), raise the baseline, \
             or start it with skip_preflight (`--skip-preflight`); then it cannot move to every \
             host"
        );
        self.problem(vm, &remedy)
    }

    fn problem(self, vm: &str, remedy: &str) -> Problem {
        let evidence = match self {
            Excess::Features { model, baseline, features } => {
                format!(
                    "{model} exceeds the cluster's baseline {baseline}, which lacks: {}",
                    some_features(&features)
                )
            }
            Excess::Unknown { model, baseline } => {
                format!(
                    "cannot compare CPU model {model} with the cluster's baseline {baseline}: \
                     no host knows its features"
                )
            }
        };
        let check = Check {
            name: CheckName::CpuBaseline,
            verdict: Verdict::Fail,
            evidence: evidence.clone(),
            remedy: remedy.to_owned(),
        };
        let detail = format!("VM \"{vm}\" cannot start: {evidence}");
        Problem {
            checks: Box::new([check]),
            ..Problem::new(ProblemCode::Preflight, detail, remedy)
        }
    }
}
