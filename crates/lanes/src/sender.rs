//! The sending half of a stream.

mod paced;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_ram::{PageRange, Part, Region};
use godwit_wire::{
    BlockRun, Codec, Delta, Encoding, MAX_COMPRESSED_PAGES, MAX_PADDING, Message, PAGE_SIZE, PageRun,
    PagesHeader, Zeros,
};

use crate::codec::{Compressor, MAX_PIECE_BYTES};
use crate::delta::{Compared, split_sample};
use crate::link::Link;
use crate::pacing::StreamPace;
use crate::reference::{Knowledge, Sought};
use crate::{Differing, LaneError, Packing, Referring, UnitPages, UnitSent};
use paced::Paced;

/// Compressed bytes that are handed to the socket in one call: it sends them while the next pages are compressed.
const BATCH_BYTES: usize = 128 << 10;

/// The sending half of a stream.
#[derive(Debug)]
pub struct StreamSender {
    output: Output,
    batch: Batch,
    /// A copy of pages, to be compressed.
    copy: Vec<u8>,
    /// What differs between them and what was sent of them before.
    differences: Vec<u8>,
    compressor: Compressor,
    staging: Vec<u8>,
    pace: Option<StreamPace>,
}

/// The socket, and the stream's count of what was handed to it.
#[derive(Clone, Debug)]
struct Output {
    link: Link,
    sent_bytes: Arc<AtomicU64>,
}

impl Output {
    fn send(&self, parts: &[Part<'_>], staging: &mut Vec<u8>) -> Result<u64, LaneError> {
        let sent = self.link.send(parts, staging)?;
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        Ok(sent)
    }
}

impl StreamSender {
    pub(crate) fn new(link: Link, sent_bytes: Arc<AtomicU64>, pace: Option<StreamPace>) -> Self {
        StreamSender {
            output: Output { link, sent_bytes },
            batch: Batch::default(),
            copy: Vec::new(),
            differences: Vec::new(),
            compressor: Compressor::default(),
            staging: Vec::new(),
            pace,
        }
    }

    fn paced(&self) -> Paced {
        Paced::new(self.output.clone(), self.pace.clone())
    }

    /// Bytes that the stream's senders have handed to the kernel so far.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.output.sent_bytes.load(Ordering::Relaxed)
    }

    /// Sends a message (not [`Message::Pages`], which [`StreamSender::unit`] sends).
    ///
    /// # Errors
    /// [`LaneError`]: the stream is unusable afterwards.
    pub fn send(&mut self, message: &Message) -> Result<(), LaneError> {
        self.batch.clear();
        message.encode(&mut self.batch.bytes);
        self.output.send(&[Part::Bytes(&self.batch.bytes)], &mut self.staging)?;
        Ok(())
    }

    /// Sends bytes that the peer drops.
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

    /// Sends a unit: runs of pages of one block as they are in memory now, runs that are zero, and the unit's end. Pages that
    /// are not worth their compression go raw, whatever `packing` says, and straight from guest memory. Without `knowledge`
    /// none is told by its content or by what differs.
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
        let mut sent =
            UnitSent { unsent_before_bytes: self.output.link.unsent_bytes(), ..UnitSent::default() };
        self.batch.clear();
        self.put_zeros(round, block, zeros);
        sent.zero.add(zeros.iter().map(|run| run.count).sum(), self.batch.bytes.len());
        let paced = self.paced();
        for (way, runs) in ways(packing, knowledge, pages) {
            let most = if way.is_raw() { u32::MAX } else { MAX_COMPRESSED_PAGES }.min(paced.most_pages());
            for frame in frames(round, block, &runs, most) {
                self.put_piece(region, frame, way, &mut sent)?;
                if self.batch.bytes.len() >= BATCH_BYTES {
                    sent.wire_bytes += self.flush(region, &paced)?;
                }
            }
        }
        Message::UnitEnd.encode(&mut self.batch.bytes);
        sent.wire_bytes += self.flush(region, &paced)?;
        sent.unsent_after_bytes = self.output.link.unsent_bytes();
        Ok(sent)
    }

    fn put_zeros(&mut self, round: u32, block: u16, zeros: &[PageRange]) {
        let mut runs: Vec<BlockRun> =
            zeros.iter().map(|run| BlockRun { block, first: run.first, count: run.count }).collect();
        while !runs.is_empty() {
            let message = Message::Zeros(Zeros { round, runs });
            let taken = message.encode(&mut self.batch.bytes);
            let Message::Zeros(rest) = message else { break };
            runs = rest.runs;
            runs.drain(..taken);
        }
    }

    /// One piece: what is known to be at the destination is told, the rest goes by what differs, in the codec's form or raw.
    fn put_piece(
        &mut self,
        region: &Region,
        piece: PagesHeader,
        way: Way<'_>,
        sent: &mut UnitSent,
    ) -> Result<(), LaneError> {
        if way.is_raw() {
            self.put_frame(piece, way, &[], Duration::ZERO, sent);
            return Ok(());
        }
        let begun = Instant::now();
        let mut copy = std::mem::take(&mut self.copy);
        copy.resize(MAX_PIECE_BYTES, 0);
        let pages = copy.get_mut(..piece.run.count as usize * PAGE_SIZE as usize).unwrap_or_default();
        region
            .copy_out(piece.run.first * u64::from(PAGE_SIZE), pages)
            .map_err(|error| LaneError::Memory(error.to_string()))?;
        match way.content {
            None => self.put_rest(piece, way, pages, begun.elapsed(), sent),
            Some(knowledge) => self.put_told(knowledge, piece, way, pages, begun, sent),
        }
        self.copy = copy;
        Ok(())
    }

    /// What the destination has is told by its content, the rest sent. `pages`: what the piece holds, copied since `begun`.
    fn put_told(
        &mut self,
        knowledge: &dyn Knowledge,
        piece: PagesHeader,
        way: Way<'_>,
        pages: &[u8],
        begun: Instant,
        sent: &mut UnitSent,
    ) {
        let sought = Sought::of(knowledge, piece.run, pages);
        sent.hashing.add(piece.run.count, sought.found(), begun.elapsed());
        for (run, place) in sought.runs() {
            let bytes = bytes_of(run, piece.run, pages);
            let Some(place) = place else {
                self.put_rest(PagesHeader { run, ..piece }, way, bytes, Duration::ZERO, sent);
                continue;
            };
            if let Some(history) = way.history {
                let each = (run.first..).zip(bytes.chunks_exact(PAGE_SIZE as usize));
                each.for_each(|(page, bytes)| history.sends(run.block, page, bytes));
            }
            let before = self.batch.bytes.len();
            Message::References(sought.references(piece.round, run, place)).encode(&mut self.batch.bytes);
            sent.reference.add(u64::from(run.count), self.batch.bytes.len() - before);
        }
    }

    /// What was sent before is told by what differs, where that pays; the rest goes in the codec's form or raw. `copying`: what
    /// making the copy of the pages has cost.
    fn put_rest(
        &mut self,
        piece: PagesHeader,
        way: Way<'_>,
        pages: &[u8],
        copying: Duration,
        sent: &mut UnitSent,
    ) {
        let Some(history) = way.history else {
            return self.put_frame(piece, way, pages, copying, sent);
        };
        let begun = Instant::now();
        let mut differences = std::mem::take(&mut self.differences);
        let compared = Compared::of(history, piece.run, pages, &mut differences);
        let mut time = copying + begun.elapsed();
        for (run, bases) in compared.runs() {
            let rest = PagesHeader { run, ..piece };
            let begun = Instant::now();
            let told = bases.and_then(|bases| {
                self.put_delta(rest, bases, bytes_of(run, piece.run, &differences), way.sampled, sent)
            });
            time += begun.elapsed();
            if told.is_none() {
                self.put_frame(rest, way, bytes_of(run, piece.run, pages), Duration::ZERO, sent);
            }
        }
        self.differences = differences;
        sent.comparing.pages += u64::from(piece.run.count);
        sent.comparing.time += time;
        if way.sampled {
            sent.comparing.sampled += u64::from(piece.run.count);
        }
    }

    /// Pages by what differs; none where that does not pay.
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
        let before = self.batch.bytes.len();
        let delta = Delta { round, block: run.block, first: run.first, bases, packed: packed.to_vec() };
        Message::Delta(delta).encode(&mut self.batch.bytes);
        let bytes = self.batch.bytes.len() - before;
        sent.delta.add(u64::from(run.count), bytes);
        if sampled {
            sent.comparing.told += u64::from(run.count);
            sent.comparing.told_bytes += bytes as u64;
        }
        Some(())
    }

    /// One frame, in the codec's form where that pays. `copy`: its pages, where its way is not raw; `copying`: what making it has
    /// cost.
    fn put_frame(
        &mut self,
        mut frame: PagesHeader,
        way: Way<'_>,
        copy: &[u8],
        copying: Duration,
        sent: &mut UnitSent,
    ) {
        let range = PageRange { first: frame.run.first, count: u64::from(frame.run.count) };
        let raw_bytes = frame.run.count as usize * PAGE_SIZE as usize;
        if let Some(codec) = way.codec {
            let begun = Instant::now();
            let packed = self.compressor.pack(codec, copy);
            let bytes = packed.map_or(raw_bytes, <[u8]>::len);
            sent.effort_mut(codec).add(raw_bytes, bytes, copying + begun.elapsed());
            if let Some(packed) = packed {
                // A piece is at most 256 KiB, and less than that by now.
                frame.encoding =
                    Encoding::Compressed { codec, bytes: u32::try_from(bytes).unwrap_or(u32::MAX) };
                self.batch.bytes.extend_from_slice(&frame.to_bytes());
                self.batch.bytes.extend_from_slice(packed);
                sent.tally_mut(Some(codec)).add(range.count, PagesHeader::LEN + bytes);
                return;
            }
        }
        self.batch.bytes.extend_from_slice(&frame.to_bytes());
        match way.history {
            // What is remembered of them, not what they hold by the time that the kernel reads them.
            Some(_) => self.batch.bytes.extend_from_slice(copy),
            None => self.batch.pages(range),
        }
        sent.tally_mut(None).add(range.count, PagesHeader::LEN + raw_bytes);
    }

    /// Hands what has been put together to the kernel.
    fn flush(&mut self, region: &Region, paced: &Paced) -> Result<u64, LaneError> {
        let (parts, ends) = self.batch.parts(region);
        let sent = paced.send(&parts, &ends, &mut self.staging)?;
        self.batch.clear();
        Ok(sent)
    }
}

/// How pages are sent.
#[derive(Clone, Copy)]
struct Way<'a> {
    codec: Option<Codec>,
    /// What tells where the destination has their content; none: they are not looked for.
    content: Option<&'a dyn Knowledge>,
    /// What tells what was sent of them before; none: they are not compared with that.
    history: Option<&'a dyn Knowledge>,
    /// They are of the sample.
    sampled: bool,
}

impl Way<'_> {
    /// Straight from memory.
    fn is_raw(self) -> bool {
        self.codec.is_none() && self.content.is_none() && self.history.is_none()
    }
}

/// A unit's pages by how they are sent.
fn ways<'a>(
    packing: Packing,
    knowledge: Option<&'a dyn Knowledge>,
    pages: &[PageRange],
) -> [(Way<'a>, Vec<PageRange>); 3] {
    let probes = packing.probe.is_some() || packing.reference == Referring::Probe;
    let (sampled, others) = match packing.delta {
        Differing::No => (Vec::new(), pages.to_vec()),
        Differing::Sample | Differing::All => split_sample(pages),
    };
    let (probed, rest) = split(&others, if probes { u64::from(MAX_COMPRESSED_PAGES) } else { 0 });
    let plain = Way {
        codec: packing.codec,
        content: knowledge.filter(|_| packing.reference == Referring::All),
        history: knowledge.filter(|_| packing.delta == Differing::All),
        sampled: false,
    };
    let content = knowledge.filter(|_| packing.reference != Referring::No);
    let probe = Way { codec: packing.probe.or(packing.codec), content, ..plain };
    [(Way { history: knowledge, sampled: true, ..plain }, sampled), (probe, probed), (plain, rest)]
}

/// The bytes of a run within those of a piece that it lies in.
fn bytes_of(run: PageRun, piece: PageRun, bytes: &[u8]) -> &[u8] {
    let from =
        usize::try_from(run.first - piece.first).unwrap_or(usize::MAX).saturating_mul(PAGE_SIZE as usize);
    bytes.get(from..).and_then(|rest| rest.get(..run.count as usize * PAGE_SIZE as usize)).unwrap_or_default()
}

/// What is sent in one call: bytes, and pages that follow some of them.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    /// Pages, each with the place in the bytes that it follows.
    pages: Vec<(usize, PageRange)>,
}

impl Batch {
    fn clear(&mut self) {
        self.bytes.clear();
        self.pages.clear();
    }

    /// Pages that follow what was put so far.
    fn pages(&mut self, range: PageRange) {
        self.pages.push((self.bytes.len(), range));
    }

    /// The parts, and places among them before which a frame ends.
    fn parts<'a>(&'a self, region: &'a Region) -> (Vec<Part<'a>>, Vec<usize>) {
        let mut parts = Vec::with_capacity(2 * self.pages.len() + 1);
        let mut ends = Vec::with_capacity(self.pages.len() + 1);
        let bytes = |range: Range<usize>| Part::Bytes(&self.bytes[range]);
        let mut from = 0;
        for &(place, range) in &self.pages {
            parts.extend([bytes(from..place), Part::Pages(region, range)]);
            ends.push(parts.len());
            from = place;
        }
        parts.push(bytes(from..self.bytes.len()));
        ends.push(parts.len());
        (parts, ends)
    }
}

/// The first `count` pages of ascending runs, and the rest.
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

/// Runs cut into raw frames of at most so many pages.
fn frames(
    round: u32,
    block: u16,
    runs: &[PageRange],
    most_pages: u32,
) -> impl Iterator<Item = PagesHeader> + '_ {
    runs.iter().flat_map(move |run| run.chunks(u64::from(most_pages))).map(move |piece| {
        let count = u32::try_from(piece.count).unwrap_or(most_pages);
        let run = PageRun { block, first: piece.first, count };
        PagesHeader { round, run, encoding: Encoding::Raw }
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
        assert_eq!(cut(&runs[..1], MAX_COMPRESSED_PAGES), [(3, 2)]);
        assert_eq!(cut(&[PageRange { first: 0, count: 70 }], MAX_COMPRESSED_PAGES), [(0, 64), (64, 6)]);
    }

    #[test]
    fn what_is_probed_is_the_beginning() {
        let runs = [PageRange { first: 3, count: 2 }, PageRange { first: 100, count: 9 }];
        let (first, rest) = split(&runs, 5);
        assert_eq!(first, [PageRange { first: 3, count: 2 }, PageRange { first: 100, count: 3 }]);
        assert_eq!(rest, [PageRange { first: 103, count: 6 }]);
        assert_eq!(split(&runs, 0), (Vec::new(), runs.to_vec()));
    }
}
