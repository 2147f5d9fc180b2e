//! `godwit-lab guest`: finds a guest's address through the lab's agents and asks the guest.

use std::net::IpAddr;

use anyhow::{Context, Result, anyhow, bail};
use godwit_api::{Client, Endpoint, ErrorCode};
use godwit_guest::control::{Answer, Request};
use godwit_lab::{LabName, LabStatus, ask_guest, status};

use crate::args::GuestCommand;

pub(crate) fn run(
    name: &LabName,
    vm: &str,
    address: Option<IpAddr>,
    command: GuestCommand,
) -> Result<Answer> {
    let lab = status(name)?;
    let client = lab.client.as_ref().context("no lab is up; `godwit-lab up` brings one up")?;
    let address = match address {
        Some(address) => address,
        None => find_address(&lab, vm)?,
    };
    let request = match command {
        GuestCommand::Status => Request::Status {},
        GuestCommand::Verify => Request::Verify {},
        GuestCommand::Workload { spec } => Request::Workload { spec },
    };
    ask_guest(&client.namespace, address, &request).map_err(|error| {
        anyhow!(
            "{error:#}; check that VM {vm} has booted and is the lab's guest: `godwit vm logs {vm}`"
        )
    })
}

/// Returns the address of the first NIC that has one. It is the same on each host that has the VM.
fn find_address(lab: &LabStatus, vm: &str) -> Result<IpAddr> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut failures = Vec::new();
    for host in &lab.hosts {
        let endpoint: Endpoint =
            host.api.parse().with_context(|| format!("the agent of host {}", host.name))?;
        match runtime.block_on(Client::new(endpoint).vm(vm)) {
            Ok(found) => {
                return found.addresses.first().copied().with_context(|| {
                    format!(
                        "VM {vm} has no known address; give one with --address, or at its creation"
                    )
                });
            }
            Err(error) if error.code() == Some(ErrorCode::NotFound) => {}
            Err(error) => failures.push(format!("host {}: {error}", host.name)),
        }
    }
    if failures.is_empty() {
        bail!("no host of the lab has a VM {vm}; `godwit vm list` shows the VMs");
    }
    bail!("cannot find VM {vm}: {}", failures.join("; "))
}

/// Formats an answer as a line for each field.
pub(crate) fn describe(answer: &Answer) -> String {
    let value = serde_json::to_value(answer).unwrap_or_default();
    let fields = value.as_object().into_iter().flatten();
    let width = fields.clone().map(|(key, _)| key.len()).max().unwrap_or(0) + 1;
    let plain =
        |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    fields.map(|(key, value)| format!("{:<width$} {}\n", format!("{key}:"), plain(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_shown_a_field_a_line() {
        let answer =
            Answer { ok: true, workload: "idle".to_owned(), pages: 7, ..Answer::default() };
        let text = describe(&answer);
        for line in ["ok:               true", "pages:            7", "workload:         idle"] {
            assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
        }
    }

    #[test]
    fn without_a_lab_the_remedy_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let name = LabName { prefix: "gwnone".to_owned(), state_dir: directory.path().join("lab") };
        let error = run(&name, "web", None, GuestCommand::Verify).unwrap_err();
        assert!(error.to_string().contains("godwit-lab up"), "{error}");
    }
}
