//! The probe of the lanes between two hosts: it measures the conditions for a migration before
//! anything moves.
//!
//! The source opens streams as a migration does (same addresses, same TLS, same hello, with an ID
//! that the destination issued for it). It sends frames that a migration's streams know: Padding,
//! which is discarded, and Ping. A Pong states, by the destination's clock, when everything before
//! it had been taken. So rates are those of the receiver, and bytes waiting in queues do not count.
//! The interpretation of the figures is pure ([`limit_of`], [`estimate`]).

mod answer;
mod cpu;
mod judge;
mod measure;
mod mtu;
mod pour;

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

pub use answer::{MAX_OPEN_STREAMS, ProbeSession};
pub use judge::{estimate, limit_of};
pub use measure::{Findings, ProbeExtent, ProbeJob, ProbePlan, probe};

use crate::failure::{Failure, FailureCode};

/// Ends a probe from outside, at once if it is waiting.
#[derive(Debug, Default)]
pub struct Cancel {
    /// The reason, once the probe was ended.
    reason: Mutex<Option<String>>,
    changed: Condvar,
}

impl Cancel {
    /// Ends the probe. The first reason counts.
    pub fn ask(&self, why: &str) {
        self.reason.lock().get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }

    /// Waits for `time`.
    ///
    /// # Errors
    /// [`FailureCode::Cancelled`], as soon as the probe is ended.
    fn wait(&self, time: Duration) -> Result<(), Failure> {
        let mut reason = self.reason.lock();
        self.changed.wait_while_for(&mut reason, |reason| reason.is_none(), time);
        match &*reason {
            Some(why) => Err(Failure::new(FailureCode::Cancelled, why.clone())),
            None => Ok(()),
        }
    }

    /// Checks that the probe has not been ended.
    ///
    /// # Errors
    /// [`FailureCode::Cancelled`] if it has been ended.
    fn check(&self) -> Result<(), Failure> {
        self.wait(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ended_probe_reports_why_first() {
        let cancel = Cancel::default();
        cancel.check().unwrap();
        cancel.ask("a VM begins to move");
        cancel.ask("its client left");
        let ended = cancel.wait(Duration::from_secs(3600)).unwrap_err();
        assert_eq!(
            (ended.code, ended.detail.as_str()),
            (FailureCode::Cancelled, "a VM begins to move")
        );
    }
}
