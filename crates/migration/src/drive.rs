//! The drivers carry out the decisions of the state machines, on threads of their own that block on
//! sockets. The hypervisor is behind two traits whose contracts are part of the hand-over.
//!
//! Files here do not use this one, which only names what others may use.

mod announcing;
mod contents;
mod course;
mod destination;
mod device_state;
mod dispatch;
mod handshake;
mod heat;
mod hypervisor;
mod inbox;
mod intake;
pub mod page_in;
mod referring;
mod source;
mod sweep;
mod throttled;
mod tracking;

pub use crate::destination::MOST_DEVICE_STATE_BYTES;
pub use crate::failure::lane_failure;
pub use announcing::{Beside, Offer};
pub use course::Course;
pub use destination::{DestinationJob, receive};
pub use dispatch::lanes::LaneFigures;
pub use handshake::{Connect, Hello, WelcomedStream, say_hello, welcome};
pub use hypervisor::{DestinationHypervisor, Noted, SourceHypervisor};
pub use inbox::{Events, HypervisorEvent, Inbox, inbox};
pub use page_in::SessionStream;
pub use referring::{Deltas, DescribedContent, References};
pub use source::job::{Kept, SourceJob, SourceResult, Unsent};
pub use source::send;
pub use source::simulation;
pub(crate) use source::windows::{LEAST_LAST_PAGES, MOST_LAST_PAGES};
pub(crate) use sweep::SAMPLED_AFTER;
pub use throttled::{CpuQuota, Throttled, Throttling};
pub use tracking::{Tracking, tracks_by_faults};
