//! Tests against servers that have said all that they will say, and against qemu-nbd.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::export::{
    CHUNK, IS_ERROR, LAST, NONE, OFFSET_DATA, OFFSET_HOLE, READ_ONLY, SENDS_FLUSH, SENDS_ZEROES,
    SIMPLE_REPLY, STATUS,
};
use crate::handshake::{
    ACK, ERROR, FIXED_NEWSTYLE, GO, GREETING, INFO, META_CONTEXT, NO_ZEROES, OPTION, OPTION_REPLY,
    SET_META_CONTEXT, STRUCTURED_REPLY,
};

const MIB: u64 = 1 << 20;
const WRITABLE: u16 = SENDS_FLUSH | SENDS_ZEROES;
/// Numbers of the contexts of [`with_contexts`].
const ALLOCATION: u32 = 7;
const BITMAP: u32 = 9;
const CONTEXTS: [&str; 2] = ["base:allocation", "qemu:dirty-bitmap:b0"];

/// The other end, which has sent all that it will send.
pub(crate) struct Said(pub(crate) io::Cursor<Vec<u8>>);

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

fn said(parts: &[Vec<u8>]) -> Said {
    Said(io::Cursor::new(parts.concat()))
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn greeting() -> Vec<u8> {
    let mut said = GREETING.to_be_bytes().to_vec();
    said.extend(OPTION.to_be_bytes());
    said.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    said
}

fn reply_to(option: u32, kind: u32, length: u32, content: &[u8]) -> Vec<u8> {
    let mut reply = OPTION_REPLY.to_be_bytes().to_vec();
    reply.extend(words(&[option, kind, length]));
    reply.extend(content);
    reply
}

fn info(bytes: u64, flags: u16) -> Vec<u8> {
    let mut info = vec![0, 0];
    info.extend(bytes.to_be_bytes());
    info.extend(flags.to_be_bytes());
    [reply_to(GO, INFO, 12, &info), reply_to(GO, ACK, 0, &[])].concat()
}

fn context(number: u32, name: &str) -> Vec<u8> {
    let content = [&number.to_be_bytes()[..], name.as_bytes()].concat();
    reply_to(SET_META_CONTEXT, META_CONTEXT, u32::try_from(content.len()).unwrap(), &content)
}

/// Returns a handshake with both contexts, for a disk of a MiB.
fn with_contexts(flags: u16) -> Vec<u8> {
    [
        greeting(),
        reply_to(STRUCTURED_REPLY, ACK, 0, &[]),
        context(BITMAP, CONTEXTS[1]),
        context(ALLOCATION, CONTEXTS[0]),
        reply_to(SET_META_CONTEXT, ACK, 0, &[]),
        info(MIB, flags),
    ]
    .concat()
}

fn simple(cookie: u64, error: u32) -> Vec<u8> {
    let mut reply = words(&[SIMPLE_REPLY, error]);
    reply.extend(cookie.to_be_bytes());
    reply
}

fn chunk(cookie: u64, flags: u16, kind: u16, content: &[u8]) -> Vec<u8> {
    let mut chunk = CHUNK.to_be_bytes().to_vec();
    chunk.extend(flags.to_be_bytes());
    chunk.extend(kind.to_be_bytes());
    chunk.extend(cookie.to_be_bytes());
    chunk.extend(u32::try_from(content.len()).unwrap().to_be_bytes());
    chunk.extend(content);
    chunk
}

fn data(cookie: u64, flags: u16, at: u64, bytes: &[u8]) -> Vec<u8> {
    chunk(cookie, flags, OFFSET_DATA, &[&at.to_be_bytes()[..], bytes].concat())
}

fn hole(cookie: u64, flags: u16, at: u64, bytes: u32) -> Vec<u8> {
    chunk(cookie, flags, OFFSET_HOLE, &[&at.to_be_bytes()[..], &bytes.to_be_bytes()].concat())
}

/// Returns a chunk of extents: the number of the context, then lengths and flags.
fn status(cookie: u64, flags: u16, content: &[u32]) -> Vec<u8> {
    chunk(cookie, flags, STATUS, &words(content))
}

fn open_with(parts: &[Vec<u8>]) -> NbdExport<Said> {
    let stream = said(&[&[with_contexts(WRITABLE)][..], parts].concat());
    NbdExport::open_with(stream, "disk", &CONTEXTS).unwrap()
}

/// Returns what a server says for a disk of a MiB, up to its first reply of four bytes.
fn good() -> Vec<u8> {
    [greeting(), info(MIB, READ_ONLY), simple(1, 0), b"abcd".to_vec()].concat()
}

fn read(text: Vec<u8>) -> Result<[u8; 4], NbdError> {
    let mut export = NbdExport::open(said(&[text]), "disk")?;
    assert_eq!(export.bytes(), MIB);
    let mut found = [0; 4];
    export.read_at(0, &mut found)?;
    Ok(found)
}

#[test]
fn a_liar_is_refused() {
    assert_eq!(&read(good()).unwrap(), b"abcd");
    let with = |more: Vec<u8>| read([greeting(), more].concat()).unwrap_err().to_string();
    assert!(with(reply_to(GO, INFO, u32::MAX, &[])).contains("too long"));
    assert!(with(reply_to(GO, ACK, 0, &[])).contains("no size"));
    assert!(with(reply_to(GO, ERROR | 6, 7, b"no\x1b[2Jx")).contains("refuses the export: no [2J"));
    assert!(with(reply_to(GO, INFO, 2, &[0, 3]).repeat(100)).contains("does not end"));
    assert!(with(reply_to(STRUCTURED_REPLY, ACK, 0, &[])).contains("answers otherwise"));
    let mut other = good();
    let at = other.len() - 5;
    other[at] = 9;
    assert!(read(other).unwrap_err().to_string().contains("another request"));
    assert!(read(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()).is_err());
}

#[test]
fn a_context_that_the_server_lacks_is_an_error() {
    let open = |parts: &[Vec<u8>]| {
        let stream = said(&[&[greeting()][..], parts].concat());
        NbdExport::open_with(stream, "disk", &CONTEXTS).map(|_| ()).unwrap_err().to_string()
    };
    let chunks = reply_to(STRUCTURED_REPLY, ACK, 0, &[]);
    let done = reply_to(SET_META_CONTEXT, ACK, 0, &[]);
    assert!(open(&[reply_to(STRUCTURED_REPLY, ERROR | 1, 0, &[])]).contains("no reason given"));
    let one = open(&[chunks.clone(), context(1, CONTEXTS[0]), done]);
    assert!(one.contains("it has no qemu:dirty-bitmap:b0"), "{one}");
    assert!(open(&[chunks.clone(), context(1, "base:secret")]).contains("another context"));
    let cut = reply_to(SET_META_CONTEXT, META_CONTEXT, 2, &[0, 1]);
    assert!(open(&[chunks.clone(), cut]).contains("a context is cut"));
    assert!(open(&[chunks, context(1, CONTEXTS[0]).repeat(100)]).contains("does not end"));
}

#[test]
fn chunks_of_a_read_are_put_together() {
    let parts = [data(1, 0, 8, b"ab"), hole(1, 0, 10, 3), data(1, LAST, 13, b"c")];
    let mut export = open_with(&parts);
    let mut found = [9; 6];
    export.read_at(8, &mut found).unwrap();
    assert_eq!(&found, b"ab\0\0\0c");
    // The end may be a chunk of its own.
    let parts = [data(1, 0, 0, b"ab"), chunk(1, LAST, NONE, &[])];
    let mut found = [9; 2];
    open_with(&parts).read_at(0, &mut found).unwrap();
    assert_eq!(&found, b"ab");
}

#[test]
fn a_read_gets_exactly_what_it_asked_for() {
    let lies = [
        ("too short", vec![data(1, LAST, 0, b"abc")]),
        ("not that", vec![data(1, LAST, 0, b"abcde")]),
        ("not that", vec![data(1, 0, 0, b"ab"), data(1, LAST, 0, b"cd")]),
        ("not that", vec![data(1, 0, 2, b"cd"), data(1, LAST, 0, b"ab")]),
        ("not that", vec![data(1, 0, 0, b"ab"), data(1, LAST, 3, b"d")]),
        ("not that", vec![data(1, 0, 0, b""), data(1, LAST, 0, b"abcd")]),
        ("not that", vec![hole(1, LAST, 0, u32::MAX)]),
        ("not that", vec![hole(1, 0, 0, 0), data(1, LAST, 0, b"abcd")]),
        ("not that", vec![chunk(1, LAST, OFFSET_DATA, &[0; 3]), vec![0; 9]]),
        ("unexpected", vec![chunk(1, LAST, OFFSET_HOLE, &[0; 13])]),
        ("unexpected", vec![chunk(1, 0, NONE, &[]), data(1, LAST, 0, b"abcd")]),
        ("unexpected", vec![status(1, LAST, &[ALLOCATION, 4, 0])]),
        ("unexpected", vec![simple(1, 0), b"abcd".to_vec()]),
        ("another request", vec![data(2, LAST, 0, b"abcd")]),
        ("Input/output error", vec![simple(1, 5)]),
        ("No space left", vec![chunk(1, LAST, IS_ERROR | 1, &words(&[28, 0]))]),
        ("length of an error", vec![chunk(1, LAST, IS_ERROR | 1, &[0; 3])]),
        ("length of an error", vec![chunk(1, LAST, IS_ERROR | 1, &[0; 9000])]),
        ("failed to fill", vec![data(1, 0, 0, b"ab")]),
    ];
    for (why, parts) in lies {
        let error = open_with(&parts).read_at(0, &mut [0; 4]).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    // Without chunks agreed on, there are none.
    let stream = said(&[greeting(), info(MIB, 0), data(1, LAST, 0, b"abcd")]);
    let mut export = NbdExport::open(stream, "disk").unwrap();
    assert!(export.read_at(0, &mut [0; 4]).unwrap_err().to_string().contains("unexpected"));
}

#[test]
fn extents_of_a_context_are_merged_and_cut_at_the_range() {
    let mut export = open_with(&[
        status(1, 0, &[ALLOCATION, 4096, HOLE]),
        status(1, LAST, &[BITMAP, 100, DIRTY, 200, DIRTY, 50, 0]),
        status(2, 0, &[BITMAP, 50, 0, 5000, DIRTY]),
        status(2, LAST, &[ALLOCATION, 4096, HOLE]),
    ]);
    let found = export.extents(1, 1000, 500).unwrap();
    let extent = |offset, bytes, flags| Extent { offset, bytes, flags };
    assert_eq!(found, [extent(1000, 300, DIRTY), extent(1300, 100, 0), extent(1400, 100, DIRTY)]);
    assert!(export.extents(2, 0, 1).unwrap_err().to_string().contains("cannot list"));
    assert!(export.extents(0, 5, 0).unwrap().is_empty());
}

#[test]
fn extents_that_do_not_fit_are_refused() {
    let lies = [
        ("is empty", vec![status(1, LAST, &[ALLOCATION, 0, HOLE])]),
        ("beyond", vec![status(1, LAST, &[ALLOCATION, 9000, 0, 1, HOLE])]),
        ("unexpected", vec![status(1, LAST, &[ALLOCATION])]),
        ("unexpected", vec![status(1, LAST, &[ALLOCATION, 4])]),
        ("unexpected", vec![data(1, LAST, 0, b"abcd")]),
        ("unexpected", vec![simple(1, 0)]),
        ("does not list", vec![status(1, LAST, &[BITMAP, 9000, 0])]),
        ("does not list", vec![chunk(1, LAST, NONE, &[])]),
        ("twice", vec![status(1, 0, &[ALLOCATION, 9, 0]), status(1, LAST, &[ALLOCATION, 9, 0])]),
        ("does not end", vec![status(1, 0, &[BITMAP, 9, 0]).repeat(3)]),
        ("another request", vec![status(2, LAST, &[ALLOCATION, 9000, 0])]),
        ("too long", vec![status(1, LAST, &vec![ALLOCATION; 600_001])]),
        ("Invalid argument", vec![chunk(1, LAST, IS_ERROR | 1, &words(&[22, 0]))]),
    ];
    for (why, parts) in lies {
        let error = open_with(&parts).extents(0, 0, 9000).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
}

#[test]
fn a_list_of_extents_has_an_end() {
    // A server that answers every request with as many extents as a reply may have.
    let mut content = vec![ALLOCATION];
    content.extend((0..200_000).flat_map(|number| [1, number % 2]));
    let mut parts: Vec<_> = (1..=20).map(|cookie| status(cookie, LAST, &content)).collect();
    let error = open_with(&parts).extents(0, 0, 1 << 40).unwrap_err();
    assert!(matches!(error, NbdError::Io(_)), "that is not too many yet: {error}");
    parts.push(status(21, LAST, &content));
    let error = open_with(&parts).extents(0, 0, 1 << 40).unwrap_err();
    assert!(matches!(error, NbdError::TooManyExtents), "{error}");
}

#[test]
fn writes_need_an_export_that_takes_them() {
    let both = [simple(1, 0), chunk(2, LAST, NONE, &[]), simple(3, 28)];
    let mut export = open_with(&both);
    export.write_at(0, b"abcd").unwrap();
    export.flush().unwrap();
    assert!(matches!(export.write_zeroes(0, 4096), Err(NbdError::Server(28))));
    let mut export = open_with(&[simple(2, 0)]);
    assert!(export.write_at(0, b"abcd").unwrap_err().to_string().contains("another request"));
    let open = |flags| NbdExport::open(said(&[greeting(), info(MIB, flags)]), "disk").unwrap();
    let mut read_only = open(READ_ONLY | WRITABLE);
    assert!(matches!(read_only.write_at(0, b"a"), Err(NbdError::Unsupported(_))));
    assert!(matches!(read_only.write_zeroes(0, 1), Err(NbdError::Unsupported(_))));
    assert!(matches!(open(0).write_zeroes(0, 1), Err(NbdError::Unsupported(_))));
    assert!(matches!(open(0).flush(), Err(NbdError::Unsupported(_))));
}

#[test]
fn long_requests_are_split() {
    // Each part is a request of its own.
    let mut export = open_with(&[simple(1, 0), simple(2, 0), simple(3, 0), simple(4, 0)]);
    export.write_zeroes(0, (2 << 30) + 1).unwrap();
    export.write_at(0, b"a").unwrap();
    let mut export = open_with(&[simple(1, 0), simple(2, 0)]);
    export.write_at(0, &vec![1; (16 << 20) + 1]).unwrap();
    assert!(matches!(export.write_at(0, b"a"), Err(NbdError::Io(_))));
}

/// Starts a qemu-nbd for one client, which has connected; `None` without that program.
fn serve(folder: &Path, disk: &Path, more: &[&str]) -> Option<UnixStream> {
    let socket = folder.join("socket");
    // It returns when it listens, and ends after its only client.
    let server = Command::new("qemu-nbd")
        .args(["--fork", "--format", "raw", "--export-name", "disk"])
        .args(more)
        .arg("--socket")
        .arg(&socket)
        .arg(disk)
        .output();
    let Ok(server) = server else {
        eprintln!("skipped: no qemu-nbd (apt-get install qemu-utils)");
        return None;
    };
    assert!(server.status.success(), "{server:?}");
    Some(UnixStream::connect(&socket).unwrap())
}

#[test]
fn a_disk_of_qemu_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    let content: Vec<u8> = (0..300_u32).flat_map(|n| vec![n.to_le_bytes()[0]; 4096]).collect();
    std::fs::write(&disk, &content).unwrap();
    let Some(stream) = serve(folder.path(), &disk, &["--read-only"]) else { return };
    let mut export = NbdExport::open(stream, "disk").unwrap();
    assert_eq!(export.bytes(), content.len() as u64);
    let mut found = vec![0; content.len()];
    for (index, part) in found.chunks_mut(100_000).enumerate() {
        export.read_at(index as u64 * 100_000, part).unwrap();
    }
    assert!(found == content);
    assert!(matches!(export.write_at(0, b"a"), Err(NbdError::Unsupported(_))));
}

#[test]
fn a_disk_of_qemu_is_written_and_its_holes_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(64 * MIB).unwrap();
    let more = ["--allocation-depth", "--discard", "unmap"];
    let Some(stream) = serve(folder.path(), &disk, &more) else { return };
    let contexts = ["qemu:allocation-depth", "base:allocation"];
    let mut export = NbdExport::open_with(stream, "disk", &contexts).unwrap();
    let content: Vec<u8> = (0..MIB).map(|n| n.to_le_bytes()[1] | 1).collect();
    export.write_at(20 * MIB, &content).unwrap();
    export.write_at(40 * MIB, &content).unwrap();
    export.write_zeroes(40 * MIB, MIB / 2).unwrap();
    export.flush().unwrap();
    let found = export.extents(1, 0, 64 * MIB).unwrap();
    let end = found.iter().fold(0, |end, extent| {
        assert_eq!(extent.offset, end);
        end + extent.bytes
    });
    assert_eq!(end, 64 * MIB);
    let used: u64 =
        found.iter().filter(|extent| extent.flags & HOLE == 0).map(|extent| extent.bytes).sum();
    // The zeros may take space, if the file system has no holes.
    assert!((MIB + MIB / 2..64 * MIB).contains(&used), "{found:?}");
    let layers = export.extents(0, 20 * MIB, MIB).unwrap();
    assert_eq!(layers, [Extent { offset: 20 * MIB, bytes: MIB, flags: TOP_LAYER }]);
    // Half data, half a hole.
    let mut read = vec![7; 2 << 20];
    export.read_at(40 * MIB, &mut read).unwrap();
    let half = content.len() / 2;
    assert!(read[..half].iter().all(|byte| *byte == 0));
    assert!(read[half..content.len()] == content[half..]);
    assert!(read[content.len()..].iter().all(|byte| *byte == 0));
}

proptest! {
    #[test]
    fn no_answer_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let mut plain = good();
        let mut chunks = [
            with_contexts(WRITABLE),
            data(1, 0, 0, b"ab"),
            hole(1, LAST, 2, 2),
            status(2, 0, &[BITMAP, 9, DIRTY, 4096, 0]),
            status(2, LAST, &[ALLOCATION, 4096, HOLE]),
            simple(3, 0),
        ]
        .concat();
        for (at, byte) in changes {
            let (in_plain, in_chunks) = (at.index(plain.len()), at.index(chunks.len()));
            plain[in_plain] = byte;
            chunks[in_chunks] = byte;
        }
        if let Ok(mut export) = NbdExport::open(said(&[plain]), "disk") {
            let _ = export.read_at(0, &mut [0; 4]);
        }
        if let Ok(mut export) = NbdExport::open_with(said(&[chunks]), "disk", &CONTEXTS) {
            let _ = export.read_at(0, &mut [0; 4]);
            let _ = export.extents(1, 0, 4096);
            let _ = export.write_zeroes(0, 4096);
        }
    }

    #[test]
    fn extents_cover_the_range_once(
        replies in prop::collection::vec(
            prop::collection::vec((1_u32..5000, 0_u32..2), 1..6), 1..12),
        at in 0_u64..1 << 40,
    ) {
        let parts: Vec<_> = (1..).zip(&replies).map(|(cookie, extents)| {
            let content = extents.iter().flat_map(|(length, flags)| [*length, *flags]);
            let content: Vec<u32> = std::iter::once(BITMAP).chain(content).collect();
            status(cookie, LAST, &content)
        }).collect();
        let sum = replies.iter().flatten().map(|(length, _)| u64::from(*length)).sum::<u64>();
        // The last extent reaches beyond the range.
        let last = replies.last().and_then(|extents| extents.last()).map_or(0, |last| last.0);
        let bytes = sum - u64::from(last) + 1;
        let found = open_with(&parts).extents(1, at, bytes).unwrap();
        let mut end = at;
        for (index, extent) in found.iter().enumerate() {
            prop_assert_eq!(extent.offset, end);
            prop_assert!(extent.bytes > 0);
            prop_assert!(index == 0 || found[index - 1].flags != extent.flags);
            end += extent.bytes;
        }
        prop_assert_eq!(end, at + bytes);
        let dirty = |found: &[(u64, u32)]| {
            found.iter().filter(|one| one.1 == DIRTY).map(|one| one.0).sum::<u64>()
        };
        let mut all: Vec<_> =
            replies.iter().flatten().map(|(length, flags)| (u64::from(*length), *flags)).collect();
        if let Some(last) = all.last_mut() {
            last.0 = 1;
        }
        let found: Vec<_> = found.iter().map(|extent| (extent.bytes, extent.flags)).collect();
        prop_assert_eq!(dirty(&found), dirty(&all));
    }
}
