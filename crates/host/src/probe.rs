//! Probes of the lanes to another host (`/v1/probes`), and by another host (`/v1/incoming-probes`).
//! A host takes part in one probe at a time, and in none during a migration: each would distort the
//! other. A migration that begins ends a running probe.

mod incoming;
mod outgoing;

use godwit_api::{ApiError, ErrorCode};

pub(crate) use incoming::expect;
pub(crate) use outgoing::{ProbeEvent, begin, brief};

use crate::agent::Agent;
use crate::probes::Turn;

/// Takes the turn for a probe; `what` describes it in the error of a second one.
///
/// # Errors
/// [`ErrorCode::Busy`]: a VM is migrating from or to this host, or another probe is running.
fn take_turn(agent: &Agent, what: String) -> Result<Turn, ApiError> {
    if let Some(vm) = agent.migrations().under_way().or_else(|| agent.incoming().under_way()) {
        let host = &agent.config().name;
        let message = format!("cannot probe: VM \"{vm}\" is migrating from or to host {host}");
        let remedy = "retry after its migration, see `godwit migration list`";
        return Err(ApiError::new(ErrorCode::Busy, message, remedy));
    }
    agent.probes().take_turn(what)
}
