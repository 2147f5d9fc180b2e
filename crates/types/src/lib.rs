//! Plain data that the API, records and reports share, from faults to whole reports.
//! It owns the shape of that data: names, units, JSON keys and textual forms.
//! It contains no engine and no I/O, and reads no clock.
//! It may use serde and the standard library, and no other crate of the project.
//! Every other crate may use it.

mod bandwidth;
mod datastore_choice;
mod datastores;
mod disks;
mod encoding;
mod engine;
mod failure;
mod fault;
mod finding;
mod intent;
mod lane;
mod ownership;
mod phase;
mod prediction;
pub mod probe;
mod progress;
mod rate;
mod report;
mod tracking;

pub use bandwidth::{BandwidthPoint, MOST_POINTS};
pub use datastore_choice::{DatastoreCandidate, DatastoreChoice, choose_datastore};
pub use datastores::{DatastoreHealth, DatastoreSpeed};
pub use disks::{DiskMeans, DiskReport, DiskRound, DisksProgress, DisksReport};
pub use encoding::{
    Compression, ContentKind, EncodingName, EncodingReport, ReferenceUse, ReferencedPages,
};
pub use engine::EngineKind;
pub use failure::FailureCode;
pub use fault::Fault;
pub use finding::ImportFinding;
pub use intent::{Intent, IntentError, PageInUse};
pub use lane::Lane;
pub use ownership::{Incarnation, IncarnationError, Ownership};
pub use phase::Phase;
pub use prediction::{
    DirtySample, DryRun, GuestFigures, LanesFigures, LanesKnownBy, Means, Predicted,
};
pub use progress::{LaneProgress, Progress};
pub use rate::{BitRate, LEAST_LIMIT, RateError, RateLimit, parse_scaled};
pub use report::{
    CutReport, FetchTimes, LaneReport, Outcome, PageInReport, PhaseReport, Report, RoundReport,
    SwitchoverReport, ThrottleMeans, ThrottleReport, WaitClass,
};
pub use tracking::{TrackingMeans, TrackingReport, TrackingUse};
