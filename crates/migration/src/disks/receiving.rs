//! The destination's side of one stream: it writes what arrives, and answers each mark when all
//! before it is durable. Nothing that the source sends is trusted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, Stream, StreamReceiver, StreamSender};
use godwit_wire::{
    DISK_UNIT_BYTES, DiskBlocks, DiskMissing, DiskReferences, DiskZeros, Kind, MAX_STREAMS, Message,
};

use crate::drive::WelcomedStream;
use crate::failure::{Failure, FailureCode, lane_failure};

use super::access::DiskWriter;
use super::at_once::at_once;
use super::lookup::Lookup;
use super::marks::MOST_UNMARKED_RANGES;
use super::range::{CHUNK_BYTES, DiskRange, push_merged};
use super::referring::UNIT_BYTES;

/// Bytes after which they are flushed without a mark: an honest source sends one much earlier, but
/// in the last round.
const MOST_UNFLUSHED_BYTES: u64 = 64 << 20;

/// Longest silence of a source. The kernel notices a host that is gone long before.
const SILENCE_LIMIT: Duration = Duration::from_secs(3600);
/// Longest time for which a source that was refused may go on sending. Its bytes are discarded
/// meanwhile: a connection that is closed with bytes unread may lose the refusal.
const REFUSAL_LIMIT: Duration = Duration::from_secs(5);

/// End of a stream for disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// The source ended the stream, and all that it brought is durable.
    Ended {
        /// Number of streams that end so, as the source states it. The transfer is complete when so
        /// many streams have ended with the same number and no other one is being received.
        streams: u16,
    },
    /// The stream broke, or the source was refused. What followed the last mark may be written or
    /// not.
    Broken(Failure),
}

/// Receives one stream until it ends or breaks. The writers, by number of the disk, are shared by
/// all streams; `sizes` are the sizes of the disks in bytes. `lookup` finds content that the source
/// refers to; without it, a reference breaks the protocol. `marked` receives what is durable from
/// now on, ranges that may be in any order and may repeat what was there before; the source learns
/// of it when `marked` has returned.
///
/// Nothing is written any more when the function has returned. The source relies on that: it may
/// send newer content of the same bytes on another stream as soon as it knows of this stream's end.
/// So all streams of a transfer must have returned before further ones are accepted after a cut.
pub fn receive_disks(
    stream: WelcomedStream,
    writers: &[Arc<dyn DiskWriter>],
    sizes: &[u64],
    lookup: Option<&Lookup>,
    marked: &dyn Fn(&[DiskRange]) -> Result<(), Failure>,
) -> StreamEnd {
    let WelcomedStream { number, stream, sender, receiver } = stream;
    let disks = Disks {
        writers,
        sizes,
        fresh: Vec::new(),
        touched: vec![false; writers.len()],
        unflushed_bytes: 0,
        references: 0,
    };
    let unit = Vec::new();
    let mut arriving = Arriving { stream, sender, receiver, disks, lookup, unit, marked, mark: 0 };
    match arriving.until_end(number) {
        Ok(streams) => StreamEnd::Ended { streams },
        Err(failure) => {
            arriving.refuse(&failure);
            StreamEnd::Broken(failure)
        }
    }
}

/// A stream that is received.
struct Arriving<'a> {
    stream: Stream,
    sender: StreamSender,
    receiver: StreamReceiver,
    disks: Disks<'a>,
    lookup: Option<&'a Lookup>,
    /// Content that was looked up.
    unit: Vec<u8>,
    marked: &'a dyn Fn(&[DiskRange]) -> Result<(), Failure>,
    /// Number of the last mark.
    mark: u64,
}

/// The disks, and what the stream has written of them since the last mark.
struct Disks<'a> {
    writers: &'a [Arc<dyn DiskWriter>],
    sizes: &'a [u64],
    fresh: Vec<DiskRange>,
    /// The disks that have writes which are not flushed.
    touched: Vec<bool>,
    unflushed_bytes: u64,
    /// Frames of references since the last mark.
    references: usize,
}

impl Arriving<'_> {
    /// Receives until the end. Returns the number of streams that the source states.
    fn until_end(&mut self, number: u16) -> Result<u16, Failure> {
        if !(1..=MAX_STREAMS).contains(&number) {
            return Err(broken_protocol(format!("no stream for disks has the number {number}")));
        }
        self.stream
            .limit_silence(SILENCE_LIMIT)
            .and_then(|()| self.stream.probe_silent_peer())
            .map_err(|error| lane_failure(&error))?;
        loop {
            match self.receiver.receive().map_err(|error| lane_failure(&error))? {
                Incoming::Message(Message::DiskBlocks(blocks)) => self.write(&blocks)?,
                Incoming::Message(Message::DiskZeros(zeros)) => self.disks.zero(zeros)?,
                Incoming::Message(Message::DiskReferences(named)) => self.look_up(&named)?,
                Incoming::Message(Message::DiskMark { mark }) => {
                    self.settle(mark)?;
                    self.answer(mark).map_err(|error| lane_failure(&error))?;
                }
                Incoming::Message(Message::DiskEnd { streams, mark }) => {
                    self.settle(mark)?;
                    // All is here, whether the source learns of it or not.
                    if let Err(error) = self.answer(mark) {
                        tracing::debug!(%error, "the source did not get the confirmation of disks");
                    }
                    return Ok(streams);
                }
                Incoming::Message(Message::Padding { .. }) => {}
                Incoming::Message(other) => return Err(unexpected(other.kind())),
                Incoming::Pages(_) => return Err(unexpected(Kind::Pages)),
            }
        }
    }

    fn write(&mut self, blocks: &DiskBlocks) -> Result<(), Failure> {
        // Before anything is unpacked.
        let range = self.disks.check(
            blocks.header.disk,
            blocks.header.offset,
            blocks.header.raw_bytes.into(),
        )?;
        let bytes = self.receiver.blocks(blocks).map_err(|error| lane_failure(&error))?;
        self.disks.writer(range.disk)?.write_at(range.offset, bytes)?;
        self.disks.wrote(range)
    }

    /// Writes the content that this host has, and names the rest to the source.
    fn look_up(&mut self, named: &DiskReferences) -> Result<(), Failure> {
        let Some(lookup) = self.lookup else { return Err(unexpected(Kind::DiskReferences)) };
        let all = self.disks.check(named.disk, named.offset, named.bytes())?;
        self.disks.refer()?;
        self.unit.resize(UNIT_BYTES, 0);
        let (bytes, mut units) = (u64::from(DISK_UNIT_BYTES), 0_u16);
        for (position, hash) in (0_u32..).zip(&named.hashes) {
            let offset = all.offset + u64::from(position) * bytes;
            let unit = DiskRange { disk: all.disk, offset, bytes };
            if lookup.find(unit, hash, &mut self.unit) {
                self.disks.writer(unit.disk)?.write_at(unit.offset, &self.unit)?;
                self.disks.wrote(unit)?;
            } else {
                // A frame has no more references than bits.
                units |= 1_u16.checked_shl(position).unwrap_or(0);
            }
        }
        if units == 0 {
            return Ok(());
        }
        let missing = DiskMissing { disk: named.disk, units, offset: named.offset };
        let sent = self.sender.send(&Message::DiskMissing(missing));
        sent.map_err(|error| lane_failure(&error))
    }

    /// Makes durable what was written since the last mark.
    fn settle(&mut self, mark: u64) -> Result<(), Failure> {
        if self.mark.checked_add(1) != Some(mark) {
            let detail = format!("the source sent mark {mark} after mark {}", self.mark);
            return Err(broken_protocol(detail));
        }
        self.mark = mark;
        let durable = self.disks.flush()?;
        if durable.is_empty() { Ok(()) } else { (self.marked)(&durable) }
    }

    fn answer(&mut self, mark: u64) -> Result<(), LaneError> {
        self.sender.send(&Message::DiskMarked { mark })
    }

    /// Sends the reason for which no more is taken of the stream. After a mere break it tells the
    /// source, if that still listens, that nothing is written any more.
    fn refuse(&mut self, failure: &Failure) {
        if self.sender.send(&Message::Refused(failure.to_reason())).is_err() {
            return;
        }
        self.stream.finish_sending();
        let limited = self.stream.limit_silence(REFUSAL_LIMIT);
        self.receiver.limit_time(Some(Instant::now() + REFUSAL_LIMIT));
        while limited.is_ok() && self.receiver.receive().is_ok() {}
    }
}

impl Disks<'_> {
    /// Checks that a disk has these bytes, and that the source has sent a mark often enough.
    fn check(&self, disk: u16, offset: u64, bytes: u64) -> Result<DiskRange, Failure> {
        let range = DiskRange { disk: usize::from(disk), offset, bytes };
        let end = offset.checked_add(bytes);
        let size = self.sizes.get(range.disk).filter(|size| end.is_some_and(|end| end <= **size));
        if size.is_none() || bytes == 0 {
            return Err(broken_protocol(format!(
                "the source sent bytes that no disk has (disk {disk}, {bytes} bytes from {offset})"
            )));
        }
        if self.fresh.len() >= MOST_UNMARKED_RANGES {
            return Err(broken_protocol("the source sends no mark".to_owned()));
        }
        Ok(range)
    }

    /// Counts a frame of references, which may leave nothing behind.
    fn refer(&mut self) -> Result<(), Failure> {
        self.references += 1;
        if self.references > MOST_UNMARKED_RANGES {
            return Err(broken_protocol("the source sends references and no mark".to_owned()));
        }
        Ok(())
    }

    fn writer(&self, disk: usize) -> Result<&dyn DiskWriter, Failure> {
        let missing = || Failure::new(FailureCode::Internal, "a disk that arrives has no writer");
        self.writers.get(disk).map(|writer| &**writer).ok_or_else(missing)
    }

    fn zero(&mut self, zeros: DiskZeros) -> Result<(), Failure> {
        let range = self.check(zeros.disk, zeros.offset, zeros.bytes)?;
        // Where there are no holes, zeros are written, and nothing interrupts that.
        if range.bytes > CHUNK_BYTES {
            return Err(broken_protocol(format!("the source sent {} zeros at once", range.bytes)));
        }
        self.writer(range.disk)?.write_zeros(range.offset, range.bytes)?;
        self.wrote(range)
    }

    /// Notes what was written. Flushes it if the source sends no mark for long: a flush sees
    /// whether the file system fills up.
    fn wrote(&mut self, range: DiskRange) -> Result<(), Failure> {
        if let Some(touched) = self.touched.get_mut(range.disk) {
            *touched = true;
        }
        push_merged(&mut self.fresh, range);
        self.unflushed_bytes += range.bytes;
        if self.unflushed_bytes < MOST_UNFLUSHED_BYTES {
            return Ok(());
        }
        self.flush_writers()
    }

    /// Flushes the disks that were written, several at the same time: in the last round the guest
    /// is paused.
    fn flush_writers(&mut self) -> Result<(), Failure> {
        self.unflushed_bytes = 0;
        let touched = self.writers.iter().zip(&mut self.touched);
        let touched: Vec<_> = touched
            .filter_map(|(writer, touched)| std::mem::take(touched).then_some(writer))
            .collect();
        at_once(&touched, |writer| writer.flush())
    }

    /// Flushes the disks that were written. Returns what is durable since then.
    fn flush(&mut self) -> Result<Vec<DiskRange>, Failure> {
        self.flush_writers()?;
        self.references = 0;
        Ok(std::mem::take(&mut self.fresh))
    }
}

fn unexpected(kind: Kind) -> Failure {
    lane_failure(&LaneError::Unexpected(kind))
}

fn broken_protocol(detail: String) -> Failure {
    Failure::new(FailureCode::ProtocolBroken, detail)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts flushes.
    #[derive(Default)]
    struct Flushed(AtomicUsize);

    impl DiskWriter for Flushed {
        fn write_at(&self, _: u64, _: &[u8]) -> Result<(), Failure> {
            Ok(())
        }

        fn write_zeros(&self, _: u64, _: u64) -> Result<(), Failure> {
            Ok(())
        }

        fn flush(&self) -> Result<(), Failure> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn a_source_that_sends_no_mark_is_flushed_all_the_same() {
        let flushed = Arc::new(Flushed::default());
        let writers: [Arc<dyn DiskWriter>; 1] = [flushed.clone()];
        let (sizes, touched) = ([1 << 40], vec![false]);
        let mut disks = Disks {
            writers: &writers,
            sizes: &sizes,
            fresh: Vec::new(),
            touched,
            unflushed_bytes: 0,
            references: 0,
        };
        for chunk in 0..MOST_UNFLUSHED_BYTES / CHUNK_BYTES {
            assert_eq!(flushed.0.load(Ordering::Relaxed), 0);
            let offset = chunk * CHUNK_BYTES;
            disks.zero(DiskZeros { disk: 0, offset, bytes: CHUNK_BYTES }).unwrap();
        }
        assert_eq!(flushed.0.load(Ordering::Relaxed), 1);
        // What the mark then makes durable is all of it, and nothing is flushed twice.
        let all = DiskRange { disk: 0, offset: 0, bytes: MOST_UNFLUSHED_BYTES };
        assert_eq!(disks.flush().unwrap(), [all]);
        assert_eq!(flushed.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn references_without_a_mark_have_a_limit() {
        let (sizes, touched) = ([1 << 40], vec![false]);
        let mut disks = Disks {
            writers: &[],
            sizes: &sizes,
            fresh: Vec::new(),
            touched,
            unflushed_bytes: 0,
            references: 0,
        };
        for _ in 0..2 {
            (0..MOST_UNMARKED_RANGES).for_each(|_| disks.refer().unwrap());
            assert_eq!(disks.refer().unwrap_err().code, FailureCode::ProtocolBroken);
            disks.flush().unwrap();
        }
    }
}
