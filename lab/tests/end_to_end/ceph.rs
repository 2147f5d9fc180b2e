//! Disks in a pool of Ceph: a guest moves with them, and they move into the pool and out while it
//! writes, also together with it. `make ceph` runs these with a cluster of one machine, on a third
//! host of the lab; `GODWIT_CEPH_MOVES` is the number of moves of the guest. Without it they are
//! skipped.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_api::{
    CEPH_RBD, ChangeDrive, ClientError, CreateDisk, DriveChange, ErrorCode, JobState, JobStatus,
    MigrationRequest, MoveDisk, ResizeDisk, StopVm, TravellingDisks, VmInfo, VmState,
};
use godwit_lab::ceph::{CephCluster, POOL};
use godwit_lab::random::Random;
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Migration, Trial, until};
use godwit_lab::{Hooks, LabOptions, image};
use godwit_qemu::{ByteSize, Disk, DiskBus, DiskFormat, is_rbd};
use godwit_types::{DatastoreHealth, Outcome, Phase, Progress, ReferenceUse, Report};
use rustix::process::Signal;

use crate::drives::{expect_blocks, image_at};
use crate::{move_and_check, set_link};

const MIB: u64 = 1 << 20;
/// Host with the cluster, and its address on the migration network.
const CEPH_HOST: &str = "c";
const CEPH_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 13);
/// User of the agents, and its rights.
const USER: &str = "agents";
const RIGHTS: &str = "profile rbd pool=vms";

/// A lab whose hosts a and b have disks in a cluster on host c.
struct Pool {
    // Ended before its namespace.
    cluster: CephCluster,
    trial: Trial,
    /// Keyring of the agents' user.
    keyring: PathBuf,
    /// Files of the cluster; removed when dropped.
    folder: tempfile::TempDir,
}

impl Pool {
    fn begin(name: &str) -> Result<Option<Pool>> {
        if moves()?.is_none() {
            eprintln!("skipped: {name}: GODWIT_CEPH_MOVES is not set (make ceph)");
            return Ok(None);
        }
        if let Some(why) = CephCluster::missing() {
            eprintln!("skipped: {name}: {why}");
            return Ok(None);
        }
        let hooks = Hooks { holds: true, ..Hooks::default() };
        let options = LabOptions { hosts: 3, hooks, ..LabOptions::default() };
        let Some(trial) = Trial::begin_with(name, options)? else { return Ok(None) };
        let folder = tempfile::tempdir_in("/var/tmp")?;
        let files = folder.path().join("ceph");
        let cluster = CephCluster::start(&trial.namespace(CEPH_HOST), CEPH_ADDRESS, &files)?;
        std::fs::create_dir(folder.path().join("disks"))?;
        let keyring = cluster.user(USER, RIGHTS)?;
        let pool = Pool { cluster, trial, keyring, folder };
        for host in ["a", "b"] {
            pool.give(host, USER, &pool.keyring)?;
        }
        Ok(Some(pool))
    }

    /// Returns the directory for disks that are files.
    fn disks(&self) -> PathBuf {
        self.folder.path().join("disks")
    }

    /// Gives a host the access of a user.
    fn give(&self, host: &str, user: &str, key: &Path) -> Result<()> {
        let setting = self.cluster.setting(user, key);
        let dirs = [self.disks(), image::default_dir()];
        let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        self.trial.reconfigure(host, |config| {
            config.insert("ceph".to_owned(), setting);
            config.insert("vm_dirs".to_owned(), dirs.into());
        })
    }

    fn create(&self, name: &str, mib: u64) -> Result<Disk> {
        let request = CreateDisk {
            path: format!("rbd:{POOL}/{name}").into(),
            size: Some(ByteSize::from_mib(mib)),
            format: None,
            base: None,
            base_format: None,
            full_copy: false,
        };
        let made = self.trial.ask(self.trial.agent("a").create_disk(&request))?;
        ensure!(made.virtual_bytes == mib * MIB, "{made:?}");
        Ok(Disk::new(request.path, DiskFormat::Raw))
    }

    /// Checks what the guest wrote to an image that nobody uses.
    fn expect_blocks(&self, image: &str) -> Result<()> {
        let file = self.folder.path().join(format!("{image}.exported"));
        let name = file.display().to_string();
        self.cluster.run("rbd", &["export", "--no-progress", &format!("{POOL}/{image}"), &name])?;
        expect_blocks(&file)
    }

    /// Returns the names of the images in the pool.
    fn images(&self) -> Result<Vec<String>> {
        Ok(self.cluster.run("rbd", &["ls", POOL])?.lines().map(str::to_owned).collect())
    }

    /// Sets the cluster's NIC up or down.
    fn set_cluster(&self, state: &str) -> Result<()> {
        let namespace = self.trial.namespace(CEPH_HOST);
        let set = ["-n", &namespace, "link", "set", "mig0", state];
        ensure!(
            Command::new("ip").args(set).status()?.success(),
            "ip link set mig0 {state} failed"
        );
        Ok(())
    }

    /// Starts a guest at host a that writes and reads these disks.
    fn guest(&self, vm: &str, disks: &[Disk]) -> Result<Guest> {
        let plan = GuestPlan {
            disks: disks.to_vec(),
            image: Some(image::build_with_drives(&image::default_dir())?),
            words: "godwit.drives=on".to_owned(),
            ..GuestPlan::new(vm)
        };
        self.trial.guest("a", &plan)
    }

    fn says(&self, (host, vm): (&str, &str), words: &str) -> Result<()> {
        let wanted = format!("DRIVES {words}");
        until(&format!("the guest says {wanted:?}"), LIMIT, || {
            Ok(self.trial.console(host, vm)?.contains(&wanted).then_some(()))
        })
    }

    fn change(&self, (host, vm): (&str, &str), change: DriveChange) -> Result<VmInfo, ClientError> {
        let request = ChangeDrive { change, vm_dirs_only: false };
        self.trial.ask(self.trial.agent(host).change_drive(vm, &request))
    }

    /// Waits for the end of a disk's move.
    fn moved(&self, (host, vm): (&str, &str), request: &MoveDisk) -> Result<JobStatus> {
        let agent = self.trial.agent(host);
        let job = self.trial.ask(agent.move_disk(vm, request))?;
        until("the move ends", LIMIT, || {
            let job = self.trial.ask(agent.job(&job.id))?;
            Ok((job.state != JobState::Running).then_some(job))
        })
    }

    /// Moves a disk; returns its new place.
    fn expect_moved(&self, at: (&str, &str), request: &MoveDisk) -> Result<PathBuf> {
        let job = self.moved(at, request)?;
        ensure!(job.state == JobState::Done && job.findings.is_empty(), "{job:?}");
        let [file] = &job.files[..] else { anyhow::bail!("{job:?}") };
        let disks = self.trial.vm(at.0, at.1)?.spec.disks;
        ensure!(disks.iter().any(|disk| disk.path == *file), "{disks:?}");
        Ok(file.clone())
    }

    fn finish(self) -> Result<()> {
        drop(self.cluster);
        self.trial.finish()
    }
}

/// Returns the number of moves.
fn moves() -> Result<Option<u32>> {
    let Ok(text) = std::env::var("GODWIT_CEPH_MOVES") else { return Ok(None) };
    text.parse().map(Some).context("GODWIT_CEPH_MOVES is not a valid number")
}

#[test]
fn a_guest_moves_with_disks_in_a_pool() -> Result<()> {
    const VM: &str = "pooled";
    let Some(pool) = Pool::begin("ceph")? else { return Ok(()) };
    let trial = &pool.trial;
    let plain = Disk { iothread: true, ..pool.create("web", 32)? };
    let limited = Disk { bus: DiskBus::Scsi, iops: Some(2000), ..pool.create("web-1", 32)? };
    works_on_images(&pool)?;
    is_a_datastore(&pool)?;
    let mut guest = pool.guest(VM, &[plain.clone(), limited.clone()])?;
    for disk in ["vda", "sda"] {
        pool.says(("a", VM), &format!("{disk} of 65536 sectors is written"))?;
    }
    refuses_without_access(&pool, VM, &mut guest)?;
    for _ in 0..moves()?.unwrap_or(1) {
        move_and_check(trial, &mut guest)?;
        ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);
    }
    let host = guest.host.clone();
    let at = (host.as_str(), VM);
    waits_for_the_cluster(&pool, at)?;
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);

    let hot = Disk { bus: DiskBus::Scsi, ..pool.create("hot", 32)? };
    pool.change(at, DriveChange::Attach { disk: Box::new(hot.clone()) })?;
    pool.says(at, "sdb of 65536 sectors is written")?;
    let size = ByteSize::from_mib(48);
    let grow = ResizeDisk { path: plain.path.clone(), size };
    let grown = trial.ask(trial.agent(at.0).resize_disk(&grow))?;
    ensure!(grown.virtual_bytes == 48 * MIB, "{grown:?}");
    pool.change(at, DriveChange::Detach { path: hot.path.clone() })?;
    pool.says(at, "sdb is gone")?;
    trial.ask(trial.agent(at.0).delete_disk(&hot.path))?;
    let kept = trial.ask(trial.agent(at.0).delete_disk(&plain.path)).err().context("deleted")?;
    ensure!(kept.to_string().contains("uses it"), "{kept}");

    // An agent that starts again finds its VM.
    trial.end_agent(at.0, Signal::KILL)?;
    trial.start_missing()?;
    ensure!(trial.vm(at.0, VM)?.state == VmState::Running, "{:?}", trial.vm(at.0, VM)?);
    expect_no_key(&pool, at)?;
    trial.delete(at.0, VM)?;
    pool.expect_blocks("web")?;
    pool.expect_blocks("web-1")?;
    pool.finish()
}

/// Checks that both hosts report the pool as one datastore, with its space.
fn is_a_datastore(pool: &Pool) -> Result<()> {
    let trial = &pool.trial;
    let known = |host: &str| {
        until("the space of the pool is known", LIMIT, || {
            let mut datastores = trial.ask(trial.agent(host).host())?.datastores;
            let found = datastores.remove(Path::new(&format!("rbd:{POOL}")));
            Ok(found.filter(|found| found.total_bytes > 0))
        })
    };
    let (a, b) = (known("a")?, known("b")?);
    ensure!(a.identity.is_some() && a.identity == b.identity, "{a:?} {b:?}");
    ensure!(a.kind.as_deref() == Some(CEPH_RBD), "{a:?}");
    ensure!(a.health == Some(DatastoreHealth::Ok) && a.problem.is_none(), "{a:?}");
    ensure!(a.free_bytes > 0 && a.free_bytes <= a.total_bytes, "{a:?}");
    Ok(())
}

/// Creates, shows, resizes, lists and deletes images.
fn works_on_images(pool: &Pool) -> Result<()> {
    let (trial, agent) = (&pool.trial, pool.trial.agent("a"));
    let extra = pool.create("extra", 16)?;
    let taken = pool.create("extra", 16).err().context("created twice")?;
    ensure!(taken.to_string().contains("it exists"), "{taken}");
    let shown = trial.ask(agent.disk(&extra.path))?;
    ensure!(shown.virtual_bytes == 16 * MIB && shown.format == Some(DiskFormat::Raw), "{shown:?}");
    let resize = |mib| ResizeDisk { path: extra.path.clone(), size: ByteSize::from_mib(mib) };
    ensure!(trial.ask(agent.resize_disk(&resize(24)))?.virtual_bytes == 24 * MIB, "not resized");
    ensure!(trial.ask(agent.resize_disk(&resize(8))).is_err(), "made smaller");
    let listed = trial.ask(agent.disks())?.disks;
    ensure!(listed.iter().any(|disk| disk.path == extra.path), "{listed:?}");
    trial.ask(agent.delete_disk(&extra.path))?;
    ensure!(!pool.images()?.contains(&"extra".to_owned()), "it stays");
    for (path, code, words) in [
        ("rbd:vms/extra", ErrorCode::HypervisorFailed, "No such file"),
        ("rbd:other/web", ErrorCode::NotFound, "no pool other"),
        ("rbd:vms", ErrorCode::InvalidRequest, "rbd:POOL/IMAGE"),
    ] {
        let error = trial.ask(agent.disk(Path::new(path))).err().context("shown")?;
        ensure!(error.code() == Some(code) && error.to_string().contains(words), "{error}");
        eprintln!("  error: {error}");
    }
    Ok(())
}

/// Begins moves to a host without rights, and to one with another cluster of that name.
fn refuses_without_access(pool: &Pool, vm: &str, guest: &mut Guest) -> Result<()> {
    let trial = &pool.trial;
    let stranger = pool.cluster.user("stranger", "profile rbd pool=other")?;
    pool.give("b", "stranger", &stranger)?;
    let refused = |words: &str| -> Result<()> {
        let report = trial.begin_migration(vm, "a", &MigrationRequest::to("b"));
        let error = match report {
            Ok(migration) => migration.report()?.error.context("moved")?.to_string(),
            Err(error) => error.to_string(),
        };
        eprintln!("  error: {error}");
        ensure!(error.contains(words), "{error}");
        Ok(())
    };
    refused("Operation not permitted")?;
    trial.reconfigure("b", |config| drop(config.remove("ceph")))?;
    refused("no pool vms")?;
    let mut other = pool.cluster.setting(USER, &pool.keyring);
    other[0]["fsid"] = "00000000-0000-4000-8000-000000000001".into();
    trial.reconfigure("b", |config| drop(config.insert("ceph".to_owned(), other)))?;
    refused("it is in Ceph cluster")?;
    pool.give("b", USER, &pool.keyring)?;
    trial.expect_whole(guest)?;
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);
    Ok(())
}

/// Takes the cluster away: the guest's requests wait, and new work is refused.
fn waits_for_the_cluster(pool: &Pool, at: (&str, &str)) -> Result<()> {
    pool.set_cluster("down")?;
    let away = Disk { bus: DiskBus::Scsi, ..Disk::new("rbd:vms/away", DiskFormat::Raw) };
    let attached = pool.change(at, DriveChange::Attach { disk: Box::new(away) });
    let state = pool.trial.vm(at.0, at.1)?.state;
    pool.set_cluster("up")?;
    let error = attached.err().context("attached")?;
    eprintln!("  error: {error}");
    ensure!(error.to_string().contains("cannot open disk rbd:vms/away"), "{error}");
    ensure!(state == VmState::Running, "the VM is {state}");
    Ok(())
}

/// Checks that the key is in no argument, log, record or answer.
fn expect_no_key(pool: &Pool, (host, vm): (&str, &str)) -> Result<()> {
    let ring = std::fs::read_to_string(&pool.keyring)?;
    let key = ring.lines().find_map(|line| line.trim().strip_prefix("key = "));
    let key = key.context("no key")?.as_bytes();
    let has_key = |bytes: &[u8]| bytes.windows(key.len()).any(|part| part == key);
    let info = pool.trial.vm(host, vm)?;
    let pid = info.pid.context("no process")?;
    ensure!(!has_key(&std::fs::read(format!("/proc/{pid}/cmdline"))?), "in the arguments");
    ensure!(!has_key(format!("{info:?}").as_bytes()), "in an answer");
    let mut folders = vec![pool.trial.paths().root().to_owned()];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)?.flatten() {
            // What is gone by now is nothing to look at.
            let Ok(data) = entry.path().symlink_metadata() else { continue };
            if data.is_dir() {
                folders.push(entry.path());
            } else if data.is_file() && data.len() < 16 * MIB {
                let Ok(bytes) = std::fs::read(entry.path()) else { continue };
                files += 1;
                ensure!(!has_key(&bytes), "{}", entry.path().display());
            }
        }
    }
    ensure!(files > 10, "only {files} files were read");
    Ok(())
}

#[test]
fn a_disk_moves_into_a_pool_and_out() -> Result<()> {
    const VM: &str = "poolmoves";
    let Some(pool) = Pool::begin("cephmoves")? else { return Ok(()) };
    let trial = &pool.trial;
    let folder = &pool.disks();
    let plain = image_at(&folder.join("plain.raw"), DiskFormat::Raw)?;
    // Behind what the guest writes: the copy takes a while.
    File::options().write(true).open(&plain.path)?.write_all_at(&vec![0x5a; 6 << 20], 16 * MIB)?;
    let limited = Disk {
        bus: DiskBus::Scsi,
        iops: Some(2000),
        ..image_at(&folder.join("limited.qcow2"), DiskFormat::Qcow2)?
    };
    let mut guest = pool.guest(VM, &[plain.clone(), limited.clone()])?;
    for disk in ["vda", "sda"] {
        pool.says(("a", VM), &format!("{disk} of 65536 sectors is written"))?;
    }
    let at = ("a", VM);
    let into = |path: &Path| MoveDisk::new(path, format!("rbd:{POOL}"));
    for (request, words) in [
        (MoveDisk::new(&plain.path, "rbd:other"), "no pool other"),
        (MoveDisk { format: Some(DiskFormat::Qcow2), ..into(&plain.path) }, "has format raw"),
    ] {
        let error = pool.moved(at, &request)?.error.context("moved")?;
        ensure!(error.message.contains(words), "{error}");
    }
    cancelled(&pool, at, &into(&plain.path))?;
    cut_off(&pool, at, &into(&plain.path))?;

    let pooled = pool.expect_moved(at, &into(&plain.path))?;
    let with_limits = MoveDisk { delete_source: true, ..into(&limited.path) };
    let limited_in_pool = pool.expect_moved(at, &with_limits)?;
    ensure!(!limited.path.exists() && plain.path.exists(), "the wrong image was deleted");
    move_and_check(trial, &mut guest)?;
    move_and_check(trial, &mut guest)?;
    let out = MoveDisk {
        format: Some(DiskFormat::Qcow2),
        delete_source: true,
        ..MoveDisk::new(&pooled, folder)
    };
    let back = pool.expect_moved(at, &out)?;
    ensure!(back.extension().is_some_and(|end| end == "qcow2"), "{}", back.display());
    ensure!(pool.images()?.len() == 1, "{:?}", pool.images()?);
    let limited_back = pool.expect_moved(at, &MoveDisk::new(&limited_in_pool, folder))?;
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);

    trial.ask(trial.agent("a").stop_vm(VM, StopVm { force: true, grace_ms: None }))?;
    let stopped = pool.expect_moved(at, &into(&back))?;
    let stopped = pool.expect_moved(at, &MoveDisk::new(&stopped, folder))?;
    trial.ask(trial.agent("a").delete_vm(VM))?;
    expect_blocks(&stopped)?;
    expect_blocks(&limited_back)?;
    pool.finish()
}

/// Cancels a slow move into the pool; nothing of it stays.
fn cancelled(pool: &Pool, (host, vm): (&str, &str), request: &MoveDisk) -> Result<()> {
    let (trial, agent) = (&pool.trial, pool.trial.agent(host));
    let slow = MoveDisk { bandwidth_limit: "4mbit".parse().ok(), ..request.clone() };
    let job = trial.ask(agent.move_disk(vm, &slow))?;
    until("the copy has begun", LIMIT, || {
        let job = trial.ask(agent.job(&job.id))?;
        ensure!(job.state == JobState::Running, "{job:?}");
        Ok((job.done_bytes > 0).then_some(()))
    })?;
    trial.ask(agent.cancel_job(&job.id))?;
    gone(pool)
}

/// Kills the agent while the guest's requests are held; the next one removes the new image.
fn cut_off(pool: &Pool, (host, vm): (&str, &str), request: &MoveDisk) -> Result<()> {
    let trial = &pool.trial;
    let held = trial.hold(host, "host.disk-move-held")?;
    trial.ask(trial.agent(host).move_disk(vm, request))?;
    held.reached(LIMIT)?;
    trial.end_agent(host, Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    let spec = trial.vm(host, vm)?.spec;
    ensure!(spec.disks[0].path == request.disk, "{spec:?}");
    gone(pool)
}

/// Waits until the pool has no image: they are removed a little later.
fn gone(pool: &Pool) -> Result<()> {
    until("the new image is removed", LIMIT, || Ok(pool.images()?.is_empty().then_some(())))
}

/// Rate of a move that is to be cancelled or cut in the middle.
const SLOW: &str = "100mbit";
/// What a disk holds behind the part that the guest writes: where, and how much.
const FILLED_AT: u64 = 16 * MIB;
const FILLED_BYTES: usize = 15 << 20;

#[test]
fn disks_move_into_a_pool_with_their_guest() -> Result<()> {
    const VM: &str = "pooltravels";
    let Some(pool) = Pool::begin("cephtravels")? else { return Ok(()) };
    let trial = &pool.trial;
    let folder = &pool.disks();
    let plain = image_at(&folder.join("plain.raw"), DiskFormat::Raw)?;
    let filling = Random::new(1).bytes(FILLED_BYTES);
    File::options().write(true).open(&plain.path)?.write_all_at(&filling, FILLED_AT)?;
    let limited = Disk {
        bus: DiskBus::Scsi,
        iops: Some(2000),
        ..image_at(&folder.join("limited.qcow2"), DiskFormat::Qcow2)?
    };
    let mut guest = pool.guest(VM, &[plain.clone(), limited.clone()])?;
    for disk in ["vda", "sda"] {
        pool.says(("a", VM), &format!("{disk} of 65536 sectors is written"))?;
    }
    let to = |place: &str| -> MigrationRequest {
        let disks = TravellingDisks { to: Some(place.into()), ..TravellingDisks::default() };
        let references = ReferenceUse::Own;
        MigrationRequest { disks: Some(disks), references, ..MigrationRequest::to("b") }
    };
    let into_pool = to(&format!("rbd:{POOL}"));
    let refused = trial.begin_migration(VM, "a", &to("rbd:other"))?.report()?;
    let error = refused.error.context("moved into another pool")?;
    ensure!(error.message.contains("no pool other") && !error.remedy.is_empty(), "{error:?}");
    let dry = trial.ask(trial.agent("a").dry_run(VM, &into_pool))?;
    ensure!(dry.error.is_none(), "{:?}", dry.error);
    ensure!(pool.images()?.is_empty(), "{:?}", pool.images()?);

    let slow = MigrationRequest { bandwidth_limit: SLOW.parse().ok(), ..into_pool.clone() };
    let mut migration = trial.begin_migration(VM, "a", &slow)?;
    sending_disks(&mut migration)?;
    migration.cancel()?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Cancelled, "{report:#?}");
    gone(&pool)?;

    made_in_part(&pool, VM, &into_pool)?;

    // The destination loses its cluster at the same time.
    let mut migration = trial.begin_migration(VM, "a", &slow)?;
    sending_disks(&mut migration)?;
    set_link(trial, "down")?;
    let cut = |progress: &Progress| progress.phase == Phase::Reconnect;
    migration.until(cut)?.context("the cut was not noticed")?;
    set_link(trial, "up")?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    guest.host = "b".to_owned();
    trial.expect_whole(&guest)?;
    arrived(&pool, ("b", VM), &report)?;

    move_and_check(trial, &mut guest)?;
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);
    trial.delete("a", VM)?;
    pool.expect_blocks("plain")?;
    pool.expect_blocks("limited")?;
    let mut found = vec![0; FILLED_BYTES];
    File::open(pool.folder.path().join("plain.exported"))?.read_exact_at(&mut found, FILLED_AT)?;
    ensure!(found == filling, "the filling is lost");
    pool.finish()
}

/// Kills the destination's agent when it has made the images; the next one removes them.
fn made_in_part(pool: &Pool, vm: &str, request: &MigrationRequest) -> Result<()> {
    let trial = &pool.trial;
    let held = trial.hold("b", "host.disks-unnamed")?;
    let migration = trial.begin_migration(vm, "a", request)?;
    held.reached(LIMIT)?;
    let images = pool.images()?;
    let are_new = images.iter().all(|image| image.starts_with("godwit-new-"));
    ensure!(images.len() == 2 && are_new, "{images:?}");
    trial.end_agent("b", Signal::KILL)?;
    held.open();
    migration.cancel()?;
    let report = migration.report()?;
    ensure!(report.outcome != Outcome::Completed, "{report:#?}");
    trial.start_missing()?;
    gone(pool)
}

/// Follows a migration until blocks of the disks were sent.
fn sending_disks(migration: &mut Migration<'_>) -> Result<()> {
    let is_sending = |progress: &Progress| {
        progress.phase == Phase::Disks && progress.disks.is_some_and(|disks| disks.sent_bytes > 0)
    };
    migration.until(is_sending)?.context("the migration was over before its disks")?;
    Ok(())
}

/// Checks that both disks of a VM are raw images in the pool, whose cluster is recorded.
fn arrived(pool: &Pool, at: (&str, &str), report: &Report) -> Result<()> {
    let disks = report.disks.clone().context("no disks in the report")?;
    eprintln!(
        "  {} rounds of the disks, {} KiB, {} KiB sent again after the cut, the last round in \
         {:.1} ms",
        disks.rounds.len(),
        disks.wire_bytes >> 10,
        disks.resent_bytes >> 10,
        disks.last_round_ms.unwrap_or_default()
    );
    let images = disks.disks.iter().map(|disk| disk.to.as_str());
    ensure!(images.eq(["rbd:vms/plain", "rbd:vms/limited"]), "{disks:#?}");
    let spec = pool.trial.vm(at.0, at.1)?.spec;
    let is_there = |disk: &Disk| is_rbd(&disk.path) && disk.format == DiskFormat::Raw;
    ensure!(spec.disks.iter().all(is_there), "{:?}", spec.disks);
    ensure!(spec.disks[1].iops == Some(2000), "{:?}", spec.disks[1]);
    let mut images = pool.images()?;
    images.sort();
    ensure!(images == ["limited", "plain"], "{images:?}");
    expect_no_key(pool, at)
}
