//! Problems that requests about several resources report.

use godwit_api::control::{Problem, ProblemCode};

pub(crate) fn no_host(name: &str) -> Problem {
    let detail = format!("unknown host \"{name}\"");
    Problem::new(ProblemCode::NotFound, detail, "see `godwit control host list`")
}

/// Returns the problem of a host whose agent is unreachable, for the given reason.
pub(crate) fn host_away(host: &str, why: &str) -> Problem {
    let detail = format!("host {host} is away: {why}; the state of its VMs is unknown");
    Problem::new(ProblemCode::HostAway, detail, AWAY_REMEDY)
}

/// What to do about a host that is away.
pub(crate) const AWAY_REMEDY: &str = "check the host's power, network and agent \
    (`godwit control host show`), then try again; if it is dead, see docs/recover.md";

pub(crate) fn no_vm(vm: &str) -> Problem {
    Problem::new(ProblemCode::NotFound, format!("no host has VM \"{vm}\""), "see `godwit vm list`")
}
