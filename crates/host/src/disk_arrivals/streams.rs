//! The streams of one connection of a transfer's source: who is there, and whether all has arrived.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use godwit_lanes::Stream;
use godwit_migration::Failure;
use godwit_types::FailureCode;
use godwit_wire::MAX_STREAMS;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// Longest time for the threads of a connection to end: a disk may be slow.
const END_LIMIT: Duration = Duration::from_secs(120);

/// The streams of a connection.
#[derive(Debug, Default)]
pub(crate) struct ArrivingStreams {
    state: Mutex<State>,
    /// Notified when a stream ends, and with each outcome.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// No further stream is admitted.
    is_over: bool,
    /// Streams whose threads run.
    open: BTreeMap<u64, Stream>,
    next: u64,
    /// Streams that have brought their end, and how many there are by what they say.
    ended: u16,
    expected: Option<u16>,
    /// Failure of the stream that broke last.
    broken: Option<Failure>,
    /// When the last stream ended.
    idle_since: Option<Instant>,
    outcome: Option<Result<(), Failure>>,
    /// Nothing of the connection is written any more.
    is_closed: bool,
}

impl State {
    /// Whether all of the disks has arrived.
    fn is_whole(&self) -> bool {
        self.expected == Some(self.ended) && self.open.is_empty()
    }

    /// Whether nothing can complete it any more.
    fn is_lost(&self) -> bool {
        let is_broken = self.open.is_empty() && !self.is_whole();
        self.outcome.is_none() && (self.is_closed || is_broken)
    }
}

impl ArrivingStreams {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Admits a stream; returns its number here. `None`: the connection is over, or has too many.
    pub(crate) fn admit(&self, stream: &Stream) -> Option<u64> {
        let mut state = self.lock();
        let is_late = state.is_over || state.outcome.is_some() || state.ended > 0;
        if is_late || state.open.len() >= usize::from(MAX_STREAMS) {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.open.insert(number, stream.clone());
        Some(number)
    }

    /// Notes that the thread of a stream ends: with the number of streams that the source says
    /// there are, or because it broke. Returns whether all of the disks has arrived; the caller
    /// then completes them, and reports that to [`ArrivingStreams::complete`].
    pub(crate) fn note_end(&self, number: u64, ended: Result<u16, Failure>) -> bool {
        let mut state = self.lock();
        state.open.remove(&number);
        state.idle_since = Some(Instant::now());
        match ended {
            Ok(streams) if state.expected.is_none_or(|expected| expected == streams) => {
                state.expected = Some(streams);
                state.ended = state.ended.saturating_add(1);
            }
            Ok(_) => {
                let detail = "the streams of the disks differ in how many there are";
                state.broken = Some(Failure::new(FailureCode::ProtocolBroken, detail));
                // Never whole from now on.
                state.expected = Some(0);
            }
            Err(failure) => state.broken = Some(failure),
        }
        if state.expected == Some(state.ended) {
            // Streams that are left are those that the source has given up.
            state.open.values().for_each(Stream::close);
        }
        let is_whole = state.is_whole() && !state.is_over && state.outcome.is_none();
        self.changed.notify_all();
        is_whole
    }

    /// Reports the outcome of a connection that has brought all.
    pub(crate) fn complete(&self, outcome: Result<(), Failure>) {
        self.lock().outcome = Some(outcome);
        self.changed.notify_all();
    }

    /// Whether it has ended or is to end, or no stream has been open for `limit`.
    pub(crate) fn is_done(&self, limit: Duration) -> bool {
        let mut state = self.lock();
        let since = *state.idle_since.get_or_insert_with(Instant::now);
        state.is_over
            || state.outcome.is_some()
            || state.open.is_empty() && !state.is_whole() && since.elapsed() >= limit
    }

    pub(crate) fn are_open(&self) -> bool {
        let state = self.lock();
        !state.open.is_empty() && !state.is_over
    }

    /// Whether something of the connection may still be written.
    pub(crate) fn may_write(&self) -> bool {
        !self.lock().is_closed
    }

    /// Notes that nothing of the connection is written any more.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.is_over = true;
        state.is_closed = true;
        self.changed.notify_all();
    }

    /// Ends the connection; waits until nothing of it is written any more. Returns whether that is
    /// certain.
    pub(crate) fn end(&self) -> bool {
        let mut state = self.lock();
        state.is_over = true;
        state.open.values().for_each(Stream::close);
        let limit = Instant::now() + END_LIMIT;
        while !state.is_closed && Instant::now() < limit {
            self.changed.wait_until(&mut state, limit);
        }
        state.is_closed
    }

    /// Waits until all of the disks has been completed.
    ///
    /// # Errors
    /// They cannot be, or not within `limit`.
    pub(crate) fn wait_complete(&self, limit: Duration) -> Result<(), Failure> {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            if state.is_lost() {
                let why = state.broken.as_ref().map(|failure| format!(": {}", failure.detail));
                let why = why.unwrap_or_default();
                let detail = format!("the disks have not arrived: their streams broke{why}");
                return Err(Failure::new(FailureCode::DiskFailed, detail));
            }
            if Instant::now() >= until {
                let seconds = limit.as_secs();
                let detail = format!("the disks have not arrived within {seconds} s");
                return Err(Failure::new(FailureCode::DiskFailed, detail));
            }
            self.changed.wait_until(&mut state, until);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use godwit_lanes::connect;
    use godwit_types::Lane;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn stream() -> (Stream, TcpListener) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to = listener.local_addr().unwrap();
        (connect(Lane { from: None, to }, LIMIT).unwrap(), listener)
    }

    fn broken() -> Failure {
        Failure::new(FailureCode::LaneLost, "reset")
    }

    #[test]
    fn all_has_arrived_when_every_stream_that_counts_has_ended() {
        let (stream, _listener) = stream();
        let streams = ArrivingStreams::default();
        let [first, second, third] = [(); 3].map(|()| streams.admit(&stream).unwrap());
        assert!(!streams.note_end(first, Err(broken())));
        assert!(!streams.note_end(second, Ok(2)));
        assert!(streams.admit(&stream).is_none(), "the last round has been sent");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| streams.wait_complete(LIMIT));
            assert!(streams.note_end(third, Ok(2)));
            streams.complete(Ok(()));
            waiting.join().unwrap().unwrap();
        });
        assert!(streams.is_done(LIMIT));
    }

    #[test]
    fn a_stream_that_the_source_has_given_up_holds_up_the_end_until_its_thread_has_ended() {
        let (stream, _listener) = stream();
        let streams = ArrivingStreams::default();
        let [lingering, last] = [(); 2].map(|()| streams.admit(&stream).unwrap());
        assert!(!streams.note_end(last, Ok(1)));
        assert!(streams.note_end(lingering, Err(broken())));
    }

    #[test]
    fn what_cannot_complete_is_not_waited_for() {
        let (stream, _listener) = stream();
        for ended in [Err(broken()), Ok(2)] {
            let streams = ArrivingStreams::default();
            let number = streams.admit(&stream).unwrap();
            assert!(!streams.note_end(number, ended));
            let failure = streams.wait_complete(LIMIT).unwrap_err();
            assert_eq!(failure.code, FailureCode::DiskFailed);
        }
        let streams = ArrivingStreams::default();
        let [one, other] = [(); 2].map(|()| streams.admit(&stream).unwrap());
        assert!(!streams.note_end(one, Ok(2)) && !streams.note_end(other, Ok(1)));
        assert!(streams.wait_complete(LIMIT).is_err());
        // Late, it counts no more.
        let streams = ArrivingStreams::default();
        let number = streams.admit(&stream).unwrap();
        streams.close();
        assert!(streams.end() && !streams.note_end(number, Ok(1)));
        assert!(streams.wait_complete(LIMIT).is_err() && streams.admit(&stream).is_none());
    }

    #[test]
    fn a_connection_without_a_stream_is_done_after_a_while() {
        let (stream, _listener) = stream();
        let streams = ArrivingStreams::default();
        assert!(!streams.is_done(LIMIT) && streams.is_done(Duration::ZERO));
        let number = streams.admit(&stream).unwrap();
        assert!(!streams.is_done(Duration::ZERO) && streams.are_open());
        streams.note_end(number, Err(broken()));
        assert!(streams.is_done(Duration::ZERO) && !streams.are_open());
    }
}
