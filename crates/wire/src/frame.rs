//! The frame header.

use crate::kind::MAX_LENGTH;
use crate::{Kind, WireError, checksum};

/// Bytes of a frame header: kind (1), payload length (3), the payload's checksum (4), the header's
/// own (4).
pub const HEADER_LEN: usize = 12;
/// Bytes of the header before its own checksum.
const SUMMED: usize = HEADER_LEN - 4;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub kind: Kind,
    /// Length of the payload in bytes, within the kind's bounds.
    pub length: u32,
    /// The payload's [`checksum`]. In a pages frame it covers the fields, and a field holds the
    /// checksum of the pages.
    pub sum: u32,
}

impl FrameHeader {
    /// Parses a header and verifies its checksum and the kind's length bounds.
    ///
    /// # Errors
    /// [`WireError::Corrupted`], [`WireError::UnknownKind`], [`WireError::BadLength`].
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<FrameHeader, WireError> {
        let [code, l0, l1, l2, s0, s1, s2, s3, own @ ..] = *bytes;
        if checksum(&bytes[..SUMMED]) != u32::from_le_bytes(own) {
            return Err(WireError::Corrupted { what: "a frame's header" });
        }
        let kind = Kind::from_code(code).ok_or(WireError::UnknownKind { kind: code })?;
        let length = u32::from_le_bytes([l0, l1, l2, 0]);
        let (least, most) = kind.bounds();
        if (least..=most).contains(&length) {
            Ok(FrameHeader { kind, length, sum: u32::from_le_bytes([s0, s1, s2, s3]) })
        } else {
            Err(WireError::BadLength { kind, length, least, most })
        }
    }

    /// Returns the header's bytes. A length that does not fit becomes the longest one, which
    /// exceeds every kind's bounds.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let [l0, l1, l2, _] = self.length.min(MAX_LENGTH).to_le_bytes();
        let [s0, s1, s2, s3] = self.sum.to_le_bytes();
        let [o0, o1, o2, o3] =
            checksum(&[self.kind as u8, l0, l1, l2, s0, s1, s2, s3]).to_le_bytes();
        [self.kind as u8, l0, l1, l2, s0, s1, s2, s3, o0, o1, o2, o3]
    }
}
