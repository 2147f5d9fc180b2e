//! Content of a guest's page as a pure function of a few numbers, so that it can be checked later.
//!
//! A page is zero, or consists of a header of eight words and a body generated from (seed, page
//! index, version, kind). The [`Entry`] with the version that a page must hold is in a table
//! elsewhere in memory. A page that was sent too early, a page that was never sent, a page in the
//! wrong place and a torn page all differ from the table, and so does a table page that is itself
//! stale.
//!
//! A write either rewrites a page whole or changes a few of its words (`touch`), which is the case
//! that delta encodings exploit. Touched words are as deterministic as whole pages: the table
//! records when the page was last rewritten whole, and every touch since then wrote words that
//! follow from its version.

use std::fmt;

/// Bytes per page.
pub const PAGE_BYTES: usize = 4096;
/// 64-bit words per page.
pub const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// Words of the header: magic, index, version, base version, kind and touch width, seed, two sums.
pub const HEADER_WORDS: usize = 8;
/// Words of the body, and the most words that one touch writes.
pub const BODY_WORDS: usize = PAGE_WORDS - HEADER_WORDS;
/// First word of every page that is not zero: "godwit" and a format number.
pub const MAGIC: u64 = 0x676f_6477_6974_0001;

const INDEX: usize = 1;
const VERSION: usize = 2;
const SHAPE: usize = 4;
const SUM: usize = 6;
const WEIGHTED_SUM: usize = 7;

/// Spreads touches over the page: slot `s` is word `s * STRIDE mod BODY_WORDS`, a permutation
/// because the two share no factor (275 = 5²·11, 504 = 2³·3²·7).
const STRIDE: usize = 275;

/// One page as words.
pub type Page = [u64; PAGE_WORDS];

/// Kind of a page's content, from the point of view of an encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All bytes are zero, and there is no header.
    Zero,
    /// One word in four is random, and the rest repeats: LZ4 compresses it to about a third.
    Compressible,
    /// Incompressible.
    Random,
}

/// Table entry of one page. `version` counts the writes of the page from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Number of writes to the page.
    pub version: u64,
    /// The version at which the page was last rewritten whole.
    pub base: u64,
    /// Kind since then.
    pub kind: Kind,
    /// Words that each touch since then wrote; 0 if there was none.
    pub touch_words: u16,
}

impl Entry {
    /// Entry of a page that was never written.
    pub const UNWRITTEN: Entry = Entry { version: 0, base: 0, kind: Kind::Zero, touch_words: 0 };

    /// Returns the entry after one more write of the whole page.
    pub fn rewritten(self, kind: Kind) -> Entry {
        let version = self.version.wrapping_add(1);
        Entry { version, base: version, kind, touch_words: 0 }
    }

    /// Returns the entry after one more touch of `words` words. Returns `None` if only a whole
    /// write can follow: the page is zero (no header to touch) or was touched with another width.
    pub fn touched(self, words: u16) -> Option<Entry> {
        let fits = self.kind != Kind::Zero && (self.touch_words == 0 || self.touch_words == words);
        fits.then_some(Entry { version: self.version.wrapping_add(1), touch_words: words, ..self })
    }

    fn shape(self) -> u64 {
        u64::from(self.touch_words) << 8 | self.kind as u64
    }
}

/// Pseudo-random words of one write: a 64-bit linear congruential state (Knuth's MMIX multiplier),
/// with its high half folded into the low one. Deliberately serial: vector code is slow under TCG.
struct Words(u64);

impl Words {
    fn of(seed: u64, index: u64, version: u64, kind: Kind) -> Words {
        let salt = version.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (kind as u64) << 56;
        Words(mix(mix(seed ^ index) ^ salt))
    }

    #[inline]
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ (self.0 >> 32)
    }
}

/// Maps a number bijectively so that every bit affects the whole word (the finaliser of
/// SplitMix64).
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Derives a number below `limit` from one drawn uniformly from all of `u64`.
#[allow(clippy::cast_possible_truncation, reason = "the product's high half is less than 2^64")]
pub fn below(limit: u64, draw: u64) -> u64 {
    ((u128::from(draw) * u128::from(limit)) >> 64) as u64
}

/// Rewrites the whole page to match `entry` (just made by [`Entry::rewritten`]).
pub fn write_whole(page: &mut Page, seed: u64, index: u64, entry: Entry) {
    let mut words = Words::of(seed, index, entry.base, entry.kind);
    let (head, body) = page.split_at_mut(HEADER_WORDS);
    let (mut sum, mut weighted) = (0u64, 0u64);
    match entry.kind {
        Kind::Zero => return page.fill(0),
        Kind::Random => {
            for word in body {
                *word = words.next();
                sum = sum.wrapping_add(*word);
                weighted = weighted.wrapping_add(sum);
            }
        }
        Kind::Compressible => {
            let filler = mix(seed) & 0x00ff_00ff_00ff_00ff;
            for group in body.as_chunks_mut::<4>().0 {
                *group = [words.next(), filler, filler, filler];
                for word in group {
                    sum = sum.wrapping_add(*word);
                    weighted = weighted.wrapping_add(sum);
                }
            }
        }
    }
    head.copy_from_slice(&[
        MAGIC,
        index,
        entry.version,
        entry.base,
        entry.shape(),
        seed,
        sum,
        weighted,
    ]);
}

/// Writes the words of `entry`'s latest touch (made by [`Entry::touched`]), and the header.
pub fn write_touch(page: &mut Page, seed: u64, index: u64, entry: Entry) {
    let mut words = Words::of(seed, index, entry.version, entry.kind);
    let width = usize::from(entry.touch_words);
    let touch = entry.version.wrapping_sub(entry.base).wrapping_sub(1);
    let touch = usize::try_from(touch % BODY_WORDS as u64).unwrap_or(0);
    let first_slot = touch * width % BODY_WORDS;
    for step in 0..width {
        let at = (first_slot + step) * STRIDE % BODY_WORDS;
        let word = words.next();
        let change = word.wrapping_sub(page[HEADER_WORDS + at]);
        page[HEADER_WORDS + at] = word;
        page[SUM] = page[SUM].wrapping_add(change);
        page[WEIGHTED_SUM] =
            page[WEIGHTED_SUM].wrapping_add(change.wrapping_mul((BODY_WORDS - at) as u64));
    }
    page[VERSION] = entry.version;
    page[SHAPE] = entry.shape();
}

/// Writes to `page` exactly the content that `entry` describes.
pub fn expect(page: &mut Page, seed: u64, index: u64, entry: Entry) {
    let whole = Entry { version: entry.base, touch_words: 0, ..entry };
    write_whole(page, seed, index, whole);
    let touches = entry.version.wrapping_sub(entry.base);
    if touches == 0 {
        return;
    }
    // Older touches have been overwritten: the last ones that together cover the body are enough.
    let covering = (BODY_WORDS as u64).div_ceil(u64::from(entry.touch_words.max(1)));
    for touch in touches.saturating_sub(covering)..touches {
        let version = entry.base.wrapping_add(touch).wrapping_add(1);
        write_touch(page, seed, index, Entry { version, ..entry });
    }
}

/// Returns whether the page's header matches `entry`. It is cheap enough to run before each write,
/// so that a stale page is detected even if the workload overwrites it before the next check.
pub fn header_matches(page: &Page, index: u64, entry: Entry) -> bool {
    match entry.kind {
        Kind::Zero => page[0] == 0 && page[VERSION] == 0,
        _ => page[0] == MAGIC && page[INDEX] == index && page[VERSION] == entry.version,
    }
}

/// Compares the whole page with `entry`. `scratch` is overwritten.
pub fn check(
    page: &Page,
    seed: u64,
    index: u64,
    entry: Entry,
    scratch: &mut Page,
) -> Result<(), Fault> {
    expect(scratch, seed, index, entry);
    if page == scratch { Ok(()) } else { Err(diagnose(page, index, entry, scratch)) }
}

/// Error of a page, as far as its content shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The page reads as zero but should not: it never arrived.
    Zero,
    /// The page should be zero but is not: its zeroing never arrived.
    NotZero,
    /// The page holds another page's content.
    Misplaced {
        /// Index in its header.
        holds: u64,
    },
    /// The page is intact but of another version. An older one is a lost write, a newer one a stale
    /// table.
    Version {
        /// Version in its header.
        holds: u64,
        /// Version in the table.
        expected: u64,
    },
    /// The page's own sums do not match its content: it is torn or damaged.
    Torn {
        /// First word that differs from the expected content.
        word: usize,
    },
    /// Header and sums match each other, but the content is not what was written.
    Content {
        /// First word that differs from the expected content.
        word: usize,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Zero => write!(f, "reads as zero, should hold data"),
            Fault::NotZero => write!(f, "holds data, should read as zero"),
            Fault::Misplaced { holds } => write!(f, "holds the content of page {holds}"),
            Fault::Version { holds, expected } => {
                write!(f, "holds version {holds}, expected {expected}")
            }
            Fault::Torn { word } => {
                write!(f, "its sums do not fit its content; word {word} differs")
            }
            Fault::Content { word } => write!(f, "word {word} is not what was written"),
        }
    }
}

fn diagnose(page: &Page, index: u64, entry: Entry, expected: &Page) -> Fault {
    let word = page.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(0);
    if page.iter().all(|w| *w == 0) {
        return Fault::Zero;
    }
    if entry.kind == Kind::Zero && page[0] != MAGIC {
        return Fault::NotZero;
    }
    if page[0] != MAGIC || !sums_fit(page) {
        return Fault::Torn { word };
    }
    if page[INDEX] != index {
        return Fault::Misplaced { holds: page[INDEX] };
    }
    if page[VERSION] != entry.version {
        return Fault::Version { holds: page[VERSION], expected: entry.version };
    }
    if entry.kind == Kind::Zero { Fault::NotZero } else { Fault::Content { word } }
}

fn sums_fit(page: &Page) -> bool {
    let (mut sum, mut weighted) = (0u64, 0u64);
    for word in &page[HEADER_WORDS..] {
        sum = sum.wrapping_add(*word);
        weighted = weighted.wrapping_add(sum);
    }
    page[SUM] == sum && page[WEIGHTED_SUM] == weighted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SEED_OF_TESTS: u64 = 7;

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(Kind::Zero), Just(Kind::Compressible), Just(Kind::Random)]
    }

    /// Returns a page after the writes: `None` rewrites it whole, `Some(words)` touches it if
    /// possible.
    fn play(index: u64, writes: &[(Kind, Option<u16>)]) -> (Box<Page>, Entry) {
        let mut page = Box::new([0u64; PAGE_WORDS]);
        let mut entry = Entry::UNWRITTEN;
        for (kind, touch) in writes {
            assert!(header_matches(&page, index, entry) || entry.version == 0);
            match touch.and_then(|words| entry.touched(words)) {
                Some(next) => {
                    entry = next;
                    write_touch(&mut page, SEED_OF_TESTS, index, entry);
                }
                None => {
                    entry = entry.rewritten(*kind);
                    write_whole(&mut page, SEED_OF_TESTS, index, entry);
                }
            }
        }
        (page, entry)
    }

    fn judge(page: &Page, index: u64, entry: Entry) -> Result<(), Fault> {
        check(page, SEED_OF_TESTS, index, entry, &mut [0; PAGE_WORDS])
    }

    proptest! {
        #[test]
        fn any_history_of_writes_checks(index in 0u64..1 << 30,
            writes in proptest::collection::vec((kind(), proptest::option::of(1u16..=504)), 1..40)
        ) {
            let (page, entry) = play(index, &writes);
            prop_assert_eq!(judge(&page, index, entry), Ok(()));
            prop_assert_eq!(entry.version, writes.len() as u64);
        }

        #[test]
        fn many_touches_of_one_width_check(width in 1u16..=504, touches in 1usize..1200) {
            let mut writes = vec![(Kind::Random, None)];
            writes.resize(touches + 1, (Kind::Random, Some(width)));
            let (page, entry) = play(3, &writes);
            prop_assert_eq!(entry.base, 1);
            prop_assert_eq!(judge(&page, 3, entry), Ok(()));
        }

        #[test]
        fn one_wrong_bit_anywhere_is_found(
            word in 0usize..PAGE_WORDS, bit in 0u32..64, kind in kind()
        ) {
            let (mut page, entry) = play(9, &[(kind, None), (kind, Some(5))]);
            page[word] ^= 1 << bit;
            prop_assert!(judge(&page, 9, entry).is_err());
            if kind != Kind::Zero && word >= HEADER_WORDS {
                prop_assert_eq!(judge(&page, 9, entry), Err(Fault::Torn { word }));
            }
        }
    }

    #[test]
    fn stale_pages_tables_and_places_are_distinguished() {
        let (old, old_entry) = play(4, &[(Kind::Random, None)]);
        let (new, new_entry) = play(4, &[(Kind::Random, None), (Kind::Random, None)]);
        assert_eq!(judge(&old, 4, new_entry), Err(Fault::Version { holds: 1, expected: 2 }));
        assert_eq!(judge(&new, 4, old_entry), Err(Fault::Version { holds: 2, expected: 1 }));
        assert_eq!(judge(&new, 5, new_entry), Err(Fault::Misplaced { holds: 4 }));
        assert_eq!(judge(&[0; PAGE_WORDS], 4, new_entry), Err(Fault::Zero));
        let (_, zeroed) = play(4, &[(Kind::Random, None), (Kind::Zero, None)]);
        assert!(judge(&old, 4, zeroed).is_err());
        assert!(!header_matches(&old, 4, new_entry));
        assert!(!header_matches(&old, 4, zeroed));
    }

    #[test]
    fn half_a_new_page_over_half_an_old_one_is_torn() {
        let (mut page, _) = play(4, &[(Kind::Random, None)]);
        let (new, entry) = play(4, &[(Kind::Random, None), (Kind::Random, None)]);
        page[..256].copy_from_slice(&new[..256]);
        assert_eq!(judge(&page, 4, entry), Err(Fault::Torn { word: 256 }));
    }

    #[test]
    fn kinds_differ_in_how_often_words_repeat() {
        let distinct = |page: &Page| page.iter().collect::<std::collections::HashSet<_>>().len();
        assert!(distinct(&play(1, &[(Kind::Random, None)]).0) > 500);
        assert!(distinct(&play(1, &[(Kind::Compressible, None)]).0) < 150);
        assert_eq!(distinct(&play(1, &[(Kind::Zero, None)]).0), 1);
    }
}
