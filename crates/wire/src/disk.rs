//! Disks that travel with a guest: their bytes, as the streams for disks carry them.

use crate::cursor::Cursor;
use crate::frame::HEADER_LEN;
use crate::kind::DISK_BLOCKS_HEADER;
use crate::{
    Checksum, Codec, FrameHeader, Kind, MAX_DISK_BLOCKS, MAX_DISKS, MAX_STREAMS, WireError,
};

/// Bytes of a disk, raw or compressed in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskBlocks {
    pub header: DiskBlocksHeader,
    /// The bytes; with a codec, compressed to fewer than the disk has there.
    pub content: Vec<u8>,
}

/// Fields before the bytes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskBlocksHeader {
    /// Number of the disk in the transfer.
    pub disk: u16,
    /// The compression method; `None`: the bytes are raw.
    pub codec: Option<Codec>,
    /// Uncompressed size, 1 to [`MAX_DISK_BLOCKS`].
    pub raw_bytes: u32,
    /// Offset of the first byte on the disk.
    pub offset: u64,
}

/// Bytes of a frame of blocks before its content.
const PREFIX: usize = HEADER_LEN + DISK_BLOCKS_HEADER as usize;

impl DiskBlocksHeader {
    /// Bytes before the content: frame header and fields.
    pub const LEN: usize = PREFIX;

    /// Returns the bytes of the frame that precede this content.
    #[must_use]
    pub fn to_bytes(self, content: &[u8]) -> [u8; PREFIX] {
        let fields = self.fields();
        let mut sum = Checksum::default();
        sum.add(&fields);
        sum.add(content);
        let length = u32::try_from(fields.len() + content.len()).unwrap_or(u32::MAX);
        let header = FrameHeader { kind: Kind::DiskBlocks, length, sum: sum.value() };
        let mut bytes = [0; PREFIX];
        bytes[..HEADER_LEN].copy_from_slice(&header.to_bytes());
        bytes[HEADER_LEN..].copy_from_slice(&fields);
        bytes
    }

    fn fields(self) -> [u8; DISK_BLOCKS_HEADER as usize] {
        let mut fields = [0; DISK_BLOCKS_HEADER as usize];
        fields[..2].copy_from_slice(&self.disk.to_le_bytes());
        fields[2] = self.codec.map_or(0, |codec| codec as u8);
        fields[4..8].copy_from_slice(&self.raw_bytes.to_le_bytes());
        fields[8..].copy_from_slice(&self.offset.to_le_bytes());
        fields
    }
}

impl DiskBlocks {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.header.fields());
        out.extend_from_slice(&self.content);
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<DiskBlocks, WireError> {
        let disk = decode_disk(cursor)?;
        let codec = match cursor.u8("the blocks' codec")? {
            0 => None,
            code => Some(
                Codec::from_code(code).ok_or(WireError::BadValue { what: "the blocks' codec" })?,
            ),
        };
        if cursor.u8("the blocks' reserved byte")? != 0 {
            return Err(WireError::BadValue { what: "the blocks' reserved byte" });
        }
        let raw_bytes = cursor.u32("the blocks' length")?;
        let offset = cursor.u64("the blocks' offset")?;
        let content = cursor.rest();
        let fits = match codec {
            None => content.len() == raw_bytes as usize,
            Some(_) => (1..raw_bytes as usize).contains(&content.len()),
        };
        if !fits || !(1..=MAX_DISK_BLOCKS).contains(&raw_bytes) {
            return Err(WireError::BadValue { what: "the blocks' length" });
        }
        check_end(offset, raw_bytes.into())?;
        let header = DiskBlocksHeader { disk, codec, raw_bytes, offset };
        Ok(DiskBlocks { header, content: content.to_vec() })
    }
}

/// Bytes of a disk that are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskZeros {
    /// Number of the disk in the transfer.
    pub disk: u16,
    /// Offset of the first byte on the disk.
    pub offset: u64,
    /// Number of bytes, at least one.
    pub bytes: u64,
}

impl DiskZeros {
    pub(crate) fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.disk.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<DiskZeros, WireError> {
        let disk = decode_disk(cursor)?;
        let offset = cursor.u64("the zeros' offset")?;
        let bytes = cursor.u64("the zeros' length")?;
        if bytes == 0 {
            return Err(WireError::BadValue { what: "the zeros' length" });
        }
        check_end(offset, bytes)?;
        Ok(DiskZeros { disk, offset, bytes })
    }
}

/// Reads the end of the disks: the number of streams that carried them, and the last mark.
pub(crate) fn decode_end(cursor: &mut Cursor<'_>) -> Result<(u16, u64), WireError> {
    let streams = cursor.u16("the streams of disks")?;
    if !(1..=MAX_STREAMS).contains(&streams) {
        return Err(WireError::BadValue { what: "the streams of disks" });
    }
    Ok((streams, cursor.u64("the mark")?))
}

pub(crate) fn decode_disk(cursor: &mut Cursor<'_>) -> Result<u16, WireError> {
    match cursor.u16("the disk's number")? {
        disk if disk < MAX_DISKS => Ok(disk),
        _ => Err(WireError::BadValue { what: "the disk's number" }),
    }
}

pub(crate) fn check_end(offset: u64, bytes: u64) -> Result<(), WireError> {
    match offset.checked_add(bytes) {
        Some(_) => Ok(()),
        None => Err(WireError::BadValue { what: "an offset on a disk" }),
    }
}
