//! Simulated accesses of a guest to missing pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use godwit_lanes::Stream;
use godwit_migration::drive::page_in::Faults;
use godwit_ram::{Access, PageRange, Region, TrackError};
use parking_lot::Mutex;

/// Simulated accesses: the guest accesses three pages of each watched chunk, and each page shown
/// must be as at the source.
pub(crate) struct FakeFaults {
    pub(crate) from: Vec<Arc<Region>>,
    pub(crate) to: Vec<Arc<Region>>,
    /// Number of times that the streams are cut when a page is shown.
    pub(crate) cuts: AtomicUsize,
    pub(crate) streams: Arc<Mutex<Vec<Stream>>>,
    pub(crate) watched: Mutex<Vec<(usize, PageRange)>>,
    pub(crate) reported: AtomicBool,
    /// Whether the guest runs: nothing is cut before.
    pub(crate) runs: Arc<AtomicBool>,
}

impl FakeFaults {
    fn is_watched(&self, block: usize, pages: PageRange) -> bool {
        let watched = self.watched.lock();
        watched.iter().any(|(of, chunk)| *of == block && chunk.intersect(pages) == pages)
    }
}

impl Faults for FakeFaults {
    fn watch(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        self.watched.lock().push((block, pages));
        Ok(())
    }

    fn mapped(&self, block: usize, pages: PageRange) -> Result<Vec<PageRange>, TrackError> {
        // Accesses to the first two pages of block 1 do not wait.
        Ok(Vec::from_iter(Some(PageRange::new(0, 2)).filter(|_| block == 1 && pages.first == 0)))
    }

    fn accesses(&self, limit: Duration, out: &mut Vec<Access>) -> Result<(), TrackError> {
        if self.reported.swap(true, Ordering::SeqCst) {
            std::thread::park_timeout(limit);
            return Ok(());
        }
        for (block, chunk) in self.watched.lock().iter() {
            let pages = [chunk.first, chunk.first + 9, chunk.end() - 1, chunk.first + 9];
            out.extend(pages.map(|page| Access { block: *block, page, thread: 1 }));
        }
        Ok(())
    }

    fn show(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        if !self.is_watched(block, pages) {
            return Err(TrackError::OutOfBounds { block, range: pages });
        }
        let bytes = |regions: &[Arc<Region>]| {
            let mut bytes = vec![0; usize::try_from(pages.len_bytes()).unwrap()];
            regions[block].copy_out(pages.offset_bytes(), &mut bytes).unwrap();
            bytes
        };
        assert!(
            bytes(&self.from) == bytes(&self.to),
            "{pages:?} of block {block} are shown and are not there"
        );
        if !self.runs.load(Ordering::SeqCst) {
            return Ok(());
        }
        let cut =
            self.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |cuts| cuts.checked_sub(1));
        if cut.is_ok() {
            self.streams.lock().iter().for_each(Stream::close);
        }
        Ok(())
    }

    fn release(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        self.watched.lock().retain(|watched| *watched != (block, pages));
        Ok(())
    }

    fn end(&self) {
        assert!(self.watched.lock().is_empty(), "chunks that are whole are still watched");
    }
}
