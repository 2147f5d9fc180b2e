//! The thread of one stream in a round: it takes chunks, reads them, sends them, and waits for the
//! destination's marks.

use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, Packing, Stream, StreamReceiver, StreamSender};
use godwit_wire::Message;

use crate::encoding::Chooser;
use crate::failure::{Failure, FailureCode, lane_failure};

use super::access::DiskReader;
use super::marks::Marks;
use super::parts::{parts, zero_and_other_bytes};
use super::queue::{Queue, Take};
use super::range::{CHUNK_BYTES, DiskRange};

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

/// What a stream sent in a round.
#[derive(Debug, Default)]
pub(super) struct Carried {
    pub(super) wire_bytes: u64,
    /// Bytes of each disk, and those of them that were zero.
    pub(super) by_disk: Vec<(u64, u64)>,
}

impl Carried {
    fn add(&mut self, disk: usize, bytes: u64, zero_bytes: u64) {
        if self.by_disk.len() <= disk {
            self.by_disk.resize(disk + 1, (0, 0));
        }
        if let Some((all, zero)) = self.by_disk.get_mut(disk) {
            *all += bytes;
            *zero += zero_bytes;
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
    /// Whether this is the last round: the guest is paused, and marks are not waited for.
    pub(super) is_last: bool,
}

impl Worker<'_> {
    /// Works until the round is over for this stream.
    pub(super) fn run(mut self) -> Carried {
        let mut carried = Carried::default();
        let before = self.one.sender.sent_bytes();
        if let Err(stopped) = self.work(&mut carried) {
            self.stopped(stopped);
        }
        carried.wire_bytes = self.one.sender.sent_bytes() - before;
        carried
    }

    fn work(&mut self, carried: &mut Carried) -> Result<(), Stopped> {
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
                    self.send(chunk, carried)?;
                    if self.one.marks.is_due(self.is_last) {
                        self.mark()?;
                    }
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

    /// Reads a chunk and sends it.
    fn send(&mut self, chunk: DiskRange, carried: &mut Carried) -> Result<(), Stopped> {
        let OneStream { sender, reader, chooser, marks, buffer, .. } = &mut *self.one;
        // Comes first: whatever happens, it is given back.
        marks.sends(chunk);
        // A queue makes no chunk that is longer.
        let length = usize::try_from(chunk.bytes.min(CHUNK_BYTES)).unwrap_or_default();
        buffer.resize(buffer.len().max(length), 0);
        let bytes = buffer.get_mut(..length).unwrap_or_default();
        reader.read_at(chunk.disk, chunk.offset, bytes).map_err(Stopped::Failed)?;
        let disk = u16::try_from(chunk.disk).map_err(|_| Stopped::Failed(no_such_disk()))?;
        let parts = parts(chunk.offset, bytes);
        let (zero_bytes, other_bytes) = zero_and_other_bytes(&parts);
        let packing = match other_bytes {
            0 => Packing::default(),
            bytes => chooser.packing(bytes, self.is_last),
        };
        let begun = Instant::now();
        let sent = sender
            .disk_parts(disk, &parts, packing)
            .map_err(|error| Stopped::Broke { error, is_sending: true })?;
        if other_bytes > 0 {
            chooser.sent(packing, &sent, begun.elapsed());
        }
        carried.add(chunk.disk, chunk.bytes, zero_bytes);
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
            Ok(Incoming::Message(Message::Refused(reason))) => {
                Err(Stopped::Refused(Failure::from_peer(&reason)))
            }
            Ok(other) => Err(Stopped::Failed(unexpected(&other))),
            Err(error) => Err(Stopped::Broke { error, is_sending: false }),
        }
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
                Ok(Incoming::Message(Message::DiskMarked { .. })) => {}
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
