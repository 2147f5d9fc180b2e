//! Hashes of pages. A page has four chunks of BLAKE3, fewer than AVX2 and AVX-512 hash side by
//! side. So the chunks of up to 16 pages are hashed together. The results are BLAKE3's.

use blake3::IncrementCounter;
use blake3::platform::Platform;
use godwit_wire::{PAGE_SIZE, PageHash};

/// Content of a page.
pub type Page = [u8; PAGE_SIZE as usize];

// Constants of the BLAKE3 specification, section 2.
const CHUNK_BYTES: usize = 1024;
const HASH_BYTES: usize = 32;
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const PARENT: u8 = 4;
const ROOT: u8 = 8;
const KEY: [u32; 8] = [
    0x6A09_E667,
    0xBB67_AE85,
    0x3C6E_F372,
    0xA54F_F53A,
    0x510E_527F,
    0x9B05_688C,
    0x1F83_D9AB,
    0x5BE0_CD19,
];

const CHUNKS: usize = PAGE_SIZE as usize / CHUNK_BYTES;
// The tree of a page has two levels of parents.
const _: () = assert!(CHUNKS == 4);

/// Pages hashed together: the lanes of AVX-512.
const TOGETHER: usize = 16;
/// Lanes of AVX2. With AVX-512 a group of eight takes half the time of sixteen.
const HALF: usize = 8;
/// From so many pages on, one group of sixteen, or of eight, is faster than the alternatives, even
/// if some lanes have no page (measured with AVX-512).
const LEAST_FOR_ALL: usize = 12;
const LEAST_FOR_HALF: usize = 4;

/// Two values of the tree, which a parent hashes.
type Pair = [u8; 2 * HASH_BYTES];

/// Returns the hash by which references identify a page.
#[must_use]
pub fn hash_page(page: &[u8]) -> PageHash {
    blake3::hash(page).into()
}

/// Returns the pages that bytes consist of. A part of a page at their end is left out.
pub fn pages_of(bytes: &[u8]) -> impl Iterator<Item = &Page> {
    bytes.as_chunks().0.iter()
}

/// Returns the hash of each page, as [`hash_page`] does. With AVX-512 it takes half the time if
/// there are many; with AVX2 it was not measured.
#[must_use]
pub fn hash_pages<'a>(pages: impl IntoIterator<Item = &'a Page>) -> Vec<PageHash> {
    let pages: Vec<&Page> = pages.into_iter().collect();
    let mut hashes = Vec::with_capacity(pages.len());
    let platform = Platform::detect();
    let mut rest = pages.as_slice();
    while platform.simd_degree() >= HALF && rest.len() >= LEAST_FOR_HALF {
        let lanes = if rest.len() >= LEAST_FOR_ALL { TOGETHER } else { HALF };
        let (group, after) = rest.split_at(rest.len().min(lanes));
        hash_group(platform, group, lanes, &mut hashes);
        rest = after;
    }
    hashes.extend(rest.iter().map(|page| hash_page(*page)));
    hashes
}

/// Hashes up to so many pages. Lanes without a page of their own hash the first one.
fn hash_group(platform: Platform, pages: &[&Page], lanes: usize, hashes: &mut Vec<PageHash>) {
    let mut values = [[0; HASH_BYTES]; TOGETHER];
    // Of each page, the parents of its first and of its last two chunks.
    let mut parents = [[[0; 2 * HASH_BYTES]; TOGETHER]; 2];
    for number in 0..CHUNKS {
        let chunks: [&[u8; CHUNK_BYTES]; TOGETHER] = std::array::from_fn(|lane| {
            let page = pages.get(lane).unwrap_or(&pages[0]);
            &page.as_chunks().0[number]
        });
        platform.hash_many(
            &chunks[..lanes],
            &KEY,
            number as u64,
            IncrementCounter::No,
            0,
            CHUNK_START,
            CHUNK_END,
            values.as_flattened_mut(),
        );
        put(&values, &mut parents[number / 2], number % 2);
    }
    let mut roots = [[0; 2 * HASH_BYTES]; TOGETHER];
    for (half, parents) in parents.iter().enumerate() {
        hash_parents(platform, &parents[..lanes], PARENT, &mut values);
        put(&values, &mut roots, half);
    }
    hash_parents(platform, &roots[..lanes], PARENT | ROOT, &mut values);
    hashes.extend_from_slice(&values[..pages.len()]);
}

/// Puts values into one half of pairs.
fn put(values: &[PageHash; TOGETHER], pairs: &mut [Pair; TOGETHER], half: usize) {
    for (pair, value) in pairs.iter_mut().zip(values) {
        pair.as_chunks_mut().0[half] = *value;
    }
}

fn hash_parents(platform: Platform, pairs: &[Pair], flags: u8, values: &mut [PageHash; TOGETHER]) {
    let blocks: Vec<&Pair> = pairs.iter().collect();
    let no = IncrementCounter::No;
    platform.hash_many(&blocks, &KEY, 0, no, flags, 0, 0, values.as_flattened_mut());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns pages with random content.
    fn pages(seeds: &[u64]) -> Vec<Page> {
        let page = |seed: &u64| {
            let mut page = [0; PAGE_SIZE as usize];
            blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut page);
            page
        };
        seeds.iter().map(page).collect()
    }

    fn platforms() -> Vec<Platform> {
        let portable = [Some(Platform::portable()), Some(Platform::detect())];
        #[cfg(target_arch = "x86_64")]
        let vectors = [Platform::sse2(), Platform::sse41(), Platform::avx2(), Platform::avx512()];
        #[cfg(not(target_arch = "x86_64"))]
        let vectors = [];
        portable.into_iter().chain(vectors).flatten().collect()
    }

    proptest! {
        #[test]
        fn pages_hashed_together_have_the_hashes_of_single_ones(
            seeds in prop::collection::vec(any::<u64>(), 0..3 * TOGETHER),
            rest in 0..PAGE_SIZE as usize,
        ) {
            let mut bytes = pages(&seeds).as_flattened().to_vec();
            bytes.resize(bytes.len() + rest, 7);
            let single: Vec<_> = pages_of(&bytes).map(|page| hash_page(page)).collect();
            prop_assert_eq!(hash_pages(pages_of(&bytes)), single);
        }

        #[test]
        fn every_instruction_set_gives_the_same_hashes(
            seeds in prop::collection::vec(any::<u64>(), 1..=TOGETHER),
        ) {
            let pages = pages(&seeds);
            let single: Vec<_> = pages.iter().map(|page| hash_page(page)).collect();
            let group: Vec<_> = pages.iter().collect();
            for platform in platforms() {
                let mut hashes = Vec::new();
                hash_group(platform, &group, TOGETHER, &mut hashes);
                prop_assert_eq!(&hashes, &single, "{:?}", platform);
            }
        }
    }
}
