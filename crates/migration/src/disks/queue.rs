//! Work of a round: the streams take chunks from one queue, and give back what a break took.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::failure::{Failure, FailureCode};

use super::range::{DiskRange, merged, total_bytes};

/// Poll interval for an interruption while no stream checks for one.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time that streams take to settle after an interruption, and after a failure.
const SETTLE_LIMIT: Duration = Duration::from_secs(5);

/// Work of a round.
#[derive(Debug)]
pub(super) struct Queue<'a> {
    state: Mutex<State>,
    /// Signals that there is work again, or that the round is over.
    changed: Condvar,
    interrupt: &'a AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// Ranges that no stream has taken.
    waiting: VecDeque<DiskRange>,
    /// Ranges that the destination misses although they were referred to.
    owed: VecDeque<DiskRange>,
    /// Bytes that streams have taken and the destination has not confirmed.
    taken_bytes: u64,
    /// Streams at work.
    streams: usize,
    interrupted: bool,
    /// Bytes that were taken and given back.
    resent_bytes: u64,
    /// Reason why the round cannot go on, whatever streams are left.
    failure: Option<Failure>,
    /// Last loss of a stream.
    lost: Option<Failure>,
    /// Loss of a stream that the destination may still read.
    unsettled: Option<Failure>,
}

/// Result of [`Queue::take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Take {
    Chunk(DiskRange),
    /// A chunk that must not be referred to.
    Owed(DiskRange),
    /// Nothing waits at the moment.
    Nothing,
    /// The round was interrupted: no more is taken.
    Interrupted,
    /// The round has failed.
    Failed,
}

/// Outcome of a round.
#[derive(Debug)]
pub(super) struct Outcome {
    /// What the destination has not confirmed, ascending.
    pub(super) unmarked: Vec<DiskRange>,
    pub(super) resent_bytes: u64,
    /// Reason why the round ended early.
    pub(super) failure: Option<Failure>,
    /// Whether the streams are of no further use.
    pub(super) is_cut: bool,
}

impl<'a> Queue<'a> {
    /// Creates the queue of a round that so many streams will work on.
    pub(super) fn new(ranges: &[DiskRange], streams: usize, interrupt: &'a AtomicBool) -> Self {
        let waiting = ranges.iter().copied().filter(|range| range.bytes > 0).collect();
        let state = State { waiting, streams, ..State::default() };
        Queue { state: Mutex::new(state), changed: Condvar::new(), interrupt }
    }

    /// Takes a chunk.
    pub(super) fn take(&self) -> Take {
        let mut state = self.state.lock();
        if state.failure.is_some() {
            return Take::Failed;
        }
        if state.interrupted || self.interrupt.load(Ordering::Relaxed) {
            return Take::Interrupted;
        }
        if let Some(owed) = pop_chunk(&mut state.owed) {
            state.taken_bytes += owed.bytes;
            return Take::Owed(owed);
        }
        let Some(chunk) = pop_chunk(&mut state.waiting) else { return Take::Nothing };
        state.taken_bytes += chunk.bytes;
        Take::Chunk(chunk)
    }

    /// Waits, for a stream that has nothing on its way, until there is work again. Returns false
    /// if there will be none.
    pub(super) fn wait(&self) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.failure.is_some() || state.interrupted {
                return false;
            }
            if !state.waiting.is_empty() || !state.owed.is_empty() {
                return true;
            }
            if state.taken_bytes == 0 {
                return false;
            }
            self.changed.wait(&mut state);
        }
    }

    /// Notes that the destination has confirmed so many bytes.
    pub(super) fn marked(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.taken_bytes = state.taken_bytes.saturating_sub(bytes);
        if state.taken_bytes == 0 {
            self.changed.notify_all();
        }
    }

    /// Gives back what was taken and not confirmed.
    pub(super) fn give_back(&self, ranges: Vec<DiskRange>) {
        let bytes = total_bytes(&ranges);
        let mut state = self.state.lock();
        state.taken_bytes = state.taken_bytes.saturating_sub(bytes);
        state.resent_bytes = state.resent_bytes.saturating_add(bytes);
        ranges.into_iter().rev().for_each(|range| state.waiting.push_front(range));
        self.changed.notify_all();
    }

    /// Takes back what was referred to and the destination misses.
    pub(super) fn owe(&self, ranges: Vec<DiskRange>) {
        let bytes = total_bytes(&ranges);
        let mut state = self.state.lock();
        state.taken_bytes = state.taken_bytes.saturating_sub(bytes);
        state.owed.extend(ranges);
        self.changed.notify_all();
    }

    /// Ends the round with a failure. The first one counts.
    pub(super) fn fail(&self, failure: Failure) {
        self.state.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// Notes the loss of a stream. `is_settled`: the destination reads no more of it.
    pub(super) fn lost(&self, failure: Failure, is_settled: bool) {
        let mut state = self.state.lock();
        if !is_settled {
            state.unsettled = Some(failure.clone());
        }
        state.lost = Some(failure);
    }

    /// Notes that a stream works no longer.
    pub(super) fn left(&self) {
        self.state.lock().streams -= 1;
        self.changed.notify_all();
    }

    /// Waits until no stream works any longer. If they do not settle soon after an interruption or
    /// a failure, calls `close`, which must end them.
    pub(super) fn until_left(&self, close: impl Fn()) {
        let mut over_since = None;
        let mut state = self.state.lock();
        while state.streams > 0 {
            if !state.interrupted && self.interrupt.load(Ordering::Relaxed) {
                state.interrupted = true;
                self.changed.notify_all();
            }
            if state.interrupted || state.failure.is_some() {
                let since = *over_since.get_or_insert_with(Instant::now);
                if since.elapsed() > SETTLE_LIMIT {
                    close();
                }
            }
            self.changed.wait_for(&mut state, INTERRUPT_INTERVAL);
        }
    }

    /// Returns the outcome, when no stream works any longer. `live`: streams that are left.
    pub(super) fn outcome(self, live: usize) -> Outcome {
        let state = self.state.into_inner();
        let unmarked = merged(state.waiting.into_iter().chain(state.owed).collect());
        let is_cut = state.failure.is_some() || state.unsettled.is_some() || live == 0;
        let interrupted = Failure::new(FailureCode::Cancelled, "the round was interrupted");
        let failure = match state.failure.or(state.unsettled) {
            Some(failure) => Some(failure),
            None if live == 0 => state.lost.or_else(|| Some(no_stream())),
            None => Some(interrupted).filter(|_| !unmarked.is_empty()),
        };
        Outcome { unmarked, resent_bytes: state.resent_bytes, failure, is_cut }
    }
}

/// Takes the next chunk of a list.
fn pop_chunk(ranges: &mut VecDeque<DiskRange>) -> Option<DiskRange> {
    let (chunk, rest) = ranges.pop_front()?.split_at_chunk();
    if rest.bytes > 0 {
        ranges.push_front(rest);
    }
    Some(chunk)
}

/// Failure of a round without streams.
pub(super) fn no_stream() -> Failure {
    Failure::new(FailureCode::LaneLost, "no stream for the disks is open")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::range::CHUNK_BYTES;

    fn range(disk: usize, offset: u64, bytes: u64) -> DiskRange {
        DiskRange { disk, offset, bytes }
    }

    fn lost() -> Failure {
        Failure::new(FailureCode::LaneLost, "the lane broke")
    }

    #[test]
    fn chunks_are_taken_in_order_and_given_back() {
        let interrupt = AtomicBool::new(false);
        let queue = Queue::new(
            &[range(0, 4096, CHUNK_BYTES), range(1, 0, 0), range(1, 0, 512)],
            2,
            &interrupt,
        );
        let first = range(0, 4096, CHUNK_BYTES - 4096);
        assert_eq!(queue.take(), Take::Chunk(first));
        assert_eq!(queue.take(), Take::Chunk(range(0, CHUNK_BYTES, 4096)));
        queue.give_back(vec![first]);
        assert_eq!(queue.take(), Take::Chunk(first));
        assert_eq!(queue.take(), Take::Chunk(range(1, 0, 512)));
        assert_eq!(queue.take(), Take::Nothing);
        queue.marked(first.bytes + 4096);
        queue.give_back(vec![range(1, 0, 512)]);
        assert!(queue.wait());
        assert_eq!(queue.take(), Take::Chunk(range(1, 0, 512)));
        queue.marked(512);
        assert!(!queue.wait());
        let outcome = queue.outcome(1);
        assert_eq!((outcome.resent_bytes, outcome.failure), (first.bytes + 512, None));
        assert!(outcome.unmarked.is_empty() && !outcome.is_cut);
    }

    #[test]
    fn what_the_destination_misses_comes_first_and_is_left_if_nobody_sends_it() {
        let interrupt = AtomicBool::new(false);
        let queue = Queue::new(&[range(0, 0, 2 * CHUNK_BYTES)], 1, &interrupt);
        assert_eq!(queue.take(), Take::Chunk(range(0, 0, CHUNK_BYTES)));
        queue.owe(vec![range(0, 0, 512), range(0, 1024, 512)]);
        assert_eq!(queue.take(), Take::Owed(range(0, 0, 512)));
        assert!(queue.wait());
        queue.marked(CHUNK_BYTES - 512);
        queue.left();
        let outcome = queue.outcome(1);
        assert_eq!(outcome.unmarked, [range(0, 1024, 512), range(0, CHUNK_BYTES, CHUNK_BYTES)]);
        assert_eq!(outcome.resent_bytes, 0);
    }

    #[test]
    fn what_no_stream_sent_is_left() {
        let interrupt = AtomicBool::new(false);
        let queue = Queue::new(&[range(0, 0, 3 * CHUNK_BYTES)], 1, &interrupt);
        let Take::Chunk(chunk) = queue.take() else { panic!("nothing") };
        queue.give_back(vec![chunk]);
        queue.lost(lost(), true);
        queue.left();
        queue.until_left(|| panic!("nothing to wait for"));
        let outcome = queue.outcome(0);
        assert_eq!(outcome.unmarked, [range(0, 0, 3 * CHUNK_BYTES)]);
        assert_eq!((outcome.failure, outcome.is_cut), (Some(lost()), true));
    }

    #[test]
    fn a_stream_that_may_still_be_read_cuts_a_round_that_is_whole() {
        let interrupt = AtomicBool::new(false);
        let queue = Queue::new(&[], 2, &interrupt);
        queue.lost(lost(), false);
        let outcome = queue.outcome(1);
        assert_eq!((outcome.failure, outcome.is_cut), (Some(lost()), true));
    }

    #[test]
    fn an_interruption_leaves_the_streams() {
        let interrupt = AtomicBool::new(false);
        let queue = Queue::new(&[range(0, 0, 512)], 1, &interrupt);
        interrupt.store(true, Ordering::Relaxed);
        assert_eq!(queue.take(), Take::Interrupted);
        queue.left();
        let outcome = queue.outcome(1);
        assert_eq!(outcome.unmarked, [range(0, 0, 512)]);
        assert!(!outcome.is_cut);
        assert_eq!(outcome.failure.map(|failure| failure.code), Some(FailureCode::Cancelled));
    }

    #[test]
    fn the_first_failure_ends_the_round() {
        let interrupt = AtomicBool::new(false);
        let queue = Queue::new(&[range(0, 0, 512)], 1, &interrupt);
        let full = Failure::new(FailureCode::DiskFailed, "no space is left");
        queue.fail(full.clone());
        queue.fail(lost());
        assert_eq!(queue.take(), Take::Failed);
        assert!(!queue.wait());
        let outcome = queue.outcome(1);
        assert_eq!((outcome.failure, outcome.is_cut), (Some(full), true));
    }
}
