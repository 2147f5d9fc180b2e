//! TLS for the agent's API: authentication of clients, and the requests that each role may make.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use godwit_api::{ApiError, ErrorCode};
use godwit_pki::{Peer, Role};
use http::Method;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::agent::Agent;
use crate::server::answers::Refusal;
use crate::server::connections::{Permit, Permits};

/// Longest duration of a handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Concurrent handshakes. Clients that connect and stay silent block others only briefly.
const HANDSHAKES: usize = 64;

/// A listener that yields connections whose handshake is complete.
pub(super) struct TlsListener {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    /// Connection permits, shared by all listeners.
    permits: Arc<Permits>,
}

impl TlsListener {
    pub(super) fn new(
        listener: TcpListener,
        agent: Arc<Agent>,
        permits: Arc<Permits>,
    ) -> TlsListener {
        let (done, ready) = mpsc::channel(HANDSHAKES);
        tokio::spawn(accept_all(listener, agent, done));
        TlsListener { ready, permits }
    }

    /// Returns the next connection for which there is a permit; `None` when the agent ends.
    pub(super) async fn accept(&mut self) -> Option<(TlsStream<TcpStream>, Permit, Connection)> {
        loop {
            let (stream, address) = self.ready.recv().await?;
            let peer = Peer::of(stream.get_ref().1.peer_certificates());
            let who = peer
                .as_ref()
                .map_or_else(String::new, |peer| format!("{:?} {}", peer.role, peer.name));
            match self.permits.acquire(&who) {
                Some(permit) => return Some((stream, permit, Connection(peer))),
                None => {
                    tracing::warn!(peer = %address, who, "connection closed: too many connections");
                }
            }
        }
    }
}

async fn accept_all(
    mut listener: TcpListener,
    agent: Arc<Agent>,
    done: mpsc::Sender<(TlsStream<TcpStream>, SocketAddr)>,
) {
    let permits = Arc::new(Semaphore::new(HANDSHAKES));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        // Axum's accept retries when the process has no free descriptor or the peer disconnects.
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
                Ok(Err(error)) => tracing::warn!(%peer, %error, "connection refused"),
                Err(_) => tracing::warn!(%peer, "connection closed: TLS handshake timed out"),
            }
            drop(permit);
        });
    }
}

/// Client at the other end; `None` if its certificate names none.
#[derive(Clone, Debug)]
pub(super) struct Connection(Option<Peer>);

impl Connection {
    /// Waits until the client's certificate is revoked.
    pub(super) async fn until_revoked(&self, agent: &Agent) {
        match &self.0 {
            Some(peer) => agent.until_revoked(&peer.serial).await,
            None => std::future::pending().await,
        }
    }
}

/// Passes a request that its sender may make, and adds [`Peer`] to the request's extensions.
pub(super) async fn guard(
    ConnectInfo(Connection(peer)): ConnectInfo<Connection>,
    mut request: Request,
    next: Next,
) -> Response {
    let allowed =
        peer.as_ref().is_some_and(|peer| may(peer.role, request.method(), request.uri().path()));
    let Some(peer) = peer.filter(|_| allowed) else {
        let message = "this certificate does not permit the request";
        let remedy =
            "use an operator's certificate (`godwit pki issue --operator`), or the agent's socket";
        return Refusal(ApiError::new(ErrorCode::Forbidden, message, remedy)).into_response();
    };
    request.extensions_mut().insert(peer);
    next.run(request).await
}

/// Whether a role may make a request. A host may hand guests over, query what became of them, probe
/// the lanes for that, and forward the manager's requests about a lease. A monitor may only read
/// the metrics. Every other request, including any added later, is for operators only. The handlers
/// themselves check which guest a host may ask about: by the name in its certificate, or by an ID
/// that cannot be guessed.
fn may(role: Role, method: &Method, path: &str) -> bool {
    if role == Role::Operator {
        return true;
    }
    if role == Role::Web {
        return false;
    }
    if role == Role::Monitor {
        return path == "/metrics" && matches!(*method, Method::GET | Method::HEAD);
    }
    let parts: Vec<&str> = path.split('/').collect();
    match parts[..] {
        ["", "v1", "incoming" | "incoming-probes" | "page-ins" | "hand-overs", ..]
        | ["", "v1", "arriving-disks", ..] => true,
        // A host that the manager does not reach itself.
        ["", "v1", "ha", "renewal" | "answer"] => method == Method::POST,
        ["", "v1", "host"] | ["", "v1", "vms", _] => method == Method::GET,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Sources that bind requests to their handlers.
    const ROUTERS: [&str; 12] = [
        include_str!("adoption.rs"),
        include_str!("arriving_disks.rs"),
        include_str!("clones.rs"),
        include_str!("disks.rs"),
        include_str!("imports.rs"),
        include_str!("routes.rs"),
        include_str!("limits.rs"),
        include_str!("follow.rs"),
        include_str!("ha.rs"),
        include_str!("ha_heartbeats.rs"),
        include_str!("incoming.rs"),
        include_str!("probes.rs"),
    ];
    /// Every request: its path, its methods, and the methods that hosts may use.
    const REQUESTS: &[(&str, &str, &str)] = &[
        ("/metrics", "GET", ""),
        ("/v1/adoptions", "GET POST", ""),
        ("/v1/adoptions/checks", "POST", ""),
        ("/v1/adoptions/{id}", "DELETE GET", ""),
        ("/v1/arriving-disks", "POST", "POST"),
        ("/v1/arriving-disks/checks", "POST", "POST"),
        ("/v1/arriving-disks/{id}", "DELETE", "DELETE"),
        ("/v1/foreign-guests", "GET", ""),
        ("/v1/disks", "DELETE GET POST", ""),
        ("/v1/disks/info", "GET", ""),
        ("/v1/disks/kept", "DELETE GET PUT", ""),
        ("/v1/disks/resize", "POST", ""),
        ("/v1/ha", "GET", ""),
        ("/v1/ha/answer", "POST", "POST"),
        ("/v1/ha/forward", "POST", ""),
        ("/v1/ha/own/{vm}/confirm-off", "POST", ""),
        ("/v1/ha/release", "POST", ""),
        ("/v1/ha/renewal", "POST", "POST"),
        ("/v1/ha/start", "POST", ""),
        ("/v1/ha/heartbeats/open", "POST", ""),
        ("/v1/ha/heartbeats/read", "POST", ""),
        ("/v1/hand-overs/{name}", "DELETE GET", "DELETE GET"),
        ("/v1/host", "GET", "GET"),
        ("/v1/imports", "POST", ""),
        ("/v1/jobs", "GET", ""),
        ("/v1/jobs/{id}", "DELETE GET", ""),
        ("/v1/incoming", "POST", "POST"),
        ("/v1/incoming-probes", "POST", "POST"),
        ("/v1/incoming-probes/{id}", "DELETE GET", "DELETE GET"),
        ("/v1/incoming/checks", "POST", "POST"),
        ("/v1/incoming/{id}", "DELETE GET", "DELETE GET"),
        ("/v1/incoming/{id}/resume", "POST", "POST"),
        ("/v1/incoming/{id}/run", "POST", "POST"),
        ("/v1/load", "GET", ""),
        ("/v1/limits", "GET", ""),
        ("/v1/limits/host", "PUT", ""),
        ("/v1/limits/lanes/{address}", "PUT", ""),
        ("/v1/limits/migration", "PUT", ""),
        ("/v1/migrations", "GET", ""),
        ("/v1/migrations/{id}", "DELETE GET", ""),
        ("/v1/migrations/{id}/events", "GET", ""),
        ("/v1/migrations/{id}/limit", "PUT", ""),
        ("/v1/page-ins/{name}", "POST", "POST"),
        ("/v1/peers", "PUT", ""),
        ("/v1/probes", "POST", ""),
        ("/v1/revocations", "PUT", ""),
        ("/v1/vms", "GET POST", ""),
        ("/v1/vms/{name}", "DELETE GET PATCH", "GET"),
        ("/v1/vms/{name}/clone", "POST", ""),
        ("/v1/vms/{name}/console", "GET", ""),
        ("/v1/vms/{name}/export", "POST", ""),
        ("/v1/vms/{name}/freeze", "POST", ""),
        ("/v1/vms/{name}/guest", "GET", ""),
        ("/v1/vms/{name}/images", "GET", ""),
        ("/v1/vms/{name}/link", "PUT", ""),
        ("/v1/vms/{name}/drives", "POST", ""),
        ("/v1/vms/{name}/drives/move", "POST", ""),
        ("/v1/vms/{name}/nics", "POST", ""),
        ("/v1/vms/{name}/log", "GET", ""),
        ("/v1/vms/{name}/migrations", "POST", ""),
        ("/v1/vms/{name}/migrations/dry-run", "POST", ""),
        ("/v1/vms/{name}/rename", "POST", ""),
        ("/v1/vms/{name}/reset", "POST", ""),
        ("/v1/vms/{name}/resolve", "POST", ""),
        ("/v1/vms/{name}/restart", "POST", ""),
        ("/v1/vms/{name}/screen", "GET", ""),
        ("/v1/vms/{name}/screenshot", "GET", ""),
        ("/v1/vms/{name}/snapshots", "DELETE GET POST", ""),
        ("/v1/vms/{name}/snapshots/revert", "POST", ""),
        ("/v1/vms/{name}/start", "POST", ""),
        ("/v1/vms/{name}/stop", "POST", ""),
        ("/v1/vms/{name}/suspend", "POST", ""),
        ("/v1/vms/{name}/template", "PUT", ""),
        ("/v1/vms/{name}/thaw", "POST", ""),
        ("/v1/watch", "GET", ""),
        // A request that does not exist yet is closed to hosts.
        ("/v1/vms/{name}/anything", "", ""),
    ];

    fn methods(text: &str) -> BTreeSet<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    /// Returns the paths and methods that the routers' sources bind.
    fn bound() -> BTreeMap<String, BTreeSet<String>> {
        let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for route in ROUTERS.iter().flat_map(|source| source.split(".route(").skip(1)) {
            let (path, rest) = route.split_once(',').unwrap();
            let handlers = rest.split("\n").next().unwrap();
            let bound = ["get", "post", "put", "patch", "delete"].into_iter().filter(|method| {
                handlers.contains(&format!(" {method}("))
                    || handlers.contains(&format!(".{method}("))
            });
            found
                .entry(path.trim().trim_matches('"').to_owned())
                .or_default()
                .extend(bound.map(str::to_uppercase));
        }
        found
    }

    #[test]
    fn the_table_has_every_request() {
        let known = REQUESTS.iter().copied().filter(|(_, asked_by, _)| !asked_by.is_empty());
        let known: BTreeMap<_, _> =
            known.map(|(path, asked_by, _)| (path.to_owned(), methods(asked_by))).collect();
        assert_eq!(bound(), known);
    }

    #[test]
    fn a_host_may_hand_over_and_query_and_nothing_else() {
        for (path, asked_by, hosts) in REQUESTS.iter().copied() {
            let asked =
                path.replace("{id}", "7").replace("{name}", "web").replace("{address}", "10.0.0.1");
            let hosts = methods(hosts);
            assert!(hosts.is_subset(&methods(asked_by)), "{path}");
            for method in [Method::GET, Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
                let is_bound = methods(asked_by).contains(method.as_str());
                assert!(may(Role::Operator, &method, &asked), "{method} {asked}");
                let monitored = asked == "/metrics" && method == Method::GET;
                assert_eq!(may(Role::Monitor, &method, &asked), monitored, "{method} {asked}");
                if is_bound || asked_by.is_empty() {
                    let wanted = hosts.contains(method.as_str());
                    assert_eq!(may(Role::Host, &method, &asked), wanted, "{method} {asked}");
                }
            }
        }
        for path in [
            "/v1/vms/",
            "/v1/incomings",
            "//v1/vms/web",
            "/v1//vms/web",
            "v1/host",
            "/v1/host/",
            "/",
            "/v1/vms/web/",
        ] {
            let harmless = path == "/v1/vms/";
            assert_eq!(may(Role::Host, &Method::GET, path), harmless, "{path}");
            assert!(!may(Role::Host, &Method::DELETE, path), "{path}");
        }
    }
}
