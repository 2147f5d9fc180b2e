//! Idempotency keys for requests that create something. A client that loses the connection before
//! the response repeats the request with the same key.

use std::sync::Arc;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use godwit_api::control::{Problem, ProblemCode};
use godwit_store::{Revision, Transaction};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use utoipa::openapi::path::{ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{OpenApi, Required};

use super::MAX_BODY_BYTES;
use crate::access::Caller;
use crate::answers::Refusal;
use crate::clock::now_unix_ms;
use crate::idempotency::kept::write;
use crate::idempotency::keys::{Keyed, StoredRequest, StoredResponse, under_way};
use crate::idempotency::record::REPEATS;
use crate::manager::Leading;
use crate::manager::Manager;
use crate::storage::keeper::Keeper;
use crate::storage::planning::whole;
use crate::storage::turns::Turn;

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Header of a stored response that is sent again.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// Longest response that is stored.
const MOST_ANSWER_BYTES: usize = 64 << 10;

/// Carries out a request with a key at most once.
pub(crate) async fn once(
    State(manager): State<Arc<Manager>>,
    request: Request,
    next: Next,
) -> Response {
    let caller = request.extensions().get::<Caller>().map(Caller::key);
    let has_key = *request.method() == Method::POST && request.headers().contains_key(&KEY);
    // A manager that does not lead carries out no request.
    let (Some(caller), true, Ok(leading)) = (caller, has_key, manager.leading()) else {
        return next.run(request).await;
    };
    let outcome = keyed(&manager, leading, &caller, request, next).await;
    outcome.unwrap_or_else(|problem| Refusal(problem).into_response())
}

async fn keyed(
    manager: &Manager,
    leading: Arc<Leading>,
    caller: &str,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, MAX_BODY_BYTES).await.map_err(|_| {
        let detail = "the request body is longer than the manager reads, or was cut off";
        Problem::new(ProblemCode::TooLong, detail, "see /api/openapi.json")
    })?;
    let keyed = keyed_request(caller, &parts, &body)?;
    let turn = manager.turns.take(&keyed.id).ok_or_else(under_way)?;
    let keeper = Arc::clone(&leading.keeper);
    let kept = keeper.find(REPEATS, &keyed.id).await?;
    let now = now_unix_ms();
    let was = kept.as_ref().map(|kept| kept.revision);
    let stored = kept.map(|kept| StoredRequest::from(kept.record));
    if let Some(answer) = keyed.judge(stored.as_ref(), now)? {
        return Ok(again(answer));
    }
    let begun = StoredRequest { unix_ms: now, digest: keyed.digest, answer: None };
    let revision = leading.repeats.begin(&keeper, &keyed, was, &begun).await?;
    let shows_secret = matches!(parts.uri.path(), "/api/v1/tokens" | "/api/v1/join-tokens");
    let request = Request::from_parts(parts, Body::from(body));
    // The request continues if the caller disconnects: the caller gets the result when it repeats
    // the request.
    whole(async move {
        let response = next.run(request).await;
        let work = Work { keeper, id: keyed.id, begun, revision, shows_secret, _turn: turn };
        Ok(work.note(response).await)
    })
    .await
}

fn keyed_request(caller: &str, parts: &Parts, body: &Bytes) -> Result<Keyed, Problem> {
    let key = parts.headers.get(&KEY).map(HeaderValue::as_bytes).unwrap_or_default();
    let target = format!("{} {}", parts.method, parts.uri);
    Keyed::new(caller, key, &target, body)
}

/// Builds the response that was sent before.
fn again(answer: StoredResponse) -> Response {
    let body = answer.body.unwrap_or_default();
    let mut response = match serde_json::from_str::<Problem>(&body) {
        // Lets the audit log see the reason.
        Ok(problem) if answer.status >= 400 => Refusal(problem).into_response(),
        _ => {
            let status =
                StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let mut response = (status, body).into_response();
            if let Ok(kind) = HeaderValue::from_str(&answer.media_type) {
                response.headers_mut().insert(CONTENT_TYPE, kind);
            }
            response
        }
    };
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    response
}

/// A request that is being carried out.
struct Work {
    keeper: Arc<Keeper>,
    id: String,
    begun: StoredRequest,
    revision: Revision,
    shows_secret: bool,
    _turn: Turn,
}

impl Work {
    /// Stores the response. A response that reports a failure of the manager or a host is not
    /// stored, so that a repetition tries again.
    async fn note(self, response: Response) -> Response {
        let status = response.status();
        if status.is_server_error() {
            let remove = REPEATS.remove(Transaction::new(), &self.id, self.revision);
            self.written(self.keeper.write_unknown(remove).await.map(drop));
            return response;
        }
        let (parts, body) = response.into_parts();
        let Ok(body) = to_bytes(body, usize::MAX).await else {
            let detail = "cannot store the response: it was cut off";
            return Refusal(Problem::new(ProblemCode::ManagerFailed, detail, "")).into_response();
        };
        let is_secret = self.shows_secret && status.is_success();
        let text = (!is_secret && body.len() <= MOST_ANSWER_BYTES)
            .then(|| String::from_utf8(body.to_vec()).ok())
            .flatten();
        let kind =
            parts.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let answer =
            StoredResponse { status: status.as_u16(), media_type: kind.to_owned(), body: text };
        let stored = StoredRequest { answer: Some(answer), ..self.begun.clone() };
        let written =
            write(&self.keeper, Transaction::new(), &self.id, Some(self.revision), &stored).await;
        self.written(written.map(drop));
        Response::from_parts(parts, Body::from(body))
    }

    /// Logs a failed write. The request was carried out: without the stored response, a repetition
    /// is refused, and nothing happens twice.
    fn written(&self, outcome: Result<(), Problem>) {
        if let Err(problem) = outcome {
            tracing::warn!(%problem, "cannot store the response to a keyed request");
        }
    }
}

/// Describes the header at each operation that reads it.
pub(crate) fn describe(document: &mut OpenApi) {
    let key = ObjectBuilder::new()
        .schema_type(Type::String)
        .min_length(Some(1))
        .max_length(Some(255))
        .pattern(Some("^[!-~]+$"))
        .build();
    let parameter = ParameterBuilder::new()
        .name("Idempotency-Key")
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some(
            "A new key for each request, such as a UUID. A repetition with the same \
            key within 24 h is not carried out again: it gets the first response, with 
            `Idempotency-Replayed: true`.",
        ))
        .schema(Some(key))
        .build();
    for (path, item) in &mut document.paths.paths {
        // A joining host has its token, which works once.
        if let (Some(post), true) = (&mut item.post, path != "/api/v1/join") {
            post.parameters.get_or_insert_default().push(parameter.clone().into());
        }
    }
}
