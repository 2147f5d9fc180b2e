//! Streams that a transfer of disks blocks on, and how its calls are ended from outside: a guest
//! that is to be resumed waits for none of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_lanes::{Interrupt, Stream};
use godwit_migration::Failure;
use godwit_types::FailureCode;
use parking_lot::{Condvar, Mutex};

/// Interval between two attempts to reach the destination after a cut.
const AGAIN_INTERVAL: Duration = Duration::from_millis(300);

/// The streams of one transfer. Once ended, nothing on them succeeds any more. Connections to QEMU
/// look at [`Wires::is_over`] while they wait.
#[derive(Debug, Default)]
pub(super) struct Wires {
    streams: Mutex<Vec<Stream>>,
    ended: Condvar,
    /// Set when the transfer is to end.
    pub(super) is_over: AtomicBool,
    /// Ends connects and handshakes of streams.
    pub(super) connecting: Interrupt,
}

impl Wires {
    /// Ends every call on the streams, permanently.
    pub(super) fn end(&self) {
        self.connecting.end();
        let streams = self.streams.lock();
        self.is_over.store(true, Ordering::SeqCst);
        streams.iter().for_each(Stream::close);
        self.ended.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Waits until the transfer is to end, or for this long.
    pub(super) fn wait(&self, limit: Duration) {
        let mut streams = self.streams.lock();
        if !self.is_over() {
            self.ended.wait_for(&mut streams, limit);
        }
    }

    /// Waits for a link that is cut, up to `limit`: calls `attempt` until it does not fail with
    /// [`FailureCode::LaneLost`]. `why`: the failure that showed the cut.
    ///
    /// # Errors
    /// `why` is no cut, or cuts are not waited for; the limit has passed; the destination refuses;
    /// the transfer is to end.
    pub(super) fn until_restored<T>(
        &self,
        limit: Duration,
        why: &Failure,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        if !waits_for(why, limit) {
            return Err(why.clone());
        }
        let cut_at = Instant::now();
        loop {
            if self.is_over() {
                return Err(over());
            }
            if cut_at.elapsed() >= limit {
                let limit = limit.as_secs();
                let detail = format!("{}; the link was not restored within {limit} s", why.detail);
                return Err(Failure::new(FailureCode::LaneLost, detail));
            }
            match attempt() {
                Err(failure) if failure.code == FailureCode::LaneLost => {
                    tracing::debug!(%failure, "no streams of the disks yet");
                    self.wait(AGAIN_INTERVAL);
                }
                restored_or_refused => return restored_or_refused,
            }
        }
    }

    /// Adds a stream to the destination.
    pub(super) fn add(&self, stream: &Stream) {
        let mut streams = self.streams.lock();
        if self.is_over() {
            stream.close();
        }
        streams.push(stream.clone());
    }

    /// Forgets the streams of a connection that was cut.
    pub(super) fn forget_streams(&self) {
        let streams = std::mem::take(&mut *self.streams.lock());
        streams.iter().for_each(Stream::close);
    }
}

/// Whether a failure is a cut that is waited for, up to `limit`.
pub(super) fn waits_for(why: &Failure, limit: Duration) -> bool {
    why.code == FailureCode::LaneLost && !limit.is_zero()
}

/// Returns the failure of what a transfer does when it is to end.
pub(super) fn over() -> Failure {
    Failure::new(FailureCode::Cancelled, "the transfer of the disks was ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(300);

    fn lost() -> Failure {
        Failure::new(FailureCode::LaneLost, "no connection within 5 s")
    }

    fn refused() -> Failure {
        Failure::new(FailureCode::DiskFailed, "no space")
    }

    /// Waits with attempts that fail like this, and one that succeeds. Returns also their number.
    fn wait(limit: Duration, why: &Failure, failures: &[Failure]) -> (Result<u8, Failure>, usize) {
        let mut attempts = 0;
        let attempt = || {
            attempts += 1;
            failures.get(attempts - 1).map_or(Ok(7), |failure| Err(failure.clone()))
        };
        let restored = Wires::default().until_restored(limit, why, attempt);
        (restored, attempts)
    }

    #[test]
    fn a_cut_is_waited_for_and_an_answer_is_not() {
        assert_eq!(wait(LONG, &lost(), &[]), (Ok(7), 1));
        assert_eq!(wait(LONG, &lost(), &[lost()]), (Ok(7), 2));
        assert_eq!(wait(LONG, &lost(), &[refused()]), (Err(refused()), 1));
        assert_eq!(wait(LONG, &refused(), &[]), (Err(refused()), 0));
        assert_eq!(wait(Duration::ZERO, &lost(), &[]), (Err(lost()), 0));
    }

    #[test]
    fn a_cut_is_not_waited_for_beyond_its_limit_or_the_end() {
        let (restored, attempts) = wait(Duration::from_nanos(1), &lost(), &[lost(), lost()]);
        let failure = restored.unwrap_err();
        assert_eq!(failure.code, FailureCode::LaneLost);
        assert!(failure.detail.contains("within 5 s; the link was not restored"), "{failure}");
        assert!(attempts <= 1, "{attempts}");
        let wires = Wires::default();
        let attempt = || {
            wires.end();
            Err::<u8, _>(lost())
        };
        assert_eq!(wires.until_restored(LONG, &lost(), attempt), Err(over()));
    }

    #[test]
    fn an_end_wakes_who_waits() {
        let wires = Wires::default();
        assert!(!wires.is_over());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wires.wait(Duration::from_secs(3600)));
            wires.end();
            waiting.join().unwrap();
        });
        wires.wait(Duration::from_secs(3600));
        assert!(wires.is_over() && wires.connecting.is_over());
    }
}
