//! Answers, and what the manager reads: every error is a problem document, also those of the framework.

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use godwit_api::ClientError;
use godwit_api::control::{DEFAULT_PAGE_ITEMS, MAX_PAGE_ITEMS, Problem, ProblemCode};
use http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::request::Parts;
use http::{HeaderValue, StatusCode};
use hyper::body::Body as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cluster::inventory::Cursor;

/// The media type of problem documents (RFC 9457, section 3).
const PROBLEM_TYPE: HeaderValue = HeaderValue::from_static("application/problem+json");

/// A [`Problem`] as an HTTP response.
#[derive(Clone, Debug)]
pub(crate) struct Refusal(pub(crate) Problem);

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Refusal {
        Refusal(problem)
    }
}

impl From<ClientError> for Refusal {
    fn from(error: ClientError) -> Refusal {
        Refusal(match error {
            ClientError::Refused(error) => Problem::of_agent(error),
            away => {
                Problem::new(ProblemCode::HostAway, away.detail(), "see `godwit control host list`")
            }
        })
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = self.0.code.status();
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        let mut response = (status, body).into_response();
        response.headers_mut().insert(CONTENT_TYPE, PROBLEM_TYPE);
        if status == StatusCode::UNAUTHORIZED {
            // RFC 6750, section 3.
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if status == StatusCode::TOO_MANY_REQUESTS {
            // RFC 6585, section 4: the buckets fill by the second.
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // For the audit log, which stands around everything.
        response.extensions_mut().insert(self.0);
        response
    }
}

/// What a request has made, for the audit log: among the extensions of the answer.
#[derive(Clone, Debug)]
pub(crate) struct Made(pub(crate) String);

/// The host that an answer lets join: it shows no token of a caller's.
#[derive(Clone, Debug)]
pub(crate) struct Joining(pub(crate) String);

/// Among the extensions of an answer to a request that could have changed something and has only been looked at what it would.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnlyLooked;

/// The answer to a request that makes something.
pub(crate) type Making<T> = (StatusCode, Extension<Made>, Json<T>);

/// It is made, or with [`StatusCode::ACCEPTED`] begun. `named` is what the audit log calls it.
pub(crate) fn made<T>(status: StatusCode, named: String, answer: T) -> Making<T> {
    (status, Extension(Made(named)), Json(answer))
}

/// What a request asks that nobody answers.
pub(crate) async fn no_such_path() -> Refusal {
    Refusal(Problem::new(
        ProblemCode::NotFound,
        "the manager knows no such request",
        "see /api/openapi.json",
    ))
}

/// A path that is there, by a method that it does not take.
pub(crate) async fn no_such_method() -> Refusal {
    let detail = "that path does not take that method";
    Refusal(Problem::new(ProblemCode::MethodNotAllowed, detail, "see /api/openapi.json"))
}

fn wrong(detail: impl Into<String>) -> Refusal {
    Refusal(Problem::new(ProblemCode::InvalidRequest, detail, "see /api/openapi.json"))
}

/// A request's JSON body.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let body = Json::<Value>::from_request(request, state).await.map_err(unread)?;
        // Whatever is asked has named fields; serde would take a list of their values as well.
        if !body.is_object() {
            return Err(wrong("the request's body is refused: it is no JSON object"));
        }
        let body = serde_json::to_vec(&whole(body.0)).map_err(|error| wrong(error.to_string()))?;
        Json::<T>::from_bytes(&body).map(|body| Body(body.0)).map_err(unread)
    }
}

/// Why a body is not read.
fn unread(rejection: JsonRejection) -> Refusal {
    match rejection {
        JsonRejection::MissingJsonContentType(_) => {
            let detail = "the request's body is not JSON by its content-type";
            Refusal(Problem::new(ProblemCode::UnsupportedType, detail, "send application/json"))
        }
        rejection if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let detail = "the request's body is longer than the manager reads";
            Refusal(Problem::new(ProblemCode::TooLong, detail, "see /api/openapi.json"))
        }
        rejection => wrong(format!("the request's body is refused: {}", rejection.body_text())),
    }
}

/// The same with whole numbers as such: JSON does not tell 90.0 from 90, and serde does.
fn whole(value: Value) -> Value {
    /// Above, a float is not known to the last unit.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) => {
            let exact = number
                .as_f64()
                .filter(|float| number.is_f64() && float.fract() == 0.0 && float.abs() < EXACT);
            #[expect(clippy::cast_possible_truncation, reason = "whole, and within 2^53")]
            exact.map_or(Value::Number(number), |float| Value::from(float as i64))
        }
        Value::Array(items) => Value::Array(items.into_iter().map(whole).collect()),
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (name, whole(value))).collect()
        }
        other => other,
    }
}

/// The same where a request may have none: everything is left to its default then.
pub(crate) struct MaybeBody<T>(pub(crate) T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for MaybeBody<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        if !request.headers().contains_key(CONTENT_TYPE) && request.body().is_end_stream() {
            return Ok(MaybeBody(T::default()));
        }
        Body::from_request(request, state).await.map(|Body(body)| MaybeBody(body))
    }
}

/// The names in a request's path.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let path = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        path.map(|path| Path(path.0))
            .map_err(|rejection: PathRejection| wrong(rejection.body_text()))
    }
}

/// The values behind a request's `?`.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let query = axum::extract::Query::<T>::from_request_parts(parts, state).await;
        query
            .map(|query| Query(query.0))
            .map_err(|rejection: QueryRejection| wrong(rejection.body_text()))
    }
}

/// Where a page begins, from what a request says of it.
pub(crate) fn cursor(behind: Option<String>, limit: Option<u32>) -> Result<Cursor, Refusal> {
    let limit = limit.unwrap_or(DEFAULT_PAGE_ITEMS);
    if !(1..=MAX_PAGE_ITEMS).contains(&limit) {
        return Err(wrong(format!("limit={limit} is not possible: 1 to {MAX_PAGE_ITEMS}")));
    }
    Ok(Cursor { behind, limit: limit as usize })
}

/// A label that a filter asks for: `key=value`.
pub(crate) fn label(text: Option<&str>) -> Result<Option<(String, String)>, Refusal> {
    let Some(text) = text else { return Ok(None) };
    let (key, value) = text.split_once('=').ok_or_else(|| wrong("label is written key=value"))?;
    Ok(Some((key.to_owned(), value.to_owned())))
}
