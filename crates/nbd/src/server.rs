//! Server of one client that writes: it takes what the client writes, and gives nothing back.
//!
//! The client is untrusted: lengths are bounded, ranges are within the export, and nothing is kept
//! between two requests.

use std::io::{Read, Write};

use crate::error::NbdError;
use crate::export::{REQUEST, SENDS_FLUSH, SENDS_ZEROES, SIMPLE_REPLY};
use crate::handshake::{
    ACK, ERROR, FIXED_NEWSTYLE, GO, GREETING, INFO, NO_ZEROES, OPTION, OPTION_REPLY,
};
use crate::words::{content_of, u16_of, u32_of, u64_of};

/// Options besides [`GO`]. `INFO_OF` asks for the same without selecting the export.
const ABORT: u32 = 2;
const INFO_OF: u32 = 6;
/// Errors of options.
const UNSUPPORTED: u32 = ERROR | 1;
const INVALID_OPTION: u32 = ERROR | 3;
const UNKNOWN: u32 = ERROR | 6;
/// Kinds of information about an export.
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;
/// Flags of an export besides those that the client knows.
const HAS_FLAGS: u16 = 1;
const SENDS_FUA: u16 = 1 << 3;
const SENDS_TRIM: u16 = 1 << 5;
/// Commands.
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
/// Error numbers of replies, which are those of Linux.
const NO_SPACE: u32 = 28;
const INVALID: u32 = 22;
/// Most options of a handshake, and the longest one. QEMU sends fewer than ten short ones.
const MOST_OPTIONS: usize = 32;
const MOST_OPTION_BYTES: u32 = 8192;
/// Most bytes of one write. The client learns it in the handshake.
const MOST_WRITE_BYTES: u32 = 4 << 20;
/// Block sizes that the client learns: the smallest and the preferred one.
const LEAST_BLOCK_BYTES: u32 = 1;
const PREFERRED_BLOCK_BYTES: u32 = 64 << 10;

/// A request that changes the disk, or that asks for durability.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdRequest {
    /// Write these bytes.
    Write { at: u64, bytes: Vec<u8> },
    /// Make a part zeros. A client that discards a part sends it, too.
    Zeros { at: u64, bytes: u64 },
    /// Make durable what was written.
    Flush,
}

/// A connected client of an export.
#[derive(Debug)]
pub struct NbdServer<S> {
    stream: S,
    export: usize,
    bytes: u64,
}

impl<S: Read + Write> NbdServer<S> {
    /// Carries out the handshake with a client. `exports`: name and size of each export.
    ///
    /// # Errors
    /// The client leaves, or it speaks another protocol.
    pub fn accept(mut stream: S, exports: &[(String, u64)]) -> Result<NbdServer<S>, NbdError> {
        let mut greeting = GREETING.to_be_bytes().to_vec();
        greeting.extend(OPTION.to_be_bytes());
        greeting.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        stream.write_all(&greeting)?;
        stream.flush()?;
        if u32_of(&mut stream)? & u32::from(FIXED_NEWSTYLE) == 0 {
            return Err(NbdError::Protocol("the client has no options"));
        }
        for _ in 0..MOST_OPTIONS {
            if u64_of(&mut stream)? != OPTION {
                return Err(NbdError::Protocol("the client sends no option"));
            }
            let (option, length) = (u32_of(&mut stream)?, u32_of(&mut stream)?);
            if length > MOST_OPTION_BYTES {
                return Err(NbdError::Protocol("an option of the client is too long"));
            }
            let content = content_of(&mut stream, length)?;
            match option {
                GO | INFO_OF => {
                    let Some(name) = name_of(&content) else {
                        send_reply(&mut stream, option, INVALID_OPTION, &[])?;
                        continue;
                    };
                    let found = exports.iter().enumerate().find(|(_, (known, _))| known == name);
                    let Some((export, (_, bytes))) = found else {
                        send_reply(&mut stream, option, UNKNOWN, &[])?;
                        continue;
                    };
                    send_info(&mut stream, option, *bytes)?;
                    if option == GO {
                        return Ok(NbdServer { stream, export, bytes: *bytes });
                    }
                }
                ABORT => {
                    send_reply(&mut stream, option, ACK, &[])?;
                    return Err(NbdError::Protocol("the client has ended the handshake"));
                }
                _ => send_reply(&mut stream, option, UNSUPPORTED, &[])?,
            }
        }
        Err(NbdError::Protocol("the options of the client do not end"))
    }

    /// Returns the position of the export that the client has selected.
    #[must_use]
    pub fn export(&self) -> usize {
        self.export
    }

    /// Waits for the next request, and returns it with its cookie for [`NbdServer::reply`].
    /// `None`: the client has disconnected. Requests that are invalid, or that read, are refused
    /// here.
    ///
    /// # Errors
    /// The connection ends, or the client sends something else.
    pub fn next_request(&mut self) -> Result<Option<(u64, NbdRequest)>, NbdError> {
        loop {
            if u32_of(&mut self.stream)? != REQUEST {
                return Err(NbdError::Protocol("the client sends no request"));
            }
            // None of the flags changes what a request does here.
            let (_flags, command) = (u16_of(&mut self.stream)?, u16_of(&mut self.stream)?);
            let (cookie, at) = (u64_of(&mut self.stream)?, u64_of(&mut self.stream)?);
            let length = u32_of(&mut self.stream)?;
            let is_within = at.checked_add(length.into()).is_some_and(|end| end <= self.bytes);
            let is_valid = is_within && length > 0;
            match command {
                WRITE => {
                    if length > MOST_WRITE_BYTES {
                        return Err(NbdError::Protocol("a write of the client is too long"));
                    }
                    let bytes = content_of(&mut self.stream, length)?;
                    if is_valid {
                        return Ok(Some((cookie, NbdRequest::Write { at, bytes })));
                    }
                }
                TRIM | WRITE_ZEROES if is_valid => {
                    return Ok(Some((cookie, NbdRequest::Zeros { at, bytes: length.into() })));
                }
                FLUSH => return Ok(Some((cookie, NbdRequest::Flush))),
                DISCONNECT => return Ok(None),
                _ => {}
            }
            self.send(cookie, INVALID)?;
        }
    }

    /// Answers a request. `is_done`: whether it was carried out; otherwise there is no space.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn reply(&mut self, cookie: u64, is_done: bool) -> Result<(), NbdError> {
        self.send(cookie, if is_done { 0 } else { NO_SPACE })
    }

    fn send(&mut self, cookie: u64, error: u32) -> Result<(), NbdError> {
        let mut reply = SIMPLE_REPLY.to_be_bytes().to_vec();
        reply.extend(error.to_be_bytes());
        reply.extend(cookie.to_be_bytes());
        self.stream.write_all(&reply)?;
        Ok(self.stream.flush()?)
    }
}

/// Returns the name of the export in an option.
fn name_of(content: &[u8]) -> Option<&str> {
    let (length, rest) = content.split_first_chunk()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    std::str::from_utf8(rest.get(..length)?).ok()
}

fn send_info(stream: &mut impl Write, option: u32, bytes: u64) -> Result<(), NbdError> {
    let flags = HAS_FLAGS | SENDS_FLUSH | SENDS_FUA | SENDS_TRIM | SENDS_ZEROES;
    let mut info = INFO_EXPORT.to_be_bytes().to_vec();
    info.extend(bytes.to_be_bytes());
    info.extend(flags.to_be_bytes());
    send_reply(stream, option, INFO, &info)?;
    let mut info = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
    for size in [LEAST_BLOCK_BYTES, PREFERRED_BLOCK_BYTES, MOST_WRITE_BYTES] {
        info.extend(size.to_be_bytes());
    }
    send_reply(stream, option, INFO, &info)?;
    send_reply(stream, option, ACK, &[])
}

fn send_reply(
    stream: &mut impl Write,
    option: u32,
    kind: u32,
    content: &[u8],
) -> Result<(), NbdError> {
    let mut reply = OPTION_REPLY.to_be_bytes().to_vec();
    reply.extend(option.to_be_bytes());
    reply.extend(kind.to_be_bytes());
    // All contents are made here, and short.
    reply.extend(u32::try_from(content.len()).unwrap_or_default().to_be_bytes());
    reply.extend(content);
    stream.write_all(&reply)?;
    Ok(stream.flush()?)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    use super::*;
    use crate::NbdExport;
    use crate::tests::Said;

    const MIB: u64 = 1 << 20;

    fn exports() -> Vec<(String, u64)> {
        vec![("disk0".to_owned(), MIB), ("disk1".to_owned(), 2 * MIB)]
    }

    #[test]
    fn the_client_of_this_crate_writes_to_it() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let serving = scope.spawn(move || {
                let mut server = NbdServer::accept(theirs, &exports()).unwrap();
                assert_eq!(server.export(), 1);
                let mut all = Vec::new();
                // The client ends without a farewell.
                while let Ok(Some((cookie, request))) = server.next_request() {
                    server.reply(cookie, all.len() < 3).unwrap();
                    all.push(request);
                }
                all
            });
            let mut export = NbdExport::open(ours, "disk1").unwrap();
            assert_eq!(export.bytes(), 2 * MIB);
            export.write_at(MIB, b"abc").unwrap();
            export.write_zeroes(7, 9).unwrap();
            export.flush().unwrap();
            let full = export.write_at(0, &[1]);
            assert!(matches!(full, Err(NbdError::Server(NO_SPACE))), "{full:?}");
            let beyond = export.write_at(2 * MIB, &[1]);
            assert!(matches!(beyond, Err(NbdError::Server(INVALID))), "{beyond:?}");
            let read = export.read_at(0, &mut [0]);
            assert!(matches!(read, Err(NbdError::Server(INVALID))), "{read:?}");
            drop(export);
            let expected = [
                NbdRequest::Write { at: MIB, bytes: b"abc".to_vec() },
                NbdRequest::Zeros { at: 7, bytes: 9 },
                NbdRequest::Flush,
                NbdRequest::Write { at: 0, bytes: vec![1] },
            ];
            assert_eq!(serving.join().unwrap(), expected);
        });
    }

    #[test]
    fn an_unknown_export_is_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let serving = scope.spawn(move || NbdServer::accept(theirs, &exports()).map(drop));
            let opened = NbdExport::open(ours, "disk7").map(drop);
            assert!(matches!(opened, Err(NbdError::Refused(_))), "{opened:?}");
            assert!(serving.join().unwrap().is_err());
        });
    }

    /// Returns what a client says until `disk0` is open.
    fn opening() -> Vec<u8> {
        let mut said = u32::from(FIXED_NEWSTYLE).to_be_bytes().to_vec();
        said.extend(OPTION.to_be_bytes());
        said.extend(GO.to_be_bytes());
        said.extend(11_u32.to_be_bytes());
        said.extend(5_u32.to_be_bytes());
        said.extend(b"disk0");
        said.extend([0; 2]);
        said
    }

    fn request(command: u16, at: u64, length: u32) -> Vec<u8> {
        let mut said = REQUEST.to_be_bytes().to_vec();
        said.extend([0; 2]);
        said.extend(command.to_be_bytes());
        said.extend(7_u64.to_be_bytes());
        said.extend(at.to_be_bytes());
        said.extend(length.to_be_bytes());
        said
    }

    fn first(said: &[Vec<u8>]) -> Result<Option<(u64, NbdRequest)>, NbdError> {
        let stream = Said(io::Cursor::new([&[opening()][..], said].concat().concat()));
        NbdServer::accept(stream, &exports())?.next_request()
    }

    #[test]
    fn a_liar_writes_nothing_beyond_the_disk() {
        let good = request(TRIM, 0, 8);
        let found = Some((7, NbdRequest::Zeros { at: 0, bytes: 8 }));
        assert_eq!(first(std::slice::from_ref(&good)).unwrap(), found);
        for wrong in [
            request(WRITE_ZEROES, MIB, 1),
            request(WRITE_ZEROES, u64::MAX, u32::MAX),
            request(TRIM, 0, 0),
            request(99, 0, 0),
            [request(WRITE, MIB - 1, 2), vec![1; 2]].concat(),
        ] {
            assert_eq!(first(&[wrong, good.clone()]).unwrap(), found);
        }
        assert!(first(&[request(WRITE, 0, MOST_WRITE_BYTES + 1)]).is_err());
        assert!(first(&[request(WRITE, 0, 8), vec![0; 7]]).is_err());
        assert!(first(&[vec![0; 28]]).is_err());
        assert_eq!(first(&[request(DISCONNECT, 0, 0)]).unwrap(), None);
    }

    proptest! {
        #[test]
        fn whatever_a_client_says_ends(
            said in proptest::collection::vec(any::<u8>(), 0..512),
            cut in 0_usize..40,
        ) {
            let opening = opening();
            let cut = cut.min(opening.len());
            let text = [&opening[..cut], &said].concat();
            if let Ok(mut server) = NbdServer::accept(Said(io::Cursor::new(text)), &exports()) {
                while let Ok(Some((_, request))) = server.next_request() {
                    if let NbdRequest::Write { at, bytes } = request {
                        prop_assert!(at + bytes.len() as u64 <= MIB);
                    }
                }
            }
        }
    }
}
