//! Memory that a workload dirties and that can be checked while the workload runs.
//!
//! Pages are in chunks behind locks, so that writer and checker share them page by page. The table
//! of each page's expected content is another allocation, and the counts of writes are kept a third
//! time: per chunk and globally. A migration that loses a page of any of the three is detected.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use crate::{
    pattern::{self, Entry, Kind, PAGE_BYTES, PAGE_WORDS, Page},
    workload::{Mix, Touch},
};

/// Pages under one lock: 256 KiB, which take about a millisecond to check under TCG.
const CHUNK_PAGES: usize = 64;

/// Run of pages with their expected content. The slices are leaked: the guest's memory lives as
/// long as the guest.
struct Chunk {
    pages: &'static mut [Page],
    table: &'static mut [Entry],
    writes: u64,
}

/// All of the checked memory.
pub struct Memory {
    chunks: Vec<Mutex<Chunk>>,
    pages: u64,
    seed: u64,
    writes: AtomicU64,
    stale_on_write: AtomicU64,
    first_stale: Mutex<Option<u64>>,
}

/// Result of a check of all pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub pages: u64,
    /// Pages with wrong content.
    pub wrong: u64,
    /// The first of them, and its error.
    pub first_wrong: Option<(u64, String)>,
    /// Counts that disagree, as text.
    pub wrong_counts: Option<String>,
}

impl Memory {
    /// Allocates `bytes` of memory (rounded down to whole pages, at least one), untouched until
    /// [`Memory::fill`].
    pub fn new(bytes: u64, seed: u64) -> Memory {
        let pages = usize::try_from(bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
        let pages = pages.max(1);
        // Zeroed, so that the allocator requests fresh memory from the kernel and touches none of
        // it. One page more, so that it can be aligned to the machine's page boundary: a page here
        // is then one page to the tracker.
        let words = vec![0u64; (pages + 1) * PAGE_WORDS].leak();
        let misaligned = words.as_ptr().addr() % PAGE_BYTES;
        let skip = (PAGE_BYTES - misaligned) % PAGE_BYTES / size_of::<u64>();
        let pages_of_words = words[skip..].as_chunks_mut::<PAGE_WORDS>().0;
        let table = vec![Entry::UNWRITTEN; pages].leak();
        let chunks =
            pages_of_words[..pages].chunks_mut(CHUNK_PAGES).zip(table.chunks_mut(CHUNK_PAGES));
        Memory {
            chunks: chunks
                .map(|(pages, table)| Mutex::new(Chunk { pages, table, writes: 0 }))
                .collect(),
            pages: pages as u64,
            seed,
            writes: AtomicU64::new(0),
            stale_on_write: AtomicU64::new(0),
            first_stale: Mutex::new(None),
        }
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the page writes so far, the first fill included.
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    /// Returns how many pages a write found with wrong content before it overwrote them.
    pub fn stale_on_write(&self) -> u64 {
        self.stale_on_write.load(Ordering::Relaxed)
    }

    /// Writes every page for the first time, with kinds in the given shares.
    pub fn fill(&self, mix: Mix) {
        for index in 0..self.pages {
            let kind = mix.pick(pattern::mix(self.seed ^ index.wrapping_mul(3)));
            self.write(index, kind, Touch::Whole);
        }
    }

    /// Writes page `index` (below [`Memory::pages`]). A touch of single words keeps the page's
    /// kind. It becomes a whole write if the page is zero or must become so.
    pub fn write(&self, index: u64, kind: Kind, touch: Touch) {
        let (mut chunk, at) = self.chunk_of(index);
        let Chunk { pages, table, writes } = &mut *chunk;
        let (page, entry) = (&mut pages[at], &mut table[at]);
        if !pattern::header_matches(page, index, *entry) {
            self.stale_on_write.fetch_add(1, Ordering::Relaxed);
            lock(&self.first_stale).get_or_insert(index);
        }
        let touched = match touch {
            Touch::Words(words) if kind != Kind::Zero => entry.touched(words),
            Touch::Words(_) | Touch::Whole => None,
        };
        if let Some(next) = touched {
            *entry = next;
            pattern::write_touch(page, self.seed, index, next);
        } else {
            *entry = entry.rewritten(kind);
            pattern::write_whole(page, self.seed, index, *entry);
        }
        *writes = writes.wrapping_add(1);
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    /// Checks every page and every count while writes continue.
    pub fn verify(&self) -> Verdict {
        let mut verdict = Verdict::default();
        let mut scratch = Box::new([0u64; PAGE_WORDS]);
        for (chunk, first) in self.chunks.iter().zip((0u64..).step_by(CHUNK_PAGES)) {
            let chunk = lock(chunk);
            for ((page, entry), index) in chunk.pages.iter().zip(&*chunk.table).zip(first..) {
                verdict.pages += 1;
                if let Err(fault) = pattern::check(page, self.seed, index, *entry, &mut scratch) {
                    verdict.wrong += 1;
                    verdict.first_wrong.get_or_insert_with(|| (index, fault.to_string()));
                }
            }
            let versions =
                chunk.table.iter().fold(0u64, |sum, entry| sum.wrapping_add(entry.version));
            if versions != chunk.writes {
                verdict.wrong_counts.get_or_insert_with(|| {
                    format!(
                        "pages from {first}: {versions} writes by the table, {} counted",
                        chunk.writes
                    )
                });
            }
        }
        self.add_stale(&mut verdict);
        verdict.wrong_counts = verdict.wrong_counts.take().or_else(|| self.wrong_total());
        verdict
    }

    /// Adds errors that writes found before this check: the page was wrong, even if it no longer
    /// is.
    fn add_stale(&self, verdict: &mut Verdict) {
        verdict.wrong += self.stale_on_write();
        if let Some(index) = *lock(&self.first_stale) {
            verdict
                .first_wrong
                .get_or_insert_with(|| (index, "was stale when a write came to it".to_owned()));
        }
    }

    /// Compares the global count with the chunks' counts, holding every lock for that moment.
    fn wrong_total(&self) -> Option<String> {
        let chunks: Vec<_> = self.chunks.iter().map(lock).collect();
        let counted = chunks.iter().fold(0u64, |sum, chunk| sum.wrapping_add(chunk.writes));
        let total = self.writes();
        (counted != total)
            .then(|| format!("{counted} writes by the chunks, {total} counted globally"))
    }

    fn chunk_of(&self, index: u64) -> (MutexGuard<'_, Chunk>, usize) {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        (lock(&self.chunks[index / CHUNK_PAGES]), index % CHUNK_PAGES)
    }
}

/// Locks the mutex also after a thread panicked while holding it: the check shows whether the data
/// is whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicBool};

    use super::*;
    use proptest::prelude::*;

    const PAGES: u64 = 200;

    fn filled() -> Memory {
        let memory = Memory::new(PAGES * PAGE_BYTES as u64, 42);
        memory.fill(Mix::default());
        memory
    }

    fn damage(memory: &Memory, index: u64, how: impl FnOnce(&mut Page, &mut Entry)) {
        let (mut chunk, at) = memory.chunk_of(index);
        let Chunk { pages, table, .. } = &mut *chunk;
        how(&mut pages[at], &mut table[at]);
    }

    #[test]
    fn pages_are_pages_of_the_machine() {
        for chunk in &filled().chunks {
            assert_eq!(lock(chunk).pages.as_ptr().addr() % PAGE_BYTES, 0);
        }
    }

    #[test]
    fn a_filled_memory_is_right_and_counted() {
        let memory = filled();
        let verdict = memory.verify();
        assert_eq!(verdict, Verdict { pages: PAGES, ..Verdict::default() });
        assert_eq!(memory.writes(), PAGES);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_writes_leave_it_right(
            writes in proptest::collection::vec((0..PAGES, any::<u64>(), 0u16..20), 0..300)
        ) {
            let memory = filled();
            for (index, draw, words) in &writes {
                let touch = if *words == 0 { Touch::Whole } else { Touch::Words(*words) };
                memory.write(*index, Mix::default().pick(*draw), touch);
            }
            prop_assert_eq!(memory.verify(), Verdict { pages: PAGES, ..Verdict::default() });
            prop_assert_eq!(memory.writes(), PAGES + writes.len() as u64);
        }

        #[test]
        fn one_wrong_word_is_found(index in 0..PAGES, word in 0usize..512, change in 1u64..) {
            let memory = filled();
            damage(&memory, index, |page, _| page[word] ^= change);
            let verdict = memory.verify();
            let first_wrong = verdict.first_wrong.map(|found| found.0);
            prop_assert_eq!((verdict.wrong, first_wrong), (1, Some(index)));
        }

        #[test]
        fn a_stale_page_is_found(index in 0..PAGES) {
            let memory = filled();
            let mut old = [0; PAGE_WORDS];
            damage(&memory, index, |page, _| old = *page);
            memory.write(index, Kind::Random, Touch::Whole);
            damage(&memory, index, |page, _| *page = old);
            prop_assert_eq!(memory.verify().wrong, 1);
            // The error stays recorded if the workload overwrites the page before it is checked.
            memory.write(index, Kind::Random, Touch::Whole);
            let verdict = memory.verify();
            let first_wrong = verdict.first_wrong.map(|found| found.0);
            prop_assert_eq!((verdict.wrong, first_wrong), (1, Some(index)));
        }

        #[test]
        fn a_stale_table_is_found(index in 0..PAGES) {
            let memory = filled();
            let mut old = Entry::UNWRITTEN;
            damage(&memory, index, |_, entry| old = *entry);
            memory.write(index, Kind::Random, Touch::Whole);
            damage(&memory, index, |_, entry| *entry = old);
            let verdict = memory.verify();
            prop_assert_eq!(verdict.wrong, 1);
            prop_assert!(verdict.wrong_counts.is_some());
        }
    }

    #[test]
    fn page_and_table_stale_together_show_in_the_counts() {
        let memory = filled();
        let mut old = ([0; PAGE_WORDS], Entry::UNWRITTEN);
        damage(&memory, 7, |page, entry| old = (*page, *entry));
        memory.write(7, Kind::Random, Touch::Whole);
        damage(&memory, 7, |page, entry| (*page, *entry) = old);
        let verdict = memory.verify();
        assert_eq!(verdict.wrong, 0);
        assert!(verdict.wrong_counts.is_some());
    }

    #[test]
    fn a_stale_global_count_shows() {
        let memory = filled();
        memory.writes.fetch_sub(1, Ordering::Relaxed);
        assert!(memory.verify().wrong_counts.is_some());
    }

    #[test]
    fn checks_while_the_workload_goes_on() {
        let memory = Arc::new(filled());
        let stop = Arc::new(AtomicBool::new(false));
        let writer = std::thread::spawn({
            let (memory, stop) = (memory.clone(), stop.clone());
            move || {
                let mut draw = 1u64;
                while !stop.load(Ordering::Relaxed) {
                    draw = pattern::mix(draw);
                    memory.write(draw % PAGES, Mix::default().pick(draw), Touch::Words(8));
                }
            }
        });
        for _ in 0..200 {
            assert_eq!(memory.verify(), Verdict { pages: PAGES, ..Verdict::default() });
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    }
}
