//! Combines several results into one: a migration whose lane was cut continues on another lane,
//! with a new driver.

use godwit_types::{EncodingReport, Phase, PhaseReport, ThrottleReport};

use super::job::SourceResult;

impl SourceResult {
    /// Adds to this result what an earlier part of the same migration did, `reconnect_ms` before
    /// it. The outcome is that of this part.
    #[must_use]
    pub fn after(self, earlier: SourceResult, reconnect_ms: f64) -> SourceResult {
        let mut phases = earlier.phases;
        add_phase(&mut phases, PhaseReport { phase: Phase::Reconnect, duration_ms: reconnect_ms });
        for phase in self.phases.into_iter().filter(|phase| phase.phase != Phase::Preflight) {
            add_phase(&mut phases, phase);
        }
        let mut encodings = earlier.encodings;
        self.encodings.into_iter().for_each(|encoding| add_encoding(&mut encodings, encoding));
        let first = earlier.rounds.len();
        let later = self.rounds.into_iter().enumerate().map(|(place, mut round)| {
            round.round = u32::try_from(first + place).unwrap_or(u32::MAX);
            round
        });
        SourceResult {
            rounds: earlier.rounds.into_iter().chain(later).collect(),
            phases,
            wire_bytes: earlier.wire_bytes + self.wire_bytes,
            round_trip: [earlier.round_trip, self.round_trip].into_iter().flatten().min(),
            encodings,
            referenced: earlier.referenced.plus(self.referenced),
            missing_pages: earlier.missing_pages + self.missing_pages,
            throttle: add_throttle(earlier.throttle, self.throttle),
            ..self
        }
    }
}

fn add_phase(phases: &mut Vec<PhaseReport>, more: PhaseReport) {
    match phases.iter_mut().find(|known| known.phase == more.phase) {
        Some(known) => known.duration_ms += more.duration_ms,
        None => phases.push(more),
    }
}

fn add_encoding(encodings: &mut Vec<EncodingReport>, more: EncodingReport) {
    match encodings.iter_mut().find(|known| known.name == more.name) {
        Some(known) => {
            known.pages += more.pages;
            known.raw_bytes += more.raw_bytes;
            known.wire_bytes += more.wire_bytes;
        }
        None => encodings.push(more),
    }
}

fn add_throttle(
    earlier: Option<ThrottleReport>,
    later: Option<ThrottleReport>,
) -> Option<ThrottleReport> {
    let (Some(earlier), Some(later)) = (&earlier, &later) else { return later.or(earlier) };
    let least = [earlier.least_cpu_percent, later.least_cpu_percent].into_iter().flatten();
    Some(ThrottleReport {
        means: later.means,
        faults: earlier.faults.max(later.faults),
        pages: earlier.pages.max(later.pages),
        held_ms: earlier.held_ms.max(later.held_ms),
        least_cpu_percent: least.min_by(f64::total_cmp),
    })
}
