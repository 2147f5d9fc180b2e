//! Page-in at the destination: sessions that a source's agent asks for after one was cut or one of
//! the agents has restarted (`POST /v1/page-ins/{name}`).

use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode, PageInAnswer, PageInRequest, VmState};
use godwit_qemu::VmName;
use godwit_types::Ownership;

use crate::agent::Agent;
use crate::doorman::{Doorman, Guard, fresh_id, listen};
use crate::failure::host_failed;

/// Opens a session for a source that asks for one.
pub(crate) async fn session(
    agent: &Arc<Agent>,
    name: &VmName,
    request: PageInRequest,
) -> Result<PageInAnswer, ApiError> {
    let info = agent.vm_info(name)?;
    let (here, asked) =
        (Ownership { incarnation: info.incarnation, epoch: info.epoch }, request.ownership());
    if here != asked {
        let message = format!("VM \"{name}\" has {here} on this host, not {asked}");
        return Err(ApiError::new(
            ErrorCode::NotFound,
            message,
            "see `godwit vm list` for the host that runs it",
        ));
    }
    let Some(paging_in) = agent.page_ins().of(name) else {
        // The guest has not arrived, may not have, or lacks pages that nothing fetches: the
        // source's copy is the only one.
        let arrived = info.state != VmState::MigratingIn && !info.in_doubt;
        if !arrived || agent.files(name)?.missing().exists() {
            let message = format!("cannot take pages for VM \"{name}\" now: it is {}", info.state);
            return Err(ApiError::new(ErrorCode::Busy, message, "retry later"));
        }
        // The guest has all of its memory, or has ended meanwhile and needs none.
        return Ok(PageInAnswer { complete: true, id: None, addresses: Vec::new() });
    };
    if agent.files(name)?.host_of_missing().as_ref() != Some(&request.from) {
        let message = format!(
            "cannot take pages for VM \"{name}\" from host {}: another host has them",
            request.from
        );
        return Err(ApiError::new(
            ErrorCode::Forbidden,
            message,
            "only the host that the VM came from may ask",
        ));
    }
    let listeners = listen(&agent.config().migration_addresses)?;
    let addresses: Result<Vec<_>, _> =
        listeners.iter().map(std::net::TcpListener::local_addr).collect();
    let addresses =
        addresses.map_err(|error| host_failed("cannot read the lane's address", &error))?;
    let id = fresh_id()?;
    let doorman =
        Doorman::open(Guard { id, from: request.from, identity: agent.identity(), listeners })?;
    let next = Arc::clone(&paging_in);
    let session = tokio::task::spawn_blocking(move || next.new_session());
    let session = session.await.map_err(|error| crate::failure::task_failed(&error))?;
    std::thread::Builder::new()
        .name(format!("page-in-{name}"))
        .spawn(move || {
            while paging_in.is_session(session) {
                if let Some(stream) = doorman.let_in() {
                    paging_in.admit(session, stream);
                }
            }
        })
        .map_err(|error| host_failed("cannot start a thread", &error))?;
    Ok(PageInAnswer { complete: false, id: Some(id.to_string()), addresses })
}
