//! Figures that the source's driver reports: progress, and the parts of the pause.

use std::time::{Duration, Instant};

use godwit_ram::{PAGE_SIZE, ThrottleFigures};

use crate::clock::PeerClock;
use crate::drive::tracking::Tracking;
use crate::report::millis;
use crate::source::{Source, SwitchoverTimes};
use godwit_types::{
    LaneProgress, Phase, Progress, SwitchoverReport, ThrottleMeans, ThrottleReport, TrackingMeans,
    TrackingReport,
};

/// Totals handed to the wire so far.
#[derive(Clone, Copy)]
pub(super) struct SentSoFar {
    pub(super) bytes: u64,
    /// Bytes of guest pages per byte sent.
    pub(super) expansion: f64,
}

pub(super) fn progress_of(
    machine: &Source,
    total_pages: u64,
    remaining_pages: u64,
    sent: SentSoFar,
    lanes: Vec<LaneProgress>,
    begun: Instant,
) -> Progress {
    let rates = machine.rates();
    let remaining_bytes = remaining_pages * PAGE_SIZE;
    let elapsed = begun.elapsed();
    // During round 0 the average so far is the best rate known.
    let so_far = sent.bytes as f64 / elapsed.as_secs_f64().max(1e-3);
    let (wire, carried) = match (machine.phase(), machine.round()) {
        (_, 0) => (so_far, so_far * sent.expansion),
        // Missing pages go raw.
        (Phase::PageIn, _) => (rates.wire_bytes_per_s, rates.wire_bytes_per_s),
        _ => (rates.wire_bytes_per_s, rates.carried_bytes_per_s),
    };
    let writes = if machine.phase() == Phase::PageIn { 0.0 } else { rates.dirty_bytes_per_s };
    let net = carried - writes;
    Progress {
        phase: machine.phase(),
        round: machine.round(),
        remaining_bytes,
        total_bytes: total_pages * PAGE_SIZE,
        sent_bytes: sent.bytes,
        dirty_bytes_per_s: rates.dirty_bytes_per_s,
        bandwidth_bytes_per_s: wire,
        bandwidth_limit: None,
        eta_ms: (net > 0.0).then(|| remaining_bytes as f64 / net * 1e3),
        elapsed_ms: millis(elapsed),
        lanes,
        throttled_to_pages_per_s: machine.throttled_to(),
        guest_round_trip_ms: None,
        disks: None,
    }
}

/// Returns how dirty pages were found.
pub(super) fn tracking_report(tracking: &impl Tracking) -> TrackingReport {
    let figures = tracking.fault_figures();
    let means = if figures.by_faults { TrackingMeans::Faults } else { TrackingMeans::Scans };
    TrackingReport {
        means,
        faults: figures.faults,
        answering_ms: millis(figures.answering),
        by_faults_bytes: figures.synchronous_pages * PAGE_SIZE,
        unnoted_pages: figures.unnoted_pages,
    }
}

/// Returns the throttle's report, if writers were slowed.
pub(super) fn throttle_report(tracking: &impl Tracking) -> Option<ThrottleReport> {
    let ThrottleFigures { faults, pages, held, .. } = tracking.throttle_figures();
    let least_share = tracking.least_cpu_share();
    let means = if least_share.is_some() { ThrottleMeans::Quota } else { ThrottleMeans::Faults };
    let least_cpu_percent = least_share.map(|share| share * 100.0);
    let report = ThrottleReport { means, faults, pages, held_ms: millis(held), least_cpu_percent };
    (faults > 0 || least_share.is_some()).then_some(report)
}

/// Returns the parts of the pause, which together are the pause. The pings' clock comparison
/// converts the destination's times to this host's clock.
///
/// A thread of this host that gets no CPU time notes a send late. It was over when the destination
/// had read what was sent.
pub(super) fn switchover_report(
    times: &SwitchoverTimes,
    clock: &PeerClock,
) -> Option<SwitchoverReport> {
    let destination = &times.destination;
    let arrived = Duration::from_nanos(clock.to_local_ns(destination.commit_ns)?);
    let since_commit = |ns: u64| Duration::from_nanos(ns.saturating_sub(destination.commit_ns));
    let loaded = since_commit(destination.loaded_ns);
    let arrived = arrived.max(times.stopped);
    let committed = times.committed.min(arrived);
    let last_pages = times.last_pages.min(committed);
    Some(SwitchoverReport {
        last_pages_ms: millis(last_pages.saturating_sub(times.stopped)),
        device_state_ms: millis(committed.saturating_sub(last_pages)),
        flight_ms: millis(arrived.saturating_sub(committed)),
        load_ms: millis(loaded),
        resume_ms: millis(since_commit(destination.running_ns).saturating_sub(loaded)),
    })
}

#[cfg(test)]
mod tests {
    use godwit_wire::Running;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn the_parts_of_a_pause_are_the_pause() {
        let mut clock = PeerClock::default();
        // The destination's clock is a second ahead.
        clock.pong(10 * MS, 1011 * MS, 12 * MS);
        let at = Duration::from_millis;
        let destination =
            Running { commit_ns: 1122 * MS, loaded_ns: 1125 * MS, running_ns: 1130 * MS };
        let report = |last_pages, committed| {
            let times = SwitchoverTimes { stopped: at(100), last_pages, committed, destination };
            switchover_report(&times, &clock).unwrap()
        };
        let noted = report(at(108), at(120));
        let expected = SwitchoverReport {
            last_pages_ms: 8.0,
            device_state_ms: 12.0,
            flight_ms: 2.0,
            load_ms: 3.0,
            resume_ms: 5.0,
        };
        assert_eq!(noted, expected);
        // The source's thread noted the sends when the destination had read the commit.
        for late in [report(at(108), at(129)), report(at(127), at(129))] {
            assert!((late.total_ms() - 30.0).abs() < 1e-9, "{late:?}");
            assert!(late.flight_ms.abs() < 1e-9, "{late:?}");
        }
    }
}
