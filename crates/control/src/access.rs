//! Authentication and authorization: tokens, of which only hashes are stored, roles, issuers and
//! certificates.

pub(crate) mod authorities;
pub(crate) mod certificates;
pub(crate) mod http;
pub(crate) mod issuer;
pub(crate) mod known_tokens;
mod needs;
pub mod oidc;
pub(crate) mod rates;
pub(crate) mod record;
pub(crate) mod refusals;
pub(crate) mod requests;
mod token;
pub(crate) mod trust;

use godwit_api::control::{Problem, ProblemCode, Role};

pub use needs::{Need, needed};
pub use token::{Secret, TokenRecord, Tokens};

/// Authenticated sender of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Name of a token, or OIDC subject; `root` on the manager's own socket.
    pub name: String,
    /// Role of the caller.
    pub role: Role,
    /// ID of the manager's token that the caller presented; `None`: another credential.
    pub token: Option<String>,
    /// Expiry of the credential, milliseconds since 1970; `None`: it does not expire.
    pub until_unix_ms: Option<u64>,
}

impl Caller {
    /// Returns the caller of the manager's own socket, which only root can open.
    #[must_use]
    pub fn root() -> Caller {
        Caller::named("root", Role::Admin)
    }

    /// Returns a caller without a token or an expiry.
    #[must_use]
    pub fn named(name: impl Into<String>, role: Role) -> Caller {
        Caller { name: name.into(), role, token: None, until_unix_ms: None }
    }

    /// Returns the unique key of the caller for rate limits and idempotency keys. Names are not
    /// unique: two tokens may share one.
    #[must_use]
    pub fn key(&self) -> String {
        // No name has a space.
        self.token.as_ref().map_or_else(|| self.name.clone(), |id| format!("token {id}"))
    }

    /// Checks that the caller's role is sufficient.
    ///
    /// # Errors
    /// [`ProblemCode::Forbidden`]: the role is too low.
    pub fn check(&self, needed: Role) -> Result<(), Problem> {
        if self.role >= needed {
            return Ok(());
        }
        let (name, role, needed) = (&self.name, self.role.name(), needed.name());
        let detail = format!("{name} has the role {role}; the request needs the role {needed}");
        Err(Problem::new(
            ProblemCode::Forbidden,
            detail,
            format!("use a token with the role {needed}"),
        ))
    }
}
