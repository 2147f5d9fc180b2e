//! The algorithm of a migration, without I/O: phases, rounds, convergence and hand-over as state
//! machines, and the drivers that carry out their decisions. It does not know QEMU: the hypervisor
//! is a trait. It also contains the probe of the lanes between two hosts, which runs before a
//! migration.

mod bandwidth;
pub mod board;
mod clock;
pub mod destination;
mod dirty_rate;
pub mod drive;
pub mod encoding;
pub mod fail_writes;
mod failure;
pub mod handover;
pub mod hold;
mod intent;
mod ledger;
mod phase;
mod policy;
pub mod predict;
pub mod probe;
pub mod reference;
mod report;
mod scaler;
pub mod source;
mod throttle;

pub use bandwidth::{Bandwidth, BandwidthPoint, MOST_POINTS};
pub use clock::PeerClock;
pub use encoding::{Compression, EncodingName, EncodingReport, Experience};
pub use failure::{Failure, FailureCode};
pub use godwit_lanes::{BitRate, RateLimit};
pub use intent::{Intent, IntentError, PageInUse, PolicySettings};
pub use ledger::{Rates, Sweep};
pub use phase::Phase;
pub use policy::{
    Convergence, DEFAULT_SWITCHOVER_BUDGET, DEFAULT_SWITCHOVER_LIMIT, Decision,
    MOST_SWITCHOVER_BUDGET, Measured, PageIn, Policy, Throttling,
};
pub use predict::{DryRun, Means, Predicted};
pub use reference::ReferenceUse;
pub use report::{
    CutReport, EngineKind, FetchTimes, LaneProgress, LaneReport, Outcome, PageInReport,
    PhaseReport, Progress, Report, RoundReport, SwitchoverReport, ThrottleReport, WaitClass,
    millis, nanos,
};
pub use scaler::{FIRST_STREAMS, LaneSample, MOST_STREAMS, Opening, Scaler, first_streams};
pub use throttle::{LEAST_SHARE, MeansUse, QuotaLoop, ThrottleMeans, means_for};
