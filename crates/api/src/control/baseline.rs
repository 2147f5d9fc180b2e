//! The cluster's CPU baseline: the CPU that its guests get, so that each of them can go to each host.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What is asked for by [`SetCpuBaseline::model`]: what the hosts have in common.
pub const COMPUTED_BASELINE: &str = "computed";

/// The CPU that guests of the cluster get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpuBaseline {
    /// What QEMU's `-cpu` takes: a VM's `cpu_model`.
    pub cpu_model: String,
    /// All that a guest has by it, by QEMU's names.
    #[schema(value_type = Vec<String>)]
    pub features: BTreeSet<String>,
    /// The highest level of the x86-64 psABI that it reaches; none: not even the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// What was asked for: a name, or `computed`.
    pub asked: String,
    /// Hosts that may fall short of it, as was said when it was set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<String>,
    /// When it was set, milliseconds since 1970.
    pub set_unix_ms: u64,
    /// Who set it.
    pub set_by: String,
}

/// Whether a host has all of the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BaselineFit {
    /// It has.
    Meets,
    /// It has not: no VM is moved there and none is made there.
    FallsShort,
    /// Its agent has not told what CPU guests can have.
    Unknown,
}

impl BaselineFit {
    /// The name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            BaselineFit::Meets => "meets",
            BaselineFit::FallsShort => "falls-short",
            BaselineFit::Unknown => "unknown",
        }
    }
}

/// A host against the baseline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BaselineHost {
    /// The host.
    pub host: String,
    /// Whether it has all of it; none: there is no baseline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<BaselineFit>,
    /// What it lacks: features by QEMU's names, or the model itself where its QEMU does not have it whole.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub lacks: BTreeSet<String>,
    /// Why it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Its processor's vendor, as CPUID tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vendor: Option<String>,
    /// What runs its guests: `kvm` or `tcg`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accel: Option<String>,
    /// The highest level of the x86-64 psABI that its guests can have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
}

/// What the hosts have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommonCpu {
    /// As a CPU model: what `computed` would set.
    pub cpu_model: String,
    /// All that a guest has by it.
    #[schema(value_type = Vec<String>)]
    pub features: BTreeSet<String>,
    /// The highest level of the x86-64 psABI that it reaches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// The vendors of the hosts' processors.
    #[schema(value_type = Vec<String>)]
    pub vendors: BTreeSet<String>,
}

/// A baseline by name that all hosts could have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamedCpu {
    /// A level of the psABI, or a generation's model.
    pub name: String,
    /// What `-cpu` would take.
    pub cpu_model: String,
}

/// `GET /api/v1/cpu-baseline`. The hosts that have told what CPU guests can have make up `common` and `named`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "baseline": {
        "cpu_model": "Nehalem-v1,+aes", "features": ["aes", "lm", "pni", "sse4.2"], "level": "x86-64-v2", "asked": "computed",
        "set_unix_ms": 1_795_444_970_237_u64, "set_by": "ana"
    },
    "hosts": [
        { "host": "host-a", "fit": "meets", "vendor": "GenuineIntel", "accel": "kvm", "level": "x86-64-v3" },
        { "host": "host-b", "fit": "falls-short", "lacks": ["aes"], "vendor": "GenuineIntel", "accel": "kvm", "level": "x86-64-v2" },
        { "host": "host-c", "fit": "unknown", "why": "its agent has not been heard" }
    ],
    "common": { "cpu_model": "Nehalem-v1", "features": ["lm", "pni", "sse4.2"], "level": "x86-64-v2", "vendors": ["GenuineIntel"] },
    "named": [{ "name": "x86-64-v2", "cpu_model": "Nehalem-v1" }],
    "must_restart_count": 1
}))]
pub struct CpuBaselineInfo {
    /// The cluster's; none: each VM has the CPU that its specification says.
    pub baseline: Option<CpuBaseline>,
    /// Every host, by name.
    pub hosts: Vec<BaselineHost>,
    /// What the hosts have in common; none: `no_common` says why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub common: Option<CommonCpu>,
    /// Why they have nothing in common, and what to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_common: Option<String>,
    /// Names that each of them satisfies.
    pub named: Vec<NamedCpu>,
    /// VMs that run with another CPU than the baseline's: `GET /api/v1/cpu-baseline/vms` lists them.
    pub must_restart_count: u64,
}

/// A VM that runs with another CPU than the baseline's. It keeps that until QEMU is started for it with the baseline's model, which has to stand in
/// its specification: a restart inside the guest is not enough.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "vm": "web", "host": "host-a", "cpu_model": "Haswell-v4", "beyond": ["avx2", "fma"], "why": "it has avx2, fma beyond the baseline"
}))]
pub struct BaselineVm {
    pub vm: String,
    /// The host that has it.
    pub host: String,
    /// The model that it was started with.
    pub cpu_model: String,
    /// What it would get.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub lacks: BTreeSet<String>,
    /// What it has that the baseline has not: until then it can't go to every host.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub beyond: BTreeSet<String>,
    /// The same in one line, or that nobody says what its model holds.
    pub why: String,
}

/// `PUT /api/v1/cpu-baseline`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "model": "x86-64-v3", "without": ["host-b"] }))]
pub struct SetCpuBaseline {
    /// `computed`: what the hosts have in common; or a level of the psABI (`x86-64-v2`), or a model of QEMU's in a version, with
    /// `,+feature` and `,-feature` behind it.
    #[schema(min_length = 1, max_length = 2048, pattern = "^[A-Za-z0-9=,+._-]+$")]
    pub model: String,
    /// Hosts in use that may fall short of it: no VM is moved there from then on. `computed` leaves them out.
    #[serde(default)]
    #[schema(max_items = 256)]
    pub without: Vec<String>,
}

/// What a baseline means, set or planned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "set": false,
    "baseline": {
        "cpu_model": "Haswell-v4", "features": ["aes", "avx2", "lm", "pni"], "asked": "Haswell-v4",
        "set_unix_ms": 1_795_444_970_237_u64, "set_by": "ana"
    },
    "refused": "host host-b falls short of Haswell-v4: it lacks avx2",
    "falls_short": [{ "host": "host-b", "fit": "falls-short", "lacks": ["avx2"], "vendor": "GenuineIntel", "accel": "kvm" }],
    "unknown": ["host-c"],
    "must_restart_count": 1,
    "must_restart": [{ "vm": "web", "host": "host-a", "cpu_model": "Westmere-v1", "lacks": ["avx2"], "why": "it lacks avx2 of the baseline" }]
}))]
pub struct CpuBaselineChange {
    /// Whether it was set; else it is a plan, and nothing has changed.
    pub set: bool,
    pub baseline: CpuBaseline,
    /// Why it would not be set; none: it would.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Hosts that fall short of it, those in `without` too.
    pub falls_short: Vec<BaselineHost>,
    /// Hosts of which it is not known.
    pub unknown: Vec<String>,
    /// VMs that run with another CPU, and have to be started with this one to have it.
    pub must_restart_count: u64,
    /// The first of them, by name; `GET /api/v1/cpu-baseline/vms` lists all when it is set.
    pub must_restart: Vec<BaselineVm>,
}
