//! The agent's unix socket. Only root may use it: its mode, its directory's mode and a check of the
//! caller's user each ensure this.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::serve::IncomingStream;
use godwit_api::{ApiError, ErrorCode};
use tokio::net::UnixListener;

use crate::server::answers::Refusal;

/// Binds the socket. It is bound under a temporary name, so that no one connects before its mode is
/// set.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(parent) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    }
    let fresh = path.with_extension("new");
    let _ = fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh)?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))?;
    // Replaces the socket of an agent that was killed.
    fs::rename(&fresh, path)?;
    Ok(listener)
}

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
    let own = rustix::process::geteuid().as_raw();
    if uid.is_some_and(|uid| uid == 0 || uid == own) {
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
