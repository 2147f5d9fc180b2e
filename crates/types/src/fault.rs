//! The common form of an error: in reports, in records and on the wire.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why something failed or is refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Fault {
    /// Stable code for programs, kebab-case.
    pub code: String,
    /// What failed and why, one line for people.
    pub message: String,
    /// What to do about it. Empty if the message says it all.
    #[serde(default, alias = "mend")]
    #[cfg_attr(feature = "schema", schema(required = true))]
    pub remedy: String,
}

impl Fault {
    #[must_use]
    pub fn new(
        code: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Fault {
        Fault { code: code.into(), message: message.into(), remedy: remedy.into() }
    }
}

/// The message, followed by the remedy in parentheses if there is one.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, " ({})", self.remedy) }
    }
}

impl std::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_follows_the_message() {
        let fault = Fault::new("not-found", "no VM \"web\" on host a", "see `godwit vm list`");
        assert_eq!(fault.to_string(), "no VM \"web\" on host a (see `godwit vm list`)");
        assert_eq!(Fault { remedy: String::new(), ..fault }.to_string(), "no VM \"web\" on host a");
    }

    #[test]
    fn json_of_earlier_versions_is_read() {
        let fault = Fault::new("busy", "it moves", "wait");
        let json = serde_json::to_string(&fault).unwrap();
        assert_eq!(json, r#"{"code":"busy","message":"it moves","remedy":"wait"}"#);
        for text in [json.as_str(), r#"{"code":"busy","message":"it moves","mend":"wait"}"#] {
            assert_eq!(serde_json::from_str::<Fault>(text).unwrap(), fault, "{text}");
        }
        let short: Fault = serde_json::from_str(r#"{"code":"a","message":"b"}"#).unwrap();
        assert_eq!(short, Fault::new("a", "b", ""));
    }
}
