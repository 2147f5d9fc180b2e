//! The CPUs of a cluster at one moment: the features that hosts have in common, hosts that fall
//! short of a baseline, and VMs that must restart for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use godwit_api::control::{BaselineFit, BaselineHost, BaselineVm, CommonCpu, NamedCpu};
use godwit_api::{HostInfo, VmInfo};
use godwit_qemu::{
    AMD_GENERATIONS, Accelerator, Baseline, BaselineChange, Common, CpuFeatures, CpuModel,
    DEFAULT_CPU_MODEL, HostCpu, INTEL_GENERATIONS, NoCommon, PsabiLevel, RunningVm,
    change_of_baseline, common_baseline,
};

use crate::words::some_features;

/// A host in a survey.
#[derive(Clone, Debug)]
pub struct SurveyedHost {
    pub name: String,
    /// Whether the host accepts VMs, or has some.
    pub in_use: bool,
    /// The last report of its agent; `None` if the agent has not reported yet.
    pub info: Option<Arc<HostInfo>>,
}

/// A host and the kind of its CPU.
#[derive(Debug)]
struct SeenHost {
    name: String,
    in_use: bool,
    info: Option<Arc<HostInfo>>,
    /// Index of the kind of its CPU; `None` if unknown.
    kind: Option<usize>,
}

/// Hosts and VMs of a cluster at one moment.
#[derive(Debug)]
pub struct CpuSurvey {
    hosts: Vec<SeenHost>,
    /// Distinct CPUs of hosts: most hosts of a cluster are alike.
    kinds: Vec<(String, HostCpu)>,
    /// VMs that run.
    vms: Vec<Arc<VmInfo>>,
}

impl CpuSurvey {
    /// Creates a survey of hosts in the order of their names, and of VMs in any order. Leaves out
    /// VMs that do not run.
    #[must_use]
    pub fn new(
        hosts: impl IntoIterator<Item = SurveyedHost>,
        vms: impl IntoIterator<Item = Arc<VmInfo>>,
    ) -> CpuSurvey {
        let hosts = hosts.into_iter().map(|SurveyedHost { name, in_use, info }| {
            let kind = None;
            SeenHost { name, in_use, info, kind }
        });
        let runs = |vm: &Arc<VmInfo>| !vm.state.is_off();
        let mut vms: Vec<_> = vms.into_iter().filter(runs).collect();
        vms.sort_by(|one, other| one.name.cmp(&other.name));
        let mut survey = CpuSurvey { hosts: hosts.collect(), kinds: Vec::new(), vms };
        survey.sort_by_kind();
        survey
    }

    fn sort_by_kind(&mut self) {
        let mut known: Vec<Arc<HostInfo>> = Vec::new();
        for host in &mut self.hosts {
            let Some(info) = host.info.as_ref().filter(|info| info.cpu.is_some()) else { continue };
            let found = known.iter().position(|other| other.cpu == info.cpu);
            host.kind = Some(found.unwrap_or_else(|| {
                known.push(Arc::clone(info));
                known.len() - 1
            }));
        }
        let cpus = known.iter().filter_map(|info| info.cpu.as_ref());
        self.kinds =
            cpus.enumerate().map(|(kind, cpu)| (kind.to_string(), cpu.to_host_cpu())).collect();
    }

    fn kinds(&self) -> Vec<(&str, &HostCpu)> {
        self.kinds.iter().map(|(name, cpu)| (name.as_str(), cpu)).collect()
    }

    /// Whether the survey has a host of that name.
    #[must_use]
    pub fn has_host(&self, name: &str) -> bool {
        self.hosts.iter().any(|host| host.name == name)
    }

    /// Returns what hosts have in common, without the named ones. Ignores hosts with an unknown
    /// CPU.
    ///
    /// # Errors
    /// [`NoCommon`]: the hosts, named in the error, have nothing in common.
    pub fn common(&self, without: &[String]) -> Result<Common, NoCommon> {
        let meant = || self.hosts.iter().filter(|host| !without.contains(&host.name));
        let of: BTreeSet<usize> = meant().filter_map(|host| host.kind).collect();
        let cpus: Vec<(&str, &HostCpu)> = of
            .iter()
            .filter_map(|kind| self.kinds.get(*kind))
            .map(|(name, cpu)| (name.as_str(), cpu))
            .collect();
        common_baseline(&cpus).map_err(|error| match error {
            NoCommon::MixedAccelerators { .. } => {
                let by = |accel: Accelerator| {
                    let has =
                        |host: &&SeenHost| self.cpu(host).is_some_and(|cpu| cpu.accel == accel);
                    meant().filter(has).map(|host| host.name.clone()).collect()
                };
                NoCommon::MixedAccelerators { kvm: by(Accelerator::Kvm), tcg: by(Accelerator::Tcg) }
            }
            other => other,
        })
    }

    fn cpu(&self, host: &SeenHost) -> Option<&HostCpu> {
        host.kind.and_then(|kind| self.kinds.get(kind)).map(|(_, cpu)| cpu)
    }

    /// Returns the baseline of a name, with an alias resolved to its version; `None` if no host
    /// knows its features.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<Baseline> {
        let kinds = self.kinds();
        let mut baseline = Baseline::named(name, &kinds)?;
        let mut model = baseline.model();
        let knows = kinds.iter().find(|(_, cpu)| cpu.features_of(&model).is_some());
        if let Some(versioned) = knows.and_then(|(_, cpu)| cpu.aliases.get(&model.name)) {
            model.name.clone_from(versioned);
            baseline.cpu_model = model.to_string();
        }
        Some(baseline)
    }

    /// Returns the names that each host with a known CPU satisfies: levels, then generations, the
    /// oldest first.
    #[must_use]
    pub fn choices(&self) -> Vec<NamedCpu> {
        let mut choices = Vec::new();
        for name in self.names() {
            let Some(baseline) = self.named(&name) else { continue };
            if self.kinds.iter().all(|(_, cpu)| cpu.lacks_of(&baseline).is_empty()) {
                choices.push(NamedCpu { name, cpu_model: baseline.cpu_model });
            }
        }
        choices
    }

    /// Returns the names that at least one host knows.
    fn names(&self) -> Vec<String> {
        if self.kinds.is_empty() {
            return Vec::new();
        }
        let mut names: Vec<String> =
            PsabiLevel::ALL.iter().map(|level| level.name().to_owned()).collect();
        let models: BTreeSet<&String> =
            self.kinds.iter().flat_map(|(_, cpu)| cpu.definitions.keys()).collect();
        let is_deprecated =
            |name: &&String| self.kinds.iter().any(|(_, cpu)| cpu.deprecated.contains(*name));
        for generation in INTEL_GENERATIONS.iter().chain(&AMD_GENERATIONS) {
            let is_of =
                |name: &&&String| name.rsplit_once("-v").is_some_and(|(of, _)| of == *generation);
            names.extend(
                models.iter().filter(is_of).copied().filter(|name| !is_deprecated(name)).cloned(),
            );
        }
        names
    }

    /// Lists valid names of baselines, for an error about an unknown one.
    #[must_use]
    pub fn known_names(&self) -> String {
        self.names().join(", ")
    }

    /// Compares every host with a baseline; sorted by name.
    #[must_use]
    pub fn hosts(&self, baseline: Option<&Baseline>) -> Vec<BaselineHost> {
        let lacks =
            self.kinds.iter().map(|(_, cpu)| baseline.map(|baseline| cpu.lacks_of(baseline)));
        let lacks: Vec<Option<CpuFeatures>> = lacks.collect();
        let level = |cpu: &HostCpu| cpu.psabi_level().map(|level| level.name().to_owned());
        let of = |host: &SeenHost| {
            let cpu = self.cpu(host);
            let lacks = host.kind.and_then(|kind| lacks[kind].clone()).unwrap_or_default();
            let fit = match cpu {
                None => BaselineFit::Unknown,
                Some(_) if lacks.is_empty() => BaselineFit::Meets,
                Some(_) => BaselineFit::FallsShort,
            };
            BaselineHost {
                host: host.name.clone(),
                fit: baseline.map(|_| fit),
                lacks,
                why: cpu.is_none().then(|| why_unknown(host.info.as_deref())),
                vendor: cpu.map(|cpu| cpu.vendor.clone()),
                accel: cpu.map(|cpu| cpu.accel.name().to_owned()),
                level: cpu.and_then(level),
            }
        };
        self.hosts.iter().map(of).collect()
    }

    /// Whether a host accepts VMs, or has some.
    #[must_use]
    pub fn is_in_use(&self, name: &str) -> bool {
        self.hosts.iter().any(|host| host.name == name && host.in_use)
    }

    /// Returns the VMs that run with another CPU than the baseline's, by name.
    #[must_use]
    pub fn restarts(&self, baseline: &Baseline) -> Vec<BaselineVm> {
        let kind_of: BTreeMap<&str, usize> =
            self.hosts.iter().filter_map(|host| Some((host.name.as_str(), host.kind?))).collect();
        let model_of =
            |vm: &VmInfo| vm.spec.cpu_model.clone().unwrap_or_else(|| DEFAULT_CPU_MODEL.to_owned());
        // Many VMs have the same model on hosts of the same kind: each such pair is compared once.
        let mut pairs: BTreeMap<(String, Option<usize>), usize> = BTreeMap::new();
        let pair_of = |vm: &VmInfo| (model_of(vm), kind_of.get(vm.host.as_str()).copied());
        let its_own = baseline.model();
        for vm in &self.vms {
            let next = pairs.len();
            pairs.entry(pair_of(vm)).or_insert(next);
        }
        let running = pairs.iter().filter(|((model, _), _)| CpuModel::parse(model) != its_own);
        let running: Vec<RunningVm> = running
            .map(|((model, kind), pair)| RunningVm {
                name: pair.to_string(),
                cpu_model: model.clone(),
                host: kind.map(|kind| kind.to_string()).unwrap_or_default(),
            })
            .collect();
        let differs = differences(change_of_baseline(baseline, &self.kinds(), &running));
        let of = |vm: &Arc<VmInfo>| {
            let pair = pairs.get(&pair_of(vm))?;
            let (lacks, beyond) = differs.get(&pair.to_string())?.clone();
            let cpu_model = model_of(vm);
            let why = why(&cpu_model, &lacks, &beyond);
            Some(BaselineVm {
                vm: vm.name.clone(),
                host: vm.host.clone(),
                cpu_model,
                lacks,
                beyond,
                why,
            })
        };
        self.vms.iter().filter_map(of).collect()
    }
}

/// Returns for each VM or host that differs from the baseline its missing and its further features;
/// both are empty if unknown.
fn differences(change: BaselineChange) -> BTreeMap<String, (CpuFeatures, CpuFeatures)> {
    let BaselineChange { behind, beyond, unknown, .. } = change;
    let mut all: BTreeMap<String, (CpuFeatures, CpuFeatures)> = BTreeMap::new();
    for unmet in behind {
        all.entry(unmet.name).or_default().0 = unmet.features;
    }
    for unmet in beyond {
        all.entry(unmet.name).or_default().1 = unmet.features;
    }
    for name in unknown {
        all.entry(name).or_default();
    }
    all
}

fn why(model: &str, lacks: &CpuFeatures, beyond: &CpuFeatures) -> String {
    match (lacks.is_empty(), beyond.is_empty()) {
        (true, true) => format!("no host knows the features of CPU model {model}"),
        (false, true) => format!("it lacks {} of the baseline", some_features(lacks)),
        (true, false) => format!("it has {} beyond the baseline", some_features(beyond)),
        (false, false) => {
            format!(
                "it lacks {} of the baseline, and has {} beyond it",
                some_features(lacks),
                some_features(beyond)
            )
        }
    }
}

fn why_unknown(info: Option<&HostInfo>) -> String {
    match info {
        None => "its agent has not reported yet".to_owned(),
        Some(info) => {
            info.cpu_problem.clone().unwrap_or_else(|| "its QEMU has not been asked yet".to_owned())
        }
    }
}

/// Converts what hosts have in common for the API.
#[must_use]
pub fn common_cpu(common: &Common) -> CommonCpu {
    let Common { baseline, vendors, .. } = common;
    CommonCpu {
        cpu_model: baseline.cpu_model.clone(),
        features: baseline.features.clone(),
        level: PsabiLevel::of(&baseline.features).map(|level| level.name().to_owned()),
        vendors: vendors.clone(),
    }
}
