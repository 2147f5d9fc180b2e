//! Order of the waiting jobs.
//!
//! Jobs of one group that leave one source are a *flow*. Within a flow, jobs are sorted by a
//! virtual submission time. It is the actual time, earlier by the head start of the priority, and
//! later by [`STRETCH`] times the job's duration. So short moves go first, but no job is passed by
//! jobs that come more than a finite time after it.
//!
//! Flows are ordered by these criteria:
//! 1. The higher priority. A flow without running moves rises by one for each [`AGEING_MS`] without
//!    service, up to `high`, and to `urgent` after [`DAY_MS`]. It does not rise while its group has
//!    its share of a limit that the job uses: otherwise a drain of many hosts would age as a whole
//!    until no other group had a turn. Jobs in front of an urgent job in its flow go with it.
//! 2. A group that has not its share of a limit that it uses. A share is the limit divided by the
//!    groups that want some of it.
//! 3. Fewest moves running from its source.
//! 4. Longest time without service there.
//! 5. First in line.
//!
//! A job that needs places of several limits at once could be passed forever by jobs of its own
//! flow, which is served all the while. So the first job of a flow that has waited for [`DAY_MS`]
//! goes before all others, in the times in which reservations hold (`reservation.rs`).
//!
//! Clones of one image are in line together, and the first one goes alone. While it moves, the
//! others go last in their flow: once it is there, their pages can be sent as references to it.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use godwit_api::control::MovePriority;

use super::reservation;
use super::situation::{HostFacts, Situation, WaitingJob};

const MINUTE_MS: u64 = 60 * 1000;
/// Interval after which an unserved flow rises by one priority, up to high.
const AGEING_MS: u64 = 15 * MINUTE_MS;
/// Time after which an unserved flow rises to urgent.
const DAY_MS: u64 = 24 * 60 * MINUTE_MS;
/// Factor by which a job's duration moves it back in line.
const STRETCH: u64 = 4;
/// Head starts by priority, low to urgent.
const HEAD_STARTS_MINUTES: [i64; 4] = [-60, 0, 60, 24 * 60];
/// A clone that comes later than this after the first one is in its own group: a stream of clones
/// does not hold back all others.
const TOGETHER_MS: i64 = 10 * 60 * 1000;

/// A job in the order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ranked {
    /// Index among the waiting jobs.
    pub(super) job: usize,
    /// Whether it is the first of its flow.
    pub(super) is_first: bool,
    /// Time for which its flow has not been served; 0 while a move of it runs.
    pub(super) unserved_ms: u64,
}

#[derive(Default)]
struct Flow {
    running: u64,
    served_ms: u64,
}

/// A job with everything that determines its place.
struct Entry<'a> {
    job: usize,
    id: &'a str,
    flow: usize,
    /// Virtual submission time, milliseconds since 1970.
    stands_at: i64,
    /// The clones in line with it: their position and their name.
    block: (i64, &'a str),
    deferred: bool,
    /// Highest requested priority of this job and those behind it in its flow; and the priority to
    /// which the flow has risen.
    asked: u64,
    risen: u64,
    /// It is the first of its flow and has waited for a day: no job goes before it.
    overdue: bool,
    /// Index in the flow, and the number of running moves of the flow.
    index: usize,
    round: u64,
    unserved_since_ms: u64,
    unserved_ms: u64,
}

/// Returns the ready jobs (indexes among the waiting ones) in the order in which they get free
/// capacity.
pub(super) fn order(situation: &Situation<'_>, ready: &[usize]) -> Vec<Ranked> {
    let (mut entries, flows) = entries(situation, ready);
    stand_in_line(situation, &mut entries);
    number(situation, &mut entries, &flows);
    entries.sort_unstable_by(|a, b| place(a).cmp(&place(b)));
    let over = over_their_share(situation, &entries);
    let mut ranked: Vec<(u64, bool, Ranked)> = entries
        .iter()
        .zip(over)
        .map(|(entry, over)| {
            let Entry { job, index, unserved_ms, asked, risen, overdue, .. } = *entry;
            let over = over && !overdue;
            (
                if over { asked } else { risen },
                over,
                Ranked { job, is_first: index == 0, unserved_ms },
            )
        })
        .collect();
    // The sort is stable: equal jobs keep the order from above.
    ranked.sort_by_key(|(priority, over, _)| (Reverse(*priority), *over));
    ranked.into_iter().map(|(_, _, ranked)| ranked).collect()
}

/// Sort key of entries without shares.
fn place<'a>(entry: &Entry<'a>) -> (Reverse<u64>, u64, u64, i64, &'a str, usize) {
    (
        Reverse(entry.risen),
        entry.round,
        entry.unserved_since_ms,
        entry.stands_at,
        entry.id,
        entry.job,
    )
}

/// Returns the virtual submission time of a job.
pub(crate) fn stands_at(job: &WaitingJob) -> i64 {
    let submitted = i64::try_from(job.submitted_ms).unwrap_or(i64::MAX);
    let stretch = i64::try_from(job.estimate_ms.saturating_mul(STRETCH)).unwrap_or(i64::MAX);
    let head_start = HEAD_STARTS_MINUTES[job.priority as usize] * 60 * 1000;
    submitted.saturating_sub(head_start).saturating_add(stretch)
}

fn entries<'a>(situation: &Situation<'a>, ready: &[usize]) -> (Vec<Entry<'a>>, Vec<Flow>) {
    let mut flows: Vec<Flow> = Vec::new();
    let mut index: HashMap<(&str, &str), usize> = HashMap::new();
    let mut entries = Vec::with_capacity(ready.len());
    for &ready in ready {
        let job = &situation.waiting[ready];
        let flow = *index.entry((&job.source, &job.group)).or_insert_with(|| {
            flows.push(Flow::default());
            flows.len() - 1
        });
        let stands_at = stands_at(job);
        entries.push(Entry {
            job: ready,
            id: &job.id,
            flow,
            stands_at,
            block: (stands_at, ""),
            deferred: false,
            asked: job.priority as u64,
            risen: job.priority as u64,
            overdue: false,
            index: 0,
            round: 0,
            unserved_since_ms: job.submitted_ms.max(job.not_before_ms.unwrap_or(0)),
            unserved_ms: 0,
        });
    }
    for running in situation.running {
        let flow =
            running.group.as_deref().and_then(|group| index.get(&(running.source.as_str(), group)));
        if let Some(flow) = flow {
            flows[*flow].running += 1;
        }
    }
    for served in situation.served {
        if let Some(flow) = index.get(&(served.source.as_str(), served.group.as_str())) {
            flows[*flow].served_ms = flows[*flow].served_ms.max(served.at_ms);
        }
    }
    (entries, flows)
}

/// Sorts each flow: by virtual submission times, with clones together, and clones behind the rest
/// while the first of them goes ahead.
fn stand_in_line<'a>(situation: &Situation<'a>, entries: &mut [Entry<'a>]) {
    entries.sort_unstable_by_key(|entry| (entry.flow, entry.stands_at, entry.id, entry.job));
    let on_the_way: HashSet<&str> =
        situation.running.iter().filter_map(|running| running.reference_group.as_deref()).collect();
    let there: HashSet<(&str, &str)> = situation
        .hosts
        .iter()
        .flat_map(|host| {
            host.reference_groups.iter().map(|group| (host.name.as_str(), group.as_str()))
        })
        .collect();
    let mut blocks: HashMap<(usize, &str, MovePriority), i64> = HashMap::new();
    let mut led: HashSet<(usize, &str)> = HashSet::new();
    for entry in entries.iter_mut() {
        let job = &situation.waiting[entry.job];
        let Some(group) = job.reference_group.as_deref() else { continue };
        let first_at = blocks.entry((entry.flow, group, job.priority)).or_insert(entry.stands_at);
        if entry.stands_at.saturating_sub(*first_at) > TOGETHER_MS {
            *first_at = entry.stands_at;
        }
        entry.block = (*first_at, group);
        let leads = led.insert((entry.flow, group));
        let has_arrived =
            || job.targets.iter().any(|target| there.contains(&(target.as_str(), group)));
        entry.deferred = job.priority <= MovePriority::Normal
            && (!leads || on_the_way.contains(group))
            && !has_arrived();
    }
    entries.sort_unstable_by_key(|entry| {
        (entry.flow, entry.deferred, entry.block, entry.stands_at, entry.id, entry.job)
    });
}

/// Numbers the jobs of each flow, and sets their priority.
fn number(situation: &Situation<'_>, entries: &mut [Entry<'_>], flows: &[Flow]) {
    let mut before: Option<(usize, usize)> = None;
    for entry in entries.iter_mut() {
        let flow = &flows[entry.flow];
        entry.index =
            before.map_or(0, |(flow, index)| if flow == entry.flow { index + 1 } else { 0 });
        before = Some((entry.flow, entry.index));
        let waited_ms = situation.now_ms.saturating_sub(entry.unserved_since_ms);
        if entry.index == 0 && waited_ms >= DAY_MS && reservation::are_in_force(situation.now_ms) {
            (entry.overdue, entry.risen, entry.unserved_ms) =
                (true, MovePriority::Urgent as u64, waited_ms);
            continue;
        }
        entry.round = flow.running + entry.index as u64;
        entry.unserved_since_ms = entry.unserved_since_ms.max(flow.served_ms);
        if flow.running == 0 {
            entry.unserved_ms = situation.now_ms.saturating_sub(entry.unserved_since_ms);
            entry.risen = risen(entry.asked, entry.unserved_ms);
        }
    }
    let mut behind: Option<(usize, u64, u64)> = None;
    for entry in entries.iter_mut().rev() {
        if let Some((flow, asked, risen)) = behind
            && flow == entry.flow
        {
            (entry.asked, entry.risen) = (entry.asked.max(asked), entry.risen.max(risen));
        }
        behind = Some((entry.flow, entry.asked, entry.risen));
    }
}

/// Returns the priority of a flow after this time without service.
fn risen(asked: u64, unserved_ms: u64) -> u64 {
    if unserved_ms >= DAY_MS {
        return MovePriority::Urgent as u64;
    }
    (asked + unserved_ms / AGEING_MS).min(MovePriority::High as u64).max(asked)
}

/// A limit that groups share.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Limit<'a> {
    InAll,
    Out(&'a str),
    Into(&'a str),
    Datastore(&'a str),
}

/// Returns the limits that a job uses for certain. With several targets the target is unknown.
fn limits_of(job: &WaitingJob) -> impl Iterator<Item = Limit<'_>> {
    let target = match job.targets.as_slice() {
        [target] => Some(Limit::Into(target)),
        _ => None,
    };
    let datastores = job.datastores.iter().map(|datastore| Limit::Datastore(datastore));
    [Limit::InAll, Limit::Out(&job.source)].into_iter().chain(target).chain(datastores)
}

/// Usage of limits by groups, and their shares.
struct Shares<'a> {
    held: HashMap<(Limit<'a>, &'a str), u32>,
    groups: HashMap<Limit<'a>, u32>,
    most: HashMap<Limit<'a>, u32>,
}

impl<'a> Shares<'a> {
    fn new(situation: &Situation<'a>, entries: &[Entry<'a>]) -> Self {
        let mut shares =
            Shares { held: HashMap::new(), groups: HashMap::new(), most: HashMap::new() };
        for running in situation.running {
            let Some(group) = running.group.as_deref() else { continue };
            let datastores = running.datastores.iter().map(|datastore| Limit::Datastore(datastore));
            let ends = [Limit::InAll, Limit::Out(&running.source), Limit::Into(&running.target)];
            for limit in ends.into_iter().chain(datastores) {
                *shares.wanted(limit, group) += 1;
            }
        }
        for entry in entries {
            let job = &situation.waiting[entry.job];
            for limit in limits_of(job) {
                shares.wanted(limit, &job.group);
            }
        }
        shares.divide(situation);
        shares
    }

    fn wanted(&mut self, limit: Limit<'a>, group: &'a str) -> &mut u32 {
        let groups = &mut self.groups;
        self.held.entry((limit, group)).or_insert_with(|| {
            *groups.entry(limit).or_insert(0) += 1;
            0
        })
    }

    /// Computes the shares. A share is at least one. A limit that only one group wants is not
    /// divided.
    fn divide(&mut self, situation: &Situation<'a>) {
        let hosts: HashMap<&str, &HostFacts> =
            situation.hosts.iter().map(|host| (host.name.as_str(), host)).collect();
        let speed = |host: &str| hosts.get(host).and_then(|facts| facts.link_bits_per_s);
        let limits = situation.limits;
        for (&limit, &groups) in self.groups.iter().filter(|(_, groups)| **groups > 1) {
            let most = match limit {
                Limit::InAll => limits.in_all.unwrap_or(u32::MAX),
                Limit::Out(host) => limits.out_of(host, speed(host)),
                Limit::Into(host) => limits.into_host(host, speed(host)),
                Limit::Datastore(datastore) => limits.on_datastore(datastore),
            };
            self.most.insert(limit, most.div_ceil(groups).max(1));
        }
    }

    /// Counts a job. Returns whether its group already had its share of a limit that it uses.
    fn count(&mut self, job: &'a WaitingJob) -> bool {
        let mut over = false;
        for limit in limits_of(job) {
            let Some(most) = self.most.get(&limit) else { continue };
            if let Some(held) = self.held.get_mut(&(limit, job.group.as_str())) {
                over |= *held >= *most;
                *held += 1;
            }
        }
        over
    }
}

/// Returns for each entry, in this order, whether its group already has its share of a limit.
fn over_their_share<'a>(situation: &Situation<'a>, entries: &[Entry<'a>]) -> Vec<bool> {
    let mut shares = Shares::new(situation, entries);
    entries.iter().map(|entry| shares.count(&situation.waiting[entry.job])).collect()
}
