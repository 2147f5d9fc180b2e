//! Faults of whole hosts: without power, frozen, without their datastores; and the manager's death.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::agents::end;
use crate::mounts;
use crate::namespace::processes;
use crate::process::ProcessId;
use crate::state::{LabState, Role};
use crate::topology::LabPaths;
use crate::trial::{LIMIT, Trial, until};

impl Trial {
    /// Returns whether a host has power.
    #[must_use]
    pub fn has_power(&self, host: &str) -> bool {
        !self.paths.no_power(host).exists()
    }

    /// Cuts the power of a host until [`Trial::power_on`]: everything in its namespace ends at
    /// once. The first host's namespace has the manager, too.
    ///
    /// # Errors
    /// A process does not end.
    pub fn power_off(&self, host: &str) -> Result<()> {
        cut(&self.paths, host, &self.namespace(host))
    }

    /// Gives a host power again. Its agent starts with [`Trial::start_missing`], the first after a
    /// boot.
    ///
    /// # Errors
    /// Something runs there, or a file cannot be removed.
    pub fn power_on(&self, host: &str) -> Result<()> {
        let left = running(&self.namespace(host))?;
        ensure!(left.is_empty(), "on host {host} run {left:?}");
        self.forget_boot(host)?;
        std::fs::remove_file(self.paths.no_power(host)).context("cannot restore the power")
    }

    /// Stops all processes of a host for a while, or lets them go on. Those that have ended
    /// meanwhile are left out.
    ///
    /// # Errors
    /// The host cannot be examined.
    pub fn freeze_host(&self, host: &str, is_frozen: bool) -> Result<()> {
        let how = if is_frozen { Signal::STOP } else { Signal::CONT };
        signal(&running(&self.namespace(host))?, how);
        Ok(())
    }

    /// Returns how far the boot clock of a host is ahead of the machine's, in seconds.
    pub(crate) fn boot_clock_ahead_s(&self, host: &str) -> u32 {
        self.options.hooks.boot_clocks_ahead_s.get(host).copied().unwrap_or_default()
    }

    /// Takes a directory away from one host: names lead into an empty one, and what is open stays
    /// open. [`Trial::show_directory`] undoes it.
    ///
    /// # Errors
    /// The lab has no mount namespaces, or the directory is unknown.
    pub fn hide_directory(&self, host: &str, directory: &Path, empty: &Path) -> Result<()> {
        ensure!(self.options.hooks.mounts, "the hosts of this lab share their mounts");
        mounts::cover(&self.paths, host, directory, empty)
    }

    /// Gives a directory back to a host.
    ///
    /// # Errors
    /// It was not hidden.
    pub fn show_directory(&self, host: &str, directory: &Path) -> Result<()> {
        mounts::uncover(&self.paths, host, directory)
    }

    /// Ends the manager as a crash would. [`Trial::start_missing`] starts it again.
    ///
    /// # Errors
    /// It does not run, or does not end.
    pub fn kill_manager(&self) -> Result<()> {
        let state = LabState::load(&self.paths).context("the lab has no state")?;
        let manager = state.process(&Role::Manager).context("the lab has no manager")?;
        end(manager, Signal::KILL)
    }
}

/// Cuts the power of a host, whose network namespace this is.
pub(crate) fn cut(paths: &LabPaths, host: &str, namespace: &str) -> Result<()> {
    File::create(paths.no_power(host)).context("cannot cut the power")?;
    until(&format!("nothing runs on host {host}"), LIMIT, || {
        let left = running(namespace)?;
        signal(&left, Signal::KILL);
        Ok(left.is_empty().then_some(()))
    })
}

/// Returns what runs in a namespace.
fn running(namespace: &str) -> Result<Vec<ProcessId>> {
    Ok(processes(namespace)?.into_iter().filter_map(ProcessId::of).collect())
}

/// Sends a signal. A process that has ended is as good as one that has the signal.
fn signal(to: &[ProcessId], signal: Signal) {
    for pid in to.iter().filter_map(|id| Pid::from_raw(id.pid)) {
        let _ = kill_process(pid, signal);
    }
}
