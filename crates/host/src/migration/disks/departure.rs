//! A VM that leaves with its disks, and its destination.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{Client, ClientError, ErrorCode, MigrationRequest};

use crate::agent::Agent;
use crate::vm::Vm;

/// Longest time for the destination to forget a transfer.
const FORGET_LIMIT: Duration = Duration::from_secs(10);

/// A VM that leaves with its disks.
#[derive(Clone)]
pub(crate) struct Departure {
    pub(crate) agent: Arc<Agent>,
    pub(crate) vm: Arc<Vm>,
    pub(crate) request: MigrationRequest,
    pub(crate) peer: Client,
    pub(crate) begun: Instant,
}

impl Departure {
    /// Has a host remove the images of a transfer.
    pub(super) async fn forget_there(&self, to: &str, transfer: &str) {
        let Ok(peer) = self.agent.peer(to) else { return };
        match tokio::time::timeout(FORGET_LIMIT, peer.forget_disks(transfer)).await {
            Ok(Ok(())) => {}
            // It has none.
            Ok(Err(ClientError::Refused(error))) if error.code == ErrorCode::NotFound => {}
            Ok(Err(error)) => {
                tracing::warn!(to, transfer, %error, "the images of the disks stay for a day");
            }
            Err(_) => tracing::warn!(to, transfer, "the images of the disks stay for a day"),
        }
    }
}
