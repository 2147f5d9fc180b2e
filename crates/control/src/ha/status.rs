//! What operators see of a host's judge.

use std::collections::BTreeMap;
use std::time::Duration;

use godwit_api::control::{AlarmKind, HaHostStatus, HaPhase};
use godwit_planner::alarms::HaFacts;

use super::seat::Shown;

/// Returns the state of a host at `now`, the time since boot, with `names` of datastores by their
/// identity.
pub(super) fn host_status(
    host: &str,
    shown: &Shown,
    now: Duration,
    has_device: bool,
    names: &BTreeMap<String, String>,
) -> HaHostStatus {
    let name_of = |id: &godwit_qemu::Uuid| {
        let id = id.to_string();
        names.get(&id).cloned().unwrap_or(id)
    };
    let age = shown.heard_at.map(|at| now.saturating_sub(at).as_millis());
    HaHostStatus {
        host: host.to_owned(),
        term: shown.record.term.0,
        phase: shown.phase,
        watchdog: shown.record.facts.watchdog,
        fencing: has_device,
        datastores: shown.datastores.iter().map(name_of).collect(),
        heard_ms_ago: age.map(|age| u64::try_from(age).unwrap_or(u64::MAX)),
        rests: shown.rests && shown.phase == HaPhase::Over,
        problem: problem(host, shown, has_device),
    }
}

/// Returns what is wrong with a host, or would keep its VMs from a restart: the most urgent first.
fn problem(host: &str, shown: &Shown, has_device: bool) -> Option<String> {
    let (term, facts) = (shown.record.term.0, shown.record.facts);
    let unheard = || {
        let unanswered = shown.unanswered.as_ref().map(|why| format!("no answer to it: {why}"));
        unanswered.or_else(|| shown.unheard.as_ref().map(|why| format!("no renewal: {why}")))
    };
    if let Some(why) = shown.held_elsewhere.as_ref().or(shown.heartbeat.as_ref()) {
        return Some(why.clone());
    }
    match shown.phase {
        HaPhase::Fencing => Some("it is silent; its power is being cut".to_owned()),
        HaPhase::Doubtful => Some(doubt(host, term)),
        // It may be switched off.
        HaPhase::Over if shown.rests => None,
        HaPhase::Over => unheard(),
        HaPhase::Watching if !facts.watchdog && !has_device => Some(
            "it has neither a watchdog nor a fencing device: if it fails, its VMs restart only \
             when an operator confirms that it is off"
                .to_owned(),
        ),
        HaPhase::Watching if facts.datastores == 0 => Some(unheard().unwrap_or_else(|| {
            "its term has no heartbeat datastore: a cut of the management network stops its VMs"
                .to_owned()
        })),
        HaPhase::Watching => unheard(),
    }
}

fn doubt(host: &str, term: u64) -> String {
    format!(
        "it is silent, and nothing guarantees that its VMs have ended: switch it off, then confirm \
         that with `godwit control ha confirm-off {host} --term {term}`"
    )
}

/// Returns what of a host raises an alarm.
pub(super) fn troubles_of(host: &str, shown: &Shown) -> Vec<HaFacts> {
    let object = format!("host:{host}");
    let fact = |kind, text: String| HaFacts { kind, object: object.clone(), text, remedy: None };
    let mut facts = Vec::new();
    if shown.phase == HaPhase::Doubtful {
        facts.push(fact(AlarmKind::HaDoubtful, doubt(host, shown.record.term.0)));
    }
    if let Some(why) = shown.held_elsewhere.as_ref().or(shown.heartbeat.as_ref()) {
        facts.push(fact(AlarmKind::HaTrouble, why.clone()));
    }
    facts
}

#[cfg(test)]
mod tests {
    use godwit_ha::{Facts, Record, Term};

    use super::*;

    fn shown(phase: HaPhase, facts: Facts) -> Shown {
        Shown {
            record: Record { term: Term(3), over: phase == HaPhase::Over, facts },
            phase,
            datastores: Vec::new(),
            heard_at: None,
            unheard: None,
            unanswered: None,
            held_elsewhere: None,
            heartbeat: None,
            rests: false,
        }
    }

    #[test]
    fn a_host_whose_vms_would_not_restart_is_named() {
        let guarded = Facts { datastores: 1, watchdog: true, fencing: false };
        assert_eq!(problem("a", &shown(HaPhase::Watching, guarded), false), None);
        let bare = shown(HaPhase::Watching, Facts { watchdog: false, ..guarded });
        assert!(problem("a", &bare, false).unwrap().contains("neither a watchdog"));
        assert_eq!(problem("a", &bare, true), None);
        let alone = shown(HaPhase::Watching, Facts { datastores: 0, ..guarded });
        assert!(problem("a", &alone, false).unwrap().contains("no heartbeat datastore"));
    }

    #[test]
    fn a_host_that_rests_has_no_problem() {
        let why = Some("its agent does not respond".to_owned());
        let away = Shown { unheard: why, ..shown(HaPhase::Over, Facts::default()) };
        assert!(problem("a", &away, false).unwrap().starts_with("no renewal"));
        assert_eq!(problem("a", &Shown { rests: true, ..away }, false), None);
    }

    #[test]
    fn a_doubtful_host_and_another_cluster_raise_alarms() {
        let facts = Facts::default();
        assert_eq!(troubles_of("a", &shown(HaPhase::Watching, facts)), []);
        let doubtful = shown(HaPhase::Doubtful, facts);
        let raised = troubles_of("a", &doubtful);
        assert_eq!((raised.len(), raised[0].kind), (1, AlarmKind::HaDoubtful));
        assert!(raised[0].text.contains("confirm-off a --term 3"), "{raised:?}");
        assert!(problem("a", &doubtful, false).unwrap().contains("--term 3"));
        let held = "it is held by another cluster".to_owned();
        let foreign = Shown { held_elsewhere: Some(held), ..shown(HaPhase::Over, facts) };
        assert_eq!(troubles_of("a", &foreign)[0].kind, AlarmKind::HaTrouble);
    }
}
