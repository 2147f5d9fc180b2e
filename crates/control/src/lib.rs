//! The manager: what an operator of many hosts works with. It knows which hosts and VMs there are, decides who moves where and when, and
//! asks the agents to do it. It never touches a page of a guest: migrations go on when no manager is there.
//!
//! What decides is pure and stands apart from what asks and stores.
//!
//! | what decides: no I/O, and the time is told it | |
//! |---|---|
//! | [`queue`] | which moves begin now, what the others wait for, and each job's life through crashes |
//! | [`placement`] | where a VM goes: a ranking of hosts, with reasons |
//! | [`drain`] | who goes where when a host is emptied, how long it takes, and the way back |
//! | [`preflight`] | what is in the way of a move, check by check |
//! | [`inventory`] | which hosts and VMs there are: what is planned, and what agents tell |
//! | [`access`], `rates`, `repeats`, `refusals` | who asks, what they may, how often, which requests they repeat, and what is noted of strangers |
//! | `bounds` | how much the manager takes from a host, and which values are possible |
//! | `facts`, `words` | what queue and placement are told of the inventory; figures and lists in texts |
//!
//! | what carries out | |
//! |---|---|
//! | `moves` | owns all jobs: news in, actions out |
//! | `drains` | owns all drains |
//! | `vms` | makes, starts, stops and deletes VMs |
//! | `rules`, `baseline`, `limits` | what operators set for the whole cluster |
//! | `bindings` | which host holds a VM's name, as the store keeps it |
//! | `consoles` | a VM's console, which follows the VM |
//! | `joining`, `doors`, `oidc`, `forgetting` | how hosts and people come in, and what keeps a host from being forgotten |
//! | `revoking` | certificates that are good no more: the list of them, which every agent gets |
//!
//! | what surrounds it | |
//! |---|---|
//! | `run`, `config`, `etcd_config` | the process, and its configuration |
//! | `campaign`, `standby`, `leading` | one manager of several leads; what the others do; what the one that leads has |
//! | `manager`, `state`, `plans` | what every manager has and knows |
//! | [`mod@store`], `records`, `keeper`, `prune` | where desired state is kept, as what, how it is written, what is forgotten |
//! | `hosts`, `following`, `naming` | the agents: how they are spoken to, what they tell, what they are told of each other |
//! | `connections` | how many there are at a time from where, and how long one may take to ask |
//! | `server` | the API, its document and the console's files |
//! | `events`, `metrics` | what everybody is told of changes, and Prometheus |
//! | `rig` | managers and clusters for tests |

pub mod access;
mod baseline;
mod bindings;
mod bounds;
mod campaign;
mod config;
mod connections;
mod consoles;
mod doors;
pub mod drain;
mod drains;
mod etcd_config;
mod events;
mod facts;
mod following;
mod forgetting;
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
mod refusals;
mod repeats;
mod revoking;
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
pub use run::{RunError, back_up, run};
pub use server::openapi;
pub use state::{State, now_unix_ms};

/// What fuzzing tries of what agents answer to the manager.
pub mod fuzzing {
    use godwit_api::MigrationStatus;

    /// Most bytes of a text that is kept of an agent's answer.
    pub const MOST_TEXT_BYTES: usize = crate::bounds::MOST_REASON_BYTES + '…'.len_utf8();

    /// Returns what is kept of an agent's answer about a migration: the texts that say why it failed, and its report as JSON.
    #[must_use]
    pub fn kept_of_migration(status: &MigrationStatus) -> (Vec<String>, Option<Vec<u8>>) {
        let (failure, report) = crate::moves::kept_of_answer(status);
        let texts = failure.map(|failure| vec![failure.code, failure.message, failure.mend]);
        (texts.unwrap_or_default(), report)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_table_has_every_module() {
        let text = include_str!("lib.rs");
        let modules =
            text.lines().filter_map(|line| line.strip_prefix("pub mod ").or(line.strip_prefix("mod ")));
        for module in modules.filter_map(|line| line.strip_suffix(';')) {
            let forms = [format!("`{module}`"), format!("`mod@{module}`")];
            let mut rows = text.lines().filter(|line| line.starts_with("//! |"));
            assert!(rows.any(|row| forms.iter().any(|form| row.contains(form))), "{module} is in no row");
        }
    }
}
