//! Who asks, and what they may: tokens, which are kept hashed, and roles. No clock, and no I/O but
//! the audit log's.

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

use godwit_api::control::{Problem, ProblemCode, Role};

pub use needs::{Need, needed};
pub use token::{Secret, TokenRecord, Tokens};

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// A token's name, an OIDC subject; `root` by the manager's own socket.
    pub name: String,
    /// What they may.
    pub role: Role,
    /// The id of the manager's own token that they showed.
    pub token: Option<String>,
    /// When what they showed is good no more, milliseconds since 1970; none: it has no end.
    pub until_unix_ms: Option<u64>,
}

impl Caller {
    /// Who comes by the manager's own socket, which is root's.
    #[must_use]
    pub fn root() -> Caller {
        Caller::named("root", Role::Admin)
    }

    /// Somebody whom nothing ends.
    #[must_use]
    pub fn named(name: impl Into<String>, role: Role) -> Caller {
        Caller { name: name.into(), role, token: None, until_unix_ms: None }
    }

    /// What their requests are counted by, and their idempotency keys are kept by. Tokens may share
    /// a name, and no two callers this.
    #[must_use]
    pub fn key(&self) -> String {
        // No name has a space.
        self.token.as_ref().map_or_else(|| self.name.clone(), |id| format!("token {id}"))
    }

    /// Whether they may do what needs this role.
    ///
    /// # Errors
    /// [`ProblemCode::Forbidden`].
    pub fn check(&self, needed: Role) -> Result<(), Problem> {
        if self.role >= needed {
            return Ok(());
        }
        let (name, role, needed) = (&self.name, self.role.name(), needed.name());
        let detail = format!("{name} has the role {role}, and that needs the role {needed}");
        Err(Problem::new(
            ProblemCode::Forbidden,
            detail,
            format!("ask with a token of the role {needed}"),
        ))
    }
}
