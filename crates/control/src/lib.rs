//! The manager: what an operator of many hosts works with. It knows which hosts and VMs there are, decides who moves where and when, and
//! asks the agents to do it. It never touches a page of a guest: migrations go on when no manager is there.
//!
//! What decides is pure and stands apart from what asks and stores: moves, placement and drains are decided in [`godwit_planner`].
//!
//! | folder | what it is for |
//! |---|---|
//! | [`cluster`] | what is known and planned of hosts and VMs, and what the planner gets of it |
//! | `storage` | records in [`godwit_store`]: written under the leadership, timed |
//! | [`journal`] | events, the audit log |
//! | [`access`] | who asks, what they may, how often; tokens, issuers, certificates |
//! | `agents` | how hosts' agents are reached and followed, and what they are given of each other |
//! | [`preflight`] | what is in the way of a move, check by check |
//! | `moves`, `drains`, `vms`, `hosts`, `rules`, `baseline` | a resource each: its requests, its work, its record |
//! | `idempotency` | requests that are repeated |
//! | `leadership` | one manager of several leads; what the others do |
//! | `http`, `answers` | the API, its document and the console's files; what its handlers share |
//! | `manager`, `run`, `config`, `metrics`, `clock` | the services, wired; the process, its configuration, its figures, the time |
//! | `rig` | managers and clusters for tests |

pub mod access;
mod agents;
mod answers;
mod baseline;
mod clock;
pub mod cluster;
mod config;
mod drains;
mod hosts;
mod http;
mod idempotency;
pub mod journal;
mod leadership;
mod manager;
mod metrics;
mod moves;
pub mod preflight;
#[cfg(test)]
mod rig;
mod rules;
mod run;
mod storage;
mod vms;

pub use access::authorities::AuthorityError;
pub use clock::now_unix_ms;
pub use cluster::state::State;
pub use config::{
    AuditConfig, AuthorityConfig, Config, ConfigError, DEFAULT_MANAGER_SOCKET, EtcdConfig,
    TlsConfig,
};
pub use http::openapi;
pub use journal::events::{Events, Listener, Next};
pub use run::{RunError, back_up, run};

/// What fuzzing tries of what agents answer to the manager.
pub mod fuzzing {
    use godwit_api::MigrationStatus;

    /// Most bytes of a text that is kept of an agent's answer.
    pub const MOST_TEXT_BYTES: usize = crate::cluster::bounds::MOST_REASON_BYTES + '…'.len_utf8();

    /// Returns what is kept of an agent's answer about a migration: the texts that say why it failed, and its report as JSON.
    #[must_use]
    pub fn kept_of_migration(status: &MigrationStatus) -> (Vec<String>, Option<Vec<u8>>) {
        let (failure, report) = crate::moves::kept_of_answer(status);
        let texts = failure.map(|failure| vec![failure.code, failure.message, failure.remedy]);
        (texts.unwrap_or_default(), report)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_table_has_every_module() {
        let text = include_str!("lib.rs");
        let modules = text
            .lines()
            .filter_map(|line| line.strip_prefix("pub mod ").or(line.strip_prefix("mod ")));
        for module in modules.filter_map(|line| line.strip_suffix(';')) {
            let forms = [format!("`{module}`"), format!("`mod@{module}`")];
            let mut rows = text.lines().filter(|line| line.starts_with("//! |"));
            assert!(
                rows.any(|row| forms.iter().any(|form| row.contains(form))),
                "{module} is in no row"
            );
        }
    }
}
