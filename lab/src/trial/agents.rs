//! The hosts' agents as processes: ended hard, restarted, reconfigured.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::process::{ProcessId, wait_readable};
use crate::state::write_whole;
use crate::trial::{LIMIT, Trial};
use crate::{agents as files, status};

impl Trial {
    /// Returns the process of a host's agent.
    ///
    /// # Errors
    /// It does not run.
    pub fn agent_process(&self, host: &str) -> Result<ProcessId> {
        let lab = status(&self.options.name())?;
        let agent =
            lab.hosts.into_iter().find(|found| found.name == host).and_then(|host| host.agent);
        agent.with_context(|| format!("the agent of host {host} does not run"))
    }

    /// Ends a host's agent as a crash would, or with SIGTERM as systemd would, and waits until it
    /// is gone. [`Trial::start_missing`] starts it again.
    ///
    /// # Errors
    /// It does not run, or does not end.
    pub fn end_agent(&self, host: &str, signal: Signal) -> Result<()> {
        end(self.agent_process(host)?, signal)
    }

    /// Sends a host's agent a signal that does not end it: SIGSTOP, SIGCONT.
    ///
    /// # Errors
    /// It does not run.
    pub fn signal_agent(&self, host: &str, signal: Signal) -> Result<()> {
        let id = self.agent_process(host)?;
        let pidfd = pidfd_open(Pid::from_raw(id.pid).context("no pid")?, PidfdFlags::empty())?;
        ensure!(id.is_alive(), "process {} ended before the signal", id.pid);
        Ok(pidfd_send_signal(&pidfd, signal)?)
    }

    /// Returns the QEMUs in a host's namespace, whether or not its agent knows them.
    ///
    /// # Errors
    /// The host cannot be examined.
    pub fn hypervisors(&self, host: &str) -> Result<Vec<ProcessId>> {
        let is_qemu = |pid: &i32| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.starts_with("qemu")
        };
        let pids = crate::namespace::processes(&self.namespace(host))?;
        Ok(pids.into_iter().filter(is_qemu).filter_map(ProcessId::of).collect())
    }

    /// Ends every QEMU of a host as a crash would, whether or not its agent knows them.
    ///
    /// # Errors
    /// There is none, or one does not end.
    pub fn kill_hypervisors(&self, host: &str) -> Result<()> {
        let found = self.hypervisors(host)?;
        ensure!(!found.is_empty(), "no QEMU runs on host {host}");
        found.into_iter().try_for_each(|id| end(id, Signal::KILL))
    }

    /// Ends the hypervisor of a VM on a host as a crash would.
    ///
    /// # Errors
    /// The VM has none, or it does not end.
    pub fn kill_hypervisor(&self, host: &str, vm: &str) -> Result<()> {
        let pid = self
            .vm(host, vm)?
            .pid
            .with_context(|| format!("VM {vm} has no process on host {host}"))?;
        end(ProcessId::of(pid).context("it ended before the signal")?, Signal::KILL)
    }

    /// Cuts the power of a host: its agent and its QEMUs end at once, and what is in memory is
    /// lost. The next agent of the host, which [`Trial::start_missing`] starts, is the first after
    /// a boot.
    ///
    /// # Errors
    /// A process does not end, or a file cannot be removed.
    pub fn cut_power(&self, host: &str) -> Result<()> {
        self.end_agent(host, Signal::KILL)?;
        if !self.hypervisors(host)?.is_empty() {
            self.kill_hypervisors(host)?;
        }
        self.forget_boot(host)
    }

    /// Removes what a host had in memory, so that its next agent is the first after a boot.
    pub(super) fn forget_boot(&self, host: &str) -> Result<()> {
        let directory = self.paths.host(host);
        if self.options.hooks.mounts {
            crate::mounts::empty(&self.paths, host, &directory.join("ram"))?;
        }
        for folder in [files::run_dir(&self.paths, host), directory.join("ram")] {
            for entry in std::fs::read_dir(&folder)?.flatten() {
                let path = entry.path();
                let removed = match entry.file_type()?.is_dir() {
                    true => std::fs::remove_dir_all(&path),
                    false => std::fs::remove_file(&path),
                };
                removed.with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        let earlier = "{\"boot_id\":\"an earlier one\",\"waiting\":[]}";
        Ok(std::fs::write(directory.join("state/autostart.json"), earlier)?)
    }

    /// Changes the configuration of a host's agent and restarts it.
    ///
    /// # Errors
    /// The agent refuses the new configuration.
    pub fn reconfigure(&self, host: &str, change: impl FnOnce(&mut toml::Table)) -> Result<()> {
        let path = files::config(&self.paths, host);
        let mut config: toml::Table = std::fs::read_to_string(&path)?.parse()?;
        change(&mut config);
        write_whole(&path, &toml::to_string(&config)?)?;
        self.end_agent(host, Signal::TERM)?;
        self.start_missing()
    }

    /// Returns how many files a host's agent has open: leaked ones accumulate.
    ///
    /// # Errors
    /// The agent does not run.
    pub fn agent_open_files(&self, host: &str) -> Result<usize> {
        let ProcessId { pid, .. } = self.agent_process(host)?;
        Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
    }
}

pub(super) fn end(id: ProcessId, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(id.pid).context("no pid")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    // The pid may have been reused since it was looked up.
    ensure!(id.is_alive(), "process {} ended before the signal", id.pid);
    pidfd_send_signal(&pidfd, signal)?;
    ensure!(wait_readable(&pidfd, Instant::now() + LIMIT), "process {} does not end", id.pid);
    // Agents are this process's own children; a QEMU is not, and its parent waits for it.
    let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
    Ok(())
}
