//! Where a VM can go: placement's ranking, with what preflight has found.

use godwit_api::control::{
    Check, CheckName, PlacementScore, PreflightRanking, Problem, ProblemCode, RankedHost,
    RuledOutHost, Verdict,
};
use godwit_planner::placement::{Exclusion, Host, Obstacles, Rule, Score, rank};
use godwit_planner::words::Count;

use super::{Found, Subject};
use crate::cluster::planner_input::placement_vm;

/// Hosts that a message names, with what rules them out.
const NAMED_HOSTS: usize = 3;

impl Subject<'_> {
    /// All hosts, best first, and those that can't take it.
    pub(crate) fn ranking(&self, hosts: &[Host], rules: &[Rule]) -> PreflightRanking {
        let ranking = rank(hosts, rules, &placement_vm(self.vm.info), &self.obstacles());
        let fits = ranking.fits.into_iter().map(|ranked| RankedHost {
            host: ranked.host,
            score: told(ranked.score),
            breaks: ranked.breaks,
            why: ranked.why,
        });
        let ruled_out = ranking.ruled_out.into_iter();
        PreflightRanking {
            vm: self.vm.info.name.clone(),
            from: self.from.name.to_owned(),
            immovable: self.checks().filter(|check| check.verdict == Verdict::Fail).collect(),
            fits: fits.collect(),
            ruled_out: ruled_out
                .map(|out| RuledOutHost { host: out.host, why: out.text })
                .collect(),
            best: None,
        }
    }

    /// What rules say of a target.
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
            Found::fail(broken.join("; "), "take another host, or change the rule")
        } else if !bent.is_empty() {
            Found::warn(
                format!("it would break {}", bent.join(", ")),
                "take another host, where there is one",
            )
        } else {
            Found::pass(format!("{} of it, and none is broken", Count(count, "rule")))
        };
        found.named(CheckName::Rules)
    }
}

/// The first of a ranking, with why it is; the problem, where there is none.
pub(crate) fn first(ranking: PreflightRanking) -> Result<(String, String), Problem> {
    let PreflightRanking { vm, immovable, fits, ruled_out, .. } = ranking;
    if let Some(check) = immovable.first() {
        let detail = format!("VM \"{vm}\" can't go anywhere: {}", check.evidence);
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
    let why = if named.is_empty() { "there is no other".to_owned() } else { named.join("; ") };
    let remedy = format!("see all that is in the way: /api/v1/vms/{vm}/preflight");
    Err(Problem::new(ProblemCode::NoHost, format!("no host takes VM \"{vm}\": {why}"), remedy))
}

fn told(score: Score) -> PlacementScore {
    let Score { total, memory, cpu, vcpus, lanes, clones, rules } = score;
    PlacementScore { total, memory, cpu, vcpus, lanes, clones, rules }
}
