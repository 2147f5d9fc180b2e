//! Zero-page detection. It runs on every page of a guest, so it must run at memory speed.

use std::ptr;

use crate::pages::PAGE_SIZE;

const PAGE_WORDS: usize = 512;
const _: () = assert!(size_of::<[u64; PAGE_WORDS]>() as u64 == PAGE_SIZE);
/// Words folded before the result is tested: a page that is not zero usually shows within its first
/// 512 bytes.
const CHUNK_WORDS: usize = 64;

/// Returns whether the page holds only zeros.
///
/// If the page changes meanwhile, the answer is of no single moment. A page that was written after
/// its protection is reported as dirty, and is judged again.
///
/// # Safety
/// `page` points to [`PAGE_SIZE`] mapped, readable bytes and is aligned to 8. Other processes may
/// write them; no code in this process holds a reference to them.
pub(crate) unsafe fn is_zero_page(page: *const u64) -> bool {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the caller upholds the contract; the processor has AVX2.
        return unsafe { is_zero_page_avx2(page) };
    }
    // SAFETY: the caller upholds the contract.
    unsafe { fold(page) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn is_zero_page_avx2(page: *const u64) -> bool {
    // SAFETY: the caller upholds the contract.
    unsafe { fold(page) }
}

/// ORs the page together chunk by chunk. Each chunk is read once, by value, and the loop over the
/// copy vectorises.
#[inline(always)]
unsafe fn fold(page: *const u64) -> bool {
    for start in (0..PAGE_WORDS).step_by(CHUNK_WORDS) {
        // SAFETY: the chunk lies within the page.
        let chunk = unsafe { ptr::read(page.wrapping_add(start).cast::<[u64; CHUNK_WORDS]>()) };
        if chunk.iter().fold(0, |all, word| all | word) != 0 {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_anywhere_makes_a_page_not_zero() {
        let mut page = vec![0u64; PAGE_WORDS];
        // SAFETY: the vector is a page long and not written during the call.
        assert!(unsafe { is_zero_page(page.as_ptr()) });
        for word in 0..PAGE_WORDS {
            page[word] = 1 << (word % 64);
            // SAFETY: as above.
            assert!(!unsafe { is_zero_page(page.as_ptr()) }, "word {word}");
            // SAFETY: as above.
            assert!(!unsafe { fold(page.as_ptr()) }, "word {word}");
            page[word] = 0;
        }
    }
}
