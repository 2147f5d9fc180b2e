//! Throttling by CPU quota: the guest moves whole, and no guest is slowed afterwards, whatever
//! happens to the agent.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{ByteSize, VcpuGroup, VmName};
use godwit_types::ThrottleMeans;
use rustix::process::Signal;

use crate::move_and_check;

/// Three times what 500 Mb/s carry.
const TOO_MUCH: &str = "dirty:rate=45000,ws=48M,order=random,zero=0,compressible=0";

fn too_busy() -> GuestPlan {
    GuestPlan {
        workload: TOO_MUCH.to_owned(),
        fill: ByteSize::from_mib(64),
        ..GuestPlan::new("web")
    }
}

/// Starts a lab whose agents slow guests by the quota only. Prints the reason and returns `None` if
/// this machine cannot make a group.
fn lab(name: &str) -> Result<Option<Trial>> {
    if let Some(missing) = no_group() {
        eprintln!("skipped: {name}: {missing}");
        return Ok(None);
    }
    let options = LabOptions { link: Some("500mbit".parse()?), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with(name, options)? else { return Ok(None) };
    for host in trial.hosts() {
        trial.reconfigure(&host, |config| {
            let means = toml::Table::from_iter([("means".to_owned(), "quota".into())]);
            config.insert("throttle".to_owned(), means.into());
        })?;
    }
    Ok(Some(trial))
}

/// Returns why this machine cannot limit the CPU time of a thread; `None` if it can.
fn no_group() -> Option<String> {
    let own = std::process::id();
    let mut group =
        VcpuGroup::new(&VmName::new("trial").ok()?, i32::try_from(own).ok()?, vec![own]);
    group.set_share(Some(1.0)).err().map(|error| error.to_string())
}

/// Returns Godwit's groups that contain threads of a process.
fn groups(pid: i32) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        let text = std::fs::read_to_string(task.path().join("cgroup")).unwrap_or_default();
        found.extend(text.lines().filter(|line| line.contains("/godwit.")).map(str::to_owned));
    }
    Ok(found)
}

/// Returns whether a directory of the process's group exists.
fn group_is_there(pid: i32) -> bool {
    let name = format!("godwit.web.{pid}");
    let groups = |root: &Path| {
        std::fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path())
    };
    let root = Path::new("/sys/fs/cgroup");
    root.join(&name).exists() || groups(root).any(|hierarchy| hierarchy.join(&name).exists())
}

#[test]
fn a_guest_that_writes_more_than_the_link_carries_moves_by_the_quota() -> Result<()> {
    let Some(trial) = lab("quota")? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    let pid = trial.vm("a", "web")?.pid.context("no process")?;
    let watched = move_and_check(&trial, &mut guest)?;
    let report = &watched.report;
    let throttle =
        report.throttle.with_context(|| format!("the guest was not slowed: {report:#?}"))?;
    ensure!(throttle.means == ThrottleMeans::Quota && throttle.faults == 0, "{throttle:?}");
    let least = throttle.least_cpu_percent.unwrap_or(100.0);
    ensure!(least < 100.0, "{throttle:?}");
    eprintln!("  vCPUs got {least:.1} % at the least, rounds {:#?}", report.rounds);
    ensure!(!group_is_there(pid), "the group of process {pid} is left");
    trial.finish()
}

/// Ends the agent with SIGKILL and with SIGTERM.
#[test]
fn no_guest_stays_slowed_once_its_agent_is_gone() -> Result<()> {
    let Some(trial) = lab("quota-crash")? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    let pid = trial.vm("a", "web")?.pid.context("no process")?;
    for signal in [Signal::KILL, Signal::TERM] {
        let _migration = trial.begin_migration("web", "a", &MigrationRequest::to("b"))?;
        let slowed = until("its vCPUs are in a group", LIMIT, || {
            let groups = groups(pid)?;
            Ok((!groups.is_empty()).then_some(groups))
        })?;
        eprintln!("  slowed in {slowed:?}");
        trial.end_agent("a", signal)?;
        if signal == Signal::TERM {
            ensure!(groups(pid)?.is_empty() && !group_is_there(pid), "{:?}", groups(pid)?);
        }
        trial.start_missing()?;
        ensure!(groups(pid)?.is_empty(), "{:?}", groups(pid)?);
        ensure!(!group_is_there(pid), "the group of process {pid} is left");
        guest.verify().context("the guest with another agent")?;
    }
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
