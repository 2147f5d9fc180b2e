//! What was lately seen of the lanes to other hosts, by migrations and by probes: what a prediction counts with. Kept as long as the
//! agent lives.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_migration::predict::LanesKnownBy;
use godwit_migration::probe::{Limit, ProbeReport, ThroughputRun};
use godwit_migration::{Report, RoundReport};

/// What is older than this is not counted with any more.
const LATELY: Duration = Duration::from_secs(3600);
/// A round of fewer bytes says more of buffers than of the wire.
const TELLING_BYTES: u64 = 8 << 20;
/// From this part of a limit on, a rate tells the limit and not the lanes.
const HELD: f64 = 0.8;
/// Twice the streams that bring less than this bring nothing, and a migration does without them.
const WORTH_IT: f64 = 1.1;
/// What a migration makes of CPUs that a probe has used up: it reads and writes the memory that the probe makes up and throws away.
/// Measured on the lab's unshaped link, where both hosts share the cores: 0.9 of 1.7 GB/s.
const OF_USED_UP_CPUS: f64 = 0.5;

/// What was seen of the lanes to the other hosts, by their names.
#[derive(Debug, Default)]
pub(crate) struct LanesSeen {
    hosts: Mutex<HashMap<String, Seen>>,
}

/// What was seen of the lanes to one host.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// By the last migration that could tell.
    carried: Option<Figure>,
    probed: Option<Figure>,
}

#[derive(Clone, Copy, Debug)]
struct Figure {
    at: Instant,
    bytes_per_s: f64,
    round_trip: Duration,
}

/// What the lanes to a host are taken to carry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LanesCarry {
    pub(crate) bytes_per_s: f64,
    pub(crate) round_trip: Duration,
    pub(crate) known_by: LanesKnownBy,
}

impl LanesSeen {
    /// What is known of the lanes to a host; none: nothing of lately.
    pub(crate) fn to(&self, host: &str) -> Option<LanesCarry> {
        let seen = self.lock().get(host).copied()?;
        let lately = |figure: &Figure| figure.at.elapsed() < LATELY;
        // What a migration carried tells more of the next one than a probe does.
        let carried = seen.carried.filter(lately).map(|figure| (figure, LanesKnownBy::Migration));
        let (Figure { bytes_per_s, round_trip, .. }, known_by) =
            carried.or_else(|| Some((seen.probed.filter(lately)?, LanesKnownBy::Probe)))?;
        Some(LanesCarry { bytes_per_s, round_trip, known_by })
    }

    /// What a probe that has just ended says; where it is the CPUs that it used up, what a migration carried lately says more.
    pub(crate) fn by_probe(&self, probe: &ProbeReport) -> Option<LanesCarry> {
        let known = self.to(&probe.to).filter(|known| known.known_by == LanesKnownBy::Migration);
        let Figure { bytes_per_s, round_trip, .. } = figure_of(probe)?;
        match known {
            Some(known) if is_of_cpus(probe) => Some(LanesCarry { round_trip, ..known }),
            _ => Some(LanesCarry { bytes_per_s, round_trip, known_by: LanesKnownBy::Probe }),
        }
    }

    /// A probe has ended.
    pub(crate) fn probed(&self, probe: &ProbeReport) {
        if let Some(figure) = figure_of(probe) {
            self.lock().entry(probe.to.clone()).or_default().probed = Some(figure);
        }
    }

    /// A migration has ended.
    pub(crate) fn carried(&self, report: &Report) {
        let telling = report.rounds.iter().max_by_key(|round| round.bytes).filter(|round| tells(round));
        let (Some(round), Some(round_trip_ms)) = (telling, report.round_trip_ms) else { return };
        #[expect(clippy::cast_precision_loss, reason = "three digits count")]
        let bytes_per_s = round.bytes as f64 / round.duration_ms * 1e3;
        #[expect(clippy::cast_precision_loss, reason = "three digits count")]
        let limit = report.bandwidth_limit.map(|limit| limit.bits_per_second() as f64 / 8.0);
        if limit.is_some_and(|limit| bytes_per_s > HELD * limit) {
            return;
        }
        let round_trip = Duration::try_from_secs_f64(round_trip_ms / 1e3).unwrap_or_default();
        let figure = Figure { at: Instant::now(), bytes_per_s, round_trip };
        self.lock().entry(report.to.clone()).or_default().carried = Some(figure);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Seen>> {
        // Figures are replaced whole.
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether its time was the wire's, and not that of reading zeros.
fn tells(round: &RoundReport) -> bool {
    let sent = round.pages.saturating_sub(round.zero_pages);
    round.bytes >= TELLING_BYTES && round.duration_ms > 0.0 && round.zero_pages <= 8 * sent
}

fn is_of_cpus(probe: &ProbeReport) -> bool {
    matches!(probe.limit, Some(Limit::SourceCpu | Limit::DestinationCpu))
}

fn figure_of(probe: &ProbeReport) -> Option<Figure> {
    let only_lane = || probe.lanes.iter().find(|lane| !lane.throughput.is_empty());
    let runs: &[ThroughputRun] = match only_lane() {
        Some(lane) if probe.together.is_empty() => &lane.throughput,
        _ => &probe.together,
    };
    // As many streams as a migration comes to: more, for as long as they bring more.
    let carried = runs.iter().fold(None, |best: Option<f64>, run| match best {
        Some(best) if run.bytes_per_s < WORTH_IT * best => Some(best),
        _ => Some(run.bytes_per_s),
    })?;
    let least_ms = probe.lanes.iter().filter_map(|lane| Some(lane.round_trip?.least_ms));
    let round_trip_ms = least_ms.fold(f64::INFINITY, f64::min);
    let bytes_per_s = if is_of_cpus(probe) { carried * OF_USED_UP_CPUS } else { carried };
    (bytes_per_s > 0.0).then(|| Figure {
        at: Instant::now(),
        bytes_per_s,
        round_trip: Duration::try_from_secs_f64(round_trip_ms / 1e3).unwrap_or_default(),
    })
}
