//! QEMU's stream at a destination to which the source's agent carries it, because the source's QEMU
//! is another program's. It arrives over a lane, and QEMU reads it from a socket without a name.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode, IncomingRequest, QemuEngineOptions};
use godwit_migration::Failure;
use godwit_qemu::QemuInfo;
use godwit_types::{EngineKind, FailureCode};
use godwit_wire::CONTROL_STREAM;

use super::receiving::failed;
use crate::agent::Agent;
use crate::doorman::{Doorman, Guard};
use crate::failure::host_failed;
use crate::incoming_migrations::Entry;
use crate::relayed_stream;
use crate::state_stream::STREAM;
use crate::vm::Vm;

/// Time for the source's agent to connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// Checks that this host's QEMU loads what another program's QEMU sends: it is not older.
pub(crate) fn check(
    host: &str,
    request: &IncomingRequest,
    ours: &QemuInfo,
) -> Result<(), ApiError> {
    if request.engine != EngineKind::Qemu || request.qemu != QemuEngineOptions::default() {
        let message = "only a plain stream of QEMU's own engine comes through the agents";
        return Err(ApiError::new(ErrorCode::InvalidRequest, message, "leave the options out"));
    }
    let theirs = &request.qemu_version;
    if version(theirs).is_some_and(|theirs| theirs <= ours.version) {
        return Ok(());
    }
    let message = format!(
        "cannot accept the VM: it runs on QEMU {theirs} on host {}, and {} on host {host} is QEMU \
         {}: an older one does not load its state",
        request.from,
        ours.path.display(),
        ours.version_text()
    );
    let remedy = "set qemu in the destination's configuration to the QEMU that the guest has";
    Err(ApiError::new(ErrorCode::Preflight, message, remedy))
}

/// Parses a version, `MAJOR.MINOR.MICRO`.
fn version(text: &str) -> Option<(u32, u32, u32)> {
    let mut numbers = text.split('.').map(|number| number.parse().ok());
    let version = (numbers.next()??, numbers.next()??, numbers.next()??);
    numbers.next().is_none().then_some(version)
}

/// Gives QEMU its end of the stream, and waits for the source on a thread of its own. Returns where
/// it waits.
pub(super) async fn open(
    agent: &Agent,
    vm: &Vm,
    entry: &Arc<Entry>,
    listeners: Vec<TcpListener>,
) -> Result<Vec<SocketAddr>, ApiError> {
    let qmp = &vm.process.qmp;
    let addresses: Result<Vec<_>, _> = listeners.iter().map(TcpListener::local_addr).collect();
    let addresses =
        addresses.map_err(|error| host_failed("cannot read the lane's address", &error))?;
    let (ours, theirs) =
        UnixStream::pair().map_err(|error| host_failed("cannot make a socket", &error))?;
    qmp.getfd(STREAM, theirs.as_fd())
        .await
        .map_err(|error| failed(agent, "pass the stream", &error))?;
    drop(theirs);
    qmp.migrate_incoming(&format!("fd:{STREAM}"))
        .await
        .map_err(|error| failed(agent, "open the stream", &error))?;
    let (id, from) = (entry.id, entry.from.clone());
    let doorman = Doorman::open(Guard { id, from, identity: agent.identity(), listeners })?;
    let (entry, name) = (Arc::clone(entry), vm.name.clone());
    std::thread::Builder::new()
        .name(format!("in-{name}"))
        .spawn(move || {
            // QEMU reports a stream that ends early.
            if let Err(failure) = serve(doorman, &entry, &ours) {
                tracing::warn!(vm = name.as_str(), %failure, "the stream of a guest broke off");
            }
        })
        .map_err(|error| host_failed("cannot start a thread", &error))?;
    Ok(addresses)
}

/// Passes the source's stream on to QEMU.
fn serve(doorman: Doorman, entry: &Entry, qemu: &UnixStream) -> Result<(), Failure> {
    let limit = Instant::now() + CONNECT_LIMIT;
    let lane = loop {
        if entry.is_over() {
            return Ok(());
        }
        if Instant::now() > limit {
            let late = format!("the source did not connect within {} s", CONNECT_LIMIT.as_secs());
            return Err(Failure::new(FailureCode::LaneLost, late));
        }
        if let Some(welcomed) = doorman.let_in()
            && welcomed.number == CONTROL_STREAM
        {
            break welcomed.stream().clone();
        }
    };
    drop(doorman);
    relayed_stream::receive(&lane, qemu, &|| entry.is_over())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_three_numbers() {
        assert_eq!(version("7.2.22"), Some((7, 2, 22)));
        for odd in ["", "7", "7.2", "7.2.x", "7.2.1.0", "-7.2.1"] {
            assert_eq!(version(odd), None, "{odd}");
        }
    }
}
