//! Lab with a protected VM in which one fault after another is tried.

mod setup;
mod strike;
mod waits;
mod without_manager;

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use godwit_api::Endpoint;
use godwit_api::control::{CreateManagedVm, ManagerClient};
use godwit_guest::ledger::LEDGER_BYTES;
use godwit_qemu::{ByteSize, Disk, DiskFormat, RestartPriority, VmSpec};
use serde::{Deserialize, Serialize};

use self::setup::{lab_options, make_folder, make_stores};
use super::bmcs::Bmcs;
use super::cells::{Cell, Expected, Parts, Setting};
use super::passages::{Passages, StoreDir};
use super::watchdog::Watchdog;
use crate::trial::{Guest, GuestPlan, Trial, VcpuWatch, until};

const VM: &str = "web";
const IMAGE: &str = "web.raw";
/// VM of the control, and the last number of its addresses.
const SECOND: &str = "second";
const SECOND_NUMBER: u8 = 22;
/// Hosts that run the VM.
const HOSTS: [&str; 2] = ["b", "c"];
/// Longest time until the VM runs elsewhere and its guest writes.
const BACK_LIMIT: Duration = Duration::from_secs(240);
/// Longest time until everything is as before the fault.
const READY_LIMIT: Duration = Duration::from_secs(180);

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

    fn manager(&self) -> Result<&ManagerClient> {
        self.manager.as_ref().context("this lab has no manager")
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

/// Returns the plan of a guest that keeps its ledger on a disk.
fn plan(name: &str, image: PathBuf) -> GuestPlan {
    GuestPlan {
        fill: ByteSize::from_mib(8),
        disks: vec![Disk::new(image, DiskFormat::Raw)],
        words: "godwit.ledger=vda".to_owned(),
        ..GuestPlan::new(name)
    }
}
