//! The destination's side of a probe: it reads streams until they end, discards their content, and
//! answers pings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, Stream};
use godwit_wire::Message;
use parking_lot::{Mutex, MutexGuard};

use super::cpu::CpuMeter;
use crate::drive::WelcomedStream;
use godwit_types::probe::CpuReading;

/// Maximum streams of one probe that are open at a time.
pub const MAX_OPEN_STREAMS: usize = 64;
/// Maximum streams of one probe in all.
const MAX_STREAMS_IN_ALL: u64 = 4096;
/// Time without a stream or a query after which the source is considered gone.
const IDLE_LIMIT: Duration = Duration::from_secs(30);
/// Interval between two readings of the CPUs, and time limit of one wait for a connection.
const READ_INTERVAL: Duration = Duration::from_millis(50);
/// Number of readings kept: a minute of them.
const MAX_READINGS: usize = 1200;

/// Probe of this host by another one, bounded in time, streams and memory. The content of its
/// streams is not stored.
#[derive(Debug)]
pub struct ProbeSession {
    begun: Instant,
    limit: Duration,
    cpu: CpuMeter,
    over: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Open streams, by a number of their own.
    open: BTreeMap<u64, Stream>,
    opened: u64,
    /// CPU readings, the oldest first.
    readings: VecDeque<CpuReading>,
    /// Time of the source's last activity.
    seen_at: Instant,
}

impl ProbeSession {
    /// Creates a session that ends after `limit` at the latest.
    #[must_use]
    pub fn new(limit: Duration) -> ProbeSession {
        let begun = Instant::now();
        let state =
            State { open: BTreeMap::new(), opened: 0, readings: VecDeque::new(), seen_at: begun };
        ProbeSession {
            begun,
            limit,
            cpu: CpuMeter::new(begun),
            over: AtomicBool::new(false),
            state: Mutex::new(state),
        }
    }

    /// Ends the session: its streams are closed and no more are accepted.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
        for stream in self.lock().open.values() {
            stream.close();
        }
    }

    /// Returns how busy this host was, from `since_ns` of the probe's clock on. Readings go back
    /// one minute.
    #[must_use]
    pub fn readings(&self, since_ns: u64) -> Vec<CpuReading> {
        let mut state = self.lock();
        state.seen_at = Instant::now();
        state.readings.iter().filter(|reading| reading.at_ns >= since_ns).copied().collect()
    }

    /// Serves the streams, each on a thread of its own, until the session is over. `accept` waits a
    /// moment for a stream.
    pub fn serve(&self, accept: &dyn Fn() -> Option<WelcomedStream>) {
        let mut next_reading = Instant::now();
        std::thread::scope(|scope| {
            while !self.is_over() {
                if let Some(stream) = accept()
                    && let Some(number) = self.admit(&stream.stream)
                {
                    scope.spawn(move || {
                        let ended = self.answer(stream);
                        tracing::debug!(?ended, "a probe's stream has ended");
                        self.lock().open.remove(&number);
                    });
                }
                if Instant::now() >= next_reading {
                    next_reading = Instant::now() + READ_INTERVAL;
                    self.keep(self.cpu.read());
                }
            }
            self.end();
        });
    }

    fn is_over(&self) -> bool {
        let state = self.lock();
        let idle = state.open.is_empty() && state.seen_at.elapsed() > IDLE_LIMIT;
        self.over.load(Ordering::Relaxed) || idle || self.begun.elapsed() > self.limit
    }

    /// Registers a stream. Returns `None` if there are too many already.
    fn admit(&self, stream: &Stream) -> Option<u64> {
        let mut state = self.lock();
        if state.open.len() >= MAX_OPEN_STREAMS
            || state.opened >= MAX_STREAMS_IN_ALL
            || self.over.load(Ordering::Relaxed)
        {
            stream.close();
            return None;
        }
        let number = state.opened;
        state.opened += 1;
        state.seen_at = Instant::now();
        state.open.insert(number, stream.clone());
        Some(number)
    }

    fn keep(&self, reading: CpuReading) {
        let mut state = self.lock();
        if state.readings.len() >= MAX_READINGS {
            state.readings.pop_front();
        }
        state.readings.push_back(reading);
    }

    /// Reads a stream until it ends, by whatever cause.
    fn answer(&self, stream: WelcomedStream) -> Result<(), LaneError> {
        let WelcomedStream { stream, mut sender, mut receiver, .. } = stream;
        let mut thread = self.cpu.thread();
        loop {
            match receiver.receive() {
                Ok(Incoming::Message(Message::Padding { .. })) => {}
                Ok(Incoming::Message(Message::Ping { sent_ns })) => {
                    let answered_ns = self.cpu.now_ns();
                    sender.send(&Message::Pong { sent_ns, answered_ns })?;
                    thread.count();
                }
                Ok(other) => {
                    stream.close();
                    tracing::warn!(?other, "a probe's stream carries what is not a probe's");
                    return Ok(());
                }
                Err(LaneError::Closed) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}
