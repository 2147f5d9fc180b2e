//! The manager of a cluster of hosts. It keeps an inventory of hosts and VMs, decides which VM
//! moves where and when, and asks the hosts' agents to carry that out. It never handles guest
//! memory: migrations continue while no manager runs.
//!
//! Decisions are pure functions, separate from I/O: [`godwit_planner`] decides moves, placement and
//! drains.
//!
//! | folder | purpose |
//! |---|---|
//! | [`cluster`] | inventory and plans of hosts and VMs; input of the planner |
//! | `storage` | records in [`godwit_store`]: written by the leader alone, timed |
//! | [`journal`] | events, audit log |
//! | [`access`] | callers, roles, rate limits; tokens, issuers, certificates |
//! | `chronicle` | entries of the journal about what hosts report; migrations of agents alone |
//! | `agents` | connections to agents; peers and revocation lists that agents get |
//! | [`preflight`] | checks before a move |
//! | `alarms` | what needs attention, and notices about it |
//! | `moves`, `drains`, `vms` | a resource each: its requests, its work, its record |
//! | `hosts`, `rules`, `baseline`, `datastores` | likewise |
//! | `load` | load of hosts and VMs: the latest samples and their history |
//! | `idempotency` | repeated requests |
//! | `leadership` | election of one leader among the managers; work of the others |
//! | `http` | API, its document and the console's files |
//! | `ha` | high availability: terms of hosts, fencing, restarts of protected VMs, admission |
//! | `answers`, `problems` | code and problems that handlers share |
//! | `manager` | wiring of the services |
//! | `run`, `config`, `metrics`, `clock` | process, configuration, metrics, time |
//! | `secrets` | files with passwords and keys |
//! | `rig` | managers and clusters for tests |

pub mod access;
mod agents;
mod alarms;
mod answers;
mod baseline;
mod chronicle;
mod clock;
pub mod cluster;
mod config;
mod datastores;
mod drains;
mod ha;
mod hosts;
mod http;
mod idempotency;
pub mod journal;
mod leadership;
mod load;
mod manager;
mod metrics;
mod moves;
pub mod preflight;
mod problems;
#[cfg(test)]
mod rig;
mod rules;
mod run;
mod secrets;
mod storage;
mod vms;

pub use access::authorities::AuthorityError;
pub use alarms::{AlarmSetupError, AlarmsConfig, MailConfig, MailTls, WebhookConfig};
pub use clock::now_unix_ms;
pub use cluster::state::State;
pub use config::{
    AuthorityConfig, Config, ConfigError, DEFAULT_MANAGER_SOCKET, EtcdConfig, LogConfig, TlsConfig,
};
pub use ha::fencing::{FencingConfig, FencingSetupError, HaConfig};
pub use http::openapi;
pub use journal::events::{Events, Listener, Next};
pub use run::{RunError, back_up, run};

/// Entry points for fuzzing the manager's handling of agents' answers, and of its own files.
pub mod fuzzing {
    use godwit_api::MigrationStatus;

    /// Maximum length in bytes of a text that the manager keeps from an agent's answer.
    pub const MOST_TEXT_BYTES: usize = crate::cluster::bounds::MOST_REASON_BYTES + '…'.len_utf8();

    /// Returns what the manager keeps of an agent's answer about a migration: the texts about its
    /// failure, and its report as JSON.
    #[must_use]
    pub fn kept_of_migration(status: &MigrationStatus) -> (Vec<String>, Option<Vec<u8>>) {
        let (failure, report) = crate::moves::kept_of_answer(status);
        let texts = failure.map(|failure| vec![failure.code, failure.message, failure.remedy]);
        (texts.unwrap_or_default(), report)
    }

    /// Reads any bytes as a file with the history of load. Returns the number of its rows.
    #[must_use]
    pub fn rows_of_load(bytes: &[u8]) -> usize {
        crate::load::read_any(bytes)
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
