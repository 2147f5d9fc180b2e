//! Faults as they are done, and mended.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use super::moving::Moving;
use super::oom::MemoryGroup;
use super::{Fault, clock};
use crate::emulator::Order;
use crate::process::ProcessId;
use crate::trial::{LIMIT, Trial, until};

/// How long a fault lasts that lasts until the source has given its verdict, where it gives none.
const VERDICT_LIMIT: Duration = Duration::from_secs(60);
/// How long an agent may take to notice that a QEMU ended.
const NOTICE_LIMIT: Duration = Duration::from_secs(3);
/// A short cut.
const BRIEFLY: Duration = Duration::from_secs(2);
/// How far clocks are stepped, seconds.
const STEP_S: i64 = 3600;
/// What a crawling link carries.
const CRAWL: &str = "256kbit";
/// What is left in a tmpfs for guest memory that is to become full, and to a group of processes that is to run out of memory, bytes.
const LAST_BYTES: u64 = 8 << 20;

/// A fault between two hosts of a lab.
pub(super) struct Blow<'a> {
    pub(super) trial: &'a Trial,
    pub(super) fault: Fault,
    pub(super) source: &'a str,
    pub(super) destination: &'a str,
    memory: Option<MemoryGroup>,
}

impl<'a> Blow<'a> {
    pub(super) fn new(trial: &'a Trial, fault: Fault, source: &'a str, destination: &'a str) -> Blow<'a> {
        Blow { trial, fault, source, destination, memory: None }
    }

    /// Strikes.
    pub(super) fn strike(&mut self, moving: &mut Moving<'_>) -> Result<()> {
        let Blow { trial, source, destination, .. } = *self;
        match self.fault {
            Fault::KillSourceAgent => trial.end_agent(source, Signal::KILL),
            Fault::KillDestinationAgent => trial.end_agent(destination, Signal::KILL),
            Fault::KillSourceQemu => self.kill_qemu(source),
            Fault::KillDestinationQemu => self.kill_qemu(destination),
            Fault::KillCli => moving.kill_cli(),
            Fault::CutBriefly | Fault::CutForGood => trial.cut_lanes(destination, true),
            Fault::SilentSource => trial.signal_agent(source, Signal::STOP),
            Fault::SilentDestination => trial.signal_agent(destination, Signal::STOP),
            Fault::SlowLink => self.rate(CRAWL),
            Fault::SourceDiskFull => fill(&self.filler(source)),
            Fault::DestinationDiskFull => fill(&self.filler(destination)),
            Fault::RamFull => self.narrow_ram(),
            Fault::OutOfMemory => self.run_out_of_memory(),
            Fault::ClockForward => self.step(STEP_S),
            Fault::ClockBackward => self.step(-STEP_S),
            Fault::CorruptByte => trial
                .order_links(&Order::CorruptNext { namespace: trial.namespace(source), payload_bytes: 4096 }),
        }
    }

    /// Lets the fault last for its time, the migration having been let go, and mends what can be mended.
    pub(super) fn mend(&mut self, moving: &Moving<'_>) -> Result<()> {
        let Blow { trial, source, destination, .. } = *self;
        match self.fault {
            Fault::KillSourceAgent | Fault::KillDestinationAgent => trial.start_missing(),
            Fault::KillSourceQemu | Fault::KillDestinationQemu | Fault::KillCli => Ok(()),
            Fault::CorruptByte => {
                let log = trial.paths().emulator_log();
                until("a byte is changed", LIMIT, || {
                    Ok(std::fs::read_to_string(&log)?.contains("is changed").then_some(()))
                })
            }
            Fault::CutBriefly => {
                #[expect(clippy::disallowed_methods, reason = "so long the cut lasts")]
                std::thread::sleep(BRIEFLY);
                trial.cut_lanes(destination, false)
            }
            Fault::CutForGood => {
                moving.report(VERDICT_LIMIT);
                trial.cut_lanes(destination, false)
            }
            Fault::SilentSource => {
                // It can't say anything: the destination's verdict is its shadow's end, or that it runs.
                self.until_destination_decides();
                trial.signal_agent(source, Signal::CONT)
            }
            Fault::SilentDestination => {
                moving.report(VERDICT_LIMIT);
                trial.signal_agent(destination, Signal::CONT)
            }
            Fault::SlowLink => {
                moving.report(VERDICT_LIMIT);
                let usual = self.trial.options().link.context("this lab's links have no rate")?;
                self.rate(&usual.to_string())
            }
            Fault::SourceDiskFull | Fault::DestinationDiskFull => {
                let host = if self.fault == Fault::SourceDiskFull { source } else { destination };
                moving.report(VERDICT_LIMIT / 4);
                Ok(std::fs::remove_file(self.filler(host))?)
            }
            Fault::RamFull => {
                moving.report(VERDICT_LIMIT);
                self.remount_ram("100%")
            }
            Fault::OutOfMemory => {
                let memory = self.memory.take().context("nobody is out of memory")?;
                let killed = || Ok(memory.has_killed()?.then_some(()));
                until("somebody is killed for want of memory", LIMIT, killed)?;
                memory.remove()?;
                trial.start_missing()
            }
            Fault::ClockForward | Fault::ClockBackward => {
                moving.report(VERDICT_LIMIT);
                self.step(0)
            }
        }
    }

    /// And waits until its agent has noticed: what it does next, it does with a VM whose process is gone.
    fn kill_qemu(&self, host: &str) -> Result<()> {
        let killed = self.trial.hypervisors(host)?;
        self.trial.kill_hypervisors(host)?;
        let log = crate::agents::log(self.trial.paths(), host);
        let noticed = until("the agent notices that its QEMU ended", NOTICE_LIMIT, || {
            let text = std::fs::read_to_string(&log)?;
            let is_noticed = |id: &ProcessId| text.contains(&format!("(process {}) ended", id.pid));
            Ok(killed.iter().all(is_noticed).then_some(()))
        });
        // One that is ending that VM already says nothing of it.
        drop(noticed);
        Ok(())
    }

    /// Waits until the destination has no shadow any more, or runs the guest, or seems to wait for the source.
    fn until_destination_decides(&self) {
        let decided = until("the destination decides", VERDICT_LIMIT / 2, || {
            let vms = self.trial.ask(self.trial.agent(self.destination).vms())?;
            let waits =
                vms.iter().any(|vm| vm.state == godwit_api::VmState::MigratingIn || vm.page_in.is_some());
            Ok((!waits).then_some(()))
        });
        // That it waits is an answer too.
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

    /// Leaves room for a few pages more than there are.
    fn narrow_ram(&self) -> Result<()> {
        let used = rustix::fs::statvfs(self.ram())?;
        let used_bytes = (used.f_blocks - used.f_bfree) * used.f_frsize;
        self.remount_ram(&(used_bytes + LAST_BYTES).to_string())
    }

    fn remount_ram(&self, size: &str) -> Result<()> {
        let ram = self.ram();
        let mounted =
            Command::new("mount").args(["-o", &format!("remount,size={size}")]).arg(&ram).output()?;
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

    /// The two hosts' clocks go apart.
    fn step(&self, seconds: i64) -> Result<()> {
        clock::step(self.trial, self.source, seconds)?;
        clock::step(self.trial, self.destination, -seconds)
    }
}

/// Writes a file until no byte more fits.
fn fill(path: &std::path::Path) -> Result<()> {
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
