//! What matters most to whoever moves a guest, in a word, and the policy that it stands for.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use godwit_lanes::parse_scaled;
use serde::{Deserialize, Serialize};

use crate::policy::{DEFAULT_SWITCHOVER_LIMIT, PageIn, Policy, Throttling};

/// What matters most. `docs/operations.md` has the table of what each decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Intent {
    /// A move that ends soon, and a guest that notices little of it.
    #[default]
    Auto,
    /// A pause within the budget, whatever the guest's writers lose before it.
    MinimalPause,
    /// As little as possible of the guest's work lost, whatever time it takes.
    MinimalImpact,
    /// The shortest time until the guest has left.
    FastEvacuation,
    /// To be over so long after the request, with as little lost as that lets be.
    Deadline(Duration),
}

/// Whether the guest may run at the destination while pages of its memory are still at the source. It then needs both hosts, and the
/// link between them, until the last page has been fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageInUse {
    /// No.
    Never,
    /// Where the policy finds nothing better.
    #[default]
    Allowed,
    /// Yes, when each page has been sent once.
    Now,
}

/// A text that is no intent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is no policy: give auto, minimal-pause, minimal-impact, fast-evacuation, or deadline= with a time such as 90s or 5min"
)]
pub struct IntentError(String);

impl Intent {
    /// The policy that it stands for, with this switchover budget.
    #[must_use]
    pub fn policy(self, switchover_budget: Duration, page_in: PageInUse) -> Policy {
        let page_in = match (page_in, self) {
            (PageInUse::Never, _) => PageIn::Never,
            (PageInUse::Now, _) => PageIn::Now,
            (PageInUse::Allowed, Intent::FastEvacuation) => PageIn::InsteadOfThrottle,
            (PageInUse::Allowed, _) => PageIn::LastResort,
        };
        let policy = Policy { switchover_budget, page_in, ..Policy::default() };
        match self {
            Intent::Auto => policy,
            Intent::MinimalPause => Policy { switchover_limit: switchover_budget, ..policy },
            Intent::MinimalImpact => Policy { throttling: Throttling { above: 0.95, to: 0.8 }, ..policy },
            Intent::FastEvacuation => Policy {
                throttling: Throttling { above: 0.3, to: 0.1 },
                switchover_limit: 2 * DEFAULT_SWITCHOVER_LIMIT,
                ..policy
            },
            Intent::Deadline(deadline) => Policy { deadline: Some(deadline), ..policy },
        }
    }
}

impl fmt::Display for Intent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Intent::Auto => f.pad("auto"),
            Intent::MinimalPause => f.pad("minimal-pause"),
            Intent::MinimalImpact => f.pad("minimal-impact"),
            Intent::FastEvacuation => f.pad("fast-evacuation"),
            Intent::Deadline(time) if time.subsec_nanos() == 0 => write!(f, "deadline={}s", time.as_secs()),
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
        for text in
            ["auto", "minimal-pause", "minimal-impact", "fast-evacuation", "deadline=90s", "deadline=1500ms"]
        {
            let intent: Intent = text.parse().unwrap();
            assert_eq!(intent.to_string(), text);
            assert_eq!(serde_json::to_value(intent).unwrap(), text);
            assert_eq!(serde_json::from_value::<Intent>(text.into()).unwrap(), intent);
        }
        assert_eq!("deadline=1.5min".parse(), Ok(Intent::Deadline(Duration::from_secs(90))));
    }

    #[test]
    fn what_is_refused_is_told_with_what_there_is() {
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
