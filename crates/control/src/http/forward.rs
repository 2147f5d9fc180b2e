//! Forwarding of requests from a manager that does not lead to the one that does. The forwarding
//! manager returns the leader's response to the caller.
//!
//! The caller's own token is passed on. The leader checks it and writes the audit entry. Over TLS,
//! a manager shows an operator's certificate. Only with that certificate does the leader trust its
//! statement about the caller: the address that a request has, or that it arrived on the manager's
//! own socket, which belongs to root. A holder of an operator's certificate has full rights at the
//! agents anyway.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum_server::tls::TlsInfo;
use godwit_api::control::{Problem, ProblemCode};
use godwit_api::{Client, Connection};
use godwit_pki::{Revocations, Role, describe_der};
use godwit_store::Candidate;
use http::header::{CONNECTION, HOST, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::time::{sleep, timeout};

use super::MAX_BODY_BYTES;
use super::admit::Source;
use crate::answers::Refusal;
use crate::manager::Manager;
use crate::vms::consoles::http::is_websocket;

/// Name of the manager that passed a request on. A request with this header is not passed on again.
const BY: HeaderName = HeaderName::from_static("x-godwit-passed-on-by");
/// Address from which the request originally comes.
const FROM: HeaderName = HeaderName::from_static("x-godwit-passed-on-from");
/// Value of `FROM` for a request that arrived on a manager's own socket.
const FROM_SOCKET: HeaderValue = HeaderValue::from_static("socket");
/// Value of `Connection` for a connection that changes its protocol: a VM's console.
const UPGRADED: HeaderValue = HeaderValue::from_static("upgrade");
/// Longest time in which a new leader must become ready to answer.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);
/// Longest time a request waits while there is no leader. It exceeds the time the other managers
/// need to notice a leader's death and to replace it (docs/manager.md).
const CHOICE_LIMIT: Duration = Duration::from_secs(8);
/// Interval between queries of the store during that wait.
const CHOICE_POLL: Duration = Duration::from_millis(200);

/// Returns whether a manager that does not lead passes this request on. It answers by itself only
/// about hosts, VMs, rules, the baseline and the cluster as a whole. It also passes on requests
/// that it would refuse for a missing token or role: the leader writes the audit log, and the token
/// may be newer than this manager's state.
pub(crate) fn is_leaders(method: &Method, path: &str, refused: Option<&Problem>) -> bool {
    match refused.map(|problem| problem.code) {
        Some(ProblemCode::Unauthenticated | ProblemCode::Forbidden | ProblemCode::IssuerAway) => {
            return true;
        }
        Some(_) => return false,
        None => {}
    }
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let is_read = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
    let is_known = match parts[..] {
        ["healthz" | "metrics"] | ["api", "openapi.json"] => true,
        [
            "api",
            "v1",
            "cluster" | "hosts" | "vms" | "rules" | "cpu-baseline" | "networks" | "datastores"
            | "limits",
        ]
        | ["api", "v1", "hosts" | "vms" | "rules" | "cpu-baseline" | "datastores", _] => is_read,
        ["api", "v1", ..] => false,
        // The console's files, and unknown paths.
        _ => is_read,
    };
    !is_known
}

/// Returns whether another manager passed the request on.
pub(crate) fn is_passed_on(request: &Request) -> bool {
    request.headers().contains_key(&BY)
}

/// The leading manager and a connection to it.
pub(crate) struct Leader {
    name: String,
    address: String,
    client: Client,
    connection: Connection,
}

/// Finds the leader. `None` means that this manager leads by now. A request that was already passed
/// on is not passed on again. While no leader is reachable, the request waits for a limited time:
/// the store names a dead leader until its lease ends.
pub(crate) async fn leader(
    manager: &Manager,
    is_passed_on: bool,
) -> Result<Option<Leader>, Problem> {
    let until = Instant::now() + CHOICE_LIMIT;
    let mut why = no_leader("no manager leads at the moment");
    loop {
        let leader = manager.leader().await.map_err(|error| {
            let remedy = "check the store (docs/store.md); running VMs are not affected";
            Problem::new(ProblemCode::StoreAway, error.to_string(), remedy)
        })?;
        match leader {
            None => {}
            Some(leader) if leader.name == manager.candidate().name => {
                return match timeout(BEGIN_LIMIT, manager.begins_to_lead()).await {
                    Ok(()) => Ok(None),
                    Err(_) => Err(no_leader(
                        "this manager is about to lead and has not read the store yet",
                    )),
                };
            }
            Some(_) if is_passed_on => {
                return Err(no_leader("the leading manager is changing"));
            }
            Some(leader) => match reach(manager, leader).await? {
                Ok(reached) => return Ok(Some(reached)),
                Err(problem) => why = problem,
            },
        }
        if Instant::now() >= until {
            return Err(why);
        }
        sleep(CHOICE_POLL).await;
    }
}

fn no_leader(detail: &str) -> Problem {
    let remedy = "try again in a few seconds; `godwit control status` names the leader";
    Problem::new(ProblemCode::NoLeader, detail, remedy)
}

/// Connects to the leader, or returns the reason for the failure. It sends no request yet.
async fn reach(
    manager: &Manager,
    Candidate { name, address }: Candidate,
) -> Result<Result<Leader, Problem>, Problem> {
    // Over the network, and over TLS if this manager has it. Never over a socket: that would give
    // every caller root's rights.
    let client = manager.agents.manager_client(&name, &address).map_err(|problem| {
        let detail = format!("manager {name} leads and cannot be reached: {}", problem.detail);
        Problem::new(
            ProblemCode::NoLeader,
            detail,
            "correct `address` and `listen` of its configuration",
        )
    })?;
    Ok(match client.connection().await {
        Ok(connection) => Ok(Leader { name, address, client, connection }),
        Err(_) => {
            let detail = format!("manager {name} leads, and {address} cannot be reached");
            let remedy = "try again in a few seconds; if it is down, another manager takes over";
            Err(Problem::new(ProblemCode::NoLeader, detail, remedy))
        }
    })
}

/// Passes a request on to the manager that leads.
pub(crate) async fn pass_on(
    manager: &Manager,
    leader: Leader,
    source: &Source,
    request: Request,
) -> Response {
    match ask(manager, leader, source, request).await {
        Ok(response) => response,
        Err(problem) => Refusal(problem).into_response(),
    }
}

async fn ask(
    manager: &Manager,
    Leader { name, address, client, connection }: Leader,
    source: &Source,
    request: Request,
) -> Result<Response, Problem> {
    let is_root = source.address().is_none();
    if is_root && !manager.agents.are_secure() {
        let detail =
            format!("manager {name} leads and does not trust this one: neither has a certificate");
        let remedy = format!("send it a token (--manager {address}), or use its own socket");
        return Err(Problem::new(ProblemCode::NoLeader, detail, remedy));
    }
    let (mut parts, body) = request.into_parts();
    let body = to_bytes(body, MAX_BODY_BYTES).await.map_err(|_| {
        let detail = "the request body is longer than the manager reads";
        Problem::new(ProblemCode::TooLong, detail, "see /api/openapi.json")
    })?;
    let from =
        source.address().map_or(Ok(FROM_SOCKET), |from| HeaderValue::from_str(&from.to_string()));
    let by = HeaderValue::from_str(&manager.candidate().name);
    let (Ok(from), Ok(by)) = (from, by) else {
        return Err(Problem::new(
            ProblemCode::ManagerFailed,
            "cannot pass the request on: a name is not valid in a header",
            "",
        ));
    };
    // The request is unchanged except for headers of the incoming connection.
    for own in [CONNECTION, HOST, TRANSFER_ENCODING] {
        parts.headers.remove(own);
    }
    let here = parts.extensions.remove::<OnUpgrade>().filter(|_| is_websocket(&parts.headers));
    if here.is_some() {
        parts.headers.insert(CONNECTION, UPGRADED);
    }
    parts.headers.insert(BY, by);
    parts.headers.insert(FROM, from);
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let answered = client.pass_on(connection, parts.method, &path, parts.headers, body).await;
    let mut response = answered.map_err(|_| {
        let detail =
            format!("manager {name} leads, and the connection to it broke before the response");
        let remedy = "check whether the request was carried out, and try again in a few seconds";
        Problem::new(ProblemCode::NoLeader, detail, remedy)
    })?;
    for own in [CONNECTION, TRANSFER_ENCODING] {
        response.headers_mut().remove(own);
    }
    if let (StatusCode::SWITCHING_PROTOCOLS, Some(here)) = (response.status(), here) {
        response.headers_mut().insert(CONNECTION, UPGRADED);
        let there = hyper::upgrade::on(&mut response);
        tokio::spawn(async move {
            let (Ok(here), Ok(there)) = tokio::join!(here, there) else { return };
            // Either side may close at any time: that is how a console ends.
            let _ =
                tokio::io::copy_bidirectional(&mut TokioIo::new(here), &mut TokioIo::new(there))
                    .await;
        });
    }
    Ok(response.map(Body::new))
}

/// Returns the original source as the forwarding manager states it. `None`: no trusted manager
/// passed the request on.
pub(crate) fn source(request: &Request, revocations: &Revocations) -> Option<Source> {
    let tls = request.extensions().get::<Arc<TlsInfo>>()?;
    let shown = describe_der(tls.peer_certificates.first()?)?;
    // The connection may be older than the revocation list.
    if revocations.has(&shown.serial) {
        return None;
    }
    (shown.role == Role::Operator).then(|| stated_source(request.headers(), &shown.name)).flatten()
}

/// Reads the source that the manager with this name states.
fn stated_source(headers: &HeaderMap, manager: &str) -> Option<Source> {
    headers.get(&BY)?;
    let from = headers.get(&FROM)?;
    if *from == FROM_SOCKET {
        return Some(Source::SocketOf(manager.to_owned()));
    }
    from.to_str().ok()?.parse::<IpAddr>().ok().map(Source::Network)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_and_requests_that_only_the_leader_can_answer_are_passed_on() {
        let refused = |code| Problem::new(code, "no", "");
        for (method, path, passed_on) in [
            (Method::GET, "/api/v1/hosts", false),
            (Method::GET, "/api/v1/hosts/a", false),
            (Method::GET, "/api/v1/vms/web", false),
            (Method::GET, "/api/v1/cluster", false),
            (Method::GET, "/api/v1/limits", false),
            (Method::PATCH, "/api/v1/limits", true),
            (Method::GET, "/api/v1/networks", false),
            (Method::GET, "/api/v1/datastores", false),
            (Method::GET, "/api/v1/datastores/%2Fsrv", false),
            (Method::PATCH, "/api/v1/datastores/%2Fsrv", true),
            (Method::GET, "/api/v1/rules", false),
            (Method::GET, "/api/v1/cpu-baseline", false),
            (Method::GET, "/api/v1/cpu-baseline/vms", false),
            (Method::PUT, "/api/v1/cpu-baseline", true),
            (Method::GET, "/api/v1/rules/db-apart", false),
            (Method::GET, "/api/openapi.json", false),
            (Method::GET, "/healthz", false),
            (Method::GET, "/", false),
            (Method::POST, "/api/v1/hosts", true),
            (Method::POST, "/api/v1/rules", true),
            (Method::DELETE, "/api/v1/rules/db-apart", true),
            (Method::PATCH, "/api/v1/hosts/a", true),
            (Method::DELETE, "/api/v1/hosts/a", true),
            (Method::POST, "/api/v1/vms/web/moves", true),
            (Method::GET, "/api/v1/vms/web/preflight", true),
            (Method::GET, "/api/v1/vms/web/console", true),
            (Method::GET, "/api/v1/vms/web/log", true),
            (Method::GET, "/api/v1/vms/web/screen", true),
            (Method::GET, "/api/v1/vms/web/screenshot", true),
            (Method::GET, "/api/v1/moves", true),
            (Method::GET, "/api/v1/events", true),
            (Method::GET, "/api/v1/audit", true),
            (Method::GET, "/api/v1/something-new", true),
            (Method::POST, "/api/v1/join", true),
        ] {
            assert_eq!(is_leaders(&method, path, None), passed_on, "{method} {path}");
        }
        assert!(is_leaders(
            &Method::GET,
            "/api/v1/hosts",
            Some(&refused(ProblemCode::Unauthenticated))
        ));
        assert!(!is_leaders(
            &Method::POST,
            "/api/v1/hosts",
            Some(&refused(ProblemCode::TooManyRequests))
        ));
    }

    #[test]
    fn forwarding_headers_without_a_certificate_are_ignored() {
        let mut request = Request::new(Body::empty());
        request.headers_mut().insert(BY, HeaderValue::from_static("m2"));
        request.headers_mut().insert(FROM, FROM_SOCKET);
        assert_eq!(source(&request, &Revocations::default()), None);
        request.extensions_mut().insert(Arc::new(TlsInfo::default()));
        assert_eq!(source(&request, &Revocations::default()), None);
        assert_eq!(stated_source(request.headers(), "m2"), Some(Source::SocketOf("m2".into())));
        request.headers_mut().insert(FROM, HeaderValue::from_static("10.0.0.9"));
        assert_eq!(
            stated_source(request.headers(), "m2"),
            Some(Source::Network(IpAddr::from([10, 0, 0, 9])))
        );
    }
}
