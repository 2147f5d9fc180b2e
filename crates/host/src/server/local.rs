//! The agent's unix socket. Only root may use it: its mode, its directory's mode and a check of the
//! caller's user each ensure this.

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::serve::IncomingStream;
use godwit_api::{ApiError, ErrorCode};
use tokio::net::UnixListener;

use crate::local_socket;
use crate::server::answers::Refusal;

/// User at the other end, as the kernel reports it; `None` if it does not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller(Option<u32>);

impl Connected<IncomingStream<'_, UnixListener>> for Caller {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Caller(stream.io().peer_cred().ok().map(|peer| peer.uid()))
    }
}

/// Passes requests of root and of the agent's own user.
pub(super) async fn guard(
    ConnectInfo(Caller(uid)): ConnectInfo<Caller>,
    request: Request,
    next: Next,
) -> Response {
    if uid.is_some_and(local_socket::admits) {
        return next.run(request).await;
    }
    tracing::warn!(
        ?uid,
        "request on the agent's socket refused: is its directory open to other users?"
    );
    let message = "only root may use the agent's socket";
    let remedy = "run this as root, or use https:// with an operator's certificate \
                      (`godwit pki issue --operator`)";
    Refusal(ApiError::new(ErrorCode::Forbidden, message, remedy)).into_response()
}
