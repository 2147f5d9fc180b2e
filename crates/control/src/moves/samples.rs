//! Progress samples of moves, for displays that open during or after a migration. In memory,
//! bounded and pure.

use std::collections::{BTreeMap, VecDeque};

use godwit_api::MigrationStatus;
use godwit_api::control::{MoveSamples, PhaseMark};
use godwit_types::Progress;

/// Most samples of a move.
const MOST_SAMPLES: usize = 600;
/// Shortest interval between two samples at first, milliseconds.
const FIRST_SPACING_MS: f64 = 50.0;
/// Most phase marks of a move. Further marks come from rounds too many to distinguish in a chart.
const MOST_MARKS: usize = 200;
/// Most moves with samples. The move that began first loses its samples first.
const MOST_MOVES: usize = 300;

/// Samples of the latest moves.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    by_move: BTreeMap<String, Series>,
    oldest_first: VecDeque<String>,
}

/// Samples of one move.
#[derive(Debug)]
struct Series {
    migration: String,
    started_unix_ms: u64,
    samples: Vec<Progress>,
    phases: Vec<PhaseMark>,
    spacing_ms: f64,
}

impl Samples {
    /// Adds the progress that an agent reports. Another attempt starts a new series.
    pub(crate) fn record(&mut self, id: &str, status: &MigrationStatus) {
        let is_same = self.by_move.get(id).is_some_and(|series| series.migration == status.id);
        if !is_same {
            let series = Series::new(status);
            if self.by_move.insert(id.to_owned(), series).is_none() {
                self.oldest_first.push_back(id.to_owned());
            }
        }
        while self.oldest_first.len() > MOST_MOVES
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.by_move.remove(&oldest);
        }
        if let Some(series) = self.by_move.get_mut(id) {
            series.record(&status.progress);
        }
    }

    /// Returns the samples of a move; the result is empty if there are none.
    pub(crate) fn of(&self, id: &str) -> MoveSamples {
        let none = MoveSamples { id: id.to_owned(), ..MoveSamples::default() };
        self.by_move.get(id).map_or(none.clone(), |series| MoveSamples {
            migration: Some(series.migration.clone()),
            started_unix_ms: Some(series.started_unix_ms),
            phases: series.phases.clone(),
            samples: series.samples.clone(),
            ..none
        })
    }
}

impl Series {
    fn new(status: &MigrationStatus) -> Series {
        Series {
            migration: status.id.clone(),
            started_unix_ms: status.started_unix_ms,
            samples: Vec::new(),
            phases: Vec::new(),
            spacing_ms: FIRST_SPACING_MS,
        }
    }

    fn record(&mut self, progress: &Progress) {
        let Progress { phase, round, elapsed_ms, .. } = *progress;
        let changes = self.phases.last().is_none_or(|mark| mark.phase != phase);
        if changes && self.phases.len() < MOST_MARKS {
            self.phases.push(PhaseMark { phase, round, at_ms: elapsed_ms });
        }
        let Some(last) = self.samples.last_mut() else {
            return self.samples.push(progress.clone());
        };
        if elapsed_ms <= last.elapsed_ms {
            return;
        }
        if elapsed_ms < last.elapsed_ms + self.spacing_ms && !changes {
            // A longer round trip of the guest's clients in between is retained.
            last.guest_round_trip_ms = longer(last, progress);
            return;
        }
        if self.samples.len() >= MOST_SAMPLES {
            self.halve();
        }
        self.samples.push(progress.clone());
    }

    /// Removes every other sample, and doubles the interval from here on.
    fn halve(&mut self) {
        let pairs = self.samples.chunks(2);
        self.samples = pairs
            .filter_map(|pair| {
                let (first, last) = (pair.first()?, pair.last()?);
                Some(Progress { guest_round_trip_ms: longer(first, last), ..last.clone() })
            })
            .collect();
        self.spacing_ms *= 2.0;
    }
}

/// Returns the longer of two round trips, if there is one.
fn longer(one: &Progress, other: &Progress) -> Option<f64> {
    let times = [one.guest_round_trip_ms, other.guest_round_trip_ms].into_iter().flatten();
    times.reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use godwit_types::Phase;
    use proptest::prelude::*;

    use super::*;

    fn at(migration: &str, phase: Phase, elapsed_ms: f64, round_trip_ms: f64) -> MigrationStatus {
        MigrationStatus {
            started_unix_ms: 7,
            progress: Progress {
                phase,
                elapsed_ms,
                guest_round_trip_ms: (round_trip_ms > 0.0).then_some(round_trip_ms),
                ..Progress::begin(1 << 20)
            },
            ..MigrationStatus::begun(migration, "web", "a", "b", 1 << 20)
        }
    }

    #[test]
    fn phases_are_marked_and_another_attempt_starts_a_new_series() {
        let mut samples = Samples::default();
        for (phase, ms, trip_ms) in [
            (Phase::Preflight, 1.0, 0.0),
            (Phase::PreCopy, 20.0, 0.3),
            (Phase::PreCopy, 40.0, 9.0),
            (Phase::Switchover, 41.0, 0.4),
            (Phase::Switchover, 41.0, 0.4),
        ] {
            samples.record("v1", &at("v1-1", phase, ms, trip_ms));
        }
        let shown = samples.of("v1");
        let marks: Vec<_> = shown.phases.iter().map(|mark| (mark.phase, mark.at_ms)).collect();
        assert_eq!(
            marks,
            [(Phase::Preflight, 1.0), (Phase::PreCopy, 20.0), (Phase::Switchover, 41.0)]
        );
        let kept: Vec<_> = shown
            .samples
            .iter()
            .map(|sample| (sample.elapsed_ms, sample.guest_round_trip_ms))
            .collect();
        assert_eq!(kept, [(1.0, None), (20.0, Some(9.0)), (41.0, Some(0.4))]);
        samples.record("v1", &at("v1-2", Phase::Preflight, 3.0, 0.0));
        let shown = samples.of("v1");
        assert_eq!((shown.migration.as_deref(), shown.samples.len()), (Some("v1-2"), 1));
        assert_eq!(samples.of("v2"), MoveSamples { id: "v2".into(), ..MoveSamples::default() });
    }

    #[test]
    fn the_oldest_series_are_removed_first() {
        let mut samples = Samples::default();
        for number in 0..MOST_MOVES + 5 {
            samples.record(&format!("v{number}"), &at("m", Phase::PreCopy, 1.0, 0.0));
        }
        assert_eq!(samples.by_move.len(), MOST_MOVES);
        assert!(samples.of("v4").samples.is_empty() && !samples.of("v5").samples.is_empty());
    }

    proptest! {
        #[test]
        fn samples_are_few_sorted_and_contain_the_longest_round_trip(
            steps in proptest::collection::vec((1.0f64..400.0, 0.1f64..50.0), 1..3000)
        ) {
            let (mut samples, mut ms) = (Samples::default(), 0.0);
            for (step, trip_ms) in &steps {
                ms += step;
                samples.record("v", &at("v-1", Phase::PreCopy, ms, *trip_ms));
            }
            let kept = samples.of("v").samples;
            prop_assert!(kept.len() <= MOST_SAMPLES);
            prop_assert!(kept.is_sorted_by(|a, b| a.elapsed_ms < b.elapsed_ms));
            let longest = |times: &mut dyn Iterator<Item = f64>| times.fold(0.0, f64::max);
            let shown = longest(&mut kept.iter().filter_map(|sample| sample.guest_round_trip_ms));
            prop_assert_eq!(shown, longest(&mut steps.iter().map(|(_, trip_ms)| *trip_ms)));
        }
    }
}
