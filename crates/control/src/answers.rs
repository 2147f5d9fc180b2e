//! Extractors for requests, and types of responses. Every error is a problem document, including
//! the framework's own errors.

use std::collections::BTreeMap;

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
use utoipa::IntoResponses;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::{self, OpenApi, Ref, RefOr};

use crate::cluster::inventory::Cursor;

/// Media type of problem documents (RFC 9457, section 3).
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
        Refusal(error.into())
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
            // RFC 6585, section 4. The buckets refill every second.
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // For the audit log, whose layer wraps all others.
        response.extensions_mut().insert(self.0);
        response
    }
}

/// Failure of a request that needs the store or an agent, in the OpenAPI document.
pub(crate) enum Failed {}

impl IntoResponses for Failed {
    fn responses() -> BTreeMap<String, RefOr<openapi::Response>> {
        BTreeMap::from([("5XX".to_owned(), with_problem("The reason for the failure"))])
    }
}

/// Adds to the OpenAPI document that every request may be refused.
pub(crate) fn describe_refusals(document: &mut OpenApi) {
    let refusal = with_problem("The reason for the refusal");
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        operation.responses.responses.insert("4XX".to_owned(), refusal.clone());
    }
}

fn with_problem(description: &str) -> RefOr<openapi::Response> {
    let problem = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    ResponseBuilder::new()
        .description(description)
        .content("application/problem+json", problem)
        .into()
}

/// Returns the operations of a path in the OpenAPI document.
pub(crate) fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let PathItem { get, put, post, delete, patch, .. } = item;
    [get, put, post, delete, patch].into_iter().flatten()
}

/// Name of the object that a request created, for the audit log. Response extension.
#[derive(Clone, Debug)]
pub(crate) struct Made(pub(crate) String);

/// Host that a response admits, for the audit log: such a request has no caller's token. Response
/// extension.
#[derive(Clone, Debug)]
pub(crate) struct Joining(pub(crate) String);

/// Mark of a dry run: the request reported its changes and made none. Response extension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnlyLooked;

/// Response to a request that creates an object.
pub(crate) type Making<T> = (StatusCode, Extension<Made>, Json<T>);

/// Builds the response to a request that created an object, or with [`StatusCode::ACCEPTED`] began
/// to. `named` is the object's name in the audit log.
pub(crate) fn made<T>(status: StatusCode, named: String, answer: T) -> Making<T> {
    (status, Extension(Made(named)), Json(answer))
}

/// Answers requests to unknown paths.
pub(crate) async fn no_such_path() -> Refusal {
    Refusal(Problem::new(ProblemCode::NotFound, "no such path in the API", "see /api/openapi.json"))
}

/// Answers requests whose path exists but does not accept their method.
pub(crate) async fn no_such_method() -> Refusal {
    let detail = "the path does not accept this method";
    Refusal(Problem::new(ProblemCode::MethodNotAllowed, detail, "see /api/openapi.json"))
}

fn wrong(detail: impl Into<String>) -> Refusal {
    Refusal(Problem::new(ProblemCode::InvalidRequest, detail, "see /api/openapi.json"))
}

/// JSON body of a request.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let body = Json::<Value>::from_request(request, state).await.map_err(unread)?;
        // All requests are objects; serde would also accept an array of the fields' values.
        if !body.is_object() {
            return Err(wrong("cannot read the request body: it is not a JSON object"));
        }
        let body = serde_json::to_vec(&whole(body.0)).map_err(|error| wrong(error.to_string()))?;
        Json::<T>::from_bytes(&body).map(|body| Body(body.0)).map_err(unread)
    }
}

/// Converts the framework's rejection of a body into a problem document.
fn unread(rejection: JsonRejection) -> Refusal {
    match rejection {
        JsonRejection::MissingJsonContentType(_) => {
            let detail = "cannot read the request body: its content-type is not JSON";
            Refusal(Problem::new(ProblemCode::UnsupportedType, detail, "send application/json"))
        }
        rejection if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let detail = "the request body is longer than the manager reads";
            Refusal(Problem::new(ProblemCode::TooLong, detail, "see /api/openapi.json"))
        }
        rejection => wrong(format!("cannot read the request body: {}", rejection.body_text())),
    }
}

/// Converts floats without a fraction to integers: JSON does not distinguish 90.0 from 90, serde
/// does.
fn whole(value: Value) -> Value {
    /// Limit below which a float represents every integer exactly: 2^53.
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

/// Optional JSON body of a request. Without a body, every field has its default.
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

/// Parameters in a request's path.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let path = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        path.map(|path| Path(path.0))
            .map_err(|rejection: PathRejection| wrong(rejection.body_text()))
    }
}

/// Parameters in a request's query string.
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

/// Returns the cursor for a request's `cursor` and `limit`.
pub(crate) fn cursor(behind: Option<String>, limit: Option<u32>) -> Result<Cursor, Refusal> {
    let limit = limit.unwrap_or(DEFAULT_PAGE_ITEMS);
    if !(1..=MAX_PAGE_ITEMS).contains(&limit) {
        return Err(wrong(format!("invalid limit={limit}: give 1 to {MAX_PAGE_ITEMS}")));
    }
    Ok(Cursor { behind, limit: limit as usize })
}

/// Parses the label of a filter, `key=value`.
pub(crate) fn label(text: Option<&str>) -> Result<Option<(String, String)>, Refusal> {
    let Some(text) = text else { return Ok(None) };
    let (key, value) =
        text.split_once('=').ok_or_else(|| wrong("invalid label: write it as key=value"))?;
    Ok(Some((key.to_owned(), value.to_owned())))
}
