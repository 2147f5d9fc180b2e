//! What an import or export of a VM changes, or why it is refused.

use serde::{Deserialize, Serialize};

/// A part of a definition that changes, or cannot be imported or exported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ImportFinding {
    /// The part, by its name in the definition.
    pub what: String,
    /// Why, and what becomes of it.
    pub why: String,
    /// Whether it makes the import or export impossible.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refuses: bool,
}

impl ImportFinding {
    /// Returns a finding about a part that changes or is left out.
    #[must_use]
    pub fn note(what: impl Into<String>, why: impl Into<String>) -> ImportFinding {
        ImportFinding { what: what.into(), why: why.into(), refuses: false }
    }

    /// Returns a finding that makes the import or export impossible.
    #[must_use]
    pub fn refusal(what: impl Into<String>, why: impl Into<String>) -> ImportFinding {
        ImportFinding { refuses: true, ..ImportFinding::note(what, why) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_says_that_it_refuses() {
        let note = ImportFinding::note("CD", "the drive is empty");
        let json = serde_json::to_string(&note).unwrap();
        assert_eq!(json, r#"{"what":"CD","why":"the drive is empty"}"#);
        assert_eq!(serde_json::from_str::<ImportFinding>(&json).unwrap(), note);
        let refusal = ImportFinding::refusal("vda", "it is encrypted");
        let json = serde_json::to_string(&refusal).unwrap();
        assert_eq!(json, r#"{"what":"vda","why":"it is encrypted","refuses":true}"#);
        assert_eq!(serde_json::from_str::<ImportFinding>(&json).unwrap(), refusal);
    }
}
