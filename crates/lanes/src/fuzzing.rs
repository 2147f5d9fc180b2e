//! Access for the fuzz targets to internals of this crate. It is not a stable interface.

use std::net::TcpStream;
use std::os::fd::OwnedFd;

use godwit_wire::Codec;

use crate::StreamReceiver;
use crate::codec::{Compressor, MAX_PIECE_BYTES, Unpacker};
use crate::link::Link;

/// Returns the receiving half over any stream socket.
#[must_use]
pub fn receiver(socket: OwnedFd) -> StreamReceiver {
    StreamReceiver::new(Link::plain_over(TcpStream::from(socket)))
}

/// Largest piece, in unpacked bytes.
pub const PIECE_BYTES: usize = MAX_PIECE_BYTES;

/// Packs and unpacks pieces as streams do.
#[derive(Debug, Default)]
pub struct Pieces {
    compressor: Compressor,
    unpacker: Unpacker,
}

impl Pieces {
    /// Compresses a piece. Returns `None` if compression does not pay.
    pub fn pack(&mut self, codec: Codec, raw: &[u8]) -> Option<&[u8]> {
        self.compressor.pack(codec, raw)
    }

    /// Returns the content of a piece, or `None` if it is not exactly `raw_bytes` bytes.
    pub fn unpack(&mut self, codec: Codec, packed: &[u8], raw_bytes: usize) -> Option<&[u8]> {
        self.unpacker.unpack(codec, packed, raw_bytes)
    }
}
