//! Preflight: checks whether a VM can move, before anything is created.

use godwit_types::DryRun;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::TravellingDisks;
use crate::client::segment;

/// Name of a check. Stable: programs may match on the kebab-case names.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum CheckName {
    /// State of the VM: it must run or be paused.
    VmState,
    /// Whether the target is another host, is reachable and accepts VMs.
    Target,
    /// Whether the target offers the features of the VM's CPU model.
    Cpu,
    /// Whether the target satisfies the cluster's CPU baseline.
    CpuBaseline,
    /// KVM or TCG: a guest cannot move between the two.
    Accelerator,
    /// Whether the target's QEMU has the VM's machine type.
    MachineType,
    /// Whether the target has an image of the VM's firmware, and swtpm for its TPM.
    Firmware,
    QemuVersion,
    /// Whether the target has enough guest memory available.
    Memory,
    /// Whether both hosts back guest memory with huge pages.
    HugePages,
    /// Whether the target has the disks and boot files.
    Disks,
    /// Whether the target has the networks.
    Networks,
    /// Devices that cannot be migrated.
    Devices,
    /// Whether the source can track the guest's memory.
    Tracking,
    /// Addresses on which the target accepts migrations.
    Lanes,
    /// Whether the versions of the two agents have a common protocol.
    Protocol,
    /// Concurrent moves on both hosts, compared with the limits.
    Limits,
    /// Whether the VM may run while some of its pages are at the source.
    PageIn,
    /// Placement rules.
    Rules,
    /// Results of a dry run by the hosts themselves.
    Agents,
    /// Whether the migration would complete, and how.
    Prediction,
}

impl CheckName {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        use CheckName as N;
        match self {
            N::VmState => "vm-state",
            N::Target => "target",
            N::Cpu => "cpu",
            N::CpuBaseline => "cpu-baseline",
            N::Accelerator => "accelerator",
            N::MachineType => "machine-type",
            N::Firmware => "firmware",
            N::QemuVersion => "qemu-version",
            N::Memory => "memory",
            N::HugePages => "huge-pages",
            N::Disks => "disks",
            N::Networks => "networks",
            N::Devices => "devices",
            N::Tracking => "tracking",
            N::Lanes => "lanes",
            N::Protocol => "protocol",
            N::Limits => "limits",
            N::PageIn => "page-in",
            N::Rules => "rules",
            N::Agents => "agents",
            N::Prediction => "prediction",
        }
    }
}

/// Result of a check, ordered from best to worst.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The VM can move.
    Pass,
    /// The VM can move, with a warning.
    Warn,
    /// The available information does not decide the check.
    Unknown,
    /// The VM cannot move.
    Fail,
}

impl Verdict {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Warn => "warn",
            Verdict::Unknown => "unknown",
            Verdict::Fail => "fail",
        }
    }
}

/// A preflight check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "networks", "verdict": "fail", "evidence": "host-b has no network \"prod\"",
    "remedy": "add it to networks of host-b's configuration"
}))]
pub struct Check {
    pub name: CheckName,
    /// Result of the check.
    pub verdict: Verdict,
    /// Observation, in one line.
    pub evidence: String,
    /// How to fix it; empty if nothing has to be done.
    #[serde(default, alias = "mend", skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// Preflight result for a VM and a target host, with every check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PreflightReport {
    /// Name of the VM.
    pub vm: String,
    /// Host that has the VM.
    pub from: String,
    /// Target host.
    pub to: String,
    /// Worst result of the checks.
    pub verdict: Verdict,
    /// All checks.
    pub checks: Vec<Check>,
    /// Prediction of the source's agent, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<DryRun>,
}

impl PreflightReport {
    /// Returns the checks that failed.
    pub fn failed(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.verdict == Verdict::Fail)
    }
}

/// Components of a host's placement score.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlacementScore {
    /// Total, at most 100.
    pub total: f64,
    /// Points for remaining memory, at most 40.
    pub memory: f64,
    /// Points for idle cores, at most 30.
    pub cpu: f64,
    /// Points for few vCPUs per core, at most 10.
    pub vcpus: f64,
    /// Points for few incoming moves, at most 15.
    pub lanes: f64,
    /// Points for a clone of the VM on the host, at most 5.
    pub clones: f64,
    /// Deduction for violated `should` rules.
    pub rules: f64,
}

/// A host that can take the VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RankedHost {
    /// Name of the host.
    pub host: String,
    /// Placement score.
    pub score: PlacementScore,
    /// Names of the `should` rules that the placement violates.
    pub breaks: Vec<String>,
    /// Reason for the rank.
    pub why: String,
    /// Warning about the host, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<HostWarning>,
}

/// Why a host that can take a VM is not a good place for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostWarning {
    pub text: String,
    /// What an operator can do about it.
    pub remedy: String,
}

/// A host that cannot take the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuledOutHost {
    /// Name of the host.
    pub host: String,
    /// All reasons, in one line.
    pub why: String,
}

/// Preflight result for a VM and all hosts: eligible hosts, best first, and ineligible ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PreflightRanking {
    /// Name of the VM.
    pub vm: String,
    /// Host that has the VM.
    pub from: String,
    /// Failed checks that rule out every target; empty if there are none.
    pub immovable: Vec<Check>,
    /// Eligible hosts, best first.
    pub fits: Vec<RankedHost>,
    /// Ineligible hosts, by name.
    pub ruled_out: Vec<RuledOutHost>,
    /// Report for the best host, if a prediction was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<PreflightReport>,
}

/// Response of `GET /api/v1/vms/{vm}/preflight`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[schema(example = json!({
    "kind": "report", "vm": "web", "from": "host-a", "to": "host-b", "verdict": "fail",
    "checks": [
        { "name": "target", "verdict": "pass", "evidence": "host-b is up" },
        { "name": "networks", "verdict": "fail", "evidence": "host-b has no network \"prod\"",
        "remedy": "add it to networks of host-b's configuration" }
    ]
}))]
pub enum Preflight {
    /// Result if the request names a target.
    Report(PreflightReport),
    /// Result if the request names no target.
    Ranking(PreflightRanking),
}

/// Returns the query of a request for a preflight.
pub(super) fn preflight_query(
    to: Option<&str>,
    predict: bool,
    disks: Option<&TravellingDisks>,
) -> String {
    let mut query = format!("predict={predict}");
    if let Some(to) = to {
        query.push_str(&format!("&to={}", segment(to)));
    }
    if let Some(disks) = disks {
        query.push_str(&format!("&with_disks=true&flatten_disks={}", disks.flatten));
        if let Some(dir) = &disks.to {
            query.push_str(&format!("&disks_to={}", segment(&dir.to_string_lossy())));
        }
        if disks.overwrite {
            query.push_str("&overwrite_devices=true");
        }
    }
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_names_what_is_asked() {
        assert_eq!(preflight_query(None, false, None), "predict=false");
        let disks = TravellingDisks { to: Some("/new ssd".into()), ..TravellingDisks::default() };
        assert_eq!(
            preflight_query(Some("b"), true, Some(&disks)),
            "predict=true&to=b&with_disks=true&flatten_disks=false&disks_to=%2Fnew%20ssd"
        );
        let disks = TravellingDisks { overwrite: true, ..TravellingDisks::default() };
        assert_eq!(
            preflight_query(None, true, Some(&disks)),
            "predict=true&with_disks=true&flatten_disks=false&overwrite_devices=true"
        );
    }
}
