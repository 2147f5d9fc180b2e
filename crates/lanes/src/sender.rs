//! The sending half of a stream.

mod paced;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_ram::{PageRange, Part, Region};
use godwit_wire::{BlockRun, HEADER_LEN, MAX_PADDING, Message, PageRun, PagesHeader, Zeros};

use crate::LaneError;
use crate::link::Link;
use crate::pacing::StreamPace;
use paced::Paced;

/// The sending half of a stream.
#[derive(Debug)]
pub struct StreamSender {
    output: Output,
    scratch: Vec<u8>,
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
        let output = Output { link, sent_bytes };
        StreamSender { output, scratch: Vec::new(), staging: Vec::new(), pace }
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
        self.scratch.clear();
        message.encode(&mut self.scratch);
        self.output.send(&[Part::Bytes(&self.scratch)], &mut self.staging)?;
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
        let paced = self.paced();
        let headers: Vec<_> = frames(round, block, pages, paced.most_pages())
            .map(|frame| (frame.to_bytes(), frame.run))
            .collect();
        let mut end = Vec::with_capacity(HEADER_LEN);
        Message::UnitEnd.encode(&mut end);
        // The parts, and where a frame ends among them.
        let (mut parts, mut ends) = (vec![Part::Bytes(&self.scratch)], vec![1]);
        for (header, run) in &headers {
            let range = PageRange { first: run.first, count: u64::from(run.count) };
            parts.extend([Part::Bytes(header), Part::Pages(region, range)]);
            ends.push(parts.len());
        }
        parts.push(Part::Bytes(&end));
        ends.push(parts.len());
        let sent = paced.send(&parts, &ends, &mut self.staging)?;
        Ok(sent)
    }
}

/// Runs cut into frames.
fn frames(
    round: u32,
    block: u16,
    runs: &[PageRange],
    most_pages: u32,
) -> impl Iterator<Item = PagesHeader> + '_ {
    runs.iter().flat_map(move |run| {
        let end = run.first + run.count;
        (run.first..end).step_by(most_pages as usize).map(move |first| {
            let count = u32::try_from(end - first).unwrap_or(u32::MAX).min(most_pages);
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
        let cut: Vec<_> = frames(4, 1, &runs, 512).map(|frame| (frame.run.first, frame.run.count)).collect();
        assert_eq!(cut, [(3, 2), (100, 512), (612, 512), (1124, 76)]);
    }
}
