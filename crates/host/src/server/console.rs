//! The guest's serial console over HTTP: the connection is upgraded and carries bytes both ways.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use tokio::net::UnixStream;

use crate::agent::Agent;
use crate::failure::host_failed;
use crate::server::answers::Refusal;
use crate::server::named::Named;
use crate::server::upgraded;

const PROTOCOL: &str = "godwit-console";

/// `GET /v1/vms/{name}/console` with `Upgrade: godwit-console`.
pub(super) async fn open(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    request: Request,
) -> Result<Response, Refusal> {
    upgraded::check(&request, PROTOCOL, "console", "godwit vm console")?;
    let (socket, alone) = agent.console(&name)?;
    let guest = UnixStream::connect(&socket).await.map_err(|error| {
        host_failed(&format!("cannot reach the console of VM \"{name}\""), &error)
    })?;
    Ok(upgraded::carry(agent, request, PROTOCOL, guest, alone))
}
