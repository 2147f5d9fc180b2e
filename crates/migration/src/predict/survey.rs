//! Survey of a guest's memory before it moves: how many pages were ever written and, from a sample,
//! how many of those hold data and how well they compress. It only reads, some MiB whatever the
//! guest's size.
//!
//! The file of guest memory itself shows which pages it never held. Pages that were written and are
//! zero, or zero again, show only in the sample.

use std::sync::Arc;

use godwit_lanes::try_codec;
use godwit_ram::pages::{intersection, page_count, push_merged};
use godwit_ram::{CHUNK_PAGES, PAGE_SIZE, PageRange, RamError, Region};
use godwit_wire::Codec;

use super::cost::{Content, Trial};

/// Number of pages examined for zeros, spread over all pages.
const LOOKED_AT: u64 = 4096;
/// Number of places from which pieces are compressed as a trial, spread over all pages.
const PIECES: u64 = 256;
/// Maximum pages of all pieces together.
const TRIED_PAGES: u64 = 2048;
/// Maximum pages of one piece: as many as are compressed in one piece.
const PIECE_PAGES: u64 = 64;
/// Step of the order in which places are visited, which spreads them too: a prime.
const STEP: usize = 97;

/// Content of a guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Survey {
    /// Pages that were ever written.
    pub written_pages: u64,
    /// Chunks of [`CHUNK_PAGES`] that contain those pages.
    pub chunks: u64,
    /// Content of those pages.
    pub content: Content,
}

impl Survey {
    /// Examines all memory that was ever written.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn of_memory(regions: &[Arc<Region>]) -> Result<Survey, RamError> {
        let mut written = Vec::new();
        for region in regions {
            let mut runs = Vec::new();
            region.data_ranges(region.all_pages(), &mut runs)?;
            written.push(runs);
        }
        Survey::of(regions, &written)
    }

    /// Examines only these pages, block by block.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn of(regions: &[Arc<Region>], pages: &[Vec<PageRange>]) -> Result<Survey, RamError> {
        let written_pages = pages.iter().map(|runs| page_count(runs)).sum();
        let looked_at = spread(pages, LOOKED_AT);
        let holds = |&(block, page): &(usize, u64)| {
            regions.get(block).is_some_and(|region| !region.is_zero(page))
        };
        let holding = looked_at.iter().filter(|at| holds(at)).count();
        let mut pieces = Vec::new();
        let places = spread(pages, PIECES);
        let in_steps = (0..places.len()).map(|number| places[number * STEP % places.len()]);
        let mut tried_bytes = 0;
        for (block, page) in in_steps {
            if tried_bytes >= TRIED_PAGES * PAGE_SIZE {
                break;
            }
            if let (Some(region), Some(listed)) = (regions.get(block), pages.get(block)) {
                let piece = piece_with(region, listed, page)?;
                tried_bytes += piece.len() as u64;
                pieces.extend((!piece.is_empty()).then_some(piece));
            }
        }
        let trial = |codec| {
            let (ratios, effort) = try_codec(codec, &pieces);
            Trial::of(&ratios, effort)
        };
        let data_share = holding as f64 / looked_at.len().max(1) as f64;
        let content = Content { data_share, lz4: trial(Codec::Lz4), zstd: trial(Codec::Zstd) };
        let chunks = pages.iter().map(|runs| chunks_of(runs)).sum();
        Ok(Survey { written_pages, chunks, content })
    }

    /// Returns the number of pages that hold data other than zeros.
    #[must_use]
    pub fn data_pages(&self) -> u64 {
        super::whole(self.written_pages as f64 * self.content.data_share)
    }
}

/// Returns the piece in which `page` would be compressed: part of the run of `listed` pages with
/// data, within its chunk. The piece is empty if the page holds only zeros.
fn piece_with(region: &Region, listed: &[PageRange], page: u64) -> Result<Vec<u8>, RamError> {
    let chunk = PageRange::new(page / CHUNK_PAGES * CHUNK_PAGES, CHUNK_PAGES);
    let mut holding = Vec::new();
    let near = intersection(listed, &[chunk]);
    for page in
        near.iter().flat_map(|run| run.first..run.end()).filter(|page| !region.is_zero(*page))
    {
        push_merged(&mut holding, 0, PageRange::new(page, 1));
    }
    let piece =
        holding.iter().flat_map(|run| run.chunks(PIECE_PAGES)).find(|piece| piece.contains(page));
    let piece = piece.unwrap_or(PageRange::new(page, 0));
    let mut bytes = vec![0; usize::try_from(piece.len_bytes()).unwrap_or_default()];
    region.copy_out(piece.offset_bytes(), &mut bytes)?;
    Ok(bytes)
}

/// Counts the chunks that contain ascending runs.
fn chunks_of(runs: &[PageRange]) -> u64 {
    let mut counted_until = 0;
    let mut count = 0;
    for run in runs.iter().filter(|run| !run.is_empty()) {
        let first = (run.first / CHUNK_PAGES).max(counted_until);
        let end = (run.end() - 1) / CHUNK_PAGES + 1;
        count += end.saturating_sub(first);
        counted_until = end.max(counted_until);
    }
    count
}

/// Selects at most so many pages of several blocks, evenly spread. Returns block number and page.
fn spread(blocks: &[Vec<PageRange>], most: u64) -> Vec<(usize, u64)> {
    let all: u64 = blocks.iter().map(|runs| page_count(runs)).sum();
    let count = most.min(all);
    let place_of = |number: u64| u128::from(number) * u128::from(all) / u128::from(count.max(1));
    let mut found = Vec::new();
    let mut before = 0_u128;
    let runs = blocks
        .iter()
        .enumerate()
        .flat_map(|(block, runs)| runs.iter().map(move |run| (block, run)));
    for (block, run) in runs {
        let end = before + u128::from(run.count);
        while let Some(place) = Some(place_of(found.len() as u64))
            .filter(|place| *place < end && (found.len() as u64) < count)
        {
            found.push((block, run.first + u64::try_from(place - before).unwrap_or_default()));
        }
        before = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: usize = 4096;

    /// Creates a file of guest memory: a quarter noise, a quarter text, and otherwise only zeros
    /// that were written.
    fn memory(folder: &std::path::Path) -> Arc<Region> {
        let region = Region::create(&folder.join("web.0.ram"), 4096 * PAGE_SIZE, None).unwrap();
        let mut state = 1_u64;
        let noise = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        });
        let noise: Vec<u8> = noise.take(1024 * PAGE_BYTES).collect();
        let text: Vec<u8> = b"a page of text, again and again. ".repeat(128_000);
        region.copy_in(0, &noise).unwrap();
        region.copy_in(1024 * PAGE_SIZE, &text[..1024 * PAGE_BYTES]).unwrap();
        region.copy_in(2048 * PAGE_SIZE, &vec![0; 1024 * PAGE_BYTES]).unwrap();
        Arc::new(region)
    }

    #[test]
    fn written_zero_and_compressible_pages_are_found() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let regions = [memory(folder.path())];
        let survey = Survey::of_memory(&regions).unwrap();
        assert_eq!((survey.written_pages, survey.data_pages(), survey.chunks), (3072, 2048, 6));
        let zstd = survey.content.zstd.unwrap();
        assert!((0.4..0.6).contains(&zstd.ratio), "{zstd:?}");
        // Only the noise.
        let some =
            Survey::of(&regions, &[vec![PageRange::new(0, 3), PageRange::new(500, 200)]]).unwrap();
        assert_eq!((some.written_pages, some.data_pages(), some.chunks), (203, 203, 2));
        assert!(some.content.lz4.unwrap().ratio > 0.99, "{some:?}");
    }

    #[test]
    fn no_pages_give_no_knowledge() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let region =
            Region::create(&folder.path().join("web.0.ram"), 64 * PAGE_SIZE, None).unwrap();
        let survey = Survey::of_memory(&[Arc::new(region)]).unwrap();
        assert_eq!(survey, Survey::default());
        assert_eq!(survey.data_pages(), 0);
    }
}
