//! The algorithm of a migration. State machines without I/O decide on phases, rounds, convergence
//! and hand-over; drivers carry out their decisions and do the I/O. The crate does not know QEMU:
//! the hypervisor is a trait. It also contains the probe of the lanes between two hosts, which runs
//! before a migration.

mod bandwidth;
pub mod board;
mod clock;
pub mod destination;
mod dirty_rate;
pub mod disks;
pub mod drive;
pub mod encoding;
pub mod fail_writes;
mod failure;
pub mod handover;
pub mod hold;
mod intent;
mod ledger;
mod policy;
pub mod predict;
pub mod probe;
pub mod reference;
mod report;
pub mod saved;
mod scaler;
pub mod source;
mod throttle;

pub use bandwidth::Bandwidth;
pub use clock::PeerClock;
pub use encoding::Experience;
pub use failure::Failure;
pub use intent::PolicySettings;
pub use ledger::{Rates, SentTotals};
pub use policy::{
    Convergence, DEFAULT_SWITCHOVER_BUDGET, DEFAULT_SWITCHOVER_LIMIT, Decision,
    MOST_SWITCHOVER_BUDGET, Measured, PageIn, Policy, Throttling,
};
pub use report::{millis, nanos};
pub use scaler::{FIRST_STREAMS, LaneSample, MOST_STREAMS, Opening, Scaler, first_streams};
pub use throttle::{LEAST_SHARE, MeansUse, QuotaLoop, means_for};
