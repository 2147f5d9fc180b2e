//! Problems that requests about several resources report.

use godwit_api::control::{Problem, ProblemCode};

pub(crate) fn no_host(name: &str) -> Problem {
    let detail = format!("unknown host \"{name}\"");
    Problem::new(ProblemCode::NotFound, detail, "see `godwit control host list`")
}

pub(crate) fn no_vm(vm: &str) -> Problem {
    Problem::new(ProblemCode::NotFound, format!("no host has VM \"{vm}\""), "see `godwit vm list`")
}
