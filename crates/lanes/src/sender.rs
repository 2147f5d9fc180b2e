//! The sending half of a lane.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

use godwit_ram::{PageRange, Part, Region, send_parts};
use godwit_wire::{BlockRun, MAX_PAGES_PER_FRAME, Message, PageRun, PagesHeader, Zeros};

use crate::LaneError;

/// Frames handed to the kernel in one call: two parts each, under IOV_MAX (1024).
const FRAMES_PER_CALL: usize = 256;
/// Pages handed to the kernel in one call: 4 MiB, so that a cancel or an answer is not kept waiting.
const PAGES_PER_CALL: u64 = 1024;

/// The sending half of a lane.
#[derive(Debug)]
pub struct LaneSender {
    stream: Arc<TcpStream>,
    scratch: Vec<u8>,
    sent_bytes: u64,
}

impl LaneSender {
    pub(crate) fn new(stream: Arc<TcpStream>) -> Self {
        LaneSender { stream, scratch: Vec::new(), sent_bytes: 0 }
    }

    /// Bytes handed to the kernel so far.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Sends a message (not [`Message::Pages`], whose pages [`LaneSender::pages`] sends).
    ///
    /// # Errors
    /// [`LaneError`]: the lane is unusable afterwards.
    pub fn send(&mut self, message: &Message) -> Result<(), LaneError> {
        self.scratch.clear();
        message.encode(&mut self.scratch);
        self.sent_bytes += send_parts(self.stream.as_fd(), &[Part::Bytes(&self.scratch)])?;
        Ok(())
    }

    /// Sends runs of pages of one block as they are in memory now.
    ///
    /// # Errors
    /// [`LaneError`]: the lane is unusable afterwards.
    pub fn pages(
        &mut self,
        round: u32,
        block: u16,
        region: &Region,
        runs: &[PageRange],
    ) -> Result<(), LaneError> {
        let mut frames = frames(round, block, runs).peekable();
        while frames.peek().is_some() {
            let mut batch = Vec::with_capacity(FRAMES_PER_CALL);
            let mut pages = 0;
            while let Some(frame) = frames
                .next_if(|frame| batch.is_empty() || pages + u64::from(frame.run.count) <= PAGES_PER_CALL)
            {
                pages += u64::from(frame.run.count);
                batch.push((
                    frame.to_bytes(),
                    PageRange { first: frame.run.first, count: u64::from(frame.run.count) },
                ));
                if batch.len() == FRAMES_PER_CALL {
                    break;
                }
            }
            let parts: Vec<_> = batch
                .iter()
                .flat_map(|(header, range)| [Part::Bytes(header), Part::Pages(region, *range)])
                .collect();
            self.sent_bytes += send_parts(self.stream.as_fd(), &parts)?;
        }
        Ok(())
    }

    /// Sends runs of zero pages.
    ///
    /// # Errors
    /// [`LaneError`]: the lane is unusable afterwards.
    pub fn zeros(&mut self, round: u32, runs: Vec<BlockRun>) -> Result<(), LaneError> {
        let mut zeros = Zeros { round, runs };
        while !zeros.runs.is_empty() {
            self.scratch.clear();
            let message = Message::Zeros(zeros);
            let taken = message.encode(&mut self.scratch);
            self.sent_bytes += send_parts(self.stream.as_fd(), &[Part::Bytes(&self.scratch)])?;
            let Message::Zeros(rest) = message else {
                return Ok(());
            };
            zeros = rest;
            zeros.runs.drain(..taken);
        }
        Ok(())
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
