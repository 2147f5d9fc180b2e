//! CPU baseline of the cluster: the CPU of its guests, chosen so that each guest can move to each
//! host.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Value of [`SetCpuBaseline::model`] that selects the CPU common to all hosts.
pub const COMPUTED_BASELINE: &str = "computed";

/// CPU of the cluster's guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpuBaseline {
    /// Value for QEMU's `-cpu`: the `cpu_model` of a VM.
    pub cpu_model: String,
    /// All CPU features of a guest with this model, by QEMU's names.
    #[schema(value_type = Vec<String>)]
    pub features: BTreeSet<String>,
    /// Highest x86-64 psABI level that the model reaches; absent if not even the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// Requested model: a name, or `computed`.
    pub asked: String,
    /// Hosts exempted from the baseline when it was set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<String>,
    /// Time at which it was set, in milliseconds since 1970.
    pub set_unix_ms: u64,
    /// User who set it.
    pub set_by: String,
}

/// Whether a host satisfies the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BaselineFit {
    /// The host satisfies it.
    Meets,
    /// The host does not satisfy it: VMs are neither moved to it nor created on it.
    FallsShort,
    /// The agent has not reported the CPU available to guests.
    Unknown,
}

impl BaselineFit {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            BaselineFit::Meets => "meets",
            BaselineFit::FallsShort => "falls-short",
            BaselineFit::Unknown => "unknown",
        }
    }
}

/// A host compared with the baseline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BaselineHost {
    /// Name of the host.
    pub host: String,
    /// Whether the host satisfies the baseline; absent if there is no baseline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<BaselineFit>,
    /// Missing features, by QEMU's names, or the model itself if the host's QEMU cannot run it in
    /// full.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub lacks: BTreeSet<String>,
    /// Reason why the comparison is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Vendor of the processor, as CPUID reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vendor: Option<String>,
    /// Accelerator for its guests: `kvm` or `tcg`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accel: Option<String>,
    /// Highest x86-64 psABI level available to its guests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
}

/// CPU common to all hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommonCpu {
    /// The common CPU as a model: the baseline that `computed` would set.
    pub cpu_model: String,
    /// All CPU features of a guest with this model.
    #[schema(value_type = Vec<String>)]
    pub features: BTreeSet<String>,
    /// Highest x86-64 psABI level that the model reaches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// Vendors of the hosts' processors.
    #[schema(value_type = Vec<String>)]
    pub vendors: BTreeSet<String>,
}

/// A named baseline that all hosts satisfy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamedCpu {
    /// A psABI level, or the model of a CPU generation.
    pub name: String,
    /// Value for QEMU's `-cpu`.
    pub cpu_model: String,
}

/// Response of `GET /api/v1/cpu-baseline`. Hosts that have reported the CPU available to guests
/// determine `common` and `named`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "baseline": {
        "cpu_model": "Nehalem-v1,+aes", "features": ["aes", "lm", "pni", "sse4.2"],
        "level": "x86-64-v2", "asked": "computed",
        "set_unix_ms": 1_795_444_970_237_u64, "set_by": "ana"
    },
    "hosts": [
        { "host": "host-a", "fit": "meets", "vendor": "GenuineIntel", "accel": "kvm",
        "level": "x86-64-v3" },
        { "host": "host-b", "fit": "falls-short", "lacks": ["aes"], "vendor": "GenuineIntel",
        "accel": "kvm", "level": "x86-64-v2" },
        { "host": "host-c", "fit": "unknown", "why": "its agent has not reported yet" }
    ],
    "common": { "cpu_model": "Nehalem-v1", "features": ["lm", "pni", "sse4.2"],
    "level": "x86-64-v2", "vendors": ["GenuineIntel"] },
    "named": [{ "name": "x86-64-v2", "cpu_model": "Nehalem-v1" }],
    "must_restart_count": 1
}))]
pub struct CpuBaselineInfo {
    /// Baseline of the cluster; absent: each VM has the CPU of its specification.
    pub baseline: Option<CpuBaseline>,
    /// Every host, by name.
    pub hosts: Vec<BaselineHost>,
    /// CPU common to the hosts; if absent, `no_common` gives the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub common: Option<CommonCpu>,
    /// Reason why the hosts have no common CPU, and how to fix it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_common: Option<String>,
    /// Named baselines that every host satisfies.
    pub named: Vec<NamedCpu>,
    /// Running VMs whose CPU differs from the baseline; `GET /api/v1/cpu-baseline/vms` lists them.
    pub must_restart_count: u64,
}

/// A running VM whose CPU differs from the baseline. The VM keeps its CPU until QEMU is started
/// with the baseline's model, which must be in the VM's specification. A reboot inside the guest is
/// not enough.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "vm": "web", "host": "host-a", "cpu_model": "Haswell-v4", "beyond": ["avx2", "fma"],
    "why": "it has avx2, fma beyond the baseline"
}))]
pub struct BaselineVm {
    pub vm: String,
    /// Host that has the VM.
    pub host: String,
    /// CPU model that the VM was started with.
    pub cpu_model: String,
    /// Features that the VM would gain.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub lacks: BTreeSet<String>,
    /// Features that the VM has beyond the baseline; with them it cannot move to every host.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub beyond: BTreeSet<String>,
    /// Explanation in one line; also given if the features of the VM's model are unknown.
    pub why: String,
}

/// Request of `PUT /api/v1/cpu-baseline`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "model": "x86-64-v3", "without": ["host-b"] }))]
pub struct SetCpuBaseline {
    /// `computed` for the CPU common to the hosts, a psABI level (`x86-64-v2`), or a versioned QEMU
    /// model, which `,+feature` and `,-feature` may follow.
    #[schema(min_length = 1, max_length = 2048, pattern = "^[A-Za-z0-9=,+._-]+$")]
    pub model: String,
    /// Exempted hosts in use: no VM is moved to them from then on. `computed` ignores them.
    #[serde(default)]
    #[schema(max_items = 256)]
    pub without: Vec<String>,
}

/// Consequences of a baseline, set or planned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "set": false,
    "baseline": {
        "cpu_model": "Haswell-v4", "features": ["aes", "avx2", "lm", "pni"], "asked": "Haswell-v4",
        "set_unix_ms": 1_795_444_970_237_u64, "set_by": "ana"
    },
    "refused": "host host-b falls short of Haswell-v4: it lacks avx2",
    "falls_short": [{ "host": "host-b", "fit": "falls-short", "lacks": ["avx2"],
    "vendor": "GenuineIntel", "accel": "kvm" }],
    "unknown": ["host-c"],
    "must_restart_count": 1,
    "must_restart": [{ "vm": "web", "host": "host-a", "cpu_model": "Westmere-v1", "lacks": ["avx2"],
    "why": "it lacks avx2 of the baseline" }]
}))]
pub struct CpuBaselineChange {
    /// Whether the baseline was set; false for a plan, which changes nothing.
    pub set: bool,
    pub baseline: CpuBaseline,
    /// Reason why the baseline would be refused; absent if it would be accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Hosts that do not satisfy it, those in `without` included.
    pub falls_short: Vec<BaselineHost>,
    /// Hosts whose CPU is unknown.
    pub unknown: Vec<String>,
    /// Running VMs with another CPU; they must be restarted with this model to get it.
    pub must_restart_count: u64,
    /// The first of these VMs, by name. After the baseline is set, `GET /api/v1/cpu-baseline/vms`
    /// lists all of them.
    pub must_restart: Vec<BaselineVm>,
}
