//! What a manager that does not lead does with requests that only the one can answer that does: it passes them on, and the answer back.
//!
//! The caller's own token goes along, and the manager that leads judges it and notes what was asked. By TLS a manager shows its certificate,
//! an operator's, and only with that is believed what it says of the caller: where a request came from, and that it came by its own socket,
//! which is root's. Who has an operator's certificate may do everything at the agents as well.

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
use super::admit::Came;
use crate::answers::Refusal;
use crate::manager::Manager;
use crate::vms::consoles::http::is_websocket;

/// Which manager passed a request on. What was is not passed on again.
const BY: HeaderName = HeaderName::from_static("x-godwit-passed-on-by");
/// The address that it came from.
const FROM: HeaderName = HeaderName::from_static("x-godwit-passed-on-from");
/// What `FROM` says of a request that came by a manager's own socket.
const FROM_SOCKET: HeaderValue = HeaderValue::from_static("socket");
/// What a connection says that becomes another: a VM's console.
const UPGRADED: HeaderValue = HeaderValue::from_static("upgrade");
/// How long a manager that has just become the leader may take until it answers as one.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);
/// How long a request waits where none leads: longer than the others take to notice that a leader died, and one of them to follow (docs/manager.md).
const CHOICE_LIMIT: Duration = Duration::from_secs(8);
/// How often the store is asked meanwhile.
const CHOICE_LOOK: Duration = Duration::from_millis(200);

/// Whether a manager that does not lead passes such a request on: it knows hosts, VMs, rules, the baseline and the cluster as a whole by itself, and else nothing.
/// What it refuses for want of a token or a role it passes on as well: that is for the audit log, and a token may be newer than it knows.
pub(crate) fn is_leaders(method: &Method, path: &str, refused: Option<&Problem>) -> bool {
    match refused.map(|problem| problem.code) {
        Some(ProblemCode::Unauthenticated | ProblemCode::Forbidden | ProblemCode::IssuerAway) => {
            return true;
        }
        Some(_) => return false,
        None => {}
    }
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let looks = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
    let is_known = match parts[..] {
        ["healthz" | "metrics"] | ["api", "openapi.json"] => true,
        [
            "api",
            "v1",
            "cluster" | "hosts" | "vms" | "rules" | "cpu-baseline" | "networks" | "datastores"
            | "limits",
        ]
        | ["api", "v1", "hosts" | "vms" | "rules" | "cpu-baseline", _] => looks,
        ["api", "v1", ..] => false,
        // The console's files, and what nobody answers.
        _ => looks,
    };
    !is_known
}

/// Whether another manager has passed it on.
pub(crate) fn is_passed_on(request: &Request) -> bool {
    request.headers().contains_key(&BY)
}

/// The manager that leads, and a connection to it.
pub(crate) struct Leader {
    name: String,
    address: String,
    client: Client,
    connection: Connection,
}

/// Who leads; none: this manager, by now. What was passed on already is not passed on again. While nobody does who can be reached a request waits,
/// a while: a leader that died is the store's leader until its lease ends.
pub(crate) async fn leader(
    manager: &Manager,
    is_passed_on: bool,
) -> Result<Option<Leader>, Problem> {
    let until = Instant::now() + CHOICE_LIMIT;
    let mut why = nobody("no manager leads at the moment");
    loop {
        let leader = manager.leader().await.map_err(|error| {
            let remedy = "see to the store: docs/store.md; what runs runs on without it";
            Problem::new(ProblemCode::StoreAway, error.to_string(), remedy)
        })?;
        match leader {
            None => {}
            Some(leader) if leader.name == manager.candidate().name => {
                return match timeout(BEGIN_LIMIT, manager.begins_to_lead()).await {
                    Ok(()) => Ok(None),
                    Err(_) => Err(nobody(
                        "this manager is about to lead, and has not read yet what is kept",
                    )),
                };
            }
            Some(_) if is_passed_on => {
                return Err(nobody("the manager that leads changes just now"));
            }
            Some(leader) => match reach(manager, leader).await? {
                Ok(reached) => return Ok(Some(reached)),
                Err(problem) => why = problem,
            },
        }
        if Instant::now() >= until {
            return Err(why);
        }
        sleep(CHOICE_LOOK).await;
    }
}

fn nobody(detail: &str) -> Problem {
    let remedy = "ask again in some seconds; `godwit control status` names the one that leads";
    Problem::new(ProblemCode::NoLeader, detail, remedy)
}

/// A connection to the manager that leads, or why there is none; nothing was asked by it yet.
async fn reach(
    manager: &Manager,
    Candidate { name, address }: Candidate,
) -> Result<Result<Leader, Problem>, Problem> {
    // By the network and by TLS if this manager has it: never by a socket, which would make everybody root.
    let client = manager.hosts().manager_client(&name, &address).map_err(|problem| {
        let detail = format!("manager {name} leads and can't be asked: {}", problem.detail);
        Problem::new(
            ProblemCode::NoLeader,
            detail,
            "correct `address` and `listen` of its configuration",
        )
    })?;
    Ok(match client.connection().await {
        Ok(connection) => Ok(Leader { name, address, client, connection }),
        Err(_) => {
            let detail = format!("manager {name} leads, and {address} can't be reached");
            let remedy = "ask again in some seconds: if it is gone, another one leads by then";
            Err(Problem::new(ProblemCode::NoLeader, detail, remedy))
        }
    })
}

/// Passes a request on to the manager that leads.
pub(crate) async fn pass_on(
    manager: &Manager,
    leader: Leader,
    came: &Came,
    request: Request,
) -> Response {
    match ask(manager, leader, came, request).await {
        Ok(response) => response,
        Err(problem) => Refusal(problem).into_response(),
    }
}

async fn ask(
    manager: &Manager,
    Leader { name, address, client, connection }: Leader,
    came: &Came,
    request: Request,
) -> Result<Response, Problem> {
    let is_root = came.address().is_none();
    if is_root && !manager.hosts().are_secure() {
        let detail = format!(
            "manager {name} leads, and takes no word of this one's: neither has a certificate"
        );
        let remedy = format!("ask it with a token: --manager {address}, or by its own socket");
        return Err(Problem::new(ProblemCode::NoLeader, detail, remedy));
    }
    let (mut parts, body) = request.into_parts();
    let body = to_bytes(body, MAX_BODY_BYTES).await.map_err(|_| {
        let detail = "the request's body is longer than the manager reads";
        Problem::new(ProblemCode::TooLong, detail, "see /api/openapi.json")
    })?;
    let from =
        came.address().map_or(Ok(FROM_SOCKET), |from| HeaderValue::from_str(&from.to_string()));
    let by = HeaderValue::from_str(&manager.candidate().name);
    let (Ok(from), Ok(by)) = (from, by) else {
        return Err(Problem::new(
            ProblemCode::ManagerFailed,
            "a name that can't stand in a header",
            "",
        ));
    };
    // As it has come, but for what belongs to the connection that it came by.
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
            format!("manager {name} leads, and the connection to it broke before it answered");
        let remedy = "look whether it was done, and ask again in some seconds";
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
            // Either side may go at any time: that is how a console ends.
            let _ =
                tokio::io::copy_bidirectional(&mut TokioIo::new(here), &mut TokioIo::new(there))
                    .await;
        });
    }
    Ok(response.map(Body::new))
}

/// How a request came to the manager that passed it on; none: nobody has, who would be believed.
pub(crate) fn came(request: &Request, revocations: &Revocations) -> Option<Came> {
    let tls = request.extensions().get::<Arc<TlsInfo>>()?;
    let shown = describe_der(tls.peer_certificates.first()?)?;
    // The connection may be older than the list.
    if revocations.has(&shown.serial) {
        return None;
    }
    (shown.role == Role::Operator).then(|| told(request.headers(), &shown.name)).flatten()
}

/// What a manager of that name says of a request.
fn told(headers: &HeaderMap, manager: &str) -> Option<Came> {
    headers.get(&BY)?;
    let from = headers.get(&FROM)?;
    if *from == FROM_SOCKET {
        return Some(Came::BySocketOf(manager.to_owned()));
    }
    from.to_str().ok()?.parse::<IpAddr>().ok().map(Came::From)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_something_and_what_only_the_leader_knows_is_passed_on() {
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
    fn nobody_is_believed_who_shows_no_certificate() {
        let mut request = Request::new(Body::empty());
        request.headers_mut().insert(BY, HeaderValue::from_static("m2"));
        request.headers_mut().insert(FROM, FROM_SOCKET);
        assert_eq!(came(&request, &Revocations::default()), None);
        request.extensions_mut().insert(Arc::new(TlsInfo::default()));
        assert_eq!(came(&request, &Revocations::default()), None);
        assert_eq!(told(request.headers(), "m2"), Some(Came::BySocketOf("m2".into())));
        request.headers_mut().insert(FROM, HeaderValue::from_static("10.0.0.9"));
        assert_eq!(told(request.headers(), "m2"), Some(Came::From(IpAddr::from([10, 0, 0, 9]))));
    }
}
