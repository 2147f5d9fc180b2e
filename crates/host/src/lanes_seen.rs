//! Recent measurements of the lanes to other hosts, by migrations and by probes. Predictions use
//! them. They last as long as the agent.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_migration::Experience;
use godwit_ram::PAGE_SIZE;
use godwit_types::{
    EngineKind, LanesKnownBy, Report, RoundReport,
    probe::{Limit, ProbeReport, ThroughputRun},
};
use parking_lot::{Mutex, MutexGuard};

/// Age beyond which a measurement no longer counts.
const LATELY: Duration = Duration::from_secs(3600);
/// Age up to which a migration's rate counts as current: a probe that measures less was too short,
/// or unlucky.
const JUST_NOW: Duration = Duration::from_secs(600);
/// Minimum size of a round: a smaller one measures buffers rather than the link.
const SAMPLE_BYTES: u64 = 8 << 20;
/// Ratio of a migration's rate to a probe's at which a probe limited by the link counts as correct.
const MUCH_MORE: f64 = 1.5;
/// Fraction of a bandwidth limit from which a rate measures the limit and not the lanes.
const HELD: f64 = 0.8;
/// Minimum gain of doubling the streams; with less, a migration does not use them.
const WORTH_IT: f64 = 1.1;
/// Share of a probe's rate that a migration reaches when the CPUs limit the probe: a migration
/// reads and writes memory, where the probe generates and discards it. Measured on the lab's
/// unshaped link, where both hosts and the guest share two cores.
const OF_USED_UP_CPUS: f64 = 0.8;
/// Compression ratio from which pages count as uncompressed.
const HARDLY_COMPRESSED: f64 = 0.9;

/// Measurements of the lanes to the other hosts, by host name.
#[derive(Debug, Default)]
pub(crate) struct LanesSeen {
    hosts: Mutex<HashMap<String, Seen>>,
}

/// Measurements of the lanes to one host.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// By the last migration that gave a measurement.
    carried: Option<Figure>,
    probed: Option<Figure>,
    /// What the streams of migrations to this host have learnt; shared by those that run.
    experience: Arc<Experience>,
}

#[derive(Clone, Copy, Debug)]
struct Figure {
    at: Instant,
    bytes_per_s: f64,
    /// Lower bound: the CPUs limited the probe, or the migration's pages were compressed. The lanes
    /// themselves may carry more.
    is_least: bool,
    round_trip: Duration,
}

/// Assumed capacity of the lanes to a host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LanesCarry {
    pub(crate) bytes_per_s: f64,
    /// The CPUs are the limit.
    pub(crate) of_cpus: bool,
    pub(crate) round_trip: Duration,
    pub(crate) known_by: LanesKnownBy,
}

impl LanesSeen {
    /// Returns the capacity of the lanes to a host; `None` without a recent measurement.
    pub(crate) fn to(&self, host: &str) -> Option<LanesCarry> {
        let Seen { carried, probed, .. } = self.lock().get(host).cloned()?;
        let lately = |figure: &Figure| figure.at.elapsed() < LATELY;
        let (carried, probed) = (carried.filter(lately), probed.filter(lately));
        let of_cpus = probed.is_some_and(|probed| probed.is_least);
        // A migration predicts the next one better than a probe does.
        match (carried, probed) {
            (Some(carried), Some(probed))
                if carried.is_least && carried.bytes_per_s < probed.bytes_per_s =>
            {
                Some(probed.known_by(LanesKnownBy::Probe, of_cpus))
            }
            (Some(carried), _) => Some(carried.known_by(LanesKnownBy::Migration, of_cpus)),
            (None, probed) => Some(probed?.known_by(LanesKnownBy::Probe, of_cpus)),
        }
    }

    /// Returns the result of a probe that has just ended. A recent migration counts instead if it
    /// says more: it was faster just now, or the CPUs limited the probe.
    pub(crate) fn by_probe(&self, probe: &ProbeReport) -> Option<LanesCarry> {
        let probed = figure_of(probe)?;
        let carried = self.lock().get(&probe.to).and_then(|seen| seen.carried);
        let says_more = |carried: &Figure| {
            // Probes scatter. A link that carries far less than before has changed.
            let may_be_luck =
                carried.bytes_per_s < MUCH_MORE * probed.bytes_per_s || !is_of_wire(probe);
            let is_just_now = carried.at.elapsed() < JUST_NOW;
            let is_more = carried.bytes_per_s > probed.bytes_per_s && is_just_now && may_be_luck;
            is_more || (probed.is_least && !carried.is_least && carried.at.elapsed() < LATELY)
        };
        Some(match carried.filter(says_more) {
            Some(carried) => {
                let now = Figure { round_trip: probed.round_trip, ..carried };
                now.known_by(LanesKnownBy::Migration, probed.is_least)
            }
            None => probed.known_by(LanesKnownBy::Probe, probed.is_least),
        })
    }

    pub(crate) fn probed(&self, probe: &ProbeReport) {
        if let Some(figure) = figure_of(probe) {
            self.lock().entry(probe.to.clone()).or_default().probed = Some(figure);
        }
    }

    /// Records an ended migration. QEMU's engine uses other streams than a prediction assumes, so
    /// it does not count.
    pub(crate) fn carried(&self, report: &Report) {
        if report.engine != EngineKind::Godwit {
            return;
        }
        let sample =
            report.rounds.iter().max_by_key(|round| round.bytes).filter(|round| is_sample(round));
        let (Some(round), Some(round_trip_ms)) = (sample, report.round_trip_ms) else { return };
        let bytes_per_s = rate_of(round.bytes, round.duration_ms);
        let raw_bytes = round.pages.saturating_sub(round.zero_pages) * PAGE_SIZE;
        let is_least = rate_of(raw_bytes, round.duration_ms) * HARDLY_COMPRESSED > bytes_per_s;
        #[expect(clippy::cast_precision_loss, reason = "three digits count")]
        let limit = report.bandwidth_limit.map(|limit| limit.bits_per_second() as f64 / 8.0);
        if limit.is_some_and(|limit| bytes_per_s > HELD * limit) {
            return;
        }
        let round_trip = Duration::try_from_secs_f64(round_trip_ms / 1e3).unwrap_or_default();
        let mut hosts = self.lock();
        let carried = &mut hosts.entry(report.to.clone()).or_default().carried;
        // A guest with compressed pages does not fill the link: a higher rate of a moment ago, by
        // another guest, stays valid.
        if carried
            .is_none_or(|known| known.bytes_per_s < bytes_per_s || known.at.elapsed() >= JUST_NOW)
        {
            *carried = Some(Figure { at: Instant::now(), bytes_per_s, is_least, round_trip });
        }
    }

    /// Returns what streams to a host have learnt of its link; new streams start from it and add to
    /// it.
    pub(crate) fn experience(&self, host: &str) -> Arc<Experience> {
        Arc::clone(&self.lock().entry(host.to_owned()).or_default().experience)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Seen>> {
        // Figures are replaced whole.
        self.hosts.lock()
    }
}

impl Figure {
    fn known_by(self, known_by: LanesKnownBy, of_cpus: bool) -> LanesCarry {
        LanesCarry { bytes_per_s: self.bytes_per_s, of_cpus, round_trip: self.round_trip, known_by }
    }
}

#[expect(clippy::cast_precision_loss, reason = "three digits count")]
fn rate_of(bytes: u64, ms: f64) -> f64 {
    bytes as f64 / ms * 1e3
}

/// Whether the link, and not reading zeros, determined the round's duration.
fn is_sample(round: &RoundReport) -> bool {
    let sent = round.pages.saturating_sub(round.zero_pages);
    round.bytes >= SAMPLE_BYTES && round.duration_ms > 0.0 && round.zero_pages <= 8 * sent
}

fn is_of_cpus(probe: &ProbeReport) -> bool {
    matches!(probe.limit, Some(Limit::SourceCpu | Limit::DestinationCpu))
}

fn is_of_wire(probe: &ProbeReport) -> bool {
    probe.limit == Some(Limit::Wire)
}

fn figure_of(probe: &ProbeReport) -> Option<Figure> {
    let only_lane = || probe.lanes.iter().find(|lane| !lane.throughput.is_empty());
    let runs: &[ThroughputRun] = match only_lane() {
        Some(lane) if probe.together.is_empty() => &lane.throughput,
        _ => &probe.together,
    };
    // A migration adds streams as long as they add throughput.
    let carried = runs.iter().fold(None, |best: Option<f64>, run| match best {
        Some(best) if run.bytes_per_s < WORTH_IT * best => Some(best),
        _ => Some(run.bytes_per_s),
    })?;
    let least_ms = probe.lanes.iter().filter_map(|lane| Some(lane.round_trip?.least_ms));
    let round_trip_ms = least_ms.fold(f64::INFINITY, f64::min);
    let is_least = is_of_cpus(probe);
    let bytes_per_s = if is_least { carried * OF_USED_UP_CPUS } else { carried };
    (bytes_per_s > 0.0).then(|| Figure {
        at: Instant::now(),
        bytes_per_s,
        is_least,
        round_trip: Duration::try_from_secs_f64(round_trip_ms / 1e3).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use godwit_types::probe::{CpuUse, LaneProbe, RoundTrips};
    use godwit_types::{Outcome, RoundReport};

    use super::*;

    /// A migration of 100 MB in one second.
    fn report(limit: Option<&str>) -> Report {
        let round = |round, pages, zero_pages, bytes, duration_ms| RoundReport {
            round,
            pages,
            zero_pages,
            bytes,
            duration_ms,
            ..RoundReport::default()
        };
        Report {
            migration_time_ms: 1200.0,
            wire_bytes: 100_000_000,
            guest_bytes: 1 << 30,
            bandwidth_limit: limit.map(|limit| limit.parse().unwrap()),
            round_trip_ms: Some(2.0),
            rounds: vec![
                round(0, 30_000, 5000, 100_000_000, 1000.0),
                round(1, 10, 0, 40_000, 0.01),
            ],
            ..Report::blank(Outcome::Completed, "web", "a", "b")
        }
    }

    fn probe(rates: &[f64], limit: Limit) -> ProbeReport {
        let run = |(streams, rate): (u32, &f64)| ThroughputRun {
            streams,
            bytes_per_s: *rate,
            source: CpuUse::default(),
            destination: CpuUse::default(),
        };
        let lane = LaneProbe {
            from: None,
            to: "10.0.0.2:7".parse().unwrap(),
            connect_ms: None,
            secure_ms: None,
            round_trip: Some(RoundTrips { least_ms: 3.0, median_ms: 4.0, count: 10 }),
            mtu: None,
            throughput: Vec::new(),
            limit: None,
            failure: None,
        };
        ProbeReport {
            from: "a".into(),
            to: "b".into(),
            encrypted: true,
            lanes: vec![lane],
            together: [2, 8].into_iter().zip(rates).map(run).collect(),
            together_failure: None,
            bandwidth_limit: None,
            limit: Some(limit),
            estimate: None,
            probe_time_ms: 2000.0,
        }
    }

    fn rate(carry: Option<LanesCarry>) -> Option<f64> {
        carry.map(|carry| carry.bytes_per_s)
    }

    #[test]
    fn the_rate_of_a_migration_is_known_to_the_next() {
        let seen = LanesSeen::default();
        assert_eq!(report(None).outcome, Outcome::Completed);
        seen.carried(&Report { to: "c".into(), engine: EngineKind::Qemu, ..report(None) });
        seen.carried(&Report { to: "d".into(), rounds: Vec::new(), ..report(None) });
        // A rate this close to a limit measures the limit.
        seen.carried(&Report { to: "e".into(), ..report(Some("810mbit")) });
        assert!(["b", "c", "d", "e"].into_iter().all(|host| seen.to(host).is_none()));
        seen.carried(&report(Some("2gbit")));
        let known = seen.to("b").unwrap();
        assert_eq!((known.bytes_per_s, known.round_trip), (1e8, Duration::from_millis(2)));
        assert_eq!(known.known_by, LanesKnownBy::Migration);
    }

    #[test]
    fn more_streams_count_if_they_add_throughput() {
        let seen = LanesSeen::default();
        assert_eq!(rate(seen.by_probe(&probe(&[1e8, 1.05e8], Limit::Wire))), Some(1e8));
        assert_eq!(rate(seen.by_probe(&probe(&[1e8, 4e8], Limit::FlowCap))), Some(4e8));
        assert_eq!(rate(seen.by_probe(&probe(&[4e8, 1e8], Limit::Unclear))), Some(4e8));
        assert_eq!(rate(seen.by_probe(&probe(&[], Limit::Wire))), None);
        seen.probed(&probe(&[1e8, 1e8], Limit::Wire));
        assert_eq!(seen.to("b").map(|known| known.known_by), Some(LanesKnownBy::Probe));
    }

    #[test]
    fn a_cpu_bound_probe_says_less_than_a_migration() {
        let seen = LanesSeen::default();
        let of_cpus = probe(&[2e9, 2e9], Limit::SourceCpu);
        assert_eq!(rate(seen.by_probe(&of_cpus)), Some(OF_USED_UP_CPUS * 2e9));
        seen.carried(&report(None));
        let known = seen.by_probe(&of_cpus).unwrap();
        assert_eq!((known.bytes_per_s, known.known_by), (1e8, LanesKnownBy::Migration));
        assert!(known.of_cpus);
        assert_eq!(known.round_trip, Duration::from_millis(3));
        assert_eq!(rate(seen.by_probe(&probe(&[2e9, 2e9], Limit::Wire))), Some(2e9));
        // Unless the migration's pages were compressed: then the lanes may have waited for that.
        seen.probed(&of_cpus);
        assert_eq!(rate(seen.to("b")), Some(1e8));
        let compressed = LanesSeen::default();
        let mut report = report(None);
        report.rounds[0].pages = 60_000;
        compressed.carried(&report);
        assert_eq!(rate(compressed.by_probe(&of_cpus)), Some(OF_USED_UP_CPUS * 2e9));
        assert_eq!(rate(compressed.to("b")), Some(1e8));
        compressed.probed(&of_cpus);
        assert_eq!(rate(compressed.to("b")), Some(OF_USED_UP_CPUS * 2e9));
        // Less than a migration carried just now; then so much less that a lane must have failed
        // since.
        assert_eq!(rate(seen.by_probe(&probe(&[8e7, 8e7], Limit::Wire))), Some(1e8));
        assert_eq!(rate(seen.by_probe(&probe(&[5e7, 5e7], Limit::Unclear))), Some(1e8));
        assert_eq!(rate(seen.by_probe(&probe(&[5e7, 5e7], Limit::Wire))), Some(5e7));
    }
}
