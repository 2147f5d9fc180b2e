//! The host agent: runs this host's VMs and both ends of their migrations, behind an HTTP API.
//!
//! - [`Config`]: the operator's configuration. [`run`]: runs the agent until a signal ends it.
//! - [`Agent`]: the VMs, each with its condition; one operation at a time on each VM.
//! - [`Vm`]: a VM that has a process. [`Migrations`]: progress and reports.
//!
//! VMs outlive the agent: QEMU runs in its own session, and the next agent adopts it.

// The unit tests use the support module of the integration tests, which names this crate.
#[cfg(test)]
extern crate self as godwit_host;

mod adoptions;
mod agent;
mod block_devices;
mod ceph;
mod claims;
mod config;
mod crashes;
mod datastores;
mod disk_arrivals;
mod doorman;
mod failure;
mod file_digest;
mod firmware;
mod guest_trip;
mod ha;
mod hold;
mod incoming_migrations;
mod jobs;
mod join;
mod kvm;
mod lanes_seen;
mod libvirt;
mod limits;
mod load;
mod local_socket;
mod memory;
mod metrics;
mod migration;
mod migrations;
mod network;
mod page_ins;
mod paths;
mod peer_record;
mod peers;
mod probe;
mod probes;
mod processors;
mod protection;
mod qemu_users;
mod real_paths;
mod references;
mod relayed_stream;
mod saved_guest;
mod server;
mod snapshots;
mod state_stream;
mod store;
mod thin_pools;
mod user;
mod verdict;
mod vm;
mod watchdog;
mod whole;
mod zeros;

/// Entry points for the fuzz targets. Not a stable interface.
#[doc(hidden)]
pub mod fuzzing {
    /// Parses a VM's record and serializes it again; `None` if the record is invalid.
    #[must_use]
    pub fn record(text: &[u8]) -> Option<Vec<u8>> {
        serde_json::to_vec(&crate::store::parse(text).ok()?).ok()
    }

    /// Parses the record of a deleted VM and serializes it again; `None` if the record is invalid.
    #[must_use]
    pub fn gone(text: &[u8]) -> Option<Vec<u8>> {
        serde_json::to_vec(&serde_json::from_slice::<crate::store::GoneVm>(text).ok()?).ok()
    }

    /// Parses a message to the watchdog and serializes it again; `None` if the message is invalid.
    #[must_use]
    pub fn watchdog(line: &[u8]) -> Option<Vec<u8>> {
        crate::watchdog::message_again(line)
    }
}

pub use agent::Agent;
pub use ceph::CephConfig;
pub use config::{
    Config, ConfigError, KeepTime, LibvirtConfig, LimitsConfig, NetworkConfig, TlsConfig,
};
pub use join::{JoinError, JoinOptions, JoinedHost, join};
pub use limits::HostLimits;
pub use migrations::{MigrationControl, MigrationWatch, Migrations};
pub use server::{RunError, router, run};
pub use user::{DEFAULT_USERS, UserRange};
pub use vm::{Vm, VmFiles};
pub use watchdog::{WatchdogError, run as run_watchdog};
