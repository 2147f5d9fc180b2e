//! The sending half of a stream.

mod disks;
mod paced;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use godwit_ram::{PageRange, Region};
use godwit_wire::{
    BlockRun, Codec, Delta, Encoding, MAX_PADDING, MAX_PAGES_PER_FRAME, Message, PAGE_SIZE,
    PageRun, PagesHeader, Zeros, checksum,
};

use crate::codec::{Compressor, MAX_PIECE_BYTES};
use crate::delta::{Compared, split_sample};
use crate::link::Link;
use crate::pacing::StreamPace;
use crate::reference::{Knowledge, Lookup};
use crate::unit::Stopwatch;
use crate::{Differing, LaneError, Packing, Referring, UnitPages, UnitSent};
pub use disks::DiskPart;
use paced::Paced;

/// Batch size from which frames are handed to the socket: it sends them while the next pages are
/// copied, checksummed and compressed. Small enough to stay in the CPU's cache.
const BATCH_BYTES: usize = 128 << 10;

/// The sending half of a stream.
#[derive(Debug)]
pub struct StreamSender {
    output: Output,
    batch: Batch,
    /// Copy of pages, to be compressed.
    copy: Vec<u8>,
    /// Differences between the pages and the versions sent before.
    differences: Vec<u8>,
    compressor: Compressor,
    pace: Option<StreamPace>,
}

/// The socket, and the stream's count of bytes handed to it.
#[derive(Clone, Debug)]
struct Output {
    link: Link,
    sent_bytes: Arc<AtomicU64>,
    /// Whether a send has failed. Part of its bytes may be on their way, so nothing may follow
    /// them.
    is_broken: Arc<AtomicBool>,
}

impl Output {
    /// Sends all bytes, whose buffer is undefined afterwards. Returns how many the socket received.
    fn send(&self, bytes: &mut [u8]) -> Result<u64, LaneError> {
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into());
        }
        let sent =
            self.link.send(bytes).inspect_err(|_| self.is_broken.store(true, Ordering::Relaxed))?;
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        Ok(sent)
    }
}

impl StreamSender {
    pub(crate) fn new(link: Link, sent_bytes: Arc<AtomicU64>, pace: Option<StreamPace>) -> Self {
        StreamSender {
            output: Output { link, sent_bytes, is_broken: Arc::default() },
            batch: Batch::default(),
            copy: Vec::new(),
            differences: Vec::new(),
            compressor: Compressor::default(),
            pace,
        }
    }

    fn paced(&self) -> Paced {
        Paced::new(self.output.clone(), self.pace.clone())
    }

    /// Returns the bytes that the stream's senders have handed to the kernel so far.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.output.sent_bytes.load(Ordering::Relaxed)
    }

    /// Sends a message (not [`Message::Pages`], which [`StreamSender::unit`] sends). Returns when
    /// the kernel has accepted all of it.
    ///
    /// # Errors
    /// [`LaneError`]: the kernel has not accepted all of it, so the peer cannot read the message.
    /// Every later send fails as well.
    pub fn send(&mut self, message: &Message) -> Result<(), LaneError> {
        self.batch.clear();
        self.batch.message(message);
        self.output.send(self.batch.bytes())?;
        Ok(())
    }

    /// Sends bytes that the peer discards.
    ///
    /// # Errors
    /// [`LaneError`]: the stream is unusable afterwards.
    pub fn pad(&mut self, mut bytes: u64) -> Result<(), LaneError> {
        let paced = self.paced();
        while bytes > 0 {
            let most = paced.most_bytes(MAX_PADDING);
            let piece = u32::try_from(bytes).unwrap_or(most).min(most);
            paced.wait(u64::from(piece))?;
            self.send(&Message::Padding { bytes: piece })?;
            bytes -= u64::from(piece);
        }
        Ok(())
    }

    /// Sends a unit: runs of pages of one block with their present content, runs that are zero, and
    /// the unit's end. Pages whose compression does not pay go raw, whatever `packing` says. All
    /// pages go from a copy, because the guest writes meanwhile and the checksum must cover the
    /// bytes sent. Without `knowledge` no page is sent by reference or as a delta.
    ///
    /// # Errors
    /// [`LaneError`]: the stream is unusable afterwards.
    pub fn unit(
        &mut self,
        unit: &UnitPages<'_>,
        packing: Packing,
        knowledge: Option<&dyn Knowledge>,
    ) -> Result<UnitSent, LaneError> {
        let &UnitPages { round, block, region, pages, zeros } = unit;
        let mut sent = UnitSent {
            unsent_before_bytes: self.output.link.unsent_bytes(),
            ..UnitSent::default()
        };
        self.batch.clear();
        self.put_zeros(round, block, zeros);
        sent.zero.add(zeros.iter().map(|run| run.count).sum(), self.batch.filled);
        let paced = self.paced();
        for (mut way, runs) in ways(packing, knowledge, pages) {
            if packing.reference == Referring::ProbeFirst && sent.hashing.finds_enough() {
                way.content = knowledge;
            }
            for frame in frames(round, block, &runs, paced.most_pages()) {
                // Only if more follows: the unit's end goes with its last frame.
                if self.batch.filled >= BATCH_BYTES {
                    sent.wire_bytes += self.flush(&paced)?;
                }
                self.put_piece(region, frame, way, &mut sent)?;
            }
        }
        self.batch.message(&Message::UnitEnd);
        sent.wire_bytes += self.flush(&paced)?;
        sent.unsent_after_bytes = self.output.link.unsent_bytes();
        Ok(sent)
    }

    fn put_zeros(&mut self, round: u32, block: u16, zeros: &[PageRange]) {
        let mut runs: Vec<BlockRun> = zeros
            .iter()
            .map(|run| BlockRun { block, first: run.first, count: run.count })
            .collect();
        while !runs.is_empty() {
            let message = Message::Zeros(Zeros { round, runs });
            let taken = self.batch.message(&message);
            let Message::Zeros(rest) = message else { break };
            runs = rest.runs;
            runs.drain(..taken);
        }
    }

    /// Puts one piece: pages that the destination is known to hold go by reference; the others go
    /// as deltas, compressed by the codec, or raw.
    fn put_piece(
        &mut self,
        region: &Region,
        piece: PagesHeader,
        way: Way<'_>,
        sent: &mut UnitSent,
    ) -> Result<(), LaneError> {
        let copy_out = |pages: &mut [u8]| {
            let copied = region.copy_data_out(piece.run.first * u64::from(PAGE_SIZE), pages);
            copied.map_err(|error| LaneError::Memory(error.to_string()))
        };
        if way.is_raw() {
            let bytes = self.batch.pages(piece, copy_out)?;
            sent.raw.add(u64::from(piece.run.count), bytes);
            return Ok(());
        }
        let watch = Stopwatch::start();
        let mut copy = std::mem::take(&mut self.copy);
        copy.resize(MAX_PIECE_BYTES, 0);
        let pages =
            copy.get_mut(..piece.run.count as usize * PAGE_SIZE as usize).unwrap_or_default();
        copy_out(pages)?;
        match way.content {
            None => self.put_rest(piece, way, pages, watch, sent),
            Some(knowledge) => self.put_by_reference(knowledge, piece, way, pages, watch, sent),
        }
        self.copy = copy;
        Ok(())
    }

    /// Puts pages that the destination holds as references, and the others with their content.
    /// `pages`: the piece's content, copied since the start of `watch`.
    fn put_by_reference(
        &mut self,
        knowledge: &dyn Knowledge,
        piece: PagesHeader,
        way: Way<'_>,
        pages: &[u8],
        watch: Stopwatch,
        sent: &mut UnitSent,
    ) {
        let lookup = Lookup::of(knowledge, piece.run, pages);
        sent.hashing.add(piece.run.count, lookup.found(), watch);
        for (run, place) in lookup.runs() {
            let bytes = bytes_of(run, piece.run, pages);
            let Some(place) = place else {
                let watch = Stopwatch::start();
                self.put_rest(PagesHeader { run, ..piece }, way, bytes, watch, sent);
                continue;
            };
            if let Some(history) = way.history {
                let each = (run.first..).zip(bytes.chunks_exact(PAGE_SIZE as usize));
                each.for_each(|(page, bytes)| history.sends(run.block, page, bytes));
            }
            let before = self.batch.filled;
            self.batch.message(&Message::References(lookup.references(piece.round, run, place)));
            sent.reference.add(u64::from(run.count), self.batch.filled - before);
        }
    }

    /// Puts pages that were sent before as deltas where that pays, and the others compressed by the
    /// codec or raw. `watch`: started before the pages were copied.
    fn put_rest(
        &mut self,
        piece: PagesHeader,
        way: Way<'_>,
        pages: &[u8],
        watch: Stopwatch,
        sent: &mut UnitSent,
    ) {
        let Some(history) = way.history else {
            return self.put_frame(piece, way, pages, watch, sent);
        };
        let mut differences = std::mem::take(&mut self.differences);
        let compared = Compared::of(history, piece.run, pages, &mut differences);
        let mut time = watch.elapsed();
        for (run, bases) in compared.runs() {
            let rest = PagesHeader { run, ..piece };
            let begun = Instant::now();
            let as_delta = bases.and_then(|bases| {
                self.put_delta(
                    rest,
                    bases,
                    bytes_of(run, piece.run, &differences),
                    way.sampled,
                    sent,
                )
            });
            time += begun.elapsed();
            if as_delta.is_none() {
                let bytes = bytes_of(run, piece.run, pages);
                self.put_frame(rest, way, bytes, Stopwatch::start(), sent);
            }
        }
        self.differences = differences;
        sent.comparing.pages += u64::from(piece.run.count);
        sent.comparing.time += time;
        if way.sampled {
            sent.comparing.sampled += u64::from(piece.run.count);
        }
    }

    /// Puts pages as a delta. Returns `None` if that does not pay.
    fn put_delta(
        &mut self,
        pages: PagesHeader,
        bases: Vec<u64>,
        differences: &[u8],
        sampled: bool,
        sent: &mut UnitSent,
    ) -> Option<()> {
        let PagesHeader { round, run, .. } = pages;
        let packed = self.compressor.pack(Codec::Lz4, differences)?;
        if packed.len() > Delta::most_packed_bytes(bases.len()) {
            return None;
        }
        let before = self.batch.filled;
        let delta =
            Delta { round, block: run.block, first: run.first, bases, packed: packed.to_vec() };
        self.batch.message(&Message::Delta(delta));
        let bytes = self.batch.filled - before;
        sent.delta.add(u64::from(run.count), bytes);
        if sampled {
            sent.comparing.deltas += u64::from(run.count);
            sent.comparing.delta_bytes += bytes as u64;
        }
        Some(())
    }

    /// Puts one frame, compressed by the codec if that pays. `copy`: its pages; `watch`: started
    /// before they were copied.
    fn put_frame(
        &mut self,
        mut frame: PagesHeader,
        way: Way<'_>,
        copy: &[u8],
        watch: Stopwatch,
        sent: &mut UnitSent,
    ) {
        let pages = u64::from(frame.run.count);
        if let Some(codec) = way.codec {
            let packed = self.compressor.pack(codec, copy);
            let bytes = packed.map_or(copy.len(), <[u8]>::len);
            sent.effort_mut(codec).add(copy.len(), bytes, watch);
            if let Some(packed) = packed {
                // A piece is at most 256 KiB, and by now less than that.
                frame.encoding =
                    Encoding::Compressed { codec, bytes: u32::try_from(bytes).unwrap_or(u32::MAX) };
                let framed = self.batch.frame(frame, packed);
                sent.tally_mut(Some(codec)).add(pages, framed);
            } else {
                let framed = self.batch.frame(frame, copy);
                sent.raw.add(pages, framed);
            }
            return self.compare(way, copy, bytes, sent);
        }
        let bytes = self.batch.frame(frame, copy);
        sent.raw.add(pages, bytes);
    }

    /// Compares the size to which the probed codec packed pages with that of the codec in use.
    fn compare(&mut self, way: Way<'_>, pages: &[u8], probe_bytes: usize, sent: &mut UnitSent) {
        let Some(in_use) = way.in_use else { return };
        let begun = Instant::now();
        let in_use_bytes = self.compressor.pack(in_use, pages).map_or(pages.len(), <[u8]>::len);
        sent.probed.get_or_insert_default().add(probe_bytes, in_use_bytes, begun.elapsed());
    }

    /// Hands the batch to the kernel.
    fn flush(&mut self, paced: &Paced) -> Result<u64, LaneError> {
        let Batch { room, filled, ends, .. } = &mut self.batch;
        let sent = paced.send(&mut room[..*filled], ends)?;
        self.batch.clear();
        Ok(sent)
    }
}

/// Form in which pages are sent.
#[derive(Clone, Copy)]
struct Way<'a> {
    codec: Option<Codec>,
    /// Knowledge of which content the destination holds; `None`: pages are not looked up.
    content: Option<&'a dyn Knowledge>,
    /// Knowledge of the versions sent before; `None`: pages are not compared with them.
    history: Option<&'a dyn Knowledge>,
    /// Whether the pages belong to the sample.
    sampled: bool,
    /// Codec to compare the probed one with.
    in_use: Option<Codec>,
}

impl Way<'_> {
    /// Returns whether the pages go raw, without being examined.
    fn is_raw(self) -> bool {
        self.codec.is_none() && self.content.is_none() && self.history.is_none()
    }
}

/// Splits a unit's pages by the form in which they are sent.
fn ways<'a>(
    packing: Packing,
    knowledge: Option<&'a dyn Knowledge>,
    pages: &[PageRange],
) -> [(Way<'a>, Vec<PageRange>); 3] {
    let refers_first = matches!(packing.reference, Referring::Probe | Referring::ProbeFirst);
    let probes = packing.probe.is_some() || refers_first;
    let (sampled, others) = match packing.delta {
        Differing::No => (Vec::new(), pages.to_vec()),
        Differing::Sample | Differing::All => split_sample(pages),
    };
    let (probed, rest) = split(&others, if probes { u64::from(MAX_PAGES_PER_FRAME) } else { 0 });
    let plain = Way {
        codec: packing.codec,
        content: knowledge.filter(|_| packing.reference == Referring::All),
        history: knowledge.filter(|_| packing.delta == Differing::All),
        sampled: false,
        in_use: None,
    };
    let content = knowledge.filter(|_| packing.reference != Referring::No);
    let in_use = packing.codec.filter(|_| packing.probe.is_some());
    let probe = Way { codec: packing.probe.or(packing.codec), content, in_use, ..plain };
    [(Way { history: knowledge, sampled: true, ..plain }, sampled), (probe, probed), (plain, rest)]
}

/// Returns the bytes of a run within those of a piece that contains it.
fn bytes_of(run: PageRun, piece: PageRun, bytes: &[u8]) -> &[u8] {
    let from = usize::try_from(run.first - piece.first)
        .unwrap_or(usize::MAX)
        .saturating_mul(PAGE_SIZE as usize);
    bytes
        .get(from..)
        .and_then(|rest| rest.get(..run.count as usize * PAGE_SIZE as usize))
        .unwrap_or_default()
}

/// Frames that are sent together.
#[derive(Debug, Default)]
struct Batch {
    /// Buffer that keeps its length, because growing it writes zeros first.
    room: Vec<u8>,
    filled: usize,
    /// Offsets of the ends of frames, ascending.
    ends: Vec<usize>,
    /// Buffer in which a message is encoded.
    message: Vec<u8>,
}

impl Batch {
    fn clear(&mut self) {
        self.filled = 0;
        self.ends.clear();
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.room[..self.filled]
    }

    /// Returns room for so many more bytes.
    fn grow(&mut self, bytes: usize) -> &mut [u8] {
        let start = self.filled;
        self.filled += bytes;
        if self.room.len() < self.filled {
            self.room.resize(self.filled, 0);
        }
        &mut self.room[start..self.filled]
    }

    /// Adds a whole frame. Returns how many of the message's runs it took ([`Message::encode`]).
    fn message(&mut self, message: &Message) -> usize {
        let mut bytes = std::mem::take(&mut self.message);
        bytes.clear();
        let taken = message.encode(&mut bytes);
        self.grow(bytes.len()).copy_from_slice(&bytes);
        self.ends.push(self.filled);
        self.message = bytes;
        taken
    }

    /// Adds a frame of pages, which `copy` copies. Returns the frame's bytes.
    fn pages(
        &mut self,
        frame: PagesHeader,
        copy: impl FnOnce(&mut [u8]) -> Result<(), LaneError>,
    ) -> Result<usize, LaneError> {
        let bytes = PagesHeader::LEN + frame.run.count as usize * PAGE_SIZE as usize;
        let (header, pages) = self.grow(bytes).split_at_mut(PagesHeader::LEN);
        copy(pages)?;
        header.copy_from_slice(&PagesHeader { sum: checksum(pages), ..frame }.to_bytes());
        self.ends.push(self.filled);
        Ok(bytes)
    }

    /// Adds a frame of pages, raw or compressed. Returns the frame's bytes.
    fn frame(&mut self, frame: PagesHeader, content: &[u8]) -> usize {
        let bytes = PagesHeader::LEN + content.len();
        let (header, pages) = self.grow(bytes).split_at_mut(PagesHeader::LEN);
        header.copy_from_slice(&PagesHeader { sum: checksum(content), ..frame }.to_bytes());
        pages.copy_from_slice(content);
        self.ends.push(self.filled);
        bytes
    }
}

/// Splits ascending runs after the first `count` pages.
fn split(runs: &[PageRange], mut count: u64) -> (Vec<PageRange>, Vec<PageRange>) {
    let (mut first, mut rest) = (Vec::new(), Vec::with_capacity(runs.len()));
    for run in runs {
        let (taken, left) = run.split(count);
        count -= taken.count;
        first.extend(Some(taken).filter(|run| !run.is_empty()));
        rest.extend(Some(left).filter(|run| !run.is_empty()));
    }
    (first, rest)
}

/// Splits runs into raw frames of at most so many pages.
fn frames(
    round: u32,
    block: u16,
    runs: &[PageRange],
    most_pages: u32,
) -> impl Iterator<Item = PagesHeader> + '_ {
    runs.iter().flat_map(move |run| run.chunks(u64::from(most_pages))).map(move |piece| {
        let count = u32::try_from(piece.count).unwrap_or(most_pages);
        let run = PageRun { block, first: piece.first, count };
        PagesHeader { round, run, encoding: Encoding::Raw, sum: 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(runs: &[PageRange], most_pages: u32) -> Vec<(u64, u32)> {
        frames(4, 1, runs, most_pages).map(|frame| (frame.run.first, frame.run.count)).collect()
    }

    #[test]
    fn long_runs_are_cut_into_frames() {
        let runs = [PageRange { first: 3, count: 2 }, PageRange { first: 100, count: 1100 }];
        assert_eq!(cut(&runs, 512), [(3, 2), (100, 512), (612, 512), (1124, 76)]);
        assert_eq!(cut(&runs[..1], MAX_PAGES_PER_FRAME), [(3, 2)]);
        assert_eq!(
            cut(&[PageRange { first: 0, count: 70 }], MAX_PAGES_PER_FRAME),
            [(0, 64), (64, 6)]
        );
    }

    #[test]
    fn the_probe_covers_the_beginning() {
        let runs = [PageRange { first: 3, count: 2 }, PageRange { first: 100, count: 9 }];
        let (first, rest) = split(&runs, 5);
        assert_eq!(first, [PageRange { first: 3, count: 2 }, PageRange { first: 100, count: 3 }]);
        assert_eq!(rest, [PageRange { first: 103, count: 6 }]);
        assert_eq!(split(&runs, 0), (Vec::new(), runs.to_vec()));
    }
}
