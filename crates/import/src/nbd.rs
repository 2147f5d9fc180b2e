//! Reads a disk from an NBD server (the NBD project's doc/proto.md, fixed newstyle). Knows no
//! sockets. The server is untrusted: lengths are bounded, and each answer must be that of the
//! request.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use crate::shown::shown;

const GREETING: u64 = 0x4e42_444d_4147_4943;
const OPTION: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
/// Flags of the handshake, the same for both sides.
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;
/// Option that selects an export.
const GO: u32 = 7;
/// Replies to an option.
const ACK: u32 = 1;
const INFO: u32 = 3;
const ERROR: u32 = 1 << 31;
/// Most replies to an option, and the longest one. QEMU sends four short ones.
const MOST_REPLIES: usize = 64;
const MOST_REPLY_BYTES: u32 = 4096;
/// Command to read.
const READ: u16 = 0;
/// Default port.
const PORT: u16 = 10809;
/// Longest name of an export.
const MOST_NAME_BYTES: usize = 1024;

/// Where an export is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// Name or address of a host, and its port.
    Tcp(String, u16),
    Unix(PathBuf),
}

/// Why a disk cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the server does not speak NBD (fixed newstyle): {0}")]
    Protocol(&'static str),
    #[error("the server refuses the export: {0}")]
    Refused(String),
    #[error("the server cannot read its disk: error {0}")]
    Server(u32),
}

/// An export whose disk is read.
#[derive(Debug)]
pub struct NbdExport<S> {
    stream: S,
    bytes: u64,
    cookie: u64,
}

/// Parses `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH`; returns where the
/// export is, and its name. `None`: it is neither.
#[must_use]
pub fn parse_nbd(uri: &str) -> Option<(NbdAddress, String)> {
    if let Some(rest) = uri.strip_prefix("nbd+unix:///") {
        let (name, socket) = rest.split_once("?socket=")?;
        let (name, socket) = (decoded(name)?, PathBuf::from(decoded(socket)?));
        return socket.is_absolute().then_some((NbdAddress::Unix(socket), name));
    }
    let rest = uri.strip_prefix("nbd://")?;
    let (place, name) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = match place.strip_prefix('[') {
        Some(v6) => {
            let (host, port) = v6.split_once(']')?;
            (host, port.strip_prefix(':'))
        }
        None => match place.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    let port = port.map_or(Some(PORT), |port| port.parse().ok())?;
    let is_host = |c: char| c.is_ascii_alphanumeric() || ".-:%".contains(c);
    let is_good = !host.is_empty() && host.chars().all(is_host);
    is_good.then_some((NbdAddress::Tcp(host.to_owned(), port), decoded(name)?))
}

fn decoded(text: &str) -> Option<String> {
    let text = crate::names::decoded(text);
    let is_good = text.len() <= MOST_NAME_BYTES && !text.chars().any(char::is_control);
    is_good.then_some(text)
}

impl<S: Read + Write> NbdExport<S> {
    /// Opens an export over a connected stream.
    ///
    /// # Errors
    /// The server refuses, or speaks another protocol.
    pub fn open(mut stream: S, name: &str) -> Result<NbdExport<S>, NbdError> {
        if u64_of(&mut stream)? != GREETING || u64_of(&mut stream)? != OPTION {
            return Err(NbdError::Protocol("unexpected greeting"));
        }
        let flags = u16_of(&mut stream)?;
        if flags & FIXED_NEWSTYLE == 0 {
            return Err(NbdError::Protocol("it has no options"));
        }
        stream.write_all(&u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes())?;
        let length = u32::try_from(name.len()).map_err(io::Error::other)?;
        let mut option = OPTION.to_be_bytes().to_vec();
        option.extend(GO.to_be_bytes());
        option.extend((length + 6).to_be_bytes());
        option.extend(length.to_be_bytes());
        option.extend(name.as_bytes());
        option.extend([0; 2]);
        stream.write_all(&option)?;
        stream.flush()?;
        let mut bytes = None;
        for _ in 0..MOST_REPLIES {
            let (kind, reply) = option_reply(&mut stream)?;
            match kind {
                ACK => {
                    let bytes = bytes.ok_or(NbdError::Protocol("it gives no size"))?;
                    return Ok(NbdExport { stream, bytes, cookie: 0 });
                }
                INFO if reply.starts_with(&[0, 0]) => {
                    let size = reply.get(2..10).and_then(|size| size.try_into().ok());
                    bytes = size.map(u64::from_be_bytes);
                }
                INFO => {}
                kind if kind & ERROR != 0 => {
                    let why = String::from_utf8_lossy(&reply);
                    let why = if why.is_empty() { "no reason given".into() } else { why };
                    return Err(NbdError::Refused(shown(&why)));
                }
                _ => return Err(NbdError::Protocol("it answers otherwise")),
            }
        }
        Err(NbdError::Protocol("its answer does not end"))
    }

    /// Returns the size of the disk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the stream, for its limits.
    pub fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Reads bytes of the disk, up to some MiB at a time.
    ///
    /// # Errors
    /// The server does not give them. Nothing more can be read then.
    pub fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> Result<(), NbdError> {
        self.cookie += 1;
        let length = u32::try_from(buffer.len()).map_err(io::Error::other)?;
        self.ask(at, length)?;
        if u32_of(&mut self.stream)? != REPLY {
            return Err(NbdError::Protocol("unexpected reply"));
        }
        let error = u32_of(&mut self.stream)?;
        if u64_of(&mut self.stream)? != self.cookie {
            return Err(NbdError::Protocol("it replies to another request"));
        }
        if error != 0 {
            return Err(NbdError::Server(error));
        }
        Ok(self.stream.read_exact(buffer)?)
    }

    fn ask(&mut self, at: u64, length: u32) -> io::Result<()> {
        let mut request = REQUEST.to_be_bytes().to_vec();
        request.extend([0; 2]);
        request.extend(READ.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(at.to_be_bytes());
        request.extend(length.to_be_bytes());
        self.stream.write_all(&request)?;
        self.stream.flush()
    }
}

fn option_reply(stream: &mut impl Read) -> Result<(u32, Vec<u8>), NbdError> {
    if u64_of(stream)? != OPTION_REPLY || u32_of(stream)? != GO {
        return Err(NbdError::Protocol("it answers otherwise"));
    }
    let (kind, length) = (u32_of(stream)?, u32_of(stream)?);
    if length > MOST_REPLY_BYTES {
        return Err(NbdError::Protocol("its answer is too long"));
    }
    let mut reply = vec![0; length as usize];
    stream.read_exact(&mut reply)?;
    Ok((kind, reply))
}

fn bytes_of<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u16_of(stream: &mut impl Read) -> io::Result<u16> {
    Ok(u16::from_be_bytes(bytes_of(stream)?))
}

fn u32_of(stream: &mut impl Read) -> io::Result<u32> {
    Ok(u32::from_be_bytes(bytes_of(stream)?))
}

fn u64_of(stream: &mut impl Read) -> io::Result<u64> {
    Ok(u64::from_be_bytes(bytes_of(stream)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    /// A server that has said all that it will say.
    struct Said(io::Cursor<Vec<u8>>);

    impl Read for Said {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }

    impl Write for Said {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn reply(kind: u32, length: u32, content: &[u8]) -> Vec<u8> {
        let mut reply = OPTION_REPLY.to_be_bytes().to_vec();
        for word in [GO, kind, length] {
            reply.extend(word.to_be_bytes());
        }
        reply.extend(content);
        reply
    }

    fn greeting() -> Vec<u8> {
        let mut said = GREETING.to_be_bytes().to_vec();
        said.extend(OPTION.to_be_bytes());
        said.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        said
    }

    /// Returns what a server says for a disk of a MiB, up to its first reply of four bytes.
    fn good() -> Vec<u8> {
        let mut said = greeting();
        let mut info = vec![0, 0];
        info.extend((1_u64 << 20).to_be_bytes());
        info.extend([0, 1]);
        said.extend(reply(INFO, 12, &info));
        said.extend(reply(ACK, 0, &[]));
        said.extend(REPLY.to_be_bytes());
        said.extend(0_u32.to_be_bytes());
        said.extend(1_u64.to_be_bytes());
        said.extend(b"abcd");
        said
    }

    fn read(said: Vec<u8>) -> Result<[u8; 4], NbdError> {
        let mut export = NbdExport::open(Said(io::Cursor::new(said)), "disk")?;
        assert_eq!(export.bytes(), 1 << 20);
        let mut found = [0; 4];
        export.read_at(0, &mut found)?;
        drop(export);
        Ok(found)
    }

    #[test]
    fn a_liar_is_refused() {
        assert_eq!(&read(good()).unwrap(), b"abcd");
        let with = |more: Vec<u8>| {
            let mut said = greeting();
            said.extend(more);
            read(said).unwrap_err().to_string()
        };
        assert!(with(reply(INFO, u32::MAX, &[])).contains("too long"));
        assert!(with(reply(ACK, 0, &[])).contains("no size"));
        assert!(with(reply(ERROR | 6, 7, b"no\x1b[2Jx")).contains("refuses the export"));
        assert!(with(reply(INFO, 2, &[0, 3]).repeat(100)).contains("does not end"));
        let mut other = good();
        let at = other.len() - 5;
        other[at] = 9;
        assert!(read(other).unwrap_err().to_string().contains("another request"));
        assert!(read(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()).is_err());
    }

    #[test]
    fn addresses_are_parsed() {
        let tcp = |host: &str, port| NbdAddress::Tcp(host.to_owned(), port);
        let found = |text| parse_nbd(text).unwrap();
        assert_eq!(found("nbd://10.0.0.5/web"), (tcp("10.0.0.5", PORT), "web".to_owned()));
        assert_eq!(found("nbd://esx.lan:1234"), (tcp("esx.lan", 1234), String::new()));
        assert_eq!(found("nbd://[fd00::5]:1/a%20b"), (tcp("fd00::5", 1), "a b".to_owned()));
        let unix = NbdAddress::Unix("/run/nbd.sock".into());
        assert_eq!(found("nbd+unix:///web?socket=/run/nbd.sock"), (unix, "web".to_owned()));
        for wrong in [
            "nbd://",
            "nbd://a b/x",
            "nbd+unix:///x",
            "http://a/",
            "/srv/a.img",
            "nbd+unix:///x?socket=relative",
            "nbd://a:99999/x",
        ] {
            assert_eq!(parse_nbd(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_disk_of_qemu_is_read() {
        let folder = std::env::temp_dir().join(format!("godwit-nbd-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (disk, socket) = (folder.join("disk"), folder.join("socket"));
        let content: Vec<u8> = (0..300_u32).flat_map(|n| vec![n.to_le_bytes()[0]; 4096]).collect();
        std::fs::write(&disk, &content).unwrap();
        // It returns when it listens, and ends after its only client.
        let server = Command::new("qemu-nbd")
            .args(["--fork", "--read-only", "--format", "raw", "--export-name", "disk", "--socket"])
            .arg(&socket)
            .arg(&disk)
            .output();
        if server.is_err() {
            eprintln!("skipped: no qemu-nbd (apt-get install qemu-utils)");
            return;
        }
        let mut export = NbdExport::open(UnixStream::connect(&socket).unwrap(), "disk").unwrap();
        assert_eq!(export.bytes(), content.len() as u64);
        let mut found = vec![0; content.len()];
        for (index, part) in found.chunks_mut(100_000).enumerate() {
            export.read_at(index as u64 * 100_000, part).unwrap();
        }
        assert!(found == content);
        drop(export);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    proptest! {
        #[test]
        fn no_answer_panics(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        ) {
            let mut said = good();
            for (at, byte) in changes {
                let at = at.index(said.len());
                said[at] = byte;
            }
            let export = NbdExport::open(Said(io::Cursor::new(said)), "disk");
            if let Ok(mut export) = export {
                let _ = export.read_at(0, &mut [0; 4]);
            }
        }
    }
}
