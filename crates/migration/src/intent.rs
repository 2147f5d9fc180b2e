//! The policy that the goal of a move selects, and the operator's settings for it.

use std::time::Duration;

use godwit_types::{Intent, PageInUse};
use serde::Deserialize;

use crate::policy::{
    DEFAULT_SWITCHOVER_BUDGET, DEFAULT_SWITCHOVER_LIMIT, LEAST_THROTTLED_SHARE,
    MOST_SWITCHOVER_BUDGET, MOST_THROTTLED_SHARE, PageIn, Policy, Throttling,
};

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
            self.applied_to(Policy::of(intent, DEFAULT_SWITCHOVER_BUDGET, PageInUse::default()));
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

impl Policy {
    /// Returns the policy of a goal, with this switchover budget.
    #[must_use]
    pub fn of(intent: Intent, switchover_budget: Duration, page_in: PageInUse) -> Policy {
        let page_in = match (page_in, intent) {
            (PageInUse::Never, _) => PageIn::Never,
            (PageInUse::Now, _) => PageIn::Now,
            (PageInUse::Allowed, Intent::FastEvacuation) => PageIn::InsteadOfThrottle,
            (PageInUse::Allowed, _) => PageIn::LastResort,
        };
        let policy = Policy { switchover_budget, page_in, ..Policy::default() };
        match intent {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_otherwise_holds_and_nonsense_is_named() {
        let set = |json: &str| serde_json::from_str::<PolicySettings>(json).unwrap();
        let settings = set(r#"{"throttle_to": 0.1, "longest_pause_ms": 50, "most_rounds": 12}"#);
        let policy = settings.applied_to(Policy::of(
            Intent::Auto,
            DEFAULT_SWITCHOVER_BUDGET,
            PageInUse::Never,
        ));
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
}
