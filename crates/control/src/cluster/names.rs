//! Rules for names and labels of hosts and VMs.

use std::collections::BTreeMap;

use godwit_api::control::{Problem, ProblemCode};

/// Most labels of a host or a VM. The API's document has the same limit
/// (`godwit_api::control::labels`).
const MOST_LABELS: usize = 64;
/// Most characters of a label's key.
const MOST_LABEL_KEY: usize = 63;
/// Most characters of a label's value.
const MOST_LABEL_VALUE: usize = 253;

/// Checks a name. Names appear in certificates, paths and files.
pub(crate) fn check_name(name: &str) -> Result<(), Problem> {
    let is_plain = (1..=63).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if is_plain {
        return Ok(());
    }
    let remedy = "use at most 63 letters, digits, - _ and ., beginning with a letter or digit";
    Err(Problem::new(ProblemCode::InvalidRequest, "invalid name", remedy))
}

/// Returns whether a character is invisible and may change how its neighbours are shown: control
/// characters, and marks of the direction of writing (UAX #9).
pub(crate) fn is_unseen(char: char) -> bool {
    char.is_control()
        || matches!(
            char,
            '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
        )
}

/// Checks the labels of a host or a VM.
pub(crate) fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Problem> {
    if labels.len() > MOST_LABELS {
        return Err(Problem::new(
            ProblemCode::InvalidRequest,
            "too many labels",
            "give 64 at most",
        ));
    }
    for (key, value) in labels {
        let length = key.chars().count();
        // In filters by label, the first = ends the key.
        let is_visible = |char: char| !char.is_whitespace() && !is_unseen(char) && char != '=';
        if !(1..=MOST_LABEL_KEY).contains(&length) || !key.chars().all(is_visible) {
            let start: String = key.escape_debug().take(MOST_LABEL_KEY).collect();
            let detail = format!("invalid key of a label: \"{start}\" ({length} characters)");
            return Err(Problem::new(
                ProblemCode::InvalidRequest,
                detail,
                "use 1 to 63 characters without blanks and =",
            ));
        }
        if value.chars().any(is_unseen) {
            let detail = format!("the value of label {key} has invisible characters");
            return Err(Problem::new(
                ProblemCode::InvalidRequest,
                detail,
                "use letters, digits and punctuation",
            ));
        }
        let length = value.chars().count();
        if length > MOST_LABEL_VALUE {
            let detail = format!("the value of label {key} is too long: {length} characters");
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, "use 253 at most"));
        }
    }
    Ok(())
}
