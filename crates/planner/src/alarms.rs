//! Alarms: what needs an operator's attention. Pure.
//!
//! [`judge`] compares what is wrong now with the alarms that are raised. Trouble must last for a
//! while before its alarm is raised, and must be gone for a while before it is cleared, so that a
//! restart or a busy link causes no notices. Levels differ on the way up and down for the same
//! reason. What cannot be known at the moment, such as the VMs of a host that is away, neither
//! raises an alarm nor clears one.

mod symptoms;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use godwit_api::control::{AlarmKind, AlarmSeverity};

/// Most alarms that are raised at the same time.
pub const MOST_ALARMS: usize = 1000;
/// Time for which trouble must be gone before its alarm is cleared.
pub const CLEAR_AFTER_MS: u64 = 30_000;
/// Time without progress after which a running move is stuck.
pub const STUCK_AFTER_MS: u64 = 600_000;

/// Identity of an alarm: there is one alarm of a kind for an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AlarmKey {
    pub kind: AlarmKind,
    /// The object, as the API names it: `vm:web`.
    pub object: String,
}

/// Something that is wrong now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symptom {
    pub key: AlarmKey,
    pub severity: AlarmSeverity,
    pub text: String,
    pub remedy: String,
}

/// A host that is not in maintenance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    pub name: String,
    pub is_up: bool,
    /// Known reason why it is away.
    pub reason: Option<String>,
    /// VMs in its last reports.
    pub vms: u64,
}

/// Whether a VM that should run does so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmPower {
    /// It runs, or is about to.
    Runs,
    /// It does not, as its host reports: its state.
    Down { host: String, state: String },
    /// No host has it, although all hosts are reachable.
    Missing,
    /// Its host is away.
    Unknown,
}

/// A VM that should run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmFacts {
    pub name: String,
    pub power: VmPower,
}

/// A mandatory placement rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleFacts {
    pub name: String,
    /// How the first VM breaks it; none: it is kept.
    pub broken: Option<String>,
    /// VMs that break it.
    pub breakers: u64,
    /// Whether VMs of the rule may be on hosts that are away.
    pub is_unsure: bool,
}

/// A datastore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatastoreFacts {
    /// Its name, or its ID if others have that name.
    pub name: String,
    /// Total and free bytes as reachable hosts report them; none: no such host reports them.
    pub space: Option<(u64, u64)>,
}

/// A certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Object that has it.
    pub object: String,
    /// What it is, for sentences: `the certificate of host a`.
    pub what: String,
    pub ends_unix_ms: u64,
    pub remedy: String,
}

/// What changes while a migration makes progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveMark {
    pub attempts: u32,
    pub is_running: bool,
    pub round: u32,
    pub sent_bytes: u64,
    pub remaining_bytes: u64,
    /// Bytes of disks that were sent.
    pub disk_bytes: u64,
}

/// A move that is starting or running.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MoveFacts {
    pub id: String,
    pub vm: String,
    pub from: String,
    pub to: String,
    pub mark: MoveMark,
}

/// Something that is wrong with the high availability. It has its text already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HaFacts {
    /// One of the kinds for it.
    pub kind: AlarmKind,
    /// The object, as the API names it: `host:a`.
    pub object: String,
    pub text: String,
    /// The remedy; none: that of its kind.
    pub remedy: Option<String>,
}

/// Facts about the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AlarmFacts {
    pub hosts: Vec<HostFacts>,
    pub vms: Vec<VmFacts>,
    pub rules: Vec<RuleFacts>,
    pub datastores: Vec<DatastoreFacts>,
    pub certificates: Vec<CertificateFacts>,
    pub moves: Vec<MoveFacts>,
    pub ha: Vec<HaFacts>,
}

/// Since when things are as they are, milliseconds since 1970. It begins empty, also with a new
/// leader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AlarmWatch {
    /// Trouble that is there.
    present: BTreeMap<AlarmKey, u64>,
    /// Raised alarms whose trouble is gone.
    absent: BTreeMap<AlarmKey, u64>,
    /// Progress of each running move, and since when it is the same.
    moves: BTreeMap<String, (MoveMark, u64)>,
}

/// What to do about an alarm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AlarmVerdict {
    Raise(Symptom),
    /// The severity of a raised alarm has changed.
    Change(Symptom),
    Clear(AlarmKey),
}

/// Result of [`judge`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AlarmJudgement {
    pub watch: AlarmWatch,
    /// In this order: alarms to clear, to change and to raise, the most urgent of them first.
    pub verdicts: Vec<AlarmVerdict>,
    /// Alarms that are due and were not raised because of [`MOST_ALARMS`].
    pub left_out: usize,
}

/// Decides which alarms are raised, changed and cleared. `raised` are the alarms as they are
/// recorded: a verdict that could not be carried out is returned again.
#[must_use]
pub fn judge(
    watch: &AlarmWatch,
    raised: &BTreeMap<AlarmKey, AlarmSeverity>,
    facts: &AlarmFacts,
    now_unix_ms: u64,
) -> AlarmJudgement {
    let moves = moves_since(watch, facts, now_unix_ms);
    let found = symptoms::find(facts, raised, &moves, now_unix_ms);
    let since = |before: &BTreeMap<AlarmKey, u64>, key: &AlarmKey| {
        // A clock that was set back starts the time again.
        before.get(key).copied().filter(|since| *since <= now_unix_ms).unwrap_or(now_unix_ms)
    };
    let mut next = AlarmWatch { moves, ..AlarmWatch::default() };
    for key in found.symptoms.keys().chain(&found.unsure) {
        let is_waiting = watch.present.contains_key(key) || found.symptoms.contains_key(key);
        if is_waiting {
            next.present.insert(key.clone(), since(&watch.present, key));
        }
    }
    let is_gone =
        |key: &&AlarmKey| !found.symptoms.contains_key(*key) && !found.unsure.contains(*key);
    for key in raised.keys().filter(is_gone) {
        next.absent.insert(key.clone(), since(&watch.absent, key));
    }
    let lasts = |since: u64, ms: u64| now_unix_ms.saturating_sub(since) >= ms;
    let cleared: Vec<AlarmKey> = next
        .absent
        .iter()
        .filter(|(_, since)| lasts(**since, CLEAR_AFTER_MS))
        .map(|(key, _)| key.clone())
        .collect();
    let (mut changes, mut due) = (Vec::new(), Vec::new());
    for symptom in found.symptoms.into_values() {
        match raised.get(&symptom.key) {
            Some(severity) if *severity == symptom.severity => {}
            Some(_) => changes.push(AlarmVerdict::Change(symptom)),
            None => {
                let since = next.present.get(&symptom.key).copied().unwrap_or(now_unix_ms);
                if lasts(since, raise_after_ms(symptom.key.kind)) {
                    due.push(symptom);
                }
            }
        }
    }
    due.sort_by_key(|symptom| (Reverse(symptom.severity), symptom.key.clone()));
    let room = MOST_ALARMS.saturating_sub(raised.len() - cleared.len());
    let left_out = due.len().saturating_sub(room);
    due.truncate(room);
    let verdicts = cleared.into_iter().map(AlarmVerdict::Clear).chain(changes);
    let verdicts = verdicts.chain(due.into_iter().map(AlarmVerdict::Raise)).collect();
    AlarmJudgement { watch: next, verdicts, left_out }
}

/// Trouble, by its key, and keys of which nothing is known at the moment.
#[derive(Debug, Default)]
struct Found {
    symptoms: BTreeMap<AlarmKey, Symptom>,
    unsure: BTreeSet<AlarmKey>,
}

/// Time for which trouble must last before its alarm is raised.
fn raise_after_ms(kind: AlarmKind) -> u64 {
    match kind {
        AlarmKind::HostAway | AlarmKind::VmDown => 30_000,
        // A move may break a rule for a moment that a second move restores.
        AlarmKind::RuleBroken => 60_000,
        // Hosts that restart report their datastores and their free memory again.
        AlarmKind::HaUnprotected | AlarmKind::HaShortfall => 60_000,
        AlarmKind::DatastoreFilling
        | AlarmKind::CertificateEnding
        | AlarmKind::MoveStuck
        | AlarmKind::HaDoubtful
        | AlarmKind::HaTrouble
        | AlarmKind::Test => 0,
    }
}

/// Returns the progress of each move, and since when it is the same.
fn moves_since(
    watch: &AlarmWatch,
    facts: &AlarmFacts,
    now_unix_ms: u64,
) -> BTreeMap<String, (MoveMark, u64)> {
    let since = |one: &MoveFacts| match watch.moves.get(&one.id) {
        Some((mark, since)) if *mark == one.mark && *since <= now_unix_ms => *since,
        _ => now_unix_ms,
    };
    facts.moves.iter().map(|one| (one.id.clone(), (one.mark, since(one)))).collect()
}
