//! The destination's data streams: one thread each, which writes pages into the shadow VM's memory
//! and counts units.
//!
//! Nothing touches the memory any more once [`Intake::complete`] has returned: every reader has
//! ended by then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, Stream, StreamReceiver, StreamSender};
use godwit_ram::{PageRange, Region};
use godwit_wire::{BlockRun, CONTROL_STREAM, Delta, MAX_STREAMS, Message, PagesEnd, References};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::contents::{Contents, send_missing};
use super::handshake::WelcomedStream;
use crate::board::CHUNK_PAGES;
use crate::destination::Event;
use crate::failure::{Failure, FailureCode, lane_failure};

/// Units that are acknowledged together while more arrive.
const UNITS_AN_ANSWER: u64 = 8;
/// Time limit for the last pages after the source has announced that they are on their way.
const COMPLETE_LIMIT: Duration = Duration::from_secs(10);

/// Input of the destination's driver.
#[derive(Debug)]
pub(super) enum Input {
    Event(Event),
    DeviceState(Vec<u8>),
    PagesEnd(PagesEnd),
    CloseStream {
        stream: u16,
    },
    PreparePageIn,
    Remaining(Vec<BlockRun>),
    /// The first round is over: the guest may be stopped soon.
    LaterRound,
}

pub(super) struct Intake {
    regions: Vec<Arc<Region>>,
    contents: Contents,
    /// Sender of the control stream, for answers.
    control: Arc<Mutex<StreamSender>>,
    events: SyncSender<(Instant, Input)>,
    state: Mutex<State>,
    changed: Condvar,
    /// Pages of whole units.
    pages: AtomicU64,
    /// The newest round that wrote each chunk of each block, plus one.
    rounds: Vec<Vec<AtomicU64>>,
    /// Whether a round after the first has begun.
    is_later: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    streams: Vec<DataStream>,
    over: bool,
}

/// Data stream, indexed by its number less one.
#[derive(Debug, Default)]
struct DataStream {
    stream: Option<Stream>,
    /// Whole units in memory.
    units: u64,
    /// Whether its reader runs.
    reading: bool,
    /// Whether nothing more is taken of it.
    closed: bool,
}

impl State {
    /// Returns a data stream by its number, also if it never connected. Returns `None` for an
    /// invalid number.
    fn data_stream(&mut self, number: u16) -> Option<&mut DataStream> {
        let place = usize::from(number.checked_sub(CONTROL_STREAM + 1)?);
        if number > MAX_STREAMS {
            return None;
        }
        if self.streams.len() <= place {
            self.streams.resize_with(place + 1, DataStream::default);
        }
        self.streams.get_mut(place)
    }
}

impl Intake {
    pub(super) fn new(
        regions: Vec<Arc<Region>>,
        contents: Contents,
        control: Arc<Mutex<StreamSender>>,
        events: SyncSender<(Instant, Input)>,
    ) -> Intake {
        let chunks = |region: &Arc<Region>| {
            let count = region.pages().div_ceil(CHUNK_PAGES);
            (0..count).map(|_| AtomicU64::new(0)).collect()
        };
        let rounds = regions.iter().map(chunks).collect();
        Intake {
            regions,
            contents,
            control,
            events,
            state: Mutex::default(),
            changed: Condvar::new(),
            pages: AtomicU64::new(0),
            rounds,
            is_later: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Changes under the lock are to counts and flags, each by one assignment.
        self.state.lock()
    }

    pub(super) fn is_over(&self) -> bool {
        self.state().over
    }

    /// Admits a data stream. Returns `None` if it does not belong here.
    pub(super) fn admit(&self, welcomed: WelcomedStream) -> Option<DataReader<'_>> {
        let WelcomedStream { number, stream, receiver, .. } = welcomed;
        let mut state = self.state();
        let over = state.over;
        match state
            .data_stream(number)
            .filter(|slot| !over && !slot.closed && slot.stream.is_none())
        {
            Some(slot) => {
                slot.stream = Some(stream);
                slot.reading = true;
            }
            None => {
                stream.close();
                return None;
            }
        }
        Some(DataReader::new(self, number, receiver))
    }

    /// Gives up a stream for which no thread could be started, as if it had broken at once. Its
    /// reader is already gone.
    pub(super) fn not_read(&self, number: u16, why: &std::io::Error) {
        tracing::error!(stream = number, error = %why, "cannot start a thread for a data stream");
        self.send(&Message::StreamClosed { stream: number, units: 0 });
    }

    /// Closes a stream that the source reports as broken: its reader ends and reports what it took.
    pub(super) fn close(&self, number: u16) {
        let mut state = self.state();
        let Some(slot) = state.data_stream(number) else { return };
        match &slot.stream {
            Some(stream) => stream.close(),
            None if !slot.closed => {
                slot.closed = true;
                drop(state);
                self.send(&Message::StreamClosed { stream: number, units: 0 });
            }
            None => {}
        }
    }

    /// Waits until every stream has brought all that the source sent on it, and ends the streams.
    /// Returns the pages in memory.
    pub(super) fn complete(&self, end: &PagesEnd) -> Result<u64, Failure> {
        let limit = Instant::now() + COMPLETE_LIMIT;
        let mut state = self.state();
        loop {
            let units = |place: usize| state.streams.get(place).map_or(0, |slot| slot.units);
            let missing = (0..end.units.len()).find(|&place| units(place) < end.units[place]);
            let Some(missing) = missing else { break };
            if state.streams.get(missing).is_some_and(|slot| slot.closed) {
                let detail = format!("data stream {} broke with the last pages on it", missing + 1);
                return Err(Failure::new(FailureCode::LaneLost, detail));
            }
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::new(FailureCode::LaneLost, "the last pages did not come"));
            }
            self.changed.wait_for(&mut state, left);
        }
        drop(state);
        self.end();
        self.until_read();
        match self.contents.lacks() {
            0 => Ok(self.pages.load(Ordering::SeqCst)),
            lacking => {
                let detail = format!(
                    "{lacking} pages referenced missing content, and have not arrived since"
                );
                Err(Failure::new(FailureCode::ProtocolBroken, detail))
            }
        }
    }

    /// Notes pages that are fetched later if they are missing.
    pub(super) fn lacks_no_more(&self, run: &BlockRun) {
        self.contents.written(run.block, PageRange { first: run.first, count: run.count });
    }

    pub(super) fn end(&self) {
        let mut state = self.state();
        state.over = true;
        state.streams.iter().filter_map(|slot| slot.stream.as_ref()).for_each(Stream::close);
    }

    /// Waits, after [`Intake::end`], until no reader touches memory any more.
    pub(super) fn until_read(&self) {
        let mut state = self.state();
        while state.streams.iter().any(|slot| slot.reading) {
            self.changed.wait(&mut state);
        }
    }

    fn send(&self, message: &Message) {
        // If the control stream breaks here, its reader notices.
        if let Err(error) = self.control.lock().send(message) {
            tracing::debug!(%error, kind = ?message.kind(), "the source did not get a message");
        }
    }

    /// Records a round's write. An older round never overwrites a newer one.
    fn note_round(&self, block: u16, range: PageRange, round: u32) -> Result<(), LaneError> {
        let out = LaneError::OutOfBounds { block, first: range.first, count: range.count };
        let Some(chunks) = self.rounds.get(usize::from(block)) else { return Err(out) };
        if round > 0 && !self.is_later.swap(true, Ordering::Relaxed) {
            // It only helps: a driver that waits for this thread must not be waited for.
            let _ = self.events.try_send((Instant::now(), Input::LaterRound));
        }
        let last = range.end().saturating_sub(1) / CHUNK_PAGES;
        for chunk in range.first / CHUNK_PAGES..=last {
            let place = usize::try_from(chunk).ok().and_then(|chunk| chunks.get(chunk));
            let Some(newest) = place else { return Err(out) };
            if newest.fetch_max(u64::from(round) + 1, Ordering::Relaxed) > u64::from(round) + 1 {
                return Err(LaneError::OldRound { block, first: range.first, round });
            }
        }
        Ok(())
    }
}

/// Thread of one data stream.
pub(super) struct DataReader<'a> {
    intake: &'a Intake,
    number: u16,
    receiver: StreamReceiver,
    units: u64,
    /// Units reported to the source.
    answered: u64,
    /// Pages of the current unit.
    pages: u64,
    /// In round 0: where pages of the current unit have arrived, and whether all of them came by
    /// references and zeros.
    came: Option<(u16, u64, bool)>,
    /// Pages that could not be reconstructed and that have not been reported to the source yet.
    missing: Vec<BlockRun>,
    /// Buffer in which pages are verified.
    scratch: Vec<u8>,
}

impl<'a> DataReader<'a> {
    fn new(intake: &'a Intake, number: u16, receiver: StreamReceiver) -> DataReader<'a> {
        let (missing, scratch) = (Vec::new(), Vec::new());
        DataReader {
            intake,
            number,
            receiver,
            units: 0,
            answered: 0,
            pages: 0,
            came: None,
            missing,
            scratch,
        }
    }

    pub(super) fn number(&self) -> u16 {
        self.number
    }

    pub(super) fn run(mut self) {
        let error = loop {
            if self.units - self.answered >= UNITS_AN_ANSWER
                || (self.units > self.answered && self.receiver.is_idle())
            {
                self.answered = self.units;
                // Comes first: a source that learns that the unit is applied must know what is
                // missing of it.
                send_missing(std::mem::take(&mut self.missing), |list| self.intake.send(list));
                let Self { number, units, .. } = self;
                self.intake.send(&Message::UnitsApplied { stream: number, units });
            }
            if let Err(error) = self.one() {
                break error;
            }
        };
        self.ended(&error);
    }

    fn one(&mut self) -> Result<(), LaneError> {
        let incoming = self.receiver.receive()?;
        if self.intake.is_over() {
            return Err(LaneError::Closed);
        }
        match incoming {
            Incoming::Pages(pages) => {
                let (run, round) = (pages.run, pages.round);
                let count = u64::from(run.count);
                self.fits_unit(&BlockRun { block: run.block, first: run.first, count })?;
                let region = self.region(run.block, run.first, count)?;
                let range = PageRange { first: run.first, count };
                self.intake.note_round(run.block, range, round)?;
                allocate(&region, range, round)?;
                self.receiver.pages(&region, pages)?;
                self.intake.contents.written(run.block, range);
                self.pages += count;
                if round == 0 {
                    self.came = Some((run.block, run.first, false));
                } else {
                    self.intake.contents.changed(run.block, range);
                }
            }
            Incoming::Message(Message::Zeros(zeros)) => {
                for run in &zeros.runs {
                    self.zero(run, zeros.round)?;
                }
            }
            Incoming::Message(Message::References(references)) => self.refer(&references)?,
            Incoming::Message(Message::Delta(delta)) => self.change(&delta)?,
            Incoming::Message(Message::UnitEnd) => {
                self.intake.pages.fetch_add(std::mem::take(&mut self.pages), Ordering::SeqCst);
                self.units += 1;
                if let Some((block, page, by_reference)) = self.came.take() {
                    self.intake.contents.note_arrival(block, page, by_reference);
                }
                let mut state = self.intake.state();
                state.streams[usize::from(self.number - 1)].units = self.units;
                self.intake.changed.notify_all();
            }
            Incoming::Message(Message::Padding { .. }) => {}
            Incoming::Message(other) => return Err(LaneError::Unexpected(other.kind())),
        }
        Ok(())
    }

    fn region(&self, block: u16, first: u64, count: u64) -> Result<Arc<Region>, LaneError> {
        let region = self.intake.regions.get(usize::from(block));
        region.cloned().ok_or(LaneError::OutOfBounds { block, first, count })
    }

    /// Checks that the unit has no more pages than a chunk, this run included: a few bytes must not
    /// keep this host busy for long.
    fn fits_unit(&self, run: &BlockRun) -> Result<(), LaneError> {
        if run.count > CHUNK_PAGES - self.pages.min(CHUNK_PAGES) {
            return Err(LaneError::OutOfBounds {
                block: run.block,
                first: run.first,
                count: run.count,
            });
        }
        Ok(())
    }

    /// Returns the region of pages that this round is about to reconstruct.
    fn about_to_make(&self, run: &BlockRun, round: u32) -> Result<Arc<Region>, LaneError> {
        let &BlockRun { block, first, count } = run;
        self.fits_unit(run)?;
        let region = self.region(block, first, count)?;
        if first.checked_add(count).is_none_or(|end| end > region.pages()) {
            return Err(LaneError::OutOfBounds { block, first, count });
        }
        self.intake.note_round(block, PageRange { first, count }, round)?;
        Ok(region)
    }

    fn zero(&mut self, run: &BlockRun, round: u32) -> Result<(), LaneError> {
        let region = self.about_to_make(run, round)?;
        let range = PageRange { first: run.first, count: run.count };
        region.zero(range).map_err(|error| LaneError::Memory(error.to_string()))?;
        self.intake.contents.written(run.block, range);
        if round > 0 {
            self.intake.contents.changed(run.block, range);
        }
        self.pages += run.count;
        Ok(())
    }

    /// Reconstructs pages from content that is here already.
    fn refer(&mut self, references: &References) -> Result<(), LaneError> {
        let &References { round, block, first, .. } = references;
        let count = references.count();
        let region = self.about_to_make(&BlockRun { block, first, count }, round)?;
        allocate(&region, PageRange { first, count }, round)?;
        let Intake { contents, regions, .. } = self.intake;
        contents.reconstruct(references, regions, &region, &mut self.scratch, &mut self.missing)?;
        self.pages += count;
        if round == 0 {
            self.came.get_or_insert((block, first, true));
        }
        Ok(())
    }

    /// Reconstructs pages from their present content and differences.
    fn change(&mut self, delta: &Delta) -> Result<(), LaneError> {
        let &Delta { round, block, first, .. } = delta;
        let count = delta.count();
        let region = self.about_to_make(&BlockRun { block, first, count }, round)?;
        let differences = self.receiver.differences(delta)?;
        self.intake.contents.change(
            delta,
            differences,
            &region,
            &mut self.scratch,
            &mut self.missing,
        )?;
        self.intake.contents.changed(block, PageRange { first, count });
        self.pages += count;
        Ok(())
    }

    /// Ends reading of the stream. Returns whether its errors no longer matter.
    fn closes(&self) -> bool {
        let mut state = self.intake.state();
        let over = state.over;
        let slot = &mut state.streams[usize::from(self.number - 1)];
        (slot.reading, slot.closed) = (false, true);
        if let Some(stream) = &slot.stream {
            stream.close();
        }
        self.intake.changed.notify_all();
        over
    }

    /// Handles the end of a stream. After a broken connection the other streams take over its work;
    /// any other error ends the migration.
    fn ended(mut self, error: &LaneError) {
        let over = self.closes();
        if over {
            return;
        }
        let failure = lane_failure(error);
        if failure.code == FailureCode::LaneLost {
            tracing::warn!(stream = self.number, %error, units = self.units, "a data stream broke");
            send_missing(std::mem::take(&mut self.missing), |list| self.intake.send(list));
            self.intake.send(&Message::StreamClosed { stream: self.number, units: self.units });
        } else {
            let _ = self.intake.events.send((Instant::now(), Input::Event(Event::Failed(failure))));
        }
    }
}

/// Allocates memory for pages that round 0 brings, in one call: a page at a time takes longer.
/// Pages that are zero stay holes. Pages outside the block are refused where they are written.
fn allocate(region: &Region, range: PageRange, round: u32) -> Result<(), LaneError> {
    let is_inside = range.first.checked_add(range.count).is_some_and(|end| end <= region.pages());
    if round > 0 || !is_inside {
        return Ok(());
    }
    region.allocate(range).map_err(|error| LaneError::Memory(error.to_string()))
}

impl Drop for DataReader<'_> {
    /// Runs also after a panic: others wait for the reader's end.
    fn drop(&mut self) {
        self.closes();
    }
}
