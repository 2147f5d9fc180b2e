//! Injection and repair of faults.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use godwit_types::{Outcome, Report};
use rustix::process::Signal;

use super::moving::Moving;
use super::oom::MemoryGroup;
use super::writes::FailingWrite;
use super::{Cell, Fault, Moment, clock};
use crate::emulator::Order;
use crate::process::ProcessId;
use crate::trial::{Guest, LIMIT, Trial, until};
use crate::units::BitRate;

/// Longest duration of a fault that lasts until the source's verdict.
const VERDICT_LIMIT: Duration = Duration::from_secs(60);
/// Longest time that an agent may take to notice that a QEMU ended.
const NOTICE_LIMIT: Duration = Duration::from_secs(3);
/// Duration of a short link cut.
const BRIEFLY: Duration = Duration::from_secs(2);
/// Step of the clocks, in seconds.
const STEP_S: i64 = 3600;
/// Rate of a link that crawls.
const CRAWL: &str = "256kbit";
/// Room left in a tmpfs for guest memory that is to fill up, and in a group of processes that is to
/// run out of memory, in bytes.
const LAST_BYTES: u64 = 8 << 20;

/// A fault between two hosts of a lab.
pub(super) struct Blow<'a> {
    trial: &'a Trial,
    cell: Cell,
    /// Guest that is moved; `None` if several are.
    guest: Option<&'a Guest>,
    source: &'a str,
    destination: &'a str,
    memory: Option<MemoryGroup>,
    /// Traces of faults that the logs held before this one.
    before: Traces,
}

/// Observations made while a fault lasted.
#[derive(Debug)]
pub(super) struct Lasted {
    /// Report of the migration, if it arrived before the repair.
    pub(super) report: Option<Report>,
    /// Whether the fault had a visible effect; the error names the effect that was missing.
    pub(super) effect: Result<()>,
}

/// Counts of log lines that show a fault.
#[derive(Debug, Clone, Copy, Default)]
struct Traces {
    /// Bytes changed by the emulator.
    changed_bytes: usize,
    /// Checksum errors found by the agents.
    wrong_checksums: usize,
    /// Records that the agents failed to save.
    unsaved: usize,
}

impl<'a> Blow<'a> {
    /// Prepares a fault of two hosts, independent of any migration.
    pub(super) fn new(
        trial: &'a Trial,
        fault: Fault,
        source: &'a str,
        destination: &'a str,
    ) -> Blow<'a> {
        let cell = Cell::at(Moment::PreCopy, fault);
        Blow {
            trial,
            cell,
            guest: None,
            source,
            destination,
            memory: None,
            before: Traces::default(),
        }
    }

    /// Prepares a fault for the migration of a guest from its host to `destination` at a moment.
    pub(super) fn at(
        trial: &'a Trial,
        cell: Cell,
        guest: &'a Guest,
        destination: &'a str,
    ) -> Blow<'a> {
        Blow { cell, guest: Some(guest), ..Blow::new(trial, cell.fault, &guest.host, destination) }
    }

    pub(super) fn strike(&mut self, moving: &mut Moving<'_>) -> Result<()> {
        self.before = self.traces();
        let Blow { trial, source, destination, .. } = *self;
        match self.cell.fault {
            Fault::KillSourceAgent => trial.end_agent(source, Signal::KILL),
            Fault::KillDestinationAgent | Fault::CreatedAgain => {
                trial.end_agent(destination, Signal::KILL)
            }
            Fault::KillSourceQemu => self.kill_qemu(source),
            Fault::KillDestinationQemu => self.kill_qemu(destination),
            Fault::KillCli => moving.kill_cli(),
            Fault::CutBriefly | Fault::CutForGood => trial.cut_lanes(destination, true),
            Fault::SilentSource => self.stop_agent(source),
            Fault::SilentDestination => self.stop_agent(destination),
            Fault::SlowLink => self.rate(CRAWL),
            Fault::SourceDiskFull => fill(&self.filler(source)),
            Fault::DestinationDiskFull => fill(&self.filler(destination)),
            Fault::RamFull => self.narrow_ram(),
            Fault::OutOfMemory => self.run_out_of_memory(),
            Fault::ClockForward => self.step(STEP_S),
            Fault::ClockBackward => self.step(-STEP_S),
            Fault::CorruptByte => trial.order_links(&Order::CorruptNext {
                namespace: trial.namespace(source),
                payload_bytes: 4096,
            }),
            Fault::WriteFails => self.failing()?.begin(trial, source, destination),
            Fault::GuestShutDown => self.power_off(),
        }
    }

    /// Waits while the fault lasts. The migration is no longer held.
    pub(super) fn last(&self, moving: &Moving<'_>) -> Lasted {
        let waited = |limit| Lasted { report: moving.report(limit), effect: Ok(()) };
        let seen = |effect| Lasted { report: None, effect };
        match self.cell.fault {
            // The destination has no request yet: an agent that restarts before the first one
            // arrives would accept it.
            Fault::KillDestinationAgent if self.cell.moment == Moment::Preflight => {
                waited(VERDICT_LIMIT)
            }
            Fault::KillSourceAgent
            | Fault::CreatedAgain
            | Fault::KillDestinationAgent
            | Fault::KillSourceQemu
            | Fault::KillDestinationQemu
            | Fault::KillCli => seen(Ok(())),
            Fault::CorruptByte => seen(self.until_corrupted()),
            Fault::CutBriefly => {
                #[expect(clippy::disallowed_methods, reason = "the duration of the cut")]
                std::thread::sleep(BRIEFLY);
                seen(self.expect_cut())
            }
            Fault::CutForGood => {
                let lasted = waited(VERDICT_LIMIT);
                Lasted { effect: self.expect_cut(), ..lasted }
            }
            // The cell checks that the report says so.
            Fault::RamFull => waited(VERDICT_LIMIT),
            Fault::SilentSource => {
                // The source cannot report. The destination has decided when its shadow is gone or
                // runs.
                self.until_destination_decides();
                seen(self.expect_stopped(self.source))
            }
            Fault::SilentDestination => {
                let lasted = waited(VERDICT_LIMIT);
                Lasted { effect: self.expect_stopped(self.destination), ..lasted }
            }
            Fault::SlowLink => Lasted { effect: self.expect_crawling(), ..waited(VERDICT_LIMIT) },
            Fault::SourceDiskFull | Fault::DestinationDiskFull => self.until_unsaved(moving),
            Fault::OutOfMemory => seen(self.until_killed()),
            Fault::WriteFails => seen(self.until_failed()),
            Fault::GuestShutDown => seen(self.until_off(&[self.source, self.destination])),
            Fault::ClockForward => {
                Lasted { effect: self.expect_stepped(STEP_S), ..waited(VERDICT_LIMIT) }
            }
            Fault::ClockBackward => {
                Lasted { effect: self.expect_stepped(-STEP_S), ..waited(VERDICT_LIMIT) }
            }
        }
    }

    /// Repairs the fault where that is possible.
    pub(super) fn repair(&mut self) -> Result<()> {
        let Blow { trial, source, destination, .. } = *self;
        match self.cell.fault {
            Fault::KillSourceAgent | Fault::KillDestinationAgent | Fault::CreatedAgain => {
                trial.start_missing()
            }
            Fault::KillSourceQemu
            | Fault::KillDestinationQemu
            | Fault::KillCli
            | Fault::CorruptByte
            | Fault::GuestShutDown => Ok(()),
            Fault::WriteFails => {
                self.failing()?.end(trial, source, destination);
                Ok(())
            }
            Fault::CutBriefly | Fault::CutForGood => trial.cut_lanes(destination, false),
            Fault::SilentSource => trial.signal_agent(source, Signal::CONT),
            Fault::SilentDestination => trial.signal_agent(destination, Signal::CONT),
            Fault::SlowLink => {
                let usual = self.trial.options().link.context("this lab's links have no rate")?;
                self.rate(&usual.to_string())
            }
            Fault::SourceDiskFull => Ok(std::fs::remove_file(self.filler(source))?),
            Fault::DestinationDiskFull => Ok(std::fs::remove_file(self.filler(destination))?),
            Fault::RamFull => self.remount_ram("100%"),
            Fault::OutOfMemory => {
                self.memory.take().context("no memory group was made for this fault")?.remove()?;
                trial.start_missing()
            }
            Fault::ClockForward | Fault::ClockBackward => self.step(0),
        }
    }

    fn failing(&self) -> Result<FailingWrite> {
        self.cell.write.context("the cell names no failing write")
    }

    /// Waits until every failing write has failed.
    fn until_failed(&self) -> Result<()> {
        let failing = self.failing()?;
        until(&format!("{} fails", failing.name()), VERDICT_LIMIT, || {
            Ok(failing.has_come(self.trial, self.source, self.destination).then_some(()))
        })
    }

    /// Makes the guest power itself off. If the migration is held meanwhile, the guest's QEMU has
    /// ended when this returns.
    fn power_off(&self) -> Result<()> {
        let moment = self.cell.moment;
        let guest = self.guest.context("no guest was given to power off")?;
        until("the guest is asked to power itself off", LIMIT, || Ok(guest.power_off().ok()))?;
        // At the switchover the guest is stopped while it powers off. In page-in it waits for
        // pages, which arrive slowly until the limit is lifted.
        if matches!(moment, Moment::Switchover | Moment::PageIn) {
            return Ok(());
        }
        self.until_off(&[if moment.has_run_there() { self.destination } else { self.source }])
    }

    /// Waits until no QEMU runs on these hosts.
    fn until_off(&self, hosts: &[&str]) -> Result<()> {
        until("the guest's QEMU has ended", VERDICT_LIMIT, || {
            for host in hosts {
                let left = self.trial.hypervisors(host)?;
                ensure!(left.is_empty(), "{} QEMUs run on host {host}", left.len());
            }
            Ok(Some(()))
        })
    }

    /// Counts the traces of faults in the logs.
    fn traces(&self) -> Traces {
        let count = |path: &Path, what: &str| {
            // A missing log has no traces.
            std::fs::read_to_string(path).map_or(0, |text| text.matches(what).count())
        };
        let paths = self.trial.paths();
        let of_agents = |what: &str| -> usize {
            [self.source, self.destination]
                .map(|host| count(&crate::agents::log(paths, host), what))
                .iter()
                .sum()
        };
        Traces {
            changed_bytes: count(&paths.emulator_log(), "is changed"),
            wrong_checksums: of_agents("checksum of"),
            unsaved: of_agents("cannot save"),
        }
    }

    /// Waits until a byte is changed and an agent has found a wrong checksum.
    fn until_corrupted(&self) -> Result<()> {
        let before = self.before;
        until("a byte is changed, and an agent notices", LIMIT, || {
            let now = self.traces();
            let is_seen = now.changed_bytes > before.changed_bytes
                && now.wrong_checksums > before.wrong_checksums;
            ensure!(is_seen, "{now:?} after {before:?}");
            Ok(Some(()))
        })
    }

    /// Waits until the migration has ended or an agent has logged that a record could not be saved.
    fn until_unsaved(&self, moving: &Moving<'_>) -> Lasted {
        let is_noticed = || self.traces().unsaved > self.before.unsaved;
        // An agent that waits for room logs it meanwhile. One that gives up reports it at the end.
        let ended = until("a record cannot be saved, or the migration ends", VERDICT_LIMIT, || {
            let report = moving.report(Duration::ZERO);
            Ok((report.is_some() || is_noticed()).then_some(report))
        });
        let has_failed = |report: &Report| report.outcome != Outcome::Completed;
        let (report, ended) = match ended {
            Ok(report) => (report, Ok(())),
            Err(error) => (None, Err(error)),
        };
        let is_seen = is_noticed() || report.as_ref().is_some_and(has_failed);
        let effect = ended.and_then(|()| {
            ensure!(is_seen, "no agent logged that a record could not be saved");
            Ok(())
        });
        Lasted { report, effect }
    }

    fn until_killed(&self) -> Result<()> {
        let memory = self.memory.as_ref().context("no memory group was made for this fault")?;
        let killed = || Ok(memory.has_killed()?.then_some(()));
        until("the kernel kills a process for lack of memory", LIMIT, killed)
    }

    /// Stops an agent and waits until it is stopped.
    fn stop_agent(&self, host: &str) -> Result<()> {
        self.trial.signal_agent(host, Signal::STOP)?;
        until("the agent is stopped", LIMIT, || self.expect_stopped(host).map(Some))
    }

    fn expect_stopped(&self, host: &str) -> Result<()> {
        let ProcessId { pid, .. } = self.trial.agent_process(host)?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let state = status.lines().find(|line| line.starts_with("State:")).unwrap_or_default();
        ensure!(state.contains("(stopped)"), "the agent of host {host} is not stopped: {state}");
        Ok(())
    }

    fn expect_cut(&self) -> Result<()> {
        let is_cut = self.trial.are_lanes_cut(self.destination)?;
        ensure!(is_cut, "host {} is still on the network", self.destination);
        Ok(())
    }

    /// Checks that the kernel limits both hosts to the rate.
    fn expect_crawling(&self) -> Result<()> {
        let crawl: BitRate = CRAWL.parse()?;
        for host in [self.source, self.destination] {
            for rate in self.trial.sending_rates(host)? {
                ensure!(rate == crawl, "host {host} may send {rate}, not {crawl}");
            }
        }
        Ok(())
    }

    /// Waits until both agents have read a time of day with this offset.
    fn expect_stepped(&self, seconds: i64) -> Result<()> {
        clock::expect_stepped(self.trial, self.source, seconds)?;
        clock::expect_stepped(self.trial, self.destination, -seconds)
    }

    /// Kills the QEMUs of a host and waits until its agent has noticed. Whatever the agent does
    /// next, it knows that the VM's process is gone.
    fn kill_qemu(&self, host: &str) -> Result<()> {
        let killed = self.trial.hypervisors(host)?;
        self.trial.kill_hypervisors(host)?;
        let log = crate::agents::log(self.trial.paths(), host);
        let noticed = until("the agent notices that its QEMU ended", NOTICE_LIMIT, || {
            let text = std::fs::read_to_string(&log)?;
            let is_noticed = |id: &ProcessId| text.contains(&format!("(process {}) ended", id.pid));
            Ok(killed.iter().all(is_noticed).then_some(()))
        });
        // An agent that is already ending the VM logs nothing.
        drop(noticed);
        Ok(())
    }

    /// Waits until the destination has no shadow, runs the guest, or seems to wait for the source.
    fn until_destination_decides(&self) {
        let decided = until("the destination decides", VERDICT_LIMIT / 2, || {
            let vms = self.trial.ask(self.trial.agent(self.destination).vms())?;
            let waits = vms
                .iter()
                .any(|vm| vm.state == godwit_api::VmState::MigratingIn || vm.page_in.is_some());
            Ok((!waits).then_some(()))
        });
        // A destination that still waits is a valid result.
        let _ = decided;
    }

    fn rate(&self, rate: &str) -> Result<()> {
        let rate = rate.parse()?;
        self.trial.set_sending_rate(self.source, rate)?;
        self.trial.set_sending_rate(self.destination, rate)
    }

    fn filler(&self, host: &str) -> PathBuf {
        self.trial.paths().host(host).join("state/filler")
    }

    fn ram(&self) -> PathBuf {
        self.trial.paths().host(self.destination).join("ram")
    }

    /// Shrinks the tmpfs so that only a few more pages fit.
    fn narrow_ram(&self) -> Result<()> {
        let used = rustix::fs::statvfs(self.ram())?;
        let used_bytes = (used.f_blocks - used.f_bfree) * used.f_frsize;
        self.remount_ram(&(used_bytes + LAST_BYTES).to_string())
    }

    fn remount_ram(&self, size: &str) -> Result<()> {
        let ram = self.ram();
        let mounted = Command::new("mount")
            .args(["-o", &format!("remount,size={size}")])
            .arg(&ram)
            .output()?;
        if !mounted.status.success() {
            bail!("mount: {}", String::from_utf8_lossy(&mounted.stderr));
        }
        Ok(())
    }

    fn run_out_of_memory(&mut self) -> Result<()> {
        let mut members = self.trial.hypervisors(self.destination)?;
        members.push(self.trial.agent_process(self.destination)?);
        self.memory = Some(MemoryGroup::around(&members, LAST_BYTES)?);
        Ok(())
    }

    /// Steps the two hosts' clocks apart.
    fn step(&self, seconds: i64) -> Result<()> {
        clock::step(self.trial, self.source, seconds)?;
        clock::step(self.trial, self.destination, -seconds)
    }
}

/// Fills the file system with a file until no further byte fits.
fn fill(path: &Path) -> Result<()> {
    let mut file = std::fs::File::create(path)?;
    for piece in [4096, 1] {
        loop {
            match file.write(&vec![0; piece]) {
                Ok(written) if written > 0 => {}
                Ok(_) => break,
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}
