//! Sending as fast as the stream's limits allow: piece by piece, each of whole frames, so that a
//! stream that waits between two pieces can send padding.

use godwit_ram::PAGE_SIZE;
use godwit_wire::{MAX_PAGES_PER_FRAME, Message};

use crate::LaneError;
use crate::pacing::StreamPace;
use crate::sender::Output;

/// Stream with its present limits.
pub(super) struct Paced {
    output: Output,
    pace: Option<StreamPace>,
    /// Bytes sent at a time; `None`: not paced.
    piece_bytes: Option<u64>,
}

impl Paced {
    pub(super) fn new(output: Output, pace: Option<StreamPace>) -> Self {
        let piece_bytes = pace.as_ref().and_then(StreamPace::piece_bytes);
        Paced { output, pace, piece_bytes }
    }

    /// Returns the largest payload of one frame, bytes.
    pub(super) fn most_bytes(&self, most: u32) -> u32 {
        self.piece_bytes.map_or(most, |piece| u32::try_from(piece).unwrap_or(most).min(most))
    }

    /// Returns the most pages of one frame.
    pub(super) fn most_pages(&self) -> u32 {
        let pages = |piece: u64| u32::try_from(piece / PAGE_SIZE).unwrap_or(MAX_PAGES_PER_FRAME);
        self.piece_bytes
            .map_or(MAX_PAGES_PER_FRAME, |piece| pages(piece).clamp(1, MAX_PAGES_PER_FRAME))
    }

    /// Waits until so many bytes may be sent. Returns the bytes of padding that were sent meanwhile
    /// to keep the peer from silence.
    pub(super) fn wait(&self, bytes: u64) -> Result<u64, LaneError> {
        let mut sent_bytes = 0;
        if let Some(pace) = &self.pace {
            pace.take(bytes, || {
                let mut padding = Vec::new();
                Message::Padding { bytes: 1 }.encode(&mut padding);
                sent_bytes += self.output.send(&mut padding)?;
                Ok(())
            })?;
        }
        Ok(sent_bytes)
    }

    /// Sends frames, which end at the ascending offsets `ends`, as [`Output::send`] does. Returns
    /// the bytes sent.
    pub(super) fn send(&self, frames: &mut [u8], ends: &[usize]) -> Result<u64, LaneError> {
        let Some(piece_bytes) = self.piece_bytes else { return self.output.send(frames) };
        let (mut rest, mut at, mut sent) = (frames, 0, 0);
        for end in pieces(rest.len(), ends, piece_bytes) {
            let (piece, after) = rest.split_at_mut(end - at);
            sent += self.wait(piece.len() as u64)?;
            sent += self.output.send(piece)?;
            (rest, at) = (after, end);
        }
        Ok(sent)
    }
}

/// Groups frames, of `bytes` together, into pieces of at most so many bytes. A larger frame is a
/// piece of its own. Returns the ends of the pieces.
fn pieces(bytes: usize, ends: &[usize], most_bytes: u64) -> Vec<usize> {
    let mut cuts = Vec::new();
    let (mut piece, mut from) = (0, 0);
    for &end in ends {
        if from > piece && (end - piece) as u64 > most_bytes {
            cuts.push(from);
            piece = from;
        }
        from = end;
    }
    cuts.push(bytes);
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_put_together_and_never_cut() {
        // Frames of 20, 110, 10 and 10 bytes.
        let cut = |most| pieces(150, &[20, 130, 140, 150], most);
        assert_eq!(cut(1), [20, 130, 140, 150]);
        assert_eq!(cut(20), [20, 130, 150]);
        assert_eq!(cut(130), [130, 150]);
        assert_eq!(cut(1000), [150]);
    }
}
