//! Location of the guest according to both agents, and its files on its host.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use godwit_api::{ClientError, ErrorCode, VmInfo, VmState};

use crate::trial::{LIMIT, Trial, until};

/// Longest time for the agents to agree after the repair, without an operator.
const AGREE_LIMIT: Duration = Duration::from_secs(60);

/// Reason that an agent gives for a VM whose guest has powered itself off.
const SHUT_ITSELF_DOWN: &str = "the guest shut itself down";

/// Waits until both agents agree where the guest is: it runs on one host and the other does not
/// know it, or it has ended and its host says so. Adds descriptions of an unhealthy VM to
/// `reported`. Returns the host that runs the guest; `None` if the guest has ended.
///
/// # Errors
/// The agents do not agree within a minute.
pub fn settled(trial: &Trial, vm: &str, reported: &mut Vec<String>) -> Result<Option<String>> {
    let settled = until("both agents agree where the guest is", AGREE_LIMIT, || {
        let infos = infos(trial, vm)?;
        let running: Vec<&VmInfo> = infos.iter().filter(|info| is_well(info)).collect();
        let ended = |info: &VmInfo| {
            matches!(info.state, VmState::Failed | VmState::Stopped) && !info.in_doubt
        };
        match (&infos[..], &running[..]) {
            ([info], [_]) => Ok(Some(Some(info.host.clone()))),
            (known, []) if !known.is_empty() && known.iter().all(ended) => Ok(Some(None)),
            _ => bail!("{}", describe(&infos)),
        }
    });
    if !matches!(settled, Ok(Some(_))) {
        reported.extend(
            infos(trial, vm).iter().flatten().filter(|info| !is_well(info)).map(describe_one),
        );
    }
    settled
}

/// Checks that a VM whose guest has shut itself down is stopped on exactly one host, with that
/// reason. Returns that host.
///
/// # Errors
/// It is not stopped so, or it is stopped on several hosts.
pub(super) fn expect_stopped_once(trial: &Trial, vm: &str) -> Result<String> {
    let infos = infos(trial, vm)?;
    match &infos[..] {
        [info]
            if info.state == VmState::Stopped
                && info.reason.as_deref() == Some(SHUT_ITSELF_DOWN) =>
        {
            Ok(info.host.clone())
        }
        _ => bail!("the VM is not stopped by its guest on exactly one host: {}", describe(&infos)),
    }
}

/// Checks that no two hosts claim to run the VM, and that the host of `in_doubt` reports that it is
/// in doubt.
///
/// # Errors
/// More than one host claims to run it, or that host is not in doubt.
pub(super) fn expect_run_once(trial: &Trial, vm: &str, in_doubt: Option<&str>) -> Result<()> {
    let infos = infos(trial, vm)?;
    let running = infos.iter().filter(|info| info.state == VmState::Running).count();
    ensure!(running <= 1, "the guest runs on {running} hosts: {}", describe(&infos));
    if let Some(host) = in_doubt {
        let knows_not = infos.iter().any(|info| info.host == host && info.in_doubt);
        ensure!(knows_not, "host {host} does not report that it is in doubt: {}", describe(&infos));
    }
    Ok(())
}

/// Checks that every host that knows the VM has it paused and in doubt, and that there are two.
///
/// # Errors
/// They are not.
pub(super) fn expect_doubt_at_both(trial: &Trial, vm: &str) -> Result<()> {
    let infos = infos(trial, vm)?;
    let is_held = |info: &VmInfo| info.in_doubt && info.state == VmState::Paused;
    let are_held = infos.len() == 2 && infos.iter().all(is_held);
    ensure!(are_held, "the VM is not paused and in doubt on both hosts: {}", describe(&infos));
    Ok(())
}

fn is_well(info: &VmInfo) -> bool {
    info.state == VmState::Running && !info.in_doubt && info.page_in.is_none()
}

/// Returns the VM's state on each host. Hosts that do not know the VM are left out.
fn infos(trial: &Trial, vm: &str) -> Result<Vec<VmInfo>> {
    let mut infos = Vec::new();
    for host in trial.hosts() {
        match trial.vm(&host, vm) {
            Ok(info) => infos.push(info),
            Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("host {host}")),
        }
    }
    Ok(infos)
}

fn describe(infos: &[VmInfo]) -> String {
    let all: Vec<String> = infos.iter().map(describe_one).collect();
    if all.is_empty() { "no host knows the VM".to_owned() } else { all.join("; ") }
}

fn describe_one(info: &VmInfo) -> String {
    let doubt = if info.in_doubt { ", in doubt" } else { "" };
    let lacks = info.page_in.map(|page_in| format!(", lacks {} pages", page_in.missing_pages));
    let reason = info.reason.as_ref().map(|reason| format!(": {reason}"));
    format!(
        "VM {} at host {}{doubt}{}{}",
        info.state,
        info.host,
        lacks.unwrap_or_default(),
        reason.unwrap_or_default()
    )
}

/// Deletes a VM that has ended from every host that knows it.
///
/// # Errors
/// An agent refuses the request.
pub fn remove_ended(trial: &Trial, vm: &str) -> Result<()> {
    for info in infos(trial, vm)? {
        let agent = trial.agent(&info.host);
        trial
            .ask(agent.delete_vm(vm))
            .with_context(|| format!("cannot delete {}", describe_one(&info)))?;
    }
    Ok(())
}

/// Files, as paths below the host's folder, and number of network links of a VM on the host that
/// runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OwnersFiles {
    files: BTreeSet<PathBuf>,
    links: usize,
}

impl OwnersFiles {
    /// Returns the present files and links of a host.
    pub(super) fn of(trial: &Trial, host: &str) -> Result<OwnersFiles> {
        let root = trial.paths().host(host);
        let traces = trial.traces(host)?;
        let below = |path: PathBuf| path.strip_prefix(&root).map(PathBuf::from).unwrap_or(path);
        Ok(OwnersFiles {
            files: traces.files.into_iter().map(below).collect(),
            links: traces.links.len(),
        })
    }

    /// Waits until a host has exactly these files and links.
    pub(super) fn expect(&self, trial: &Trial, host: &str) -> Result<()> {
        until(&format!("host {host} has no more of the guest than it needs"), LIMIT, || {
            let found = OwnersFiles::of(trial, host)?;
            let more: Vec<_> = found.files.difference(&self.files).collect();
            let fewer: Vec<_> = self.files.difference(&found.files).collect();
            ensure!(
                found == *self,
                "more: {more:?}, fewer: {fewer:?}, {} links for {}",
                found.links,
                self.links
            );
            Ok(Some(()))
        })
    }
}
