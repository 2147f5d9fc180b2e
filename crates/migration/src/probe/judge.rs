//! Interpretation of a probe's figures. Pure.

use godwit_types::probe::{CpuUse, Limit, MoveEstimate, ThroughputRun};

/// A smaller growth factor counts as no growth.
const NO_GROWTH: f64 = 1.10;
/// Fraction of the growth that more streams could bring from which throughput "grows with the
/// number of streams".
const NEARLY_ALL: f64 = 0.6;
/// A thread this busy uses its core fully.
const WHOLE_CORE: f64 = 0.85;
/// A host this busy has no CPU time left.
const WHOLE_HOST: f64 = 0.95;
/// Cores that the probe itself must use for a busy host to be the probe's limit: other programs may
/// keep a host busy without hindering a stream.
const SHARE_OF_ITS_OWN: f64 = 0.3;

/// Returns what limits the throughput. `runs` is ordered by the number of streams, the fewest
/// first. Returns `None` without a run.
///
/// The run with the most streams decides: first the CPUs that it used up, then its gain over the
/// run before it.
#[must_use]
pub fn limit_of(runs: &[ThroughputRun]) -> Option<Limit> {
    let last = runs.last()?;
    if used_up(&last.source, last.streams) {
        return Some(Limit::SourceCpu);
    }
    if used_up(&last.destination, last.streams) {
        return Some(Limit::DestinationCpu);
    }
    let before = runs.len().checked_sub(2).and_then(|before| runs.get(before));
    let Some(before) =
        before.filter(|before| before.bytes_per_s > 0.0 && before.streams < last.streams)
    else {
        return Some(Limit::Unclear);
    };
    let growth = last.bytes_per_s / before.bytes_per_s;
    let possible = f64::from(last.streams) / f64::from(before.streams.max(1));
    Some(if growth <= NO_GROWTH {
        Limit::Wire
    } else if growth >= 1.0 + NEARLY_ALL * (possible - 1.0) {
        Limit::FlowCap
    } else {
        Limit::Unclear
    })
}

fn used_up(cpu: &CpuUse, streams: u32) -> bool {
    // More streams than cores: the host's share decides.
    let a_core_a_stream = cpu.threads_cores >= WHOLE_CORE * f64::from(streams);
    a_core_a_stream || (cpu.host_share >= WHOLE_HOST && cpu.threads_cores >= SHARE_OF_ITS_OWN)
}

/// Returns how long a migration of `guest_bytes` takes with `streams` of each lane, and with the
/// best number of those measured. Returns `None` if nothing arrived.
#[must_use]
pub fn estimate(guest_bytes: u64, streams: u32, runs: &[ThroughputRun]) -> Option<MoveEstimate> {
    let some = || runs.iter().filter(|run| run.bytes_per_s > 0.0);
    let usual = some().min_by_key(|run| run.streams.abs_diff(streams))?;
    let highest = some().map(|run| run.bytes_per_s).fold(0.0, f64::max);
    let best = some().find(|run| run.bytes_per_s * NO_GROWTH >= highest)?;
    #[expect(
        clippy::cast_precision_loss,
        reason = "no VM has a size that f64 does not hold exactly"
    )]
    let time_ms = |run: &ThroughputRun| guest_bytes as f64 / run.bytes_per_s * 1e3;
    Some(MoveEstimate {
        guest_bytes,
        streams: usual.streams,
        bytes_per_s: usual.bytes_per_s,
        migration_time_ms: time_ms(usual),
        best_streams: best.streams,
        best_migration_time_ms: time_ms(best),
    })
}

#[cfg(test)]
mod tests {
    use godwit_types::probe::STREAM_COUNTS;
    use proptest::prelude::*;

    use super::*;

    fn run(streams: u32, bytes_per_s: f64) -> ThroughputRun {
        let idle = CpuUse { threads_cores: 0.1, host_share: 0.2, cores: 8 };
        ThroughputRun { streams, bytes_per_s, source: idle, destination: idle }
    }

    fn runs(rates: [f64; 4]) -> Vec<ThroughputRun> {
        STREAM_COUNTS.into_iter().zip(rates).map(|(streams, rate)| run(streams, rate)).collect()
    }

    #[test]
    fn growth_separates_link_and_flow_limits() {
        for (rates, limit) in [
            ([100.0, 100.0, 100.0, 100.0], Limit::Wire),
            ([50.0, 100.0, 104.0, 112.0], Limit::Wire),
            ([100.0, 100.0, 100.0, 60.0], Limit::Wire),
            ([50.0, 100.0, 200.0, 400.0], Limit::FlowCap),
            ([50.0, 95.0, 180.0, 300.0], Limit::FlowCap),
            ([50.0, 90.0, 120.0, 150.0], Limit::Unclear),
            ([0.0, 0.0, 0.0, 0.0], Limit::Unclear),
        ] {
            assert_eq!(limit_of(&runs(rates)), Some(limit), "{rates:?}");
        }
        assert_eq!(limit_of(&[]), None);
        assert_eq!(limit_of(&[run(2, 100.0)]), Some(Limit::Unclear));
    }

    #[test]
    fn cpus_that_are_used_up_come_first() {
        let with = |source: CpuUse, destination: CpuUse| {
            let mut runs = runs([50.0, 100.0, 200.0, 400.0]);
            runs[3] = ThroughputRun { source, destination, ..runs[3] };
            limit_of(&runs)
        };
        let idle = CpuUse { threads_cores: 0.4, host_share: 0.3, cores: 2 };
        let a_core_each = CpuUse { threads_cores: 7.6, host_share: 0.2, cores: 64 };
        let all_cores = CpuUse { threads_cores: 1.6, host_share: 0.98, cores: 2 };
        let busy_with_others = CpuUse { threads_cores: 0.1, host_share: 1.0, cores: 2 };
        assert_eq!(with(a_core_each, idle), Some(Limit::SourceCpu));
        assert_eq!(with(idle, all_cores), Some(Limit::DestinationCpu));
        assert_eq!(with(all_cores, all_cores), Some(Limit::SourceCpu));
        assert_eq!(with(idle, busy_with_others), Some(Limit::FlowCap));
    }

    #[test]
    fn the_estimate_is_for_the_usual_streams_and_names_better_ones() {
        let usual = estimate(1000, 2, &runs([50.0, 100.0, 190.0, 200.0])).unwrap();
        assert_eq!((usual.streams, usual.best_streams), (2, 4));
        assert!((usual.migration_time_ms - 10_000.0).abs() < 1e-6);
        assert!((usual.best_migration_time_ms - 1e6 / 190.0).abs() < 1e-6);
        let full = estimate(1000, 2, &runs([100.0, 100.0, 100.0, 100.0])).unwrap();
        assert_eq!(full.best_streams, 1);
        assert_eq!(estimate(1000, 2, &runs([0.0; 4])), None);
        assert_eq!(estimate(1000, 2, &[]), None);
        // If the usual number was not measured, the nearest one that was.
        assert_eq!(estimate(1000, 2, &[run(8, 10.0)]).unwrap().streams, 8);
    }

    proptest! {
        #[test]
        fn no_figures_make_nonsense(
            rates in prop::array::uniform4(0.0..1e12_f64),
            bytes in any::<u64>(),
        ) {
            let runs = runs(rates);
            prop_assert!(limit_of(&runs).is_some());
            if let Some(usual) = estimate(bytes, 2, &runs) {
                prop_assert!(usual.migration_time_ms.is_finite() && usual.migration_time_ms >= 0.0);
                prop_assert!(usual.best_migration_time_ms.is_finite());
            }
        }
    }
}
