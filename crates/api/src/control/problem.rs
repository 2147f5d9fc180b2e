//! Errors of the manager: problem documents (RFC 9457).

use std::fmt;

use godwit_types::Fault;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::preflight::Check;
use crate::{ApiError, ClientError, ErrorCode, json_name};

/// Reason why a request failed. Stable: programs may match on the kebab-case names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemCode {
    /// The request is invalid: a field, a value or a combination of them.
    InvalidRequest,
    /// The token is missing, unknown, expired or revoked.
    Unauthenticated,
    /// The token's role does not allow the request.
    Forbidden,
    /// No object has that name.
    NotFound,
    /// The path does not support the method.
    MethodNotAllowed,
    /// An object with that name already exists.
    AlreadyExists,
    /// The state of the object does not allow the operation.
    WrongState,
    /// Another request changed the object in the meantime.
    Conflict,
    /// The idempotency key was used for another request.
    KeyReused,
    /// The body exceeds the limit.
    TooLong,
    /// The body has an unsupported content type.
    UnsupportedType,
    /// Too many requests.
    TooManyRequests,
    /// A preflight check failed: the VM cannot move to that host.
    Preflight,
    /// No host can take the VM.
    NoHost,
    /// A host does not satisfy the cluster's CPU baseline.
    BaselineUnmet,
    /// The agent of a host is unreachable.
    HostAway,
    /// The agent of a host refused the request; `cause` has its own code.
    HostRefused,
    /// There is no leader, or it is unreachable.
    NoLeader,
    /// The store is unreachable.
    StoreAway,
    /// The OIDC issuer is unreachable, so its tokens cannot be checked.
    IssuerAway,
    /// The manager itself failed.
    ManagerFailed,
    /// A code that a later version added.
    #[serde(other)]
    Unknown,
}

impl ProblemCode {
    /// Returns the HTTP status that carries this code.
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

    /// Returns the summary shared by all problems with this code.
    #[must_use]
    pub fn title(self) -> &'static str {
        use ProblemCode as P;
        match self {
            P::InvalidRequest => "Invalid request",
            P::Unauthenticated => "Not authenticated",
            P::Forbidden => "Permission denied",
            P::NotFound => "Not found",
            P::MethodNotAllowed => "Method not allowed",
            P::AlreadyExists => "Already exists",
            P::WrongState => "Wrong state for this operation",
            P::Conflict => "Changed by another request",
            P::KeyReused => "Idempotency key already used for another request",
            P::TooLong => "Request too long",
            P::UnsupportedType => "Unsupported content type",
            P::TooManyRequests => "Too many requests",
            P::Preflight => "Preflight checks failed",
            P::NoHost => "No eligible host",
            P::BaselineUnmet => "CPU baseline not satisfied",
            P::HostAway => "Host unreachable",
            P::HostRefused => "Refused by the host",
            P::NoLeader => "No reachable leader",
            P::StoreAway => "Store unreachable",
            P::IssuerAway => "OIDC issuer unreachable",
            P::ManagerFailed => "Internal error of the manager",
            P::Unknown => "Unknown problem",
        }
    }

    /// Returns the kebab-case name of the code.
    #[must_use]
    pub fn name(self) -> String {
        json_name(&self)
    }
}

/// Body of every unsuccessful response: `application/problem+json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "type": "urn:godwit:problem:not-found", "title": "Not found", "status": 404,
    "detail": "no VM \"web\"",
    "code": "not-found", "remedy": "see `godwit vm list`"
}))]
pub struct Problem {
    /// `urn:godwit:problem:CODE`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Summary shared by all problems of this type.
    pub title: String,
    pub status: u16,
    /// What failed and why, in one line.
    pub detail: String,
    /// Stable code for programs.
    pub code: ProblemCode,
    /// How to fix it; empty if `detail` already says it.
    #[serde(default, alias = "mend")]
    pub remedy: String,
    /// Error code of the agent that refused the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub cause: Option<ErrorCode>,
    /// Failed preflight checks, if the code is `preflight`.
    #[serde(default, skip_serializing_if = "<[Check]>::is_empty")]
    #[schema(value_type = Vec<Check>)]
    pub checks: Box<[Check]>,
}

impl Problem {
    /// Creates a problem with the given code.
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
}

/// The refusal of an agent.
impl From<ApiError> for Problem {
    fn from(error: ApiError) -> Problem {
        let code = match error.code {
            ErrorCode::InvalidRequest => ProblemCode::InvalidRequest,
            ErrorCode::NotFound => ProblemCode::NotFound,
            ErrorCode::AlreadyExists => ProblemCode::AlreadyExists,
            // The VM is in doubt; the host itself works correctly.
            ErrorCode::WrongState | ErrorCode::Busy | ErrorCode::InDoubt => ProblemCode::WrongState,
            ErrorCode::Preflight | ErrorCode::InsufficientMemory => ProblemCode::Preflight,
            _ => ProblemCode::HostRefused,
        };
        Problem { cause: Some(error.code), ..Problem::new(code, error.message, error.remedy) }
    }
}

impl From<ClientError> for Problem {
    fn from(error: ClientError) -> Problem {
        match error {
            ClientError::Refused(error) => error.into(),
            away => {
                Problem::new(ProblemCode::HostAway, away.detail(), "see `godwit control host list`")
            }
        }
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
