//! What is known about a piece of a guest's memory: the digests of its pages, until the piece is
//! dropped.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// Pages whose digests are computed together: 2 MiB.
pub const DIGEST_PAGES: u64 = PAGES as u64;
const PAGES: usize = 512;

/// Digests of an image's pages, which outlive the file that they were computed from: an image stays
/// known while nothing has it open. Its size is that of the image.
#[derive(Clone, Debug)]
pub struct Digested(pub(super) Arc<[Piece]>);

impl Digested {
    /// Memory of one of its pieces without digests, bytes.
    const PIECE_BYTES: u64 = size_of::<Piece>() as u64;
    /// Memory of the digests of a piece, bytes.
    const DIGESTS_BYTES: u64 = size_of::<Digests>() as u64;

    /// Creates the digests of an image of so many pages, none of them known.
    #[must_use]
    pub fn new(pages: u64) -> Digested {
        Digested(pieces(pages))
    }

    /// Takes over what is known of an image that had another size, as guesses.
    pub fn take_from(&self, earlier: &Digested) {
        for (piece, earlier) in self.0.iter().zip(&*earlier.0) {
            *piece.digests() = earlier.digests().take();
        }
    }

    /// Returns the memory that the digests of so many pages take at most, bytes.
    #[must_use]
    pub fn most_bytes(pages: u64) -> u64 {
        pages.div_ceil(DIGEST_PAGES) * (Digested::PIECE_BYTES + Digested::DIGESTS_BYTES)
    }

    /// Returns how many pages an image may have whose pieces without digests take so many bytes.
    #[must_use]
    pub fn most_pages(bytes: u64) -> u64 {
        bytes / Digested::PIECE_BYTES * DIGEST_PAGES
    }

    /// Returns the memory that it takes, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let known = self.0.iter().filter(|piece| piece.has_digests()).count() as u64;
        self.0.len() as u64 * Digested::PIECE_BYTES + known * Digested::DIGESTS_BYTES
    }

    /// Returns the number of pages in pieces of which something is known.
    #[must_use]
    pub fn known_pages(&self) -> u64 {
        self.0.iter().filter(|piece| piece.has_digests()).count() as u64 * DIGEST_PAGES
    }

    /// Notes that the image has changed: every digest is a guess from now on, until it is computed
    /// again.
    pub fn outdate(&self) {
        self.0.iter().for_each(|piece| piece.done.store(false, Ordering::Release));
    }
}

/// Creates the pieces of a block of so many pages.
pub(super) fn pieces(pages: u64) -> Arc<[Piece]> {
    (0..pages.div_ceil(DIGEST_PAGES)).map(|_| Piece::default()).collect()
}

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

    /// Creates a piece that is not part of the content yet.
    pub(super) fn absent() -> Piece {
        Piece {
            dropped: AtomicBool::new(true),
            given_back: AtomicBool::new(true),
            ..Piece::default()
        }
    }

    /// Makes an absent piece part of the content, with all of its digests.
    pub(super) fn appear(&self, prefixes: &Prefixes) {
        *self.digests() = Some(Box::new(Digests { prefixes: *prefixes, origins: [0; PAGES] }));
        self.mark_done();
        self.given_back.store(false, Ordering::SeqCst);
        self.dropped.store(false, Ordering::SeqCst);
    }

    /// Replaces all digests. Returns false if they were the same.
    pub(super) fn replace(&self, prefixes: &Prefixes) -> bool {
        let mut digests = self.digests();
        let is_same = match digests.as_ref() {
            Some(known) => known.prefixes == *prefixes,
            None => prefixes.iter().all(|prefix| *prefix == 0),
        };
        if !is_same {
            let is_zero = prefixes.iter().all(|prefix| *prefix == 0);
            let new = || Box::new(Digests { prefixes: *prefixes, origins: [0; PAGES] });
            *digests = (!is_zero).then(new);
        }
        self.mark_done();
        !is_same
    }

    fn has_digests(&self) -> bool {
        self.digests().is_some()
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
