//! Connections that are upgraded and then carry bytes both ways: a VM's console, a VM's screen.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::response::Response;
use godwit_api::{ApiError, ErrorCode};
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderValue, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tokio::net::UnixStream;

use crate::agent::Agent;
use crate::server::secure::Connection;

/// Checks that a request upgrades its connection to this protocol.
///
/// # Errors
/// It does not. `what` is opened, and `command` does so.
pub(super) fn check(
    request: &Request,
    protocol: &str,
    what: &str,
    command: &str,
) -> Result<(), ApiError> {
    let asked = request.headers().get(UPGRADE).and_then(|value| value.to_str().ok());
    if asked.is_some_and(|asked| asked.eq_ignore_ascii_case(protocol)) {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorCode::InvalidRequest,
        format!("cannot open the {what}: the request does not upgrade its connection"),
        format!("send Connection: upgrade and Upgrade: {protocol}, as `{command}` does"),
    ))
}

/// Answers with the upgrade, and from then on carries bytes between the client and the guest until
/// either closes its end or the client's certificate is revoked. `held` is dropped at the end.
pub(super) fn carry<H: Send + 'static>(
    agent: Arc<Agent>,
    mut request: Request,
    protocol: &'static str,
    mut guest: UnixStream,
    held: H,
) -> Response {
    let upgrade = hyper::upgrade::on(&mut request);
    let connection = request.extensions_mut().remove::<ConnectInfo<Connection>>();
    tokio::spawn(async move {
        let revoked = async {
            match connection {
                Some(ConnectInfo(connection)) => connection.until_revoked(&agent).await,
                None => std::future::pending().await,
            }
        };
        let carried = async {
            if let Ok(client) = upgrade.await {
                // Either side may close its end at any time.
                let _ = copy_bidirectional(&mut TokioIo::new(client), &mut guest).await;
            }
        };
        tokio::select! {
            () = carried => {}
            () = revoked => tracing::warn!("connection closed: its certificate is revoked"),
        }
        drop(held);
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static(protocol));
    response
}
