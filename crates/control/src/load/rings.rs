//! Layout and codec of a file with an object's history. Pure.
//!
//! A file has a header and three rings. In a ring the place of a record follows from its period, so
//! nothing is moved or searched, and a file never grows:
//!
//! | ring | records | bytes of a record |
//! |---|---|---|
//! | days | 365, of 24 hours each | 512 |
//! | minutes | 1,440 | 53 |
//! | five seconds | 720 | 29 |
//!
//! A record has a checksum that covers its period. One that was torn, never written, or left from
//! an earlier round is skipped, and is a gap. A record of a day is a sector, which disks write
//! whole; its 24 means and maxima of each figure are scaled to their range in that day, in as many
//! bits as the record has room for.

use std::collections::BTreeMap;

use super::figures::{Compact, FIGURES, Row};

/// Bytes of the header, and of a day.
pub(crate) const SECTOR: usize = 512;
/// Days in a file.
pub(crate) const DAYS: u64 = 365;
/// Hours of a day.
pub(crate) const HOURS: u64 = 24;
const HOURS_OF_DAY: usize = 24;

/// First bytes of a file. The last two are its version.
const MAGIC: [u8; 8] = *b"GWLOAD01";

/// Bytes of the round and of the checksum before a record's figures.
const RECORD_HEAD: usize = 5;
const DAYS_START: u64 = SECTOR as u64;
const MINUTES_START: u64 = DAYS_START + DAYS * SECTOR as u64;
const MINUTE_BYTES: usize = RECORD_HEAD + 4 * FIGURES;
const FAST_BYTES: usize = RECORD_HEAD + 2 * FIGURES;

/// Ring of minutes, which have a mean and a maximum.
pub(crate) const MINUTES: Ring =
    Ring { start: MINUTES_START, periods: 1_440, record_bytes: MINUTE_BYTES, has_max: true };
/// Ring of periods of five seconds, which have one value.
pub(crate) const FAST: Ring = Ring {
    start: MINUTES_START + 1_440 * MINUTE_BYTES as u64,
    periods: 720,
    record_bytes: FAST_BYTES,
    has_max: false,
};
/// Bytes of a file.
pub(crate) const FILE_BYTES: u64 = FAST.start + FAST.periods * FAST_BYTES as u64;

/// Something to write to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// A period of five seconds: its number since 1970, and its row.
    Fast(u64, Row),
    /// A minute.
    Minute(u64, Row),
    /// Hours of a day.
    Day(Box<Day>),
}

/// Returns the header of an object's file.
pub(crate) fn header(label: &str) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    let (magic, rest) = bytes.split_at_mut(MAGIC.len());
    magic.copy_from_slice(&MAGIC);
    for (byte, letter) in rest.iter_mut().zip(label.bytes()) {
        *byte = letter;
    }
    bytes
}

/// A ring of records of equal length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    /// Offset of the first record in the file.
    pub(crate) start: u64,
    /// Number of records.
    pub(crate) periods: u64,
    record_bytes: usize,
    has_max: bool,
}

impl Ring {
    /// Returns the bytes of the whole ring.
    pub(crate) fn bytes(&self) -> usize {
        usize::try_from(self.periods).unwrap_or(usize::MAX).saturating_mul(self.record_bytes)
    }

    /// Returns the offset of a period's record in the file.
    pub(crate) fn offset(&self, period: u64) -> u64 {
        self.start + (period % self.periods) * self.record_bytes as u64
    }

    pub(crate) fn encode(&self, period: u64, row: &Row) -> Vec<u8> {
        let max = self.has_max.then_some(&row.max);
        let codes = row.mean.iter().chain(max.into_iter().flatten());
        let figures: Vec<u8> = codes.flat_map(|code| code.code().to_le_bytes()).collect();
        let mut bytes = Vec::with_capacity(self.record_bytes);
        bytes.extend(low_16_bits(period / self.periods).to_le_bytes());
        bytes.extend(record_check(period, &figures));
        bytes.extend(figures);
        bytes
    }

    /// Reads the ring's records. Those of periods after `newest` are left out: the clock was ahead
    /// when they were written.
    pub(crate) fn decode_all(&self, bytes: &[u8], newest: u64) -> BTreeMap<u64, Row> {
        let records = bytes.chunks_exact(self.record_bytes);
        let numbered = (0..self.periods).zip(records);
        numbered.filter_map(|(slot, bytes)| self.decode(slot, bytes, newest)).collect()
    }

    fn decode(&self, slot: u64, bytes: &[u8], newest: u64) -> Option<(u64, Row)> {
        let (round, bytes) = bytes.split_first_chunk::<2>()?;
        let (check, figures) = bytes.split_first_chunk::<3>()?;
        // The round is the latest one with these 16 bits.
        let now = newest / self.periods;
        let ago = low_16_bits(now).wrapping_sub(u16::from_le_bytes(*round));
        let round = now.checked_sub(u64::from(ago))?;
        let period = round.checked_mul(self.periods)?.checked_add(slot)?;
        if period > newest || record_check(period, figures) != *check {
            return None;
        }
        let mut codes = figures.chunks_exact(2).map(|code| Compact::from_code(u16_of(code)));
        let mut row = Row::EMPTY;
        row.mean.iter_mut().zip(&mut codes).for_each(|(mean, code)| *mean = code);
        row.max = row.mean;
        row.max.iter_mut().zip(codes).for_each(|(max, code)| *max = code);
        Some((period, row))
    }
}

fn low_16_bits(number: u64) -> u16 {
    let [low, high, ..] = number.to_le_bytes();
    u16::from_le_bytes([low, high])
}

fn u16_of(bytes: &[u8]) -> u16 {
    bytes.first_chunk().map_or(u16::MAX, |bytes| u16::from_le_bytes(*bytes))
}

fn record_check(period: u64, figures: &[u8]) -> [u8; 3] {
    let [one, two, three, _] = check(period, figures);
    [one, two, three]
}

fn check(number: u64, bytes: &[u8]) -> [u8; 4] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&number.to_le_bytes()).update(bytes);
    hasher.finalize().as_bytes().first_chunk().copied().unwrap_or_default()
}

/// Hours of a day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Day {
    /// Number of the day since 1970.
    pub(crate) day: u64,
    /// Row of each hour; none: a gap.
    pub(crate) hours: [Option<Row>; HOURS_OF_DAY],
}

/// Offset of the columns' ranges in a day's record: behind the checksum, the day, one bit for each
/// hour and one for each column.
const RANGES: usize = 4 + 4 + 3 + 3;
/// Columns of a day: means, then maxima.
const COLUMNS: usize = 2 * FIGURES;
/// Offset of the scaled values in a day's record.
const VALUES: usize = RANGES + 4 * COLUMNS;
/// Bits for the scaled values.
const VALUE_BITS: usize = (SECTOR - VALUES) * 8;
/// Most bits of a scaled value.
const MOST_BITS: usize = 16;

impl Day {
    pub(crate) fn empty(day: u64) -> Day {
        Day { day, hours: [None; HOURS_OF_DAY] }
    }

    /// Returns the offset of a day's record in the file.
    pub(crate) fn offset(day: u64) -> u64 {
        DAYS_START + (day % DAYS) * SECTOR as u64
    }

    /// Returns the rows of the hours that are known, by the number of the hour since 1970.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (u64, Row)> + '_ {
        let numbered = (self.day * HOURS..).zip(&self.hours);
        numbered.filter_map(|(hour, row)| Some((hour, (*row)?)))
    }

    /// Adds the hours that are known here from another record of the same day. Returns whether
    /// there was one.
    pub(crate) fn complete(&mut self, from: &Day) -> bool {
        let mut is_news = false;
        for (own, other) in self.hours.iter_mut().zip(&from.hours) {
            if own.is_none() && other.is_some() {
                *own = *other;
                is_news = true;
            }
        }
        is_news
    }

    pub(crate) fn encode(&self) -> [u8; SECTOR] {
        let rows: Vec<&Row> = self.hours.iter().flatten().collect();
        let columns: Vec<Vec<Compact>> = (0..COLUMNS)
            .map(|column| rows.iter().filter_map(|row| cells(row).nth(column)).collect())
            .collect();
        let ranges: Vec<Range> = columns.iter().map(|column| Range::of(column)).collect();
        let mut bytes = [0; SECTOR];
        let day = u32::try_from(self.day).unwrap_or(u32::MAX);
        put(&mut bytes, 4, &day.to_le_bytes());
        for (hour, _) in self.hours.iter().enumerate().filter(|(_, row)| row.is_some()) {
            put_bits(&mut bytes, 8 * 8 + hour, 1, 1);
        }
        for (column, range) in ranges.iter().enumerate() {
            put_bits(&mut bytes, 11 * 8 + column, 1, u64::from(range.has_gaps));
            put(&mut bytes, RANGES + 4 * column, &range.low.code().to_le_bytes());
            put(&mut bytes, RANGES + 4 * column + 2, &range.high.code().to_le_bytes());
        }
        let widths = widths(&ranges, rows.len());
        let mut at = VALUES * 8;
        for ((column, range), width) in columns.iter().zip(&ranges).zip(widths) {
            for value in column.iter().filter(|_| width > 0) {
                put_bits(&mut bytes, at, width, range.scale(*value, width));
                at += width;
            }
        }
        let check = check(self.day, bytes.get(4..).unwrap_or_default());
        put(&mut bytes, 0, &check);
        bytes
    }

    /// Reads the record at a place of the ring of days.
    pub(crate) fn decode(slot: u64, bytes: &[u8]) -> Option<Day> {
        let (sum, rest) = bytes.split_first_chunk::<4>()?;
        let day = u64::from(u32::from_le_bytes(*rest.first_chunk()?));
        if bytes.len() != SECTOR || day % DAYS != slot % DAYS || check(day, rest) != *sum {
            return None;
        }
        let known: Vec<usize> =
            (0..HOURS_OF_DAY).filter(|hour| bits(bytes, 8 * 8 + hour, 1) == 1).collect();
        let ranges: Vec<Range> = (0..COLUMNS)
            .map(|column| {
                let code = |at: usize| Some(Compact::from_code(u16_of(bytes.get(at..)?)));
                let start = RANGES + 4 * column;
                let has_gaps = bits(bytes, 11 * 8 + column, 1) == 1;
                Some(Range { low: code(start)?, high: code(start + 2)?, has_gaps })
            })
            .collect::<Option<_>>()?;
        let widths = widths(&ranges, known.len());
        let mut rows = vec![Row::EMPTY; known.len()];
        let mut at = VALUES * 8;
        for (column, (range, width)) in ranges.iter().zip(widths).enumerate() {
            for row in &mut rows {
                let value = range.unscale(bits(bytes, at, width), width);
                if let Some(cell) = row.mean.iter_mut().chain(&mut row.max).nth(column) {
                    *cell = value;
                }
                at += width;
            }
        }
        let mut read = Day::empty(day);
        for (hour, row) in known.into_iter().zip(rows) {
            if let Some(own) = read.hours.get_mut(hour) {
                *own = Some(with_max_above_mean(row));
            }
        }
        Some(read)
    }
}

/// Reads any bytes as rings, and as a day with a valid checksum. Returns the number of rows. For
/// fuzzing.
pub(crate) fn read_any(bytes: &[u8]) -> usize {
    let newest = bytes.first_chunk().map_or(u64::MAX, |number| u64::from_le_bytes(*number));
    let in_rings = [FAST, MINUTES].map(|ring| ring.decode_all(bytes, newest).len());
    let mut sector = [0; SECTOR];
    put(&mut sector, 4, bytes);
    let day = sector.get(4..8).and_then(|day| day.first_chunk()).copied().unwrap_or_default();
    let day = u64::from(u32::from_le_bytes(day));
    let sum = check(day, sector.get(4..).unwrap_or_default());
    put(&mut sector, 0, &sum);
    let hours = Day::decode(day, &sector).map_or(0, |day| {
        let again = Day::decode(day.day, &day.encode()).map(|again| again.rows().count());
        debug_assert_eq!(again, Some(day.rows().count()));
        day.rows().count()
    });
    in_rings.iter().sum::<usize>() + hours
}

fn cells(row: &Row) -> impl Iterator<Item = Compact> + '_ {
    row.mean.iter().chain(&row.max).copied()
}

/// Means and maxima are scaled by themselves: a maximum may have become less than its mean.
fn with_max_above_mean(mut row: Row) -> Row {
    for (max, mean) in row.max.iter_mut().zip(row.mean) {
        *max = Compact::of(max.value().max(mean.value()));
    }
    row
}

/// Range of a column's values in a day.
#[derive(Clone, Copy, Debug)]
struct Range {
    low: Compact,
    high: Compact,
    /// Whether some value is unknown.
    has_gaps: bool,
}

impl Range {
    fn of(column: &[Compact]) -> Range {
        let known = column.iter().filter_map(|value| value.value());
        let (low, high) = (known.clone().min(), known.clone().max());
        let has_gaps = low.is_some() && known.count() < column.len();
        Range { low: Compact::of(low), high: Compact::of(high), has_gaps }
    }

    /// Returns whether the range does not give every value of the column.
    fn has_values(&self) -> bool {
        self.low.value().is_some() && (self.low != self.high || self.has_gaps)
    }

    /// Returns the highest scaled value; the one above it is a gap.
    fn top(&self, width: usize) -> u64 {
        ((1_u64 << width) - 1).saturating_sub(u64::from(self.has_gaps))
    }

    fn scale(&self, value: Compact, width: usize) -> u64 {
        let top = self.top(width);
        let (Some(value), Some(low), Some(high)) =
            (value.value(), self.low.value(), self.high.value())
        else {
            return top + 1;
        };
        let span = u128::from(high.saturating_sub(low));
        let scaled = u128::from(value.saturating_sub(low)) * u128::from(top) + span / 2;
        u64::try_from(scaled.checked_div(span).unwrap_or(0)).unwrap_or(top).min(top)
    }

    fn unscale(&self, scaled: u64, width: usize) -> Compact {
        let (Some(low), Some(high)) = (self.low.value(), self.high.value()) else {
            return Compact::UNKNOWN;
        };
        if width == 0 {
            return self.low;
        }
        let top = self.top(width);
        if scaled > top {
            return Compact::UNKNOWN;
        }
        let span = u128::from(high.saturating_sub(low));
        let above = (u128::from(scaled) * span + u128::from(top) / 2)
            .checked_div(u128::from(top))
            .and_then(|above| u64::try_from(above).ok());
        Compact::of(Some(low.saturating_add(above.unwrap_or(0))))
    }
}

/// Returns the bits of a value of each column: none if the range says it all. The other columns
/// share the room, and the first ones get what is left over.
fn widths(ranges: &[Range], hours: usize) -> Vec<usize> {
    let columns = ranges.iter().filter(|range| range.has_values()).count();
    let each = VALUE_BITS.checked_div(columns * hours).unwrap_or(0).min(MOST_BITS);
    let left = VALUE_BITS - each * columns * hours;
    let mut wider = if each < MOST_BITS { left.checked_div(hours).unwrap_or(0) } else { 0 };
    let width = |range: &Range| {
        if !range.has_values() {
            return 0;
        }
        let more = usize::from(wider > 0);
        wider -= more;
        each + more
    };
    ranges.iter().map(width).collect()
}

fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes.iter_mut().skip(at).zip(what).for_each(|(byte, new)| *byte = *new);
}

/// Writes the lowest `width` bits of a value at a bit's offset, the lowest bit first.
fn put_bits(bytes: &mut [u8], at: usize, width: usize, value: u64) {
    for bit in (0..width).filter(|bit| value >> bit & 1 == 1) {
        if let Some(byte) = bytes.get_mut((at + bit) / 8) {
            *byte |= 1 << ((at + bit) % 8);
        }
    }
}

fn bits(bytes: &[u8], at: usize, width: usize) -> u64 {
    let bit = |bit: usize| {
        let byte = bytes.get((at + bit) / 8).copied().unwrap_or(0);
        u64::from(byte >> ((at + bit) % 8) & 1) << bit
    };
    (0..width).map(bit).sum()
}

#[cfg(test)]
mod tests;
