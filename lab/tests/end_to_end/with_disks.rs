//! Disks that travel with their VM between hosts with directories of their own: a raw disk, and a
//! layer on a base that both hosts have, while the guest writes and reads both. Moves that are
//! refused, cancelled, cut, full, or cut off with the agent of either host.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_api::{MigrationRequest, StopVm, TravellingDisks};
use godwit_lab::LabOptions;
use godwit_lab::image;
use godwit_lab::random::Random;
use godwit_lab::trial::{
    Guest, GuestPlan, LIMIT, MOVE_LIMIT, Migration, Traces, Trial, other_host, until,
};
use godwit_qemu::{ByteSize, Disk, DiskFormat};
use godwit_types::{DiskMeans, DisksReport, Outcome, Phase, Progress, ReferenceUse, Report};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::disk::{holds_lock, is_locked};
use crate::drives::{BLOCK_BYTES, BLOCKS, expect_blocks, image_at};
use crate::suspend::SmallFolder;
use crate::{check_report, set_link};

const VM: &str = "withdisks";
/// What images hold behind the blocks that the guest writes, and where. No encoding makes it small.
const FILLED_BYTES: usize = 20 << 20;
const FILLED_AT: u64 = 8 << 20;
/// Rate at which the disks take seconds.
const SLOW: &str = "100mbit";

/// The images of a trial, in a directory for each host.
struct Storage {
    folder: TempDir,
    filling: Vec<u8>,
}

impl Storage {
    fn new() -> Result<Storage> {
        let storage = Storage {
            folder: tempfile::tempdir_in("/var/tmp")?,
            filling: Random::new(1).bytes(FILLED_BYTES),
        };
        for host in ["a", "b"] {
            fs::create_dir(storage.of(host))?;
            let base = image_at(&storage.base_of(host), DiskFormat::Raw)?;
            storage.fill(&base.path)?;
            // One host of this machine must not use the base of the other.
            fs::set_permissions(&base.path, Permissions::from_mode(0o600))?;
        }
        Ok(storage)
    }

    /// The directory for images of a host.
    fn of(&self, host: &str) -> PathBuf {
        self.folder.path().join(host)
    }

    /// The base of the layer, which each host has.
    fn base_of(&self, host: &str) -> PathBuf {
        self.of(host).join("base.raw")
    }

    fn fill(&self, image: &Path) -> Result<()> {
        Ok(File::options().write(true).open(image)?.write_all_at(&self.filling, FILLED_AT)?)
    }

    /// Makes the disks of the guest at host `a`: raw with the filling, and a layer on the base.
    fn disks(&self, iothread: bool) -> Result<Vec<Disk>> {
        let plain = image_at(&self.of("a").join("plain.raw"), DiskFormat::Raw)?;
        let plain = Disk { iothread, ..plain };
        self.fill(&plain.path)?;
        let path = self.of("a").join("layer.qcow2");
        let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw"];
        let made = Command::new("qemu-img").args(create).arg(&path).status()?;
        ensure!(made.success(), "qemu-img create failed");
        Ok(vec![plain, Disk::new(path, DiskFormat::Qcow2)])
    }

    /// Returns the request that moves a guest with all bytes of its disks to the other host. Its
    /// base has the filling as well, and references would leave nothing to send.
    fn to_other_host(&self, guest: &Guest) -> MigrationRequest {
        let to = Some(self.of(other_host(&guest.host)));
        let disks = Some(TravellingDisks { to, ..TravellingDisks::default() });
        let references = ReferenceUse::Own;
        MigrationRequest { disks, references, ..guest.to_other_host() }
    }

    /// Returns the names of the files of a host, hidden ones too, but not the mark of a datastore.
    fn listed(&self, host: &str) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.of(host))? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != ".godwit-datastore");
        names.sort();
        Ok(names)
    }

    /// Stops the guest, and checks all that its images hold: the blocks that it wrote last, and the
    /// filling.
    fn expect_images(&self, trial: &Trial, guest: &Guest) -> Result<()> {
        ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);
        let spec = trial.vm(&guest.host, VM)?.spec;
        let stop = StopVm { force: true, grace_ms: None };
        trial.ask(trial.agent(&guest.host).stop_vm(VM, stop))?;
        for disk in &spec.disks {
            expect_blocks(&disk.path)?;
            let raw = disk.path.with_extension("read");
            let bytes = fs::read(&raw)?;
            fs::remove_file(&raw)?;
            expect_newest_blocks(&bytes).with_context(|| disk.path.display().to_string())?;
            let from = usize::try_from(FILLED_AT)?;
            ensure!(
                bytes[from..from + FILLED_BYTES] == self.filling,
                "{}: the filling is lost",
                disk.path.display()
            );
        }
        Ok(())
    }
}

/// Checks that a disk holds the blocks that the guest wrote last, without a gap.
fn expect_newest_blocks(disk: &[u8]) -> Result<()> {
    let mut found = Vec::new();
    for block in disk.chunks_exact(BLOCK_BYTES).take(usize::try_from(BLOCKS)?) {
        found.push(u64::from_le_bytes(block[..8].try_into()?));
    }
    let newest = found.iter().copied().max().context("an empty disk")?;
    for number in newest.saturating_sub(BLOCKS - 1)..=newest {
        let there = found[usize::try_from(number % BLOCKS)?];
        ensure!(there == number, "block {there} is where {number} of {newest} was written");
    }
    Ok(())
}

/// A lab in which each host has its own directory for images, and a guest that writes its disks at
/// host `a`.
struct Begun {
    trial: Trial,
    storage: Storage,
    guest: Guest,
    /// The traces of the hosts without the guest.
    clean: [Traces; 2],
}

fn begin(name: &str) -> Result<Option<Begun>> {
    begin_with(name, false)
}

/// Begins as [`begin`]. `iothread`: a disk has a thread of its own, whatever QEMU there is.
fn begin_with(name: &str, iothread: bool) -> Result<Option<Begun>> {
    let options = LabOptions { link: Some("1gbit".parse()?), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with(name, options)? else { return Ok(None) };
    if !Path::new("/usr/bin/qemu-img").exists() {
        eprintln!("skipped: {name}: no qemu-img (apt-get install qemu-utils)");
        trial.finish()?;
        return Ok(None);
    }
    let storage = Storage::new()?;
    for host in ["a", "b"] {
        set_vm_dir(&trial, host, &storage.of(host))?;
    }
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let iothread = iothread || exports_are_sound(&trial)?;
    let plan = GuestPlan {
        disks: storage.disks(iothread)?,
        fill: ByteSize::from_mib(16),
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new(VM)
    };
    let guest = trial.guest("a", &plan)?;
    for disk in ["vda", "vdb"] {
        let wanted = format!("DRIVES {disk} of 65536 sectors is written");
        until(&wanted, LIMIT, || Ok(trial.console("a", VM)?.contains(&wanted).then_some(())))?;
    }
    Ok(Some(Begun { trial, storage, guest, clean }))
}

/// Whether QEMU survives the end of a reader of a disk with an I/O thread (docs/engines.md).
fn exports_are_sound(trial: &Trial) -> Result<bool> {
    let version = trial.ask(trial.agent("a").host())?.qemu_version.context("no QEMU")?;
    let major: u32 = version.split('.').next().context("no version")?.parse()?;
    Ok(major >= 9)
}

fn set_vm_dir(trial: &Trial, host: &str, dir: &Path) -> Result<()> {
    let dirs: toml::Value = vec![dir.display().to_string()].into();
    trial.reconfigure(host, |config| drop(config.insert("vm_dirs".to_owned(), dirs)))
}

#[test]
fn disks_move_there_and_back_with_the_guest() -> Result<()> {
    let Some(Begun { trial, storage, mut guest, clean }) = begin(VM)? else { return Ok(()) };
    let images = trial.vm("a", VM)?.spec.disks;
    let request = storage.to_other_host(&guest);
    let dry = trial.ask(trial.agent("a").dry_run(VM, &request))?;
    ensure!(dry.error.is_none(), "{:?}", dry.error);
    ensure!(storage.listed("b")? == ["base.raw"], "{:?}", storage.listed("b")?);

    let mut shown = None;
    let watched = trial.migrate_followed(&mut guest, &request, MOVE_LIMIT, |progress| {
        if progress.phase == Phase::Disks {
            shown = progress.disks.or(shown);
        }
    })?;
    check_report(&watched.report)?;
    let disks = expect_moved(&watched.report)?;
    trial.expect_whole(&guest)?;
    let shown = shown.context("no progress of the disks")?;
    ensure!(shown.total_bytes >= FILLED_BYTES as u64, "{shown:?}");
    ensure!(!disks.disks[0].base_was_there && disks.disks[1].base_was_there, "{disks:#?}");
    ensure!(disks.disks[0].sent_bytes >= FILLED_BYTES as u64, "{disks:#?}");
    // The base, with its filling, stayed where it was.
    ensure!(disks.disks[1].sent_bytes < 8 << 20, "{disks:#?}");
    ensure!(disks.disks.iter().all(|disk| disk.referenced_bytes == 0), "{disks:#?}");
    let at_b = trial.vm("b", VM)?;
    let pid = at_b.pid.context("no process")?;
    for (disk, image) in at_b.spec.disks.iter().zip(&images) {
        let name = image.path.file_name().context("no name")?;
        ensure!(disk.path == storage.of("b").join(name), "{}", disk.path.display());
        ensure!(holds_lock(pid, &disk.path)?, "{} is not locked", disk.path.display());
        ensure!(!is_locked(image)?, "{} is locked", image.path.display());
    }
    ensure!(!holds_lock(pid, &storage.base_of("a"))?, "the base of the source is in use");
    trial.expect_traces("a", &clean[0])?;
    ensure!(disks.kept_until_unix_ms.is_some(), "{disks:#?}");
    let kept = trial.ask(trial.agent("a").kept_disks())?.disks;
    let is_kept = |image: &Disk| kept.iter().any(|kept| kept.path == image.path && kept.to == "b");
    ensure!(kept.len() == 2 && images.iter().all(is_kept), "{kept:#?}");

    // The images of the first move still have their names, and what the guest has not written
    // since.
    let dir = storage.of("a").display().to_string();
    let back = ["migrate", VM, "--to", "a", "--with-disks", "--disks-to", dir.as_str()];
    let back = [&back[..], &["--delete-source-disks", "--json"]].concat();
    let done = trial.godwit(&back)?;
    ensure!(done.code == Some(0), "{}", done.stderr);
    let disks = expect_moved(&serde_json::from_str(&done.stdout)?)?;
    ensure!(disks.disks[0].referenced_bytes >= FILLED_BYTES as u64, "{disks:#?}");
    ensure!(disks.wire_bytes < FILLED_BYTES as u64 / 4, "{disks:#?}");
    guest.host = "a".to_owned();
    trial.expect_whole(&guest)?;
    let names = ["base.raw", "layer-1.qcow2", "layer.qcow2", "plain-1.raw", "plain.raw"];
    ensure!(storage.listed("a")? == names, "{:?}", storage.listed("a")?);
    until("the images of the source are deleted", LIMIT, || {
        Ok((storage.listed("b")? == ["base.raw"]).then_some(()))
    })?;
    trial.expect_traces("b", &clean[1])?;
    remove_old(&trial, &storage.of("a").join("plain.raw"))?;
    storage.expect_images(&trial, &guest)?;
    trial.finish()
}

/// Removes an image of the first move at host `a`, once both hosts know their datastores.
fn remove_old(trial: &Trial, image: &Path) -> Result<()> {
    let path = image.display().to_string();
    let mut said = String::new();
    let removed = until("the old image is removed", LIMIT, || {
        let done = trial.godwit(&["disk", "kept", "remove", &path, "--host", "a"])?;
        said = done.stderr;
        Ok((done.code == Some(0)).then_some(()))
    });
    removed.with_context(|| said.clone())?;
    let kept = trial.ask(trial.agent("a").kept_disks())?.disks;
    ensure!(!image.exists() && kept.iter().all(|kept| kept.path != image), "{kept:#?}");
    Ok(())
}

#[test]
fn a_move_with_disks_is_refused_or_cancelled_or_goes_on_after_a_cut() -> Result<()> {
    let Some(Begun { trial, storage, mut guest, clean }) = begin("withdisks-cut")? else {
        return Ok(());
    };
    let request = storage.to_other_host(&guest);
    let expect_nothing = || -> Result<()> {
        until("no image is left", LIMIT, || {
            Ok((storage.listed("b")? == ["base.raw"]).then_some(()))
        })?;
        trial.expect_traces("b", &clean[1])?;
        trial.expect_whole(&guest).map(drop)
    };
    // One byte of the base differs.
    let base = File::options().write(true).open(storage.base_of("b"))?;
    base.write_all_at(&[!storage.filling[0]], FILLED_AT)?;
    let refused = trial.begin_migration(VM, "a", &request)?.report()?;
    let error = refused.error.context("moved onto another base")?;
    ensure!(error.message.contains("base.raw") && !error.remedy.is_empty(), "{error:?}");
    eprintln!("  error: {} ({})", error.message, error.remedy);
    expect_nothing()?;
    base.write_all_at(&storage.filling[..1], FILLED_AT)?;

    trial.set_sending_rate("a", SLOW.parse()?)?;
    let mut migration = trial.begin_migration(VM, "a", &request)?;
    sending_disks(&mut migration)?;
    migration.cancel()?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Cancelled, "{report:#?}");
    expect_nothing()?;

    let mut migration = trial.begin_migration(VM, "a", &request)?;
    sending_disks(&mut migration)?;
    set_link(&trial, "down")?;
    migration
        .until(|progress| progress.phase == Phase::Reconnect)?
        .context("the cut was not noticed")?;
    set_link(&trial, "up")?;
    let report = migration.report()?;
    guest.host = "b".to_owned();
    let disks = expect_moved(&report)?;
    eprintln!("  sent again after the cut: {} KiB", disks.resent_bytes >> 10);
    trial.expect_whole(&guest)?;
    storage.expect_images(&trial, &guest)?;
    trial.finish()
}

/// A disk has an I/O thread, which an older QEMU cannot export: it mirrors the disks. The move is
/// cancelled, then survives a cut.
#[test]
fn disks_are_mirrored_where_they_cannot_be_exported() -> Result<()> {
    let begun = begin_with("withdisks-mirror", true)?;
    let Some(Begun { trial, storage, mut guest, clean }) = begun else { return Ok(()) };
    let means = if exports_are_sound(&trial)? { DiskMeans::Bitmaps } else { DiskMeans::Mirror };
    let request = storage.to_other_host(&guest);
    trial.set_sending_rate("a", SLOW.parse()?)?;
    let mut migration = trial.begin_migration(VM, "a", &request)?;
    sending_disks(&mut migration)?;
    migration.cancel()?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Cancelled, "{report:#?}");
    until("no image is left", LIMIT, || Ok((storage.listed("b")? == ["base.raw"]).then_some(())))?;
    trial.expect_traces("b", &clean[1])?;
    trial.expect_whole(&guest)?;

    let mut migration = trial.begin_migration(VM, "a", &request)?;
    sending_disks(&mut migration)?;
    set_link(&trial, "down")?;
    migration
        .until(|progress| progress.phase == Phase::Reconnect)?
        .context("the cut was not noticed")?;
    set_link(&trial, "up")?;
    let report = migration.report()?;
    guest.host = "b".to_owned();
    let disks = expect_moved(&report)?;
    ensure!(disks.means == means, "{disks:#?}");
    ensure!(disks.disks[0].sent_bytes >= FILLED_BYTES as u64, "{disks:#?}");
    // The base, with its filling, stayed where it was.
    ensure!(disks.disks[1].sent_bytes < FILLED_BYTES as u64, "{disks:#?}");
    trial.expect_whole(&guest)?;
    trial.expect_traces("a", &clean[0])?;
    storage.expect_images(&trial, &guest)?;
    trial.finish()
}

/// The agent of either host is killed while the disks travel: the same move, requested once more,
/// sends the rest.
#[test]
#[ignore = "takes a minute: make soak-disks"]
fn agents_are_killed_while_disks_travel() -> Result<()> {
    agents_are_killed("withdisks-kill", false)
}

/// As above, with disks that an older QEMU mirrors: the next move sends everything.
#[test]
#[ignore = "takes a minute: make soak-disks"]
fn agents_are_killed_while_disks_are_mirrored() -> Result<()> {
    agents_are_killed("withdisks-mirror-kill", true)
}

fn agents_are_killed(name: &str, iothread: bool) -> Result<()> {
    let Some(Begun { trial, storage, mut guest, .. }) = begin_with(name, iothread)? else {
        return Ok(());
    };
    for is_source in [false, true] {
        let source = guest.host.clone();
        trial.set_sending_rate(&source, SLOW.parse()?)?;
        let request = storage.to_other_host(&guest);
        let host = if is_source { &source } else { &request.to };
        let mut migration = trial.begin_migration(VM, &source, &request)?;
        sending_disks(&mut migration)?;
        trial.end_agent(host, Signal::KILL)?;
        trial.start_missing()?;
        // Its own agent has forgotten the migration; the other one goes on or says why not.
        let outcome = migration.report().map(|report| report.outcome);
        trial.set_sending_rate(&source, "1gbit".parse()?)?;
        if outcome.is_ok_and(|outcome| outcome == Outcome::Completed) {
            guest.host.clone_from(&request.to);
        } else {
            let report = trial.move_guest(&mut guest, &request)?.report;
            let disks = expect_moved(&report)?;
            let sent: u64 = disks.disks.iter().map(|disk| disk.sent_bytes).sum();
            eprintln!("  {host}: {} KiB were left to send", sent >> 10);
        }
        trial.expect_whole(&guest)?;
        ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);
    }
    storage.expect_images(&trial, &guest)?;
    trial.finish()
}

/// The destination's file system becomes full: the guest stays, and moves once there is room.
#[test]
#[ignore = "takes half a minute: make soak-disks"]
fn a_full_file_system_stops_the_move_and_not_the_guest() -> Result<()> {
    let Some(Begun { trial, storage, mut guest, .. }) = begin("withdisks-full")? else {
        return Ok(());
    };
    let small = SmallFolder::mount()?;
    let dir = small.0.path();
    small.resize("40m")?;
    fs::copy(storage.base_of("b"), dir.join("base.raw"))?;
    set_vm_dir(&trial, "b", dir)?;
    let disks = TravellingDisks { to: Some(dir.to_owned()), ..TravellingDisks::default() };
    let request = MigrationRequest { disks: Some(disks), ..storage.to_other_host(&guest) };
    let refused = trial.begin_migration(VM, "a", &request)?.report()?;
    eprintln!("  error: {:?}", refused.error.context("moved without room")?);
    small.resize("80m")?;
    trial.set_sending_rate("a", SLOW.parse()?)?;
    let mut migration = trial.begin_migration(VM, "a", &request)?;
    sending_disks(&mut migration)?;
    let filler = dir.join("filler");
    ensure!(fs::write(&filler, vec![1; 80 << 20]).is_err(), "the folder is not full");
    let report = migration.report()?;
    let error = report.error.context("moved into a full folder")?;
    ensure!(error.code == "disk-failed" && !error.remedy.is_empty(), "{error:?}");
    eprintln!("  error: {} ({})", error.message, error.remedy);
    trial.expect_whole(&guest)?;
    fs::remove_file(&filler)?;
    small.resize("200m")?;
    expect_moved(&trial.move_guest(&mut guest, &request)?.report)?;
    trial.expect_whole(&guest)?;
    storage.expect_images(&trial, &guest)?;
    trial.finish()
}

/// Loop devices with the names of the guest's disks, in a directory below /dev.
struct Devices {
    dir: TempDir,
    attached: Vec<PathBuf>,
}

impl Devices {
    /// Attaches devices that hold something else; `None`, with a printed reason, if this machine
    /// cannot have any.
    fn attach(folder: &Path) -> Result<Option<Devices>> {
        let dir = tempfile::Builder::new().prefix("godwit-").tempdir_in("/dev")?;
        let mut devices = Devices { dir, attached: Vec::new() };
        for name in ["plain", "layer"] {
            let file = folder.join(format!("{name}.device"));
            fs::write(&file, vec![0xa5; 33 << 20])?;
            let attach = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
            let Some(attached) = attach.ok().filter(|attached| attached.status.success()) else {
                eprintln!("skipped: losetup attaches no device");
                return Ok(None);
            };
            let device = PathBuf::from(String::from_utf8(attached.stdout)?.trim());
            symlink(&device, devices.dir.path().join(name))?;
            devices.attached.push(device);
        }
        Ok(Some(devices))
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        for device in &self.attached {
            let _ = Command::new("losetup").arg("--detach").arg(device).status();
        }
    }
}

/// Disks of both formats move onto block devices, which must not be in use or hold anything unless
/// they are to be overwritten, and from there into files.
#[test]
fn disks_move_onto_block_devices_and_into_files_again() -> Result<()> {
    let Some(Begun { trial, storage, mut guest, .. }) = begin("withdisks-onto")? else {
        return Ok(());
    };
    let Some(devices) = Devices::attach(storage.folder.path())? else { return trial.finish() };
    let dir = devices.dir.path().display().to_string();
    let onto = ["migrate", VM, "--to", "b", "--with-disks", "--flatten-disks", "--json"];
    let onto = [&onto[..], &["--disks-to", dir.as_str()]].concat();
    let expect_refused = |why: &str| -> Result<()> {
        let refused = trial.godwit(&onto)?;
        let says = format!("{}{}", refused.stdout, refused.stderr);
        ensure!(refused.code != Some(0) && says.contains(why), "{why}: {refused:?}");
        Ok(())
    };
    expect_refused("no block device")?;
    let allowed: toml::Value = vec![dir.clone()].into();
    trial.reconfigure("b", |config| drop(config.insert("block_devices".to_owned(), allowed)))?;
    expect_refused("has content")?;
    trial.expect_whole(&guest)?;

    let done = trial.godwit(&[&onto[..], &["--overwrite-devices"]].concat())?;
    ensure!(done.code == Some(0), "{}", done.stderr);
    expect_moved(&serde_json::from_str(&done.stdout)?)?;
    guest.host = "b".to_owned();
    trial.expect_whole(&guest)?;
    let at_b = trial.vm("b", VM)?;
    for (disk, name) in at_b.spec.disks.iter().zip(["plain", "layer"]) {
        ensure!(disk.path == devices.dir.path().join(name), "{}", disk.path.display());
        ensure!(disk.format == DiskFormat::Raw, "{disk:?}");
    }

    let to = storage.of("a").display().to_string();
    let back = ["migrate", VM, "--to", "a", "--with-disks", "--delete-source-disks", "--json"];
    let done = trial.godwit(&[&back[..], &["--disks-to", to.as_str()]].concat())?;
    ensure!(done.code == Some(0), "{}", done.stderr);
    expect_moved(&serde_json::from_str(&done.stdout)?)?;
    guest.host = "a".to_owned();
    trial.expect_whole(&guest)?;
    ensure!(devices.attached.iter().all(|device| device.exists()), "a device is gone");
    storage.expect_images(&trial, &guest)?;
    trial.finish()
}

/// Follows a migration until blocks of the disks were sent.
fn sending_disks(migration: &mut Migration<'_>) -> Result<()> {
    let is_sending = |progress: &Progress| {
        progress.phase == Phase::Disks && progress.disks.is_some_and(|disks| disks.sent_bytes > 0)
    };
    migration.until(is_sending)?.context("the migration was over before its disks")?;
    Ok(())
}

/// Checks the report of a migration with disks that completed, and returns its part on them.
fn expect_moved(report: &Report) -> Result<DisksReport> {
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    let disks = report.disks.clone().context("no disks in the report")?;
    ensure!(disks.disks.len() == 2 && !disks.rounds.is_empty(), "{disks:#?}");
    ensure!(disks.wire_bytes > 0 && disks.last_round_ms.is_some(), "{disks:#?}");
    eprintln!(
        "  {} to {}: {} rounds of the disks, {} KiB, the last in {:.1} ms, switchover {:.1} ms",
        report.from,
        report.to,
        disks.rounds.len(),
        disks.wire_bytes >> 10,
        disks.last_round_ms.unwrap_or_default(),
        report.switchover_ms.unwrap_or_default()
    );
    Ok(disks)
}
