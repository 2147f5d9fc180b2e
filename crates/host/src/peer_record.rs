//! Another host's record of a VM's ownership, and what follows from it for pages retained here.

use std::time::Duration;

use godwit_api::{ApiError, Client, ClientError, ErrorCode};
use godwit_migration::Failure;
use godwit_migration::drive::page_in::Again;
use godwit_migration::handover::{KeptPagesFate, Known, fate_of_kept_pages};
use godwit_qemu::Uuid;
use godwit_types::{FailureCode, Incarnation, Ownership};

/// Time limit for an answer from disk: over a cut link it never arrives.
const KNOWN_LIMIT: Duration = Duration::from_secs(2);

/// Decides what becomes of the pages retained for a guest offered as `offered`, if the destination
/// gives no session for them; `None`: not known yet. The destination's record decides, by the VM's
/// UUID, because another VM may have its name by now.
pub(crate) async fn without_session(
    peer: &Client,
    vm: &str,
    uuid: Uuid,
    offered: Ownership,
) -> Option<Again> {
    let known = ask_known(peer, vm, uuid, offered.incarnation).await.ok()?;
    match fate_of_kept_pages(known, offered) {
        KeptPagesFate::AskAgain => None,
        KeptPagesFate::NotNeeded => Some(Again::Complete),
        KeptPagesFate::Refused => Some(Again::Refused(Failure::new(
            FailureCode::LaneLost,
            "the destination does not have the guest and never ran it",
        ))),
    }
}

/// Returns the part of a query that identifies a VM and its incarnation. An unrecorded incarnation
/// is omitted, as older releases do.
pub(crate) fn of_life(uuid: Uuid, incarnation: Incarnation) -> String {
    match incarnation.is_unrecorded() {
        true => format!("uuid={uuid}"),
        false => format!("uuid={uuid}&incarnation={incarnation}"),
    }
}

/// Queries another host for its record of a VM, for one incarnation of it.
pub(crate) async fn ask_known(
    peer: &Client,
    vm: &str,
    uuid: Uuid,
    incarnation: Incarnation,
) -> Result<Known, ApiError> {
    let path = format!("/v1/hand-overs/{vm}?{}", of_life(uuid, incarnation));
    let unreachable = |why: String| {
        ApiError::new(ErrorCode::PeerUnreachable, why, "check that its agent runs and is reachable")
    };
    match tokio::time::timeout(KNOWN_LIMIT, peer.get(&path)).await {
        Ok(Ok(known)) => Ok(known),
        Ok(Err(ClientError::Refused(error))) => Err(error),
        Ok(Err(error)) => Err(unreachable(error.to_string())),
        Err(_) => Err(unreachable(format!("no answer within {} s", KNOWN_LIMIT.as_secs()))),
    }
}
