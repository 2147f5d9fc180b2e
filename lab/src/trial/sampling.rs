//! Work of a guest over time, sampled over the network while it moves.

use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use godwit_guest::control::{Request, ask};
use godwit_prober::clock::monotonic_ns;
use serde::Serialize;

use crate::trial::Guest;

/// Longest time for an answer before it counts as a gap.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Work that the guest had done by a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Time of the answer, or of its absence; `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// `None` if the guest did not answer.
    pub done: Option<Done>,
}

/// Counts since the guest's boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Done {
    /// Pages written.
    pub writes: u64,
    pub rounds: u64,
}

/// Samples a guest at an even pace, on a separate thread that ends with this value.
#[derive(Debug)]
pub struct Sampler {
    stop: SyncSender<()>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Guest {
    /// Starts to sample the guest.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn sample(&self, every: Duration) -> Result<Sampler> {
        let (stop, stopped) = sync_channel(1);
        let guest = self.clone();
        let thread = std::thread::Builder::new().name("sampler".to_owned());
        let thread = thread
            .spawn(move || samples(&guest, every, &stopped))
            .context("cannot start a thread for samples")?;
        Ok(Sampler { stop, thread })
    }
}

impl Sampler {
    /// Ends the sampling and returns the samples, in order of time.
    ///
    /// # Errors
    /// The thread has panicked.
    pub fn end(self) -> Result<Vec<Sample>> {
        // A thread that has ended needs no signal.
        let _ = self.stop.send(());
        self.thread.join().map_err(|_| anyhow!("the thread that samples the guest panicked"))
    }
}

fn samples(guest: &Guest, every: Duration, stopped: &Receiver<()>) -> Vec<Sample> {
    let mut samples = Vec::new();
    // One connection for all samples: it moves with the guest, and none has to be opened while the
    // guest is paused.
    let mut connection = None;
    loop {
        let due = Instant::now() + every;
        let answer = sample(guest, &mut connection);
        samples.push(Sample { at_ns: monotonic_ns(), done: answer.ok() });
        match stopped.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return samples,
        }
    }
}

/// Takes a sample. Drops the connection on a timeout, because a late answer would be taken for that
/// to the next request.
fn sample(guest: &Guest, connection: &mut Option<TcpStream>) -> Result<Done> {
    let mut stream = match connection.take() {
        Some(stream) => stream,
        None => guest.connect(guest.address(), ANSWER_LIMIT)?,
    };
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    let answer = ask(&mut stream, &Request::Status {})?;
    *connection = Some(stream);
    Ok(Done { writes: answer.writes, rounds: answer.iterations })
}
