//! Who asks, and what they may: tokens, which are kept hashed, and roles. No I/O and no clock.

mod join;
mod needs;
pub mod oidc;
pub mod repeat;
mod token;

use godwit_api::control::{Problem, ProblemCode, Role};

pub use join::{JoinTokenRecord, JoinUse, unknown_join_token};
pub use needs::needed_role;
pub use token::{Secret, TokenRecord, Tokens};

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// A token's name, an OIDC subject; `root` by the manager's own socket.
    pub name: String,
    /// What they may.
    pub role: Role,
}

impl Caller {
    /// Who comes by the manager's own socket, which is root's.
    #[must_use]
    pub fn root() -> Caller {
        Caller { name: "root".to_owned(), role: Role::Admin }
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
        Err(Problem::new(ProblemCode::Forbidden, detail, format!("ask with a token of the role {needed}")))
    }
}
