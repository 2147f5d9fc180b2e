//! A VM's screen over HTTP: a viewer's connection, which carries RFB (the protocol of VNC), and
//! pictures.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};

use crate::agent::Agent;
use crate::server::answers::Refusal;
use crate::server::named::Named;
use crate::server::upgraded;

const PROTOCOL: &str = "godwit-screen";

/// `GET /v1/vms/{name}/screen` with `Upgrade: godwit-screen`.
pub(super) async fn open(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    request: Request,
) -> Result<Response, Refusal> {
    upgraded::check(&request, PROTOCOL, "screen", "godwit vm screen")?;
    let (guest, place) = agent.open_screen(&name).await?;
    Ok(upgraded::carry(agent, request, PROTOCOL, guest, place))
}

/// `GET /v1/vms/{name}/screenshot`.
pub(super) async fn picture(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
) -> Result<Response, Refusal> {
    let mut response = agent.screenshot(&name).await?.into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("image/png"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}
