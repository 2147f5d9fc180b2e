//! The goal of a move, as one word.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::rate::parse_scaled;

/// Goal of a move. `docs/operations.md` has the table of what each goal decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Intent {
    /// A move that ends soon, and a guest that is disturbed little.
    #[default]
    Auto,
    /// A pause within the budget, whatever the guest's writers lose before it.
    MinimalPause,
    /// As little loss of the guest's work as possible, whatever time it takes.
    MinimalImpact,
    /// The shortest time until the guest has left.
    FastEvacuation,
    /// Completion within this time after the request, with as little loss as it permits.
    Deadline(Duration),
}

/// Whether the guest may run at the destination while pages of its memory are still at the source.
/// It then needs both hosts, and the link between them, until the last page has been fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum PageInUse {
    /// No.
    Never,
    /// If the policy finds nothing better.
    #[default]
    Allowed,
    /// Yes, once each page has been sent.
    Now,
}

/// Error for a text that names no goal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a policy: give auto, minimal-pause, minimal-impact, fast-evacuation, or \
        deadline= with a time such as 90s or 5min"
)]
pub struct IntentError(String);

impl fmt::Display for Intent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Intent::Auto => f.pad("auto"),
            Intent::MinimalPause => f.pad("minimal-pause"),
            Intent::MinimalImpact => f.pad("minimal-impact"),
            Intent::FastEvacuation => f.pad("fast-evacuation"),
            Intent::Deadline(time) if time.subsec_nanos() == 0 => {
                write!(f, "deadline={}s", time.as_secs())
            }
            Intent::Deadline(time) => write!(f, "deadline={}ms", time.as_millis()),
        }
    }
}

impl FromStr for Intent {
    type Err = IntentError;

    fn from_str(text: &str) -> Result<Intent, IntentError> {
        let wrong = || IntentError(text.to_owned());
        match text {
            "auto" => return Ok(Intent::Auto),
            "minimal-pause" => return Ok(Intent::MinimalPause),
            "minimal-impact" => return Ok(Intent::MinimalImpact),
            "fast-evacuation" => return Ok(Intent::FastEvacuation),
            _ => {}
        }
        let time = text.strip_prefix("deadline=").ok_or_else(wrong)?;
        let unit = time.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let unit_ms = match unit {
            "ms" => 1,
            "s" => 1000,
            "min" => 60_000,
            "h" => 3_600_000,
            _ => return Err(wrong()),
        };
        let number = time.strip_suffix(unit).unwrap_or_default();
        let ms = parse_scaled(number, unit_ms).filter(|ms| *ms > 0).ok_or_else(wrong)?;
        Ok(Intent::Deadline(Duration::from_millis(ms)))
    }
}

impl TryFrom<String> for Intent {
    type Error = IntentError;

    fn try_from(text: String) -> Result<Intent, IntentError> {
        text.parse()
    }
}

impl From<Intent> for String {
    fn from(intent: Intent) -> String {
        intent.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        for text in [
            "auto",
            "minimal-pause",
            "minimal-impact",
            "fast-evacuation",
            "deadline=90s",
            "deadline=1500ms",
        ] {
            let intent: Intent = text.parse().unwrap();
            assert_eq!(intent.to_string(), text);
            assert_eq!(serde_json::to_value(intent).unwrap(), text);
            assert_eq!(serde_json::from_value::<Intent>(text.into()).unwrap(), intent);
        }
        assert_eq!("deadline=1.5min".parse(), Ok(Intent::Deadline(Duration::from_secs(90))));
    }

    #[test]
    fn a_refusal_lists_what_there_is() {
        for text in [
            "",
            "fast",
            "deadline",
            "deadline=",
            "deadline=5",
            "deadline=0s",
            "deadline=-1s",
            "deadline=1d",
            "Auto",
        ] {
            let error = text.parse::<Intent>().unwrap_err().to_string();
            assert!(error.contains("minimal-impact"), "{error}");
        }
    }
}
