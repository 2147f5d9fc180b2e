//! What is wrong with the cluster at one moment.

use std::collections::BTreeMap;

use godwit_api::control::{AlarmKind, AlarmSeverity};
use time::OffsetDateTime;

use super::{
    AlarmFacts, AlarmKey, CertificateFacts, DatastoreFacts, Found, HaFacts, HostFacts, MoveFacts,
    MoveMark, RuleFacts, STUCK_AFTER_MS, Symptom, VmFacts, VmPower,
};
use crate::words::{Bytes, Span};

const DAY_MS: u64 = 24 * 3600 * 1000;
/// Time before the end of a certificate from which it is a warning, and from which it is critical.
const CERTIFICATE_WARNING_MS: u64 = 30 * DAY_MS;
const CERTIFICATE_CRITICAL_MS: u64 = 7 * DAY_MS;
/// Fill levels of a datastore in percent: warning, critical.
const FILL_WARNING: u64 = 85;
const FILL_CRITICAL: u64 = 95;
/// Percentage points by which the level must fall below these before the alarm ends.
const FILL_BACK: u64 = 2;

/// Returns what is wrong. `raised` are the present alarms, whose levels end later than they begin;
/// `moves` is since when the progress of each move is the same.
pub(super) fn find(
    facts: &AlarmFacts,
    raised: &BTreeMap<AlarmKey, AlarmSeverity>,
    moves: &BTreeMap<String, (MoveMark, u64)>,
    now_unix_ms: u64,
) -> Found {
    let mut found = Found::default();
    let mut add = |key: AlarmKey, state: State| match state {
        State::Fine => {}
        State::Unsure => {
            found.unsure.insert(key);
        }
        State::Wrong(severity, text, remedy) => {
            let symptom = Symptom { key: key.clone(), severity, text, remedy };
            // Of several certificates of one object, the one that ends first counts.
            let before = found.symptoms.get(&key).map(|before| before.severity);
            if before.is_none_or(|before| before < severity) {
                found.symptoms.insert(key, symptom);
            }
        }
    };
    for one in &facts.hosts {
        add(key(AlarmKind::HostAway, format!("host:{}", one.name)), host(one));
    }
    for one in &facts.vms {
        add(key(AlarmKind::VmDown, format!("vm:{}", one.name)), vm(one));
    }
    for one in &facts.rules {
        add(key(AlarmKind::RuleBroken, format!("rule:{}", one.name)), rule(one));
    }
    for one in &facts.datastores {
        let key = key(AlarmKind::DatastoreFilling, format!("datastore:{}", one.name));
        let state = datastore(one, raised.get(&key).copied());
        add(key, state);
    }
    let mut certificates: Vec<&CertificateFacts> = facts.certificates.iter().collect();
    certificates.sort_by_key(|one| one.ends_unix_ms);
    for one in certificates {
        let key = key(AlarmKind::CertificateEnding, one.object.clone());
        add(key, certificate(one, now_unix_ms));
    }
    for one in &facts.moves {
        let since = moves.get(&one.id).map_or(now_unix_ms, |(_, since)| *since);
        let still_ms = now_unix_ms.saturating_sub(since);
        add(key(AlarmKind::MoveStuck, format!("move:{}", one.id)), movement(one, still_ms));
    }
    for one in &facts.ha {
        add(key(one.kind, one.object.clone()), ha(one));
    }
    found
}

/// State of an object, as far as one kind of alarm is concerned.
enum State {
    Fine,
    Unsure,
    /// Severity, text and remedy.
    Wrong(AlarmSeverity, String, String),
}

fn key(kind: AlarmKind, object: String) -> AlarmKey {
    AlarmKey { kind, object }
}

fn host(HostFacts { name, is_up, reason, vms }: &HostFacts) -> State {
    if *is_up {
        return State::Fine;
    }
    let why = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let had = match vms {
        0 => String::new(),
        1 => "; it had 1 VM".to_owned(),
        vms => format!("; it had {vms} VMs"),
    };
    State::Wrong(
        AlarmSeverity::Critical,
        format!("host {name} is away{why}{had}"),
        format!(
            "check its power, its network and its agent (systemctl status godwit-host), or set it \
            in maintenance: godwit control host maintenance {name} on"
        ),
    )
}

fn vm(VmFacts { name, power }: &VmFacts) -> State {
    let text = match power {
        VmPower::Runs => return State::Fine,
        VmPower::Unknown => return State::Unsure,
        VmPower::Down { host, state } => {
            format!("VM {name} is {state} on host {host}, and should run")
        }
        VmPower::Missing => format!("VM {name} should run, and no host has it"),
    };
    let remedy = format!(
        "see why: godwit vm show {name}; then start it (godwit vm start {name}), or stop it \
        through the manager if it should not run"
    );
    State::Wrong(AlarmSeverity::Critical, text, remedy)
}

fn rule(RuleFacts { name, broken, breakers, is_unsure }: &RuleFacts) -> State {
    let Some(why) = broken else {
        return if *is_unsure { State::Unsure } else { State::Fine };
    };
    let more = match breakers.saturating_sub(1) {
        0 => String::new(),
        1 => ", and 1 more VM breaks it".to_owned(),
        more => format!(", and {more} more VMs break it"),
    };
    State::Wrong(
        AlarmSeverity::Warning,
        format!("rule {name} is broken: {why}{more}"),
        format!("move the VMs that break it: godwit control rule show {name}"),
    )
}

fn datastore(
    DatastoreFacts { name, space }: &DatastoreFacts,
    raised: Option<AlarmSeverity>,
) -> State {
    let Some((total, free)) = space.filter(|(total, _)| *total > 0) else { return State::Unsure };
    let used = total.saturating_sub(free);
    let percent = u64::try_from(u128::from(used) * 100 / u128::from(total)).unwrap_or(100);
    let reaches = |level: u64, severity: AlarmSeverity| {
        let back = if raised >= Some(severity) { FILL_BACK } else { 0 };
        percent >= level - back
    };
    let severity = if reaches(FILL_CRITICAL, AlarmSeverity::Critical) {
        AlarmSeverity::Critical
    } else if reaches(FILL_WARNING, AlarmSeverity::Warning) {
        AlarmSeverity::Warning
    } else {
        return State::Fine;
    };
    State::Wrong(
        severity,
        format!(
            "datastore {name} is {percent} % full: {} of {} are free",
            Bytes(free),
            Bytes(total)
        ),
        format!("delete images, or move disks: godwit datastore show {name}"),
    )
}

fn certificate(one: &CertificateFacts, now_unix_ms: u64) -> State {
    let CertificateFacts { what, ends_unix_ms, remedy, .. } = one;
    let left_ms = ends_unix_ms.saturating_sub(now_unix_ms);
    let severity = match left_ms {
        0..=CERTIFICATE_CRITICAL_MS => AlarmSeverity::Critical,
        _ if left_ms <= CERTIFICATE_WARNING_MS => AlarmSeverity::Warning,
        _ => return State::Fine,
    };
    let day = day(*ends_unix_ms);
    let text = match left_ms {
        0 => format!("{what} ended on {day}: its connections are refused"),
        _ => format!("{what} ends on {day}"),
    };
    State::Wrong(severity, text, remedy.clone())
}

/// Formats the day of a time: `2026-11-27`.
fn day(unix_ms: u64) -> String {
    let seconds = i64::try_from(unix_ms / 1000).unwrap_or(i64::MAX);
    let time = OffsetDateTime::from_unix_timestamp(seconds);
    time.map_or_else(|_| "an unknown day".to_owned(), |time| time.date().to_string())
}

fn movement(MoveFacts { id, vm, from, to, .. }: &MoveFacts, still_ms: u64) -> State {
    if still_ms < STUCK_AFTER_MS {
        return State::Fine;
    }
    State::Wrong(
        AlarmSeverity::Warning,
        format!(
            "move {id} of VM {vm} from {from} to {to} has made no progress for {}",
            Span(STUCK_AFTER_MS)
        ),
        format!(
            "check both hosts and the link between them (godwit control move show {id}), or \
            cancel it: godwit control move cancel {id}"
        ),
    )
}

fn ha(HaFacts { kind, object, text, remedy: own }: &HaFacts) -> State {
    let name = object.split_once(':').map_or(object.as_str(), |(_, name)| name);
    let (severity, remedy) = match kind {
        AlarmKind::HaDoubtful => (
            AlarmSeverity::Critical,
            format!(
                "switch host {name} off, then confirm that it is off: godwit control ha show has \
                the command, with the number of the term"
            ),
        ),
        AlarmKind::HaUnprotected => (
            AlarmSeverity::Warning,
            format!(
                "remove the cause (docs/ha.md), or end the protection: \
                godwit vm set {name} --unset protect"
            ),
        ),
        AlarmKind::HaShortfall => (
            AlarmSeverity::Warning,
            "add a host or memory, or protect fewer VMs: godwit control ha show".to_owned(),
        ),
        _ => (AlarmSeverity::Critical, "see the cause: godwit control ha show".to_owned()),
    };
    State::Wrong(severity, text.clone(), own.clone().unwrap_or(remedy))
}
