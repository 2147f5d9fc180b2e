//! From a resolved specification to a running QEMU: the command line, what the process inherits, and its start.
//!
//! The monitor and the console are sockets that the agent makes and QEMU inherits, listening: the agent connects
//! before QEMU runs, waits for its greeting without looking for files, and nobody but the agent's user can connect.
//! So is all else that QEMU needs of the host (see [`files`]): its user enters none of the agent's directories.
//! QEMU lives in a session of its own with no tie to the agent, so that the agent may end and come back.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use command_fds::CommandFdExt;
use godwit_ram::{ChildLimits, limit_child};
use process_wrap::std::{CommandWrap, ProcessSession};

use crate::process::{Process, QemuProcess};
use crate::qmp::Qmp;
use crate::spec::ResolvedSpec;

mod arguments;
mod error;
mod files;
mod qcow2;

pub(crate) use arguments::SANDBOX;
pub use arguments::{Inherited, memory_id};
pub use error::StartError;
pub use files::{FileError, FoundFile, MOST_COPIED_BYTES, OpenFile, OpenFiles, OpenLayer};
pub use qcow2::ImageError;
pub(crate) use qcow2::backing;

/// The monitor's socket in a VM's run directory.
pub const QMP_SOCKET: &str = "qmp.sock";
/// The console's socket in a VM's run directory.
pub const SERIAL_SOCKET: &str = "serial.sock";
/// What the guest wrote to its console.
pub const CONSOLE_LOG: &str = "console.log";
/// What QEMU itself wrote.
pub const QEMU_LOG: &str = "qemu.log";

/// How much of QEMU's log is looked at for its last words.
const LAST_WORDS_BYTES: u64 = 8 << 10;
/// How many lines of it an error tells.
const LAST_WORDS_LINES: usize = 6;

/// All that a start of QEMU needs.
#[derive(Debug)]
pub struct Launch {
    /// The VM.
    pub spec: ResolvedSpec,
    /// The binary, absolute.
    pub qemu: PathBuf,
    /// The VM's own directory: sockets and logs are made here. It must exist, and may be closed to QEMU's user.
    pub run_dir: PathBuf,
    /// The files of the host that the specification names.
    pub files: OpenFiles,
    /// The files of the shared memory blocks, in the blocks' order, of the blocks' sizes. They belong to QEMU's user; the directories
    /// above may be closed to it.
    pub ram_files: Vec<PathBuf>,
    /// What each NIC is behind, in order.
    pub taps: Vec<Tap>,
    /// The library that hands out QEMU's userfaultfd; none: the external engine can't move this VM.
    pub tracker: Option<Tracker>,
    /// Whom QEMU runs as; none: the agent's own user. Supplementary groups are dropped.
    pub user: Option<(u32, u32)>,
    /// Whether QEMU gives up what it never needs (seccomp): other programs, other rights, other priorities.
    pub sandbox: bool,
    /// What the process is limited to from before its first instruction.
    pub limits: ChildLimits,
    /// Waits for a migration.
    pub incoming: bool,
    /// Does not start the vCPUs: they wait for [`Qmp::cont`]. An incoming VM that is not paused takes its disks and
    /// runs by itself as soon as its state is loaded, where it ran at the source.
    pub paused: bool,
}

/// A tap, as QEMU inherits it. It lives as long as a process has it open.
#[derive(Debug)]
pub struct Tap {
    /// The tap itself, open.
    pub file: OwnedFd,
    /// The kernel's vhost-net, open, where that is to serve the NIC; none: QEMU does.
    pub vhost: Option<OwnedFd>,
}

/// The library preloaded into QEMU.
#[derive(Debug)]
pub struct Tracker {
    pub library: PathBuf,
    /// Its listening socket.
    pub listener: OwnedFd,
    /// Who may connect.
    pub peer_uid: u32,
}

/// What a start makes in the run directory, to hand it to QEMU.
#[derive(Debug)]
struct Prepared {
    qmp: OwnedFd,
    serial: OwnedFd,
    console_log: OwnedFd,
    ram: Vec<OwnedFd>,
    kernel: Option<OwnedFd>,
    initrd: Option<OwnedFd>,
    disks: Vec<Vec<OpenLayer>>,
    taps: Vec<Tap>,
    tracker: Option<PreparedTracker>,
    qemu_log: File,
    /// What the log held before this start.
    qemu_log_start_bytes: u64,
}

#[derive(Debug)]
struct PreparedTracker {
    library: OwnedFd,
    listener: OwnedFd,
    peer_uid: u32,
}

impl Launch {
    /// Starts QEMU and connects to its monitor. When it returns the machine is built and, unless paused, runs.
    ///
    /// # Errors
    /// The files can't be made, the binary can't be started, or QEMU ends at once; then with its last words.
    /// Nothing of the process is left; the run directory stays the caller's.
    pub async fn start(mut self) -> Result<QemuProcess, StartError> {
        let run_dir = self.run_dir.clone();
        let log_path = run_dir.join(QEMU_LOG);
        // Files may have to be copied: nobody else waits for that.
        let spawned = tokio::task::spawn_blocking(move || {
            let prepared = self.prepare()?;
            let log_start_bytes = prepared.qemu_log_start_bytes;
            Ok((self.spawn(prepared)?, log_start_bytes))
        });
        let (pid, log_start_bytes) = match spawned.await {
            Ok(spawned) => spawned?,
            Err(error) => {
                return Err(StartError::prepare(
                    "start QEMU in",
                    &run_dir,
                    &std::io::Error::other(error),
                ));
            }
        };
        let process = Process::of_child(pid)
            .map_err(|why| StartError::prepare("watch the process of", &run_dir, &why))?;
        let connected = Qmp::connect(run_dir.join(QMP_SOCKET)).await;
        let error = match connected {
            Ok(qmp) => return Ok(QemuProcess::new(process, qmp, run_dir)),
            Err(error) => error,
        };
        // Either QEMU has ended, or it must not stay behind.
        let exit = process.end_now(&error).await;
        let last_words = last_words(&log_path, log_start_bytes);
        Err(match exit {
            Some(exit) => StartError::Exited { exit, last_words },
            None => StartError::NotReady { why: error, last_words },
        })
    }

    /// Opens and makes all that QEMU inherits.
    fn prepare(&mut self) -> Result<Prepared, StartError> {
        let qemu_log = self.open_log(QEMU_LOG)?;
        let qemu_log_start_bytes = qemu_log.metadata().map_or(0, |metadata| metadata.len());
        let files = std::mem::take(&mut self.files);
        let hand_over = |file: Option<OpenFile>| {
            let Some(file) = file else { return Ok(None) };
            let path = file.path.clone();
            file.readable_by_all().map(Some).map_err(|why| StartError::prepare("read", &path, &why))
        };
        let open_ram = |path: &PathBuf| {
            let opened = OpenOptions::new().read(true).write(true).open(path);
            opened.map(OwnedFd::from).map_err(|why| StartError::prepare("open", path, &why))
        };
        Ok(Prepared {
            qmp: self.listen(QMP_SOCKET)?,
            serial: self.listen(SERIAL_SOCKET)?,
            console_log: self.open_log(CONSOLE_LOG)?.into(),
            ram: self.ram_files.iter().map(open_ram).collect::<Result<_, _>>()?,
            kernel: hand_over(files.kernel)?,
            initrd: hand_over(files.initrd)?,
            disks: files.disks,
            taps: std::mem::take(&mut self.taps),
            tracker: self.tracker.take().map(prepare_tracker).transpose()?,
            qemu_log,
            qemu_log_start_bytes,
        })
    }

    fn open_log(&self, name: &str) -> Result<File, StartError> {
        let path = self.run_dir.join(name);
        let opened = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
            .open(&path);
        opened.map_err(|why| StartError::prepare("write", &path, &why))
    }

    fn listen(&self, name: &str) -> Result<OwnedFd, StartError> {
        let path = self.run_dir.join(name);
        let error = |why| StartError::prepare("listen at", &path, &why);
        if std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
            std::fs::remove_file(&path).map_err(error)?;
        }
        let listener = UnixListener::bind(&path).map_err(error)?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).map_err(error)?;
        Ok(listener.into())
    }

    /// Starts the process; returns its number.
    fn spawn(self, prepared: Prepared) -> Result<i32, StartError> {
        let mut command = Command::new(&self.qemu);
        command.args(self.command_line(&prepared.numbers())).current_dir("/").env_clear();
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        let log = |file: &File| {
            file.try_clone().map_err(|why| StartError::prepare("write", &self.run_dir, &why))
        };
        command
            .stdin(Stdio::null())
            .stdout(log(&prepared.qemu_log)?)
            .stderr(log(&prepared.qemu_log)?);
        if let Some((uid, gid)) = self.user {
            // The standard library drops supplementary groups with the change of user (Rust 1.95).
            command.uid(uid).gid(gid);
        }
        if let Some(tracker) = &prepared.tracker {
            command
                .env("LD_PRELOAD", path_in_qemu(tracker.library.as_raw_fd()))
                .env("GODWIT_TRACKER_FD", tracker.listener.as_raw_fd().to_string())
                .env("GODWIT_TRACKER_PEER_UID", tracker.peer_uid.to_string());
        }
        command.preserved_fds(prepared.into_fds());
        limit_child(&mut command, self.limits);
        let mut command = CommandWrap::from(command);
        // The child is watched by a pidfd, which serves adopted processes just as well. The command goes with this
        // function and closes the agent's ends of what QEMU inherited: a disk's lock goes with QEMU's.
        let child = command
            .wrap(ProcessSession)
            .spawn()
            .map_err(|why| StartError::Spawn { qemu: self.qemu.clone(), why: why.to_string() })?;
        Ok(child.id().cast_signed())
    }
}

impl Prepared {
    /// The descriptors' numbers, which they keep in QEMU.
    fn numbers(&self) -> Inherited {
        let numbers = |fds: &[OwnedFd]| fds.iter().map(AsRawFd::as_raw_fd).collect();
        let layer = |layer: &OpenLayer| (layer.file.as_fd().as_raw_fd(), layer.format);
        Inherited {
            qmp: self.qmp.as_raw_fd(),
            serial: self.serial.as_raw_fd(),
            console_log: self.console_log.as_raw_fd(),
            ram: numbers(&self.ram),
            kernel: self.kernel.as_ref().map(AsRawFd::as_raw_fd),
            initrd: self.initrd.as_ref().map(AsRawFd::as_raw_fd),
            disks: self.disks.iter().map(|layers| layers.iter().map(layer).collect()).collect(),
            taps: (self.taps.iter())
                .map(|tap| (tap.file.as_raw_fd(), tap.vhost.as_ref().map(AsRawFd::as_raw_fd)))
                .collect(),
        }
    }

    fn into_fds(self) -> Vec<OwnedFd> {
        let taps = self.taps.into_iter().flat_map(|tap| [Some(tap.file), tap.vhost]);
        let tracker = self.tracker.map(|tracker| [tracker.library, tracker.listener]);
        let disks = self.disks.into_iter().flatten().map(|layer| layer.file.into());
        [self.qmp, self.serial, self.console_log]
            .into_iter()
            .chain(self.ram)
            .chain(self.kernel)
            .chain(self.initrd)
            .chain(disks)
            .chain(taps.flatten())
            .chain(tracker.into_iter().flatten())
            .collect()
    }
}

/// The library may lie where QEMU's user has no right to go.
fn prepare_tracker(tracker: Tracker) -> Result<PreparedTracker, StartError> {
    let opened =
        File::open(&tracker.library).and_then(|file| files::readable_by_all(file, "tracker"));
    let library = opened.map_err(|why| StartError::prepare("read", &tracker.library, &why))?;
    Ok(PreparedTracker { library, listener: tracker.listener, peer_uid: tracker.peer_uid })
}

/// Opens once more, in QEMU, what it inherits by that number: by the rights that its user has to the file itself.
pub(crate) fn path_in_qemu(number: RawFd) -> String {
    format!("/proc/self/fd/{number}")
}

/// The last lines that QEMU wrote since the log had `start_bytes`, without time stamps.
fn last_words(log: &Path, start_bytes: u64) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(start_bytes.max(length.saturating_sub(LAST_WORDS_BYTES))))?;
        let mut tail = Vec::new();
        file.take(LAST_WORDS_BYTES).read_to_end(&mut tail)?;
        Ok(tail)
    };
    let Ok(tail) = read() else { return String::new() };
    let text = String::from_utf8_lossy(&tail);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    // Warnings explain little where there are errors.
    let errors: Vec<&str> =
        lines.iter().copied().filter(|line| !line.contains("warning: ")).collect();
    let told = if errors.is_empty() { &lines } else { &errors };
    let told = told[told.len().saturating_sub(LAST_WORDS_LINES)..].iter();
    told.map(|line| line.trim_start_matches("qemu-system-x86_64: ")).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
