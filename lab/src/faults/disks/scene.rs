//! Lab with a guest whose disks travel, and the checks of one cell.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_api::{MigrationRequest, Resolve, TravellingDisks};
use godwit_qemu::{ByteSize, Disk, DiskFormat};
use godwit_types::{EngineKind, Outcome, Report};
use rustix::process::{Pid, Signal, kill_process};

use super::Findings;
use super::cells::{DiskCell, DiskFault, DiskMoment};
use crate::faults::moment::Side;
use crate::faults::moving::Moving;
use crate::faults::stage::VM;
use crate::faults::{Place, verdict};
use crate::options::{Hooks, LabOptions};
use crate::power::Store;
use crate::trial::{
    Guest, GuestPlan, LIMIT, MARK, MOVE_LIMIT, Trial, VcpuWatch, other_host, request_to, until,
    write_base,
};

const MIB: u64 = 1 << 20;
/// Rate of a host's link. Round 0 of the disks takes about nine seconds.
const LINK: &str = "1gbit";
/// Size of each host's file system for images. Files in it are sparse.
const STORE_BYTES: u64 = 4 << 30;
/// Size of each disk that the guest sees.
const DISK_BYTES: u64 = 1024 * MIB;
/// Content of the first disk's base, which both hosts have.
const BASE_BYTES: u64 = 32 * MIB;
/// Content of each disk. What is on its way at the fault, and may be sent twice, is a small part
/// of it.
const USED_BYTES: u64 = 512 * MIB;
/// Rate at which the guest writes its disks, and the part of each that it rewrites.
const WRITTEN_BYTES_PER_S: u64 = MIB;
const REGION_BYTES: u64 = 2 * MIB;
/// Workload of the memory, so that it has rounds, too.
const BUSY: &str = "dirty:rate=1500,ws=16M,order=random,zero=10,compressible=40";
/// Memory with verifiable content.
const FILL_MIB: u64 = 16;
/// Duration of a cut.
const CUT: Duration = Duration::from_secs(30);
/// Longest wait for a report after the repair.
const REPORT_LIMIT: Duration = Duration::from_secs(150);
/// Most of the disks' content that may be sent twice, in percent.
const MOST_RESENT_PERCENT: f64 = 2.0;
/// Rewritten content of the disks that all rounds together may send.
const REWRITTEN_BYTES: u64 = 48 * MIB;
const BASE: &str = "base.raw";

#[derive(Debug)]
pub(super) struct Scene {
    guest: Option<Guest>,
    trial: Trial,
    /// File systems for images, of host a and of host b.
    stores: Vec<Store>,
    /// Removed last: the file systems are in it.
    root: tempfile::TempDir,
}

impl Scene {
    pub(super) fn begin(name: &str) -> Result<Option<Scene>> {
        let root = tempfile::Builder::new().prefix("godwit-faults-").tempdir_in("/var/tmp")?;
        let options = LabOptions {
            link: Some(LINK.parse()?),
            hooks: Hooks { holds: true, ..Hooks::default() },
            ..LabOptions::default()
        };
        let Some(trial) = Trial::begin_with(name, options)? else { return Ok(None) };
        let mut scene = Scene { guest: None, trial, stores: Vec::new(), root };
        for host in ["a", "b"] {
            let (device, folder) =
                (scene.root.path().join(format!("{host}.ext4")), scene.root.path().join(host));
            let store = Store::make(&device, &folder, STORE_BYTES)?;
            write_base(&folder.join(BASE), 0, BASE_BYTES, BASE_BYTES)?;
            rustix::fs::syncfs(File::open(&folder)?)?;
            scene.stores.push(store);
            let dirs = vec![folder.display().to_string()];
            scene.trial.reconfigure(host, |config| {
                drop(config.insert("vm_dirs".to_owned(), dirs.into()));
            })?;
        }
        Ok(Some(scene))
    }

    pub(super) fn keep_logs(&self, name: &str) {
        if let Err(error) = self.trial.keep_logs(name) {
            eprintln!("cannot keep the logs: {error:#}");
        }
    }

    pub(super) fn finish(self) -> Result<()> {
        self.trial.finish()
    }

    fn store(&self, host: &str) -> Result<&Store> {
        self.stores.get(usize::from(host == "b")).context("the host has no file system")
    }

    /// Returns the guest, and boots it at host a if there is none.
    fn guest(&mut self) -> Result<Guest> {
        if let Some(guest) = &self.guest {
            return Ok(guest.clone());
        }
        self.remove_unused(&[])?;
        let folder = self.store("a")?.folder();
        let plan = GuestPlan {
            fill: ByteSize::from_mib(FILL_MIB),
            workload: BUSY.to_owned(),
            disks: make_images(folder)?,
            ..GuestPlan::new(VM)
        };
        let guest = self.trial.guest("a", &plan)?;
        guest.fill_disks(&[("vda", BASE_BYTES + USED_BYTES), ("vdb", USED_BYTES)])?;
        self.guest = Some(guest.clone());
        Ok(guest)
    }

    pub(super) fn try_cell(&mut self, cell: DiskCell, findings: &mut Findings) -> Result<()> {
        let guest = self.guest()?;
        let (source, destination) = (guest.host.clone(), other_host(&guest.host));
        self.remove_unused(&self.images(&source)?)?;
        guest.workload(BUSY)?;
        guest.write_disks(WRITTEN_BYTES_PER_S, REGION_BYTES)?;
        let before = self.sent_bytes(&source)?;
        let mut sent_by_first = 0;
        let watch = self.trial.watch_vcpus(VM);
        watch.until_seen(&source)?;
        let struck = self.strike(cell, &source, destination);
        let settled = struck.and_then(|(report, sent)| {
            sent_by_first = sent.saturating_sub(before);
            findings.reported.extend(report.iter().map(describe));
            let (place, host) = self.settle(cell, &source, &watch, findings)?;
            host.as_ref().map_or(Ok(()), |host| watch.until_seen(host))?;
            Ok((report, place, host))
        });
        let watched = watch.end();
        let (report, place, host) = settled?;
        findings.place = Some(place);
        watched?;
        check_place(cell, place, report.as_ref())?;
        let Some(host) = host else {
            verdict::remove_ended(&self.trial, VM)?;
            self.guest = None;
            return Ok(());
        };
        self.guest.iter_mut().for_each(|guest| guest.host.clone_from(&host));
        self.expect_right().context("after the fault")?;
        let moved_by_first = (place == Place::Destination).then(|| self.sent_bytes(&source));
        let again = self.move_again().context("a new migration")?;
        let until_there = moved_by_first.unwrap_or_else(|| self.sent_bytes(&source))?;
        findings.sent_mib = Some(mib(until_there.saturating_sub(before)));
        let counted = (place == Place::Source && cell.moment.is_before_memory())
            .then(|| sent_twice(sent_by_first, &again))
            .flatten();
        let reported = report.iter().chain([&again]).filter_map(resent);
        findings.resent_percent = reported.chain(counted).reduce(f64::max);
        check_bytes(cell, findings, self.memory_bytes()?)
    }

    /// Waits until the agents agree where the guest is. Returns the place, and the host that runs
    /// the guest. If the hosts are in doubt where that is allowed, checks that they stay so and run
    /// nothing, and decides as an operator.
    fn settle(
        &self,
        cell: DiskCell,
        source: &str,
        watch: &VcpuWatch,
        findings: &mut Findings,
    ) -> Result<(Place, Option<String>)> {
        let before = watch.seen();
        let settled = verdict::settled(&self.trial, VM, &mut findings.reported);
        let undecided = match settled {
            Ok(None) => return Ok((Place::Nowhere, None)),
            Ok(Some(host)) if host == source => return Ok((Place::Source, Some(host))),
            Ok(Some(host)) => return Ok((Place::Destination, Some(host))),
            Err(undecided) => undecided,
        };
        if !cell.allowed().contains(&Place::InDoubt) {
            return Err(undecided);
        }
        verdict::expect_doubt_at_both(&self.trial, VM)?;
        let after = watch.seen();
        let ran = after.ran_since(&before);
        ensure!(ran.is_empty(), "the guest ran while both hosts were in doubt, on {ran:?}");
        // Nothing has written the source's images since the guest was stopped there.
        let word = Resolve { runs_on: source.to_owned(), keep_memory: true };
        self.trial.ask(self.trial.agent(source).resolve(VM, &word))?;
        let host = verdict::settled(&self.trial, VM, &mut findings.reported)
            .context("after the operator's decision")?;
        ensure!(host.as_deref() == Some(source), "the operator named host {source}, not {host:?}");
        Ok((Place::InDoubt, host))
    }

    /// Starts a migration with the disks, brings it to its moment, injects the fault, and repairs
    /// it. Then waits for the report, if a process is left to give it. Returns also what the
    /// source's NIC had sent when the fault came.
    fn strike(
        &self,
        cell: DiskCell,
        source: &str,
        destination: &str,
    ) -> Result<(Option<Report>, u64)> {
        let trial = &self.trial;
        let request = self.request(destination)?;
        let side = |side| if side == Side::Source { source } else { destination };
        let held = cell.moment.held();
        let held = held.map(|(at, point)| trial.hold(side(at), point)).transpose()?;
        let committed = trial.passing(source, "source.committed")?;
        let moving = Moving::begin(trial, VM, source, &request, false)?;
        match &held {
            Some(held) => held.reached(MOVE_LIMIT).with_context(|| over(&moving))?,
            None => moving
                .until_progress(cell.moment.name(), |progress| cell.moment.is_shown(progress))?,
        }
        if cell.moment == DiskMoment::Committed {
            committed.reached(LIMIT)?;
        }
        let sent;
        match cell.fault {
            DiskFault::CutForHalfMinute => {
                sent = self.sent_bytes(source)?;
                trial.cut_lanes(destination, true)?;
                drop(held);
                #[expect(clippy::disallowed_methods, reason = "the duration of the cut")]
                std::thread::sleep(CUT);
                let is_cut = trial.are_lanes_cut(destination);
                trial.cut_lanes(destination, false)?;
                ensure!(is_cut?, "host {destination} was on the network during the cut");
            }
            DiskFault::KillSourceAgent | DiskFault::KillDestinationAgent => {
                let is_source = cell.fault == DiskFault::KillSourceAgent;
                trial.end_agent(if is_source { source } else { destination }, Signal::KILL)?;
                sent = self.sent_bytes(source)?;
                drop(held);
                trial.start_missing()?;
            }
            DiskFault::PowerLoss => {
                sent = self.sent_bytes(source)?;
                self.lose_power(destination)?;
                drop(held);
                self.store(destination)?.restore_power()?;
                trial.start_missing()?;
            }
        }
        Ok((moving.report(REPORT_LIMIT), sent))
    }

    /// Ends all processes of a host, and drops what it had in memory and what they had not flushed
    /// to its file system.
    fn lose_power(&self, host: &str) -> Result<()> {
        self.trial.cut_power(host)?;
        let store = self.store(host)?;
        store.cut_power()?;
        until("no process of the host is left", LIMIT, || {
            let left = store.users()?;
            for pid in left.iter().filter_map(|pid| Pid::from_raw(*pid)) {
                // It may have ended meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
            Ok(left.is_empty().then_some(()))
        })
    }

    /// Moves the guest with its disks, and checks that the host that it left has no images of it.
    fn move_again(&mut self) -> Result<Report> {
        let guest = self.guest.as_ref().context("no guest")?;
        let from = guest.host.clone();
        let request = self.request(other_host(&from))?;
        let migration = self.trial.begin_migration(VM, &from, &request)?;
        let report = migration.report_within(MOVE_LIMIT, |_| {})?;
        ensure!(report.outcome == Outcome::Completed, "{report:#?}");
        self.guest.iter_mut().for_each(|guest| guest.host.clone_from(&request.to));
        self.expect_right()?;
        let folder = self.store(&from)?.folder();
        until("the source has deleted its images", LIMIT, || {
            let left = files(folder)?;
            ensure!(left == [folder.join(BASE)], "host {from} has {left:?}");
            Ok(Some(()))
        })?;
        Ok(report)
    }

    fn request(&self, to: &str) -> Result<MigrationRequest> {
        let folder = self.store(to)?.folder().to_owned();
        let disks =
            TravellingDisks { to: Some(folder), delete_source: true, ..TravellingDisks::default() };
        Ok(MigrationRequest { disks: Some(disks), ..request_to(to, EngineKind::Godwit) })
    }

    /// Checks the guest's memory and every block of its disks, and that they are on its host.
    fn expect_right(&self) -> Result<()> {
        let guest = self.guest.as_ref().context("no guest")?;
        self.trial.expect_whole(guest)?;
        guest.verify_disks()?;
        let folder = self.store(&guest.host)?.folder();
        let images = self.images(&guest.host)?;
        let are_there = images.iter().all(|image| image.starts_with(folder) && image.exists());
        ensure!(images.len() == 2 && are_there, "host {} has the disks {images:?}", guest.host);
        Ok(())
    }

    /// Returns the images of the VM on a host.
    fn images(&self, host: &str) -> Result<Vec<PathBuf>> {
        let spec = self.trial.vm(host, VM)?.spec;
        Ok(spec.disks.into_iter().map(|disk| disk.path).collect())
    }

    /// Removes images that the VM does not have: those that a killed agent left behind.
    fn remove_unused(&self, used: &[PathBuf]) -> Result<()> {
        for store in &self.stores {
            for file in files(store.folder())? {
                if !file.ends_with(BASE) && !used.contains(&file) {
                    fs::remove_file(&file)
                        .with_context(|| format!("cannot remove {}", file.display()))?;
                }
            }
        }
        Ok(())
    }

    fn sent_bytes(&self, host: &str) -> Result<u64> {
        Ok(self.trial.lane_sent_bytes(host)?.iter().sum())
    }

    /// Returns the guest's memory in use.
    fn memory_bytes(&self) -> Result<u64> {
        let status = self.guest.as_ref().context("no guest")?.status()?;
        let memory = status.memory.context("the guest does not know its memory")?;
        Ok(memory.total_bytes.saturating_sub(memory.free_bytes))
    }
}

/// Makes the images of the guest's disks: one on the base, one raw.
fn make_images(folder: &Path) -> Result<Vec<Disk>> {
    let (top, data) = (folder.join("top.qcow2"), folder.join("data.raw"));
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", BASE];
    let size = DISK_BYTES.to_string();
    let made = Command::new("qemu-img").args(create).arg(&top).arg(size).status()?;
    ensure!(made.success(), "qemu-img create failed");
    File::create_new(&data)?.set_len(DISK_BYTES)?;
    Ok(vec![Disk::new(top, DiskFormat::Qcow2), Disk::new(data, DiskFormat::Raw)])
}

/// Returns the files of a folder, sorted, without the mark that agents put there.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut files = entries.collect::<std::io::Result<Vec<PathBuf>>>()?;
    files.retain(|file| !file.ends_with(MARK));
    files.sort();
    Ok(files)
}

/// Checks the guest's place, and that the report fits.
fn check_place(cell: DiskCell, place: Place, report: Option<&Report>) -> Result<()> {
    let allowed = cell.allowed();
    ensure!(allowed.contains(&place), "the guest is at {place:?}, allowed: {allowed:?}");
    let Some(report) = report else { return Ok(()) };
    let fits = match report.outcome {
        Outcome::Completed => !matches!(place, Place::Source | Place::InDoubt),
        Outcome::Failed | Outcome::Cancelled => {
            !matches!(place, Place::Destination | Place::InDoubt)
        }
        // The doubt has been resolved since, or is there.
        Outcome::InDoubt => true,
    };
    ensure!(fits, "the report says {:?}, and the guest is at {place:?}", report.outcome);
    let has_reason = report.outcome == Outcome::Completed
        || report.error.as_ref().is_some_and(|error| !error.message.is_empty());
    ensure!(has_reason, "the report gives no reason: {report:#?}");
    Ok(())
}

/// Checks that what was on the destination's disks was not sent again: by the reports, and by the
/// bytes on the wire where a fresh start would show.
fn check_bytes(cell: DiskCell, findings: &Findings, memory_bytes: u64) -> Result<()> {
    let resent = findings.resent_percent.context("no report has the disks")?;
    ensure!(
        resent <= MOST_RESENT_PERCENT,
        "{resent:.1} % of the disks' content was sent twice, at most {MOST_RESENT_PERCENT} %"
    );
    if cell.moment.shows_a_fresh_start() {
        let sent_mib = findings.sent_mib.context("nothing was counted")?;
        let most_mib = mib(most_bytes(memory_bytes));
        ensure!(
            sent_mib <= most_mib,
            "{sent_mib:.0} MiB were sent, more than the {most_mib:.0} MiB of disks and memory: \
             content of the disks was sent twice"
        );
    }
    Ok(())
}

/// Returns the most that a migration may send if it sends the disks once: with headers and frames,
/// and the memory with its rounds.
fn most_bytes(memory_bytes: u64) -> u64 {
    let disks_bytes = 2 * USED_BYTES;
    disks_bytes + disks_bytes / 12 + REWRITTEN_BYTES + memory_bytes + memory_bytes / 2
}

/// Returns the part of the disks' content that a migration sent again, in percent.
fn resent(report: &Report) -> Option<f64> {
    let disks = report.disks.as_ref()?;
    #[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
    Some(disks.resent_bytes as f64 * 100.0 / (2 * USED_BYTES) as f64)
}

/// Returns the part of the disks' content that the source sent twice, in percent, if a fault in
/// their rounds ended a migration whose source's NIC had sent so much, and another one continued
/// it: both together, less all content and what the guest may have rewritten between them.
fn sent_twice(nic_bytes: u64, next: &Report) -> Option<f64> {
    let first_round = next.disks.as_ref()?.rounds.first()?;
    // Frames carry headers.
    let sent_bytes = nic_bytes / 1514 * 1448 + first_round.bytes;
    let twice_bytes = sent_bytes.saturating_sub(2 * (USED_BYTES + REGION_BYTES));
    #[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
    Some(twice_bytes as f64 * 100.0 / (2 * USED_BYTES) as f64)
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
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
    match &report.error {
        Some(error) => format!("{:?}: {} ({})", report.outcome, error.message, error.code),
        None => format!("{:?}", report.outcome),
    }
}

#[cfg(test)]
mod tests {
    use godwit_types::{DiskRound, DisksReport, Fault};

    use super::*;

    fn cell(moment: DiskMoment) -> DiskCell {
        DiskCell { moment, fault: DiskFault::CutForHalfMinute }
    }

    #[test]
    fn a_report_must_fit_the_place() {
        let report = |outcome| Report::blank(outcome, VM, "a", "b");
        let half = cell(DiskMoment::Half);
        let there = Place::Destination;
        assert!(check_place(half, there, Some(&report(Outcome::Completed))).is_ok());
        assert!(check_place(half, there, None).is_ok());
        assert!(check_place(half, Place::Source, None).is_err());
        let last = cell(DiskMoment::LastRound);
        assert!(check_place(last, Place::Source, Some(&report(Outcome::Completed))).is_err());
        // Failed, without a reason.
        assert!(check_place(last, Place::Source, Some(&report(Outcome::Failed))).is_err());
    }

    #[test]
    fn a_doubt_is_reported_as_one() {
        let started = DiskCell { fault: DiskFault::PowerLoss, ..cell(DiskMoment::Started) };
        let reported = |outcome| {
            let error = Some(Fault::new("in-doubt", "the lane broke after the commit", ""));
            Report { error, ..Report::blank(outcome, VM, "a", "b") }
        };
        let doubt = Place::InDoubt;
        assert!(check_place(started, doubt, Some(&reported(Outcome::InDoubt))).is_ok());
        for outcome in [Outcome::Completed, Outcome::Failed] {
            assert!(check_place(started, doubt, Some(&reported(outcome))).is_err(), "{outcome:?}");
        }
        // Decided by the hosts, or where they could have decided.
        for place in [Place::Source, Place::Destination, Place::Nowhere] {
            assert!(check_place(started, place, Some(&reported(Outcome::InDoubt))).is_err());
        }
        let half = cell(DiskMoment::Half);
        assert!(check_place(half, doubt, Some(&reported(Outcome::InDoubt))).is_err());
    }

    #[test]
    fn bytes_that_were_sent_twice_are_noticed() {
        let memory = 80 * MIB;
        let found = |resent_percent, sent_mib| Findings {
            resent_percent: Some(resent_percent),
            sent_mib: Some(sent_mib),
            ..Findings::default()
        };
        let check = |moment, findings| check_bytes(cell(moment), &findings, memory);
        assert!(check(DiskMoment::Half, found(1.9, 1200.0)).is_ok());
        assert!(check(DiskMoment::Half, found(2.1, 1200.0)).is_err());
        // Half of the disks, then all of them.
        assert!(check(DiskMoment::Half, found(0.0, 1600.0)).is_err());
        // A later fault lets the memory be sent twice.
        assert!(check(DiskMoment::LastRound, found(0.0, 1600.0)).is_ok());
        assert!(check_bytes(cell(DiskMoment::Half), &Findings::default(), memory).is_err());
    }

    #[test]
    fn resent_bytes_are_a_part_of_the_content() {
        let mut report = Report::blank(Outcome::Completed, VM, "a", "b");
        assert_eq!(resent(&report), None);
        let resent_bytes = 2 * USED_BYTES / 50;
        report.disks = Some(DisksReport { resent_bytes, ..DisksReport::default() });
        assert!(resent(&report).is_some_and(|percent| (1.9..2.1).contains(&percent)));
    }

    #[test]
    fn what_two_migrations_sent_is_compared_with_the_content() {
        let next = |bytes| {
            let rounds = vec![DiskRound { bytes, duration_ms: 1.0 }];
            let disks = DisksReport { rounds, ..DisksReport::default() };
            let disks = Some(disks);
            Report { disks, ..Report::blank(Outcome::Completed, VM, "a", "b") }
        };
        // Half of the disks' content, as the NIC counts it.
        let half = USED_BYTES / 1448 * 1514;
        assert_eq!(sent_twice(half, &next(USED_BYTES + REGION_BYTES)), Some(0.0));
        let ten = 2 * USED_BYTES / 10;
        let found = sent_twice(half, &next(USED_BYTES + 2 * REGION_BYTES + ten));
        assert!(found.is_some_and(|percent| (9.9..10.1).contains(&percent)), "{found:?}");
        assert_eq!(sent_twice(half, &Report::blank(Outcome::Completed, VM, "a", "b")), None);
    }
}
