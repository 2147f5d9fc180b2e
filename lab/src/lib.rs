//! The lab: hosts as network namespaces on one machine, to try, test and measure Godwit.
//!
//! Nothing in a lab is a mock: agents, guests and CLI are the real ones, only the hosts share a
//! kernel. [`up()`] makes
//! - a namespace per host (`godwit-a`, `godwit-b`, …), each with the bridge `br-lan` for guests and
//!   a NIC on each migration network: `mig0`, `mig1`, …;
//! - the guest LAN 10.88.0.0/24 and fd88::/64: all `br-lan` joined through a bridge in
//!   `godwit-client`, where the client 10.88.0.1, fd88::1 probes guests at 1 kHz; not shaped;
//! - one or several migration networks, the lanes: 10.77.0.0/24 and fd77::/64, 10.77.1.0/24 and
//!   fd77:0:0:1::/64, … (host a is .11 and ::11). Each is shaped in rate, delay and loss (see
//!   [`links`]), by the kernel if it can and by the project's own emulator otherwise;
//! - an agent per host on port 7700 of the first migration network, and the hosts file with which
//!   the CLI finds them.
//!
//! [`down()`] leaves nothing of it behind, also after a crash.
//!
//! `godwit-lab` is its command, a program of its own: the product does not depend on the lab.

mod agents;
pub mod ceph;
pub mod daemon;
mod door;
mod down;
pub mod emulator;
pub mod fake_http;
pub mod faults;
mod guest;
pub mod ha;
pub mod image;
pub mod installed;
pub mod iperf;
mod kvm_probe;
pub mod links;
mod manager;
mod mounts;
pub mod namespace;
mod options;
pub mod power;
mod process;
mod programs;
pub mod random;
mod state;
mod status;
mod tools;
mod topology;
pub mod trial;
pub mod units;
mod up;

pub use crate::daemon::DaemonKind;
pub use crate::down::{LabName, down};
pub use crate::guest::ask_guest;
pub use crate::links::LinkEngine;
pub use crate::namespace::in_namespace;
pub use crate::options::{Hooks, LabOptions, SecondManager};
pub use crate::process::ProcessId;
pub use crate::programs::Programs;
pub use crate::status::{ClientStatus, HostStatus, LabStatus, status};
pub use crate::topology::{
    AGENT_PORT, CLIENT_IPV4, CLIENT_IPV6, DEFAULT_PREFIX, DEFAULT_STATE_DIR, LAN_BRIDGE,
    LAN_NETWORK, LabPaths, MAX_HOSTS, MAX_LANES,
};
pub use crate::units::{BitRate, Family, Loss, Rtt, UnitError};
pub use crate::up::up;
