//! Answers of the hosts in a report: a dry run by the source's agent, which also asks the target's.

use godwit_api::control::{Check, CheckName, PreflightReport, Problem, Verdict};
use godwit_types::{DryRun, Means, Predicted};

use super::found::{Found, judge};

/// Adds the result of a dry run to a report.
pub fn with_dry_run(report: &mut PreflightReport, dry_run: DryRun) {
    let to = &report.to;
    match &dry_run.error {
        Some(error) => {
            let found =
                Found::fail(format!("{} ({})", error.message, error.code), error.remedy.clone());
            set(&mut report.checks, CheckName::Agents, found);
        }
        None => {
            let found = Found::pass(format!("the agents of both hosts accept a move to host {to}"));
            set(&mut report.checks, CheckName::Agents, found);
            answered(&mut report.checks, to);
        }
    }
    if let Some(predicted) = &dry_run.predicted {
        set(
            &mut report.checks,
            CheckName::Prediction,
            prediction(predicted, dry_run.why.as_deref()),
        );
    }
    report.prediction = Some(dry_run);
    judge(report);
}

/// Adds the failure of a dry run to a report.
pub(crate) fn without_answer(report: &mut PreflightReport, problem: &Problem) {
    let found = Found::unknown(format!("no dry run: {}", problem.detail), problem.remedy.clone());
    set(&mut report.checks, CheckName::Agents, found);
    judge(report);
}

/// Resolves the checks that the target's agent made itself and passed.
fn answered(checks: &mut [Check], to: &str) {
    use CheckName as N;
    let by_target = [
        N::Disks,
        N::Cpu,
        N::MachineType,
        N::Firmware,
        N::Lanes,
        N::Networks,
        N::Protocol,
        N::Accelerator,
    ];
    for check in checks.iter_mut().filter(|check| by_target.contains(&check.name)) {
        let is_answered = match check.name {
            // The agent followed the link and used its own version, which resolves a doubt.
            N::Disks | N::Protocol | N::Lanes => check.verdict != Verdict::Pass,
            _ => check.verdict == Verdict::Unknown,
        };
        if is_answered {
            let found =
                Found::pass(format!("the agent of host {to} checked this and accepts the VM"));
            *check = found.named(check.name);
        }
    }
}

fn prediction(predicted: &Predicted, why: Option<&str>) -> Found {
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    let Predicted { migration_time_ms, switchover_ms, means, .. } = predicted;
    let seconds = migration_time_ms / 1e3;
    let evidence = match means {
        Means::None => {
            let evidence = format!("the move would be abandoned after about {seconds:.1} s{why}");
            return Found::fail(
                evidence,
                "move it when it writes less, allow page-in, or add lane bandwidth",
            );
        }
        means => format!("about {seconds:.1} s, a pause of {switchover_ms:.0} ms, by {means}{why}"),
    };
    match means {
        Means::Plain => Found::pass(evidence),
        _ => Found::warn(evidence, ""),
    }
}

fn set(checks: &mut Vec<Check>, name: CheckName, found: Found) {
    checks.retain(|check| check.name != name);
    checks.push(found.named(name));
    checks.sort_by_key(|check| check.name);
}
