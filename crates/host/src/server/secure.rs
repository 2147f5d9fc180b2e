//! TLS for the agent's API: who connects, and what they may ask.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::serve::{IncomingStream, Listener};
use godwit_api::{ApiError, ErrorCode};
use godwit_pki::{Peer, Role};
use http::Method;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::agent::Agent;
use crate::server::routes::Refusal;

/// How long a handshake may take.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Handshakes at a time: who connects and says nothing keeps nobody else out for long.
const HANDSHAKES: usize = 64;

/// A listener that gives connections out once their handshake is done.
pub(super) struct TlsListener {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    address: SocketAddr,
}

impl TlsListener {
    pub(super) fn new(listener: TcpListener, agent: Arc<Agent>) -> io::Result<TlsListener> {
        let address = listener.local_addr()?;
        let (done, ready) = mpsc::channel(HANDSHAKES);
        tokio::spawn(accept_all(listener, agent, done));
        Ok(TlsListener { ready, address })
    }
}

async fn accept_all(
    mut listener: TcpListener,
    agent: Arc<Agent>,
    done: mpsc::Sender<(TlsStream<TcpStream>, SocketAddr)>,
) {
    let places = Arc::new(Semaphore::new(HANDSHAKES));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        // Axum's own: it rides out what a full process or an impatient peer brings about.
        let (socket, peer) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = done.closed() => return,
        };
        let Some(identity) = agent.identity() else { return };
        let acceptor = TlsAcceptor::from(Arc::clone(identity.server()));
        let done = done.clone();
        tokio::spawn(async move {
            match tokio::time::timeout(HANDSHAKE_LIMIT, acceptor.accept(socket)).await {
                Ok(Ok(stream)) => drop(done.send((stream, peer)).await),
                Ok(Err(error)) => tracing::warn!(%peer, %error, "a connection was refused"),
                Err(_) => tracing::warn!(%peer, "a connection did not shake hands in time"),
            }
            drop(place);
        });
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(accepted) => accepted,
            // The agent ends.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// Who is at the other end; none: its certificate names nobody.
#[derive(Clone, Debug)]
pub(super) struct Connection(Option<Peer>);

impl Connected<IncomingStream<'_, TlsListener>> for Connection {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Self {
        Connection(Peer::of(stream.io().get_ref().1.peer_certificates()))
    }
}

/// Lets a request through that its sender may make; [`Peer`] is among the request's extensions from here on.
pub(super) async fn guard(
    ConnectInfo(Connection(peer)): ConnectInfo<Connection>,
    mut request: Request,
    next: Next,
) -> Response {
    let allowed = peer.as_ref().is_some_and(|peer| may(peer.role, request.method(), request.uri().path()));
    let Some(peer) = peer.filter(|_| allowed) else {
        let message = "this certificate does not allow that request";
        let mend = "use an operator's certificate (`godwit pki issue --operator`), or the agent's socket";
        return Refusal(ApiError::new(ErrorCode::Forbidden, message, mend)).into_response();
    };
    request.extensions_mut().insert(peer);
    next.run(request).await
}

/// A host hands guests over and asks what became of them, and probes the lanes for that; everything else is an operator's.
fn may(role: Role, method: &Method, path: &str) -> bool {
    let below =
        |place: &str| path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let hands_over =
        ["/v1/incoming", "/v1/incoming-probes", "/v1/page-ins", "/v1/hand-overs"].into_iter().any(below);
    let looks = method == Method::GET && (path == "/v1/host" || below("/v1/vms") || below("/v1/hand-overs"));
    let reads_a_guest = path.ends_with("/console") || path.ends_with("/log");
    role == Role::Operator || hands_over || (looks && !reads_a_guest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_may_hand_over_and_look_and_nothing_else() {
        let host = |method: &Method, path: &str| may(Role::Host, method, path);
        assert!(host(&Method::POST, "/v1/incoming") && host(&Method::DELETE, "/v1/incoming/7"));
        assert!(host(&Method::POST, "/v1/incoming/checks"));
        assert!(host(&Method::POST, "/v1/incoming-probes") && host(&Method::GET, "/v1/incoming-probes/7"));
        assert!(host(&Method::POST, "/v1/page-ins/web"));
        assert!(host(&Method::GET, "/v1/hand-overs/web") && !host(&Method::POST, "/v1/vms/web/resolve"));
        assert!(host(&Method::GET, "/v1/host") && host(&Method::GET, "/v1/vms/web"));
        for path in [
            "/v1/vms/web/console",
            "/v1/vms/web/log",
            "/v1/vms",
            "/v1/migrations",
            "/v1/incomings",
            "/v1/limits",
        ] {
            assert!(!host(&Method::GET, path), "{path}");
        }
        assert!(!host(&Method::POST, "/v1/probes") && !host(&Method::POST, "/v1/vms/web/migrations/dry-run"));
        assert!(!host(&Method::PUT, "/v1/limits/host") && !host(&Method::PUT, "/v1/migrations/m1/limit"));
        assert!(!host(&Method::POST, "/v1/vms/web/start") && !host(&Method::DELETE, "/v1/vms/web"));
        assert!(may(Role::Operator, &Method::DELETE, "/v1/vms/web"));
    }
}
