//! What stands in the way, in the one shape in which the project tells it: code, message, remedy.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Something that can't be done: a stable code for programs, what failed and why, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obstacle {
    /// Stable, kebab-case, for programs.
    pub code: String,
    /// What can't be done and why.
    pub message: String,
    /// What the operator can do about it.
    #[serde(alias = "mend")]
    pub remedy: String,
}

impl Obstacle {
    /// An obstacle of these three parts.
    #[must_use]
    pub fn new(code: &str, message: impl Into<String>, remedy: impl Into<String>) -> Obstacle {
        Obstacle { code: code.to_owned(), message: message.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.message, self.remedy)
    }
}
