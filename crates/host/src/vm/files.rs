//! Files of a VM's process on this host: their paths, creation and complete removal.
//!
//! ```text
//! RUN_DIR/vms/NAME/      qmp.sock serial.sock console.log qemu.log qemu.pid qemu.user
//!                        tpm.log tpm.pid tpm.user, if it has a TPM
//!                        guest-agent.sock, and frozen while the guest's file systems are
//!                        disks.sock, once disks travel with the VM
//! RUN_DIR/trackers/      NAME.sock
//! RAM_DIR/NAME.I.ram     one file for each shared memory block, owned by the VM's user
//! RAM_DIR/NAME.missing   pages that are still on another host while the VM runs without them
//! RAM_DIR/NAME.unrun     the VM is arriving and may not run yet; lost on power-off (tmpfs)
//! ```
//!
//! Only the agent can access these files. Even the VM's own QEMU cannot; it inherits what it needs
//! as open descriptors. The agent can therefore trust their content. Only the memory belongs to the
//! VM's user, which reopens its descriptor.

use std::cell::OnceCell;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_migration::fail_writes;
use godwit_qemu::{
    Accelerator, Backing, QemuLimits, ResolvedSpec, RunningProcess, VmGroups, VmName,
};
use rustix::process::{Pid, Resource, Rlimit};

use crate::kvm;
use crate::qemu_users::{self, QemuUsers};
use crate::user::User;

/// Step in which a memory file is freed.
const FREE_STEP_BYTES: u64 = 32 << 20;
/// Length of the end of QEMU's log that is searched for its last lines.
const LAST_WORDS_BYTES: u64 = 16 << 10;

/// Directories that all VMs of an agent share.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// `run_dir` of the configuration.
    pub run_dir: PathBuf,
    /// The tmpfs for guest memory.
    pub ram_dir: PathBuf,
    /// Users that QEMUs run as.
    pub users: Arc<QemuUsers>,
    /// Cgroups of VMs; `None` if this host gives the agent none.
    pub groups: Option<VmGroups>,
}

impl Places {
    /// Creates the shared directories, accessible to the agent alone.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        fs::create_dir_all(&self.run_dir)?;
        for path in [self.run_dir.clone(), self.run_dir.join("vms"), self.run_dir.join("trackers")]
        {
            fs::create_dir_all(&path)?;
            fs::set_permissions(&path, Permissions::from_mode(0o700))?;
        }
        Ok(())
    }

    /// Returns the paths of one VM.
    #[must_use]
    pub(crate) fn vm(&self, name: &VmName) -> VmFiles {
        VmFiles {
            name: name.clone(),
            dir: self.run_dir.join("vms").join(name),
            tracker_socket: self.run_dir.join("trackers").join(format!("{name}.sock")),
            places: self.clone(),
        }
    }

    /// Returns the names of all VMs with a run directory. Entries with invalid names were not
    /// created by the agent.
    pub(crate) fn vm_names(&self) -> io::Result<Vec<VmName>> {
        let entries = fs::read_dir(self.run_dir.join("vms"))?;
        Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
    }

    /// Returns the guest memory of VMs that are not among `known`.
    pub(crate) fn orphaned_memory(&self, known: &[String]) -> io::Result<Vec<PathBuf>> {
        let mut orphans = Vec::new();
        for entry in fs::read_dir(&self.ram_dir)? {
            let path = entry?.path();
            let owner = path.file_name().and_then(|name| name.to_str()).and_then(file_owner);
            if owner.is_some_and(|owner| !known.iter().any(|name| name == owner)) {
                orphans.push(path);
            }
        }
        Ok(orphans)
    }
}

/// Returns the VM that a memory file `NAME.I.ram` or a note about missing pages belongs to; `None`
/// for other files.
fn file_owner(file: &str) -> Option<&str> {
    let note = || {
        [".missing", ".missing-from", ".unrun"].into_iter().find_map(|end| file.strip_suffix(end))
    };
    memory_owner(file).or_else(note)
}

/// Returns the VM that a memory file `NAME.I.ram` belongs to; `None` for other files.
fn memory_owner(file: &str) -> Option<&str> {
    let (name, block) = file.strip_suffix(".ram")?.rsplit_once('.')?;
    block.parse::<u32>().ok().map(|_| name)
}

/// Paths of one VM on this host.
#[derive(Clone, Debug)]
pub struct VmFiles {
    name: VmName,
    /// Directory with sockets, logs and the process's PID.
    pub dir: PathBuf,
    /// Socket of the library in QEMU.
    pub tracker_socket: PathBuf,
    places: Places,
}

/// Processes of the host, read once for many VMs.
#[derive(Debug)]
pub(crate) struct Processes {
    all: Vec<RunningProcess>,
    /// QEMUs among them, with their arguments.
    qemus: OnceCell<Vec<(RunningProcess, Vec<u8>)>>,
}

impl Processes {
    pub(crate) fn read() -> io::Result<Processes> {
        Ok(Processes { all: RunningProcess::all()?.collect(), qemus: OnceCell::new() })
    }

    fn qemus(&self) -> &[(RunningProcess, Vec<u8>)] {
        self.qemus.get_or_init(|| {
            let qemus = self.all.iter().filter(|process| process.runs_qemu());
            qemus.map(|process| (*process, process.arguments())).collect()
        })
    }
}

impl VmFiles {
    /// Returns the log of the guest's console output: that of the first serial port.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.serial_log(1)
    }

    /// Returns the log of a serial port's output. Ports are counted from 1.
    #[must_use]
    pub(crate) fn serial_log(&self, port: u32) -> PathBuf {
        self.dir.join(godwit_qemu::console_log(port))
    }

    /// Returns the log of QEMU's own output.
    #[must_use]
    pub fn qemu_log(&self) -> PathBuf {
        self.dir.join("qemu.log")
    }

    /// Returns the log of the TPM's output.
    #[must_use]
    pub(crate) fn tpm_log(&self) -> PathBuf {
        self.dir.join(godwit_qemu::TPM_LOG)
    }

    /// Returns the socket of a serial port. Ports are counted from 1.
    #[must_use]
    pub fn serial_socket(&self, port: u32) -> PathBuf {
        self.dir.join(godwit_qemu::serial_socket(port))
    }

    /// Returns the socket on which QEMU exports the disks to this agent while they travel.
    #[must_use]
    pub(crate) fn disks_socket(&self) -> PathBuf {
        self.dir.join("disks.sock")
    }

    /// Returns the socket to which QEMU mirrors the disks while they travel.
    #[must_use]
    pub(crate) fn mirrors_socket(&self) -> PathBuf {
        self.dir.join("mirror.sock")
    }

    /// Returns the file of a memory block.
    #[must_use]
    pub fn memory(&self, block: usize) -> PathBuf {
        self.places.ram_dir.join(format!("{}.{block}.ram", self.name))
    }

    /// Returns the file that lists the VM's missing pages while it runs without them. Like the
    /// memory, it is in the tmpfs.
    #[must_use]
    pub fn missing(&self) -> PathBuf {
        self.places.ram_dir.join(format!("{}.missing", self.name))
    }

    /// Returns the file that names the host with the missing pages.
    fn missing_from(&self) -> PathBuf {
        self.places.ram_dir.join(format!("{}.missing-from", self.name))
    }

    /// Returns the file that exists until an arriving guest is permitted to run.
    fn unrun(&self) -> PathBuf {
        self.places.ram_dir.join(format!("{}.unrun", self.name))
    }

    /// Records that the arriving guest has not been permitted to run. Until
    /// [`VmFiles::note_run_permitted`], or until the host loses power, no query about that is
    /// needed.
    pub(crate) fn note_unrun(&self) -> io::Result<()> {
        fail_writes::check("unrun")?;
        fs::write(self.unrun(), "")
    }

    /// Records that the guest may run. Must be called immediately before it is permitted to.
    pub(crate) fn note_run_permitted(&self) -> io::Result<()> {
        fail_writes::check("unrun-removal")?;
        remove_if_there(fs::remove_file(self.unrun()))
    }

    /// Whether it is certain that the guest has not been permitted to run.
    pub(crate) fn is_unrun(&self) -> bool {
        self.unrun().exists()
    }

    /// Records the host that has the pages that will be missing.
    pub(crate) fn note_missing_from(&self, host: &str) -> io::Result<()> {
        fail_writes::check("missing-from")?;
        fs::write(self.missing_from(), host)?;
        fs::set_permissions(self.missing_from(), Permissions::from_mode(0o600))
    }

    /// Returns the recorded host of the missing pages.
    pub(crate) fn host_of_missing(&self) -> Option<String> {
        fs::read_to_string(self.missing_from()).ok()
    }

    /// Removes notes that an older process of this name may have left beside the memory, so that
    /// none is taken for a note of the process that starts now.
    pub(crate) fn clear_notes(&self) -> io::Result<()> {
        let notes = [self.missing(), self.missing_from(), self.unrun()];
        notes.into_iter().try_for_each(|path| remove_if_there(fs::remove_file(path)))
    }

    pub fn remove_missing(&self) {
        for path in [self.missing(), self.missing_from()] {
            log_failure(&path, remove_if_there(fs::remove_file(&path)));
        }
    }

    /// Returns the files of all shared memory blocks, in the blocks' order.
    #[must_use]
    pub fn memory_of(&self, spec: &ResolvedSpec) -> Vec<PathBuf> {
        let blocks = spec.memory.iter().enumerate();
        blocks
            .filter(|(_, block)| block.backing == Backing::Shared)
            .map(|(i, _)| self.memory(i))
            .collect()
    }

    /// Returns how much memory those files already hold, in bytes.
    #[must_use]
    pub(crate) fn memory_taken_bytes(&self, spec: &ResolvedSpec) -> u64 {
        self.memory_of(spec).iter().map(|path| taken_bytes(path)).sum()
    }

    /// Creates an empty run directory; removes the old one.
    pub fn make_dir(&self) -> io::Result<()> {
        self.end_tpm();
        remove_if_there(fs::remove_dir_all(&self.dir))?;
        DirBuilder::new().mode(0o700).create(&self.dir)
    }

    /// Assigns a user to the VM's QEMU until the VM's other files are removed. The run directory
    /// must exist.
    pub(crate) fn claim_user(&self, accel: Accelerator) -> io::Result<User> {
        fail_writes::check("qemu-user")?;
        let user = self.places.users.claim(&self.places.run_dir.join("vms"), &self.name)?;
        let is_its_own = matches!(*self.places.users, QemuUsers::Each(..));
        Ok(if is_its_own && accel == Accelerator::Kvm { kvm::allow(user) } else { user })
    }

    /// Whether each QEMU and each TPM has a user of its own.
    pub(crate) fn has_own_users(&self) -> bool {
        matches!(*self.places.users, QemuUsers::Each(..))
    }

    /// Assigns a user to the VM's TPM, as [`VmFiles::claim_user`] does to its QEMU.
    pub(crate) fn claim_tpm_user(&self) -> io::Result<User> {
        self.places.users.claim_for_tpm(&self.places.run_dir.join("vms"), &self.name)
    }

    /// Limits the host memory that the VM's QEMU, just started, may take. If the cgroup refuses,
    /// limits the address space.
    pub(crate) fn confine(&self, pid: i32, limits: &QemuLimits) {
        let Some(groups) = &self.places.groups else { return };
        let Err(error) = groups.confine(&self.name, pid, limits) else { return };
        let limit = Some(limits.address_space_bytes);
        let limit = Rlimit { current: limit, maximum: limit };
        let limited = rustix::process::prlimit(Pid::from_raw(pid), Resource::As, limit);
        tracing::warn!(
            vm = self.name.as_str(),
            %error,
            by_address_space = limited.is_ok(),
            "QEMU has no cgroup of its own"
        );
    }

    /// Moves a running process of the VM into the VM's cgroup, if it is in another one. It keeps
    /// the limits that it was started with.
    pub(crate) fn confine_adopted(&self, pid: i32, limits: &QemuLimits) {
        let Some(groups) = &self.places.groups else { return };
        if let Err(error) = groups.confine(&self.name, pid, limits) {
            tracing::warn!(vm = self.name.as_str(), pid, %error, "a process has no own cgroup");
        }
    }

    /// Releases the VM's user, if it has one. Its QEMU has ended.
    fn release_user(&self) {
        if let Some(uid) = qemu_users::noted(&self.dir) {
            kvm::revoke(|gone| gone == uid);
            log_failure(&self.dir, remove_if_there(qemu_users::forget(&self.dir)));
        }
    }

    /// Records the process for the next agent. The start time distinguishes it from a later process
    /// with the same PID.
    pub fn write_pid(&self, pid: i32, start_time: u64) -> io::Result<()> {
        fail_writes::check("qemu-pid")?;
        fs::write(self.dir.join("qemu.pid"), format!("{pid} {start_time}\n"))
    }

    /// Returns the recorded process: PID and start time.
    #[must_use]
    pub fn read_pid(&self) -> Option<(i32, u64)> {
        read_process(&self.dir.join("qemu.pid"))
    }

    /// Whether the files of a VM whose process has ended are of this boot of the host. Its memory
    /// is in a tmpfs, which ends with the boot; for a VM without shared memory, `run_dir` has to be
    /// in one.
    pub(crate) fn are_of_this_boot(&self, spec: &ResolvedSpec) -> bool {
        let memory = self.memory_of(spec);
        self.read_pid().is_some() && (memory.is_empty() || memory.iter().any(|path| path.exists()))
    }

    /// Searches for the VM's QEMU if none is recorded: an agent that crashed between starting QEMU
    /// and recording it leaves one.
    ///
    /// If the VM has its own user, every process of that user belongs to the VM. If QEMUs share a
    /// user, the VM's process is one that runs a QEMU as that user and has the VM's memory or run
    /// directory on its command line. Processes of other users never match, whatever their command
    /// line.
    #[must_use]
    pub fn find_process(&self) -> Option<(i32, u64)> {
        self.find_process_among(&Processes::read().ok()?)
    }

    /// As [`VmFiles::find_process`], among processes that were read before.
    pub(crate) fn find_process_among(&self, processes: &Processes) -> Option<(i32, u64)> {
        let found = match (&*self.places.users, qemu_users::noted(&self.dir)) {
            (QemuUsers::Each(..), Some(own)) => {
                processes.all.iter().find(|process| process.may_act_as(own))
            }
            // The VM has no user of its own, or not yet.
            (users, _) => {
                let shared = users.shared().unwrap_or(rustix::process::geteuid().as_raw());
                let is_own = |(process, arguments): &&(RunningProcess, Vec<u8>)| {
                    process.belongs_to(shared) && self.is_named_in(arguments)
                };
                processes.qemus().iter().find(is_own).map(|(process, _)| process)
            }
        };
        found.map(|process| (process.pid, process.start_time))
    }

    /// Whether these arguments of a process have this VM's memory or run directory.
    fn is_named_in(&self, arguments: &[u8]) -> bool {
        let has = |path: &Path| {
            let path = path.as_os_str().as_bytes();
            arguments.windows(path.len()).any(|window| window == path)
        };
        // QEMU's options double each comma. Earlier agents passed the memory by its path.
        let dir = self.dir.join("").to_string_lossy().replace(',', ",,");
        has(&self.memory(0)) || has(Path::new(&dir))
    }

    /// Returns the VM's process if it runs, recorded or not.
    #[must_use]
    pub fn living_process(&self) -> Option<(i32, u64)> {
        let alive = |&(pid, start_time): &(i32, u64)| godwit_qemu::is_alive(pid, start_time);
        self.read_pid().filter(alive).or_else(|| self.find_process().filter(alive))
    }

    /// Removes everything but the logs, once the process has ended.
    pub fn remove_runtime(&self) {
        self.remove_outside();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            if entry.path().extension().is_none_or(|extension| extension != "log") {
                log_failure(&entry.path(), fs::remove_file(entry.path()));
            }
        }
    }

    /// Gives the logs of a VM without a process to its new name. A failure costs the logs only.
    pub(crate) fn rename(&self, new: &VmFiles) {
        self.remove_runtime();
        log_failure(&self.dir, remove_if_there(fs::rename(&self.dir, &new.dir)));
    }

    pub fn remove_all(&self) {
        self.remove_outside();
        log_failure(&self.dir, remove_if_there(fs::remove_dir_all(&self.dir)));
    }

    /// Removes everything once the guest runs elsewhere. The names go at once, so that the VM can
    /// return. A thread frees the memory behind them in steps, at the lowest priority: returning
    /// gigabytes to the kernel takes a core for tens of milliseconds, or for seconds with small
    /// pages. A guest that moved within the same machine, or another guest of this host, needs that
    /// core just then.
    pub fn remove_all_and_free_later(&self) {
        let open = |path: PathBuf| {
            let opened = fs::OpenOptions::new().write(true).open(&path);
            opened
                .inspect_err(
                    |error| tracing::debug!(path = %path.display(), %error, "freed in one go"),
                )
                .ok()
        };
        let memory: Vec<fs::File> = self.memory_files().into_iter().filter_map(open).collect();
        self.remove_all();
        let body = move || {
            // Applies to this thread alone (Linux). If refused, the ordinary priority stays.
            let _ = rustix::process::nice(19);
            for file in memory {
                if let Err(error) = shrink_in_steps(&file) {
                    tracing::debug!(%error, "freed in one go");
                }
            }
        };
        // Without a thread, the kernel frees all of it here.
        if let Err(error) =
            std::thread::Builder::new().name(format!("free-{}", self.name)).spawn(body)
        {
            tracing::debug!(%error, "freed in one go");
        }
    }

    fn memory_files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.places.ram_dir).into_iter().flatten().flatten();
        let ours = entries.filter(|entry| {
            entry.file_name().to_str().and_then(memory_owner) == Some(self.name.as_str())
        });
        ours.map(|entry| entry.path()).collect()
    }

    fn remove_outside(&self) {
        self.end_tpm();
        log_failure(&self.tracker_socket, remove_if_there(fs::remove_file(&self.tracker_socket)));
        self.remove_missing();
        log_failure(&self.unrun(), remove_if_there(fs::remove_file(self.unrun())));
        for path in self.memory_files() {
            log_failure(&path, remove_if_there(fs::remove_file(&path)));
        }
        self.release_user();
        if let Some(groups) = &self.places.groups {
            groups.release(&self.name);
        }
    }

    /// Returns the last lines of QEMU's log for an error message: at most 5 lines and 1000
    /// characters.
    #[must_use]
    pub fn last_words(&self) -> Option<String> {
        let mut file = fs::File::open(self.qemu_log()).ok()?;
        // A compromised QEMU may have written any amount.
        let end = file.seek(SeekFrom::End(0)).ok()?;
        file.seek(SeekFrom::Start(end.saturating_sub(LAST_WORDS_BYTES))).ok()?;
        let mut log = Vec::new();
        file.take(LAST_WORDS_BYTES).read_to_end(&mut log).ok()?;
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let text = lines[lines.len().saturating_sub(5)..].join("; ");
        let start = text.char_indices().rev().nth(999).map_or(0, |(i, _)| i);
        (!text.is_empty()).then(|| text[start..].to_owned())
    }
}

/// Reads a process from its record: PID and start time.
pub(super) fn read_process(record: &Path) -> Option<(i32, u64)> {
    let text = fs::read_to_string(record).ok()?;
    let (pid, start_time) = text.trim().split_once(' ')?;
    Some((pid.parse().ok()?, start_time.parse().ok()?))
}

/// Returns the space that a file takes in its file system, in bytes; 0 if it does not exist.
pub(super) fn taken_bytes(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).map_or(0, |data| data.blocks() * 512)
}

fn remove_if_there(result: io::Result<()>) -> io::Result<()> {
    result
        .or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// Logs a failed removal; the clean-up continues.
fn log_failure(path: &Path, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(path = %path.display(), %error, "cannot remove a file");
    }
}

/// Files of a VM that is being started. They are removed if this is dropped before
/// [`StagedFiles::keep`].
#[derive(Debug)]
pub(crate) struct StagedFiles(Option<VmFiles>);

impl StagedFiles {
    /// Begins a start; no file exists yet.
    #[must_use]
    pub(crate) fn new(files: VmFiles) -> Self {
        StagedFiles(Some(files))
    }

    /// Keeps the files: the start succeeded.
    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for StagedFiles {
    fn drop(&mut self) {
        if let Some(files) = &self.0 {
            files.remove_all();
        }
    }
}

/// Truncates a file in steps until it is empty, so that no single call takes the kernel long.
fn shrink_in_steps(file: &fs::File) -> io::Result<()> {
    let mut length = file.metadata()?.len();
    while length > 0 {
        length = length.saturating_sub(FREE_STEP_BYTES);
        file.set_len(length)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use parking_lot::Mutex;

    use super::*;

    fn places() -> (tempfile::TempDir, Places) {
        // A range for each: tests at the same time run processes of these users.
        static NEXT: AtomicU32 = AtomicU32::new(1_999_970_000);
        let dir = tempfile::tempdir().unwrap();
        let first = NEXT.fetch_add(10, Ordering::Relaxed);
        let range = format!("{first}-{}", first + 9).parse().unwrap();
        let users = Arc::new(QemuUsers::Each(range, Mutex::new(())));
        let places = Places {
            run_dir: dir.path().join("run"),
            ram_dir: dir.path().join("ram"),
            users,
            groups: None,
        };
        fs::create_dir(&places.ram_dir).unwrap();
        places.prepare().unwrap();
        (dir, places)
    }

    fn named(name: &str) -> VmName {
        VmName::new(name).unwrap()
    }

    fn touch(files: &VmFiles) {
        files.make_dir().unwrap();
        for path in [
            &files.dir.join("qmp.sock"),
            &files.console_log(),
            &files.tracker_socket,
            &files.memory(0),
        ] {
            fs::write(path, "x").unwrap();
        }
    }

    #[test]
    fn a_start_that_fails_leaves_nothing() {
        let (_dir, places) = places();
        let (web, other) = (places.vm(&named("web")), places.vm(&named("web.0")));
        touch(&other);
        let staged = StagedFiles::new(web.clone());
        touch(&web);
        drop(staged);
        assert!(!web.dir.exists() && !web.tracker_socket.exists() && !web.memory(0).exists());
        assert!(other.dir.exists() && other.tracker_socket.exists() && other.memory(0).exists());
        assert_eq!(places.vm_names().unwrap(), ["web.0"]);
    }

    #[test]
    fn the_logs_outlive_the_process() {
        let (_dir, places) = places();
        let web = places.vm(&named("web"));
        touch(&web);
        web.write_pid(42, 4711).unwrap();
        assert_eq!(web.read_pid(), Some((42, 4711)));
        web.remove_runtime();
        assert!(
            web.console_log().exists()
                && !web.dir.join("qmp.sock").exists()
                && web.read_pid().is_none()
        );
        web.remove_all();
        web.remove_all();
    }

    #[test]
    fn only_the_agent_has_access_and_a_user_is_free_again_with_the_files() {
        let (_dir, places) = places();
        let (web, db) = (places.vm(&named("web")), places.vm(&named("db")));
        let claim = |files: &VmFiles| {
            files.make_dir().unwrap();
            files.claim_user(Accelerator::Tcg).unwrap()
        };
        let (first, second) = (claim(&web), claim(&db));
        assert_ne!(first, second);
        for dir in [
            &places.run_dir,
            &places.run_dir.join("vms"),
            &places.run_dir.join("trackers"),
            &web.dir,
        ] {
            assert_eq!(
                fs::metadata(dir).unwrap().permissions().mode() & 0o777,
                0o700,
                "{}",
                dir.display()
            );
        }
        web.remove_runtime();
        assert_eq!(qemu_users::noted(&web.dir), None);
        assert_eq!(claim(&web), first);
        drop(StagedFiles::new(web.clone()));
        assert_eq!(claim(&web), first);
    }

    /// Starts a process that has all of a VM's files among its arguments.
    fn pretender(program: &Path, files: &VmFiles, user: u32) -> std::process::Child {
        use std::os::unix::process::CommandExt;
        let mut command = std::process::Command::new(program);
        command.args(["-f", "/dev/null"]).args([files.memory(0), files.dir.join("qmp.sock")]);
        let quiet = std::process::Stdio::null;
        command.stdout(quiet()).stderr(quiet()).uid(user).spawn().unwrap()
    }

    #[test]
    fn only_a_process_of_the_vms_user_is_its_qemu() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can start a process as another user");
            return;
        }
        let (_dir, places) = places();
        let web = places.vm(&named("web"));
        web.make_dir().unwrap();
        // Another user's program with a matching name, and a program of root that reads the VM's
        // files.
        let (folder, tail) = (tempfile::tempdir().unwrap(), Path::new("/usr/bin/tail"));
        let qemu = folder.path().join("qemu-system-x86_64");
        fs::copy(tail, &qemu).unwrap();
        for path in [folder.path(), &qemu] {
            fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
        }
        let mut others = [pretender(&qemu, &web, 1_999_970_100), pretender(tail, &web, 0)];
        assert_eq!(web.living_process(), None, "the VM has no user of its own yet");
        let user = web.claim_user(Accelerator::Tcg).unwrap();
        assert_eq!(web.living_process(), None);
        let mut own = pretender(&qemu, &web, user.uid);
        let found = web.living_process().map(|(pid, _)| pid);
        assert_eq!(found, Some(own.id().cast_signed()));
        for child in others.iter_mut().chain([&mut own]) {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(web.living_process(), None);
    }

    #[test]
    fn memory_without_a_vm_is_found() {
        let (_dir, places) = places();
        for file in [
            "web.0.ram",
            "web.1.ram",
            "web.missing",
            "a.b.0.ram",
            "c.missing",
            "notes.txt",
            "x.ram",
        ] {
            fs::write(places.ram_dir.join(file), "").unwrap();
        }
        let mut orphans = places.orphaned_memory(&["web".to_owned()]).unwrap();
        orphans.sort();
        assert_eq!(orphans, ["a.b.0.ram", "c.missing"].map(|file| places.ram_dir.join(file)));
    }

    #[test]
    fn the_last_log_lines_are_short() {
        let (_dir, places) = places();
        let web = places.vm(&named("web"));
        web.make_dir().unwrap();
        assert_eq!(web.last_words(), None);
        let text: String = (0..9).map(|i| format!("line {i}\n\n")).collect();
        fs::write(web.qemu_log(), text).unwrap();
        assert_eq!(web.last_words().unwrap(), "line 4; line 5; line 6; line 7; line 8");
        fs::write(web.qemu_log(), "é".repeat(3000)).unwrap();
        assert_eq!(web.last_words().unwrap().chars().count(), 1000);
    }
}
