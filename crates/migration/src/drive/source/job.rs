//! What a migration needs at its source, and what it returns.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_lanes::Stream;
use godwit_lanes::pacing::MigrationPace;
use godwit_ram::Region;
use godwit_types::{
    BitRate, Compression, EncodingReport, Outcome, Ownership, PageInReport, PhaseReport, Progress,
    ReferencedPages, RoundReport, SwitchoverReport, ThrottleReport, TrackingReport,
};
use godwit_wire::MigrationId;

use crate::drive::course::Course;
use crate::drive::dispatch::lanes::LaneFigures;
use crate::drive::handshake::Connect;
use crate::drive::page_in::AskAgain;
use crate::drive::referring::{Deltas, DescribedContent, References};
use crate::encoding::Experience;
use crate::failure::Failure;
use crate::policy::Policy;
use crate::reference::{Content, PageBits};
use crate::source::Verdict;

/// Everything that a migration needs at the source.
pub struct SourceJob<'a, H, T> {
    /// The control stream to the destination, connected, with small segments: a path that drops
    /// large packets then breaks only data streams, and those are replaced.
    pub control: Stream,
    /// Connects a data stream of the lane with this number, from 0 on, unless it is interrupted:
    /// the end of the migration waits for it.
    pub connect: &'a Connect<'a>,
    pub lanes: usize,
    /// Streams of each lane; `None`: as many as measurement finds worthwhile.
    pub streams: Option<usize>,
    /// Limits for its data streams, which `connect` applies to them.
    pub pace: MigrationPace,
    /// ID issued by the destination.
    pub migration: MigrationId,
    /// The ownership that the destination receives.
    pub ownership: Ownership,
    /// Whether the guest ran when the migration began.
    pub runs: bool,
    /// When to switch over.
    pub policy: Policy,
    /// Compression of the pages.
    pub compression: Compression,
    /// References for pages.
    pub references: References,
    /// The destination's contents, by their numbers less one.
    pub contents: Vec<DescribedContent>,
    /// Deltas for pages.
    pub deltas: Deltas,
    /// Experience of streams to this host: those of this migration begin with it, and add to it.
    pub experience: Arc<Experience>,
    /// Order in which round 0 visits the guest's memory. It differs between guests that move to one
    /// host at the same time, so that each finds content there that others have brought.
    pub course: Course,
    /// Duration of the checks, since `begun`.
    pub preflight: Duration,
    /// The guest's RAM, block by block.
    pub regions: Vec<Arc<Region>>,
    /// Its RAM as content for its return. The hashes of pages that are computed for the migration
    /// are noted there.
    pub departing: Option<Arc<Content>>,
    /// Its dirty tracking, attached.
    pub tracker: T,
    /// Its hypervisor.
    pub hypervisor: H,
    /// Time of the migration's request.
    pub begun: Instant,
    pub progress: &'a (dyn Fn(Progress) + Sync),
    /// Queries the destination, on another path than the lane, whether it runs the guest. May take
    /// a while.
    pub ask_verdict: &'a (dyn Fn() -> Verdict + Sync),
    /// Requests another session of page-in from the destination after a cut.
    pub page_in_again: &'a AskAgain<'a>,
    /// Pages that the destination lacks if the lane of an earlier attempt was cut; `None`: it has
    /// nothing yet.
    pub resumes: Option<Unsent>,
}

/// Pages that a destination lacks after a cut of its lane: everything that round 0 had not visited,
/// and everything that was not reported as applied. The tracking records what the guest has written
/// since.
#[derive(Clone, Debug)]
pub struct Unsent(pub(super) PageBits);

impl Unsent {
    /// Returns the number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.0.count()
    }
}

/// State that a cut leaves at the source, with which the migration continues on another lane.
#[derive(Debug)]
pub struct Kept<T> {
    /// The guest's tracking, which has continued.
    pub tracker: T,
    /// Pages that the destination lacks.
    pub unsent: Unsent,
}

/// Result of a migration at its source.
#[derive(Clone, Debug)]
pub struct SourceResult {
    /// Where the guest is.
    pub outcome: Outcome,
    /// Why it is not at the destination.
    pub failure: Option<Failure>,
    pub rounds: Vec<RoundReport>,
    /// Time per phase, only of the driver's phases.
    pub phases: Vec<PhaseReport>,
    /// Parts of the pause.
    pub switchover: Option<SwitchoverReport>,
    /// How long the guest was paused for a switchover that was undone.
    pub stood_still_ms: Option<f64>,
    /// Bytes handed to the wire.
    pub wire_bytes: u64,
    /// The limit that held its pages at the end.
    pub bandwidth_limit: Option<BitRate>,
    /// Shortest round trip seen.
    pub round_trip: Option<Duration>,
    /// Totals of each lane.
    pub lanes: Vec<LaneFigures>,
    /// How the pages were encoded.
    pub encodings: Vec<EncodingReport>,
    /// Where the content of pages was that were sent by reference.
    pub referenced: ReferencedPages,
    /// Pages that were sent by reference and had to be sent again with their content.
    pub missing_pages: u64,
    /// How dirty pages were found.
    pub tracking: TrackingReport,
    /// Effect of slowing the guest's writers; `None` if they were not slowed.
    pub throttle: Option<ThrottleReport>,
    /// How the pages arrived that the guest lacked at first; `None` if it lacked none.
    pub page_in: Option<PageInReport>,
}
