//! What the stage waits for and checks, before a fault and after it.

use std::fs::File;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use godwit_api::control::{HaHostStatus, HaPhase, HaStatus};
use godwit_api::{HaStanding, VmState};
use godwit_guest::ledger::{self, Entry};

use super::{BACK_LIMIT, CellReport, HOSTS, READY_LIMIT, Stage, VM};
use crate::ha::cells::{Fault, Means};
use crate::trial::{LIMIT, until};

/// Age of a renewal from which on a host counts as silent, ms.
const SILENT_MS: u64 = 3000;

impl Stage {
    /// Returns the entries of the ledger, one for each boot.
    pub(super) fn entries(&self) -> Result<Vec<Entry>> {
        let image = self.image()?.files;
        if !image.exists() {
            return Ok(Vec::new());
        }
        let file = File::open(image)?;
        // A block that is being written can be half read. What two writers leave stays.
        let check = || ledger::check(&file);
        Ok(check().or_else(|_| check()).or_else(|_| check())?)
    }

    /// Checks that the guest writes its disk.
    pub(super) fn expect_writing(&self) -> Result<()> {
        let newest = || -> Result<u64> {
            Ok(self.entries()?.last().map_or(0, |entry| entry.progress.count))
        };
        let before = newest()?;
        until("the guest writes its disk", LIMIT, || Ok((newest()? > before).then_some(())))
    }

    /// Waits until a host holds a term, with all that the setting has.
    pub(super) fn until_held(&self, host: &str) -> Result<()> {
        until(&format!("host {host} holds a term"), READY_LIMIT, || {
            let status = self.trial.ask(self.manager()?.ha())?;
            let known = of_host(&status, host)?;
            let is_heard = known.heard_ms_ago.is_some_and(|ms| ms < SILENT_MS);
            ensure!(known.phase == HaPhase::Watching && known.term > 0 && is_heard, "{known:?}");
            ensure!(known.datastores.len() == self.setting.datastores.min(3), "{known:?}");
            let means = self.setting.means;
            ensure!(known.watchdog == means.has_watchdog(), "{known:?}");
            ensure!(known.fencing == means.has_bmc(), "{known:?}");
            let guard = self.trial.ask(self.trial.agent(host).ha())?;
            let is_written = guard.datastores.iter().all(|one| one.written_ms_ago.is_some());
            ensure!(guard.standing == HaStanding::Held && is_written, "{guard:?}");
            Ok(Some(()))
        })
    }

    /// Waits until the VM's host and the other one hold terms, and the manager would restart it.
    pub(super) fn until_ready(&self, host: &str) -> Result<()> {
        let Some(manager) = &self.manager else { return self.until_agents_are_ready(host) };
        HOSTS.iter().try_for_each(|host| self.until_held(host))?;
        until("the manager would restart the VM", READY_LIMIT, || {
            let status = self.trial.ask(manager.ha())?;
            let vm = status.vms.iter().find(|vm| vm.vm == VM).context("it does not know it")?;
            let can_restart = vm.problem.is_none() || self.setting.means == Means::Operator;
            ensure!(vm.host == host && can_restart && vm.restart.is_none(), "{vm:?}");
            Ok(Some(()))
        })
    }

    /// Checks for a while that nothing is restarted.
    pub(super) fn stays(
        &self,
        fault: Fault,
        victim: &str,
        boots: usize,
        struck: Instant,
    ) -> Result<()> {
        until("the time of observation is over", self.manner.pace.watched + LIMIT, || {
            Ok((struck.elapsed() >= self.manner.pace.watched).then_some(()))
        })?;
        let now = self.entries()?.len();
        ensure!(now == boots, "the guest has booted {now} times, and {boots} times before");
        let vm = self.trial.vm(victim, VM)?;
        ensure!(vm.state == VmState::Running, "on host {victim} the VM is {}", vm.state);
        // A guest whose storage hangs goes on when the fault is over, which is checked then.
        if fault == Fault::HangStorage { Ok(()) } else { self.expect_writing() }
    }

    /// Waits until the guest is back elsewhere.
    pub(super) fn comes_back(
        &self,
        victim: &str,
        boots: usize,
        struck: Instant,
        report: &mut CellReport,
    ) -> Result<()> {
        if self.setting.means == Means::Operator {
            self.confirm(victim, boots)?;
        }
        let others = HOSTS.iter().filter(|host| **host != victim);
        let others: Vec<&str> = others.copied().collect();
        until("the VM runs on another host", BACK_LIMIT, || {
            let runs =
                |host: &&str| self.trial.vm(host, VM).is_ok_and(|vm| vm.state == VmState::Running);
            Ok(others.iter().any(runs).then_some(()))
        })
        .with_context(|| self.explained())?;
        report.started_s = Some(struck.elapsed().as_secs_f64());
        until("the guest writes its disk again", BACK_LIMIT, || {
            Ok((self.entries()?.len() > boots).then_some(()))
        })?;
        report.back_s = Some(struck.elapsed().as_secs_f64());
        Ok(())
    }

    /// Waits until the manager asks an operator, who confirms that the host is off.
    fn confirm(&self, victim: &str, boots: usize) -> Result<()> {
        let manager = self.manager()?;
        let term = until("the manager asks whether the host is off", BACK_LIMIT, || {
            let status = self.trial.ask(manager.ha())?;
            let host = of_host(&status, victim)?;
            ensure!(host.phase == HaPhase::Doubtful && host.problem.is_some(), "{host:?}");
            Ok(Some(host.term))
        })?;
        ensure!(self.entries()?.len() == boots, "the VM was started before the operator confirmed");
        self.trial.ask(manager.confirm_off(victim, term))?;
        Ok(())
    }

    /// Says what the manager shows, or what the agents show without one.
    fn explained(&self) -> String {
        let Some(manager) = &self.manager else { return self.agents_explain() };
        match self.trial.ask(manager.ha()) {
            Ok(status) => format!("the manager shows {status:?}"),
            Err(error) => format!("the manager shows nothing: {error}"),
        }
    }

    /// Waits until one host has the VM and runs it, and the others do not know it. Returns that
    /// host.
    pub(super) fn settled(&self, victim: &str) -> Result<String> {
        until("one host has the VM, and no other", READY_LIMIT, || {
            let has = |host: &&str| self.trial.vm(host, VM).is_ok();
            let having: Vec<&str> = HOSTS.into_iter().filter(has).collect();
            let [host] = having[..] else {
                let had = HOSTS.map(|host| self.trial.vm(host, VM).map(|vm| (host, vm.state)));
                bail!("the fault was on host {victim}; {had:?}; {}", self.explained());
            };
            let vm = self.trial.vm(host, VM)?;
            ensure!(vm.state == VmState::Running && !vm.in_doubt, "{vm:?}");
            if let Some(manager) = &self.manager {
                let known = self.trial.ask(manager.vm(VM))?.summary;
                ensure!(known.host == host && known.also_runs_at.is_empty(), "{known:?}");
            }
            Ok(Some(host.to_owned()))
        })
    }
}

/// Returns what the manager knows of a host.
fn of_host<'a>(status: &'a HaStatus, host: &str) -> Result<&'a HaHostStatus> {
    let known = status.hosts.iter().find(|known| known.host == host);
    known.with_context(|| format!("the manager does not know host {host}: {status:?}"))
}
