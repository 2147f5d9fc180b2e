//! Suspension to disk: a guest continues where it was, whatever fails in between.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_api::{ClientError, ErrorCode, StopVm, VmState};
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_lab::{Hooks, LabOptions};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{BUSY, move_and_check};

/// A folder with room for a small part of a guest.
pub(crate) struct SmallFolder(pub(crate) TempDir);

impl SmallFolder {
    pub(crate) fn mount() -> Result<SmallFolder> {
        let folder = SmallFolder(tempfile::tempdir_in("/var/tmp")?);
        folder.run("mount", &["-t", "tmpfs", "-o", "size=4m", "tmpfs"])?;
        Ok(folder)
    }

    fn make_room(&self) -> Result<()> {
        self.resize("1g")
    }

    pub(crate) fn resize(&self, size: &str) -> Result<()> {
        self.run("mount", &["-o", &format!("remount,size={size}")])
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<()> {
        let done = Command::new(program).args(arguments).arg(self.0.path()).status()?;
        ensure!(done.success(), "{program} {arguments:?} failed");
        Ok(())
    }
}

impl Drop for SmallFolder {
    fn drop(&mut self) {
        // A failed test reports its own error.
        let _ = self.run("umount", &[]);
    }
}

/// Kills the agent when it reaches `point` of a request that `command` makes, and starts another.
fn cut_at(trial: &Trial, point: &str, command: &str) -> Result<()> {
    let held = trial.hold("a", &format!("host.{point}"))?;
    let mut request = trial.godwit_command(&["vm", command, "web", "--host", "a"]);
    let mut request = request.stderr(std::process::Stdio::null()).spawn()?;
    held.reached(LIMIT)?;
    trial.end_agent("a", Signal::KILL)?;
    request.wait()?;
    held.open();
    trial.start_missing()
}

fn expect_running(trial: &Trial, guest: &Guest, pid: Option<i32>) -> Result<()> {
    until("the VM runs", LIMIT, || {
        Ok((trial.vm("a", "web")?.state == VmState::Running).then_some(()))
    })?;
    ensure!(pid.is_none() || trial.vm("a", "web")?.pid == pid, "another process");
    trial.expect_whole(guest).map(drop)
}

fn expect_suspended(trial: &Trial) -> Result<()> {
    let vm = trial.vm("a", "web")?;
    ensure!(vm.state == VmState::Suspended && vm.pid.is_none(), "{vm:?}");
    ensure!(trial.hypervisors("a")?.is_empty(), "a QEMU is left");
    Ok(())
}

#[test]
fn a_suspended_guest_continues_where_it_was() -> Result<()> {
    let hooks = Hooks { holds: true, ..Hooks::default() };
    let options = LabOptions { hooks, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("suspend", options)? else { return Ok(()) };
    let folder = SmallFolder::mount()?;
    let place = folder.0.path().to_str().context("the path is not UTF-8")?.to_owned();
    trial.reconfigure("a", |config| drop(config.insert("suspend_dir".into(), place.into())))?;
    let clean = trial.traces("a")?;
    let plan = GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") };
    let mut guest = trial.guest("a", &plan)?;
    let agent = trial.agent("a");
    // Where there is no room, the guest continues.
    let pid = trial.vm("a", "web")?.pid;
    let refused = trial.ask(agent.suspend_vm("web"));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error)) if error.remedy.contains("free space")),
        "{refused:?}"
    );
    expect_running(&trial, &guest, pid)?;
    ensure!(std::fs::read_dir(folder.0.path())?.next().is_none(), "a partial file is left");
    folder.make_room()?;
    let suspended = trial.ask(agent.suspend_vm("web"))?;
    ensure!(suspended.state == VmState::Suspended && suspended.pid.is_none(), "{suspended:?}");
    expect_suspended(&trial)?;
    let refused = trial.ask(agent.stop_vm("web", StopVm::default()));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error))
            if error.code == ErrorCode::WrongState && error.remedy.contains("vm resume")),
        "{refused:?}"
    );
    // The file is for root alone, and survives its agent.
    let file = folder.0.path().join("web.guest");
    let mode = std::fs::metadata(&file)?.permissions().mode();
    ensure!(mode & 0o077 == 0, "mode {mode:o}");
    trial.end_agent("a", Signal::KILL)?;
    trial.start_missing()?;
    expect_suspended(&trial)?;
    let resumed = trial.ask(trial.agent("a").start_vm("web"))?;
    ensure!(resumed.state == VmState::Running, "{resumed:?}");
    expect_running(&trial, &guest, None)?;
    ensure!(!file.exists(), "the file remains");

    // Until the record is saved, the guest continues in its process; then in a new one.
    let pid = trial.vm("a", "web")?.pid;
    cut_at(&trial, "suspend-saved", "suspend")?;
    expect_running(&trial, &guest, pid)?;
    cut_at(&trial, "suspend-recorded", "suspend")?;
    expect_suspended(&trial)?;
    cut_at(&trial, "resume-loaded", "resume")?;
    expect_suspended(&trial)?;
    cut_at(&trial, "resume-recorded", "resume")?;
    expect_running(&trial, &guest, None)?;
    ensure!(!file.exists(), "the file remains");

    // A damaged file is refused, and nothing is lost by that.
    trial.ask(trial.agent("a").suspend_vm("web"))?;
    let whole = std::fs::read(&file)?;
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    std::fs::write(&file, &damaged)?;
    let refused = trial.ask(trial.agent("a").start_vm("web"));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error)) if error.message.contains("damaged")),
        "{refused:?}"
    );
    expect_suspended(&trial)?;
    std::fs::write(&file, &whole)?;
    trial.ask(trial.agent("a").start_vm("web"))?;
    expect_running(&trial, &guest, None)?;
    move_and_check(&trial, &mut guest)?;
    move_and_check(&trial, &mut guest)?;

    trial.ask(trial.agent("a").suspend_vm("web"))?;
    ensure!(trial.ask(trial.agent("a").delete_vm("web")).is_err(), "deleted with its memory");
    trial.ask(trial.agent("a").give_up_vm("web"))?;
    ensure!(!file.exists(), "the file of a deleted VM remains");
    trial.expect_traces("a", &clean)?;
    trial.finish()
}
