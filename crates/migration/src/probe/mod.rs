//! The probe of the lanes between two hosts: what a migration would find there, before anything moves.
//!
//! The source opens streams as a migration does (same addresses, same TLS, same hello, with an id that the destination gave
//! out for it), and sends what a migration's streams know anyway: Padding, which is thrown away, and Ping. A Pong says by the
//! destination's clock when everything before it had been taken, so rates are the receiver's, and what waits in queues does
//! not count. Judging the figures is pure ([`limit_of`], [`estimate`]).

mod answer;
mod cpu;
mod judge;
mod measure;
mod mtu;
mod pour;
mod report;

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

pub use answer::{MAX_OPEN_STREAMS, ProbeSession};
pub use judge::{STREAM_COUNTS, estimate, limit_of};
pub use measure::{Findings, ProbeExtent, ProbeJob, ProbePlan, probe};
pub use report::{
    CpuReading, CpuUse, LaneProbe, Limit, MoveEstimate, MtuProbe, ProbeProgress, ProbeReport, ProbeStage,
    RoundTrips, ThroughputRun,
};

use crate::failure::{Failure, FailureCode};

/// Ends a probe from outside, at once where it waits for time to pass.
#[derive(Debug, Default)]
pub struct Cancel {
    /// Why.
    asked: Mutex<Option<String>>,
    changed: Condvar,
}

impl Cancel {
    /// Ends it; the first reason counts.
    pub fn ask(&self, why: &str) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }

    /// Lets time pass.
    ///
    /// # Errors
    /// [`FailureCode::Cancelled`], as soon as it is ended.
    fn wait(&self, time: Duration) -> Result<(), Failure> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(asked, time, |asked| asked.is_none());
        let (asked, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &*asked {
            Some(why) => Err(Failure::new(FailureCode::Cancelled, why.clone())),
            None => Ok(()),
        }
    }

    /// # Errors
    /// [`FailureCode::Cancelled`] where it has been ended.
    fn check(&self) -> Result<(), Failure> {
        self.wait(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_is_ended_says_why_first() {
        let cancel = Cancel::default();
        cancel.check().unwrap();
        cancel.ask("a VM begins to move");
        cancel.ask("its client left");
        let ended = cancel.wait(Duration::from_secs(3600)).unwrap_err();
        assert_eq!((ended.code, ended.detail.as_str()), (FailureCode::Cancelled, "a VM begins to move"));
    }
}
