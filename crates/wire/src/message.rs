//! The messages of a lane.

use crate::cursor::Cursor;
use crate::disk::decode_end;
use crate::frame::HEADER_LEN;
use crate::kind::PAGES_HEADER;
use crate::{
    BlockRun, Codec, Delta, Digests, DiskBlocks, DiskMissing, DiskReferences, DiskZeros,
    FrameHeader, Kind, MAX_BLOCKS, MAX_DETAIL, MAX_PAGES_PER_FRAME, MAX_STREAMS, MigrationId,
    PAGE_SIZE, References, VersionRange, WAIT_CLASSES, WireError, checksum, runs,
};

/// First eight bytes of a lane. The line end reveals a lane that passed through a program that
/// edits text.
const MAGIC: [u8; 8] = *b"GODWIT\r\n";

/// Fields before the pages of a raw or compressed pages frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesHeader {
    /// The round that the pages belong to. Pages of an older round never overwrite those of a newer
    /// one.
    pub round: u32,
    /// The pages in the frame.
    pub run: PageRun,
    /// Form of the bytes that follow the fields.
    pub encoding: Encoding,
    /// The [`checksum`] of the bytes that follow the fields.
    pub sum: u32,
}

/// Form in which a frame holds its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Uncompressed: the frame is of kind [`Kind::Pages`].
    Raw,
    /// Compressed in one piece: the frame is of kind [`Kind::CompressedPages`].
    Compressed {
        /// The compression method.
        codec: Codec,
        /// Compressed size in bytes: at least one, and less than the size of the pages.
        bytes: u32,
    },
}

/// Run of pages in one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    pub block: u16,
    /// The first page's number in the block.
    pub first: u64,
    /// Number of pages, 1 to [`MAX_PAGES_PER_FRAME`].
    pub count: u32,
}

/// Bytes of a pages frame's header and fields, before the pages.
pub(crate) const PAGES_PREFIX: usize = HEADER_LEN + PAGES_HEADER as usize;

impl PagesHeader {
    /// Bytes before the pages: frame header and fields.
    pub const LEN: usize = PAGES_PREFIX;

    /// Returns the bytes of the frame that precede its pages.
    #[must_use]
    pub fn to_bytes(self) -> [u8; PAGES_PREFIX] {
        let (content, codec) = match self.encoding {
            Encoding::Raw => (self.run.count * PAGE_SIZE, 0),
            Encoding::Compressed { codec, bytes } => (bytes, codec as u8),
        };
        let mut fields = [0; PAGES_HEADER as usize];
        fields[..4].copy_from_slice(&self.round.to_le_bytes());
        fields[4..6].copy_from_slice(&self.run.block.to_le_bytes());
        fields[6] = codec;
        fields[8..16].copy_from_slice(&self.run.first.to_le_bytes());
        fields[16..20].copy_from_slice(&self.run.count.to_le_bytes());
        fields[20..].copy_from_slice(&self.sum.to_le_bytes());
        let header = FrameHeader {
            kind: self.kind(),
            length: PAGES_HEADER + content,
            sum: checksum(&fields),
        };
        let mut bytes = [0; PAGES_PREFIX];
        bytes[..HEADER_LEN].copy_from_slice(&header.to_bytes());
        bytes[HEADER_LEN..].copy_from_slice(&fields);
        bytes
    }

    fn kind(self) -> Kind {
        match self.encoding {
            Encoding::Raw => Kind::Pages,
            Encoding::Compressed { .. } => Kind::CompressedPages,
        }
    }

    /// Reads the fields of a frame whose length is within the bounds of its kind.
    fn decode(cursor: &mut Cursor<'_>, header: FrameHeader) -> Result<PagesHeader, WireError> {
        let round = cursor.u32("the pages' round")?;
        let block = cursor.u16("the pages' block")?;
        let codec = cursor.u8("the pages' codec")?;
        let reserved = cursor.u8("the pages' reserved byte")?;
        let first = cursor.u64("the first page")?;
        let count = cursor.u32("the page count")?;
        let sum = cursor.u32("the pages' checksum")?;
        if block >= MAX_BLOCKS || reserved != 0 {
            return Err(WireError::BadValue { what: "the pages' block" });
        }
        let content = header.length.saturating_sub(PAGES_HEADER);
        let encoding = match (header.kind, codec) {
            (Kind::CompressedPages, code) => {
                let codec = Codec::from_code(code)
                    .ok_or(WireError::BadValue { what: "the pages' codec" })?;
                Encoding::Compressed { codec, bytes: content }
            }
            (_, 0) => Encoding::Raw,
            _ => return Err(WireError::BadValue { what: "the pages' codec" }),
        };
        if !(1..=MAX_PAGES_PER_FRAME).contains(&count) {
            return Err(WireError::BadValue { what: "the page count" });
        }
        let fits = match encoding {
            Encoding::Raw => content == count * PAGE_SIZE,
            Encoding::Compressed { bytes, .. } => (1..count * PAGE_SIZE).contains(&bytes),
        };
        if !fits {
            return Err(WireError::BadValue { what: "the page count" });
        }
        if first.checked_add(u64::from(count)).is_none() {
            return Err(WireError::BadValue { what: "the first page" });
        }
        Ok(PagesHeader { round, run: PageRun { block, first, count }, encoding, sum })
    }
}

/// Parameters that the destination needs before the first page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// Epoch of ownership that the destination receives with the commit.
    pub epoch: u64,
    /// Incarnation of the VM. 0: the VM was created before incarnations existed.
    pub incarnation: u128,
    /// Whether the guest runs after the switchover (false: it was paused).
    pub run: bool,
    /// Number of pages of each RAM block.
    pub block_pages: Vec<u64>,
}

/// Totals of what was sent before the device state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagesEnd {
    /// Total number of pages sent.
    pub pages: u64,
    /// Number of units that each data stream has sent since it began, in order of stream number
    /// from stream 1 on.
    pub units: Vec<u64>,
}

/// Runs of pages that contain only zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zeros {
    /// The round that the pages belong to.
    pub round: u32,
    /// The runs, in any order.
    pub runs: Vec<BlockRun>,
}

/// Times of events at the destination, by its own clock, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// When the commit was read.
    pub commit_ns: u64,
    /// When the device state was loaded.
    pub loaded_ns: u64,
    /// When the vCPUs ran (or, for a paused guest, when it was complete).
    pub running_ns: u64,
}

/// Statistics of a page-in, measured at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedIn {
    /// Pages that were missing when the guest was handed over.
    pub pages: u64,
    /// Missing pages that a vCPU or a device accessed before they arrived.
    pub demanded: u64,
    /// How often the link was cut or an agent was absent during page-in.
    pub cuts: u64,
    /// Median wait for a missing page, ns.
    pub median_ns: u64,
    /// 90th percentile of the waits, ns.
    pub p90_ns: u64,
    /// 99th percentile of the waits, ns.
    pub p99_ns: u64,
    /// Longest wait, ns.
    pub most_ns: u64,
    /// Histogram of the waits. The first class counts waits below [`FIRST_WAIT_CLASS_NS`]. Each
    /// further class has twice the upper bound of the one before it. The last class counts all
    /// longer waits.
    pub waits: [u64; WAIT_CLASSES],
}

/// Reason why one side gives up: a code for programs and a line for people. The migration defines
/// the meaning of the codes, not the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    pub code: u16,
    /// One line of at most [`MAX_DETAIL`] bytes. It never contains guest data.
    pub detail: String,
}

/// Message of the protocol. Pages do not pass through a message: their frame consists of a
/// [`PagesHeader`] and the pages, raw or compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the kind of each variant documents it
pub enum Message {
    Hello { versions: VersionRange, migration: MigrationId, stream: u16 },
    Welcome { version: u16 },
    Begin(Begin),
    Ready,
    Pages(PagesHeader),
    Zeros(Zeros),
    UnitEnd,
    UnitsApplied { stream: u16, units: u64 },
    CloseStream { stream: u16 },
    StreamClosed { stream: u16, units: u64 },
    PagesEnd(PagesEnd),
    Ping { sent_ns: u64 },
    Pong { sent_ns: u64, answered_ns: u64 },
    DeviceState(Vec<u8>),
    DeviceStateEnd { bytes: u64 },
    Commit { epoch: u64, incarnation: u128 },
    Running(Running),
    Refused(Reason),
    Abort(Reason),
    Padding { bytes: u32 },
    References(References),
    Missing { runs: Vec<BlockRun> },
    Digests(Digests),
    Delta(Delta),
    PreparePageIn,
    PageInReady { able: bool },
    Remaining { runs: Vec<BlockRun> },
    RemainingEnd { pages: u64 },
    Fetch { runs: Vec<BlockRun> },
    PagedIn(Box<PagedIn>),
    DiskBlocks(DiskBlocks),
    DiskZeros(DiskZeros),
    DiskMark { mark: u64 },
    DiskMarked { mark: u64 },
    DiskEnd { streams: u16, mark: u64 },
    DiskReferences(DiskReferences),
    DiskMissing(DiskMissing),
}

impl Message {
    /// Returns the kind of the message's frame.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Message::Hello { .. } => Kind::Hello,
            Message::Welcome { .. } => Kind::Welcome,
            Message::Begin(_) => Kind::Begin,
            Message::Ready => Kind::Ready,
            Message::Pages(pages) => pages.kind(),
            Message::Zeros(_) => Kind::Zeros,
            Message::UnitEnd => Kind::UnitEnd,
            Message::UnitsApplied { .. } => Kind::UnitsApplied,
            Message::CloseStream { .. } => Kind::CloseStream,
            Message::StreamClosed { .. } => Kind::StreamClosed,
            Message::PagesEnd(_) => Kind::PagesEnd,
            Message::Ping { .. } => Kind::Ping,
            Message::Pong { .. } => Kind::Pong,
            Message::DeviceState(_) => Kind::DeviceState,
            Message::DeviceStateEnd { .. } => Kind::DeviceStateEnd,
            Message::Commit { .. } => Kind::Commit,
            Message::Running(_) => Kind::Running,
            Message::Refused(_) => Kind::Refused,
            Message::Abort(_) => Kind::Abort,
            Message::Padding { .. } => Kind::Padding,
            Message::References(_) => Kind::References,
            Message::Missing { .. } => Kind::Missing,
            Message::Digests(_) => Kind::Digests,
            Message::Delta(_) => Kind::Delta,
            Message::PreparePageIn => Kind::PreparePageIn,
            Message::PageInReady { .. } => Kind::PageInReady,
            Message::Remaining { .. } => Kind::Remaining,
            Message::RemainingEnd { .. } => Kind::RemainingEnd,
            Message::Fetch { .. } => Kind::Fetch,
            Message::PagedIn(_) => Kind::PagedIn,
            Message::DiskBlocks(_) => Kind::DiskBlocks,
            Message::DiskZeros(_) => Kind::DiskZeros,
            Message::DiskMark { .. } => Kind::DiskMark,
            Message::DiskMarked { .. } => Kind::DiskMarked,
            Message::DiskEnd { .. } => Kind::DiskEnd,
            Message::DiskReferences(_) => Kind::DiskReferences,
            Message::DiskMissing(_) => Kind::DiskMissing,
        }
    }

    /// Appends the whole frame to `out`.
    ///
    /// For [`Message::Pages`] it appends only what precedes the pages. For [`Message::Zeros`],
    /// [`Message::Missing`], [`Message::Remaining`] and [`Message::Fetch`] it takes as many runs as
    /// fit and returns their number; the caller sends the rest in further frames. The senders of
    /// all other messages ensure that they fit. Text is cut at [`MAX_DETAIL`].
    pub fn encode(&self, out: &mut Vec<u8>) -> usize {
        if let Message::Pages(pages) = self {
            out.extend_from_slice(&pages.to_bytes());
            return 1;
        }
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_LEN]);
        let taken = self.encode_payload(out);
        let payload = &out[start + HEADER_LEN..];
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let header = FrameHeader { kind: self.kind(), length, sum: checksum(payload) };
        out[start..start + HEADER_LEN].copy_from_slice(&header.to_bytes());
        taken
    }

    fn encode_payload(&self, out: &mut Vec<u8>) -> usize {
        match self {
            Message::Hello { versions, migration, stream } => {
                out.extend_from_slice(&MAGIC);
                out.extend_from_slice(&versions.oldest.to_le_bytes());
                out.extend_from_slice(&versions.newest.to_le_bytes());
                out.extend_from_slice(&migration.0);
                out.extend_from_slice(&stream.to_le_bytes());
            }
            Message::Welcome { version } => out.extend_from_slice(&version.to_le_bytes()),
            Message::Begin(begin) => {
                out.extend_from_slice(&begin.epoch.to_le_bytes());
                out.push(u8::from(begin.run));
                let blocks = u16::try_from(begin.block_pages.len()).unwrap_or(u16::MAX);
                out.extend_from_slice(&blocks.to_le_bytes());
                begin
                    .block_pages
                    .iter()
                    .for_each(|pages| out.extend_from_slice(&pages.to_le_bytes()));
                encode_incarnation(begin.incarnation, out);
            }
            Message::Ready | Message::Pages(_) | Message::UnitEnd | Message::PreparePageIn => {}
            Message::Zeros(zeros) => {
                out.extend_from_slice(&zeros.round.to_le_bytes());
                return runs::encode(&zeros.runs, out);
            }
            Message::UnitsApplied { stream, units } | Message::StreamClosed { stream, units } => {
                out.extend_from_slice(&stream.to_le_bytes());
                out.extend_from_slice(&units.to_le_bytes());
            }
            Message::CloseStream { stream } => out.extend_from_slice(&stream.to_le_bytes()),
            Message::PagesEnd(end) => {
                out.extend_from_slice(&end.pages.to_le_bytes());
                let streams = u16::try_from(end.units.len()).unwrap_or(u16::MAX);
                out.extend_from_slice(&streams.to_le_bytes());
                end.units.iter().for_each(|units| out.extend_from_slice(&units.to_le_bytes()));
            }
            Message::Ping { sent_ns } => out.extend_from_slice(&sent_ns.to_le_bytes()),
            Message::Commit { epoch, incarnation } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                encode_incarnation(*incarnation, out);
            }
            Message::Pong { sent_ns: a, answered_ns: b } => {
                out.extend_from_slice(&a.to_le_bytes());
                out.extend_from_slice(&b.to_le_bytes());
            }
            Message::DeviceState(bytes) => out.extend_from_slice(bytes),
            Message::DeviceStateEnd { bytes } => out.extend_from_slice(&bytes.to_le_bytes()),
            Message::Running(running) => {
                for time in [running.commit_ns, running.loaded_ns, running.running_ns] {
                    out.extend_from_slice(&time.to_le_bytes());
                }
            }
            Message::Refused(reason) | Message::Abort(reason) => encode_reason(reason, out),
            Message::Padding { bytes } => out.resize(out.len() + *bytes as usize, 0),
            Message::References(references) => references.encode(out),
            Message::Missing { runs } | Message::Remaining { runs } | Message::Fetch { runs } => {
                return runs::encode(runs, out);
            }
            Message::Digests(digests) => digests.encode(out),
            Message::Delta(delta) => delta.encode(out),
            Message::PageInReady { able } => out.push(u8::from(*able)),
            Message::RemainingEnd { pages } => out.extend_from_slice(&pages.to_le_bytes()),
            Message::PagedIn(figures) => figures.encode(out),
            Message::DiskBlocks(blocks) => blocks.encode(out),
            Message::DiskZeros(zeros) => zeros.encode(out),
            Message::DiskMark { mark } | Message::DiskMarked { mark } => {
                out.extend_from_slice(&mark.to_le_bytes());
            }
            Message::DiskEnd { streams, mark } => {
                out.extend_from_slice(&streams.to_le_bytes());
                out.extend_from_slice(&mark.to_le_bytes());
            }
            Message::DiskReferences(references) => references.encode(out),
            Message::DiskMissing(missing) => missing.encode(out),
        }
        1
    }

    /// Decodes a message from a frame's payload after verifying its checksum. Of a pages frame it
    /// needs the first [`PagesHeader::LEN`] − [`HEADER_LEN`] bytes.
    ///
    /// # Errors
    /// [`WireError`] if the payload was altered or does not match its kind.
    pub fn decode(header: FrameHeader, payload: &[u8]) -> Result<Message, WireError> {
        if checksum(payload) != header.sum {
            return Err(WireError::Corrupted { what: "a frame's payload" });
        }
        let mut cursor = Cursor::new(payload);
        let message = decode_payload(header, &mut cursor)?;
        cursor.finish(header.kind)?;
        Ok(message)
    }
}

fn decode_payload(header: FrameHeader, cursor: &mut Cursor<'_>) -> Result<Message, WireError> {
    Ok(match header.kind {
        Kind::Hello => decode_hello(cursor)?,
        Kind::Welcome => Message::Welcome { version: cursor.u16("the version")? },
        Kind::Begin => Message::Begin(decode_begin(cursor)?),
        Kind::Ready => Message::Ready,
        Kind::Pages | Kind::CompressedPages => Message::Pages(PagesHeader::decode(cursor, header)?),
        Kind::Zeros => Message::Zeros(Zeros {
            round: cursor.u32("the zeros' round")?,
            runs: runs::decode(cursor)?,
        }),
        Kind::UnitEnd => Message::UnitEnd,
        Kind::UnitsApplied => Message::UnitsApplied {
            stream: cursor.u16("the stream")?,
            units: cursor.u64("the units")?,
        },
        Kind::CloseStream => Message::CloseStream { stream: cursor.u16("the stream")? },
        Kind::StreamClosed => Message::StreamClosed {
            stream: cursor.u16("the stream")?,
            units: cursor.u64("the units")?,
        },
        Kind::PagesEnd => Message::PagesEnd(decode_pages_end(cursor)?),
        Kind::Ping => Message::Ping { sent_ns: cursor.u64("the clock")? },
        Kind::Pong => Message::Pong {
            sent_ns: cursor.u64("the clock")?,
            answered_ns: cursor.u64("the clock")?,
        },
        Kind::DeviceState => Message::DeviceState(cursor.rest().to_vec()),
        Kind::DeviceStateEnd => {
            Message::DeviceStateEnd { bytes: cursor.u64("the device state's length")? }
        }
        Kind::Commit => {
            let epoch = cursor.u64("the epoch")?;
            Message::Commit { epoch, incarnation: decode_incarnation(cursor)? }
        }
        Kind::Running => Message::Running(Running {
            commit_ns: cursor.u64("the commit's time")?,
            loaded_ns: cursor.u64("the load's time")?,
            running_ns: cursor.u64("the run's time")?,
        }),
        Kind::Refused => Message::Refused(decode_reason(cursor)?),
        Kind::Abort => Message::Abort(decode_reason(cursor)?),
        Kind::Padding => {
            cursor.rest();
            Message::Padding { bytes: header.length }
        }
        Kind::References => Message::References(References::decode(cursor)?),
        Kind::Missing => Message::Missing { runs: runs::decode(cursor)? },
        Kind::Digests => Message::Digests(Digests::decode(cursor)?),
        Kind::Delta => Message::Delta(Delta::decode(cursor, header.length)?),
        Kind::PreparePageIn => Message::PreparePageIn,
        Kind::PageInReady => {
            Message::PageInReady { able: decode_bool(cursor, "whether it is able")? }
        }
        Kind::Remaining => Message::Remaining { runs: runs::decode(cursor)? },
        Kind::RemainingEnd => Message::RemainingEnd { pages: cursor.u64("the pages that remain")? },
        Kind::Fetch => Message::Fetch { runs: runs::decode(cursor)? },
        Kind::PagedIn => Message::PagedIn(Box::new(PagedIn::decode(cursor)?)),
        Kind::DiskBlocks => Message::DiskBlocks(DiskBlocks::decode(cursor)?),
        Kind::DiskZeros => Message::DiskZeros(DiskZeros::decode(cursor)?),
        Kind::DiskMark => Message::DiskMark { mark: cursor.u64("the mark")? },
        Kind::DiskMarked => Message::DiskMarked { mark: cursor.u64("the mark")? },
        Kind::DiskEnd => {
            let (streams, mark) = decode_end(cursor)?;
            Message::DiskEnd { streams, mark }
        }
        Kind::DiskReferences => Message::DiskReferences(DiskReferences::decode(cursor)?),
        Kind::DiskMissing => Message::DiskMissing(DiskMissing::decode(cursor)?),
    })
}

fn decode_hello(cursor: &mut Cursor<'_>) -> Result<Message, WireError> {
    if cursor.array("the magic")? != MAGIC {
        return Err(WireError::NotOurs);
    }
    let versions = VersionRange {
        oldest: cursor.u16("the oldest version")?,
        newest: cursor.u16("the newest version")?,
    };
    let migration = MigrationId(cursor.array("the migration id")?);
    Ok(Message::Hello { versions, migration, stream: cursor.u16("the stream")? })
}

fn decode_begin(cursor: &mut Cursor<'_>) -> Result<Begin, WireError> {
    let epoch = cursor.u64("the epoch")?;
    let run = decode_bool(cursor, "whether to run")?;
    let blocks = cursor.u16("the number of blocks")?;
    if !(1..=MAX_BLOCKS).contains(&blocks) {
        return Err(WireError::BadValue { what: "the number of blocks" });
    }
    let block_pages =
        (0..blocks).map(|_| cursor.u64("a block's size")).collect::<Result<_, _>>()?;
    Ok(Begin { epoch, incarnation: decode_incarnation(cursor)?, run, block_pages })
}

/// Appends an incarnation. An incarnation that is not recorded takes no bytes: such a VM may move
/// to an older release, which reads none.
fn encode_incarnation(incarnation: u128, out: &mut Vec<u8>) {
    if incarnation != 0 {
        out.extend_from_slice(&incarnation.to_le_bytes());
    }
}

fn decode_incarnation(cursor: &mut Cursor<'_>) -> Result<u128, WireError> {
    if cursor.is_empty() {
        return Ok(0);
    }
    match u128::from_le_bytes(cursor.array("the incarnation")?) {
        0 => Err(WireError::BadValue { what: "the incarnation" }),
        incarnation => Ok(incarnation),
    }
}

fn decode_bool(cursor: &mut Cursor<'_>, what: &'static str) -> Result<bool, WireError> {
    match cursor.u8(what)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(WireError::BadValue { what }),
    }
}

impl PagedIn {
    fn encode(&self, out: &mut Vec<u8>) {
        let PagedIn { pages, demanded, cuts, median_ns, p90_ns, p99_ns, most_ns, waits } = self;
        let numbers = [pages, demanded, cuts, median_ns, p90_ns, p99_ns, most_ns];
        for number in numbers.into_iter().chain(waits) {
            out.extend_from_slice(&number.to_le_bytes());
        }
    }

    fn decode(cursor: &mut Cursor<'_>) -> Result<PagedIn, WireError> {
        let mut number = || cursor.u64("page-in's figures");
        let mut figures = PagedIn {
            pages: number()?,
            demanded: number()?,
            cuts: number()?,
            median_ns: number()?,
            p90_ns: number()?,
            p99_ns: number()?,
            most_ns: number()?,
            waits: [0; WAIT_CLASSES],
        };
        for waits in &mut figures.waits {
            *waits = number()?;
        }
        Ok(figures)
    }
}

fn decode_pages_end(cursor: &mut Cursor<'_>) -> Result<PagesEnd, WireError> {
    let pages = cursor.u64("the pages sent")?;
    let streams = cursor.u16("the number of streams")?;
    if streams > MAX_STREAMS {
        return Err(WireError::BadValue { what: "the number of streams" });
    }
    let units = (0..streams).map(|_| cursor.u64("a stream's units")).collect::<Result<_, _>>()?;
    Ok(PagesEnd { pages, units })
}

fn encode_reason(reason: &Reason, out: &mut Vec<u8>) {
    let mut end = reason.detail.len().min(MAX_DETAIL as usize);
    while !reason.detail.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&reason.code.to_le_bytes());
    out.push(0);
    out.extend_from_slice(&reason.detail.as_bytes()[..end]);
}

fn decode_reason(cursor: &mut Cursor<'_>) -> Result<Reason, WireError> {
    let code = cursor.u16("the reason's code")?;
    if cursor.u8("the reason's reserved byte")? != 0 {
        return Err(WireError::BadValue { what: "the reason's reserved byte" });
    }
    let text = cursor.rest();
    // A peer's text ends up in logs and terminals, so only printable characters pass.
    let detail = String::from_utf8_lossy(text)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    Ok(Reason { code, detail })
}
