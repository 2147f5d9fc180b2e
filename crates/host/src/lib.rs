//! The host agent: runs this host's VMs and both ends of their migrations, behind an HTTP API.
//!
//! - [`Config`]: what the operator writes. [`run`]: everything, until a signal.
//! - [`Agent`]: the VMs, each with its condition; one operation at a time on each.
//! - [`Vm`]: a VM with a process. [`Migrations`]: progress and reports.
//! - [`migration`]: the engines that move a VM.
//!
//! VMs do not end with the agent: QEMU runs in a session of its own, and the next agent adopts it.

// The support of the integration tests serves unit tests too, and names this crate.
#[cfg(test)]
extern crate self as godwit_host;

mod agent;
mod config;
mod datastores;
mod failure;
mod guest_trip;
mod hold;
mod join;
mod kvm;
mod lanes_seen;
mod limits;
mod load;
mod memory;
mod metrics;
pub mod migration;
mod migrations;
mod network;
mod peers;
mod probe;
mod protection;
mod references;
mod server;
mod store;
mod user;
mod vm;

/// What the fuzz targets reach. No promise to anybody else.
#[doc(hidden)]
pub mod fuzzing {
    /// Reads a VM's record and writes it again; none where it is none.
    #[must_use]
    pub fn record(text: &[u8]) -> Option<Vec<u8>> {
        serde_json::to_vec(&crate::store::parse(text).ok()?).ok()
    }

    /// The same of what is kept of a VM that is gone.
    #[must_use]
    pub fn gone(text: &[u8]) -> Option<Vec<u8>> {
        serde_json::to_vec(&serde_json::from_slice::<crate::store::GoneVm>(text).ok()?).ok()
    }
}

pub use agent::Agent;
pub use config::{Config, ConfigError, LimitsConfig, NetworkConfig, TlsConfig};
pub use join::{JoinError, JoinOptions, JoinedHost, join};
pub use limits::HostLimits;
pub use migrations::{MigrationControl, MigrationWatch, Migrations};
pub use server::{RunError, router, run};
pub use user::{DEFAULT_USERS, UserRange};
pub use vm::{Vm, VmFiles};
