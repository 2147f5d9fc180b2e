//! Saved form of drains. One value of the store holds [`MOST_VMS`] VMs of a drain with the longest
//! names and texts. The drain's record has the first ones, and each part the next ones. So a drain
//! has no limit of VMs, and the record of a small drain is complete.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use godwit_api::control::{DrainState, DrainVm, MovePriority};
use godwit_api::{QemuEngineOptions, TravellingDisks};
use godwit_planner::drain::{Expected, PlannedMove};
use godwit_store::records::{Record, Table};
use godwit_types::EngineKind;
use serde::{Deserialize, Serialize};

use super::state::{HostDrain, Way};
use crate::cluster::text::beginning;

pub(crate) const DRAINS: Table<SavedDrain> = Table::new();

/// Further VMs of drains, by [`part_id`].
pub(crate) const PARTS: Table<SavedPart> = Table::new();

/// Largest number of VMs in one value.
const MOST_VMS: usize = 100;
/// Largest size of a text, in bytes. As JSON a byte takes 6 bytes at most.
const MOST_TEXT_BYTES: usize = 300;

/// Returns the ID of a part of a drain.
pub(super) fn part_id(drain: &str, number: usize) -> String {
    format!("{drain}.{number:05}")
}

/// Returns the drain that a part belongs to.
pub(super) fn drain_of(part_id: &str) -> &str {
    part_id.rsplit_once('.').map_or(part_id, |(drain, _)| drain)
}

/// Some VMs of a drain, as in [`SavedDrain`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedPart {
    plan: SavedWay,
    back: Option<SavedWay>,
    passed_over: BTreeMap<String, BTreeSet<String>>,
    outcome: Vec<DrainVm>,
}

impl Record for SavedPart {
    const KIND: &'static str = "drain-part";
    const PREFIX: &'static str = "drain-parts/";
    const VERSION: u32 = 1;
}

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
    #[serde(default)]
    disks: Option<TravellingDisks>,
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
    /// Converts a drain to its record and further parts.
    pub(super) fn of(drain: &HostDrain) -> (SavedDrain, Vec<SavedPart>) {
        let mut parts = split(drain).into_iter();
        let SavedPart { plan, back, passed_over, outcome } =
            parts.next().unwrap_or_else(|| SavedPart::without_vms(drain));
        let HostDrain { host, asked_by, qemu, disks, .. } = drain;
        let saved = SavedDrain {
            host: host.clone(),
            asked_by: asked_by.clone(),
            asked_unix_ms: drain.asked_unix_ms,
            priority: drain.priority,
            engine: drain.engine,
            qemu: qemu.clone(),
            disks: disks.clone(),
            state: drain.state,
            was_in_maintenance: drain.was_in_maintenance,
            plan,
            placed_unix_ms: drain.placed_unix_ms,
            back,
            passed_over,
            ended_unix_ms: drain.ended_unix_ms,
            outcome,
        };
        (saved, parts.collect())
    }

    /// Restores a drain from its record and further parts. After an interrupted write a VM can be
    /// in two of them: the first one counts.
    pub(super) fn with(self, parts: Vec<SavedPart>) -> HostDrain {
        let mut drain = HostDrain::from(self);
        if parts.is_empty() {
            return drain;
        }
        for part in parts {
            drain.plan.add(part.plan);
            if let (Some(back), Some(part)) = (&mut drain.back, part.back) {
                back.add(part);
            }
            drain.passed_over.extend(part.passed_over);
            drain.outcome.extend(part.outcome);
        }
        drain.outcome.sort_by(|one, other| one.vm.cmp(&other.vm));
        drain.outcome.dedup_by(|one, other| one.vm == other.vm);
        [Some(&mut drain.plan), drain.back.as_mut()].into_iter().flatten().for_each(Way::sort);
        drain
    }
}

/// Distributes the VMs of a drain by name.
fn split(drain: &HostDrain) -> Vec<SavedPart> {
    let ways = || [Some(&drain.plan), drain.back.as_ref()].into_iter().flatten();
    let planned =
        ways().flat_map(|way| way.moves.iter().map(|one| &one.vm).chain(way.stays.keys()));
    let others = drain.passed_over.keys().chain(drain.outcome.iter().map(|vm| &vm.vm));
    let names: BTreeSet<&String> = planned.chain(others).collect();
    let mut parts = vec![SavedPart::without_vms(drain); names.len().div_ceil(MOST_VMS)];
    let part_of: HashMap<&String, usize> =
        names.into_iter().enumerate().map(|(number, vm)| (vm, number / MOST_VMS)).collect();
    for planned in &drain.plan.moves {
        parts[part_of[&planned.vm]].plan.moves.push(SavedPlannedMove::of(planned));
    }
    for (vm, text) in &drain.plan.stays {
        parts[part_of[vm]].plan.stays.push(SavedStay::of(vm, text));
    }
    if let Some(way) = &drain.back {
        for planned in &way.moves {
            let part = parts[part_of[&planned.vm]].back.as_mut();
            part.into_iter().for_each(|back| back.moves.push(SavedPlannedMove::of(planned)));
        }
        for (vm, text) in &way.stays {
            let part = parts[part_of[vm]].back.as_mut();
            part.into_iter().for_each(|back| back.stays.push(SavedStay::of(vm, text)));
        }
    }
    for (vm, hosts) in &drain.passed_over {
        parts[part_of[vm]].passed_over.insert(vm.clone(), hosts.clone());
    }
    for vm in &drain.outcome {
        let reason = beginning(&vm.reason, MOST_TEXT_BYTES);
        parts[part_of[&vm.vm]].outcome.push(DrainVm { reason, ..vm.clone() });
    }
    parts
}

impl SavedPart {
    fn without_vms(drain: &HostDrain) -> SavedPart {
        let blank = |way: &Way| SavedWay {
            planned_at_ms: way.planned_at_ms,
            moves: Vec::new(),
            stays: Vec::new(),
        };
        SavedPart {
            plan: blank(&drain.plan),
            back: drain.back.as_ref().map(blank),
            passed_over: BTreeMap::new(),
            outcome: Vec::new(),
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
            disks: saved.disks,
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

impl SavedPlannedMove {
    fn of(planned: &PlannedMove) -> SavedPlannedMove {
        SavedPlannedMove {
            vm: planned.vm.clone(),
            source: planned.source.clone(),
            target: planned.target.clone(),
            memory_bytes: planned.memory_bytes,
            why: beginning(&planned.why, MOST_TEXT_BYTES),
            expected: planned.expected.map(|Expected { starts_in_ms, ends_in_ms }| SavedExpected {
                starts_in_ms,
                ends_in_ms,
            }),
        }
    }
}

impl SavedStay {
    fn of(vm: &str, text: &str) -> SavedStay {
        SavedStay { vm: vm.to_owned(), text: beginning(text, MOST_TEXT_BYTES) }
    }
}

impl Way {
    fn add(&mut self, saved: SavedWay) {
        let part = Way::from(saved);
        self.moves.extend(part.moves);
        self.stays.extend(part.stays);
    }

    /// Sorts the moves as the planner does, one for each VM.
    fn sort(&mut self) {
        let mut seen = HashSet::new();
        self.moves.retain(|planned| seen.insert(planned.vm.clone()));
        let begin = |planned: &PlannedMove| {
            planned.expected.map_or(u64::MAX, |expected| expected.starts_in_ms)
        };
        self.moves.sort_by_cached_key(|planned| (begin(planned), planned.vm.clone()));
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

#[cfg(test)]
mod tests {
    use godwit_store::MOST_VALUE_BYTES;

    use super::*;

    /// Returns the size of a record in the store, bytes.
    fn bytes<T: Record>(record: &T) -> usize {
        Table::<T>::new().encode("key", record).unwrap().len()
    }

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
            disks: Some(TravellingDisks {
                to: Some("\"".repeat(1024).into()),
                ..TravellingDisks::default()
            }),
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
    fn a_drain_of_any_size_fits_in_every_state() {
        let mut drain = longest(2 * MOST_VMS + 1);
        // The longest form of a text: each byte is escaped.
        let text = "\u{1}".repeat(1000);
        for way in [Some(&mut drain.plan), drain.back.as_mut()].into_iter().flatten() {
            way.moves.iter_mut().for_each(|planned| planned.why.clone_from(&text));
        }
        drain.outcome.iter_mut().for_each(|vm| vm.reason.clone_from(&text));
        let (saved, parts) = SavedDrain::of(&drain);
        assert_eq!(parts.len(), 2);
        let most = parts.iter().map(bytes).chain([bytes(&saved)]).max().unwrap();
        assert!(most <= MOST_VALUE_BYTES, "{most} bytes");
    }

    #[test]
    fn a_saved_drain_equals_the_original_except_for_cut_texts() {
        for vms in [0, 3, MOST_VMS, 5 * MOST_VMS + 7] {
            let mut drain = longest(vms);
            for way in [Some(&mut drain.plan), drain.back.as_mut()].into_iter().flatten() {
                way.moves.iter_mut().for_each(|planned| {
                    (planned.why, planned.together_with) = ("short".into(), vec![]);
                });
                way.stays.insert("s".into(), "it stays".into());
            }
            drain.outcome.iter_mut().for_each(|vm| vm.reason = "short".into());
            let restored = |drain: &HostDrain| {
                let (saved, parts) = SavedDrain::of(drain);
                saved.with(parts)
            };
            assert_eq!(restored(&drain), drain);
            drain.plan.stays.insert("s".into(), "ä".repeat(200));
            let cut = restored(&drain).plan.stays.remove("s").unwrap();
            assert_eq!(cut, format!("{}…", "ä".repeat(150)));
        }
    }

    #[test]
    fn a_write_that_is_interrupted_between_parts_leaves_each_vm_once() {
        let (before, mut after) = (longest(2 * MOST_VMS), longest(2 * MOST_VMS));
        // The first by name: all others move on, and the last of each part into the next one.
        let first = PlannedMove { vm: "!".into(), ..after.plan.moves[0].clone() };
        after.plan.moves.push(first);
        let (record, old_parts) = SavedDrain::of(&before);
        let (_, new_parts) = SavedDrain::of(&after);
        for written in 0..=new_parts.len() {
            let mut parts = new_parts[..written].to_vec();
            parts.extend_from_slice(old_parts.get(written..).unwrap_or_default());
            let read = record.clone().with(parts);
            let moves: BTreeSet<&String> = read.plan.moves.iter().map(|one| &one.vm).collect();
            assert_eq!(moves.len(), read.plan.moves.len());
            let ended: BTreeSet<&String> = read.outcome.iter().map(|one| &one.vm).collect();
            assert_eq!(ended.len(), read.outcome.len());
        }
    }

    #[test]
    fn records_of_earlier_versions_are_readable() {
        let mut old = serde_json::to_value(SavedDrain::of(&longest(1)).0).unwrap();
        old.as_object_mut().unwrap().remove("disks").unwrap();
        let plan = old["plan"].as_object_mut().unwrap();
        plan.insert("host".into(), "a".into());
        plan.insert("takes_ms".into(), serde_json::Value::Null);
        plan.insert("text".into(), "1 move".into());
        let stay = serde_json::json!({
            "vm": "s", "reason": { "kind": "with-others", "vms": [] }, "text": "it stays",
        });
        plan.insert("stays".into(), serde_json::json!([stay]));
        // They have all VMs in one record.
        let planned = plan["moves"][0].clone();
        plan.insert("moves".into(), vec![planned; 7 * MOST_VMS].into());
        let read: SavedDrain = serde_json::from_value(old).unwrap();
        let read = read.with(Vec::new());
        assert_eq!((read.plan.stays["s"].as_str(), read.plan.moves.len()), ("it stays", 700));
    }
}
