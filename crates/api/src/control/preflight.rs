//! What stands in the way of a VM's move, check by check, before anything is made.

use godwit_types::DryRun;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What is checked. Stable: programs may match on the kebab-case names.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum CheckName {
    /// What the VM does: only one that runs or is paused is moved.
    VmState,
    /// Whether the target is heard, takes VMs, and is another host.
    Target,
    /// Features of the VM's CPU model against what guests can have at the target.
    Cpu,
    /// What the target lacks of the cluster's baseline.
    CpuBaseline,
    /// KVM or TCG: no guest moves between the two.
    Accelerator,
    /// The VM's machine type, at the target's QEMU.
    MachineType,
    QemuVersion,
    /// Guest memory that the target can give.
    Memory,
    /// Whether huge pages back guests on both.
    HugePages,
    /// Disks and boot files, at the target.
    Disks,
    /// Networks, at the target.
    Networks,
    /// Devices that can't move.
    Devices,
    /// Whether the source can track the guest's memory.
    Tracking,
    /// Addresses at which the migration arrives.
    Lanes,
    /// Versions of the two agents, which agree on the protocol.
    Protocol,
    /// Moves that run at both, against how many may.
    Limits,
    /// Whether the VM may run while pages of it are at the source.
    PageIn,
    /// Rules about where VMs may be.
    Rules,
    /// What the hosts themselves say when they are asked for a dry run.
    Agents,
    /// Whether it would end, and how.
    Prediction,
}

impl CheckName {
    /// The name that the API uses.
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

/// How a check came out; the later, the worse for a move.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing is in the way.
    Pass,
    /// It can move, and something is to be known before.
    Warn,
    /// What is known does not decide it.
    Unknown,
    /// It can't move.
    Fail,
}

impl Verdict {
    /// The name that the API uses.
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

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "networks", "verdict": "fail", "evidence": "host-b has no network \"prod\"", "remedy": "add it to networks of host-b's configuration"
}))]
pub struct Check {
    pub name: CheckName,
    /// How it came out.
    pub verdict: Verdict,
    /// What was seen, one line.
    pub evidence: String,
    /// What to do about it; empty: nothing is to be done.
    #[serde(default, alias = "mend", skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// A VM and a target, every check named.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PreflightReport {
    /// The VM.
    pub vm: String,
    /// The host that has it.
    pub from: String,
    /// The host that it would go to.
    pub to: String,
    /// The worst of the checks.
    pub verdict: Verdict,
    /// Every one of them.
    pub checks: Vec<Check>,
    /// What the source's agent foretells, where it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<DryRun>,
}

impl PreflightReport {
    /// The checks that keep the VM from moving.
    pub fn failed(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.verdict == Verdict::Fail)
    }
}

/// Of what a host's points are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlacementScore {
    /// All of them together, at most 100.
    pub total: f64,
    /// For memory that is left, at most 40.
    pub memory: f64,
    /// For cores that are idle, at most 30.
    pub cpu: f64,
    /// For few vCPUs a core, at most 10.
    pub vcpus: f64,
    /// For few that arrive, at most 15.
    pub lanes: f64,
    /// For a clone of the VM that is there, at most 5.
    pub clones: f64,
    /// What broken `should` rules take.
    pub rules: f64,
}

/// A host that can take the VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RankedHost {
    /// The host.
    pub host: String,
    /// Its points.
    pub score: PlacementScore,
    /// `should` rules that it breaks, by name.
    pub breaks: Vec<String>,
    /// Why it stands where it does.
    pub why: String,
}

/// A host that can't take the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuledOutHost {
    /// The host.
    pub host: String,
    /// All that is in the way, one line.
    pub why: String,
}

/// A VM and all hosts: where it can go, best first, and where it can't.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PreflightRanking {
    /// The VM.
    pub vm: String,
    /// The host that has it.
    pub from: String,
    /// What keeps it from going anywhere; empty: nothing.
    pub immovable: Vec<Check>,
    /// Hosts that can take it, best first.
    pub fits: Vec<RankedHost>,
    /// The others, by name.
    pub ruled_out: Vec<RuledOutHost>,
    /// The report of the best one, where a prediction was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<PreflightReport>,
}

/// `GET /api/v1/vms/{vm}/preflight`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[schema(example = json!({
    "kind": "report", "vm": "web", "from": "host-a", "to": "host-b", "verdict": "fail",
    "checks": [
        { "name": "target", "verdict": "pass", "evidence": "host-b is up" },
        { "name": "networks", "verdict": "fail", "evidence": "host-b has no network \"prod\"", "remedy": "add it to networks of host-b's configuration" }
    ]
}))]
pub enum Preflight {
    /// A target was named.
    Report(PreflightReport),
    /// None was.
    Ranking(PreflightRanking),
}
