//! Crashes of a VM on this host, and what its policy makes of them. Pure: reads no clock and does
//! no I/O.
//!
//! A restart counts from the moment at which it is planned, so that an agent that ends in the
//! middle of one has counted it. The count is this host's: it begins anew where the VM moves to.

use std::time::Duration;

use godwit_api::{CrashCause, LastCrash};
use godwit_qemu::{OnCrash, Uuid};
use godwit_types::Incarnation;
use serde::{Deserialize, Serialize};

/// Time within which restarts count.
const COUNTED_MS: u64 = 3_600_000;
/// Wait before the first restart within [`COUNTED_MS`]; it doubles with each.
const FIRST_WAIT_MS: u64 = 1_000;
/// Longest wait before a restart.
const LONGEST_WAIT_MS: u64 = 300_000;
/// Time within which the same cause is noted once.
const JUST_NOTED_MS: u64 = 10_000;
/// Most restarts that are remembered. With these waits, an hour has fewer.
const MOST_REMEMBERED: usize = 128;

/// What a host knows of a VM's crashes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Crashes {
    /// The VM that they are of: its name may be another one's by now.
    uuid: Uuid,
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    incarnation: Incarnation,
    last: Option<Crash>,
    /// Times of the planned restarts, in milliseconds since 1970.
    #[serde(default)]
    restarts_unix_ms: Vec<u64>,
    /// Boot of the host in which a planned restart is still to come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    awaited_in_boot: Option<String>,
    /// Number of the plan, among those of this agent.
    #[serde(skip)]
    plan: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Crash {
    at_unix_ms: u64,
    how: CrashCause,
}

/// What follows a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The VM is restarted after that time, for the `number`th time within an hour.
    Restart { after: Duration, number: u32 },
    /// It stays down: its policy is to restart it never.
    NoPolicy,
    /// It stays down: its policy allows no further restart within the hour.
    Limit(u32),
}

impl Crashes {
    /// Returns those of a VM, or none if these are another VM's.
    #[must_use]
    pub(crate) fn of(self, uuid: Uuid, incarnation: Incarnation) -> Crashes {
        match (self.uuid, self.incarnation) == (uuid, incarnation) {
            true => self,
            false => Crashes { uuid, incarnation, ..Crashes::default() },
        }
    }

    /// Notes a crash.
    pub(crate) fn note(&mut self, how: CrashCause, now_unix_ms: u64) {
        self.last = Some(Crash { at_unix_ms: now_unix_ms, how });
        self.awaited_in_boot = None;
        self.forget_old(now_unix_ms);
    }

    /// Plans what follows the last crash, or a restart that failed. A restart is counted.
    pub(crate) fn plan(&mut self, policy: OnCrash, boot_id: &str, now_unix_ms: u64) -> Next {
        self.forget_old(now_unix_ms);
        self.awaited_in_boot = None;
        match policy {
            OnCrash::Never => return Next::NoPolicy,
            OnCrash::Times(most) if self.count() >= most => return Next::Limit(most),
            OnCrash::Times(_) | OnCrash::Always => {}
        }
        let after = wait(self.count());
        self.restarts_unix_ms.push(now_unix_ms);
        self.awaited_in_boot = Some(boot_id.to_owned());
        self.plan = self.plan.wrapping_add(1);
        Next::Restart { after, number: self.count() }
    }

    /// Returns the restart that an earlier agent of the same boot has planned and not made.
    #[must_use]
    pub(crate) fn awaited(&self, boot_id: &str) -> Option<Next> {
        let is_awaited = self.awaited_in_boot.as_deref() == Some(boot_id) && !boot_id.is_empty();
        let restart =
            || Next::Restart { after: wait(self.count().saturating_sub(1)), number: self.count() };
        is_awaited.then(restart)
    }

    /// Returns the number of the newest plan. A later crash makes another one.
    #[must_use]
    pub(crate) fn plan_number(&self) -> u64 {
        self.plan
    }

    /// Notes that no restart is to come; returns whether one was.
    pub(crate) fn end_wait(&mut self) -> bool {
        self.awaited_in_boot.take().is_some()
    }

    /// Notes that the restart of a plan is not to come. Returns false if none was, or if a later
    /// crash has made another plan.
    pub(crate) fn end_plan(&mut self, plan: u64) -> bool {
        self.plan == plan && self.end_wait()
    }

    /// Whether a crash with this cause was noted shortly before.
    #[must_use]
    pub(crate) fn was_just_noted(&self, how: CrashCause, now_unix_ms: u64) -> bool {
        self.last.is_some_and(|last| {
            last.how == how && now_unix_ms.abs_diff(last.at_unix_ms) < JUST_NOTED_MS
        })
    }

    /// Returns what users see of the last crash.
    #[must_use]
    pub(crate) fn shown(&self) -> Option<LastCrash> {
        let Crash { at_unix_ms, how } = self.last?;
        let restarting = self.awaited_in_boot.is_some();
        Some(LastCrash { at_unix_ms, how, restarts: self.count(), restarting })
    }

    fn count(&self) -> u32 {
        u32::try_from(self.restarts_unix_ms.len()).unwrap_or(u32::MAX)
    }

    /// Forgets restarts that no longer count. The host's clock may have been set back.
    fn forget_old(&mut self, now_unix_ms: u64) {
        self.restarts_unix_ms.retain(|at| now_unix_ms.abs_diff(*at) < COUNTED_MS);
        let surplus = self.restarts_unix_ms.len().saturating_sub(MOST_REMEMBERED);
        self.restarts_unix_ms.drain(..surplus);
    }
}

/// Returns the wait before a restart that follows `earlier` others.
fn wait(earlier: u32) -> Duration {
    let doubled = FIRST_WAIT_MS.saturating_mul(1_u64.checked_shl(earlier).unwrap_or(u64::MAX));
    Duration::from_millis(doubled.min(LONGEST_WAIT_MS))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOOT: &str = "this boot";

    fn restart(seconds: u64, number: u32) -> Next {
        Next::Restart { after: Duration::from_secs(seconds), number }
    }

    #[test]
    fn waits_double_and_the_limit_ends_the_restarts() {
        let (mut crashes, policy) = (Crashes::default(), OnCrash::Times(3));
        for (at, expected) in
            [(0, restart(1, 1)), (10, restart(2, 2)), (20, restart(4, 3)), (30, Next::Limit(3))]
        {
            crashes.note(CrashCause::QemuEnded, at);
            assert_eq!(crashes.plan(policy, BOOT, at), expected);
            let shown = crashes.shown().unwrap();
            assert_eq!(shown.restarting, expected != Next::Limit(3));
        }
        assert_eq!(crashes.shown().unwrap().restarts, 3);
        // The first one no longer counts.
        assert_eq!(crashes.plan(policy, BOOT, COUNTED_MS), restart(4, 3));
        assert_eq!(crashes.plan(OnCrash::Never, BOOT, COUNTED_MS), Next::NoPolicy);
    }

    #[test]
    fn a_planned_restart_survives_the_agent_and_not_the_boot() {
        let mut crashes = Crashes::default();
        crashes.note(CrashCause::Panic, 5);
        let next = crashes.plan(OnCrash::Always, BOOT, 5);
        let text = serde_json::to_vec(&crashes).unwrap();
        let mut read: Crashes = serde_json::from_slice(&text).unwrap();
        assert_eq!(read.awaited(BOOT), Some(next));
        assert_eq!(read.awaited("another boot"), None);
        let mut unknown = Crashes::default();
        unknown.plan(OnCrash::Always, "", 5);
        assert_eq!(unknown.awaited(""), None);
        assert!(read.end_wait() && !read.end_wait());
        assert_eq!(read.awaited(BOOT), None);
        let shown = read.shown().unwrap();
        assert_eq!((shown.how, shown.restarts, shown.restarting), (CrashCause::Panic, 1, false));
    }

    #[test]
    fn the_end_of_an_earlier_plan_leaves_a_newer_one() {
        let mut crashes = Crashes::default();
        crashes.note(CrashCause::Panic, 5);
        crashes.plan(OnCrash::Always, BOOT, 5);
        let earlier = crashes.plan_number();
        crashes.note(CrashCause::Panic, 10);
        assert!(!crashes.end_plan(earlier), "the crash has ended it");
        let next = crashes.plan(OnCrash::Always, BOOT, 10);
        assert!(!crashes.end_plan(earlier));
        assert_eq!(crashes.awaited(BOOT), Some(next));
        assert!(crashes.end_plan(crashes.plan_number()));
        assert_eq!(crashes.awaited(BOOT), None);
    }

    #[test]
    fn crashes_of_another_vm_of_that_name_do_not_count() {
        let (uuid, life) = (Uuid::from_u128(1), Incarnation::new(2));
        let mut crashes = Crashes::default().of(uuid, life);
        crashes.note(CrashCause::Watchdog, 1);
        assert!(crashes.was_just_noted(CrashCause::Watchdog, JUST_NOTED_MS));
        assert!(!crashes.was_just_noted(CrashCause::Watchdog, JUST_NOTED_MS + 1));
        assert!(!crashes.was_just_noted(CrashCause::Panic, 1));
        assert_eq!(crashes.clone().of(uuid, life), crashes);
        assert_eq!(crashes.clone().of(uuid, Incarnation::new(3)).shown(), None);
        assert_eq!(crashes.of(Uuid::from_u128(4), life).shown(), None);
    }

    proptest! {
        #[test]
        fn no_hour_has_more_restarts_than_the_policy_allows(
            most in 1_u32..6,
            steps in prop::collection::vec(0_u64..2_000_000, 1..80),
        ) {
            let (mut crashes, mut now, mut begun) = (Crashes::default(), 0, Vec::new());
            for step in steps {
                now += step;
                crashes.note(CrashCause::QemuEnded, now);
                if let Next::Restart { after, number } =
                    crashes.plan(OnCrash::Times(most), BOOT, now)
                {
                    prop_assert!(number <= most);
                    prop_assert!(after <= Duration::from_millis(LONGEST_WAIT_MS));
                    begun.push(now);
                }
                let within = begun.iter().filter(|at| now - **at < COUNTED_MS).count();
                prop_assert!(within <= most as usize);
            }
        }

        #[test]
        fn always_means_always_and_memory_stays_bounded(
            times in prop::collection::vec(any::<u64>(), 1..300)
        ) {
            let mut crashes = Crashes::default();
            for at in times {
                crashes.note(CrashCause::QemuEnded, at);
                let next = crashes.plan(OnCrash::Always, BOOT, at);
                let restarts = matches!(next, Next::Restart { .. });
                prop_assert!(restarts);
                prop_assert!(crashes.restarts_unix_ms.len() <= MOST_REMEMBERED + 1);
            }
        }
    }
}
