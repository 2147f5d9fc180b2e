//! Load of one object over time: samples become periods of five seconds, minutes, hours and days.
//! Pure: what is to be written is returned.

use std::collections::BTreeMap;
use std::mem;

use godwit_api::control::LoadResolution;

use super::figures::{Row, Sum};
use super::rings::{Day, HOURS, Write};

const FAST_MS: u64 = LoadResolution::FiveSeconds.period_ms();
const MINUTE_MS: u64 = LoadResolution::Minute.period_ms();
const MINUTES_OF_HOUR: u64 = 60;
/// Longest interval for which a sample counts.
const MOST_INTERVAL_MS: u64 = 60_000;

/// Load of an object since this manager began to note it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    /// Minute in progress.
    minute: Option<(u64, Sum)>,
    /// Hour in progress: its minutes that have ended.
    hour: Option<(u64, Sum)>,
    /// Day in progress: its hours that have ended.
    day: Option<Day>,
    /// Records that are not written yet.
    unwritten: Vec<Write>,
}

impl Series {
    /// Continues after a restart, from the minutes in the object's file: they have the hours of the
    /// day in progress, and those of a day whose end was missed.
    pub(crate) fn resume(minutes: &BTreeMap<u64, Row>) -> Series {
        let mut series = Series::default();
        for (minute, row) in minutes {
            series.add_to_hour(minute / MINUTES_OF_HOUR, row);
        }
        series
    }

    /// Notes a sample of the interval that ended at `at_ms`. Returns whether a minute has ended, so
    /// that there is something to write.
    pub(crate) fn take(&mut self, at_ms: u64, interval_ms: u64, row: &Row) -> bool {
        let interval_ms = interval_ms.clamp(1, MOST_INTERVAL_MS).min(at_ms);
        let from_ms = at_ms - interval_ms;
        // The sample stands for each period whose middle it covers: intervals that follow each
        // other leave no gap, although none has exactly five seconds.
        let first = (from_ms + FAST_MS / 2) / FAST_MS;
        let end = (at_ms + FAST_MS / 2) / FAST_MS;
        self.unwritten.extend((first..end).map(|period| Write::Fast(period, *row)));
        let number = (at_ms - interval_ms / 2) / MINUTE_MS;
        let is_over = self.minute.as_ref().is_some_and(|(minute, _)| *minute != number);
        if is_over {
            self.end_minute();
        }
        self.minute.get_or_insert_with(|| (number, Sum::default())).1.add(row);
        is_over
    }

    /// Ends the minute in progress, before the process ends or the object is no longer sampled.
    pub(crate) fn end_minute(&mut self) {
        let Some((minute, sum)) = self.minute.take() else { return };
        if let Some(row) = sum.row() {
            self.unwritten.push(Write::Minute(minute, row));
            self.add_to_hour(minute / MINUTES_OF_HOUR, &row);
        }
    }

    /// Returns the records that are to be written, once.
    pub(crate) fn take_unwritten(&mut self) -> Vec<Write> {
        mem::take(&mut self.unwritten)
    }

    /// Returns the rows in memory of a resolution, by the number of the period since 1970.
    pub(crate) fn rows(&self, resolution: LoadResolution) -> BTreeMap<u64, Row> {
        let open = |open: &Option<(u64, Sum)>| {
            open.as_ref().and_then(|(number, sum)| Some((*number, sum.row()?)))
        };
        let unwritten = self.unwritten.iter();
        match resolution {
            LoadResolution::FiveSeconds => unwritten
                .filter_map(|write| match write {
                    Write::Fast(period, row) => Some((*period, *row)),
                    Write::Minute(..) | Write::Day(_) => None,
                })
                .collect(),
            LoadResolution::Minute => unwritten
                .filter_map(|write| match write {
                    Write::Minute(period, row) => Some((*period, *row)),
                    Write::Fast(..) | Write::Day(_) => None,
                })
                .chain(open(&self.minute))
                .collect(),
            LoadResolution::Hour => unwritten
                .filter_map(|write| match write {
                    Write::Day(day) => Some(day.rows()),
                    Write::Fast(..) | Write::Minute(..) => None,
                })
                .flatten()
                .chain(self.day.iter().flat_map(Day::rows))
                .chain(open(&self.hour))
                .collect(),
        }
    }

    fn add_to_hour(&mut self, number: u64, row: &Row) {
        if self.hour.as_ref().is_some_and(|(hour, _)| *hour != number) {
            self.end_hour();
        }
        self.hour.get_or_insert_with(|| (number, Sum::default())).1.add(row);
    }

    fn end_hour(&mut self) {
        let Some((hour, sum)) = self.hour.take() else { return };
        let number = hour / HOURS;
        if let Some(day) = self.day.take_if(|day| day.day != number) {
            self.unwritten.push(Write::Day(Box::new(day)));
        }
        let day = self.day.get_or_insert_with(|| Day::empty(number));
        let place = usize::try_from(hour % HOURS).ok();
        if let Some(own) = place.and_then(|place| day.hours.get_mut(place)) {
            *own = sum.row();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::load::figures::FIGURES;

    const HOUR_MS: u64 = 3_600_000;
    /// Begin of a day.
    const DAY_BEGIN_MS: u64 = 20_000 * 24 * HOUR_MS;

    fn row(value: u64) -> Row {
        Row::of(&[Some(value); FIGURES])
    }

    fn mean_and_max(row: &Row) -> (u64, u64) {
        (row.mean[0].value().unwrap(), row.max[0].value().unwrap())
    }

    /// Feeds a sample every five seconds between two times.
    fn feed(series: &mut Series, from_ms: u64, to_ms: u64, value: impl Fn(u64) -> u64) {
        let mut at = from_ms + FAST_MS;
        while at <= to_ms {
            series.take(at, FAST_MS, &row(value(at)));
            at += FAST_MS;
        }
    }

    fn days(writes: &[Write]) -> Vec<&Day> {
        writes
            .iter()
            .filter_map(|write| match write {
                Write::Day(day) => Some(&**day),
                Write::Fast(..) | Write::Minute(..) => None,
            })
            .collect()
    }

    #[test]
    fn samples_become_minutes_hours_and_days() {
        let mut series = Series::default();
        let value = |at: u64| if at.is_multiple_of(MINUTE_MS) { 120 } else { 0 };
        feed(&mut series, DAY_BEGIN_MS, DAY_BEGIN_MS + 25 * HOUR_MS + 3 * MINUTE_MS, value);
        let writes = series.take_unwritten();
        let minutes = writes.iter().filter(|write| matches!(write, Write::Minute(..))).count();
        assert_eq!(minutes, 25 * 60 + 2);
        let fast = writes.iter().filter(|write| matches!(write, Write::Fast(..))).count();
        assert_eq!(fast, 25 * 720 + 36);
        let days = days(&writes);
        assert_eq!((days.len(), days[0].day), (1, 20_000));
        assert!(days[0].hours.iter().all(|hour| mean_and_max(&hour.unwrap()) == (10, 120)));
        // The hour and the minute in progress are shown.
        let hours = series.rows(LoadResolution::Hour);
        assert_eq!(hours.keys().copied().collect::<Vec<_>>(), [480_024, 480_025]);
        assert_eq!(series.rows(LoadResolution::Minute).len(), 1);
        assert!(series.take_unwritten().is_empty());
    }

    #[test]
    fn a_day_whose_end_was_missed_is_written_after_the_restart() {
        let mut series = Series::default();
        feed(&mut series, DAY_BEGIN_MS, DAY_BEGIN_MS + 23 * HOUR_MS, |_| 7);
        series.end_minute();
        let minutes: BTreeMap<u64, Row> = series
            .take_unwritten()
            .into_iter()
            .filter_map(|write| match write {
                Write::Minute(minute, row) => Some((minute, row)),
                Write::Fast(..) | Write::Day(_) => None,
            })
            .collect();
        let mut series = Series::resume(&minutes);
        assert!(series.take_unwritten().is_empty());
        assert_eq!(series.rows(LoadResolution::Hour).len(), 23);
        let next = DAY_BEGIN_MS + 24 * HOUR_MS;
        feed(&mut series, next, next + 2 * HOUR_MS + MINUTE_MS, |_| 9);
        let writes = series.take_unwritten();
        let days = days(&writes);
        assert_eq!(days.len(), 1);
        let known: Vec<bool> = days[0].hours.iter().map(Option::is_some).collect();
        assert_eq!(known, [vec![true; 23], vec![false]].concat());
    }

    #[test]
    fn a_gap_stays_a_gap() {
        let mut series = Series::default();
        feed(&mut series, DAY_BEGIN_MS, DAY_BEGIN_MS + MINUTE_MS, |_| 1);
        let later = DAY_BEGIN_MS + 10 * MINUTE_MS;
        feed(&mut series, later, later + MINUTE_MS, |_| 1);
        let minutes: Vec<u64> = series.rows(LoadResolution::Minute).into_keys().collect();
        let first = DAY_BEGIN_MS / MINUTE_MS;
        assert_eq!(minutes, [first, first + 10]);
        assert_eq!(series.rows(LoadResolution::FiveSeconds).len(), 24);
    }

    proptest! {
        #[test]
        fn intervals_that_follow_each_other_leave_no_gap_and_no_period_twice(
            lengths in prop::collection::vec(4_000..12_000_u64, 1..200),
            begin in DAY_BEGIN_MS..DAY_BEGIN_MS + HOUR_MS,
        ) {
            let mut series = Series::default();
            let mut at = begin;
            for length in &lengths {
                at += length;
                series.take(at, *length, &row(1));
            }
            let fast: Vec<u64> = series
                .take_unwritten()
                .iter()
                .filter_map(|write| match write {
                    Write::Fast(period, _) => Some(*period),
                    Write::Minute(..) | Write::Day(_) => None,
                })
                .collect();
            prop_assert!(fast.windows(2).all(|pair| pair[1] == pair[0] + 1), "{fast:?}");
            let wanted = (at - begin) / FAST_MS;
            prop_assert!((wanted.saturating_sub(1)..=wanted + 1).contains(&(fast.len() as u64)));
        }

        #[test]
        fn a_clock_that_jumps_loses_no_sample_and_invents_none(
            jumps in prop::collection::vec((0..3 * HOUR_MS, any::<bool>(), 0..2_000_u64), 1..100),
        ) {
            let mut series = Series::default();
            let mut at = DAY_BEGIN_MS + 24 * HOUR_MS;
            let mut minutes = BTreeSet::new();
            for (jump, is_back, value) in &jumps {
                at = if *is_back { at - jump.min(&(at - DAY_BEGIN_MS)) } else { at + jump };
                minutes.insert((at - FAST_MS / 2) / MINUTE_MS);
                series.take(at, FAST_MS, &row(*value));
            }
            let rows = series.rows(LoadResolution::Minute);
            prop_assert_eq!(rows.keys().copied().collect::<BTreeSet<_>>(), minutes);
            let most = jumps.iter().map(|(.., value)| *value).max();
            for row in rows.values().chain(series.rows(LoadResolution::Hour).values()) {
                prop_assert!(row.max[0].value() <= most);
                prop_assert!(row.mean[0].value() <= row.max[0].value());
            }
        }
    }
}
