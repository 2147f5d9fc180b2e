//! Evaluation of hosts in a cluster with the placements so far: whether a host can take VMs, and
//! how well.

use std::collections::{HashMap, HashSet};
use std::fmt;

use godwit_api::control::{PlacementScore, RankedHost};

use super::candidates::{Host, Obstacle, Obstacles, Rule, RuleKind, Strength, Vm};
use super::rules::{Places, RuleBreach, RulesOfVm};
use super::score::{Compared, score, warning, why_behind, why_first};
use super::{Exclusion, Ranking, RuledOut};
use crate::queue::Presence;
use crate::words::Bytes;

/// The capacity that a host has left after the placements so far.
pub(super) struct Room<'a> {
    pub(super) left_bytes: u64,
    pub(super) busy_cores: f64,
    pub(super) vcpus: u64,
    pub(super) arrivals: u32,
    /// Reference groups of VMs that are planned to be there.
    clones: HashSet<&'a str>,
}

impl Room<'_> {
    pub(super) fn has_clone(&self, host: &Host, group: &str) -> bool {
        host.facts.reference_groups.contains(group) || self.clones.contains(group)
    }
}

/// What VMs that move to one host need of it together.
pub(super) struct Need<'v> {
    pub(super) memory_bytes: u64,
    pub(super) vcpus: u64,
    pub(super) load: f64,
    pub(super) reference_groups: Vec<&'v str>,
}

impl<'v> Need<'v> {
    pub(super) fn of(vms: &[&'v Vm]) -> Self {
        Need {
            memory_bytes: vms.iter().map(|vm| vm.memory_bytes).fold(0, u64::saturating_add),
            vcpus: vms.iter().map(|vm| u64::from(vm.vcpus)).sum(),
            load: vms.iter().map(|vm| vm.load()).sum(),
            reference_groups: vms.iter().filter_map(|vm| vm.reference_group.as_deref()).collect(),
        }
    }
}

/// VMs that move to one host together.
pub(crate) struct Unit<'v> {
    pub(crate) vms: Vec<&'v Vm>,
    /// Results of preflight, in the order of the VMs.
    pub(crate) obstacles: Vec<Option<&'v Obstacles>>,
}

/// A cluster with its rules and the placements so far.
pub(crate) struct Judge<'a> {
    hosts: &'a [Host],
    rooms: Vec<Room<'a>>,
    places: Places<'a>,
    rules_of: HashMap<&'a str, Vec<&'a Rule>>,
}

impl<'a> Judge<'a> {
    /// Creates an evaluation without placements.
    pub(crate) fn new(hosts: &'a [Host], rules: &'a [Rule]) -> Self {
        let room = |host: &Host| Room {
            left_bytes: host.facts.memory_left_bytes(),
            busy_cores: host.busy_cores.max(0.0),
            vcpus: u64::from(host.vcpus_placed),
            arrivals: host.arrivals,
            clones: HashSet::new(),
        };
        let mut places: Places<'a> = HashMap::new();
        for (index, host) in hosts.iter().enumerate() {
            for vm in &host.vms {
                places.entry(vm).or_default().push(index);
            }
        }
        let mut rules_of: HashMap<&str, Vec<&Rule>> = HashMap::new();
        for rule in rules {
            for vm in &rule.vms {
                rules_of.entry(vm).or_default().push(rule);
            }
        }
        Judge { hosts, rooms: hosts.iter().map(room).collect(), places, rules_of }
    }

    /// Returns the index of a host.
    pub(crate) fn index(&self, host: &str) -> Option<usize> {
        self.hosts.iter().position(|known| known.facts.name == host)
    }

    fn rules(&self, vm: &Vm, leaving: &dyn Fn(&str) -> bool) -> RulesOfVm<'a> {
        let rules = self.rules_of.get(vm.name.as_str()).into_iter().flatten().copied();
        RulesOfVm::new(rules, &vm.name, &self.places, leaving)
    }

    /// Whether a VM is on a host, or planned to be.
    fn is_on(&self, vm: &Vm, host: usize) -> bool {
        self.places.get(vm.name.as_str()).is_some_and(|hosts| hosts.contains(&host))
    }

    /// Returns the best host for VMs that move together, and why; `None` if no host can take them.
    /// Affinity to `leaving` VMs is ignored.
    pub(crate) fn best(
        &self,
        unit: &Unit<'_>,
        leaving: &dyn Fn(&str) -> bool,
        candidates: &[usize],
    ) -> Option<(usize, String)> {
        let need = Need::of(&unit.vms);
        let rules: Vec<_> = unit.vms.iter().map(|vm| self.rules(vm, leaving)).collect();
        let takes = |index: &usize| {
            let host = &self.hosts[*index];
            let stands = host.facts.presence == Presence::Up && !host.facts.maintenance;
            let is_clear = |of: &&Obstacles| of.get(&host.facts.name).is_none_or(Vec::is_empty);
            stands
                && need.memory_bytes <= self.rooms[*index].left_bytes
                && !unit.vms.iter().any(|vm| self.is_on(vm, *index))
                && rules.iter().all(|rules| rules.allow(host, *index))
                && unit.obstacles.iter().flatten().all(is_clear)
        };
        let score_of = |index: usize| {
            let host = &self.hosts[index];
            let broken = rules.iter().map(|rules| rules.should_broken(host, index).count()).sum();
            score(host, &self.rooms[index], &need, broken)
        };
        let best = candidates.iter().copied().filter(takes).map(|index| (index, score_of(index)));
        let (index, _) = best.max_by(|(one, score), (other, of_other)| {
            let name = |index: &usize| &self.hosts[*index].facts.name;
            score.total.total_cmp(&of_other.total).then_with(|| name(other).cmp(name(one)))
        })?;
        Some((index, why_first(&self.hosts[index], &self.rooms[index], &need)))
    }

    /// Places VMs onto a host: its capacity shrinks, and rules find the VMs there and no longer at
    /// their former host.
    pub(crate) fn put(&mut self, vms: &[&'a Vm], index: usize) {
        let need = Need::of(vms);
        let room = &mut self.rooms[index];
        room.left_bytes = room.left_bytes.saturating_sub(need.memory_bytes);
        room.vcpus += need.vcpus;
        room.busy_cores += need.load;
        room.arrivals = room.arrivals.saturating_add(u32::try_from(vms.len()).unwrap_or(u32::MAX));
        room.clones.extend(need.reference_groups);
        for vm in vms {
            self.places.insert(&vm.name, vec![index]);
        }
    }

    /// Returns everything that prevents VMs from moving to a host together; empty if they can.
    /// Their memory is added up.
    pub(crate) fn exclusions(
        &self,
        unit: &Unit<'_>,
        leaving: &dyn Fn(&str) -> bool,
        index: usize,
    ) -> Vec<Exclusion> {
        let host = &self.hosts[index];
        let mut reasons = Vec::new();
        if unit.vms.iter().any(|vm| self.is_on(vm, index)) {
            // No other reason matters for the host on which it runs.
            return vec![Exclusion::RunsThere];
        }
        match host.facts.presence {
            Presence::Up => {}
            Presence::Away => reasons.push(Exclusion::Away),
            Presence::Unknown => reasons.push(Exclusion::Unknown),
        }
        if host.facts.maintenance {
            reasons.push(Exclusion::Maintenance);
        }
        let (needed_bytes, left_bytes) =
            (Need::of(&unit.vms).memory_bytes, self.rooms[index].left_bytes);
        if needed_bytes > left_bytes {
            reasons.push(Exclusion::Memory { needed_bytes, left_bytes });
        }
        for vm in &unit.vms {
            let breaches = self.rules(vm, leaving).must_breaches(host, index, self.hosts);
            reasons.extend(breaches.into_iter().map(|breach| Exclusion::Rule { breach }));
        }
        let found =
            unit.obstacles.iter().flatten().filter_map(|of| of.get(&host.facts.name)).flatten();
        reasons.extend(found.map(|obstacle| Exclusion::Preflight { obstacle: obstacle.clone() }));
        reasons
    }

    /// Ranks all hosts for a VM.
    pub(super) fn rank(&self, vm: &Vm, obstacles: &Obstacles) -> Ranking {
        let unit = Unit { vms: vec![vm], obstacles: vec![Some(obstacles)] };
        let (need, rules) = (Need::of(&unit.vms), self.rules(vm, &|_| false));
        let mut ranking = Ranking::default();
        let mut fits: Vec<(usize, PlacementScore, Vec<String>)> = Vec::new();
        for (index, host) in self.hosts.iter().enumerate() {
            let reasons = self.exclusions(&unit, &|_| false, index);
            if reasons.is_empty() {
                let breaks: Vec<_> =
                    rules.should_broken(host, index).map(|rule| rule.name.clone()).collect();
                let score = score(host, &self.rooms[index], &need, breaks.len());
                fits.push((index, score, breaks));
            } else {
                ranking.ruled_out.push(ruled_out(&host.facts.name, reasons));
            }
        }
        let name = |index: usize| &self.hosts[index].facts.name;
        fits.sort_by(|(one, score, _), (other, of_other, _)| {
            of_other.total.total_cmp(&score.total).then_with(|| name(*one).cmp(name(*other)))
        });
        ranking.ruled_out.sort_by(|one, other| one.host.cmp(&other.host));
        let first = fits.first().cloned();
        for (index, score, breaks) in fits {
            let this = Compared {
                host: &self.hosts[index],
                room: &self.rooms[index],
                score,
                breaks: &breaks,
            };
            let why = match &first {
                Some((best, score, breaks)) if *best != index => {
                    let (host, room) = (&self.hosts[*best], &self.rooms[*best]);
                    why_behind(&Compared { host, room, score: *score, breaks }, &this, &need)
                }
                _ => why_first(this.host, this.room, &need),
            };
            let warning = warning(this.host, this.room, &need);
            let host = name(index).clone();
            ranking.fits.push(RankedHost { host, score, breaks, why, warning });
        }
        ranking
    }

    /// Returns a `must` rule that keeps two of these apart.
    pub(crate) fn must_be_apart(&self, vms: &[&Vm]) -> Option<&'a str> {
        let is_apart = |rule: &&&'a Rule| {
            rule.strength == Strength::Must
                && rule.kind == RuleKind::Apart
                && vms.iter().filter(|vm| rule.vms.contains(&vm.name)).count() > 1
        };
        let rules = vms.iter().filter_map(|vm| self.rules_of.get(vm.name.as_str())).flatten();
        rules.into_iter().find(is_apart).map(|rule| rule.name.as_str())
    }

    /// Returns the VMs that a `must` rule keeps with this one.
    pub(crate) fn must_be_with(&self, vm: &str) -> impl Iterator<Item = &'a str> {
        let rules = self.rules_of.get(vm).into_iter().flatten();
        let together = rules
            .filter(|rule| rule.strength == Strength::Must && rule.kind == RuleKind::Together)
            .copied();
        together.flat_map(|rule: &'a Rule| rule.vms.iter().map(String::as_str))
    }
}

/// Combines a host with its reasons, and formats them in one line.
pub(crate) fn ruled_out(host: &str, reasons: Vec<Exclusion>) -> RuledOut {
    let texts: Vec<String> = reasons.iter().map(ToString::to_string).collect();
    RuledOut { host: host.to_owned(), reasons, text: texts.join("; ") }
}

impl fmt::Display for Exclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exclusion::RunsThere => f.write_str("it runs there"),
            Exclusion::Away => f.write_str("away: its agent does not answer"),
            Exclusion::Unknown => f.write_str("no report since this manager started"),
            Exclusion::Maintenance => f.write_str("in maintenance"),
            Exclusion::Memory { needed_bytes, left_bytes } => {
                write!(
                    f,
                    "memory: it needs {}, {} are left",
                    Bytes(*needed_bytes),
                    Bytes(*left_bytes)
                )
            }
            Exclusion::Rule { breach } => RuleBreach::fmt(breach, f),
            Exclusion::Preflight { obstacle: Obstacle { code, message } } => {
                write!(f, "{message} ({code})")
            }
        }
    }
}
