//! Span of time of a request for an object's load, and the answer made of rows. Pure.

use std::collections::BTreeMap;

use godwit_api::control::{
    LoadCapacity, LoadHistory, LoadResolution, LoadSeries, MOST_LOAD_POINTS, Problem, ProblemCode,
};

use super::figures::{Compact, FIGURES, Object, Row, Sum};

/// Span of time without `from`.
const DEFAULT_SPAN_MS: u64 = 3_600_000;

/// Periods of a resolution, and how many of them are one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) resolution: LoadResolution,
    /// Number of the first period since 1970.
    pub(crate) first: u64,
    /// Number of the period after the last one.
    pub(crate) end: u64,
    /// Periods of a point.
    each: u64,
}

impl Span {
    /// Returns the periods between two times. Without a resolution it is the finest one that
    /// reaches back so far. What is older than the resolution is kept is left out.
    pub(crate) fn of(
        now_ms: u64,
        from_ms: Option<u64>,
        to_ms: Option<u64>,
        resolution: Option<LoadResolution>,
    ) -> Result<Span, Problem> {
        let to_ms = to_ms.unwrap_or(now_ms).min(now_ms);
        let from_ms = from_ms.unwrap_or_else(|| to_ms.saturating_sub(DEFAULT_SPAN_MS));
        if from_ms >= to_ms {
            let detail = "cannot show the load: `from` is not before `to` and the present";
            let remedy = "give two times in the past, in milliseconds since 1970";
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy));
        }
        let kept_ms = |one: LoadResolution| one.period_ms() * one.kept_periods();
        // The clock has moved on since the caller looked at it.
        let age_ms = now_ms.saturating_sub(from_ms).saturating_sub(DEFAULT_SPAN_MS / 60);
        let reaches = |one: &LoadResolution| age_ms <= kept_ms(*one);
        let resolution = resolution
            .or_else(|| LoadResolution::ALL.into_iter().find(reaches))
            .unwrap_or(LoadResolution::Hour);
        let period_ms = resolution.period_ms();
        let oldest = (now_ms / period_ms).saturating_sub(resolution.kept_periods());
        let end = to_ms.div_ceil(period_ms);
        let first = (from_ms / period_ms).max(oldest).min(end);
        let each = match end - first {
            0..=MOST_LOAD_POINTS => 1,
            // The first point may have fewer periods.
            many => many.div_ceil(MOST_LOAD_POINTS - 1),
        };
        Ok(Span { resolution, first: first - first % each, end, each })
    }

    fn points(&self) -> u64 {
        (self.end - self.first).div_ceil(self.each)
    }

    /// Returns the load of an object. `named`: the object as the request names it.
    pub(crate) fn shown(
        &self,
        named: &str,
        object: &Object,
        capacity: LoadCapacity,
        rows: &BTreeMap<u64, Row>,
    ) -> LoadHistory {
        let begins = (self.first..self.end).step_by(usize::try_from(self.each).unwrap_or(1));
        let points: Vec<Option<Row>> = begins
            .map(|begin| {
                let mut sum = Sum::default();
                let end = (begin + self.each).min(self.end);
                rows.range(begin..end).for_each(|(_, row)| sum.add(row));
                sum.row()
            })
            .collect();
        let series = (0..FIGURES).zip(object.metrics()).filter_map(|(figure, metric)| {
            let of = |cells: fn(&Row) -> &[Compact; FIGURES]| -> Vec<Option<u64>> {
                let value = |row: &Option<Row>| cells(row.as_ref()?).get(figure)?.value();
                points.iter().map(value).collect()
            };
            let series = LoadSeries { metric, mean: of(|row| &row.mean), max: of(|row| &row.max) };
            series.mean.iter().any(Option::is_some).then_some(series)
        });
        LoadHistory {
            object: named.to_owned(),
            resolution: self.resolution,
            from_unix_ms: self.first * self.resolution.period_ms(),
            step_ms: self.each * self.resolution.period_ms(),
            points: self.points(),
            capacity,
            series: series.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::control::LoadMetric;
    use proptest::prelude::*;

    use super::*;

    const NOW: u64 = 1_795_444_970_237;
    const HOUR_MS: u64 = 3_600_000;

    fn resolution(from_ms_ago: u64) -> LoadResolution {
        Span::of(NOW, Some(NOW - from_ms_ago), None, None).unwrap().resolution
    }

    #[test]
    fn the_finest_resolution_that_reaches_back_is_chosen() {
        assert_eq!(resolution(60_000), LoadResolution::FiveSeconds);
        assert_eq!(resolution(HOUR_MS), LoadResolution::FiveSeconds);
        assert_eq!(resolution(2 * HOUR_MS), LoadResolution::Minute);
        assert_eq!(resolution(24 * HOUR_MS), LoadResolution::Minute);
        assert_eq!(resolution(25 * HOUR_MS), LoadResolution::Hour);
        assert_eq!(resolution(5_000 * 24 * HOUR_MS), LoadResolution::Hour);
        let last_hour = Span::of(NOW, None, None, None).unwrap();
        assert_eq!((last_hour.resolution, last_hour.points()), (LoadResolution::FiveSeconds, 721));
    }

    #[test]
    fn times_that_are_no_span_are_refused() {
        for (from, to) in [(Some(NOW), None), (Some(5), Some(5)), (Some(NOW + 9), Some(NOW + 10))] {
            let problem = Span::of(NOW, from, to, None).unwrap_err();
            assert_eq!(problem.code, ProblemCode::InvalidRequest);
        }
    }

    #[test]
    fn gaps_are_null_and_unmeasured_figures_are_absent() {
        let from = NOW - NOW % 60_000 - 10 * 60_000;
        let to = Some(from + 3 * 60_000);
        let span = Span::of(NOW, Some(from), to, Some(LoadResolution::Minute)).unwrap();
        let mut figures = [None; FIGURES];
        figures[0] = Some(7);
        let rows = BTreeMap::from([
            (span.first, Row::of(&figures)),
            (span.first + 2, Row::of(&[None; FIGURES])),
            (span.end, Row::of(&figures)),
        ]);
        let shown = span.shown("vm:web", &Object::Cluster, LoadCapacity::default(), &rows);
        assert_eq!((shown.points, shown.step_ms, shown.from_unix_ms), (3, 60_000, from));
        let [series] = &shown.series[..] else { panic!("{shown:?}") };
        assert_eq!(series.metric, LoadMetric::CpuUsedMillicores);
        assert_eq!(series.mean, [Some(7), None, None]);
        assert_eq!(series.max, series.mean);
    }

    #[test]
    fn a_year_is_merged_into_fewer_points_with_the_highest_values() {
        let from = NOW - 365 * 24 * HOUR_MS;
        let span = Span::of(NOW, Some(from), None, None).unwrap();
        let mut rows: BTreeMap<u64, Row> =
            (span.first..span.end).map(|hour| (hour, Row::of(&[Some(10); FIGURES]))).collect();
        rows.insert(span.first + 1, Row::of(&[Some(1_000); FIGURES]));
        let shown = span.shown("cluster", &Object::Cluster, LoadCapacity::default(), &rows);
        assert!((1_200..=MOST_LOAD_POINTS).contains(&shown.points), "{}", shown.points);
        assert_eq!(shown.step_ms, 6 * HOUR_MS);
        let memory = &shown.series[2];
        assert_eq!((memory.mean[0], memory.max[0]), (Some((1_000 + 5 * 10) / 6), Some(1_000)));
        assert!(memory.mean[1..].iter().all(|mean| *mean == Some(10)));
    }

    proptest! {
        #[test]
        fn every_span_has_bounded_points_of_equal_length(
            from: u64,
            to: u64,
            now in 0..4_000_000_000_000_u64,
            wanted in prop::option::of(prop::sample::select(LoadResolution::ALL.to_vec())),
        ) {
            for (from, to) in [(from, to), (from % (now + 1), to % (now + 1))] {
                let Ok(span) = Span::of(now, Some(from), Some(to), wanted) else { continue };
                let rows = BTreeMap::from([(span.first, Row::of(&[Some(1); FIGURES]))]);
                let shown =
                    span.shown("cluster", &Object::Cluster, LoadCapacity::default(), &rows);
                prop_assert!(shown.points <= MOST_LOAD_POINTS);
                prop_assert_eq!(shown.step_ms % shown.resolution.period_ms(), 0);
                for series in &shown.series {
                    prop_assert_eq!(series.mean.len() as u64, shown.points);
                    prop_assert_eq!(series.max.len() as u64, shown.points);
                }
            }
        }
    }
}
