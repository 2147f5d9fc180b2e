//! Baselines: the CPU that all guests of a cluster get, so that each guest can move to each host.
//!
//! **Common features** of hosts of one vendor are the features that all of them have, less
//! [`LEFT_OUT`]. The named model only sets the rest (family, caches). It is the newest model that
//! each host runs completely; `+feature` and `-feature` make up the difference. So the order of the
//! hosts does not matter, and another host never adds a feature.
//!
//! **Intel and AMD** share less than the intersection of feature names: see
//! [`SHARED_BETWEEN_VENDORS`]. KVM shows a guest its host's vendor unless the model sets one. A
//! guest must not find another vendor after a move, so a baseline of both vendors sets one.
//!
//! **KVM and TCG** share nothing. No guest moves between them, because their device states (clock,
//! interrupt controller) differ. Under TCG the vendor of the processor does not matter.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::HostCpu;
use super::features::CpuFeatures;
use super::generations::PsabiLevel;
use super::generations::{Generation, generation_of};
use super::model::CpuModel;
use crate::accel::Accelerator;

/// Features that no baseline contains, even if all hosts have them and QEMU calls them migratable.
///
/// - Removed by microcode or kernel updates from hosts that had them: `hle`, `rtm`, `tsx-ldtrk`
///   (TSX), `mpx`.
/// - Nested virtualization, whose state moves only where both kernels agree on it: `vmx…`, `svm`
///   and its parts.
/// - Host-specific: `monitor` (an idle loop that never leaves the guest), `intel-pt`, `arch-lbr`,
///   `lmce`, `acpi` (thermal MSRs that KVM lacks).
/// - Withdrawn: `pcommit`.
const LEFT_OUT: [&str; 27] = [
    "acpi",
    "arch-lbr",
    "avic",
    "decodeassists",
    "flushbyasid",
    "hle",
    "intel-pt",
    "lbrv",
    "lmce",
    "monitor",
    "mpx",
    "npt",
    "nrip-save",
    "pause-filter",
    "pcommit",
    "pfthreshold",
    "rtm",
    "svm",
    "svm-lock",
    "svme-addr-chk",
    "tsc-scale",
    "tsx-ldtrk",
    "v-vmsave-vmload",
    "vgif",
    "vmcb-clean",
    "vnmi",
    "x2avic",
];

/// Features that Intel and AMD processors implement alike, beside level v3 of the psABI. This is a
/// list because a common name is not enough.
///
/// It omits:
/// - AVX-512 and protection keys. Their registers have different places in the XSAVE area of each
///   vendor (CPUID leaf 0xD). A guest reads the layout once and uses it to save its programs'
///   registers.
/// - `xsaves`: the components that it may save differ.
/// - Speculation controls and reports (`spec-ctrl`, `ssbd`, `arch-capabilities`, `ibpb`,
///   `amd-ssbd`, …), which differ by vendor.
/// - 3DNow, SSE4a and topology leaves, which only AMD has.
const SHARED_BETWEEN_VENDORS: [&str; 44] = [
    "adx",
    "aes",
    "apic",
    "arat",
    "clflush",
    "clflushopt",
    "clwb",
    "de",
    "erms",
    "fsgsbase",
    "fsrm",
    "gfni",
    "invpcid",
    "mca",
    "mce",
    "msr",
    "mtrr",
    "nx",
    "pae",
    "pat",
    "pcid",
    "pclmulqdq",
    "pdpe1gb",
    "pge",
    "pse",
    "pse36",
    "rdpid",
    "rdrand",
    "rdseed",
    "rdtscp",
    "sep",
    "sha-ni",
    "smap",
    "smep",
    "tsc",
    "tsc-adjust",
    "tsc-deadline",
    "umip",
    "vaes",
    "vme",
    "vpclmulqdq",
    "x2apic",
    "xgetbv1",
    "xsaveopt",
];

/// CPUID leaf that describes the XSAVE area (Intel SDM, volume 2, CPUID). The highest leaf of a
/// model from before AVX is lower. QEMU raises it for most features, but not for `xsave` (7.2 and
/// 10.0).
const XSAVE_LEAF: u32 = 0xd;

/// The CPU that guests of a cluster get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Baseline {
    /// The value of `-cpu`: a VM's `cpu_model`.
    pub cpu_model: String,
    /// All features of a guest with this model.
    pub features: CpuFeatures,
}

impl Baseline {
    /// Returns what a host with these features lacks of the baseline; empty if it satisfies the
    /// baseline. `missing_of` returns what the host lacks of a model, `None` if its QEMU does not
    /// know the model.
    #[must_use]
    pub fn lacking(
        &self,
        features: &CpuFeatures,
        missing_of: impl FnOnce(&CpuModel) -> Option<CpuFeatures>,
    ) -> CpuFeatures {
        let model = self.model();
        let mut lacking: CpuFeatures = self.features.difference(features).cloned().collect();
        // A QEMU that lacks the model cannot start it, whatever features the processor has.
        lacking.extend(missing_of(&model).unwrap_or_else(|| [model.name].into()));
        lacking
    }

    /// Returns the baseline with this name: a level of the psABI (`x86-64-v3`), or a model with or
    /// without features, as any of the hosts' QEMUs defines it. `None` if no host knows its
    /// features.
    ///
    /// A level is not a model of QEMU. It becomes the oldest model that has about as many features,
    /// plus the rest of its features.
    #[must_use]
    pub fn named(name: &str, hosts: &[(&str, &HostCpu)]) -> Option<Baseline> {
        let defined = |model: &CpuModel| hosts.iter().find_map(|(_, host)| host.features_of(model));
        let Ok(level) = name.parse::<PsabiLevel>() else {
            let model = CpuModel::parse(name);
            return Some(Baseline { features: defined(&model)?, cpu_model: model.to_string() });
        };
        let definition = defined(&CpuModel::parse(level.model()))?;
        let features = definition.union(&level.features()).cloned().collect();
        Some(Baseline::of(level.model(), [&definition].into_iter(), features, None))
    }

    /// Builds the baseline from a model and exactly these features, however each QEMU defines the
    /// model.
    fn of<'a>(
        name: &str,
        definitions: impl Iterator<Item = &'a CpuFeatures> + Clone,
        features: CpuFeatures,
        vendor: Option<&str>,
    ) -> Baseline {
        let with: CpuFeatures = features
            .iter()
            .filter(|feature| !definitions.clone().all(|has| has.contains(*feature)))
            .cloned()
            .collect();
        let without =
            definitions.flatten().filter(|feature| !features.contains(*feature)).cloned().collect();
        let mut settings = BTreeMap::new();
        if with.contains("xsave") {
            settings.insert("min-level".to_owned(), XSAVE_LEAF.to_string());
        }
        settings.extend(vendor.map(|vendor| ("vendor".to_owned(), vendor.to_owned())));
        let model = CpuModel { name: name.to_owned(), with, without, settings };
        Baseline { cpu_model: model.to_string(), features }
    }

    #[must_use]
    pub fn model(&self) -> CpuModel {
        CpuModel::parse(&self.cpu_model)
    }
}

/// What hosts have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Common {
    /// The largest feature set of a guest that may move to each of them.
    pub baseline: Baseline,
    /// The vendors of their processors.
    pub vendors: BTreeSet<String>,
    /// Further features of each host, which its guests could have if they stayed there.
    pub beyond: BTreeMap<String, CpuFeatures>,
}

/// Why hosts have no common baseline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCommon {
    /// There are no hosts.
    #[error("there are no hosts to compare")]
    NoHosts,
    /// Some hosts run guests under KVM and others under TCG.
    #[error(
        "{} under KVM and {} under TCG: no guest moves between the two",
        running(kvm),
        running(tcg)
    )]
    MixedAccelerators {
        /// Hosts that run guests under KVM.
        kvm: Vec<String>,
        /// Hosts that run guests under TCG.
        tcg: Vec<String>,
    },
    /// All of them run no common named model completely.
    #[error("no named CPU model runs completely on each of the hosts")]
    NoModel,
}

impl NoCommon {
    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            NoCommon::NoHosts => "add a host whose agent answers",
            NoCommon::MixedAccelerators { .. } => {
                "separate them into two clusters, or see why some do not use KVM: `godwit host \
                show`"
            }
            NoCommon::NoModel => {
                "leave out the host with the fewest features, or upgrade the QEMUs to one version"
            }
        }
    }
}

fn running(hosts: &[String]) -> String {
    let verb = if hosts.len() == 1 { "runs guests" } else { "run guests" };
    format!("{} {verb}", hosts.join(", "))
}

/// Returns the best baseline that each of the hosts, given with their names, satisfies.
///
/// # Errors
/// The hosts have no common baseline. The error names the hosts responsible.
pub fn common_baseline(hosts: &[(&str, &HostCpu)]) -> Result<Common, NoCommon> {
    let Some((_, first)) = hosts.first() else { return Err(NoCommon::NoHosts) };
    check_accelerators(hosts)?;
    let vendors: BTreeSet<String> = hosts.iter().map(|(_, host)| host.vendor.clone()).collect();
    let rules = Rules { mixes_vendors: first.accel == Accelerator::Kvm && vendors.len() > 1 };
    let everywhere = |name: &&String| hosts.iter().all(|(_, host)| host.features.contains(*name));
    let shared: CpuFeatures = first
        .features
        .iter()
        .filter(everywhere)
        .filter(|name| !rules.leaves_out(name))
        .cloned()
        .collect();
    let candidates = first.models.keys().filter_map(|name| Candidate::of(name, hosts));
    let vendor =
        vendors.first().filter(|_| first.accel == Accelerator::Kvm && !rules.mixes_vendors);
    let best = candidates
        .filter(|candidate| candidate.is_whole(hosts, &shared, &rules))
        .max_by_key(|candidate| candidate.worth(vendor.map(String::as_str), &shared))
        .ok_or(NoCommon::NoModel)?;
    let shown = rules.mixes_vendors.then_some(best.generation.vendor);
    let baseline = Baseline::of(best.name, best.definitions.iter().copied(), shared, shown);
    let beyond = hosts.iter().map(|(name, host)| {
        let beyond = host.features.difference(&baseline.features).cloned().collect();
        ((*name).to_owned(), beyond)
    });
    Ok(Common { beyond: beyond.collect(), baseline, vendors })
}

impl HostCpu {
    /// Returns for each generation the model that guests can have here with all features that a
    /// baseline keeps, ordered by vendor and then from the oldest generation on. The last one is
    /// what this host runs best, because its own vendor comes last.
    #[must_use]
    pub fn best_models(&self) -> Vec<&str> {
        let (rules, alone) = (Rules { mixes_vendors: false }, [("", self)]);
        let mut best = BTreeMap::new();
        for candidate in self.models.keys().filter_map(|name| Candidate::of(name, &alone)) {
            if !candidate.is_whole(&alone, &self.features, &rules) {
                continue;
            }
            let Generation { vendor, rank, .. } = candidate.generation;
            let worth = (candidate.worth(None, &self.features), candidate.name);
            let place = (vendor == self.vendor, vendor, rank);
            let best = best.entry(place).or_insert_with(|| worth.clone());
            if worth > *best {
                *best = worth;
            }
        }
        best.into_values().map(|(_, name)| name).collect()
    }
}

fn check_accelerators(hosts: &[(&str, &HostCpu)]) -> Result<(), NoCommon> {
    let by = |accel| {
        let named = hosts.iter().filter(|(_, host)| host.accel == accel);
        let mut names: Vec<String> = named.map(|(name, _)| (*name).to_owned()).collect();
        names.sort();
        names
    };
    let (kvm, tcg) = (by(Accelerator::Kvm), by(Accelerator::Tcg));
    if kvm.is_empty() || tcg.is_empty() {
        return Ok(());
    }
    Err(NoCommon::MixedAccelerators { kvm, tcg })
}

/// The rules that exclude features from a baseline of these hosts.
struct Rules {
    mixes_vendors: bool,
}

impl Rules {
    fn leaves_out(&self, feature: &str) -> bool {
        let is_shared =
            || SHARED_BETWEEN_VENDORS.contains(&feature) || PsabiLevel::V3.asks_for(feature);
        LEFT_OUT.contains(&feature)
            || feature.starts_with("vmx")
            || (self.mixes_vendors && !is_shared())
    }
}

/// A named model that may become the model of a baseline.
struct Candidate<'a> {
    name: &'a str,
    generation: Generation,
    /// The definitions by the hosts' QEMUs that know the model; at least one.
    definitions: Vec<&'a CpuFeatures>,
}

impl<'a> Candidate<'a> {
    fn of(name: &'a str, hosts: &[(&str, &'a HostCpu)]) -> Option<Candidate<'a>> {
        let generation = generation_of(name)?;
        if hosts.iter().any(|(_, host)| host.deprecated.contains(name)) {
            return None;
        }
        let definitions: Vec<_> =
            hosts.iter().filter_map(|(_, host)| host.definitions.get(name)).collect();
        (!definitions.is_empty()).then_some(Candidate { name, generation, definitions })
    }

    /// Whether each host runs the model with all features that a baseline keeps.
    fn is_whole(&self, hosts: &[(&str, &HostCpu)], shared: &CpuFeatures, rules: &Rules) -> bool {
        let may_go = |feature: &String| rules.leaves_out(feature);
        let kept = self
            .definitions
            .iter()
            .copied()
            .flatten()
            .all(|name| shared.contains(name) || may_go(name));
        // Features that are left out are removed by name, where the definition has them.
        let goes =
            |name: &String| may_go(name) && self.definitions.iter().any(|has| has.contains(name));
        let runs = |host: &HostCpu| {
            host.models.get(self.name).is_some_and(|missing| missing.iter().all(goes))
        };
        kept && hosts.iter().all(|(_, host)| runs(host))
    }

    /// Ranks models: the newest of the hosts' vendor first. Without a common vendor, the one with
    /// most features kept and fewest removed. The rest makes the result unambiguous.
    fn worth(&self, vendor: Option<&str>, shared: &CpuFeatures) -> impl Ord + Clone + use<'a> {
        let is_vendors = vendor == Some(self.generation.vendor);
        let all: BTreeSet<&String> = self.definitions.iter().copied().flatten().collect();
        let kept = all.iter().filter(|name| shared.contains(**name)).count();
        let Generation { rank, version, .. } = self.generation;
        let newest = if is_vendors { rank } else { 0 };
        (is_vendors, newest, kept, Reverse(all.len() - kept), rank, version, self.name)
    }
}
