//! What is known about a piece of a guest's memory: the digests of its pages, until the piece is
//! dropped.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// Pages whose digests are computed together: 2 MiB.
pub const DIGEST_PAGES: u64 = PAGES as u64;
const PAGES: usize = 512;

/// Digests of a piece's pages. Only the first ones count in a piece at a block's end.
pub(super) type Prefixes = [u64; PAGES];

/// [`DIGEST_PAGES`] pages of a block, fewer at its end.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// Whether the piece is no longer part of the content. Set before its memory is given back.
    dropped: AtomicBool,
    /// Whether the memory of a dropped piece has been given back.
    given_back: AtomicBool,
    /// Whether the guest wrote it again and again before it left.
    hot: AtomicBool,
    /// Whether digests are computed.
    done: AtomicBool,
    /// Whether the piece has arrived since the guest began to arrive.
    arrived: AtomicBool,
    /// `None`: no page has one.
    digests: Mutex<Option<Box<Digests>>>,
}

#[derive(Debug)]
struct Digests {
    /// Prefix by page; 0: a zero page, not computed, or written since.
    prefixes: Prefixes,
    /// By page: the number of the other guest's memory that it was copied from and still equals; 0:
    /// none.
    origins: [u8; PAGES],
}

impl Piece {
    fn digests(&self) -> MutexGuard<'_, Option<Box<Digests>>> {
        // Numbers, each changed by one assignment.
        self.digests.lock()
    }

    /// Returns whether the piece is part of the content.
    pub(super) fn is_held(&self) -> bool {
        !self.dropped.load(Ordering::SeqCst)
    }

    /// Removes the piece from the content, and forgets its digests. Returns false if it was not
    /// part of it. Its memory may be given back only after that.
    pub(super) fn drop_it(&self) -> bool {
        let was_held = !self.dropped.swap(true, Ordering::SeqCst);
        // A later holder of the lock sees that the piece is dropped.
        *self.digests() = None;
        was_held
    }

    /// Returns whether the piece is dropped, and its memory has yet to be given back. The caller
    /// does that.
    pub(super) fn take_owed(&self) -> bool {
        !self.is_held() && !self.given_back.swap(true, Ordering::SeqCst)
    }

    pub(super) fn is_hot(&self) -> bool {
        self.hot.load(Ordering::Relaxed)
    }

    pub(super) fn mark_hot(&self) {
        self.hot.store(true, Ordering::Relaxed);
    }

    /// Returns whether its digests need no work.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Notes that its digests need no work.
    pub(super) fn mark_done(&self) {
        self.done.store(true, Ordering::Release);
    }

    /// Notes that the piece has arrived. Returns false if that was known.
    pub(super) fn arrives(&self) -> bool {
        !self.arrived.swap(true, Ordering::Relaxed)
    }

    /// Notes a page's prefix and origin.
    pub(super) fn note(&self, page: usize, prefix: u64, origin: u8) {
        let mut digests = self.digests();
        if digests.is_none() && (prefix == 0 || !self.is_held()) {
            return;
        }
        let digests = digests.get_or_insert_with(Digests::none);
        if let (Some(known), Some(of)) =
            (digests.prefixes.get_mut(page), digests.origins.get_mut(page))
        {
            (*known, *of) = (prefix, origin);
        }
    }

    /// Forgets the prefixes of pages, whose content may have changed.
    pub(super) fn forget(&self, pages: Range<usize>) {
        if let Some(digests) = self.digests().as_mut() {
            digests.prefixes.get_mut(pages).unwrap_or_default().fill(0);
        }
    }

    /// Adds prefixes that were computed, of pages of which none is known. 0: none.
    pub(super) fn add(&self, computed: &Prefixes) {
        let mut digests = self.digests();
        if self.is_held() && computed.iter().any(|prefix| *prefix != 0) {
            let known = &mut digests.get_or_insert_with(Digests::none).prefixes;
            let unknown = known.iter_mut().zip(computed).filter(|(known, _)| **known == 0);
            unknown.for_each(|(known, computed)| *known = *computed);
        }
    }

    /// Returns the prefixes of its pages, 0 where none is known; `None` if none is known of any.
    pub(super) fn prefixes(&self) -> Option<Prefixes> {
        self.digests().as_ref().map(|digests| digests.prefixes)
    }

    /// Sets the prefixes of pages to 0 whose origin satisfies `is_so`.
    pub(super) fn clear_by_origin(&self, prefixes: &mut [u64], is_so: impl Fn(u8) -> bool) {
        let digests = self.digests();
        let origins = digests.as_ref().map_or(&[][..], |digests| &digests.origins);
        let cleared = prefixes.iter_mut().zip(origins).filter(|(_, origin)| is_so(**origin));
        cleared.for_each(|(prefix, _)| *prefix = 0);
    }
}

impl Digests {
    fn none() -> Box<Digests> {
        Box::new(Digests { prefixes: [0; PAGES], origins: [0; PAGES] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_piece_knows_nothing_and_learns_nothing() {
        let piece = Piece::default();
        piece.note(3, 0, 0);
        assert_eq!((piece.prefixes(), piece.is_held(), piece.take_owed()), (None, true, false));
        piece.note(3, 77, 0);
        let mut computed = [0; PAGES];
        computed[4] = 88;
        piece.add(&computed);
        assert_eq!(piece.prefixes().unwrap()[..6], [0, 0, 0, 77, 88, 0]);
        assert!(piece.drop_it() && !piece.drop_it() && !piece.is_held());
        piece.note(3, 77, 0);
        piece.add(&computed);
        assert_eq!(piece.prefixes(), None);
        assert!(piece.take_owed() && !piece.take_owed());
    }
}
