//! Tracking of a guest with both means to slow its writers, of which one is in use at a time.
//! [`crate::throttle`] explains which, and why a change of means loses no page.

use std::io;
use std::time::{Duration, Instant};

use godwit_ram::pages::page_count;
use godwit_ram::{DirtyCount, DirtyTracker, FaultFigures, PageRange, ThrottleFigures, TrackError};

use super::tracking::Tracking;
use crate::throttle::{LOOK_INTERVAL, MeansUse, QuotaLoop, means_for};
use godwit_types::ThrottleMeans;

/// Looking at what the guest dirties takes at most one part in so many of the time, because a look
/// reads all of its page tables.
const LOOK_PART: u32 = 10;

/// CPU time of the guest's vCPUs. In the product this is a cgroup of their threads.
///
/// Dropping it lifts the limit and undoes everything that was set up.
pub trait CpuQuota: Send {
    /// Limits the vCPUs to a share of the CPU time that they could take all together, above 0 and
    /// up to 1. `None` lifts the limit at once.
    ///
    /// # Errors
    /// The limit cannot be set. If it was the first share, nothing has changed.
    fn set_share(&mut self, share: Option<f64>) -> io::Result<()>;
}

/// Permitted means, and the guest that they apply to.
#[derive(Clone, Copy, Debug)]
pub struct Throttling {
    pub means: MeansUse,
    /// Number of the guest's vCPUs.
    pub vcpus: usize,
    /// The hypervisor's process, for errors.
    pub pid: i32,
}

/// Tracking whose throttle is faults or a quota.
pub struct Throttled<T, Q> {
    tracker: T,
    quota: Q,
    how: Throttling,
    /// The quota's control loop and its limit in pages per second, while the quota is in use.
    looking: Option<Looking>,
    held_by: Option<ThrottleMeans>,
    control: QuotaLoop,
    /// Whether the quota has been used.
    quota_used: bool,
    /// Whether faults are unavailable here.
    no_faults: bool,
    no_quota: bool,
    /// Pages taken since the last look.
    taken_pages: u64,
}

/// Control loop in progress.
struct Looking {
    limit_pages_per_s: f64,
    last: Instant,
    dirty_pages: u64,
    every: Duration,
}

impl<T: Tracking, Q: CpuQuota> Throttled<T, Q> {
    /// Creates tracking that slows no writer yet.
    pub fn new(tracker: T, quota: Q, how: Throttling) -> Self {
        Throttled {
            tracker,
            quota,
            how,
            looking: None,
            held_by: None,
            control: QuotaLoop::default(),
            quota_used: false,
            no_faults: false,
            no_quota: false,
            taken_pages: 0,
        }
    }

    /// Returns the means for this limit, the better one first.
    fn means(&self, pages_per_s: f64) -> Vec<ThrottleMeans> {
        let best = || {
            means_for(pages_per_s, self.tracker.throttle_figures(), self.how.vcpus, self.held_by)
        };
        let candidates = match self.how.means {
            MeansUse::Faults => vec![ThrottleMeans::Faults],
            MeansUse::Quota => vec![ThrottleMeans::Quota],
            MeansUse::Auto if best() == ThrottleMeans::Quota => {
                vec![ThrottleMeans::Quota, ThrottleMeans::Faults]
            }
            MeansUse::Auto => vec![ThrottleMeans::Faults, ThrottleMeans::Quota],
        };
        let may = |means: &ThrottleMeans| match means {
            ThrottleMeans::Faults => !self.no_faults,
            ThrottleMeans::Quota => !self.no_quota,
        };
        candidates.into_iter().filter(may).collect()
    }

    fn hold(&mut self, pages_per_s: f64) -> Result<(), TrackError> {
        let mut refused = None;
        for means in self.means(pages_per_s) {
            let held = match means {
                ThrottleMeans::Faults => self.hold_by_faults(pages_per_s),
                ThrottleMeans::Quota => self.hold_by_quota(pages_per_s),
            };
            match held {
                Ok(()) => {
                    if self.held_by.replace(means) != Some(means) {
                        tracing::info!(?means, pages_per_s, "the guest's writers are slowed");
                    }
                    return Ok(());
                }
                Err(error) => {
                    tracing::info!(?means, %error, "cannot slow the guest's writers by this means");
                    match means {
                        ThrottleMeans::Faults => self.no_faults = true,
                        ThrottleMeans::Quota => self.no_quota = true,
                    }
                    refused.get_or_insert(error);
                }
            }
        }
        self.held_by = None;
        Err(refused.unwrap_or(TrackError::NoKernelFaults))
    }

    fn hold_by_faults(&mut self, pages_per_s: f64) -> Result<(), TrackError> {
        self.tracker.throttle(Some(pages_per_s))?;
        self.let_processors_go();
        Ok(())
    }

    fn hold_by_quota(&mut self, pages_per_s: f64) -> Result<(), TrackError> {
        if let Some(looking) = &mut self.looking {
            looking.limit_pages_per_s = pages_per_s;
            return Ok(());
        }
        // The quota is set up while the guest may still use all CPU time, so that a failure changes
        // nothing.
        self.quota.set_share(Some(1.0)).map_err(|error| self.quota_failed(error))?;
        // Memory held by faults stays so, with each write answered at once.
        self.tracker.throttle(None)?;
        self.quota_used = true;
        self.control.begin();
        let dirty_pages = self.tracker.count_dirty()?.pages;
        self.taken_pages = 0;
        let (limit_pages_per_s, last, every) = (pages_per_s, Instant::now(), LOOK_INTERVAL);
        self.looking = Some(Looking { limit_pages_per_s, last, dirty_pages, every });
        Ok(())
    }

    fn quota_failed(&self, source: io::Error) -> TrackError {
        TrackError::Io { what: "slow the vCPUs", pid: self.how.pid, source }
    }

    /// Lifts the CPU limit of the vCPUs.
    fn let_processors_go(&mut self) {
        if self.looking.take().is_some()
            && let Err(error) = self.quota.set_share(None)
        {
            tracing::warn!(%error, "the vCPUs are slowed until the migration ends");
        }
    }

    /// Measures what the guest has dirtied since the last look, and sets its new share.
    fn adjust_share(&mut self) -> Result<(), TrackError> {
        let Some(looking) = &mut self.looking else { return Ok(()) };
        let begun = Instant::now();
        let passed = begun.saturating_duration_since(looking.last);
        if passed < looking.every {
            return Ok(());
        }
        let dirty_pages = self.tracker.count_dirty()?.pages;
        looking.every = LOOK_INTERVAL.max(begun.elapsed() * LOOK_PART);
        // Pages that are dirty now and were not, and pages that were dirty and have been taken
        // since.
        let dirtied = (dirty_pages + std::mem::take(&mut self.taken_pages))
            .saturating_sub(looking.dirty_pages);
        (looking.last, looking.dirty_pages) = (begun, dirty_pages);
        let dirtied_pages_per_s = dirtied as f64 / passed.as_secs_f64();
        let before = self.control.share();
        let share = self.control.adjust(dirtied_pages_per_s, looking.limit_pages_per_s);
        if share == before {
            return Ok(());
        }
        tracing::debug!(
            share,
            dirtied_pages_per_s,
            limit = looking.limit_pages_per_s,
            "the vCPUs' quota"
        );
        self.quota.set_share(Some(share)).map_err(|error| self.quota_failed(error))
    }
}

impl<Q> Throttled<DirtyTracker, Q> {
    /// Sets whether faults find dirty pages, as [`DirtyTracker::by_faults`] does.
    #[must_use]
    pub fn by_faults(self, by_faults: bool) -> Self {
        Throttled { tracker: self.tracker.by_faults(by_faults), ..self }
    }
}

impl<T: Tracking, Q: CpuQuota> Tracking for Throttled<T, Q> {
    fn start(&mut self) -> Result<(), TrackError> {
        self.tracker.start()
    }

    fn settle(&mut self) -> Result<(), TrackError> {
        self.tracker.settle()
    }

    fn check_notes(&mut self) -> Result<(), TrackError> {
        self.tracker.check_notes()
    }

    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        let before = page_count(out);
        let next = self.tracker.take_dirty(block, within, max_pages, out)?;
        self.taken_pages += page_count(out) - before;
        Ok(next)
    }

    fn peek_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
        self.tracker.peek_dirty(block, within, out)
    }

    fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        self.tracker.count_dirty()
    }

    fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError> {
        let Some(pages_per_s) = pages_per_s else {
            self.let_processors_go();
            self.held_by = None;
            return self.tracker.throttle(None);
        };
        self.hold(pages_per_s)
    }

    fn steer(&mut self) {
        if let Err(error) = self.adjust_share() {
            // The next round uses the other means, or none.
            tracing::warn!(%error, "cannot slow the vCPUs any more");
            self.no_quota = true;
            self.let_processors_go();
        }
    }

    fn let_change(&mut self, may_change: bool) {
        self.tracker.let_change(may_change);
    }

    fn changed_over(&self) -> Vec<PageRange> {
        self.tracker.changed_over()
    }

    fn let_stop(&mut self) {
        // A vCPU that waits for its quota cannot stop.
        self.let_processors_go();
        self.tracker.let_stop();
    }

    fn throttle_figures(&self) -> ThrottleFigures {
        self.tracker.throttle_figures()
    }

    fn fault_figures(&self) -> FaultFigures {
        self.tracker.fault_figures()
    }

    fn least_cpu_share(&self) -> Option<f64> {
        self.quota_used.then(|| self.control.least())
    }
}

#[cfg(test)]
mod tests;
