//! Names and labels that hosts and VMs may have.

use std::collections::BTreeMap;

use godwit_api::control::{Problem, ProblemCode};

/// The most labels that a host or a VM may have; the document says the same (`godwit_api::control::labels`).
const MOST_LABELS: usize = 64;
/// Characters of a label's key,
const MOST_LABEL_KEY: usize = 63;
const MOST_LABEL_VALUE: usize = 253;

/// Names stand in certificates, paths and files.
pub(crate) fn check_name(name: &str) -> Result<(), Problem> {
    let is_plain = (1..=63).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if is_plain {
        return Ok(());
    }
    let remedy = "use letters, digits, - _ and ., 63 at most, a letter or digit in front";
    Err(Problem::new(ProblemCode::InvalidRequest, "that can't be a name", remedy))
}

/// What has no look of its own, and may change that of what stands beside it: controls, and marks of the direction of writing (UAX #9).
fn is_unseen(char: char) -> bool {
    char.is_control()
        || matches!(char, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Labels of a host or a VM.
pub(crate) fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Problem> {
    if labels.len() > MOST_LABELS {
        return Err(Problem::new(ProblemCode::InvalidRequest, "too many labels", "64 at most"));
    }
    for (key, value) in labels {
        let length = key.chars().count();
        // The first = ends the key where labels are asked for.
        let is_visible = |char: char| !char.is_whitespace() && !is_unseen(char) && char != '=';
        if !(1..=MOST_LABEL_KEY).contains(&length) || !key.chars().all(is_visible) {
            let start: String = key.escape_debug().take(MOST_LABEL_KEY).collect();
            let detail = format!("\"{start}\" ({length} characters) can't be the key of a label");
            return Err(Problem::new(
                ProblemCode::InvalidRequest,
                detail,
                "take 1 to 63 characters without blanks and =",
            ));
        }
        if value.chars().any(is_unseen) {
            let detail = format!("the value of label {key} has characters that can't be seen");
            return Err(Problem::new(
                ProblemCode::InvalidRequest,
                detail,
                "take letters, digits and signs",
            ));
        }
        let length = value.chars().count();
        if length > MOST_LABEL_VALUE {
            let detail = format!("the value of label {key} has {length} characters");
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, "253 at most"));
        }
    }
    Ok(())
}
