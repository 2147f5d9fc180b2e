//! What a stage consists of before a fault: datastores, clocks, hosts and the manager.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use godwit_api::control::{HaSettings, ManagerClient, UpdateHost};

use super::{HOSTS, Manner, Stage};
use crate::agents::run_dir;
use crate::faults::{build_clock, expect_stepped, step};
use crate::ha::bmcs::Bmcs;
use crate::ha::cells::{Parts, Setting};
use crate::ha::passages::{Passages, StoreDir};
use crate::ha::unlocked;
use crate::ha::watchdog::Watchdog;
use crate::options::{Hooks, LabOptions, SecondManager};
use crate::trial::{LIMIT, hosts, programs, until};

/// Host with the manager. It is in maintenance, so that no VM starts there.
const WITNESS: &str = "a";
/// How far clocks of hosts are apart.
const HOUR_S: u32 = 3600;

impl Stage {
    /// Configures hosts and manager, and switches the high availability on.
    pub(super) fn set_up(&mut self) -> Result<()> {
        self.open_stores()?;
        self.set_clocks()?;
        let shown = |store: &StoreDir| store.seen.display().to_string();
        let dirs: Vec<String> = self.stores.iter().map(shown).collect();
        for host in self.hosts_with_stores() {
            let dirs = dirs.clone();
            self.trial.reconfigure(&host, |config| {
                drop(config.insert("vm_dirs".to_owned(), dirs.into()));
            })?;
        }
        for host in HOSTS {
            self.bmcs.connect(host, &self.trial.namespace(host))?;
            self.start_watchdog(host)?;
        }
        let Some(manager) = &self.manager else { return self.until_agents_share() };
        self.until_shared(manager)?;
        let maintenance = UpdateHost { maintenance: Some(true), ..UpdateHost::default() };
        self.trial.ask(manager.update_host(WITNESS, &maintenance))?;
        let settings = HaSettings { enabled: true, ..HaSettings::default() };
        self.trial.ask(manager.set_ha(&settings))?;
        Ok(())
    }

    /// Sets the hosts' time of day an hour ahead and an hour back, if their clocks are to differ.
    fn set_clocks(&self) -> Result<()> {
        let [ahead, back] = HOSTS;
        if self.manner.clocks_apart {
            for (host, seconds) in [(ahead, i64::from(HOUR_S)), (back, -i64::from(HOUR_S))] {
                step(&self.trial, host, seconds)?;
                expect_stepped(&self.trial, host, seconds)?;
            }
        }
        Ok(())
    }

    /// Returns the hosts that have the datastores. Without a manager, these are the hosts that may
    /// start the VM.
    fn hosts_with_stores(&self) -> Vec<String> {
        match &self.manager {
            Some(_) => self.trial.hosts(),
            None => HOSTS.map(str::to_owned).to_vec(),
        }
    }

    /// Waits until the manager knows that all hosts share all datastores: the first term has those
    /// that are known when it is opened.
    fn until_shared(&self, manager: &ManagerClient) -> Result<()> {
        let hosts = self.trial.hosts().len();
        until("the manager knows that the hosts share the datastores", LIMIT, || {
            let reported = self.trial.ask(self.trial.agent(WITNESS).host())?.datastores;
            let known = self.trial.ask(manager.datastores())?;
            let is_shared = |store: &StoreDir| {
                let identity = reported.get(&store.seen).and_then(|one| one.identity.as_ref());
                known.iter().any(|one| Some(&one.id) == identity && one.hosts.len() == hosts)
            };
            ensure!(self.stores.iter().all(is_shared), "it knows {known:?}");
            Ok(Some(()))
        })
    }

    /// Passes the datastores on to the hosts, if they are to hang.
    fn open_stores(&mut self) -> Result<()> {
        if self.manner.parts != Parts::HangingStorage {
            return Ok(());
        }
        for StoreDir { seen, files } in &self.stores {
            self.trial.hide_directory(WITNESS, seen, files)?;
        }
        for host in HOSTS {
            self.open_passages(host)?;
        }
        Ok(())
    }

    fn open_passages(&mut self, host: &str) -> Result<()> {
        let passages = Passages::open(&self.trial, host, &self.stores)?;
        self.passages.insert(host.to_owned(), passages);
        Ok(())
    }

    /// Passes the datastores on again, after the power of a host was cut.
    pub(super) fn reopen_passages(&mut self, host: &str) -> Result<()> {
        if self.passages.remove(host).is_some() {
            for store in &self.stores {
                self.trial.show_directory(host, &store.seen)?;
            }
            self.open_passages(host)?;
        }
        Ok(())
    }

    pub(super) fn start_watchdog(&mut self, host: &str) -> Result<()> {
        if self.setting.means.has_watchdog() {
            let (paths, namespace) = (self.trial.paths().clone(), self.trial.namespace(host));
            let socket = run_dir(&paths, host).join("watchdog.sock");
            let name = host.to_owned();
            let clock_ahead_s = self.trial.boot_clock_ahead_s(host);
            let watchdog = Watchdog::start(&socket, clock_ahead_s, move || {
                if let Err(error) = hosts::cut(&paths, &name, &namespace) {
                    eprintln!("the watchdog of host {name} cannot cut its power: {error:#}");
                }
            })?;
            self.watchdogs.insert(host.to_owned(), watchdog);
        }
        Ok(())
    }
}

pub(super) fn make_folder(root: &Path, name: &str) -> Result<PathBuf> {
    let folder = root.join(name);
    fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Makes the directories of the shared datastores.
pub(super) fn make_stores(root: &Path, setting: Setting, parts: Parts) -> Result<Vec<StoreDir>> {
    let store = |number| -> Result<StoreDir> {
        let seen = make_folder(root, &format!("shared-{number}"))?;
        let files = match parts {
            Parts::HangingStorage => make_folder(root, &format!("files-{number}"))?,
            Parts::Usual | Parts::TwoManagers => seen.clone(),
        };
        Ok(StoreDir { seen, files })
    };
    (0..setting.datastores).map(store).collect()
}

/// Returns the options of the lab, and builds what it loads into programs.
pub(super) fn lab_options(
    root: &Path,
    setting: Setting,
    manner: Manner,
    bmcs: &Bmcs,
) -> Result<LabOptions> {
    let means = setting.means;
    let tracker = match programs() {
        Ok(programs) => {
            let tracker = programs.godwit.with_file_name("libgodwit_tracker.so");
            Some(unlocked::build(&root.join("tracker"), &tracker)?)
        }
        // The lab's check says so.
        Err(_) => None,
    };
    let clock = match manner.clocks_apart {
        true => Some(build_clock(&root.join("clock"))?),
        false => None,
    };
    let second_manager =
        (manner.parts == Parts::TwoManagers).then_some(SecondManager::OfSameCluster);
    let hooks = Hooks {
        mounts: true,
        clock,
        boot_clocks_ahead_s: boot_clocks(manner.clocks_apart),
        watchdog: !means.has_watchdog(),
        second_manager,
        manager_settings: if means.has_bmc() { bmcs.settings(&HOSTS) } else { String::new() },
        manager_programs: Some(bmcs.folder().to_owned()),
        ..Hooks::default()
    };
    Ok(LabOptions {
        hosts: 3,
        manager: means.has_manager(),
        tracker,
        hooks,
        at_once: manner.at_once,
        ..LabOptions::default()
    })
}

/// Returns how far boot clocks are ahead of the machine's.
fn boot_clocks(are_apart: bool) -> BTreeMap<String, u32> {
    let [ahead, _] = HOSTS;
    if are_apart && !Path::new("/proc/self/ns/time").exists() {
        eprintln!("this kernel has no time namespaces: the hosts have the same boot clock");
        return BTreeMap::new();
    }
    are_apart.then(|| (ahead.to_owned(), HOUR_S)).into_iter().collect()
}
