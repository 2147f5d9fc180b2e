//! The thread of one stream in a round: it takes chunks, reads them, sends them or names them by
//! their hashes, and waits for the destination's marks.

use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, Packing, Stream, StreamReceiver, StreamSender};
use godwit_wire::{DiskMissing, Message};

use crate::encoding::Chooser;
use crate::failure::{Failure, FailureCode, lane_failure};

use super::access::DiskReader;
use super::guesses::Guesses;
use super::marks::Marks;
use super::parts::{parts, zero_and_other_bytes};
use super::queue::{Queue, Take};
use super::range::{CHUNK_BYTES, DiskRange};
use super::referring::refer;

/// Longest time that the destination takes to write and flush what precedes a mark.
pub(super) const MARK_LIMIT: Duration = Duration::from_secs(60);
/// Longest time that a round waits for the end of a stream that broke.
const END_LIMIT: Duration = Duration::from_secs(10);

/// An open stream and its reader of the disks.
pub(super) struct OneStream {
    pub(super) number: u16,
    pub(super) stream: Stream,
    pub(super) sender: StreamSender,
    pub(super) receiver: StreamReceiver,
    pub(super) reader: Box<dyn DiskReader>,
    pub(super) chooser: Chooser,
    pub(super) marks: Marks,
    pub(super) is_broken: bool,
    /// A chunk, as it was read.
    pub(super) buffer: Vec<u8>,
}

/// What was sent of one disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskSent {
    /// Bytes of the disk, before compression.
    pub bytes: u64,
    /// Bytes among them that were zero.
    pub zero_bytes: u64,
    /// Bytes among them that were named by their hashes, and that the destination had.
    pub referenced_bytes: u64,
}

impl DiskSent {
    /// Adds what was sent besides.
    pub fn add(&mut self, other: DiskSent) {
        self.bytes += other.bytes;
        self.zero_bytes += other.zero_bytes;
        self.referenced_bytes += other.referenced_bytes;
    }
}

/// What a stream sent in a round.
#[derive(Debug, Default)]
pub(super) struct Carried {
    pub(super) wire_bytes: u64,
    /// By number of the disk.
    pub(super) by_disk: Vec<DiskSent>,
}

impl Carried {
    fn add(&mut self, disk: usize, sent: DiskSent) {
        if self.by_disk.len() <= disk {
            self.by_disk.resize(disk + 1, DiskSent::default());
        }
        if let Some(all) = self.by_disk.get_mut(disk) {
            all.add(sent);
        }
    }

    /// Takes back what counted as sent by reference, and is missing.
    fn miss(&mut self, part: DiskRange) {
        if let Some(all) = self.by_disk.get_mut(part.disk) {
            all.bytes = all.bytes.saturating_sub(part.bytes);
            all.referenced_bytes = all.referenced_bytes.saturating_sub(part.bytes);
        }
    }
}

/// Reason why a stream stops in the middle of a round.
enum Stopped {
    /// The stream broke while sending or receiving.
    Broke { error: LaneError, is_sending: bool },
    /// The destination takes no more of the stream.
    Refused(Failure),
    /// The round cannot go on.
    Failed(Failure),
}

/// A stream at work in a round.
pub(super) struct Worker<'a> {
    pub(super) queue: &'a Queue<'a>,
    pub(super) one: &'a mut OneStream,
    /// Receives the bytes that are newly on the destination's disks.
    pub(super) progress: &'a (dyn Fn(u64) + Sync),
    /// Guesses about what the destination has; `None`: this round refers to nothing.
    pub(super) guesses: Option<&'a Guesses>,
    pub(super) carried: Carried,
    /// Whether this is the last round: the guest is paused, and marks are not waited for.
    pub(super) is_last: bool,
}

impl Worker<'_> {
    /// Works until the round is over for this stream.
    pub(super) fn run(mut self) -> Carried {
        let before = self.one.sender.sent_bytes();
        if let Err(stopped) = self.work() {
            self.stopped(stopped);
        }
        let wire_bytes = self.one.sender.sent_bytes() - before;
        Carried { wire_bytes, ..std::mem::take(&mut self.carried) }
    }

    fn work(&mut self) -> Result<(), Stopped> {
        loop {
            // Without a mark, what has come may be no answer, but a message of TLS.
            while self.one.marks.is_open() && !self.one.receiver.is_idle() {
                self.take_answer()?;
            }
            if !self.is_last && self.one.marks.is_full() {
                self.take_answer()?;
                continue;
            }
            let over = match self.queue.take() {
                Take::Chunk(chunk) => {
                    let guesses = self.guesses.filter(|guesses| guesses.pay(chunk.disk));
                    self.send_and_mark(chunk, guesses)?;
                    continue;
                }
                Take::Owed(chunk) => {
                    self.send_and_mark(chunk, None)?;
                    continue;
                }
                Take::Failed => return Ok(()),
                Take::Interrupted => true,
                Take::Nothing => false,
            };
            if self.is_last {
                return Ok(());
            }
            if self.one.marks.has_fresh() {
                self.mark()?;
            } else if self.one.marks.is_open() {
                self.take_answer()?;
            } else if over || !self.queue.wait() {
                return Ok(());
            }
        }
    }

    fn send_and_mark(
        &mut self,
        chunk: DiskRange,
        guesses: Option<&Guesses>,
    ) -> Result<(), Stopped> {
        self.send(chunk, guesses)?;
        if self.one.marks.is_due(self.is_last) { self.mark() } else { Ok(()) }
    }

    /// Reads a chunk and sends it, with `guesses` by reference as far as possible.
    fn send(&mut self, chunk: DiskRange, guesses: Option<&Guesses>) -> Result<(), Stopped> {
        let OneStream { sender, reader, chooser, marks, buffer, .. } = &mut *self.one;
        // Comes first: whatever happens, it is given back.
        marks.sends(chunk);
        // A queue makes no chunk that is longer.
        let length = usize::try_from(chunk.bytes.min(CHUNK_BYTES)).unwrap_or_default();
        buffer.resize(buffer.len().max(length), 0);
        let bytes = buffer.get_mut(..length).unwrap_or_default();
        reader.read_at(chunk.disk, chunk.offset, bytes).map_err(Stopped::Failed)?;
        let disk = u16::try_from(chunk.disk).map_err(|_| Stopped::Failed(no_such_disk()))?;
        let broke = |error| Stopped::Broke { error, is_sending: true };
        let (mut parts, mut referenced_bytes) = (parts(chunk.offset, bytes), 0);
        if let Some(guesses) = guesses {
            let (references, rest) = refer(disk, parts);
            for named in references {
                let (offset, bytes) = (named.offset, named.bytes());
                marks.refers(DiskRange { disk: chunk.disk, offset, bytes });
                guesses.made(chunk.disk, bytes);
                referenced_bytes += bytes;
                sender.send(&Message::DiskReferences(named)).map_err(broke)?;
            }
            parts = rest;
        }
        let (zero_bytes, other_bytes) = zero_and_other_bytes(&parts);
        let sent = DiskSent { bytes: chunk.bytes, zero_bytes, referenced_bytes };
        self.carried.add(chunk.disk, sent);
        if parts.is_empty() {
            return Ok(());
        }
        let packing = match other_bytes {
            0 => Packing::default(),
            bytes => chooser.packing(bytes, self.is_last),
        };
        let begun = Instant::now();
        let sent = sender.disk_parts(disk, &parts, packing).map_err(broke)?;
        if other_bytes > 0 {
            chooser.sent(packing, &sent, begun.elapsed());
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<(), Stopped> {
        let mark = self.one.marks.next_mark();
        self.one
            .sender
            .send(&Message::DiskMark { mark })
            .map_err(|error| Stopped::Broke { error, is_sending: true })
    }

    /// Waits for the next answer.
    fn take_answer(&mut self) -> Result<(), Stopped> {
        match self.one.receiver.receive() {
            Ok(Incoming::Message(Message::DiskMarked { mark })) => {
                let bytes = self.one.marks.answered(mark).ok_or_else(|| {
                    let detail = format!("the destination answers a mark {mark} that is not due");
                    Stopped::Failed(Failure::new(FailureCode::ProtocolBroken, detail))
                })?;
                self.queue.marked(bytes);
                (self.progress)(bytes);
                Ok(())
            }
            Ok(Incoming::Message(Message::DiskMissing(missing))) => self.owe(missing),
            Ok(Incoming::Message(Message::Refused(reason))) => {
                Err(Stopped::Refused(Failure::from_peer(&reason)))
            }
            Ok(other) => Err(Stopped::Failed(unexpected(&other))),
            Err(error) => Err(Stopped::Broke { error, is_sending: false }),
        }
    }

    /// Has what the destination misses sent with its content.
    fn owe(&mut self, missing: DiskMissing) -> Result<(), Stopped> {
        let lacking = self.one.marks.missing(missing).ok_or_else(|| {
            let DiskMissing { disk, offset, .. } = missing;
            let detail = format!(
                "the destination misses what was not referred to (disk {disk}, from {offset})"
            );
            Stopped::Failed(Failure::new(FailureCode::ProtocolBroken, detail))
        })?;
        for part in &lacking {
            self.carried.miss(*part);
            if let Some(guesses) = self.guesses {
                guesses.wrong(part.disk, part.bytes);
            }
        }
        self.queue.owe(lacking);
        Ok(())
    }

    /// Handles the end of the stream in the middle of a round. A break leaves the work to the other
    /// streams; in the last round, which nobody confirms before the hand-over, it is a failure.
    fn stopped(&mut self, stopped: Stopped) {
        let (failure, has_ended) = match stopped {
            Stopped::Failed(failure) => return self.queue.fail(failure),
            Stopped::Refused(failure) => (failure, true),
            // An end that was read is the destination's own, unless a failed send came before.
            Stopped::Broke { error, is_sending } => {
                (lane_failure(&error), matches!(error, LaneError::Closed) && !is_sending)
            }
        };
        self.one.is_broken = true;
        if self.is_last || failure.code != FailureCode::LaneLost {
            return self.queue.fail(failure);
        }
        tracing::warn!(stream = self.one.number, %failure, "a stream for disks broke");
        self.queue.give_back(self.one.marks.take_unmarked());
        let is_settled = has_ended || self.until_refused();
        self.queue.lost(failure, is_settled);
    }

    /// Waits until the destination states that it takes no more of the stream. Returns whether it
    /// did. After a failed send, a mere end would not say so: it may be this side's own.
    fn until_refused(&mut self) -> bool {
        let OneStream { stream, receiver, .. } = &mut *self.one;
        stream.finish_sending();
        let _ = stream.limit_silence(END_LIMIT);
        receiver.limit_time(Some(Instant::now() + END_LIMIT));
        loop {
            match receiver.receive() {
                Ok(Incoming::Message(Message::DiskMarked { .. } | Message::DiskMissing(_))) => {}
                Ok(Incoming::Message(Message::Refused(reason))) => {
                    let failure = Failure::from_peer(&reason);
                    if failure.code != FailureCode::LaneLost {
                        self.queue.fail(failure);
                    }
                    return true;
                }
                Ok(_) | Err(_) => return false,
            }
        }
    }
}

impl Drop for Worker<'_> {
    /// Runs also after a panic: the others wait for what this stream took.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let detail = "a thread that sends disks panicked";
            self.queue.fail(Failure::new(FailureCode::Internal, detail));
        }
        let unmarked = self.one.marks.take_unmarked();
        if !unmarked.is_empty() && !self.is_last {
            self.queue.give_back(unmarked);
        }
        if self.one.is_broken {
            self.one.stream.close();
        }
        self.queue.left();
    }
}

/// Returns the failure of a stream on which the destination sent something else than an answer.
pub(super) fn unexpected(incoming: &Incoming) -> Failure {
    let kind = match incoming {
        Incoming::Message(message) => message.kind(),
        Incoming::Pages(_) => godwit_wire::Kind::Pages,
    };
    lane_failure(&LaneError::Unexpected(kind))
}

fn no_such_disk() -> Failure {
    Failure::new(FailureCode::Internal, "a transfer has no disk of that number")
}
