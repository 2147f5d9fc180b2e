//! Admission of requests: authenticates the caller, checks the role and the rate, and writes the
//! audit log. This layer wraps every request.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{ConnectInfo, Query, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use godwit_api::control::{AuditEntry, AuditOutcome, Problem, ProblemCode, Role};
use godwit_pki::Revocations;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Method, Uri};

use super::forward;
use crate::access::oidc::is_web_token;
use crate::access::{Caller, Need, needed};
use crate::answers::{Joining, Made, OnlyLooked, Refusal};
use crate::clock::now_unix_ms;
use crate::cluster::text::beginning;
use crate::journal::requester;
use crate::manager::Manager;
use crate::vms::consoles::http::{Opened, bearer, check_origin, is_websocket};

/// Longest path and longest reason that the audit log holds in full.
const MOST_NOTED_BYTES: usize = 1024;

/// Where a request comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A network address.
    Network(IpAddr),
    /// The manager's own socket, which only root can open.
    Socket,
    /// The own socket of the manager with this name, which passed the request on.
    SocketOf(String),
}

impl Source {
    /// Determines the source. A connection without an address counts as a network connection, never
    /// as root's.
    fn of(request: &Request, revocations: &Revocations) -> Source {
        let extensions = request.extensions();
        if let Some(Source::Socket) = extensions.get::<Source>() {
            return Source::Socket;
        }
        if let Some(source) = forward::source(request, revocations) {
            return source;
        }
        let address =
            extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(address)| address.ip());
        Source::Network(address.unwrap_or(IpAddr::from([0, 0, 0, 0])))
    }

    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            Source::Network(address) => Some(*address),
            Source::Socket | Source::SocketOf(_) => None,
        }
    }
}

/// Passes a request on to its handler if the caller may make it. From here on the request's
/// extensions hold the [`Caller`].
pub(crate) async fn admit(
    State(manager): State<Arc<Manager>>,
    mut request: Request,
    next: Next,
) -> Response {
    let source = Source::of(&request, &manager.agents.revocations);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let need = need_of(&method, request.uri());
    // For an audited GET, the parameters determine the action.
    let asked = request.uri().path_and_query().filter(|_| method == Method::GET && need.is_noted);
    let noted = asked.map_or_else(|| path.clone(), ToString::to_string);
    let shown = request.headers().get(AUTHORIZATION).cloned().or_else(|| bearer(request.headers()));
    let (mut caller, mut admitted) = judge(&manager, &source, need, shown.clone()).await;
    // A request that another manager passes on has had this check already; no web page can set the
    // header that marks it. The check happens here because the leader would not see the page's
    // origin.
    if is_websocket(request.headers())
        && !forward::is_passed_on(&request)
        && let Err(problem) = check_origin(request.headers(), request.uri())
    {
        let refused = Refusal(problem).into_response();
        note(&manager, &source, caller, None, (&method, &noted, need), &refused);
        return refused;
    }
    if !manager.leads() && forward::is_leaders(&method, &path, admitted.as_ref().err()) {
        match forward::leader(&manager, forward::is_passed_on(&request)).await {
            // The leader writes the audit entry.
            Ok(Some(leader)) => return forward::pass_on(&manager, leader, &source, request).await,
            Ok(None) => (caller, admitted) = judge(&manager, &source, need, shown).await,
            Err(problem) => return Refusal(problem).into_response(),
        }
    }
    let response = match admitted {
        Ok(admitted) => match admitted {
            Some(caller) => {
                let who = caller.name.clone();
                request.extensions_mut().insert(caller);
                requester::serve(who, next.run(request)).await
            }
            None => next.run(request).await,
        },
        Err(problem) => Refusal(problem).into_response(),
    };
    let joined = response.extensions().get::<Joining>().map(|Joining(host)| format!("host {host}"));
    note(&manager, &source, caller, joined, (&method, &noted, need), &response);
    response
}

/// Returns the rights that a request needs, from its path and the parameters as its handler reads
/// them. A query that no handler can parse needs the rights of a request without one: the handler
/// refuses it.
fn need_of(method: &Method, uri: &Uri) -> Need {
    let query = Query::<Vec<(String, String)>>::try_from_uri(uri).map(|Query(query)| query);
    needed(method, uri.path(), &query.unwrap_or_default())
}

/// Identifies the caller if possible, and decides with which rights to admit the request.
async fn judge(
    manager: &Manager,
    source: &Source,
    need: Need,
    shown: Option<HeaderValue>,
) -> (Option<Caller>, Result<Option<Caller>, Problem>) {
    let caller = identify(manager, source, shown).await;
    let admitted = match (&caller, need.role) {
        (_, None) => Ok(None),
        (Ok(caller), Some(needed)) => caller.check(needed).map(|()| Some(caller.clone())),
        (Err(problem), Some(_)) => Err(problem.clone()),
    };
    let key = caller.as_ref().ok().map(Caller::key);
    let within = manager.rates.check(key.as_deref(), source.address());
    (caller.ok(), within.and(admitted))
}

/// Identifies the caller.
async fn identify(
    manager: &Manager,
    source: &Source,
    shown: Option<HeaderValue>,
) -> Result<Caller, Problem> {
    match source {
        Source::Socket => return Ok(Caller::root()),
        Source::SocketOf(manager) => {
            return Ok(Caller::named(format!("root@{manager}"), Role::Admin));
        }
        Source::Network(_) => {}
    }
    let missing = || {
        let remedy =
            "send a token of `godwit control token create` as `Authorization: Bearer TOKEN`";
        Problem::new(ProblemCode::Unauthenticated, "the request has no token", remedy)
    };
    let shown = shown.ok_or_else(missing)?;
    let shown = shown.to_str().ok().and_then(|shown| shown.split_once(' ')).ok_or_else(missing)?;
    let (scheme, token) = shown;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(missing());
    }
    let token = token.trim();
    match manager.authorities.oidc() {
        Some(oidc) if is_web_token(token) => oidc.identify(token, now_unix_ms()).await,
        _ => manager.tokens.caller(token, now_unix_ms()),
    }
}

/// Writes an audit entry for requests that change or cost something, and for those that were
/// refused. Reads are not logged.
fn note(
    manager: &Manager,
    source: &Source,
    caller: Option<Caller>,
    joined: Option<String>,
    asked: (&Method, &str, Need),
    response: &Response,
) {
    let (method, path, need) = asked;
    let problem = response.extensions().get::<Problem>();
    let kept_out = problem.is_some_and(|problem| {
        use ProblemCode as P;
        matches!(problem.code, P::Unauthenticated | P::Forbidden | P::IssuerAway)
    });
    let is_opened = response.extensions().get::<Opened>().is_some();
    let only_reads = !need.is_noted || response.extensions().get::<OnlyLooked>().is_some();
    // A caller over its rate limit would fill the log.
    let is_too_often = problem.is_some_and(|problem| problem.code == ProblemCode::TooManyRequests);
    if only_reads && !kept_out || is_too_often {
        return;
    }
    let status = response.status();
    manager.audit(AuditEntry {
        unix_ms: now_unix_ms(),
        role: caller.as_ref().map(|caller| caller.role),
        token: caller.as_ref().and_then(|caller| caller.token.clone()),
        who: joined.or(caller.map(|caller| caller.name)).unwrap_or_else(|| "nobody".to_owned()),
        from: source.address(),
        what: beginning(&format!("{method} {path}"), MOST_NOTED_BYTES),
        outcome: if status.is_success() || is_opened {
            AuditOutcome::Done
        } else {
            AuditOutcome::Refused
        },
        status: status.as_u16(),
        reason: problem.map(|problem| beginning(&problem.detail, MOST_NOTED_BYTES)),
        made: response.extensions().get::<Made>().map(|Made(named)| named.clone()),
    });
}
