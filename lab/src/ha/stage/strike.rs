//! Faults: how one is injected, and how it ends.

use std::time::Instant;

use anyhow::Result;
use rustix::process::Signal;

use super::Stage;
use crate::ha::cells::Fault;
use crate::ha::passages::StoreDir;
use crate::ha::watchdog::Watchdog;
use crate::trial::{LIMIT, until};

impl Stage {
    pub(super) fn strike(&mut self, fault: Fault, victim: &str) -> Result<()> {
        let trial = &self.trial;
        match fault {
            Fault::KillAll => {
                trial.end_agent(victim, Signal::KILL)?;
                trial.kill_hypervisors(victim)
            }
            Fault::KillAgent => trial.end_agent(victim, Signal::KILL),
            Fault::RestartAgent => {
                trial.end_agent(victim, Signal::KILL)?;
                trial.start_missing()
            }
            Fault::PowerOff => {
                drop(self.watchdogs.remove(victim));
                trial.power_off(victim)
            }
            Fault::CutManagement => trial.cut_lanes(victim, true),
            Fault::CutStorage => self.hide_stores(victim),
            Fault::CutBoth => {
                trial.cut_lanes(victim, true)?;
                self.hide_stores(victim)
            }
            Fault::KillLeader => {
                drop(self.watchdogs.remove(victim));
                trial.power_off(victim)?;
                trial.kill_manager()?;
                trial.start_missing()
            }
            Fault::Freeze => {
                self.watchdogs.get(victim).iter().for_each(|watchdog| watchdog.freeze(true));
                trial.freeze_host(victim, true)
            }
            Fault::HangStorage => {
                self.hang_stores(victim, true);
                Ok(())
            }
            Fault::HangBoth => {
                trial.cut_lanes(victim, true)?;
                self.hang_stores(victim, true);
                Ok(())
            }
            Fault::KillLeaderOfTwo => {
                drop(self.watchdogs.remove(victim));
                trial.power_off(victim)?;
                trial.kill_leader()
            }
        }
    }

    fn hang_stores(&self, host: &str, hangs: bool) {
        self.passages.get(host).iter().for_each(|passages| passages.hang(hangs));
    }

    fn hide_stores(&self, host: &str) -> Result<()> {
        let hide = |store: &StoreDir| self.trial.hide_directory(host, &store.seen, &self.empty);
        self.stores.iter().try_for_each(hide)
    }

    /// Ends the fault. A host that has lost its power boots.
    pub(super) fn repair(&mut self, fault: Fault, victim: &str, struck: Instant) -> Result<()> {
        match fault {
            Fault::Freeze => {
                until("the freeze is over", self.manner.pace.frozen + LIMIT, || {
                    Ok((struck.elapsed() >= self.manner.pace.frozen).then_some(()))
                })?;
                self.trial.freeze_host(victim, false)?;
                self.watchdogs.get(victim).iter().for_each(|watchdog| watchdog.freeze(false));
            }
            Fault::CutManagement => self.trial.cut_lanes(victim, false)?,
            Fault::CutStorage => self.show_stores(victim)?,
            Fault::CutBoth => {
                self.trial.cut_lanes(victim, false)?;
                self.show_stores(victim)?;
            }
            Fault::HangStorage => self.hang_stores(victim, false),
            Fault::HangBoth => {
                self.trial.cut_lanes(victim, false)?;
                self.hang_stores(victim, false);
            }
            Fault::KillAll
            | Fault::KillAgent
            | Fault::RestartAgent
            | Fault::PowerOff
            | Fault::KillLeader
            | Fault::KillLeaderOfTwo => {}
        }
        // A lying BMC has cut nothing.
        let was_cut = self.bmcs.says_off(victim) && self.setting.means.mode() == "works";
        let has_reset = self.watchdogs.get(victim).is_some_and(Watchdog::has_reset);
        self.bmcs.switch_on(victim)?;
        if was_cut || has_reset || !self.trial.has_power(victim) {
            drop(self.watchdogs.remove(victim));
            self.trial.power_off(victim)?;
            self.trial.power_on(victim)?;
            self.reopen_passages(victim)?;
            self.start_watchdog(victim)?;
        }
        self.trial.start_missing()
    }

    fn show_stores(&self, host: &str) -> Result<()> {
        self.stores.iter().try_for_each(|store| self.trial.show_directory(host, &store.seen))
    }
}
