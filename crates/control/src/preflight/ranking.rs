//! Targets of a VM: the ranking by placement, with the results of preflight.

use godwit_api::control::{
    Check, CheckName, PreflightRanking, Problem, ProblemCode, RuledOutHost, Verdict,
};
use godwit_planner::placement::{Exclusion, Host, Obstacles, Rule, rank};
use godwit_planner::words::Count;

use super::Subject;
use super::found::Found;
use crate::cluster::planner_input::placement_vm;

/// Most hosts that a message names with their obstacles.
const NAMED_HOSTS: usize = 3;

impl Subject<'_> {
    /// Ranks all hosts, best first, and lists those that cannot take the VM.
    pub(crate) fn ranking(&self, hosts: &[Host], rules: &[Rule]) -> PreflightRanking {
        let ranking = rank(hosts, rules, &placement_vm(self.vm.info), &self.obstacles());
        let ruled_out = ranking.ruled_out.into_iter();
        PreflightRanking {
            vm: self.vm.info.name.clone(),
            from: self.from.name.to_owned(),
            immovable: self.checks().filter(|check| check.verdict == Verdict::Fail).collect(),
            fits: ranking.fits,
            ruled_out: ruled_out
                .map(|out| RuledOutHost { host: out.host, why: out.text })
                .collect(),
            best: None,
        }
    }

    /// Returns the check of a target against the placement rules.
    pub(crate) fn rules_check(&self, to: &str, hosts: &[Host], rules: &[Rule]) -> Check {
        let name = &self.vm.info.name;
        let count = rules.iter().filter(|rule| rule.vms.contains(name)).count();
        if count == 0 {
            return Found::pass("no rule names it").named(CheckName::Rules);
        }
        let ranking = rank(hosts, rules, &placement_vm(self.vm.info), &Obstacles::new());
        let out =
            ranking.ruled_out.iter().filter(|out| out.host == to).flat_map(|out| &out.reasons);
        let broken: Vec<String> = out
            .filter(|reason| matches!(reason, Exclusion::Rule { .. }))
            .map(ToString::to_string)
            .collect();
        let bent = ranking
            .fits
            .iter()
            .find(|ranked| ranked.host == to)
            .map_or(&[][..], |ranked| &ranked.breaks);
        let found = if !broken.is_empty() {
            Found::fail(broken.join("; "), "choose another host, or change the rule")
        } else if !bent.is_empty() {
            Found::warn(
                format!("it would break {}", bent.join(", ")),
                "choose another host if there is one",
            )
        } else {
            Found::pass(format!("{} for it, none broken", Count(count, "rule")))
        };
        found.named(CheckName::Rules)
    }
}

/// Returns the best host of a ranking and the reason for it, or the problem if there is none.
pub(crate) fn first(ranking: PreflightRanking) -> Result<(String, String), Problem> {
    let PreflightRanking { vm, immovable, fits, ruled_out, .. } = ranking;
    if let Some(check) = immovable.first() {
        let detail = format!("VM \"{vm}\" cannot move to any host: {}", check.evidence);
        let remedy = check.remedy.clone();
        return Err(Problem {
            checks: immovable.into(),
            ..Problem::new(ProblemCode::Preflight, detail, remedy)
        });
    }
    if let Some(best) = fits.into_iter().next() {
        return Ok((best.host, best.why));
    }
    let others: Vec<_> =
        ruled_out.iter().filter(|out| out.why != Exclusion::RunsThere.to_string()).collect();
    let named = others.iter().take(NAMED_HOSTS).map(|out| format!("{}: {}", out.host, out.why));
    let mut named: Vec<String> = named.collect();
    match others.len().saturating_sub(NAMED_HOSTS) {
        0 => {}
        more => named.push(format!("and {more} more")),
    }
    let why = if named.is_empty() { "there is no other host".to_owned() } else { named.join("; ") };
    let remedy = format!("see the complete report: /api/v1/vms/{vm}/preflight");
    Err(Problem::new(ProblemCode::NoHost, format!("no host can take VM \"{vm}\": {why}"), remedy))
}
