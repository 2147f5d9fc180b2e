//! Preflight: checks whether a VM can move, from the manager's state. No I/O: what only the hosts
//! can answer is `unknown` here, until [`with_dry_run`] adds a dry run of the source's agent.
//!
//! Checks of the VM alone (`vm.rs`) show what prevents any move. Checks of a VM and a target
//! (`pair.rs`) show what prevents a move to that target. Placement and drains get the same checks
//! as [`Obstacles`].

mod answers;
mod cpu;
mod found;
mod pair;
mod ranking;
mod start;
#[cfg(test)]
mod tests;
mod travelling;
mod vm;

use godwit_api::TravellingDisks;
use godwit_api::control::{Check, CheckName, PreflightReport, Verdict};
use godwit_planner::placement::{Obstacle, Obstacles};
use godwit_qemu::CpuModel;
use godwit_types::EngineKind;

use crate::cluster::inventory::{Inventory, SeenHost, SeenVm};

pub use answers::with_dry_run;
pub(crate) use answers::without_answer;
pub(crate) use found::judge;
pub(crate) use ranking::first;
pub(crate) use start::obstacles_to_start;
pub(crate) use travelling::travelling;

/// A VM to move, read once for all its targets.
pub(crate) struct Subject<'a> {
    vm: SeenVm<'a>,
    /// Host that has the VM.
    from: SeenHost<'a>,
    model: CpuModel,
    engine: EngineKind,
    /// How its disks travel, if they do.
    disks: Option<&'a TravellingDisks>,
    inventory: &'a Inventory,
}

impl<'a> Subject<'a> {
    /// Reads a VM for a move with this engine. `None`: no host reports it.
    pub(crate) fn of(
        inventory: &'a Inventory,
        vm: &str,
        engine: EngineKind,
    ) -> Option<Subject<'a>> {
        let vm = inventory.seen_vm(vm)?;
        let from = inventory.seen_host(&vm.info.host)?;
        let model = vm.info.spec.cpu_model.as_deref().unwrap_or(godwit_qemu::DEFAULT_CPU_MODEL);
        let model = CpuModel::parse(model);
        Some(Subject { vm, from, model, engine, disks: None, inventory })
    }

    /// Lets the disks of the VM travel.
    pub(crate) fn with_disks(self, disks: Option<&'a TravellingDisks>) -> Subject<'a> {
        Subject { disks, ..self }
    }

    /// Returns the checks of the VM alone.
    pub(crate) fn checks(&self) -> impl Iterator<Item = Check> {
        vm::CHECKS.iter().map(|(name, check)| check(self).named(*name))
    }

    /// Returns the checks of the VM and a target.
    pub(crate) fn checks_at(&self, to: SeenHost<'_>) -> impl Iterator<Item = Check> {
        pair::CHECKS.iter().map(move |(name, check)| check(self, to).named(*name))
    }

    /// Returns the report of a move to a target, from the manager's state. `rules` is the check of
    /// the placement rules.
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

    /// Returns what prevents a move to each host, except what placement checks itself. Hosts
    /// without obstacles are absent.
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

/// Returns what prevents a VM's move to each host, except what placement checks itself. Used by
/// [`godwit_planner::placement::rank`] and drains.
#[must_use]
pub fn obstacles(inventory: &Inventory, vm: &str) -> Obstacles {
    obstacles_with_disks(inventory, vm, None)
}

/// Returns the same as [`obstacles`] for a move in which disks may travel.
pub(crate) fn obstacles_with_disks(
    inventory: &Inventory,
    vm: &str,
    disks: Option<&TravellingDisks>,
) -> Obstacles {
    Subject::of(inventory, vm, EngineKind::default())
        .map(|subject| subject.with_disks(disks).obstacles())
        .unwrap_or_default()
}

/// Returns what prevents any move of a VM with the default engine.
#[must_use]
pub fn immovable(inventory: &Inventory, vm: &str) -> Option<Obstacle> {
    immovable_by(inventory, vm, EngineKind::default())
}

/// Returns what prevents any move of a VM with this engine.
#[must_use]
pub fn immovable_by(inventory: &Inventory, vm: &str, engine: EngineKind) -> Option<Obstacle> {
    let Some(subject) = Subject::of(inventory, vm, engine) else {
        return Some(obstacle(CheckName::VmState, "no host reports it".to_owned()));
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

/// Returns whether placement checks this itself, including what is planned onto the host.
fn is_placements(name: CheckName) -> bool {
    matches!(name, CheckName::Target | CheckName::Memory | CheckName::Rules)
}
