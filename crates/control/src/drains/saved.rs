//! Saved form of drains. A record never exceeds the store's limit for one value: a drain that
//! cannot be written could neither end nor be cancelled. Only its texts are unbounded, so they are
//! cut if there is no room. Everything else of a VM is small, and [`check_size`] refuses a host
//! with more VMs than fit.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::QemuEngineOptions;
use godwit_api::control::{DrainState, DrainVm, MovePriority, Problem, ProblemCode};
use godwit_planner::drain::{Expected, PlannedMove};
use godwit_store::MOST_VALUE_BYTES;
use godwit_store::records::{Record, Table};
use godwit_types::EngineKind;
use serde::{Deserialize, Serialize};

use super::record::{HostDrain, Way};
use crate::cluster::text::beginning;

pub(crate) const DRAINS: Table<SavedDrain> = Table::new();

/// Largest size of the plan of the way out. The plan of the way back and the results of the VMs
/// need the same size each, and ineligible targets the rest.
const MOST_PLAN_BYTES: usize = MOST_VALUE_BYTES / 4;
/// Sizes to which texts are cut, in bytes; the first that fits is used.
const TEXT_BYTES: [usize; 4] = [300, 120, 40, 0];
/// Size of the envelope around a record in the store, bytes.
const ENVELOPE_BYTES: usize = 256;

/// Saved drain. The progress is in its moves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedDrain {
    host: String,
    asked_by: String,
    asked_unix_ms: u64,
    priority: MovePriority,
    engine: EngineKind,
    qemu: QemuEngineOptions,
    pub(super) state: DrainState,
    was_in_maintenance: bool,
    plan: SavedWay,
    placed_unix_ms: u64,
    back: Option<SavedWay>,
    passed_over: BTreeMap<String, BTreeSet<String>>,
    pub(super) ended_unix_ms: Option<u64>,
    outcome: Vec<DrainVm>,
}

/// Saved plan. Records of earlier versions have more fields, which are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedWay {
    planned_at_ms: u64,
    moves: Vec<SavedPlannedMove>,
    stays: Vec<SavedStay>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedPlannedMove {
    vm: String,
    source: String,
    target: String,
    memory_bytes: u64,
    why: String,
    expected: Option<SavedExpected>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct SavedExpected {
    starts_in_ms: u64,
    ends_in_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedStay {
    vm: String,
    text: String,
}

impl Record for SavedDrain {
    const KIND: &'static str = "drain";
    const PREFIX: &'static str = "drains/";
    const VERSION: u32 = 1;
}

impl SavedDrain {
    /// Converts a drain, with the longest texts that fit into one value.
    pub(super) fn of(drain: &HostDrain) -> SavedDrain {
        let mut saved = SavedDrain::with_texts(drain, TEXT_BYTES[0]);
        for most_bytes in &TEXT_BYTES[1..] {
            if bytes(&saved) + ENVELOPE_BYTES <= MOST_VALUE_BYTES {
                break;
            }
            saved = SavedDrain::with_texts(drain, *most_bytes);
        }
        saved
    }

    fn with_texts(drain: &HostDrain, most_bytes: usize) -> SavedDrain {
        let HostDrain { host, asked_by, asked_unix_ms, priority, engine, qemu, .. } = drain.clone();
        let outcome = drain.outcome.iter().map(|vm| {
            let reason = beginning(&vm.reason, most_bytes);
            DrainVm { reason, ..vm.clone() }
        });
        SavedDrain {
            host,
            asked_by,
            asked_unix_ms,
            priority,
            engine,
            qemu,
            state: drain.state,
            was_in_maintenance: drain.was_in_maintenance,
            plan: SavedWay::of(&drain.plan, most_bytes),
            placed_unix_ms: drain.placed_unix_ms,
            back: drain.back.as_ref().map(|back| SavedWay::of(back, most_bytes)),
            passed_over: drain.passed_over.clone(),
            ended_unix_ms: drain.ended_unix_ms,
            outcome: outcome.collect(),
        }
    }
}

impl From<SavedDrain> for HostDrain {
    fn from(saved: SavedDrain) -> HostDrain {
        HostDrain {
            host: saved.host,
            asked_by: saved.asked_by,
            asked_unix_ms: saved.asked_unix_ms,
            priority: saved.priority,
            engine: saved.engine,
            qemu: saved.qemu,
            state: saved.state,
            was_in_maintenance: saved.was_in_maintenance,
            plan: saved.plan.into(),
            placed_unix_ms: saved.placed_unix_ms,
            back: saved.back.map(Into::into),
            passed_over: saved.passed_over,
            ended_unix_ms: saved.ended_unix_ms,
            outcome: saved.outcome,
        }
    }
}

impl SavedWay {
    fn of(way: &Way, most_bytes: usize) -> SavedWay {
        let moves = way.moves.iter().map(|planned| SavedPlannedMove {
            vm: planned.vm.clone(),
            source: planned.source.clone(),
            target: planned.target.clone(),
            memory_bytes: planned.memory_bytes,
            why: beginning(&planned.why, most_bytes),
            expected: planned.expected.map(|Expected { starts_in_ms, ends_in_ms }| SavedExpected {
                starts_in_ms,
                ends_in_ms,
            }),
        });
        let stays = way
            .stays
            .iter()
            .map(|(vm, text)| SavedStay { vm: vm.clone(), text: beginning(text, most_bytes) });
        SavedWay {
            planned_at_ms: way.planned_at_ms,
            moves: moves.collect(),
            stays: stays.collect(),
        }
    }
}

impl From<SavedWay> for Way {
    fn from(saved: SavedWay) -> Way {
        let moves = saved.moves.into_iter().map(|planned| PlannedMove {
            vm: planned.vm,
            source: planned.source,
            target: planned.target,
            memory_bytes: planned.memory_bytes,
            why: planned.why,
            // Only needed during the planning.
            together_with: Vec::new(),
            expected: planned.expected.map(|SavedExpected { starts_in_ms, ends_in_ms }| Expected {
                starts_in_ms,
                ends_in_ms,
            }),
            waits_for: None,
        });
        let stays = saved.stays.into_iter().map(|staying| (staying.vm, staying.text));
        Way { planned_at_ms: saved.planned_at_ms, moves: moves.collect(), stays: stays.collect() }
    }
}

/// Refuses a drain whose record could become too large.
pub(super) fn check_size(host: &str, plan: &Way) -> Result<(), Problem> {
    let is = bytes(&SavedWay::of(plan, TEXT_BYTES[1]));
    if is <= MOST_PLAN_BYTES {
        return Ok(());
    }
    let vms = plan.moves.len() + plan.stays.len();
    let fit = vms.saturating_mul(MOST_PLAN_BYTES) / is;
    let detail = format!(
        "cannot drain host {host} at once: it has {vms} VMs, and a plan with these names has room \
        for about {fit}"
    );
    let remedy = format!(
        "drain it in parts: set it into maintenance (`godwit control host maintenance {host} \
        on`), move some of its VMs with `godwit control move create VM`, then drain the rest"
    );
    Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy))
}

/// Returns the size of a value as JSON, bytes.
fn bytes<T: Serialize>(value: &T) -> usize {
    serde_json::to_vec(value).map_or(usize::MAX, |json| json.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> String {
        format!("{number:063}")
    }

    /// Returns a drain in which every field of each VM has its largest size.
    fn longest(vms: usize) -> HostDrain {
        let text = "\"ä\n".repeat(1000);
        let planned = |number: usize| PlannedMove {
            vm: name(number),
            source: name(0),
            target: name(1),
            memory_bytes: 1 << 50,
            why: text.clone(),
            together_with: vec![name(2); 20],
            expected: Some(Expected { starts_in_ms: 1 << 40, ends_in_ms: 1 << 40 }),
            waits_for: None,
        };
        let way = Way {
            planned_at_ms: 1 << 41,
            moves: (0..vms).map(planned).collect(),
            stays: BTreeMap::new(),
        };
        let outcome = (0..vms).map(|number| DrainVm {
            vm: name(number),
            state: godwit_api::control::DrainVmState::Stays,
            to: Some(name(1)),
            reason: text.clone(),
            r#move: Some("v6b0450ea123-00007e6c".to_owned()),
            gone_unix_ms: Some(1 << 41),
        });
        let passed_over = (0..vms).map(|number| (name(number), [name(1), name(2)].into()));
        HostDrain {
            host: name(0),
            asked_by: name(0),
            asked_unix_ms: 1 << 41,
            priority: MovePriority::Normal,
            engine: EngineKind::default(),
            qemu: QemuEngineOptions::default(),
            state: DrainState::Undone,
            was_in_maintenance: false,
            back: Some(way.clone()),
            plan: way,
            placed_unix_ms: 1 << 41,
            passed_over: passed_over.collect(),
            ended_unix_ms: Some(1 << 41),
            outcome: outcome.collect(),
        }
    }

    #[test]
    fn an_accepted_drain_fits_in_every_state() {
        let most =
            (1..).take_while(|vms| check_size("a", &longest(*vms).plan).is_ok()).last().unwrap();
        let saved = SavedDrain::of(&longest(most));
        assert!(
            bytes(&saved) + ENVELOPE_BYTES <= MOST_VALUE_BYTES,
            "{most} VMs: {}",
            bytes(&saved)
        );
        let problem = check_size("a", &longest(most + 1).plan).unwrap_err();
        assert!(problem.detail.contains(&format!("has {} VMs", most + 1)), "{problem}");
        assert!(problem.remedy.contains("in parts"), "{problem}");
    }

    #[test]
    fn a_saved_drain_equals_the_original_except_for_cut_texts() {
        let mut drain = longest(3);
        for way in [Some(&mut drain.plan), drain.back.as_mut()].into_iter().flatten() {
            way.moves.iter_mut().for_each(|planned| {
                (planned.why, planned.together_with) = ("short".into(), vec![]);
            });
            way.stays.insert("s".into(), "it stays".into());
        }
        drain.outcome.iter_mut().for_each(|vm| vm.reason = "short".into());
        assert_eq!(HostDrain::from(SavedDrain::of(&drain)), drain);
        drain.plan.stays.insert("s".into(), "ä".repeat(200));
        let cut = HostDrain::from(SavedDrain::of(&drain)).plan.stays.remove("s").unwrap();
        assert_eq!(cut, format!("{}…", "ä".repeat(150)));
    }

    #[test]
    fn records_of_earlier_versions_are_readable() {
        let mut old = serde_json::to_value(SavedDrain::of(&longest(1))).unwrap();
        let plan = old["plan"].as_object_mut().unwrap();
        plan.insert("host".into(), "a".into());
        plan.insert("takes_ms".into(), serde_json::Value::Null);
        plan.insert("text".into(), "1 move".into());
        let stay = serde_json::json!({
            "vm": "s", "reason": { "kind": "with-others", "vms": [] }, "text": "it stays",
        });
        plan.insert("stays".into(), serde_json::json!([stay]));
        let read: SavedDrain = serde_json::from_value(old).unwrap();
        assert_eq!(HostDrain::from(read).plan.stays["s"], "it stays");
    }
}
