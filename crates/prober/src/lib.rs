//! Probes guests from outside, as their users see them, and measures the gaps in their answers.
//!
//! - [`watch`] probes one guest in the foreground: `godwit watch`.
//! - [`server`] is a daemon that probes many guests; [`Client`] asks it, for the blackout of a
//!   migration. The lab runs one in the namespace of its client.
//! - [`prober`] sends the probes, [`record`] keeps what became of them and finds the gaps, without
//!   I/O.
//!
//! It knows addresses and echo ports, and nothing of hosts, VMs or migrations.

mod client;
pub mod clock;
mod namespace;
pub mod prober;
pub mod record;
pub mod server;
pub mod watch;

pub use crate::client::{AskError, Client};
pub use crate::namespace::{NAMESPACE_DIR, in_namespace, namespace_path};
pub use crate::record::Gaps;
