//! Retries after a failed migration: the codes of `godwit_api::ErrorCode` and of the migration's
//! report, and what each means for another attempt. In all cases except `in-doubt` the guest runs
//! on at its source.

use serde::{Deserialize, Serialize};

/// Whether another attempt helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Retry {
    /// The cause disappears by itself within seconds.
    Soon,
    /// The cause may disappear by itself. Each attempt waits longer than the last.
    Later,
    /// The cause does not disappear by itself: an operator has to act.
    NeedsAPerson,
}

/// Meaning of a failure's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cause {
    /// Whether another attempt helps.
    pub retry: Retry,
    /// Whether another target may succeed. If placement chose the target, it chooses again.
    pub elsewhere: bool,
    /// The reason, for people.
    pub why: &'static str,
}

/// Code for a migration that the source no longer knows, while it runs the guest.
pub const LOST_TRACK: &str = "lost-track";
/// Code for a VM on a host that is neither the source nor the target of its job.
pub const MOVED_ELSEWHERE: &str = "moved-elsewhere";

/// Returns the meaning of a code. An unknown code needs an operator: it may be an obstacle of the
/// VM's devices (`memory-private`, `qemu-too-old`), which does not disappear with time.
#[must_use]
pub fn cause(code: &str) -> Cause {
    use Retry::{Later, NeedsAPerson, Soon};
    let (retry, elsewhere, why) = match code {
        "busy" => (Soon, false, "another operation has the VM or the host, and ends"),
        "unknown-migration" => {
            (Soon, true, "the destination's agent was restarted or gave up waiting")
        }
        LOST_TRACK => (Soon, false, "the source's agent was restarted while it moved"),
        "lane-lost" => (Later, true, "the migration network between the two hosts was cut"),
        "peer-unreachable" => (Later, true, "the destination's agent did not answer the source's"),
        "insufficient-memory" => {
            (Later, true, "the target had less memory left than it had reported")
        }
        "not-converging" => {
            (Later, false, "the guest wrote faster than the link carries; it may do less later")
        }
        "hypervisor-failed" => (Later, true, "QEMU failed or did not start at one of the hosts"),
        "host-failed" => (Later, true, "one of the hosts failed: disk, kernel or permission"),
        "migration-failed" | "internal" => {
            (Later, false, "it was aborted without a specific cause")
        }
        "cancelled" => (NeedsAPerson, false, "it was cancelled"),
        "in-doubt" => {
            (NeedsAPerson, false, "it is unknown which host runs the guest: it must not be moved")
        }
        "stale-epoch" => (
            NeedsAPerson,
            false,
            "the source's record of the VM is outdated: check where it runs first",
        ),
        "memory-failed" => {
            (NeedsAPerson, false, "guest memory could not be read, written or tracked")
        }
        "preflight" => (NeedsAPerson, true, "a check found that the VM cannot move there"),
        "not-found" => {
            (NeedsAPerson, true, "the VM, or a network or file that it needs, does not exist there")
        }
        "already-exists" => (NeedsAPerson, true, "the target has a VM of that name"),
        "forbidden" => (NeedsAPerson, true, "a certificate does not allow it"),
        "peer-version" | "version-mismatch" | "memory-mismatch" => {
            (NeedsAPerson, true, "the releases of the two agents are incompatible")
        }
        "protocol-broken" => (NeedsAPerson, true, "one agent could not read what the other sent"),
        "wrong-state" => (NeedsAPerson, false, "the VM's state does not allow a move"),
        "invalid-request" | "too-many-streams" => (NeedsAPerson, false, "the request is invalid"),
        "guest-shut-down" => {
            (NeedsAPerson, false, "the guest shut itself down: a stopped VM does not move")
        }
        "firmware-written" => (Soon, false, "the guest was writing variables of its firmware"),
        MOVED_ELSEWHERE => (NeedsAPerson, false, "the VM was moved to another host meanwhile"),
        _ => (
            NeedsAPerson,
            false,
            "this manager knows no code of that name, so a retry may never succeed",
        ),
    };
    Cause { retry, elsewhere, why }
}

/// Waits before further attempts. Each wait is twice the one before, up to a limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetryPolicy {
    /// First wait for a cause that disappears soon.
    pub soon_ms: u64,
    /// Longest wait for a cause that disappears soon.
    pub soon_cap_ms: u64,
    /// First wait for a cause that may take longer.
    pub later_ms: u64,
    /// Longest wait for a cause that may take longer.
    pub later_cap_ms: u64,
    /// First wait for a guest that writes too much; its longest is `later_cap_ms` too.
    pub not_converging_ms: u64,
    /// Attempts after which a job is given up, whatever the causes.
    pub most_attempts: u32,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy {
            soon_ms: 5_000,
            soon_cap_ms: 60_000,
            later_ms: 30_000,
            later_cap_ms: 1_800_000,
            not_converging_ms: 600_000,
            most_attempts: 8,
        }
    }
}

/// What follows a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Verdict {
    /// The job waits at least until `at_ms`; `elsewhere` as in [`Cause`].
    Again { at_ms: u64, elsewhere: bool, why: String },
    /// The job has failed.
    GiveUp { elsewhere: bool, why: String },
}

impl RetryPolicy {
    /// Decides what follows after the `failed_attempts`th attempt (from 1) failed with this code.
    #[must_use]
    pub fn after(&self, code: &str, failed_attempts: u32, now_ms: u64) -> Verdict {
        let Cause { retry, elsewhere, why } = cause(code);
        let (first_ms, cap_ms) = match retry {
            Retry::NeedsAPerson => return Verdict::GiveUp { elsewhere, why: why.to_owned() },
            Retry::Soon => (self.soon_ms, self.soon_cap_ms),
            Retry::Later if code == "not-converging" => (self.not_converging_ms, self.later_cap_ms),
            Retry::Later => (self.later_ms, self.later_cap_ms),
        };
        if failed_attempts >= self.most_attempts {
            let why = format!("{failed_attempts} attempts failed; the last: {why}");
            return Verdict::GiveUp { elsewhere, why };
        }
        let doublings = failed_attempts.saturating_sub(1);
        let wait_ms =
            first_ms.saturating_mul(1_u64.checked_shl(doublings).unwrap_or(u64::MAX)).min(cap_ms);
        Verdict::Again { at_ms: now_ms.saturating_add(wait_ms), elsewhere, why: why.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All codes of agents and reports, as listed in docs/api.md.
    const CODES: [&str; 28] = [
        "invalid-request",
        "not-found",
        "already-exists",
        "wrong-state",
        "busy",
        "forbidden",
        "insufficient-memory",
        "preflight",
        "hypervisor-failed",
        "peer-unreachable",
        "peer-version",
        "migration-failed",
        "cancelled",
        "in-doubt",
        "host-failed",
        "version-mismatch",
        "unknown-migration",
        "memory-mismatch",
        "protocol-broken",
        "memory-failed",
        "not-converging",
        "stale-epoch",
        "internal",
        "lane-lost",
        "too-many-streams",
        "guest-shut-down",
        "firmware-written",
        "unknown",
    ];

    #[test]
    fn every_code_of_agents_is_known() {
        let unknown = cause("from-the-future").why;
        for code in CODES.into_iter().filter(|code| *code != "unknown") {
            assert_ne!(cause(code).why, unknown, "{code}");
        }
        assert_eq!(cause("unknown").retry, Retry::NeedsAPerson);
        assert_eq!(cause("memory-private").retry, Retry::NeedsAPerson);
    }

    #[test]
    fn waits_double_up_to_a_limit_and_end() {
        let policy = RetryPolicy::default();
        let wait = |code: &str, failed| match policy.after(code, failed, 1000) {
            Verdict::Again { at_ms, .. } => at_ms - 1000,
            Verdict::GiveUp { .. } => 0,
        };
        let waits: Vec<u64> = (1..=8).map(|failed| wait("lane-lost", failed)).collect();
        assert_eq!(waits, [30_000, 60_000, 120_000, 240_000, 480_000, 960_000, 1_800_000, 0]);
        assert_eq!((wait("busy", 1), wait("busy", 7)), (5_000, 60_000));
        assert_eq!((wait("not-converging", 1), wait("not-converging", 3)), (600_000, 1_800_000));
        let many = RetryPolicy { most_attempts: u32::MAX, ..policy };
        assert_eq!(
            many.after("busy", 200, 0),
            Verdict::Again { at_ms: 60_000, elsewhere: false, why: cause("busy").why.to_owned() }
        );
    }

    #[test]
    fn a_job_in_doubt_is_not_retried() {
        let policy = RetryPolicy::default();
        for code in ["in-doubt", "stale-epoch", "cancelled", "no-such-code"] {
            assert!(matches!(policy.after(code, 1, 0), Verdict::GiveUp { .. }), "{code}");
        }
    }
}
