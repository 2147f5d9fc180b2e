//! What the hosts themselves say, put into a report: a dry run of the source's agent, which also asks the target's.

use godwit_api::control::{Check, CheckName, PreflightReport, Problem, Verdict};
use godwit_types::{DryRun, Means, Predicted};

use super::{Found, judge};

/// What only the hosts can answer, in a report that they were asked for.
pub fn with_dry_run(report: &mut PreflightReport, dry_run: DryRun) {
    let to = &report.to;
    match &dry_run.error {
        Some(error) => {
            let found =
                Found::fail(format!("{} ({})", error.message, error.code), error.remedy.clone());
            set(&mut report.checks, CheckName::Agents, found);
        }
        None => {
            let found =
                Found::pass(format!("the agents of both hosts would let it go to host {to}"));
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

/// The source's agent did not tell.
pub(crate) fn without_answer(report: &mut PreflightReport, problem: &Problem) {
    let found = Found::unknown(format!("no dry run: {}", problem.detail), problem.remedy.clone());
    set(&mut report.checks, CheckName::Agents, found);
    judge(report);
}

/// What the target's agent has looked at by itself, and let pass.
fn answered(checks: &mut [Check], to: &str) {
    use CheckName as N;
    let by_target =
        [N::Disks, N::Cpu, N::MachineType, N::Lanes, N::Networks, N::Protocol, N::Accelerator];
    for check in checks.iter_mut().filter(|check| by_target.contains(&check.name)) {
        let is_answered = match check.name {
            // Seen by its link, and by its own version: what was doubted was tried.
            N::Disks | N::Protocol | N::Lanes => check.verdict != Verdict::Pass,
            _ => check.verdict == Verdict::Unknown,
        };
        if is_answered {
            let found =
                Found::pass(format!("the agent of host {to} has looked, and would take it"));
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
            let evidence = format!("it would be given up after about {seconds:.1} s{why}");
            return Found::fail(
                evidence,
                "move it when it writes less, allow page-in, or give the lanes more",
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
