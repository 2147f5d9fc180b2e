//! The manager: what an operator of many hosts works with. It knows which hosts and VMs there are, decides who moves where and when, and
//! asks the agents to do it. It never touches a page of a guest: migrations go on when no manager is there.
//!
//! What decides is pure and stands apart from what asks and stores.

pub mod access;
mod baseline;
mod campaign;
mod config;
mod consoles;
mod doors;
pub mod drain;
mod drains;
mod etcd_config;
mod events;
mod facts;
mod following;
mod hosts;
pub mod inventory;
mod joining;
mod keeper;
mod leading;
mod limits;
mod manager;
mod metrics;
mod moves;
mod naming;
mod oidc;
pub mod placement;
mod plans;
pub mod preflight;
mod prune;
pub mod queue;
mod rates;
mod records;
mod repeats;
#[cfg(test)]
mod rig;
mod rules;
mod run;
mod server;
mod standby;
mod state;
pub mod store;
mod vms;
mod words;

pub use config::{AuditConfig, AuthorityConfig, Config, ConfigError, DEFAULT_MANAGER_SOCKET, TlsConfig};
pub use doors::DoorError;
pub use etcd_config::EtcdConfig;
pub use events::{Events, Listener, Next};
pub use run::{RunError, run};
pub use server::openapi;
pub use state::{State, now_unix_ms};
