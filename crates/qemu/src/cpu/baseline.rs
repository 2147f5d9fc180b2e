//! A baseline: the CPU that all guests of a cluster get, so that each of them can go to each host.
//!
//! **What hosts have in common** is simple where they are of one vendor: the features that all of them have, less [`LEFT_OUT`]. The
//! named model only says what is beside features (family, caches), and is the newest that each host runs whole; `+feature` and `-feature`
//! make up the difference. So the order of the hosts does not matter, and a further host never adds anything.
//!
//! **Intel and AMD** share less than the intersection of names: see [`SHARED_BETWEEN_VENDORS`]. KVM shows a guest its host's vendor
//! unless the model names one, and a guest must not find another one after a move, so a baseline of both names one.
//!
//! **KVM and TCG** share nothing: no guest moves between them, as the device state of the one (clock, interrupt controller) is not that of
//! the other. Under TCG the vendor of the processor is of no concern.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::generations::{Generation, generation_of};
use super::{CpuFeatures, CpuModel, HostCpu, PsabiLevel};
use crate::spec::Accelerator;

/// Features that no baseline has, though all hosts may have them and QEMU calls them migratable.
///
/// Taken away by updates of microcode or kernel on hosts that had them: `hle`, `rtm`, `tsx-ldtrk` (TSX), `mpx`. Nested
/// virtualization, whose state moves only where both kernels agree on it: `vmx…`, `svm` and its parts. The host's own: `monitor`
/// (a guest's idle loop that never leaves the processor), `intel-pt`, `arch-lbr`, `lmce`, `acpi` (thermal MSRs that KVM lacks).
/// Withdrawn: `pcommit`.
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

/// What processors of Intel and of AMD do alike, beside level v3 of the psABI: a list, since a name in common is not enough.
///
/// Not in it: AVX-512 and protection keys, whose registers have other places in the XSAVE area on each (CPUID leaf 0xD), which a guest
/// has read once and saves its programs' registers by; `xsaves`, as what it may save differs; the controls and the tellings of
/// speculation (`spec-ctrl`, `ssbd`, `arch-capabilities`, `ibpb`, `amd-ssbd`, …), which each vendor has in its own way; 3DNow, SSE4a and
/// topology leaves, which only AMD has.
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

/// The CPUID leaf that describes the XSAVE area (Intel SDM, volume 2, CPUID). A model from before AVX ends below it, and QEMU raises
/// its end by most features, but not by `xsave` (7.2 and 10.0).
const XSAVE_LEAF: u32 = 0xd;

/// The CPU that guests of a cluster get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Baseline {
    /// What `-cpu` takes: a VM's `cpu_model`.
    pub cpu_model: String,
    /// All that a guest has by it.
    pub features: CpuFeatures,
}

impl Baseline {
    /// What a host lacks of it that has such features; empty: it satisfies it. `missing_of`: what the host lacks of a model, none where its QEMU
    /// does not know that.
    #[must_use]
    pub fn lacking(
        &self,
        features: &CpuFeatures,
        missing_of: impl FnOnce(&CpuModel) -> Option<CpuFeatures>,
    ) -> CpuFeatures {
        let model = self.model();
        let mut lacking: CpuFeatures = self.features.difference(features).cloned().collect();
        // A QEMU that lacks the model can't start it, whatever the processor has.
        lacking.extend(missing_of(&model).unwrap_or_else(|| [model.name].into()));
        lacking
    }

    /// The baseline of a name: a level of the psABI (`x86-64-v3`), or a model, with features or without, as any of the hosts' QEMUs
    /// defines it. None where no host knows what it holds.
    ///
    /// A level is no model of QEMU's: it becomes the oldest model that has about as much, with the rest of its features.
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

    /// The model made to have exactly these features, however each QEMU defines it.
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
    /// The most that a guest can have which may go to each of them.
    pub baseline: Baseline,
    /// The vendors of their processors.
    pub vendors: BTreeSet<String>,
    /// Of each host, what its guests could have beside that, if they stayed.
    pub beyond: BTreeMap<String, CpuFeatures>,
}

/// Why hosts have no baseline in common.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCommon {
    /// There are none.
    #[error("there is no host to have anything in common with")]
    NoHosts,
    /// Some run guests by KVM and others by TCG.
    #[error("{} by KVM and {} by TCG: no guest moves between the two", running(kvm), running(tcg))]
    MixedAccelerators {
        /// The hosts that run guests by KVM.
        kvm: Vec<String>,
        /// Those that run them by TCG.
        tcg: Vec<String>,
    },
    /// There is no named model that all of them run whole.
    #[error("no named CPU model runs whole on each of the hosts")]
    NoModel,
}

impl NoCommon {
    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            NoCommon::NoHosts => "add a host whose agent answers",
            NoCommon::MixedAccelerators { .. } => {
                "make two clusters of them, or see by `godwit host show` why KVM is not used on some"
            }
            NoCommon::NoModel => {
                "leave out the host that has the least, or upgrade the QEMUs to one version"
            }
        }
    }
}

fn running(hosts: &[String]) -> String {
    let verb = if hosts.len() == 1 { "runs guests" } else { "run guests" };
    format!("{} {verb}", hosts.join(", "))
}

/// The best baseline that each of the hosts, given with their names, satisfies.
///
/// # Errors
/// They have none in common; which of them are why.
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
    /// Of each generation the model that guests can have here with all that a baseline keeps of it, the oldest generation first, by
    /// vendor: what this host runs best. The host's own vendor's come last.
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

/// What does not go into a baseline of these hosts.
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

/// A named model that may be the one of a baseline.
struct Candidate<'a> {
    name: &'a str,
    generation: Generation,
    /// As each host's QEMU has it that says so; at least one does.
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

    /// Whether each host runs it with all that a baseline keeps of it.
    fn is_whole(&self, hosts: &[(&str, &HostCpu)], shared: &CpuFeatures, rules: &Rules) -> bool {
        let may_go = |feature: &String| rules.leaves_out(feature);
        let kept = self
            .definitions
            .iter()
            .copied()
            .flatten()
            .all(|name| shared.contains(name) || may_go(name));
        // What is left out is taken from it by name, where its definition has it.
        let goes =
            |name: &String| may_go(name) && self.definitions.iter().any(|has| has.contains(name));
        let runs = |host: &HostCpu| {
            host.models.get(self.name).is_some_and(|missing| missing.iter().all(goes))
        };
        kept && hosts.iter().all(|(_, host)| runs(host))
    }

    /// The newest of the hosts' vendor; where they have none in common, the one that is kept most, with least taken from it. The rest is
    /// for one answer where these are equal.
    fn worth(&self, vendor: Option<&str>, shared: &CpuFeatures) -> impl Ord + Clone + use<'a> {
        let is_vendors = vendor == Some(self.generation.vendor);
        let all: BTreeSet<&String> = self.definitions.iter().copied().flatten().collect();
        let kept = all.iter().filter(|name| shared.contains(**name)).count();
        let Generation { rank, version, .. } = self.generation;
        let newest = if is_vendors { rank } else { 0 };
        (is_vendors, newest, kept, Reverse(all.len() - kept), rank, version, self.name)
    }
}
