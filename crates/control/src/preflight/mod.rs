//! Preflight: what is in the way of a VM's move, check by check, of what is known. No I/O: what only the hosts themselves can answer is
//! `unknown` here, until a dry run of the source's agent is put in ([`with_dry_run`]).
//!
//! Checks of the VM alone (`vm.rs`) say what keeps it from going anywhere; those of a VM and a target (`pair.rs`) what keeps it from there.
//! Placement and drains get the same checks as [`Obstacles`].

mod answers;
mod cpu;
mod pair;
mod ranking;
#[cfg(test)]
mod tests;
mod vm;

use godwit_api::control::{Check, CheckName, PreflightReport, Verdict};
use godwit_planner::placement::{Obstacle, Obstacles};
use godwit_qemu::CpuModel;
use godwit_types::EngineKind;

use crate::cluster::inventory::{Inventory, SeenHost, SeenVm};

pub use answers::with_dry_run;
pub(crate) use answers::without_answer;
pub(crate) use ranking::first;

/// How a check came out.
pub(crate) struct Found {
    verdict: Verdict,
    evidence: String,
    remedy: String,
}

impl Found {
    fn new(verdict: Verdict, evidence: impl Into<String>, remedy: impl Into<String>) -> Found {
        Found { verdict, evidence: evidence.into(), remedy: remedy.into() }
    }

    fn pass(evidence: impl Into<String>) -> Found {
        Found::new(Verdict::Pass, evidence, "")
    }

    fn warn(evidence: impl Into<String>, remedy: impl Into<String>) -> Found {
        Found::new(Verdict::Warn, evidence, remedy)
    }

    fn unknown(evidence: impl Into<String>, remedy: impl Into<String>) -> Found {
        Found::new(Verdict::Unknown, evidence, remedy)
    }

    fn fail(evidence: impl Into<String>, remedy: impl Into<String>) -> Found {
        Found::new(Verdict::Fail, evidence, remedy)
    }

    fn named(self, name: CheckName) -> Check {
        Check { name, verdict: self.verdict, evidence: self.evidence, remedy: self.remedy }
    }
}

/// A VM that is to move, read once for all its targets.
pub(crate) struct Subject<'a> {
    vm: SeenVm<'a>,
    /// The host that has it.
    from: SeenHost<'a>,
    model: CpuModel,
    engine: EngineKind,
    inventory: &'a Inventory,
}

impl<'a> Subject<'a> {
    /// A VM, that this engine would move; none: no host tells of it.
    pub(crate) fn of(
        inventory: &'a Inventory,
        vm: &str,
        engine: EngineKind,
    ) -> Option<Subject<'a>> {
        let vm = inventory.seen_vm(vm)?;
        let from = inventory.seen_host(&vm.info.host)?;
        let model = vm.info.spec.cpu_model.as_deref().unwrap_or(godwit_qemu::DEFAULT_CPU_MODEL);
        Some(Subject { vm, from, model: CpuModel::parse(model), engine, inventory })
    }

    /// What keeps it from going anywhere, and what is to be known of it.
    pub(crate) fn checks(&self) -> impl Iterator<Item = Check> {
        vm::CHECKS.iter().map(|(name, check)| check(self).named(*name))
    }

    /// What keeps it from going there, and what is to be known of that.
    pub(crate) fn checks_at(&self, to: SeenHost<'_>) -> impl Iterator<Item = Check> {
        pair::CHECKS.iter().map(move |(name, check)| check(self, to).named(*name))
    }

    /// The report of a move there, by what is known; `rules`: what those say of it.
    pub(crate) fn report(&self, to: SeenHost<'_>, rules: Check) -> PreflightReport {
        let mut checks: Vec<Check> =
            self.checks().chain(self.checks_at(to)).chain([rules]).collect();
        checks.sort_by_key(|check| check.name);
        let mut report = PreflightReport {
            vm: self.vm.info.name.clone(),
            from: self.from.name.to_owned(),
            to: to.name.to_owned(),
            verdict: Verdict::Pass,
            checks,
            prediction: None,
        };
        judge(&mut report);
        report
    }

    /// What keeps it from each host, beside what placement sees for itself. Hosts that nothing keeps it from are not named.
    pub(crate) fn obstacles(&self) -> Obstacles {
        let others = self.inventory.seen_hosts().filter(|to| to.name != self.from.name);
        let of = |to: SeenHost<'_>| {
            let failed = pair::CHECKS.iter().filter(|(name, _)| !is_placements(*name)).filter_map(
                |(name, check)| {
                    let found = check(self, to);
                    (found.verdict == Verdict::Fail).then(|| obstacle(*name, found.evidence))
                },
            );
            let failed: Vec<Obstacle> = failed.collect();
            (!failed.is_empty()).then(|| (to.name.to_owned(), failed))
        };
        others.filter_map(of).collect()
    }
}

/// What keeps a VM from each host, beside what placement sees for itself: for [`godwit_planner::placement::rank`] and drains.
#[must_use]
pub fn obstacles(inventory: &Inventory, vm: &str) -> Obstacles {
    Subject::of(inventory, vm, EngineKind::default())
        .map(|subject| subject.obstacles())
        .unwrap_or_default()
}

/// What keeps a VM from going anywhere; none: nothing.
#[must_use]
pub fn immovable(inventory: &Inventory, vm: &str) -> Option<Obstacle> {
    immovable_by(inventory, vm, EngineKind::default())
}

/// The same, of an engine.
#[must_use]
pub fn immovable_by(inventory: &Inventory, vm: &str, engine: EngineKind) -> Option<Obstacle> {
    let Some(subject) = Subject::of(inventory, vm, engine) else {
        return Some(obstacle(CheckName::VmState, "no host tells of it".to_owned()));
    };
    vm::CHECKS.iter().find_map(|(name, check)| {
        let found = check(&subject);
        (found.verdict == Verdict::Fail).then(|| {
            let remedy =
                if found.remedy.is_empty() { String::new() } else { format!("; {}", found.remedy) };
            obstacle(*name, format!("{}{remedy}", found.evidence))
        })
    })
}

fn obstacle(name: CheckName, message: String) -> Obstacle {
    Obstacle { code: name.name().to_owned(), message }
}

/// What placement knows of a host by itself, and also what was planned onto it.
fn is_placements(name: CheckName) -> bool {
    matches!(name, CheckName::Target | CheckName::Memory | CheckName::Rules)
}

/// The verdict of a report is the worst of its checks.
pub(crate) fn judge(report: &mut PreflightReport) {
    report.verdict =
        report.checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Unknown);
}
