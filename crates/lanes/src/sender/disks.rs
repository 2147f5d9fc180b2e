//! Sending parts of disks.

use godwit_wire::{
    DiskBlocksHeader, DiskZeros, MAX_DISK_BLOCKS, MAX_PAGES_PER_FRAME, Message, PAGE_SIZE,
};

use super::{BATCH_BYTES, Batch, StreamSender};
use crate::unit::Stopwatch;
use crate::{LaneError, Packing, UnitSent};

/// Part of a disk that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskPart<'a> {
    /// Bytes with their content.
    Blocks { offset: u64, bytes: &'a [u8] },
    /// Bytes that are zero.
    Zeros { offset: u64, bytes: u64 },
}

/// Bytes on which a codec is tried.
const PROBE_BYTES: usize = (MAX_PAGES_PER_FRAME * PAGE_SIZE) as usize;

impl StreamSender {
    /// Sends parts of a disk, paced like pages. Blocks whose compression does not pay go raw. The
    /// result counts 4 KiB as a page. References and deltas do not apply.
    ///
    /// # Errors
    /// [`LaneError`]: the stream is unusable afterwards.
    pub fn disk_parts(
        &mut self,
        disk: u16,
        parts: &[DiskPart<'_>],
        packing: Packing,
    ) -> Result<UnitSent, LaneError> {
        let paced = self.paced();
        let most_bytes = paced.most_bytes(MAX_DISK_BLOCKS).max(PAGE_SIZE) as usize;
        let mut sent = UnitSent {
            unsent_before_bytes: self.output.link.unsent_bytes(),
            ..UnitSent::default()
        };
        let mut probed = if packing.probe.is_some() { PROBE_BYTES } else { 0 };
        self.batch.clear();
        for part in parts {
            match *part {
                DiskPart::Zeros { offset, bytes } => {
                    self.put_disk_zeros(DiskZeros { disk, offset, bytes }, &mut sent);
                }
                DiskPart::Blocks { mut offset, bytes } => {
                    for raw in bytes.chunks(most_bytes) {
                        let codec = if probed > 0 { packing.probe } else { packing.codec };
                        probed = probed.saturating_sub(raw.len());
                        let raw_bytes = u32::try_from(raw.len()).unwrap_or(u32::MAX);
                        let header = DiskBlocksHeader { disk, codec, raw_bytes, offset };
                        self.put_disk_blocks(header, raw, &mut sent);
                        offset += u64::from(raw_bytes);
                        if self.batch.filled >= BATCH_BYTES {
                            sent.wire_bytes += self.flush(&paced)?;
                        }
                    }
                }
            }
        }
        sent.wire_bytes += self.flush(&paced)?;
        sent.unsent_after_bytes = self.output.link.unsent_bytes();
        Ok(sent)
    }

    fn put_disk_zeros(&mut self, zeros: DiskZeros, sent: &mut UnitSent) {
        let before = self.batch.filled;
        self.batch.message(&Message::DiskZeros(zeros));
        sent.zero.add(pages(zeros.bytes), self.batch.filled - before);
    }

    /// Puts one frame, compressed by the header's codec if that pays.
    fn put_disk_blocks(&mut self, mut header: DiskBlocksHeader, raw: &[u8], sent: &mut UnitSent) {
        let count = pages(raw.len() as u64);
        if let Some(codec) = header.codec {
            let watch = Stopwatch::start();
            let packed = self.compressor.pack(codec, raw);
            let packed_bytes = packed.map_or(raw.len(), <[u8]>::len);
            sent.effort_mut(codec).add(raw.len(), packed_bytes, watch);
            if let Some(packed) = packed {
                let bytes = self.batch.disk_blocks(header, packed);
                return sent.tally_mut(Some(codec)).add(count, bytes);
            }
        }
        header.codec = None;
        let bytes = self.batch.disk_blocks(header, raw);
        sent.raw.add(count, bytes);
    }
}

/// Returns the pages that so many bytes count as.
fn pages(bytes: u64) -> u64 {
    bytes.div_ceil(u64::from(PAGE_SIZE))
}

impl Batch {
    /// Adds a frame of blocks, raw or compressed. Returns the frame's bytes.
    fn disk_blocks(&mut self, header: DiskBlocksHeader, content: &[u8]) -> usize {
        let bytes = DiskBlocksHeader::LEN + content.len();
        let (prefix, blocks) = self.grow(bytes).split_at_mut(DiskBlocksHeader::LEN);
        prefix.copy_from_slice(&header.to_bytes(content));
        blocks.copy_from_slice(content);
        self.ends.push(self.filled);
        bytes
    }
}
