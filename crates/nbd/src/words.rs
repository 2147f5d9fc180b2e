//! Numbers and texts of the protocol.

use std::io::{self, Read};

/// Longest text of a server in a message, in characters.
const MOST_SHOWN: usize = 200;

/// Returns text of a server for a message: without control characters, and not too long.
pub(crate) fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MOST_SHOWN).collect()
}

/// Reads a message of a length that the caller has checked.
pub(crate) fn content_of(stream: &mut impl Read, length: u32) -> io::Result<Vec<u8>> {
    let mut content = vec![0; length as usize];
    stream.read_exact(&mut content)?;
    Ok(content)
}

fn bytes_of<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

pub(crate) fn u16_of(stream: &mut impl Read) -> io::Result<u16> {
    Ok(u16::from_be_bytes(bytes_of(stream)?))
}

pub(crate) fn u32_of(stream: &mut impl Read) -> io::Result<u32> {
    Ok(u32::from_be_bytes(bytes_of(stream)?))
}

pub(crate) fn u64_of(stream: &mut impl Read) -> io::Result<u64> {
    Ok(u64::from_be_bytes(bytes_of(stream)?))
}
