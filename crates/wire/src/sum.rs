//! The checksum of frames: CRC-32C, the Castagnoli polynomial (RFC 3720, appendix B.4).
//!
//! It detects every change within 32 consecutive bits and every change of up to three bits in a
//! frame. Of other changes it misses one in 2^32. Ethernet uses another polynomial, so the two do
//! not miss the same changes for the same reason.

use crc_fast::{CrcAlgorithm, Digest, crc32_iscsi};

/// Returns the checksum of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32_iscsi(bytes)
}

/// Running [`checksum`] of bytes that arrive in pieces.
#[derive(Debug)]
pub struct Checksum(Digest);

impl Default for Checksum {
    fn default() -> Self {
        Checksum(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }
}

impl Checksum {
    /// Adds bytes to the checksum.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the checksum of all bytes added so far.
    #[must_use]
    pub fn value(&self) -> u32 {
        // The value has 32 bits, whatever the type; the crate's other checksums have 64.
        u32::try_from(self.0.finalize()).unwrap_or(u32::MAX)
    }
}
