//! Result of one check, and the verdict of several.

use godwit_api::control::{Check, CheckName, PreflightReport, Verdict};

/// Result of a check.
pub(crate) struct Found {
    pub(super) verdict: Verdict,
    pub(super) evidence: String,
    pub(super) remedy: String,
}

impl Found {
    pub(super) fn new(
        verdict: Verdict,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Found {
        Found { verdict, evidence: evidence.into(), remedy: remedy.into() }
    }

    pub(super) fn pass(evidence: impl Into<String>) -> Found {
        Found::new(Verdict::Pass, evidence, "")
    }

    pub(super) fn warn(evidence: impl Into<String>, remedy: impl Into<String>) -> Found {
        Found::new(Verdict::Warn, evidence, remedy)
    }

    pub(super) fn unknown(evidence: impl Into<String>, remedy: impl Into<String>) -> Found {
        Found::new(Verdict::Unknown, evidence, remedy)
    }

    pub(super) fn fail(evidence: impl Into<String>, remedy: impl Into<String>) -> Found {
        Found::new(Verdict::Fail, evidence, remedy)
    }

    pub(super) fn named(self, name: CheckName) -> Check {
        Check { name, verdict: self.verdict, evidence: self.evidence, remedy: self.remedy }
    }
}

/// Sets the verdict of a report to the worst of its checks.
pub(crate) fn judge(report: &mut PreflightReport) {
    report.verdict =
        report.checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Unknown);
}
