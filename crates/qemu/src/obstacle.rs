//! An error for operators, in the project's common form: code, message, remedy.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An error with a stable code for programs, a message (what failed and why) and a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obstacle {
    /// Stable code in kebab case, for programs.
    pub code: String,
    /// What failed and why.
    pub message: String,
    /// What the operator can do about it.
    #[serde(alias = "mend")]
    pub remedy: String,
}

impl Obstacle {
    /// Combines code, message and remedy.
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
