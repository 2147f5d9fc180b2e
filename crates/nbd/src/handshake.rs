//! Handshake: options, until an export is open.

use std::io::{self, Read, Write};

use crate::error::NbdError;
use crate::words::{content_of, shown, u16_of, u32_of, u64_of};

pub(crate) const GREETING: u64 = 0x4e42_444d_4147_4943;
pub(crate) const OPTION: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Flags of the handshake, the same for both sides.
pub(crate) const FIXED_NEWSTYLE: u16 = 1;
pub(crate) const NO_ZEROES: u16 = 2;
/// Option that selects an export.
pub(crate) const GO: u32 = 7;
/// Option for replies in chunks, which contexts need.
pub(crate) const STRUCTURED_REPLY: u32 = 8;
/// Option that selects contexts.
pub(crate) const SET_META_CONTEXT: u32 = 10;
/// Replies to an option.
pub(crate) const ACK: u32 = 1;
pub(crate) const INFO: u32 = 3;
pub(crate) const META_CONTEXT: u32 = 4;
pub(crate) const ERROR: u32 = 1 << 31;
/// Most replies to an option, and the longest one. QEMU sends four short ones.
const MOST_REPLIES: usize = 64;
const MOST_REPLY_BYTES: u32 = 4096;

/// What both sides have agreed on.
#[derive(Debug)]
pub(crate) struct Agreed {
    /// Size of the disk.
    pub(crate) bytes: u64,
    /// What the export can do.
    pub(crate) flags: u16,
    /// Whether replies come in chunks.
    pub(crate) is_structured: bool,
    /// The server's numbers of the contexts, in the order of their names.
    pub(crate) contexts: Vec<u32>,
}

/// Opens an export. `contexts`: names of contexts; `None`: no replies in chunks either.
pub(crate) fn negotiate(
    stream: &mut (impl Read + Write),
    name: &str,
    contexts: Option<&[&str]>,
) -> Result<Agreed, NbdError> {
    if u64_of(stream)? != GREETING || u64_of(stream)? != OPTION {
        return Err(NbdError::Protocol("unexpected greeting"));
    }
    let flags = u16_of(stream)?;
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(NbdError::Protocol("it has no options"));
    }
    stream.write_all(&u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes())?;
    let is_structured = contexts.is_some();
    let mut numbers = Vec::new();
    if let Some(contexts) = contexts {
        send_option(stream, STRUCTURED_REPLY, &[])?;
        if option_reply(stream, STRUCTURED_REPLY)?.0 != ACK {
            return Err(NbdError::Protocol("it answers otherwise"));
        }
        if !contexts.is_empty() {
            numbers = select_contexts(stream, name, contexts)?;
        }
    }
    let (bytes, flags) = go(stream, name)?;
    Ok(Agreed { bytes, flags, is_structured, contexts: numbers })
}

/// Selects contexts of an export; returns the server's numbers of them.
fn select_contexts(
    stream: &mut (impl Read + Write),
    name: &str,
    contexts: &[&str],
) -> Result<Vec<u32>, NbdError> {
    let mut content = counted(name)?;
    content.extend(u32::try_from(contexts.len()).map_err(io::Error::other)?.to_be_bytes());
    for context in contexts {
        content.extend(counted(context)?);
    }
    send_option(stream, SET_META_CONTEXT, &content)?;
    let mut numbers = vec![None; contexts.len()];
    for _ in 0..MOST_REPLIES {
        match option_reply(stream, SET_META_CONTEXT)? {
            (ACK, _) => {
                let missing = |at: usize| NbdError::Refused(format!("it has no {}", contexts[at]));
                let numbers = numbers.into_iter().enumerate();
                return numbers.map(|(at, number)| number.ok_or_else(|| missing(at))).collect();
            }
            (META_CONTEXT, reply) => {
                let (number, context) =
                    reply.split_first_chunk().ok_or(NbdError::Protocol("a context is cut"))?;
                let at = contexts.iter().position(|wanted| wanted.as_bytes() == context);
                let at = at.ok_or(NbdError::Protocol("it selects another context"))?;
                numbers[at] = Some(u32::from_be_bytes(*number));
            }
            _ => return Err(NbdError::Protocol("it answers otherwise")),
        }
    }
    Err(NbdError::Protocol("its answer does not end"))
}

/// Selects an export; returns its size and its flags.
fn go(stream: &mut (impl Read + Write), name: &str) -> Result<(u64, u16), NbdError> {
    let mut content = counted(name)?;
    // It asks for nothing more than the server says by itself.
    content.extend([0; 2]);
    send_option(stream, GO, &content)?;
    let mut found = None;
    for _ in 0..MOST_REPLIES {
        match option_reply(stream, GO)? {
            (ACK, _) => return found.ok_or(NbdError::Protocol("it gives no size")),
            (INFO, reply) if reply.starts_with(&[0, 0]) => {
                let size = reply.get(2..10).and_then(|size| size.try_into().ok());
                let flags = reply.get(10..12).and_then(|flags| flags.try_into().ok());
                found = size.map(u64::from_be_bytes).zip(flags.map(u16::from_be_bytes));
            }
            (INFO, _) => {}
            _ => return Err(NbdError::Protocol("it answers otherwise")),
        }
    }
    Err(NbdError::Protocol("its answer does not end"))
}

/// Returns a text behind its length.
fn counted(text: &str) -> io::Result<Vec<u8>> {
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    let mut counted = length.to_be_bytes().to_vec();
    counted.extend(text.as_bytes());
    Ok(counted)
}

fn send_option(stream: &mut impl Write, option: u32, content: &[u8]) -> io::Result<()> {
    let length = u32::try_from(content.len()).map_err(io::Error::other)?;
    let mut message = OPTION.to_be_bytes().to_vec();
    message.extend(option.to_be_bytes());
    message.extend(length.to_be_bytes());
    message.extend(content);
    stream.write_all(&message)?;
    stream.flush()
}

/// Reads a reply to an option: its kind and its content.
fn option_reply(stream: &mut impl Read, option: u32) -> Result<(u32, Vec<u8>), NbdError> {
    if u64_of(stream)? != OPTION_REPLY || u32_of(stream)? != option {
        return Err(NbdError::Protocol("it answers otherwise"));
    }
    let (kind, length) = (u32_of(stream)?, u32_of(stream)?);
    if length > MOST_REPLY_BYTES {
        return Err(NbdError::Protocol("its answer is too long"));
    }
    let reply = content_of(stream, length)?;
    if kind & ERROR != 0 {
        let why = String::from_utf8_lossy(&reply);
        let why = if why.is_empty() { "no reason given" } else { &*why };
        return Err(NbdError::Refused(shown(why)));
    }
    Ok((kind, reply))
}
