//! Moves that another manager carries out. Managers that follow use this to know which VMs have a
//! move.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use godwit_planner::queue::lifecycle::JobState;
use parking_lot::{Mutex, MutexGuard};

use super::job::under_way_to;
use super::record::SavedMove;
use crate::cluster::state::State;
use crate::storage::planned::Planned;

/// What a manager knows of a move that another manager carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
struct OnWay {
    vm: String,
    /// Whether it has begun or is about to.
    runs: bool,
    /// Target of the attempt in progress.
    target: Option<String>,
}

impl OnWay {
    /// Returns `None` for a finished move.
    fn of(saved: SavedMove) -> Option<OnWay> {
        let runs = !matches!(saved.state, JobState::Waiting { .. });
        let target = under_way_to(&saved.state).cloned();
        (!saved.state.is_over()).then_some(OnWay { vm: saved.vm, runs, target })
    }
}

/// Unfinished moves, while this manager does not lead.
#[derive(Debug)]
pub(crate) struct MovesElsewhere {
    state: Arc<State>,
    on_way: Mutex<BTreeMap<String, OnWay>>,
}

impl MovesElsewhere {
    pub(crate) fn new(state: Arc<State>) -> MovesElsewhere {
        MovesElsewhere { state, on_way: Mutex::default() }
    }

    fn on_way(&self) -> MutexGuard<'_, BTreeMap<String, OnWay>> {
        self.on_way.lock()
    }

    /// Removes all moves, because this manager carries them out now.
    pub(crate) fn clear(&self) {
        self.on_way().clear();
    }

    /// Returns the numbers of running and waiting moves.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let on_way = self.on_way();
        let running = on_way.values().filter(|one| one.runs).count();
        (running as u64, (on_way.len() - running) as u64)
    }
}

impl Planned<MovesElsewhere> for SavedMove {
    fn known(moves: &MovesElsewhere) -> BTreeSet<String> {
        moves.on_way().keys().cloned().collect()
    }

    fn set(moves: &MovesElsewhere, id: &str, record: Option<SavedMove>) {
        let on_way = record.and_then(OnWay::of);
        let vm = on_way.as_ref().map(|one| one.vm.clone());
        let target = on_way.as_ref().and_then(|one| one.target.clone());
        let before = match on_way {
            Some(one) => moves.on_way().insert(id.to_owned(), one),
            None => moves.on_way().remove(id),
        };
        let planned = vm.as_ref().map(|_| id.to_owned());
        if let Some(vm) = vm.or(before.map(|one| one.vm)) {
            moves.state.change(|inventory| inventory.plan_move(&vm, planned, target));
        }
    }
}
