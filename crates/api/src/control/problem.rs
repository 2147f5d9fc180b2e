//! Why the manager does not do what it was asked: a problem document (RFC 9457).

use std::fmt;

use godwit_types::Fault;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Check;
use crate::{ApiError, ErrorCode};

/// Why a request was not carried out. Stable: programs may match on the kebab-case names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemCode {
    /// The request itself makes no sense (a field, a value, a combination).
    InvalidRequest,
    /// No token, or one that is not known, has expired or was revoked.
    Unauthenticated,
    /// The token's role does not allow it.
    Forbidden,
    /// Nothing of that name.
    NotFound,
    /// That path does not take that method.
    MethodNotAllowed,
    /// Something of that name exists already.
    AlreadyExists,
    /// Its state does not allow it.
    WrongState,
    /// Somebody else has changed it meanwhile.
    Conflict,
    /// The idempotency key was used for another request.
    KeyReused,
    /// The body is longer than the manager reads.
    TooLong,
    /// The body is of a type that the manager does not read.
    UnsupportedType,
    /// Too many requests.
    TooManyRequests,
    /// A check before a move says that the VM can't go.
    Preflight,
    /// No host takes the VM.
    NoHost,
    /// A host falls short of the cluster's CPU baseline.
    BaselineUnmet,
    /// A host's agent does not answer.
    HostAway,
    /// A host's agent refused; its own code stands in `cause`.
    HostRefused,
    /// Another manager leads and can't be reached, or none does.
    NoLeader,
    /// The store does not answer.
    StoreAway,
    /// The OIDC issuer does not answer, so its tokens can't be checked.
    IssuerAway,
    /// The manager itself fails.
    ManagerFailed,
    /// A code of a later version than this client's.
    #[serde(other)]
    Unknown,
}

impl ProblemCode {
    /// The HTTP status that carries this code.
    #[must_use]
    pub fn status(self) -> StatusCode {
        use ProblemCode as P;
        match self {
            P::InvalidRequest => StatusCode::BAD_REQUEST,
            P::Unauthenticated => StatusCode::UNAUTHORIZED,
            P::Forbidden => StatusCode::FORBIDDEN,
            P::NotFound => StatusCode::NOT_FOUND,
            P::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            P::AlreadyExists | P::WrongState | P::Conflict => StatusCode::CONFLICT,
            P::KeyReused | P::Preflight | P::NoHost | P::BaselineUnmet => {
                StatusCode::UNPROCESSABLE_ENTITY
            }
            P::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            P::UnsupportedType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            P::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
            P::HostAway | P::HostRefused => StatusCode::BAD_GATEWAY,
            P::NoLeader | P::StoreAway | P::IssuerAway => StatusCode::SERVICE_UNAVAILABLE,
            P::ManagerFailed | P::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// What all problems of this code have in common, in a few words.
    #[must_use]
    pub fn title(self) -> &'static str {
        use ProblemCode as P;
        match self {
            P::InvalidRequest => "The request is refused",
            P::Unauthenticated => "Who asks is not known",
            P::Forbidden => "Who asks may not do that",
            P::NotFound => "There is no such thing",
            P::MethodNotAllowed => "That path does not take that method",
            P::AlreadyExists => "There is one already",
            P::WrongState => "Its state does not allow it",
            P::Conflict => "It has changed meanwhile",
            P::KeyReused => "The idempotency key was used for another request",
            P::TooLong => "The request is too long",
            P::UnsupportedType => "The request's type is not read here",
            P::TooManyRequests => "Too many requests",
            P::Preflight => "The VM can't move there",
            P::NoHost => "No host takes the VM",
            P::BaselineUnmet => "A host falls short of the CPU baseline",
            P::HostAway => "A host does not answer",
            P::HostRefused => "A host refuses",
            P::NoLeader => "No manager leads",
            P::StoreAway => "The store does not answer",
            P::IssuerAway => "The OIDC issuer does not answer",
            P::ManagerFailed => "The manager fails",
            P::Unknown => "A problem of a later version",
        }
    }

    /// Its kebab-case name.
    #[must_use]
    pub fn name(self) -> String {
        serde_json::to_value(self)
            .ok()
            .and_then(|name| name.as_str().map(str::to_owned))
            .unwrap_or_default()
    }
}

/// The body of every answer that is not a success: `application/problem+json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "type": "urn:godwit:problem:not-found", "title": "There is no such thing", "status": 404, "detail": "no VM \"web\"",
    "code": "not-found", "remedy": "see `godwit vm list`"
}))]
pub struct Problem {
    /// `urn:godwit:problem:CODE`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What all problems of this type have in common.
    pub title: String,
    pub status: u16,
    /// What failed and why, one line.
    pub detail: String,
    /// Stable code for programs.
    pub code: ProblemCode,
    /// What to do about it; empty where the detail says it all.
    #[serde(default, alias = "mend")]
    pub remedy: String,
    /// The code of the agent that refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub cause: Option<ErrorCode>,
    /// The checks that say no, where preflight does.
    #[serde(default, skip_serializing_if = "<[Check]>::is_empty")]
    #[schema(value_type = Vec<Check>)]
    pub checks: Box<[Check]>,
}

impl Problem {
    /// A problem of the given code.
    pub fn new(code: ProblemCode, detail: impl Into<String>, remedy: impl Into<String>) -> Problem {
        Problem {
            kind: format!("urn:godwit:problem:{}", code.name()),
            title: code.title().to_owned(),
            status: code.status().as_u16(),
            detail: detail.into(),
            code,
            remedy: remedy.into(),
            cause: None,
            checks: Box::default(),
        }
    }

    /// What an agent's refusal becomes.
    #[must_use]
    pub fn of_agent(error: ApiError) -> Problem {
        let code = match error.code {
            ErrorCode::InvalidRequest => ProblemCode::InvalidRequest,
            ErrorCode::NotFound => ProblemCode::NotFound,
            ErrorCode::AlreadyExists => ProblemCode::AlreadyExists,
            // It is the VM that is in doubt, and the host answers as it should.
            ErrorCode::WrongState | ErrorCode::Busy | ErrorCode::InDoubt => ProblemCode::WrongState,
            ErrorCode::Preflight | ErrorCode::InsufficientMemory => ProblemCode::Preflight,
            _ => ProblemCode::HostRefused,
        };
        Problem { cause: Some(error.code), ..Problem::new(code, error.message, error.remedy) }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, " ({})", self.remedy) }
    }
}

impl std::error::Error for Problem {}

impl From<&Problem> for Fault {
    fn from(problem: &Problem) -> Fault {
        Fault::new(problem.code.name(), &problem.detail, &problem.remedy)
    }
}
