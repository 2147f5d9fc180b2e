//! Destination of a probe: accepts its streams on the migration addresses until the probe ends.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode, IncomingProbeAccepted};
use godwit_migration::probe::ProbeSession;
use tokio::sync::watch;

use crate::agent::Agent;
use crate::doorman::{Doorman, Guard, fresh_id, listen};
use crate::failure::host_failed;
use crate::probes::Expected;

/// Longest duration of a probe.
pub(super) const LONGEST: Duration = Duration::from_secs(600);

/// Accepts the streams of a probe by the host `from`, on a thread of its own.
pub(crate) fn expect(
    agent: &Arc<Agent>,
    from: String,
    limit: Duration,
) -> Result<IncomingProbeAccepted, ApiError> {
    let host = &agent.config().name;
    if agent.config().migration_addresses.is_empty() {
        let message = format!("cannot probe host {host}: it has no address for migrations");
        return Err(ApiError::new(
            ErrorCode::Preflight,
            message,
            "set migration_addresses in its configuration",
        ));
    }
    let turn = super::take_turn(agent, format!("host {from} probes host {host}"))?;
    let (id, listeners) = (fresh_id()?, listen(&agent.config().migration_addresses)?);
    let addresses: Result<Vec<_>, _> = listeners.iter().map(TcpListener::local_addr).collect();
    let addresses =
        addresses.map_err(|error| host_failed("cannot read the lane's address", &error))?;
    let guard = Guard { id, from: from.clone(), identity: agent.identity(), listeners };
    let doorman = Doorman::open(guard)?;
    let session = Arc::new(ProbeSession::new(limit.min(LONGEST)));
    let (serves, over) = watch::channel(());
    let expected = Expected { id: id.to_string(), session: Arc::clone(&session), over };
    *agent.probes().incoming.lock() = Some(expected);
    let serving = Arc::clone(agent);
    let spawned = std::thread::Builder::new().name("probe-in".to_owned()).spawn(move || {
        session.serve(&|| doorman.let_in());
        tracing::info!(from, "incoming probe ended");
        *serving.probes().incoming.lock() = None;
        drop(turn);
        drop(serves);
    });
    if let Err(error) = spawned {
        *agent.probes().incoming.lock() = None;
        return Err(host_failed("cannot start a thread", &error));
    }
    Ok(IncomingProbeAccepted { id: id.to_string(), addresses })
}
