//! One limit, shared by the threads of all streams that it applies to. They wait here for their
//! turn and for the bucket.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::Clock;
use super::bucket::{Bucket, data_bytes_per_s, piece_bytes};
use super::turns::{Ticket, Turns};
use godwit_types::RateLimit;

/// Request of a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) migration: u64,
    /// Set when the stream is closed: it waits no longer.
    pub(super) over: &'a AtomicBool,
    /// The stream left its place for a moment and goes before others of its migration.
    pub(super) again: bool,
    /// Time when the stream stops waiting.
    pub(super) until: Instant,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// The bytes may go.
    Granted,
    /// Not yet: the stream has waited as long as it wanted to.
    Waited,
    /// The stream is closed.
    Ended,
}

pub(super) struct Limiter {
    clock: Arc<Clock>,
    /// Bytes of a piece; 0: no limit. Senders read it without the lock.
    piece_bytes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    limit: RateLimit,
    /// Whether the limit is lifted, whatever its value.
    suspended: bool,
    bucket: Option<Bucket>,
    turns: Turns<Thread>,
}

impl State {
    fn take(&mut self, now: Duration, bytes: u64) -> Result<(), Duration> {
        self.bucket.as_mut().map_or(Ok(()), |bucket| bucket.take(now, bytes))
    }

    fn wake_next(&self) {
        if let Some((_, thread)) = self.turns.next() {
            thread.unpark();
        }
    }

    fn is_next(&self, ticket: Ticket) -> bool {
        self.turns.next().is_some_and(|(next, _)| next == ticket)
    }
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter").field("limit", &self.limit()).finish_non_exhaustive()
    }
}

impl Limiter {
    pub(super) fn new(clock: &Arc<Clock>, limit: RateLimit) -> Arc<Limiter> {
        let (clock, piece_bytes) = (Arc::clone(clock), AtomicU64::new(0));
        let limiter = Limiter { clock, piece_bytes, state: Mutex::default() };
        limiter.set(limit);
        Arc::new(limiter)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn limit(&self) -> RateLimit {
        self.lock().limit
    }

    /// Sets another limit. Waiting threads see it at once.
    pub(super) fn set(&self, limit: RateLimit) {
        let mut state = self.lock();
        state.limit = limit;
        self.apply(&mut state);
    }

    /// Lifts the limit.
    pub(super) fn suspend(&self) {
        let mut state = self.lock();
        state.suspended = true;
        self.apply(&mut state);
    }

    fn apply(&self, state: &mut State) {
        let now = (self.clock)();
        let rate = state.limit.rate().filter(|_| !state.suspended).map(data_bytes_per_s);
        match (rate, &mut state.bucket) {
            (Some(rate), Some(bucket)) => bucket.set_rate(now, rate),
            (rate, bucket) => *bucket = rate.map(|rate| Bucket::new(now, rate)),
        }
        self.piece_bytes.store(rate.map_or(0, piece_bytes), Ordering::Release);
        state.wake_next();
    }

    /// Returns how many bytes to send at a time; `None`: no limit.
    pub(super) fn piece_bytes(&self) -> Option<u64> {
        Some(self.piece_bytes.load(Ordering::Acquire)).filter(|bytes| *bytes > 0)
    }

    #[cfg(test)]
    pub(super) fn would_grant(&self, bytes: u64) -> bool {
        let bucket = self.lock().bucket.clone();
        bucket.is_none_or(|mut bucket| bucket.take((self.clock)(), bytes).is_ok())
    }

    /// Counts bytes that were sent without a request.
    pub(super) fn charge(&self, bytes: u64) {
        let mut state = self.lock();
        let now = (self.clock)();
        if let Some(bucket) = &mut state.bucket {
            bucket.charge(now, bytes);
        }
    }

    /// Waits until the bytes may be sent.
    pub(super) fn take(&self, request: Request<'_>, bytes: u64) -> Taken {
        if self.piece_bytes().is_none() {
            return Taken::Granted;
        }
        let mut state = self.lock();
        let ticket = state.turns.join(request.migration, request.again, thread::current());
        loop {
            let left = request.until.saturating_duration_since(Instant::now());
            if request.over.load(Ordering::SeqCst) || left.is_zero() {
                state.turns.leave(ticket);
                state.wake_next();
                return if left.is_zero() { Taken::Waited } else { Taken::Ended };
            }
            let mut wait = left;
            if state.is_next(ticket) {
                match state.take((self.clock)(), bytes) {
                    Ok(()) => {
                        state.turns.serve(bytes);
                        state.wake_next();
                        return Taken::Granted;
                    }
                    Err(missing) => wait = wait.min(missing),
                }
            }
            drop(state);
            // Woken when its turn comes, when the limit changes and when the stream is closed.
            thread::park_timeout(wait);
            state = self.lock();
        }
    }
}
