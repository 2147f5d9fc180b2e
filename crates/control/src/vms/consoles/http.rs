//! A VM's console and its log, to who works with it. A browser can set no headers on a WebSocket: its token comes among the protocols that it
//! offers.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::Extension;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{FromRef, State, WebSocketUpgrade};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use godwit_api::LogSource;
use godwit_api::control::{Problem, ProblemCode};
use http::header::{
    CONTENT_TYPE, HOST, ORIGIN, SEC_WEBSOCKET_PROTOCOL, UPGRADE, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::Caller;
use crate::answers::{Path, Query, Refusal};
use crate::vms::Vms;
use crate::vms::consoles::{carry, runs_at};

/// What is spoken: binary messages both ways.
const PROTOCOL: &str = "godwit.console.v1";
/// A protocol that is none: the token, in base64url without padding, behind it.
const BEARER: &str = "godwit.bearer.";
/// The longest message of a reader that is taken.
const MOST_MESSAGE_BYTES: usize = 64 << 10;
/// Bytes of a log, unless a request says otherwise, and at most.
const DEFAULT_TAIL_BYTES: u64 = 64 << 10;
const MOST_TAIL_BYTES: u64 = 1 << 20;

/// Among the extensions of an answer that lets somebody type: not only a look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    Vms: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(open)).routes(routes!(log))
}

/// Whether a request wants to become a WebSocket.
pub(crate) fn is_websocket(headers: &HeaderMap) -> bool {
    let asked = headers.get(UPGRADE).and_then(|value| value.to_str().ok());
    asked.is_some_and(|asked| asked.eq_ignore_ascii_case("websocket"))
}

/// The token that a browser shows, as other programs show it.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<HeaderValue> {
    let offered =
        headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    let shown = offered
        .flat_map(|value| value.split(','))
        .find_map(|one| one.trim().strip_prefix(BEARER))?;
    let token = String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(shown).ok()?).ok()?;
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
    value.set_sensitive(true);
    is_websocket(headers).then_some(value)
}

/// Refuses a WebSocket that a page of somebody else's opens: browsers ask nobody before. What is no browser says nothing of an origin.
pub(crate) fn check_origin(headers: &HeaderMap, uri: &Uri) -> Result<(), Problem> {
    let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
    let asked = headers.get(HOST).and_then(|host| host.to_str().ok());
    let asked = asked.or_else(|| uri.authority().map(http::uri::Authority::as_str));
    let from =
        origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, from)| from);
    if from.is_some() && from == asked {
        return Ok(());
    }
    let detail = format!("a page of {origin:?} opens a connection to this manager");
    Err(Problem::new(ProblemCode::Forbidden, detail, "open the console that this manager serves"))
}

/// The VM's text console as a WebSocket: binary messages both ways, as the guest's serial line. It follows a VM that moves. A browser offers the
/// protocols `godwit.console.v1` and `godwit.bearer.` with its token behind it, in base64url without padding; whoever else shows it as
/// everywhere. It ends when the caller's token is revoked
/// or has expired. One reader at a time: where it can't be opened or go on, the close message has the code 4000 and says why.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/console", operation_id = "open_vm_console", tag = "vms", params(("vm" = String, Path, description = "Its name")), responses(
    (status = 101, description = "From here on it is a WebSocket"),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn open(
    State(vms): State<Vms>,
    Extension(caller): Extension<Caller>,
    Path(vm): Path<String>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    runs_at(vms.state(), &vm)?;
    let upgrade = upgrade.map_err(|rejection| {
        let detail = format!("a console is a WebSocket: {}", rejection.body_text());
        Problem::new(
            ProblemCode::InvalidRequest,
            detail,
            "open it as one, in the console or by a program",
        )
    })?;
    let upgrade = upgrade.protocols([PROTOCOL]).max_message_size(MOST_MESSAGE_BYTES);
    let mut response = upgrade.on_upgrade(move |reader| carry(vms, caller, vm, reader));
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        response.extensions_mut().insert(Opened);
    }
    Ok(response)
}

/// Which log of a VM.
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
enum Log {
    /// What the guest wrote to its console.
    #[default]
    Console,
    /// What its hypervisor wrote.
    Qemu,
}

/// Which log, and how much of it.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ReadLog {
    /// Whose words.
    #[serde(default)]
    #[param(inline)]
    source: Log,
    /// Bytes from its end, at most; from the beginning of a line on.
    #[param(minimum = 1, maximum = 1_048_576, default = 65_536)]
    tail: Option<u64>,
}

/// The end of a VM's log at the host that runs it: where a VM has moved, what was written before is left at the other host.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/log", operation_id = "show_vm_log", tag = "vms", params(("vm" = String, Path, description = "Its name"), ReadLog), responses(
    (status = 200, description = "The log; what is no UTF-8 is replaced", body = String, content_type = "text/plain", example = "login: "),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn log(
    State(vms): State<Vms>,
    Path(vm): Path<String>,
    Query(query): Query<ReadLog>,
) -> Result<Response, Refusal> {
    let tail = query.tail.unwrap_or(DEFAULT_TAIL_BYTES);
    if !(1..=MOST_TAIL_BYTES).contains(&tail) {
        let detail = format!("tail={tail} is not possible: 1 to {MOST_TAIL_BYTES}");
        return Err(
            Problem::new(ProblemCode::InvalidRequest, detail, "give the number of bytes").into()
        );
    }
    let source = match query.source {
        Log::Console => LogSource::Console,
        Log::Qemu => LogSource::Qemu,
    };
    let text = vms.vm_log(&vm, source, tail).await?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let mut response = text.into_response();
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Ok(response)
}
