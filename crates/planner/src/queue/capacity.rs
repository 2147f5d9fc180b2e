//! Free capacity of each limit and of each host's memory while moves take their parts.

use std::collections::{HashMap, HashSet};

use super::reason::{Bar, Line, Tally, TargetObstacle, WaitReason};
use super::reservation::Reservation;
use super::situation::{HostFacts, Presence, Situation, WaitingJob};

/// Most VMs that a reason names.
const MOST_NAMED: usize = 8;
/// Number of targets at the front of the list of which one with a clone is preferred.
const NEAR_TARGETS: usize = 4;

/// Usage of one limit.
struct Gauge<'a> {
    limit: u32,
    running: u32,
    moving: Vec<&'a str>,
    at_agents: u32,
    /// Places reserved for jobs that have been passed over for long, and the first such job.
    reserved: u32,
    reserved_for: Option<&'a str>,
    /// Jobs that this limit has refused.
    line: u32,
}

/// A move that takes a place of each limit that applies to it.
#[derive(Clone, Copy)]
struct Taken<'a> {
    vm: &'a str,
    /// Whether it was begun at an agent, without a job.
    at_agent: bool,
}

/// Why a limit admits no further move.
enum Full {
    AtLimit(Line),
    Reserved { behind: String },
}

impl<'a> Gauge<'a> {
    fn new(limit: u32) -> Self {
        Gauge {
            limit,
            running: 0,
            moving: Vec::new(),
            at_agents: 0,
            reserved: 0,
            reserved_for: None,
            line: 0,
        }
    }

    fn count(&mut self, Taken { vm, at_agent }: Taken<'a>) {
        self.running += 1;
        self.at_agents += u32::from(at_agent);
        if self.moving.len() < MOST_NAMED {
            self.moving.push(vm);
        }
    }

    fn is_open(&self) -> bool {
        self.running.saturating_add(self.reserved) < self.limit
    }

    fn reserve_one(&mut self, job: &'a str) {
        if self.is_open() {
            self.reserved += 1;
            self.reserved_for.get_or_insert(job);
        }
    }

    /// Refuses a job and puts it into the line, if the limit is reached.
    fn refuse(&mut self) -> Option<Full> {
        if self.is_open() {
            return None;
        }
        if self.running < self.limit {
            return Some(Full::Reserved {
                behind: self.reserved_for.unwrap_or_default().to_owned(),
            });
        }
        self.line += 1;
        Some(Full::AtLimit(Line {
            limit: self.limit,
            running: self.running,
            moving: self.moving.iter().map(ToString::to_string).collect(),
            at_agents: self.at_agents,
            place: self.line,
        }))
    }
}

struct HostRoom<'a> {
    facts: &'a HostFacts,
    out: Gauge<'a>,
    into: Gauge<'a>,
    memory_left_bytes: u64,
    memory_reserved_bytes: u64,
    memory_reserved_for: Option<&'a str>,
}

impl HostRoom<'_> {
    /// Returns the job for which capacity is reserved here.
    fn reserved_for(&self) -> String {
        self.memory_reserved_for.or(self.into.reserved_for).unwrap_or_default().to_owned()
    }
}

/// A target that a job can go to now, and the limits that it uses.
pub(super) struct Seat {
    source: usize,
    target: usize,
    datastores: Vec<usize>,
}

/// All limits, with their usage.
pub(super) struct Capacity<'a> {
    hosts: Vec<HostRoom<'a>>,
    host_index: HashMap<&'a str, usize>,
    datastores: Vec<(&'a str, Gauge<'a>)>,
    datastore_index: HashMap<&'a str, usize>,
    in_all: Gauge<'a>,
    /// Hosts that have a member of a reference group, or to which one moves.
    clones: HashSet<(usize, &'a str)>,
    situation: Situation<'a>,
}

impl<'a> Capacity<'a> {
    /// Computes what the running moves leave free.
    pub(super) fn new(situation: &Situation<'a>) -> Self {
        let limits = situation.limits;
        let room = |facts: &'a HostFacts| HostRoom {
            facts,
            out: Gauge::new(limits.out_of(&facts.name, facts.link_bits_per_s)),
            into: Gauge::new(limits.into_host(&facts.name, facts.link_bits_per_s)),
            memory_left_bytes: facts.memory_left_bytes(),
            memory_reserved_bytes: 0,
            memory_reserved_for: None,
        };
        let hosts: Vec<_> = situation.hosts.iter().map(room).collect();
        let named = |(index, room): (usize, &HostRoom<'a>)| (room.facts.name.as_str(), index);
        let host_index = hosts.iter().enumerate().map(named).collect();
        let in_all = Gauge::new(limits.in_all.unwrap_or(u32::MAX));
        let mut capacity = Capacity {
            hosts,
            host_index,
            datastores: Vec::new(),
            datastore_index: HashMap::new(),
            in_all,
            clones: HashSet::new(),
            situation: *situation,
        };
        for (index, host) in situation.hosts.iter().enumerate() {
            capacity
                .clones
                .extend(host.reference_groups.iter().map(|group| (index, group.as_str())));
        }
        for running in situation.running {
            let ends = [&running.source, &running.target].map(|host| capacity.host(host));
            let datastores = capacity.datastores_of(&running.datastores);
            let taken = Taken { vm: &running.vm, at_agent: running.group.is_none() };
            capacity.count(taken, ends, &datastores);
            if let ([_, Some(target)], Some(group)) = (ends, &running.reference_group) {
                capacity.clones.insert((target, group.as_str()));
            }
        }
        capacity
    }

    fn host(&self, name: &str) -> Option<usize> {
        self.host_index.get(name).copied()
    }

    /// Returns each datastore once, however many disks are on it.
    fn datastores_of(&mut self, names: &'a [String]) -> Vec<usize> {
        let mut found = Vec::with_capacity(names.len());
        for name in names {
            let index = *self.datastore_index.entry(name).or_insert_with(|| {
                self.datastores.push((name, Gauge::new(self.situation.limits.on_datastore(name))));
                self.datastores.len() - 1
            });
            if !found.contains(&index) {
                found.push(index);
            }
        }
        found
    }

    fn count(
        &mut self,
        taken: Taken<'a>,
        [source, target]: [Option<usize>; 2],
        datastores: &[usize],
    ) {
        self.in_all.count(taken);
        if let Some(source) = source {
            self.hosts[source].out.count(taken);
        }
        if let Some(target) = target {
            self.hosts[target].into.count(taken);
        }
        for &datastore in datastores {
            self.datastores[datastore].1.count(taken);
        }
    }

    /// Returns what bars a target; `None` if the job can go there now.
    fn bar(&self, job: &WaitingJob, target: &str) -> Option<Bar> {
        let Some(index) = self.host(target) else { return Some(Bar::NotInInventory) };
        let room = &self.hosts[index];
        let unreserved = room.memory_left_bytes.saturating_sub(room.memory_reserved_bytes);
        match room.facts {
            _ if target == job.source => Some(Bar::IsSource),
            HostFacts { presence: Presence::Away, .. } => Some(Bar::Away),
            HostFacts { presence: Presence::Unknown, .. } => Some(Bar::Unknown),
            HostFacts { maintenance: true, .. } => Some(Bar::Maintenance),
            // Memory first: it is freed later than a place.
            _ if job.memory_bytes > room.memory_left_bytes => Some(Bar::Memory),
            _ if room.into.running >= room.into.limit => Some(Bar::Limit),
            _ if job.memory_bytes > unreserved || !room.into.is_open() => Some(Bar::Reserved),
            _ => None,
        }
    }

    /// Returns why no target is usable, whichever moves end meanwhile; `None` if one is.
    pub(super) fn no_standing_target(&mut self, job: &WaitingJob) -> Option<WaitReason> {
        let stands = |target: &String| self.bar(job, target).is_none_or(Bar::is_of_capacity);
        if job.targets.iter().any(stands) {
            return None;
        }
        Some(self.refuse_targets(job))
    }

    /// Returns why the source is unavailable; `None` if it is available.
    pub(super) fn source_obstacle(&self, job: &WaitingJob) -> Option<WaitReason> {
        let host = job.source.clone();
        match self.host(&job.source).map(|index| self.hosts[index].facts.presence) {
            None => Some(WaitReason::SourceNotInInventory { host }),
            Some(Presence::Away) => Some(WaitReason::SourceAway { host }),
            Some(Presence::Unknown) => Some(WaitReason::SourceUnknown { host }),
            Some(Presence::Up) => None,
        }
    }

    /// Returns whether a move may start from one of these hosts, as far as limits of sources and in
    /// total are concerned.
    pub(super) fn has_room(&self, sources: &HashSet<&str>) -> bool {
        let mut rooms = sources.iter().filter_map(|name| Some(&self.hosts[self.host(name)?]));
        self.in_all.is_open() && rooms.any(|room| room.out.is_open())
    }

    /// Finds a target for a job.
    ///
    /// # Errors
    /// What the job waits for.
    pub(super) fn seat(&mut self, job: &'a WaitingJob) -> Result<Seat, WaitReason> {
        if let Some(full) = self.in_all.refuse() {
            return Err(match full {
                Full::AtLimit(line) => WaitReason::TotalLimit { line },
                Full::Reserved { behind } => WaitReason::Turn { of: "moves in all".into(), behind },
            });
        }
        let Some(source) = self.host(&job.source) else {
            return Err(WaitReason::SourceNotInInventory { host: job.source.clone() });
        };
        if let Some(full) = self.hosts[source].out.refuse() {
            let host = job.source.clone();
            return Err(match full {
                Full::AtLimit(line) => WaitReason::SourceLimit { host, line },
                Full::Reserved { behind } => {
                    WaitReason::Turn { of: format!("moves out of {host}"), behind }
                }
            });
        }
        let datastores = self.datastores_of(&job.datastores);
        for &index in &datastores {
            if let Some(full) = self.datastores[index].1.refuse() {
                return Err(self.datastore_refusal(index, full));
            }
        }
        match self.open_target(job) {
            Some(target) => Ok(Seat { source, target, datastores }),
            None => Err(self.refuse_targets(job)),
        }
    }

    fn datastore_refusal(&self, index: usize, full: Full) -> WaitReason {
        let datastore = self.datastores[index].0.to_owned();
        match full {
            Full::AtLimit(line) => WaitReason::DatastoreLimit { datastore, line },
            Full::Reserved { behind } => {
                WaitReason::Turn { of: format!("moves on datastore {datastore}"), behind }
            }
        }
    }

    /// Returns the best available target. Among the best few, one with a clone of the VM is
    /// preferred.
    fn open_target(&self, job: &WaitingJob) -> Option<usize> {
        let open = |target: &&String| self.bar(job, target).is_none();
        let has_clone = |target: &&String| {
            let group = job.reference_group.as_deref();
            group
                .zip(self.host(target))
                .is_some_and(|(group, host)| self.clones.contains(&(host, group)))
        };
        let near = job.targets.iter().take(NEAR_TARGETS).filter(has_clone).find(open);
        self.host(near.or_else(|| job.targets.iter().find(open))?)
    }

    /// Returns what a job waits for whose targets are all barred.
    fn refuse_targets(&mut self, job: &WaitingJob) -> WaitReason {
        let mut tally = Tally::default();
        let mut best: Option<(&str, Bar)> = None;
        for target in &job.targets {
            let Some(bar) = self.bar(job, target) else { continue };
            tally.count(bar);
            match best {
                Some((_, before)) if before.is_of_capacity() || !bar.is_of_capacity() => {}
                _ => best = Some((target, bar)),
            }
        }
        let Some((target, bar)) = best else { return WaitReason::NoTarget };
        let obstacle = self.obstacle(job, target, bar);
        match job.targets.len() {
            1 => WaitReason::Target { obstacle },
            _ => WaitReason::Targets { best: obstacle, tally },
        }
    }

    /// Returns a bar with its figures. From then on the job is in the line of that limit.
    fn obstacle(&mut self, job: &WaitingJob, target: &str, bar: Bar) -> TargetObstacle {
        let host = target.to_owned();
        let Some(room) = self.host_index.get(target).map(|&index| &mut self.hosts[index]) else {
            return TargetObstacle::NotInInventory { host };
        };
        match bar {
            Bar::NotInInventory => TargetObstacle::NotInInventory { host },
            Bar::IsSource => TargetObstacle::IsSource { host },
            Bar::Away => TargetObstacle::Away { host },
            Bar::Unknown => TargetObstacle::Unknown { host },
            Bar::Maintenance => TargetObstacle::Maintenance { host },
            Bar::Reserved => TargetObstacle::Turn { host, behind: room.reserved_for() },
            Bar::Memory => TargetObstacle::Memory {
                host,
                needed_bytes: job.memory_bytes,
                left_bytes: room.memory_left_bytes,
                total_bytes: room.facts.memory_total_bytes,
            },
            Bar::Limit => match room.into.refuse() {
                Some(Full::AtLimit(line)) => TargetObstacle::Limit { host, line },
                _ => TargetObstacle::Turn { host, behind: room.reserved_for() },
            },
        }
    }

    /// Begins a job's move.
    pub(super) fn start(&mut self, job: &'a WaitingJob, seat: &Seat) {
        self.count(
            Taken { vm: &job.vm, at_agent: false },
            [Some(seat.source), Some(seat.target)],
            &seat.datastores,
        );
        let room = &mut self.hosts[seat.target];
        room.memory_left_bytes = room.memory_left_bytes.saturating_sub(job.memory_bytes);
        if let Some(group) = &job.reference_group {
            self.clones.insert((seat.target, group.as_str()));
        }
    }

    /// Returns the name of a seat's target.
    pub(super) fn target_of(&self, seat: &Seat) -> &'a str {
        &self.hosts[seat.target].facts.name
    }

    /// Reserves free capacity for a job, so that later ones do not take it: at the best target that
    /// could ever hold the job. Reserves nothing if there is none.
    pub(super) fn reserve(&mut self, job: &'a WaitingJob, reservation: Reservation) {
        let could_hold = |room: &HostRoom<'_>| {
            room.facts.memory_total_bytes >= job.memory_bytes && room.into.limit > 0
        };
        let target = job.targets.iter().find_map(|target| {
            let stands = self.bar(job, target).is_none_or(Bar::is_of_capacity);
            self.host(target).filter(|&index| stands && could_hold(&self.hosts[index]))
        });
        let (Some(target), Some(source)) = (target, self.host(&job.source)) else { return };
        let datastores = self.datastores_of(&job.datastores);
        let mut gauges = vec![self.in_all.limit, self.hosts[source].out.limit];
        gauges.extend(datastores.iter().map(|&index| self.datastores[index].1.limit));
        if gauges.contains(&0) {
            return;
        }
        if reservation == Reservation::All {
            self.in_all.reserve_one(&job.id);
            self.hosts[source].out.reserve_one(&job.id);
            self.hosts[target].into.reserve_one(&job.id);
            for index in datastores {
                self.datastores[index].1.reserve_one(&job.id);
            }
        }
        let room = &mut self.hosts[target];
        let unreserved = room.memory_left_bytes.saturating_sub(room.memory_reserved_bytes);
        room.memory_reserved_bytes += unreserved.min(job.memory_bytes);
        room.memory_reserved_for.get_or_insert(&job.id);
    }
}
