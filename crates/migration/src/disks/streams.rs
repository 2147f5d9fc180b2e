//! The source's streams for disks, and the rounds that they carry.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, Stream};
use godwit_types::Compression;
use godwit_wire::{Message, MigrationId, SUPPORTED};

use crate::drive::{Hello, say_hello};
use crate::encoding::Chooser;
use crate::failure::{Failure, FailureCode, lane_failure};

use super::access::DiskReader;
use super::guesses::Guesses;
use super::marks::Marks;
use super::queue::{Outcome, Queue, no_stream};
use super::range::{DiskRange, total_bytes};
use super::referring::UNIT_BYTES;
use super::sending::{Carried, DiskSent, MARK_LIMIT, OneStream, Worker, unexpected};

/// Open streams of a transfer, each with its reader of the disks. They are closed when the value is
/// dropped.
///
/// Between calls the streams may be silent for as long as the destination allows; the kernel
/// notices a host that is gone.
pub struct DiskStreams {
    transfer: MigrationId,
    compression: Compression,
    streams: Vec<OneStream>,
    /// Guesses of a round that may refer to what the destination has.
    guesses: Option<Guesses>,
}

/// What a round sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoundSent {
    /// Bytes of the disks that were sent, those that were zero or sent again included.
    pub bytes: u64,
    /// Bytes among them that were zero.
    pub zero_bytes: u64,
    /// Bytes among them that the destination had: their hashes were sent.
    pub referenced_bytes: u64,
    /// Bytes that the streams carried.
    pub wire_bytes: u64,
    /// Bytes that had been taken by a stream that broke, or that the end of the round took back.
    /// They are sent again.
    pub resent_bytes: u64,
    /// Time until all was on the destination's disks; for the last round, until all was sent.
    pub took: Duration,
    /// What was sent of each disk, by number. Disks of which nothing was sent may be missing at the
    /// end.
    pub by_disk: Vec<DiskSent>,
}

/// A round that ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundCut {
    /// What is not known to be on the destination's disks, ascending.
    pub unmarked: Vec<DiskRange>,
    /// What was sent nevertheless.
    pub sent: Box<RoundSent>,
    /// The reason. After [`FailureCode::Cancelled`] of an interruption the streams can be used
    /// again, after others not ([`DiskStreams::live`]).
    pub failure: Failure,
}

impl DiskStreams {
    /// Creates the streams of a transfer, none of which is open. `transfer`: the ID that the
    /// destination expects in the hello. A stream's pace is its own ([`Stream::paced`]).
    #[must_use]
    pub fn new(transfer: MigrationId, compression: Compression) -> Self {
        DiskStreams { transfer, compression, streams: Vec::new(), guesses: None }
    }

    /// Lets the next round that is sent wholly refer to content that the destination may have: it
    /// must accept references.
    pub fn refer(&mut self) {
        self.guesses = Some(Guesses::default());
    }

    /// Adds a connected stream with its reader: says hello, and waits for the welcome. Numbers
    /// begin with 1; each is used once.
    ///
    /// # Errors
    /// The lane broke, or the destination refused the stream.
    pub fn add(
        &mut self,
        stream: Stream,
        number: u16,
        reader: Box<dyn DiskReader>,
    ) -> Result<(), Failure> {
        let (mut sender, mut receiver) = (stream.sender(), stream.receiver());
        let hello = Hello { migration: self.transfer, stream: number, versions: SUPPORTED };
        say_hello(&mut sender, &mut receiver, hello)?;
        stream
            .limit_silence(MARK_LIMIT)
            .and_then(|()| stream.probe_silent_peer())
            .map_err(|error| lane_failure(&error))?;
        self.streams.push(OneStream {
            number,
            stream,
            sender,
            receiver,
            reader,
            chooser: Chooser::new(self.compression),
            marks: Marks::default(),
            is_broken: false,
            buffer: Vec::new(),
        });
        Ok(())
    }

    /// Returns the number of streams that work.
    #[must_use]
    pub fn live(&self) -> usize {
        self.streams.iter().filter(|one| !one.is_broken).count()
    }

    /// Sends ranges with their present content, and waits until all of it is on the destination's
    /// disks. `progress` receives, piece by piece, the number of bytes that have newly arrived
    /// there. If a stream breaks, the others do its work. `interrupt` ends the round as soon as
    /// what was sent is on the destination's disks.
    ///
    /// # Errors
    /// The round ended early: no stream is left, the destination may still read one that broke, a
    /// disk could not be read or written, or it was interrupted.
    pub fn send_round(
        &mut self,
        ranges: &[DiskRange],
        progress: &(dyn Fn(u64) + Sync),
        interrupt: &AtomicBool,
    ) -> Result<RoundSent, RoundCut> {
        let (sent, outcome) = self.run(ranges, progress, interrupt, false);
        match outcome.failure {
            None => {
                // What the guest writes from now on is new. A sample is no round.
                if total_bytes(ranges) >= UNIT_BYTES as u64 {
                    self.guesses = None;
                }
                Ok(sent)
            }
            Some(failure) => {
                Err(RoundCut { unmarked: outcome.unmarked, sent: Box::new(sent), failure })
            }
        }
    }

    /// Sends the last ranges, while the guest is paused, and then the end on every stream. Does not
    /// wait until it is on the destination's disks ([`DiskStreams::confirmed`]). No round may
    /// follow.
    ///
    /// # Errors
    /// A stream broke, or a disk could not be read. All streams are closed: the destination never
    /// completes the transfer.
    pub fn send_last(&mut self, ranges: &[DiskRange]) -> Result<RoundSent, Failure> {
        let interrupt = AtomicBool::new(false);
        let (sent, outcome) = self.run(ranges, &|_| {}, &interrupt, true);
        let ended = match outcome.failure {
            None => self.end(),
            Some(failure) => Err(failure),
        };
        if ended.is_err() {
            self.close_all();
        }
        ended.map(|()| sent)
    }

    fn end(&mut self) -> Result<(), Failure> {
        let live = self.streams.iter_mut().filter(|one| !one.is_broken);
        let mut live: Vec<_> = live.collect();
        let streams = u16::try_from(live.len()).unwrap_or(u16::MAX);
        for one in &mut live {
            let mark = one.marks.next_mark();
            one.sender
                .send(&Message::DiskEnd { streams, mark })
                .map_err(|error| lane_failure(&error))?;
        }
        if live.is_empty() { Err(no_stream()) } else { Ok(()) }
    }

    /// Waits, after [`DiskStreams::send_last`], until the destination has confirmed that all is on
    /// its disks.
    ///
    /// # Errors
    /// The reason why that is not known.
    pub fn confirmed(&mut self) -> Result<(), Failure> {
        for one in self.streams.iter_mut().filter(|one| !one.is_broken) {
            loop {
                match one.receiver.receive() {
                    Ok(Incoming::Message(Message::DiskMarked { mark })) => {
                        if mark == one.marks.last_mark() {
                            break;
                        }
                    }
                    Ok(Incoming::Message(Message::Refused(reason))) => {
                        return Err(Failure::from_peer(&reason));
                    }
                    Ok(other) => return Err(unexpected(&other)),
                    Err(error) => return Err(lane_failure(&error)),
                }
            }
        }
        Ok(())
    }

    /// Closes all streams.
    pub fn close(&self) {
        self.streams.iter().for_each(|one| one.stream.close());
    }

    fn close_all(&mut self) {
        self.close();
        self.streams.iter_mut().for_each(|one| one.is_broken = true);
    }

    /// Runs a round. After a cut all streams are closed.
    fn run(
        &mut self,
        ranges: &[DiskRange],
        progress: &(dyn Fn(u64) + Sync),
        interrupt: &AtomicBool,
        is_last: bool,
    ) -> (RoundSent, Outcome) {
        let begun = Instant::now();
        let streams: Vec<_> = self.streams.iter().map(|one| one.stream.clone()).collect();
        let live: Vec<_> = self.streams.iter_mut().filter(|one| !one.is_broken).collect();
        let queue = Queue::new(ranges, live.len(), interrupt);
        let guesses = self.guesses.as_ref().filter(|_| !is_last);
        let carried = std::thread::scope(|scope| {
            let begin = |one| {
                let carried = Carried::default();
                let worker = Worker { queue: &queue, one, progress, guesses, carried, is_last };
                let thread = std::thread::Builder::new().name("disks".to_owned());
                // A worker that does not begin leaves the queue as one that ends.
                let begun = thread.spawn_scoped(scope, move || worker.run());
                begun.inspect_err(|error| queue.fail(no_thread(error))).ok()
            };
            let threads: Vec<_> = live.into_iter().filter_map(begin).collect();
            queue.until_left(|| streams.iter().for_each(Stream::close));
            // A thread that panicked has failed the round.
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect::<Vec<_>>()
        });
        let outcome = queue.outcome(self.live());
        if outcome.is_cut {
            self.close_all();
        }
        let resent_bytes = outcome.resent_bytes;
        (RoundSent { resent_bytes, took: begun.elapsed(), ..total(&carried) }, outcome)
    }
}

impl Drop for DiskStreams {
    fn drop(&mut self) {
        self.close();
    }
}

fn no_thread(error: &std::io::Error) -> Failure {
    let detail = format!("cannot start a thread that sends disks: {error}");
    Failure::new(FailureCode::Internal, detail)
}

/// Returns what all streams carried.
fn total(carried: &[Carried]) -> RoundSent {
    let mut sent = RoundSent::default();
    for one in carried {
        sent.wire_bytes += one.wire_bytes;
        if sent.by_disk.len() < one.by_disk.len() {
            sent.by_disk.resize(one.by_disk.len(), DiskSent::default());
        }
        for (disk, of_stream) in sent.by_disk.iter_mut().zip(&one.by_disk) {
            disk.add(*of_stream);
            sent.bytes += of_stream.bytes;
            sent.zero_bytes += of_stream.zero_bytes;
            sent.referenced_bytes += of_stream.referenced_bytes;
        }
    }
    sent
}
