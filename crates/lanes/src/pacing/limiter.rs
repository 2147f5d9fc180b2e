//! One limit, shared by the threads of all streams that it holds for: they wait here for their turn and for the bucket.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::Clock;
use super::bucket::{Bucket, data_bytes_per_s, piece_bytes};
use super::turns::{Ticket, Turns};
use crate::rate::RateLimit;

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asking<'a> {
    pub(super) migration: u64,
    /// The stream is closed: it waits for nothing any more.
    pub(super) over: &'a AtomicBool,
    /// It had to go for a moment, and comes before the others of its migration.
    pub(super) again: bool,
    /// No longer than until then.
    pub(super) until: Instant,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// The bytes may go.
    Granted,
    /// Not yet, and the stream has waited for as long as it wanted to.
    Waited,
    /// The stream is closed.
    Ended,
}

pub(super) struct Limiter {
    clock: Arc<Clock>,
    /// Bytes that are sent in one go; 0: there is no limit. Read without the lock by who may send.
    piece_bytes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    limit: RateLimit,
    /// The limit holds no more, whatever it is.
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
        // Nothing under it panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn limit(&self) -> RateLimit {
        self.lock().limit
    }

    /// Another limit from now on; who waits notices at once.
    pub(super) fn set(&self, limit: RateLimit) {
        let mut state = self.lock();
        state.limit = limit;
        self.apply(&mut state);
    }

    /// The limit holds no more.
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

    /// How many bytes are sent in one go; none: there is no limit.
    pub(super) fn piece_bytes(&self) -> Option<u64> {
        Some(self.piece_bytes.load(Ordering::Acquire)).filter(|bytes| *bytes > 0)
    }

    #[cfg(test)]
    pub(super) fn would_grant(&self, bytes: u64) -> bool {
        let bucket = self.lock().bucket.clone();
        bucket.is_none_or(|mut bucket| bucket.take((self.clock)(), bytes).is_ok())
    }

    /// Counts bytes that have gone without asking.
    pub(super) fn charge(&self, bytes: u64) {
        let mut state = self.lock();
        let now = (self.clock)();
        if let Some(bucket) = &mut state.bucket {
            bucket.charge(now, bytes);
        }
    }

    /// Waits until the bytes may go.
    pub(super) fn take(&self, asking: Asking<'_>, bytes: u64) -> Taken {
        if self.piece_bytes().is_none() {
            return Taken::Granted;
        }
        let mut state = self.lock();
        let ticket = state.turns.join(asking.migration, asking.again, thread::current());
        loop {
            let left = asking.until.saturating_duration_since(Instant::now());
            if asking.over.load(Ordering::SeqCst) || left.is_zero() {
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
            // Woken when it is its turn, when the limit changes and when the stream is closed.
            thread::park_timeout(wait);
            state = self.lock();
        }
    }
}
