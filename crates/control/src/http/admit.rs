//! Who asks, whether they may, how often, and that it is noted: around every request.

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
use crate::manager::Manager;
use crate::vms::consoles::http::{Opened, bearer, check_origin, is_websocket};

/// The longest path and the longest reason that the audit log has whole.
const MOST_NOTED_BYTES: usize = 1024;

/// How a request came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Came {
    /// By the network, from there.
    From(IpAddr),
    /// By the manager's own socket, which is root's.
    BySocket,
    /// By the socket of the manager of this name, which passed it on.
    BySocketOf(String),
}

impl Came {
    /// A server that says nothing of its connections is taken for none of root's.
    fn of(request: &Request, revocations: &Revocations) -> Came {
        let extensions = request.extensions();
        if let Some(Came::BySocket) = extensions.get::<Came>() {
            return Came::BySocket;
        }
        if let Some(came) = forward::came(request, revocations) {
            return came;
        }
        let address =
            extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(address)| address.ip());
        Came::From(address.unwrap_or(IpAddr::from([0, 0, 0, 0])))
    }

    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            Came::From(address) => Some(*address),
            Came::BySocket | Came::BySocketOf(_) => None,
        }
    }
}

/// Lets a request through that its sender may make; [`Caller`] is among the request's extensions from here on.
pub(crate) async fn admit(
    State(manager): State<Arc<Manager>>,
    mut request: Request,
    next: Next,
) -> Response {
    let came = Came::of(&request, &manager.hosts.revocations);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let need = need_of(&method, request.uri());
    // What a GET does that is noted, its parameters say.
    let asked = request.uri().path_and_query().filter(|_| method == Method::GET && need.is_noted);
    let noted = asked.map_or_else(|| path.clone(), ToString::to_string);
    let shown = request.headers().get(AUTHORIZATION).cloned().or_else(|| bearer(request.headers()));
    let (mut caller, mut admitted) = judge(&manager, &came, need, shown.clone()).await;
    // What another manager passes on it has looked at; no page can say that it is one. Refused here: whoever leads would not know its origin.
    if is_websocket(request.headers())
        && !forward::is_passed_on(&request)
        && let Err(problem) = check_origin(request.headers(), request.uri())
    {
        let refused = Refusal(problem).into_response();
        note(&manager, &came, caller, None, (&method, &noted, need), &refused);
        return refused;
    }
    if !manager.leads() && forward::is_leaders(&method, &path, admitted.as_ref().err()) {
        match forward::leader(&manager, forward::is_passed_on(&request)).await {
            // Whoever leads notes what was asked.
            Ok(Some(leader)) => return forward::pass_on(&manager, leader, &came, request).await,
            Ok(None) => (caller, admitted) = judge(&manager, &came, need, shown).await,
            Err(problem) => return Refusal(problem).into_response(),
        }
    }
    let response = match admitted {
        Ok(admitted) => {
            if let Some(caller) = admitted {
                request.extensions_mut().insert(caller);
            }
            next.run(request).await
        }
        Err(problem) => Refusal(problem).into_response(),
    };
    let joined = response.extensions().get::<Joining>().map(|Joining(host)| format!("host {host}"));
    note(&manager, &came, caller, joined, (&method, &noted, need), &response);
    response
}

/// What a request needs, by its path and its parameters as their handler reads them. What no handler can read needs the
/// same as a request without: it is refused.
fn need_of(method: &Method, uri: &Uri) -> Need {
    let query = Query::<Vec<(String, String)>>::try_from_uri(uri).map(|Query(query)| query);
    needed(method, uri.path(), &query.unwrap_or_default())
}

/// Who asks, where that is known, and what they are let in as.
async fn judge(
    manager: &Manager,
    came: &Came,
    need: Need,
    shown: Option<HeaderValue>,
) -> (Option<Caller>, Result<Option<Caller>, Problem>) {
    let caller = identify(manager, came, shown).await;
    let admitted = match (&caller, need.role) {
        (_, None) => Ok(None),
        (Ok(caller), Some(needed)) => caller.check(needed).map(|()| Some(caller.clone())),
        (Err(problem), Some(_)) => Err(problem.clone()),
    };
    let key = caller.as_ref().ok().map(Caller::key);
    let within = manager.rates.check(key.as_deref(), came.address());
    (caller.ok(), within.and(admitted))
}

/// Who asks.
async fn identify(
    manager: &Manager,
    came: &Came,
    shown: Option<HeaderValue>,
) -> Result<Caller, Problem> {
    match came {
        Came::BySocket => return Ok(Caller::root()),
        Came::BySocketOf(manager) => {
            return Ok(Caller::named(format!("root@{manager}"), Role::Admin));
        }
        Came::From(_) => {}
    }
    let missing = || {
        let remedy =
            "show a token of `godwit control token create`, as `Authorization: Bearer TOKEN`";
        Problem::new(ProblemCode::Unauthenticated, "no token is shown", remedy)
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

/// What changes or costs something, and what somebody may not, stands in the audit log. Looking does not.
fn note(
    manager: &Manager,
    came: &Came,
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
    let only_looks = !need.is_noted || response.extensions().get::<OnlyLooked>().is_some();
    // Who asks too often would fill the log with that.
    let is_too_often = problem.is_some_and(|problem| problem.code == ProblemCode::TooManyRequests);
    if only_looks && !kept_out || is_too_often {
        return;
    }
    let status = response.status();
    manager.audit(AuditEntry {
        unix_ms: now_unix_ms(),
        role: caller.as_ref().map(|caller| caller.role),
        token: caller.as_ref().and_then(|caller| caller.token.clone()),
        who: joined.or(caller.map(|caller| caller.name)).unwrap_or_else(|| "nobody".to_owned()),
        from: came.address(),
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
