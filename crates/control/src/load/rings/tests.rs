use proptest::prelude::*;

use super::*;

fn row(value: u64) -> Row {
    Row::of(&[Some(value); FIGURES])
}

/// Rows with gaps, and figures of every size.
fn rows() -> impl Strategy<Value = Row> {
    let figure = prop_oneof![
        2 => Just(None),
        3 => (0..4_000_u64).prop_map(Some),
        3 => any::<u64>().prop_map(Some)
    ];
    prop::collection::vec((figure, 0..1_000_u64), FIGURES).prop_map(|figures| {
        let mut row = Row::EMPTY;
        let cells = row.mean.iter_mut().zip(&mut row.max);
        for ((mean, max), (figure, more)) in cells.zip(figures) {
            *mean = Compact::of(figure);
            *max = Compact::of(mean.value().map(|mean| mean.saturating_add(more)));
        }
        row
    })
}

fn days() -> impl Strategy<Value = Day> {
    let hours = prop::collection::vec(prop::option::weighted(0.8, rows()), HOURS_OF_DAY);
    (0..60_000_u64, hours).prop_map(|(number, rows)| {
        let mut day = Day::empty(number);
        day.hours.iter_mut().zip(rows).for_each(|(hour, row)| *hour = row);
        day
    })
}

/// Returns the values of a column of means, in the order of the hours.
fn column(day: &Day, figure: usize) -> Vec<Option<u64>> {
    day.hours.iter().flatten().map(|row| row.mean[figure].value()).collect()
}

proptest! {
    #[test]
    fn a_record_is_read_as_it_was_written(
        row in rows(),
        period in 1_000_000..400_000_000_u64,
        later in 0..700_u64,
    ) {
        for ring in [FAST, MINUTES] {
            let mut file = vec![0; ring.bytes()];
            let record = ring.encode(period, &row);
            let at = usize::try_from(ring.offset(period) - ring.start).unwrap();
            file[at..at + record.len()].copy_from_slice(&record);
            let read = ring.decode_all(&file, period + later);
            let kept = if ring.has_max { row } else { Row { max: row.mean, ..row } };
            prop_assert_eq!(read, BTreeMap::from([(period, kept)]));
            // A clock that goes back does not show the future.
            prop_assert!(ring.decode_all(&file, period - 1).is_empty());
        }
    }

    #[test]
    fn a_torn_record_is_a_gap(
        row in rows(),
        other in rows(),
        rounds in 1..40_u64,
        torn in 1..MINUTE_BYTES,
    ) {
        let (old, new) = (20_000_000, 20_000_000 + rounds * MINUTES.periods);
        let (before, after) = (MINUTES.encode(old, &row), MINUTES.encode(new, &other));
        let mut file = vec![0; MINUTES.bytes()];
        let at = usize::try_from(MINUTES.offset(new) - MINUTES.start).unwrap();
        file[at..at + before.len()].copy_from_slice(&before);
        file[at..at + torn].copy_from_slice(&after[..torn]);
        let whole = [&before, &after].into_iter().find(|whole| file[at..].starts_with(whole));
        let read = MINUTES.decode_all(&file, new);
        match whole {
            // The two differ only before or after the tear.
            Some(_) => prop_assert_eq!(read.len(), 1),
            None => prop_assert!(read.is_empty()),
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..2_000),
        newest: u64,
        slot: u64,
    ) {
        for ring in [FAST, MINUTES] {
            let read = ring.decode_all(&bytes, newest);
            prop_assert!(read.keys().all(|period| *period <= newest));
        }
        prop_assert_eq!(Day::decode(slot, &bytes), None);
    }

    #[test]
    fn a_day_with_a_valid_checksum_and_any_content_is_read_without_a_panic(
        content in prop::collection::vec(any::<u8>(), SECTOR - 8),
        day: u32,
    ) {
        let mut bytes = day.to_le_bytes().to_vec();
        bytes.extend(content);
        let sum = check(u64::from(day), &bytes);
        let bytes = [&sum[..], &bytes].concat();
        let read = Day::decode(u64::from(day), &bytes);
        prop_assert!(read.is_none_or(|read| read.day == u64::from(day)));
    }

    #[test]
    fn a_day_keeps_its_gaps_and_its_figures_within_a_share_of_their_range(day in days()) {
        let read = Day::decode(day.day, &day.encode()).unwrap();
        prop_assert_eq!(read.day, day.day);
        for (own, other) in day.hours.iter().zip(&read.hours) {
            prop_assert_eq!(own.is_some(), other.is_some());
        }
        for figure in 0..FIGURES {
            let (were, are) = (column(&day, figure), column(&read, figure));
            let known = || were.iter().flatten();
            let span = known().max().zip(known().min()).map_or(0, |(most, least)| most - least);
            for (was, is) in were.iter().zip(&are) {
                prop_assert_eq!(was.is_some(), is.is_some());
                let (was, is) = (was.unwrap_or(0), is.unwrap_or(0));
                // Half a step of at least 30, and the rounding of the result.
                let most = span / 60 + is / 2_048 + 2;
                prop_assert!(was.abs_diff(is) <= most, "{was} became {is}, span {span}");
            }
        }
        for row in read.hours.iter().flatten() {
            for (mean, max) in row.mean.iter().zip(&row.max) {
                prop_assert!(mean.value() <= max.value());
            }
        }
    }

    #[test]
    fn a_changed_bit_of_a_day_is_noticed(day in days(), byte in 0..SECTOR, bit in 0..8_usize) {
        let mut bytes = day.encode();
        bytes[byte] ^= 1 << bit;
        prop_assert_eq!(Day::decode(day.day, &bytes), None);
    }
}

#[test]
fn the_figures_of_a_quiet_day_are_exact() {
    // One figure changes, the others stay: there is room for all its bits.
    let mut day = Day::empty(20_000);
    for (hour, own) in day.hours.iter_mut().enumerate() {
        let mut figures = [Some(5); FIGURES];
        figures[0] = Some(hour as u64 * 80);
        figures[2] = Some(1 << 30);
        *own = Some(Row::of(&figures));
    }
    assert_eq!(Day::decode(20_000, &day.encode()), Some(day));
}

#[test]
fn a_day_of_another_year_is_no_day_of_this_one() {
    let day = Day { hours: [Some(row(7)); HOURS_OF_DAY], ..Day::empty(1_000) };
    assert!(Day::decode(1_000 + DAYS, &day.encode()).is_some_and(|read| read.day == 1_000));
    assert_eq!(Day::decode(1_001, &day.encode()), None);
    assert_eq!(Day::decode(1_000, &[0; SECTOR]), None);
}

#[test]
fn hours_that_are_known_are_kept() {
    let mut day = Day::empty(7);
    day.hours[3] = Some(row(1));
    let mut other = Day::empty(7);
    other.hours[3] = Some(row(2));
    assert!(!day.complete(&other));
    other.hours[4] = Some(row(2));
    assert!(day.complete(&other));
    let hours: Vec<_> = day.rows().collect();
    assert_eq!(hours, [(7 * 24 + 3, row(1)), (7 * 24 + 4, row(2))]);
}

/// Figures of 1,000 VMs, with their disks in them, of 20 hosts, and of what they share.
#[test]
fn a_year_of_a_thousand_vms_takes_at_most_300_mb() {
    const BLOCK: u64 = 4_096;
    let on_disk = FILE_BYTES.div_ceil(BLOCK) * BLOCK;
    let objects = 1_000 + 20 + 10 + 1;
    assert!(objects * on_disk <= 300_000_000, "{} bytes", objects * on_disk);
    assert_eq!(MINUTES.periods * 60_000, 24 * 3_600_000);
    assert_eq!(FAST.periods * 5_000, 3_600_000);
}
