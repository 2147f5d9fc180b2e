//! Lab with a guest in which one fault after another is tried.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use godwit_api::MigrationRequest;
use godwit_qemu::ByteSize;
use godwit_types::{EngineKind, FailureCode, Outcome, PageInUse, Report, TrackingUse};
use serde::{Deserialize, Serialize};

use super::blow::{Blow, Lasted};
use super::moment::Side;
use super::moving::Moving;
use super::oom::MemoryGroup;
use super::verdict::{self, OwnersFiles};
use super::{Cell, Fault, Moment, Place, build_clock};
use crate::image::default_dir;
use crate::options::{Hooks, LabOptions};
use crate::trial::{
    Guest, GuestPlan, LIMIT, MOVE_LIMIT, Traces, Trial, must_run, other_host, request_to,
};

pub(super) const VM: &str = "web";
/// Rate of a host's link. Round 0 takes about three seconds.
pub(super) const LINK: &str = "300mbit";
/// Guest memory. QEMU's own migration under TCG needs the additional 64 KiB (docs/engines.md).
const MEMORY_BYTES: u64 = (256 << 20) + (64 << 10);
/// Verified memory: half of the total (docs/reliability.md). The kernel uses the rest or leaves it
/// free.
const FILL_MIB: u64 = 128;
/// Workload that writes all the time, so that there are rounds, and far less than the link carries.
const BUSY: &str = "dirty:rate=1500,ws=16M,order=random,zero=10,compressible=40";
/// Workload that leaves 16 MiB missing at a hand-over after round 0.
const VERY_BUSY: &str = "dirty:rate=20000,ws=16M,order=random,zero=0,compressible=0";
/// Rate of page-in, slow enough that a fault finds some pages missing.
const PAGE_IN_LIMIT: &str = "10mbit";
/// Longest wait for the end of a permanent cut in pre-copy, in ms.
const CUT_LIMIT_MS: u64 = 15_000;
/// Longest wait for a report after the repair. A message that a cut of a minute lost is resent only
/// from time to time.
const REPORT_LIMIT: Duration = Duration::from_secs(150);

/// Kind of lab that a fault needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StagePlan {
    /// TLS; links of the kernel.
    Usual,
    /// TLS; links of the kernel; clocks that can be stepped.
    Clocks,
    /// No TLS; links of the emulator.
    Clear,
}

impl Cell {
    /// Returns the kind of lab that the cell needs.
    #[must_use]
    pub fn stage(self) -> StagePlan {
        match self.fault {
            Fault::ClockForward | Fault::ClockBackward => StagePlan::Clocks,
            Fault::CorruptByte => StagePlan::Clear,
            _ => StagePlan::Usual,
        }
    }

    /// Returns why the cell cannot be tried on this machine; `None` if it can.
    #[must_use]
    pub fn missing(self) -> Option<String> {
        match self.fault {
            Fault::OutOfMemory => MemoryGroup::missing(),
            Fault::ClockForward | Fault::ClockBackward => {
                build_clock(&default_dir()).err().map(|error| format!("{error:#}"))
            }
            _ => None,
        }
    }
}

/// Result of a cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CellReport {
    #[serde(flatten)]
    pub cell: Cell,
    /// How the migration found dirty pages.
    #[serde(default)]
    pub tracking: TrackingUse,
    /// Location of the guest afterwards; `None` if unknown.
    pub place: Option<Place>,
    /// Statements of the agents about the migration and the VM.
    #[serde(rename = "told")]
    pub reported: Vec<String>,
    /// Failed check; `None` if all passed.
    pub error: Option<String>,
    /// Reason for skipping the cell; `None` if it was tried.
    pub skipped: Option<String>,
    /// Duration with all checks, in seconds.
    pub seconds: f64,
}

impl CellReport {
    /// Returns whether all checks passed.
    #[must_use]
    pub fn is_passed(&self) -> bool {
        self.error.is_none() && self.skipped.is_none()
    }
}

/// Lab and guest. The guest survives all cells except those that end its QEMU.
#[derive(Debug)]
pub struct Stage {
    name: String,
    plan: StagePlan,
    tracking: TrackingUse,
    /// `None` if a cell left a state that cannot be reused.
    scene: Option<Scene>,
}

#[derive(Debug)]
struct Scene {
    trial: Trial,
    clean: [Traces; 2],
    /// How the migration under a fault finds dirty pages.
    tracking: TrackingUse,
    guest: Option<Guest>,
    /// Files of a guest on the host that runs it, below the host's folder.
    owners: Option<OwnersFiles>,
}

/// Findings of a cell so far.
#[derive(Debug, Default)]
struct Findings {
    place: Option<Place>,
    reported: Vec<String>,
}

impl Stage {
    /// Starts a stage. Returns `None` and prints the reason if this machine cannot run one.
    ///
    /// # Errors
    /// The lab cannot be started.
    pub fn begin(name: &str, plan: StagePlan) -> Result<Option<Stage>> {
        let scene = Scene::begin(name, plan)?;
        Ok(scene.map(|scene| Stage {
            name: name.to_owned(),
            plan,
            tracking: TrackingUse::default(),
            scene: Some(scene),
        }))
    }

    /// Sets how the migrations under faults find dirty pages.
    #[must_use]
    pub fn tracking_by(self, tracking: TrackingUse) -> Stage {
        Stage { tracking, ..self }
    }

    /// Tries a fault at a moment and checks everything afterwards. The report names a failed check.
    /// In that case the logs are kept in `out/trial/NAME-MOMENT-FAULT`, and the next cell gets a
    /// new lab.
    pub fn try_cell(&mut self, cell: Cell) -> CellReport {
        let begun = Instant::now();
        let mut findings = Findings::default();
        let skipped = cell.missing();
        let tried = match &skipped {
            Some(why) if must_run() => {
                Err(anyhow!("cannot try the cell on this machine, and none may be skipped: {why}"))
            }
            Some(_) => Ok(()),
            None => self.try_in_scene(cell, &mut findings),
        };
        CellReport {
            cell,
            tracking: self.tracking,
            place: findings.place,
            reported: findings.reported,
            error: tried.err().map(|error| format!("{error:#}")),
            skipped,
            seconds: begun.elapsed().as_secs_f64(),
        }
    }

    fn try_in_scene(&mut self, cell: Cell, findings: &mut Findings) -> Result<()> {
        ensure!(cell.stage() == self.plan, "{} needs another lab", cell.fault_name());
        let mut scene = match self.scene.take() {
            Some(scene) => scene,
            None => Scene::begin(&self.name, self.plan)?.context("cannot start a lab")?,
        };
        scene.tracking = self.tracking;
        let tried = scene.try_cell(cell, findings);
        let root = format!("{}/", scene.trial.paths().root().display());
        findings.reported.iter_mut().for_each(|report| *report = report.replace(&root, ""));
        match &tried {
            Ok(()) => self.scene = Some(scene),
            Err(_) => {
                let name = format!("{}-{}-{}", self.name, cell.moment.name(), cell.fault_name());
                if let Err(error) = scene.trial.keep_logs(&name) {
                    eprintln!("cannot keep the logs: {error:#}");
                }
                // Only the removal of the lab still matters.
                scene.trial.finish().context("the lab of a cell that failed")?;
            }
        }
        tried
    }

    /// Takes the lab down and checks that nothing is left.
    ///
    /// # Errors
    /// Something is left.
    pub fn finish(self) -> Result<()> {
        self.scene.map_or(Ok(()), |scene| scene.trial.finish())
    }
}

impl Scene {
    fn begin(name: &str, plan: StagePlan) -> Result<Option<Scene>> {
        let clock = match plan {
            StagePlan::Clocks => Some(build_clock(&default_dir())?),
            StagePlan::Usual | StagePlan::Clear => None,
        };
        let options = LabOptions {
            link: Some(LINK.parse()?),
            insecure: plan == StagePlan::Clear,
            force_emulator: plan == StagePlan::Clear,
            hooks: Hooks { holds: true, small_state: true, clock, ..Hooks::default() },
            ..LabOptions::default()
        };
        let Some(trial) = Trial::begin_with(name, options)? else { return Ok(None) };
        let clean = [trial.traces("a")?, trial.traces("b")?];
        let tracking = TrackingUse::default();
        Ok(Some(Scene { trial, clean, tracking, guest: None, owners: None }))
    }

    /// Returns the guest and boots it if there is none.
    fn guest(&mut self, host: &str) -> Result<Guest> {
        if let Some(guest) = &self.guest {
            return Ok(guest.clone());
        }
        let guest = self.trial.guest(host, &plan())?;
        if self.owners.is_none() {
            self.owners = Some(OwnersFiles::of(&self.trial, host)?);
        }
        self.guest = Some(guest.clone());
        Ok(guest)
    }

    /// Deletes the VM and creates it again with its old specification, while the other host
    /// remembers it in an epoch as late as that of its next move there.
    fn create_again(&mut self) -> Result<()> {
        for _ in 0..2 {
            self.move_again().context("so that the other host remembers it")?;
        }
        let host = self.guest.take().context("no guest")?.host;
        let older = self.trial.vm(&host, VM)?;
        self.trial.delete(&host, VM)?;
        self.guest = Some(self.trial.guest_of(&host, &plan(), older.spec.clone())?);
        let newer = self.trial.vm(&host, VM)?;
        ensure!(newer.spec.uuid == older.spec.uuid, "the new VM has another UUID");
        ensure!(newer.incarnation != older.incarnation, "the new VM has the old incarnation");
        Ok(())
    }

    fn try_cell(&mut self, cell: Cell, findings: &mut Findings) -> Result<()> {
        self.guest("a")?;
        if cell.fault == Fault::CreatedAgain {
            self.create_again()?;
        }
        let guest = self.guest("a")?;
        let (source, destination) = (guest.host.clone(), other_host(&guest.host));
        guest.workload(if cell.moment == Moment::PageIn { VERY_BUSY } else { BUSY })?;
        let watch = self.trial.watch_vcpus(VM);
        watch.until_seen(&source)?;
        let struck = self.strike(cell, &guest, destination);
        let settled = struck.and_then(|report| {
            findings.reported.extend(report.iter().map(describe));
            let host = verdict::settled(&self.trial, VM, &mut findings.reported)?;
            host.as_ref().map_or(Ok(()), |host| watch.until_seen(host))?;
            Ok((report, host))
        });
        let watched = watch.end();
        let (report, host) = settled?;
        findings.place = Some(match host.as_deref() {
            None if cell.fault == Fault::GuestShutDown => {
                match verdict::expect_stopped_once(&self.trial, VM)? == source {
                    true => Place::StoppedAtSource,
                    false => Place::StoppedAtDestination,
                }
            }
            None => Place::Nowhere,
            Some(host) if host == source => Place::Source,
            Some(_) => Place::Destination,
        });
        watched?;
        self.check(cell, findings, report.as_ref())?;
        match host {
            Some(host) => self.guest.iter_mut().for_each(|guest| guest.host.clone_from(&host)),
            None => {
                verdict::remove_ended(&self.trial, VM)?;
                self.guest = None;
                for (host, clean) in ["a", "b"].iter().zip(&self.clean) {
                    self.trial
                        .expect_traces(host, clean)
                        .context("after the VM that ended was deleted")?;
                }
                self.guest(&source).context("a new VM")?;
            }
        }
        self.expect_whole_and_alone().context("after the fault")?;
        self.move_again().context("a new migration")
    }

    /// Starts a migration, brings it to its moment, injects the fault, releases the migration and
    /// repairs the fault. Then waits for the report, if a process is left to give it.
    fn strike(&self, cell: Cell, guest: &Guest, destination: &str) -> Result<Option<Report>> {
        let (trial, source) = (&self.trial, &*guest.host);
        let pages_in = cell.moment == Moment::PageIn
            || cell.write.is_some_and(|failing| failing.write.is_for_page_in());
        let page_in = if pages_in { PageInUse::Now } else { PageInUse::Never };
        let mut request = MigrationRequest {
            page_in,
            tracking: self.tracking,
            ..request_to(destination, EngineKind::Godwit)
        };
        if cell.fault == Fault::CutForGood {
            // The default limit for a cut is too long for a trial.
            request.cut_limit_ms = CUT_LIMIT_MS;
        }
        let side = |side| if side == Side::Source { source } else { destination };
        let held = cell.held().map(|(at, point)| trial.hold(side(at), point)).transpose()?;
        let committed = trial.passing(source, "source.committed")?;
        let lacking = match cell.moment {
            Moment::PageIn => Some(trial.hold(source, "source.announce-remaining")?),
            _ => None,
        };
        let by_cli = cell.fault == Fault::KillCli;
        let mut moving = Moving::begin(trial, VM, source, &request, by_cli)?;
        match (&held, &lacking) {
            (Some(held), _) => held.reached(LIMIT).with_context(|| over(&moving))?,
            (None, Some(lacking)) => {
                lacking.reached(LIMIT).with_context(|| over(&moving))?;
                moving.limit(PAGE_IN_LIMIT)?;
                lacking.open();
                moving.until_seen(cell.moment)?;
            }
            (None, None) => moving.until_seen(cell.moment)?,
        }
        if cell.moment == Moment::Committed {
            committed.reached(LIMIT)?;
        }
        let mut blow = Blow::at(trial, cell, guest, destination);
        blow.strike(&mut moving).context("cannot inject the fault")?;
        drop(held);
        let unlimited = || {
            if cell.moment == Moment::PageIn {
                // The agent may be dead.
                let _ = moving.limit("none");
            }
        };
        // A stopped agent does not answer, so this would wait for it.
        let answers = cell.fault != Fault::SilentSource;
        if answers {
            unlimited();
        }
        let lasted = blow.last(&moving);
        let held_up = self.check_while_it_lasts(cell, source, lasted);
        blow.repair().context("cannot repair the fault")?;
        held_up?;
        if !answers {
            unlimited();
        }
        Ok(moving.report(REPORT_LIMIT))
    }

    /// Checks before the repair that the fault had an effect and that at most one agent claims to
    /// run the guest.
    fn check_while_it_lasts(&self, cell: Cell, source: &str, lasted: Lasted) -> Result<()> {
        let Lasted { report, effect } = lasted;
        effect.context("the fault had no effect")?;
        if let Some(report) = report.as_ref().filter(|report| report.outcome == Outcome::Completed)
        {
            ensure!(!cell.holds_up(), "the fault had no effect: {}", describe(report));
        }
        if cell.fault == Fault::CutForGood && cell.moment >= Moment::LastPages {
            let in_doubt = report.is_some_and(|report| report.outcome == Outcome::InDoubt);
            verdict::expect_run_once(&self.trial, VM, in_doubt.then_some(source))
                .context("while the link is cut")?;
        }
        Ok(())
    }

    fn check(&self, cell: Cell, findings: &Findings, report: Option<&Report>) -> Result<()> {
        let place = findings.place.context("the guest's place is unknown")?;
        let allowed = cell.allowed();
        ensure!(
            allowed.contains(&place),
            "the guest is at {place:?}, allowed: {allowed:?}; agents say: {}",
            findings.reported.join("; ")
        );
        if let Some(report) = report {
            let fits = match report.outcome {
                Outcome::Completed => !matches!(place, Place::Source | Place::StoppedAtSource),
                Outcome::Failed | Outcome::Cancelled => {
                    !matches!(place, Place::Destination | Place::StoppedAtDestination)
                }
                // The doubt has been resolved since.
                Outcome::InDoubt => true,
            };
            ensure!(fits, "the report says {:?}, and the guest is at {place:?}", report.outcome);
            let has_reason = report.outcome == Outcome::Completed
                || report.error.as_ref().is_some_and(|error| !error.message.is_empty());
            ensure!(has_reason, "the report gives no reason: {report:#?}");
            let code = report.error.as_ref().map(|error| error.code.as_str());
            let is_by_guest = code == Some(FailureCode::GuestShutDown.name());
            ensure!(
                is_by_guest == (place == Place::StoppedAtSource),
                "the guest is at {place:?}: {report:#?}"
            );
        }
        let reasons = cell.reasons();
        if place == Place::Source && !reasons.is_empty() {
            let error =
                report.and_then(|report| report.error.as_ref()).context("no report says why")?;
            let text = format!("{} ({})", error.message, error.code);
            ensure!(
                reasons.iter().any(|reason| text.contains(reason)),
                "the reason contains none of {reasons:?}: {text}"
            );
        }
        // A killed agent loses what it knew.
        let must_report = cell.fault != Fault::KillSourceAgent || place == Place::Nowhere;
        ensure!(!must_report || !findings.reported.is_empty(), "no agent reports what happened");
        Ok(())
    }

    /// Checks that the guest runs on its host with all memory correct, that the other host has
    /// nothing of it, and that its own host has no more than it needs.
    fn expect_whole_and_alone(&self) -> Result<()> {
        let guest = self.guest.as_ref().context("no guest")?;
        let other = other_host(&guest.host);
        self.trial.expect_whole(guest)?;
        self.trial.expect_traces(other, &self.clean[usize::from(other == "b")])?;
        let running = self.trial.hypervisors(&guest.host)?.len();
        ensure!(running == 1, "{running} QEMUs run on host {}", guest.host);
        self.owners.as_ref().map_or(Ok(()), |owners| owners.expect(&self.trial, &guest.host))
    }

    fn move_again(&mut self) -> Result<()> {
        let guest = self.guest.as_ref().context("no guest")?;
        guest.workload(BUSY)?;
        let request = guest.to_other_host();
        let report = self
            .trial
            .begin_migration(VM, &guest.host, &request)?
            .report_within(MOVE_LIMIT, |_| {})?;
        ensure!(report.outcome == Outcome::Completed, "{report:#?}");
        self.guest.iter_mut().for_each(|guest| guest.host.clone_from(&request.to));
        self.expect_whole_and_alone()
    }
}

fn plan() -> GuestPlan {
    GuestPlan {
        memory: vec![ByteSize::from_bytes(MEMORY_BYTES)],
        fill: ByteSize::from_mib(FILL_MIB),
        workload: BUSY.to_owned(),
        ..GuestPlan::new(VM)
    }
}

/// Explains why a moment was not reached.
fn over(moving: &Moving<'_>) -> String {
    let report = moving.report(Duration::ZERO);
    report.map_or_else(
        || "the migration goes on".to_owned(),
        |report| format!("it is over: {}", describe(&report)),
    )
}

fn describe(report: &Report) -> String {
    let outcome = serde_json::to_value(report.outcome).unwrap_or_default();
    let outcome = outcome.as_str().unwrap_or("?");
    match &report.error {
        Some(error) => format!("migration {outcome}: {} ({})", error.message, error.code),
        None => format!("migration {outcome}"),
    }
}
