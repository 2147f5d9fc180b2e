//! Lab with a protected VM in which one fault after another is tried.

mod without_manager;

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use godwit_api::control::{
    CreateManagedVm, HaHostStatus, HaPhase, HaSettings, HaStatus, ManagerClient, UpdateHost,
};
use godwit_api::{Endpoint, HaStanding, VmState};
use godwit_guest::ledger::{self, Entry, LEDGER_BYTES};
use godwit_qemu::{ByteSize, Disk, DiskFormat, RestartPriority, VmSpec};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::bmcs::Bmcs;
use super::cells::{Cell, Expected, Fault, Means, Parts, Setting};
use super::passages::{Passages, StoreDir};
use super::unlocked;
use super::watchdog::Watchdog;
use crate::agents::run_dir;
use crate::faults::{build_clock, expect_stepped, step};
use crate::options::{Hooks, LabOptions, SecondManager};
use crate::trial::{Guest, GuestPlan, LIMIT, Trial, VcpuWatch, hosts, programs, until};

const VM: &str = "web";
const IMAGE: &str = "web.raw";
/// VM of the control, and the last number of its addresses.
const SECOND: &str = "second";
const SECOND_NUMBER: u8 = 22;
/// Host with the manager. It is in maintenance, so that no VM starts there.
const WITNESS: &str = "a";
/// Hosts that run the VM.
const HOSTS: [&str; 2] = ["b", "c"];
/// How far clocks of hosts are apart.
const HOUR_S: u32 = 3600;
/// Longest time until the VM runs elsewhere and its guest writes.
const BACK_LIMIT: Duration = Duration::from_secs(240);
/// Longest time until everything is as before the fault.
const READY_LIMIT: Duration = Duration::from_secs(180);
/// Age of a renewal from which on a host counts as silent, ms.
const SILENT_MS: u64 = 3000;

/// How long faults last.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Time for which a guest that must stay where it is is observed: longer than the judge waits.
    pub watched: Duration,
    /// Time from a freeze to the release.
    pub frozen: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { watched: Duration::from_secs(60), frozen: Duration::from_secs(60) }
    }
}

/// How a lab tries cells.
#[derive(Debug, Clone, Copy, Default)]
pub struct Manner {
    pub pace: Pace,
    pub parts: Parts,
    /// Whether the hosts' clocks are an hour apart: the time of day of both hosts that run the VM,
    /// and the boot clock of the first.
    pub clocks_apart: bool,
    /// Number of labs on this machine at the same time; `None`: as the environment says.
    pub at_once: Option<u32>,
}

/// Result of a cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CellReport {
    pub cell: Cell,
    /// Host with the fault.
    pub from: String,
    /// Host that runs the guest afterwards, if that is known.
    pub to: Option<String>,
    /// Time from the fault until the agent of another host reports that the VM runs.
    pub started_s: Option<f64>,
    /// Time from the fault until the guest writes its disk again, its boot included.
    pub back_s: Option<f64>,
    /// Duration of the cell with all repairs.
    pub seconds: f64,
    /// Boots in the guest's ledger.
    pub boots: usize,
    /// What is wrong.
    pub error: Option<String>,
}

/// Lab with a protected VM.
#[derive(Debug)]
pub struct Stage {
    setting: Setting,
    manner: Manner,
    guest: Option<Guest>,
    /// Hardware watchdogs, by host.
    watchdogs: BTreeMap<String, Watchdog>,
    /// Ways to datastores that can hang, by host.
    passages: BTreeMap<String, Passages>,
    bmcs: Bmcs,
    /// `None`: the agents protect the VM by themselves.
    manager: Option<ManagerClient>,
    trial: Trial,
    stores: Vec<StoreDir>,
    /// Directory in the place of those that a host has lost.
    empty: PathBuf,
    /// Removed last: the datastores are in it.
    _root: tempfile::TempDir,
}

impl Stage {
    /// Starts a lab. Prints the reason and returns `None` if this machine cannot run one.
    ///
    /// # Errors
    /// The lab cannot be started.
    pub fn begin(name: &str, setting: Setting, pace: Pace) -> Result<Option<Stage>> {
        Stage::begin_with(name, setting, Manner { pace, ..Manner::default() })
    }

    /// Starts a lab that tries cells in this manner.
    ///
    /// # Errors
    /// As [`Stage::begin`].
    pub fn begin_with(name: &str, setting: Setting, manner: Manner) -> Result<Option<Stage>> {
        let root = tempfile::Builder::new().prefix("godwit-ha-").tempdir_in("/var/tmp")?;
        // Users of QEMUs read a library in it.
        fs::set_permissions(root.path(), Permissions::from_mode(0o755))?;
        let stores = make_stores(root.path(), setting, manner.parts)?;
        let empty = make_folder(root.path(), "empty")?;
        let bmcs = Bmcs::make(root.path().join("bmcs"), &HOSTS, setting.means)?;
        let options = lab_options(root.path(), setting, manner, &bmcs)?;
        let manager = options.manager;
        let Some(trial) = Trial::begin_with(name, options)? else { return Ok(None) };
        let socket = Endpoint::Unix(trial.paths().manager_socket());
        let mut stage = Stage {
            setting,
            manner,
            guest: None,
            watchdogs: BTreeMap::new(),
            passages: BTreeMap::new(),
            bmcs,
            manager: manager.then(|| ManagerClient::new(socket, None)),
            trial,
            stores,
            empty,
            _root: root,
        };
        stage.set_up()?;
        Ok(Some(stage))
    }

    /// Configures hosts and manager, and switches the high availability on.
    fn set_up(&mut self) -> Result<()> {
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

    fn manager(&self) -> Result<&ManagerClient> {
        self.manager.as_ref().context("this lab has no manager")
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
    fn reopen_passages(&mut self, host: &str) -> Result<()> {
        if self.passages.remove(host).is_some() {
            for store in &self.stores {
                self.trial.show_directory(host, &store.seen)?;
            }
            self.open_passages(host)?;
        }
        Ok(())
    }

    fn start_watchdog(&mut self, host: &str) -> Result<()> {
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

    /// Tries a cell. After an error the stage is of no use.
    pub fn try_cell(&mut self, cell: Cell) -> CellReport {
        let begun = Instant::now();
        let mut report = CellReport {
            cell,
            from: String::new(),
            to: None,
            started_s: None,
            back_s: None,
            seconds: 0.0,
            boots: 0,
            error: None,
        };
        let result = self.try_within(&mut report);
        // Whatever went wrong before: two writers are worse.
        let checked = self.entries().map(|entries| report.boots = entries.len());
        report.error = checked.and(result).err().map(|error| format!("{error:#}"));
        report.seconds = begun.elapsed().as_secs_f64();
        report
    }

    fn try_within(&mut self, report: &mut CellReport) -> Result<()> {
        let needed = report.cell.fault.parts();
        ensure!([Parts::Usual, self.manner.parts].contains(&needed), "the lab lacks {needed:?}");
        let victim = self.guest()?.host;
        report.from.clone_from(&victim);
        self.until_ready(&victim).context("before the fault")?;
        let pid = self.trial.vm(&victim, VM)?.pid;
        let watch = self.trial.watch_vcpus(VM);
        let host = self.try_watched(&watch, &victim, report);
        watch.end()?;
        let host = host?;
        report.to = Some(host.clone());
        let stays = report.cell.expected() == Expected::Stays;
        ensure!((host == victim) == stays, "the guest is on host {host}");
        if stays {
            ensure!(self.trial.vm(&host, VM)?.pid == pid, "the VM has another process");
        }
        self.guest.iter_mut().for_each(|guest| guest.host.clone_from(&host));
        self.expect_writing()
    }

    /// Injects the fault, waits for what must follow, and ends the fault. Returns the guest's host.
    fn try_watched(
        &mut self,
        watch: &VcpuWatch,
        victim: &str,
        report: &mut CellReport,
    ) -> Result<String> {
        watch.until_seen(victim)?;
        let (boots, fault) = (self.entries()?.len(), report.cell.fault);
        let struck = Instant::now();
        self.strike(fault, victim).context("the fault")?;
        let settled = match report.cell.expected() {
            Expected::Stays => self.stays(fault, victim, boots, struck),
            Expected::Elsewhere => self.comes_back(victim, boots, struck, report),
        };
        let repaired = self.repair(fault, victim, struck).context("the repair");
        settled.and(repaired)?;
        let host = self.settled(victim)?;
        watch.until_seen(&host)?;
        Ok(host)
    }

    /// Returns the guest, and boots it at host b if there is none.
    fn guest(&mut self) -> Result<Guest> {
        if let Some(guest) = &self.guest {
            return Ok(guest.clone());
        }
        let [host, _] = HOSTS;
        let image = self.image()?;
        File::create_new(&image.files)?.set_len(LEDGER_BYTES)?;
        let plan = plan(VM, image.seen);
        match &self.manager {
            Some(manager) => self.create_by(manager, host, &plan)?,
            None => self.create_without_manager(host, &plan)?,
        }
        let guest = self.trial.guest_elsewhere(host, &plan);
        guest.wait_ready(plan.boot_limit)?;
        self.guest = Some(guest.clone());
        Ok(guest)
    }

    /// Creates and starts the VM on a host that holds a term.
    fn create_by(&self, manager: &ManagerClient, host: &str, plan: &GuestPlan) -> Result<()> {
        HOSTS.iter().try_for_each(|host| self.until_held(host))?;
        let spec =
            VmSpec { protect: Some(RestartPriority::Normal), ..plan.spec(self.trial.image()) };
        let request = CreateManagedVm {
            spec,
            host: Some(host.to_owned()),
            labels: BTreeMap::new(),
            start: true,
            new_disks: Vec::new(),
        };
        self.trial.ask(manager.create_vm(&request))?;
        Ok(())
    }

    /// Boots another guest with the VM's disk at the other host, and waits until the ledger shows
    /// two writers: a control of the proof. The stage is of no use afterwards.
    ///
    /// # Errors
    /// The ledger does not show them.
    pub fn expect_two_writers_found(&mut self) -> Result<()> {
        let host = self.guest()?.host;
        let other = HOSTS.into_iter().find(|other| *other != host).context("no other host")?;
        let plan = GuestPlan { number: SECOND_NUMBER, ..plan(SECOND, self.image()?.seen) };
        self.trial.create(other, plan.spec(self.trial.image()))?;
        until("the ledger shows two writers", BACK_LIMIT, || {
            let shown = self.entries().err().map(|error| error.to_string());
            Ok(shown.is_some_and(|text| text.contains("TWO WRITERS")).then_some(()))
        })
    }

    /// Returns the VM's disk.
    fn image(&self) -> Result<StoreDir> {
        let StoreDir { seen, files } = self.stores.first().context("no datastore")?;
        Ok(StoreDir { seen: seen.join(IMAGE), files: files.join(IMAGE) })
    }

    /// Returns the entries of the ledger, one for each boot.
    fn entries(&self) -> Result<Vec<Entry>> {
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
    fn expect_writing(&self) -> Result<()> {
        let newest = || -> Result<u64> {
            Ok(self.entries()?.last().map_or(0, |entry| entry.progress.count))
        };
        let before = newest()?;
        until("the guest writes its disk", LIMIT, || Ok((newest()? > before).then_some(())))
    }

    /// Waits until a host holds a term, with all that the setting has.
    fn until_held(&self, host: &str) -> Result<()> {
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
    fn until_ready(&self, host: &str) -> Result<()> {
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

    fn strike(&mut self, fault: Fault, victim: &str) -> Result<()> {
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

    /// Checks for a while that nothing is restarted.
    fn stays(&self, fault: Fault, victim: &str, boots: usize, struck: Instant) -> Result<()> {
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
    fn comes_back(
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

    /// Ends the fault. A host that has lost its power boots.
    fn repair(&mut self, fault: Fault, victim: &str, struck: Instant) -> Result<()> {
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

    /// Waits until one host has the VM and runs it, and the others do not know it. Returns that
    /// host.
    fn settled(&self, victim: &str) -> Result<String> {
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

    /// Copies the logs of the lab to a folder of this name.
    pub fn keep_logs(&self, name: &str) {
        match self.trial.keep_logs(name) {
            Ok(folder) => eprintln!("logs kept in {}", folder.display()),
            Err(error) => eprintln!("cannot keep the logs: {error:#}"),
        }
    }

    /// Takes the lab down.
    ///
    /// # Errors
    /// Something is left.
    pub fn finish(self) -> Result<()> {
        let Stage { watchdogs, trial, _root: root, .. } = self;
        drop(watchdogs);
        trial.finish()?;
        Ok(root.close()?)
    }
}

fn make_folder(root: &Path, name: &str) -> Result<PathBuf> {
    let folder = root.join(name);
    fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Makes the directories of the shared datastores.
fn make_stores(root: &Path, setting: Setting, parts: Parts) -> Result<Vec<StoreDir>> {
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
fn lab_options(root: &Path, setting: Setting, manner: Manner, bmcs: &Bmcs) -> Result<LabOptions> {
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

/// Returns the plan of a guest that keeps its ledger on a disk.
fn plan(name: &str, image: PathBuf) -> GuestPlan {
    GuestPlan {
        fill: ByteSize::from_mib(8),
        disks: vec![Disk::new(image, DiskFormat::Raw)],
        words: "godwit.ledger=vda".to_owned(),
        ..GuestPlan::new(name)
    }
}

/// Returns what the manager knows of a host.
fn of_host<'a>(status: &'a HaStatus, host: &str) -> Result<&'a HaHostStatus> {
    let known = status.hosts.iter().find(|known| known.host == host);
    known.with_context(|| format!("the manager does not know host {host}: {status:?}"))
}
