use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::*;

/// Calls to the two fakes, in order.
type Log = Arc<Mutex<Vec<String>>>;

#[derive(Clone, Default)]
struct Fakes {
    log: Log,
    dirty: Arc<Mutex<BTreeSet<u64>>>,
    faults_fail: bool,
    quota_fails: bool,
}

impl Fakes {
    fn note(&self, what: String) {
        self.log.lock().push(what);
    }

    fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock())
    }

    fn throttled(&self, means: MeansUse) -> Throttled<Fakes, Fakes> {
        Throttled::new(self.clone(), self.clone(), Throttling { means, vcpus: 2, pid: 7 })
    }
}

impl CpuQuota for Fakes {
    fn set_share(&mut self, share: Option<f64>) -> io::Result<()> {
        if self.quota_fails {
            return Err(io::Error::other("no cgroup"));
        }
        self.note(share.map_or("free".to_owned(), |share| format!("share {share:.2}")));
        Ok(())
    }
}

impl Tracking for Fakes {
    fn start(&mut self) -> Result<(), TrackError> {
        self.note("start".into());
        Ok(())
    }

    fn take_dirty(
        &mut self,
        _: usize,
        within: PageRange,
        _: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        let taken = std::mem::take(&mut *self.dirty.lock());
        out.extend(taken.into_iter().map(|page| PageRange::new(page, 1)));
        Ok(within.end())
    }

    fn peek_dirty(
        &mut self,
        _: usize,
        _: PageRange,
        _: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
        Ok(())
    }

    fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        let pages = self.dirty.lock().len() as u64;
        Ok(DirtyCount { pages, fullest_chunk_pages: pages, ..DirtyCount::default() })
    }

    fn throttle(&mut self, limit: Option<f64>) -> Result<(), TrackError> {
        if self.faults_fail && limit.is_some() {
            return Err(TrackError::NoKernelFaults);
        }
        self.note(limit.map_or("no faults".to_owned(), |limit| format!("faults {limit}")));
        Ok(())
    }

    fn let_change(&mut self, _: bool) {}

    fn changed_over(&self) -> Vec<PageRange> {
        Vec::new()
    }

    fn let_stop(&mut self) {
        self.note("let stop".into());
    }

    fn throttle_figures(&self) -> ThrottleFigures {
        ThrottleFigures::default()
    }
}

/// Simulates that the last look was a second ago, in which so many pages were written and half of
/// them taken. They are far too many, so that the share taken from the vCPUs does not depend on the
/// clock.
fn a_second_of(throttled: &mut Throttled<Fakes, Fakes>, pages: u64) {
    let half = pages / 2;
    throttled.tracker.dirty.lock().clear();
    throttled.looking.as_mut().unwrap().dirty_pages = 0;
    throttled.tracker.dirty.lock().extend(0..half);
    throttled.take_dirty(0, PageRange::new(0, 1 << 20), u64::MAX, &mut Vec::new()).unwrap();
    throttled.tracker.dirty.lock().extend(0..half);
    let looking = throttled.looking.as_mut().unwrap();
    looking.last -= Duration::from_secs(1);
    // A machine that was busy during the last look would postpone this one.
    looking.every = LOOK_INTERVAL;
    throttled.steer();
}

#[test]
fn faults_first_and_the_quota_where_they_cannot_follow() {
    let fakes = Fakes::default();
    let mut throttled = fakes.throttled(MeansUse::Auto);
    throttled.throttle(Some(9000.0)).unwrap();
    assert_eq!(fakes.take_log(), ["faults 9000"]);
    assert_eq!(throttled.least_cpu_share(), None);
    // A faster link. Tracking continues, and nothing begins anew: no mark is touched, no page lost.
    throttled.throttle(Some(90_000.0)).unwrap();
    assert_eq!(fakes.take_log(), ["share 1.00", "no faults"]);
    a_second_of(&mut throttled, 800_000);
    assert_eq!(fakes.take_log(), ["share 0.25"]);
    throttled.throttle(Some(80_000.0)).unwrap();
    assert!(fakes.take_log().is_empty(), "the loop takes the new limit from here on");
    a_second_of(&mut throttled, 800_000);
    assert_eq!(fakes.take_log(), ["share 0.06"]);
    // A slower link: writers are held before the vCPUs are let go.
    throttled.throttle(Some(5000.0)).unwrap();
    assert_eq!(fakes.take_log(), ["faults 5000", "free"]);
    assert_eq!(throttled.least_cpu_share(), Some(0.0625));
    throttled.throttle(None).unwrap();
    assert_eq!(fakes.take_log(), ["no faults"]);
}

#[test]
fn a_quota_is_released_at_the_stop_and_at_every_end() {
    let fakes = Fakes::default();
    let mut throttled = fakes.throttled(MeansUse::Quota);
    let ends: [fn(&mut Throttled<Fakes, Fakes>); 2] =
        [Tracking::let_stop, |throttled| throttled.throttle(None).unwrap()];
    for end in ends {
        throttled.throttle(Some(1000.0)).unwrap();
        a_second_of(&mut throttled, 8000);
        assert_eq!(fakes.take_log(), ["share 1.00", "no faults", "share 0.25"]);
        end(&mut throttled);
        assert_eq!(fakes.take_log()[0], "free");
        throttled.steer();
        assert!(fakes.take_log().is_empty(), "no check runs any more");
    }
}

#[test]
fn unavailable_means_are_replaced_where_allowed() {
    let with = |faults_fail, quota_fails| Fakes { faults_fail, quota_fails, ..Fakes::default() };
    let hold = |fakes: &Fakes, means, limit| fakes.throttled(means).throttle(Some(limit));
    // QEMU may handle only its own faults, so the quota is used.
    let fakes = with(true, false);
    hold(&fakes, MeansUse::Auto, 100.0).unwrap();
    assert_eq!(fakes.take_log(), ["share 1.00", "no faults"]);
    assert!(matches!(hold(&fakes, MeansUse::Faults, 100.0), Err(TrackError::NoKernelFaults)));
    let fakes = with(false, true);
    hold(&fakes, MeansUse::Auto, 90_000.0).unwrap();
    assert_eq!(fakes.take_log(), ["faults 90000"]);
    let error = hold(&fakes, MeansUse::Quota, 100.0).unwrap_err().to_string();
    assert!(error.contains("cannot slow the vCPUs of process 7: no cgroup"), "{error}");
    assert!(hold(&with(true, true), MeansUse::Auto, 100.0).is_err());
}

#[test]
fn a_later_failure_releases_the_vcpus() {
    let fakes = Fakes::default();
    let mut throttled = fakes.throttled(MeansUse::Auto);
    throttled.throttle(Some(90_000.0)).unwrap();
    throttled.quota.quota_fails = true;
    a_second_of(&mut throttled, 400_000);
    fakes.take_log();
    throttled.throttle(Some(90_000.0)).unwrap();
    assert_eq!(fakes.take_log(), ["faults 90000"]);
}
