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

/// How long it may take over an answer before that counts as a gap.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// What it had done by a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// When the answer came, or none did; `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// None: it did not answer.
    pub done: Option<Done>,
}

/// Counts since the guest has booted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Done {
    /// Pages written.
    pub writes: u64,
    pub rounds: u64,
}

/// Asks a guest at an even pace, on a thread of its own that ends with this.
#[derive(Debug)]
pub struct Sampler {
    stop: SyncSender<()>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Guest {
    /// Has it asked from now on.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn sample(&self, every: Duration) -> Result<Sampler> {
        let (stop, stopped) = sync_channel(1);
        let guest = self.clone();
        let thread = std::thread::Builder::new().name("sampler".to_owned());
        let thread = thread
            .spawn(move || samples(&guest, every, &stopped))
            .context("no thread to sample")?;
        Ok(Sampler { stop, thread })
    }
}

impl Sampler {
    /// Ends it and gives what it has seen, in order of time.
    ///
    /// # Errors
    /// Its thread has panicked.
    pub fn end(self) -> Result<Vec<Sample>> {
        // One that has ended already needs no word.
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
        let answer = take(guest, &mut connection);
        samples.push(Sample { at_ns: monotonic_ns(), done: answer.ok() });
        match stopped.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return samples,
        }
    }
}

/// Takes a sample. Drops the connection on a timeout, because a late answer would be taken for that
/// to the next request.
fn take(guest: &Guest, connection: &mut Option<TcpStream>) -> Result<Done> {
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
