//! Targets of the VMs in a drain.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use super::{DrainRequest, DrainVm, PlannedMove, StayReason, Staying};
use crate::placement::{Exclusion, Judge, RuledOut, Unit, Vm, ruled_out};
use crate::words::{Count, Names};

/// Most unsuitable hosts that are listed with all their reasons.
const NEAREST: usize = 5;

/// Returns a target for each VM that leaves the host, and why the others stay.
pub(super) fn leave(request: &DrainRequest<'_>) -> (Vec<PlannedMove>, Vec<Staying>) {
    let mut judge = Judge::new(request.hosts, request.rules);
    let others = |(index, host): (usize, &crate::placement::Host)| {
        (host.facts.name != request.host).then_some(index)
    };
    let candidates: Vec<usize> = request.hosts.iter().enumerate().filter_map(others).collect();
    let mut units = units(&judge, request.vms.iter());
    let memory =
        |unit: &[&DrainVm]| unit.iter().map(|vm| vm.vm.memory_bytes).fold(0, u64::saturating_add);
    units.sort_by(|one, other| {
        memory(other).cmp(&memory(one)).then_with(|| one[0].vm.name.cmp(&other[0].vm.name))
    });
    let mut placed = Placed::new(request.vms.iter());
    for unit in &units {
        let source = |_: &DrainVm| request.host.to_owned();
        placed.place(&mut judge, unit, &candidates, request.hosts, &source);
    }
    placed.done()
}

/// Groups VMs that have to move together; each unit is keyed by name.
pub(super) fn units<'a>(
    judge: &Judge<'_>,
    vms: impl Iterator<Item = &'a DrainVm> + Clone,
) -> Vec<Vec<&'a DrainVm>> {
    let by_name: HashMap<&str, &DrainVm> =
        vms.clone().map(|vm| (vm.vm.name.as_str(), vm)).collect();
    let (mut units, mut seen) = (Vec::new(), HashSet::new());
    for vm in vms {
        let mut unit: Vec<&DrainVm> = Vec::new();
        let mut open = vec![vm];
        while let Some(next) = open.pop() {
            if seen.insert(next.vm.name.as_str()) {
                unit.push(next);
                let partners = judge.must_be_with(&next.vm.name);
                open.extend(partners.filter_map(|partner| by_name.get(partner).copied()));
            }
        }
        if !unit.is_empty() {
            unit.sort_by(|one, other| one.vm.name.cmp(&other.vm.name));
            units.push(unit);
        }
    }
    units
}

/// The placements so far.
pub(super) struct Placed<'a> {
    /// VMs without a place yet: rules do not bind others to their present hosts.
    pending: HashSet<&'a str>,
    moves: Vec<PlannedMove>,
    stays: Vec<Staying>,
}

impl<'a> Placed<'a> {
    pub(super) fn new(vms: impl Iterator<Item = &'a DrainVm>) -> Self {
        let pending = vms.map(|vm| vm.vm.name.as_str()).collect();
        Placed { pending, moves: Vec::new(), stays: Vec::new() }
    }

    pub(super) fn stay(&mut self, vm: &DrainVm, reason: StayReason) {
        let text = reason.to_string();
        self.stays.push(Staying { vm: vm.vm.name.clone(), reason, text });
    }

    pub(super) fn done(mut self) -> (Vec<PlannedMove>, Vec<Staying>) {
        self.stays.sort_by(|one, other| one.vm.cmp(&other.vm));
        (self.moves, self.stays)
    }

    /// Places VMs that move together, or records why they stay.
    pub(super) fn place(
        &mut self,
        judge: &mut Judge<'a>,
        unit: &[&'a DrainVm],
        candidates: &[usize],
        hosts: &[crate::placement::Host],
        source: &dyn Fn(&DrainVm) -> String,
    ) {
        let vms: Vec<&'a Vm> = unit.iter().map(|vm| &vm.vm).collect();
        if self.stays_for_itself(judge, unit, &vms) {
            return;
        }
        let of_unit = Unit {
            vms: vms.clone(),
            obstacles: unit.iter().map(|vm| Some(&vm.obstacles)).collect(),
        };
        let leaving = |vm: &str| self.pending.contains(vm);
        let Some((target, why)) = judge.best(&of_unit, &leaving, candidates) else {
            let reason = no_host(judge, &of_unit, &leaving, candidates, hosts);
            for vm in unit {
                self.stay(vm, reason.clone());
            }
            return;
        };
        judge.put(&vms, target);
        for vm in unit {
            self.pending.remove(vm.vm.name.as_str());
            let others = unit.iter().filter(|other| other.vm.name != vm.vm.name);
            self.moves.push(PlannedMove {
                vm: vm.vm.name.clone(),
                source: source(vm),
                target: hosts[target].facts.name.clone(),
                memory_bytes: vm.vm.memory_bytes,
                why: why.clone(),
                together_with: others.map(|other| other.vm.name.clone()).collect(),
                expected: None,
                waits_for: None,
            });
        }
    }

    /// Whether VMs stay for their own reasons, independent of the target.
    fn stays_for_itself(&mut self, judge: &Judge<'_>, unit: &[&DrainVm], vms: &[&Vm]) -> bool {
        let names = |of: &[&DrainVm]| of.iter().map(|vm| vm.vm.name.clone()).collect::<Vec<_>>();
        if let Some(rule) = judge.must_be_apart(vms) {
            for vm in unit {
                self.stay(
                    vm,
                    StayReason::Contradiction { rule: rule.to_owned(), vms: names(unit) },
                );
            }
            return true;
        }
        let immovable: Vec<&DrainVm> =
            unit.iter().filter(|vm| vm.immovable.is_some()).copied().collect();
        for vm in unit.iter().filter(|_| !immovable.is_empty()) {
            let reason = match &vm.immovable {
                Some(obstacle) => StayReason::Immovable { obstacle: obstacle.clone() },
                None => StayReason::WithOthers { vms: names(&immovable) },
            };
            self.stay(vm, reason);
        }
        !immovable.is_empty()
    }
}

/// Returns why no host can take VMs.
fn no_host(
    judge: &Judge<'_>,
    unit: &Unit<'_>,
    leaving: &dyn Fn(&str) -> bool,
    candidates: &[usize],
    hosts: &[crate::placement::Host],
) -> StayReason {
    let of = |index: &usize| (*index, judge.exclusions(unit, leaving, *index));
    let mut all: Vec<(usize, Vec<Exclusion>)> = candidates.iter().map(of).collect();
    let mut tally: BTreeMap<&'static str, usize> = BTreeMap::new();
    for (_, reasons) in &all {
        let mut kinds: Vec<_> = reasons.iter().map(kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            *tally.entry(kind).or_default() += 1;
        }
    }
    // The fewer reasons a host has, the nearer it is. Reasons that can be fixed come before an
    // operator's prohibitions.
    let name = |index: &usize| &hosts[*index].facts.name;
    let weight = |reasons: &[Exclusion]| {
        let forbidden =
            reasons.iter().filter(|reason| matches!(reason, Exclusion::Rule { .. })).count();
        (reasons.len(), forbidden)
    };
    all.sort_by(|(one, reasons), (other, of_other)| {
        weight(reasons).cmp(&weight(of_other)).then_with(|| name(one).cmp(name(other)))
    });
    all.truncate(NEAREST);
    let nearest: Vec<RuledOut> =
        all.into_iter().map(|(index, reasons)| ruled_out(name(&index), reasons)).collect();
    let mut tally: Vec<_> =
        tally.into_iter().map(|(kind, hosts)| (kind.to_owned(), hosts)).collect();
    tally.sort_by(|(one, hosts), (other, of_other)| {
        of_other.cmp(hosts).then_with(|| one.cmp(other))
    });
    StayReason::NoHost { hosts: candidates.len(), tally, nearest }
}

fn kind(exclusion: &Exclusion) -> &'static str {
    match exclusion {
        Exclusion::RunsThere => "it runs there",
        Exclusion::Away | Exclusion::Unknown => "away",
        Exclusion::Maintenance => "in maintenance",
        Exclusion::Memory { .. } => "memory",
        Exclusion::Rule { .. } => "rules",
        Exclusion::Preflight { .. } => "preflight",
    }
}

impl fmt::Display for StayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StayReason::Immovable { obstacle } => {
                write!(f, "{} ({})", obstacle.message, obstacle.code)
            }
            StayReason::NoHost { hosts: 0, .. } => f.write_str("there is no other host"),
            StayReason::NoHost { hosts: 1, nearest, .. } if !nearest.is_empty() => {
                write!(f, "{} cannot take it: {}", nearest[0].host, nearest[0].text)
            }
            StayReason::NoHost { hosts, tally, nearest } => {
                let reasons: Vec<_> =
                    tally.iter().map(|(kind, hosts)| format!("{kind} {hosts}")).collect();
                write!(
                    f,
                    "none of {} can take it ({})",
                    Count(*hosts, "host"),
                    reasons.join(", ")
                )?;
                match nearest.first() {
                    Some(RuledOut { host, text, .. }) => write!(f, "; nearest is {host}: {text}"),
                    None => Ok(()),
                }
            }
            StayReason::WithOthers { vms } => {
                write!(f, "a rule keeps it with {}, which cannot move", Names(vms, vms.len()))
            }
            StayReason::Contradiction { rule, vms } => {
                write!(f, "rules want {} together, and rule {rule} apart", Names(vms, vms.len()))
            }
            StayReason::NotThere { expected, found: Some(found) } => {
                write!(f, "it is on {found} now, but this drain moved it to {expected}")
            }
            StayReason::NotThere { expected, found: None } => {
                write!(f, "it no longer runs on {expected}")
            }
        }
    }
}
