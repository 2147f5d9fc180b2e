//! The checksum of frames: CRC-32C, the polynomial of Castagnoli (RFC 3720, appendix B.4).
//!
//! It notices every change within 32 bits in a row and every change of up to three bits of a frame, and of others all but one of 2^32.
//! Ethernet sums by another polynomial: what goes unnoticed there does not go unnoticed here for the same reason.

use crc_fast::{CrcAlgorithm, Digest, crc32_iscsi};

/// The checksum of bytes.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32_iscsi(bytes)
}

/// The [`checksum`] of bytes that come in pieces.
#[derive(Debug)]
pub struct Checksum(Digest);

impl Default for Checksum {
    fn default() -> Self {
        Checksum(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }
}

impl Checksum {
    /// Goes on with these bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Of all bytes so far.
    #[must_use]
    pub fn value(&self) -> u32 {
        // It has 32 bits, whatever the type: others of the crate have 64.
        u32::try_from(self.0.finalize()).unwrap_or(u32::MAX)
    }
}
