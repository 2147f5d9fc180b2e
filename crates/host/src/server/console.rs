//! The guest's serial console over HTTP: the connection is upgraded and carries bytes both ways.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use godwit_api::{ApiError, ErrorCode};
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderValue, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tokio::net::UnixStream;

use crate::agent::Agent;
use crate::failure::host_failed;
use crate::server::answers::Refusal;
use crate::server::named::Named;

const PROTOCOL: &str = "godwit-console";

/// `GET /v1/vms/{name}/console` with `Upgrade: godwit-console`.
pub(super) async fn open(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    mut request: Request,
) -> Result<Response, Refusal> {
    let asked = request.headers().get(UPGRADE).and_then(|value| value.to_str().ok());
    if !asked.is_some_and(|asked| asked.eq_ignore_ascii_case(PROTOCOL)) {
        return Err(ApiError::new(
            ErrorCode::InvalidRequest,
            "cannot open the console: the request does not upgrade its connection",
            format!(
                "send Connection: upgrade and Upgrade: {PROTOCOL}, as `godwit vm console` does"
            ),
        )
        .into());
    }
    let (socket, alone) = agent.console(&name)?;
    let mut guest = UnixStream::connect(&socket).await.map_err(|error| {
        host_failed(&format!("cannot reach the console of VM \"{name}\""), &error)
    })?;
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(client) = upgrade.await {
            // A console ends when either side closes it, at any time.
            let _ = copy_bidirectional(&mut TokioIo::new(client), &mut guest).await;
        }
        drop(alone);
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
    Ok(response)
}
