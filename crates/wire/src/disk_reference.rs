//! References to content of disks: hashes in place of bytes that a destination may hold, and what
//! it has not got of them.

use crate::cursor::Cursor;
use crate::disk::{check_end, decode_disk};
use crate::{DISK_UNIT_BYTES, MAX_DISK_REFERENCES, WireError};

/// BLAKE3 hash of [`DISK_UNIT_BYTES`] of a disk.
pub type DiskHash = [u8; 32];

/// Consecutive units of a disk, each of [`DISK_UNIT_BYTES`], by their hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskReferences {
    /// Number of the disk in the transfer.
    pub disk: u16,
    /// Offset of the first unit on the disk, a multiple of [`DISK_UNIT_BYTES`].
    pub offset: u64,
    /// Hash of each unit, 1 to [`MAX_DISK_REFERENCES`] of them. Content with another hash is not
    /// used.
    pub hashes: Vec<DiskHash>,
}

impl DiskReferences {
    /// Returns the number of bytes that the hashes stand for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(DISK_UNIT_BYTES) * self.hashes.len() as u64
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.disk.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        self.hashes.iter().for_each(|hash| out.extend_from_slice(hash));
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<DiskReferences, WireError> {
        let disk = decode_disk(cursor)?;
        let offset = decode_offset(cursor)?;
        let mut hashes = Vec::new();
        while !cursor.is_empty() {
            hashes.push(cursor.array("the hash of a disk's bytes")?);
        }
        Ok(DiskReferences { disk, offset, hashes })
    }
}

/// Units of one [`DiskReferences`] whose content the destination has not got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskMissing {
    /// The disk of the references.
    pub disk: u16,
    /// A bit for each unit that is missing, that of the first one the lowest; at least one is set.
    pub units: u16,
    /// The offset of the references.
    pub offset: u64,
}

const _: () = assert!(MAX_DISK_REFERENCES == u16::BITS);

impl DiskMissing {
    /// Returns the position among the references of each unit that is missing.
    pub fn positions(self) -> impl Iterator<Item = u32> {
        (0..u16::BITS).filter(move |position| self.units & (1 << position) != 0)
    }

    pub(crate) fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.disk.to_le_bytes());
        out.extend_from_slice(&self.units.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<DiskMissing, WireError> {
        let disk = decode_disk(cursor)?;
        let units = cursor.u16("the missing units")?;
        if units == 0 {
            return Err(WireError::BadValue { what: "the missing units" });
        }
        Ok(DiskMissing { disk, units, offset: decode_offset(cursor)? })
    }
}

/// Reads where units begin. All that one frame can name from there on is within the range of
/// offsets.
fn decode_offset(cursor: &mut Cursor<'_>) -> Result<u64, WireError> {
    let offset = cursor.u64("the units' offset")?;
    if !offset.is_multiple_of(u64::from(DISK_UNIT_BYTES)) {
        return Err(WireError::BadValue { what: "the units' offset" });
    }
    check_end(offset, u64::from(DISK_UNIT_BYTES) * u64::from(MAX_DISK_REFERENCES))?;
    Ok(offset)
}
