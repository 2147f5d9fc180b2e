//! The goal of a move, as one word, and the policy that it selects.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use godwit_lanes::parse_scaled;
use serde::{Deserialize, Serialize};

use crate::policy::{
    DEFAULT_SWITCHOVER_BUDGET, DEFAULT_SWITCHOVER_LIMIT, LEAST_THROTTLED_SHARE,
    MOST_SWITCHOVER_BUDGET, MOST_THROTTLED_SHARE, PageIn, Policy, Throttling,
};

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
    /// Where the policy finds nothing better.
    #[default]
    Allowed,
    /// Yes, when each page has been sent once.
    Now,
}

/// Operator's settings for one goal on a host. Settings that are absent keep the goal's values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicySettings {
    /// Share of the wire's rate above which a guest's dirty rate makes its writers slowed.
    pub throttle_above: Option<f64>,
    /// Share of the wire's rate to which writers are slowed.
    pub throttle_to: Option<f64>,
    /// Longest pause, in milliseconds, that is accepted if the budget is out of reach.
    pub longest_pause_ms: Option<u64>,
    /// Maximum number of rounds.
    pub most_rounds: Option<u32>,
}

impl PolicySettings {
    /// Returns the goal's policy with these settings applied.
    #[must_use]
    pub fn applied_to(&self, policy: Policy) -> Policy {
        let Throttling { above, to } = policy.throttling;
        Policy {
            throttling: Throttling {
                above: self.throttle_above.unwrap_or(above),
                to: self.throttle_to.unwrap_or(to),
            },
            switchover_limit: self
                .longest_pause_ms
                .map_or(policy.switchover_limit, Duration::from_millis),
            max_rounds: self.most_rounds.unwrap_or(policy.max_rounds),
            ..policy
        }
    }

    /// Returns the setting that contradicts what this goal does by itself: its name, what is wrong,
    /// and the remedy.
    #[must_use]
    pub fn problem(&self, intent: Intent) -> Option<(&'static str, String, &'static str)> {
        let policy =
            self.applied_to(intent.policy(DEFAULT_SWITCHOVER_BUDGET, PageInUse::default()));
        let Throttling { above, to } = policy.throttling;
        let most_pause_ms = MOST_SWITCHOVER_BUDGET.as_millis();
        if matches!(intent, Intent::Deadline(_)) {
            let set = [("throttle_above", self.throttle_above), ("throttle_to", self.throttle_to)];
            if let Some((key, _)) = set.into_iter().find(|(_, value)| value.is_some()) {
                let why =
                    "how far writers are slowed follows from the time that is left".to_owned();
                return Some((key, why, "leave it out"));
            }
        }
        if !(LEAST_THROTTLED_SHARE..=MOST_THROTTLED_SHARE).contains(&to) {
            return Some((
                "throttle_to",
                format!("{to} is out of range"),
                "write a share from 0.02 to 0.8",
            ));
        }
        if !(to..=MOST_UNTHROTTLED_SHARE).contains(&above) {
            let why = format!("{above}, with throttle_to at {to}, is out of range");
            return Some(("throttle_above", why, "write a share from throttle_to to 1"));
        }
        if self.longest_pause_ms.is_some_and(|ms| !(1..=most_pause_ms).contains(&u128::from(ms))) {
            let why = "such a pause cannot be guaranteed".to_owned();
            return Some(("longest_pause_ms", why, "write a number from 1 to 8000"));
        }
        if self.most_rounds.is_some_and(|rounds| !(2..=MOST_ROUNDS).contains(&rounds)) {
            return Some((
                "most_rounds",
                "it is out of range".to_owned(),
                "write a number from 2 to 1000",
            ));
        }
        None
    }
}

/// A guest that dirties more than the wire carries never converges by itself, so it must be slowed
/// there.
const MOST_UNTHROTTLED_SHARE: f64 = 1.0;
/// More than any move needs, so that none goes on forever.
const MOST_ROUNDS: u32 = 1000;

/// Error for a text that names no goal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a policy: give auto, minimal-pause, minimal-impact, fast-evacuation, or \
    deadline= with a time such as 90s or 5min"
)]
pub struct IntentError(String);

impl Intent {
    /// Returns the policy of the goal, with this switchover budget.
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
            Intent::MinimalImpact => {
                Policy { throttling: Throttling { above: 0.95, to: 0.8 }, ..policy }
            }
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
    fn valid_settings_apply_and_invalid_ones_are_named() {
        let set = |json: &str| serde_json::from_str::<PolicySettings>(json).unwrap();
        let settings = set(r#"{"throttle_to": 0.1, "longest_pause_ms": 50, "most_rounds": 12}"#);
        let policy =
            settings.applied_to(Intent::Auto.policy(DEFAULT_SWITCHOVER_BUDGET, PageInUse::Never));
        assert_eq!(policy.throttling, Throttling { above: 0.6, to: 0.1 });
        assert_eq!((policy.switchover_limit, policy.max_rounds), (Duration::from_millis(50), 12));
        assert_eq!(policy.page_in, PageIn::Never);
        let deadline = Intent::Deadline(Duration::from_secs(1));
        for (text, intent, key) in [
            (r#"{"throttle_to": 0.0}"#, Intent::Auto, Some("throttle_to")),
            (r#"{"throttle_to": 0.7}"#, Intent::Auto, Some("throttle_above")),
            (r#"{"throttle_to": 0.7}"#, Intent::MinimalImpact, None),
            (r#"{"throttle_above": 1.5}"#, Intent::Auto, Some("throttle_above")),
            (r#"{"throttle_to": 0.1}"#, deadline, Some("throttle_to")),
            (r#"{"longest_pause_ms": 9000}"#, deadline, Some("longest_pause_ms")),
            (r#"{"most_rounds": 1}"#, Intent::Auto, Some("most_rounds")),
            ("{}", Intent::FastEvacuation, None),
        ] {
            assert_eq!(set(text).problem(intent).map(|problem| problem.0), key, "{text}");
        }
    }

    #[test]
    fn a_refused_policy_lists_the_valid_ones() {
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
