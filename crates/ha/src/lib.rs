//! Who may run the protected VMs of a host: the lease of a host, its [`Guard`] on the host, its
//! [`Judge`] in the manager, and the heartbeat blocks between them. docs/ha-terms.md has the
//! arithmetic and the reasons.
//!
//! State machines and a codec: nothing here does I/O or reads a clock. Times are durations since
//! any fixed moment on the caller's own clock, which must also count suspended time. The crate
//! knows no hosts by name, no VMs and no store.

mod guard;
pub mod heartbeat;
mod judge;
mod lease;
pub mod own;
mod term;
mod timing;

pub use guard::{Guard, Order, Standing};
pub use judge::{Action, Facts, Fencing, Judge, Phase, Record};
pub use lease::Lease;
pub use term::{Answer, Grant, Mark, Renewal, Term};
pub use timing::{BadTiming, Timing};
