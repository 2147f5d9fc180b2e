//! Tracking of the guest's writes, behind a trait.

use godwit_ram::{DirtyCount, DirtyTracker, FaultFigures, PageRange, ThrottleFigures, TrackError};
use godwit_types::TrackingUse;

/// Size of a guest from which on its dirty pages are found by faults: 512 MiB. Two scans of its
/// page tables would be in the pause otherwise. At 1 GiB, faults halve the time of the last pages
/// (docs/benchmarks.md); the end-to-end tests' small guests are below.
const BY_FAULTS_FROM_BYTES: u64 = 512 << 20;

/// Scattered pages per second that a guest tracked by faults may write before the first round.
const SCATTERED_PAGES_PER_S: f64 = 2000.0;
/// Scattered pages that it may write in addition: what it writes all the time is written, and
/// noted, at once.
const SCATTERED_BURST_PAGES: u64 = 1000;

/// Returns whether faults find the dirty pages of a guest with so much memory.
#[must_use]
pub fn tracks_by_faults(permitted: TrackingUse, guest_bytes: u64) -> bool {
    match permitted {
        TrackingUse::Auto => guest_bytes >= BY_FAULTS_FROM_BYTES,
        TrackingUse::Faults => true,
        TrackingUse::Scans => false,
    }
}

/// Tracking of the guest's writes. In the product this is [`godwit_ram::DirtyTracker`].
pub trait Tracking: Send {
    /// Protects all memory: from the return on, each write is seen.
    ///
    /// # Errors
    /// The writes cannot be seen: this engine cannot move the guest.
    fn start(&mut self) -> Result<(), TrackError>;

    /// Chooses for good how dirty pages are found. Nothing has been sent: pages that are dirty may
    /// be forgotten.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn settle(&mut self) -> Result<(), TrackError> {
        Ok(())
    }

    /// Checks that what is known of dirty pages is complete, before the guest is stopped.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn check_notes(&mut self) -> Result<(), TrackError> {
        Ok(())
    }

    /// Reports the pages of `block` within `within` that were written since they were last
    /// protected, and protects them again. Stops after `max_pages`; returns the page to go on from.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError>;

    /// Reports the pages of `block` within `within` that were written since they were last
    /// protected, and leaves them dirty.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn peek_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError>;

    /// Counts the dirty pages of all blocks and leaves them dirty.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn count_dirty(&self) -> Result<DirtyCount, TrackError>;

    /// Limits the guest to so many newly written pages per second; `None` lifts the limit. It
    /// applies to memory that is taken from then on.
    ///
    /// # Errors
    /// It is impossible; the guest runs as before.
    fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError>;

    /// Adjusts the throttle to keep the limit, if the means requires that. Call it often while a
    /// limit is in force; it checks the clock itself.
    fn steer(&mut self) {}

    /// Sets whether memory may change over in [`Tracking::take_dirty`]. It must not while a thread
    /// reads pages that earlier calls returned.
    fn let_change(&mut self, may_change: bool);

    /// Returns the memory that changed over in the last [`Tracking::take_dirty`], in its block.
    fn changed_over(&self) -> Vec<PageRange>;

    /// Announces that the guest is about to be stopped: writes are no longer held for long, and no
    /// more memory changes over.
    fn let_stop(&mut self);

    /// Returns the throttle's statistics so far.
    fn throttle_figures(&self) -> ThrottleFigures;

    /// Returns the statistics of the faults by which dirty pages are found.
    fn fault_figures(&self) -> FaultFigures {
        FaultFigures::default()
    }

    /// Returns the lowest share of CPU time that its vCPUs got, of what they could take, or `None`
    /// if their CPU time was not limited.
    fn least_cpu_share(&self) -> Option<f64> {
        None
    }
}

impl Tracking for DirtyTracker {
    fn start(&mut self) -> Result<(), TrackError> {
        DirtyTracker::start(self)
    }

    fn settle(&mut self) -> Result<(), TrackError> {
        DirtyTracker::settle(self, SCATTERED_BURST_PAGES, SCATTERED_PAGES_PER_S)
    }

    fn check_notes(&mut self) -> Result<(), TrackError> {
        DirtyTracker::check_notes(self)
    }

    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        DirtyTracker::take_dirty(self, block, within, max_pages, out)
    }

    fn peek_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
        DirtyTracker::peek_dirty(self, block, within, out)
    }

    fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        DirtyTracker::count_dirty(self)
    }

    fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError> {
        DirtyTracker::throttle(self, pages_per_s)
    }

    fn let_change(&mut self, may_change: bool) {
        DirtyTracker::let_change(self, may_change);
    }

    fn changed_over(&self) -> Vec<PageRange> {
        DirtyTracker::changed_over(self).to_vec()
    }

    fn let_stop(&mut self) {
        DirtyTracker::let_stop(self);
    }

    fn throttle_figures(&self) -> ThrottleFigures {
        DirtyTracker::throttle_figures(self)
    }

    fn fault_figures(&self) -> FaultFigures {
        DirtyTracker::fault_figures(self)
    }
}
