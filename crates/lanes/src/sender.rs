//! The sending half of a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_ram::{PageRange, Part, Region};
use godwit_wire::{
    BlockRun, HEADER_LEN, MAX_PADDING, MAX_PAGES_PER_FRAME, Message, PageRun, PagesHeader, Zeros,
};

use crate::LaneError;
use crate::link::Link;

/// The sending half of a stream.
#[derive(Debug)]
pub struct StreamSender {
    link: Link,
    scratch: Vec<u8>,
    staging: Vec<u8>,
    /// The stream's count.
    sent_bytes: Arc<AtomicU64>,
}

impl StreamSender {
    pub(crate) fn new(link: Link, sent_bytes: Arc<AtomicU64>) -> Self {
        StreamSender { link, scratch: Vec::new(), staging: Vec::new(), sent_bytes }
    }

    /// Bytes that the stream's senders have handed to the kernel so far.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    /// Sends a message (not [`Message::Pages`], which [`StreamSender::unit`] sends).
    ///
    /// # Errors
    /// [`LaneError`]: the stream is unusable afterwards.
    pub fn send(&mut self, message: &Message) -> Result<(), LaneError> {
        self.scratch.clear();
        message.encode(&mut self.scratch);
        let sent = self.link.send(&[Part::Bytes(&self.scratch)], &mut self.staging)?;
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        Ok(())
    }

    /// Sends bytes that the peer drops.
    ///
    /// # Errors
    /// [`LaneError`]: the stream is unusable afterwards.
    pub fn pad(&mut self, mut bytes: u64) -> Result<(), LaneError> {
        while bytes > 0 {
            let piece = u32::try_from(bytes).unwrap_or(MAX_PADDING).min(MAX_PADDING);
            self.send(&Message::Padding { bytes: piece })?;
            bytes -= u64::from(piece);
        }
        Ok(())
    }

    /// Sends a unit: runs of pages of one block as they are in memory now, runs that are zero, and the unit's end. Returns the
    /// bytes handed to the kernel.
    ///
    /// # Errors
    /// [`LaneError`]: the stream is unusable afterwards.
    pub fn unit(
        &mut self,
        round: u32,
        block: u16,
        region: &Region,
        pages: &[PageRange],
        zeros: &[PageRange],
    ) -> Result<u64, LaneError> {
        self.scratch.clear();
        let mut runs: Vec<BlockRun> =
            zeros.iter().map(|run| BlockRun { block, first: run.first, count: run.count }).collect();
        while !runs.is_empty() {
            let message = Message::Zeros(Zeros { round, runs });
            let taken = message.encode(&mut self.scratch);
            let Message::Zeros(rest) = message else { break };
            runs = rest.runs;
            runs.drain(..taken);
        }
        let headers: Vec<_> =
            frames(round, block, pages).map(|frame| (frame.to_bytes(), frame.run)).collect();
        let mut end = Vec::with_capacity(HEADER_LEN);
        Message::UnitEnd.encode(&mut end);
        let mut parts = vec![Part::Bytes(&self.scratch)];
        for (header, run) in &headers {
            let range = PageRange { first: run.first, count: u64::from(run.count) };
            parts.extend([Part::Bytes(header), Part::Pages(region, range)]);
        }
        parts.push(Part::Bytes(&end));
        let sent = self.link.send(&parts, &mut self.staging)?;
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        Ok(sent)
    }
}

/// Runs cut into frames.
fn frames(round: u32, block: u16, runs: &[PageRange]) -> impl Iterator<Item = PagesHeader> + '_ {
    runs.iter().flat_map(move |run| {
        let end = run.first + run.count;
        (run.first..end).step_by(MAX_PAGES_PER_FRAME as usize).map(move |first| {
            let count = u32::try_from(end - first).unwrap_or(u32::MAX).min(MAX_PAGES_PER_FRAME);
            PagesHeader { round, run: PageRun { block, first, count } }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_are_cut_into_frames() {
        let runs = [PageRange { first: 3, count: 2 }, PageRange { first: 100, count: 1100 }];
        let cut: Vec<_> = frames(4, 1, &runs).map(|frame| (frame.run.first, frame.run.count)).collect();
        assert_eq!(cut, [(3, 2), (100, 512), (612, 512), (1124, 76)]);
    }
}
