//! The guest's serial console over HTTP: the connection is upgraded and carries bytes both ways.

use std::sync::Arc;

use axum::extract::{Query, Request, State};
use axum::response::Response;
use serde::Deserialize;
use tokio::net::UnixStream;

use crate::agent::Agent;
use crate::failure::host_failed;
use crate::server::answers::Refusal;
use crate::server::named::Named;
use crate::server::upgraded;

const PROTOCOL: &str = "godwit-console";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConsoleQuery {
    /// Serial port, from 1.
    #[serde(default = "first_port")]
    port: u32,
}

pub(super) fn first_port() -> u32 {
    1
}

/// `GET /v1/vms/{name}/console` with `Upgrade: godwit-console`.
pub(super) async fn open(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    Query(query): Query<ConsoleQuery>,
    request: Request,
) -> Result<Response, Refusal> {
    upgraded::check(&request, PROTOCOL, "console", "godwit vm console")?;
    let (socket, alone) = agent.console(&name, query.port)?;
    let guest = UnixStream::connect(&socket).await.map_err(|error| {
        host_failed(&format!("cannot reach the console of VM \"{name}\""), &error)
    })?;
    Ok(upgraded::carry(agent, request, PROTOCOL, guest, alone))
}
