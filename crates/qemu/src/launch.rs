//! The start of QEMU from a resolved specification: command line, inherited descriptors, process.
//!
//! The monitor and the console are listening sockets that the agent creates and QEMU inherits. So
//! the agent connects before QEMU runs and waits for its greeting without polling for files, and
//! only the agent's user can connect. QEMU inherits everything else that it needs of the host in
//! the same way (see [`files`]): its user enters none of the agent's directories. QEMU runs in its
//! own session without a tie to the agent, so that the agent may end and restart.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use command_fds::CommandFdExt;
use godwit_ram::{ChildLimits, limit_child};
use process_wrap::std::{CommandWrap, ProcessSession};

use crate::firmware::OpenFirmware;
use crate::guest_agent::GUEST_AGENT_SOCKET;
use crate::process::{Process, QMP_SOCKET, QemuProcess, path_in_qemu};
use crate::qmp::Qmp;
use crate::seed;
use crate::spec::ResolvedSpec;

mod adopted;
mod arguments;
mod error;
mod files;
mod qcow2;

pub use arguments::{Inherited, memory_id};
pub(crate) use arguments::{dimm_device, memory_object};
pub use error::StartError;
pub use files::{
    FileError, FoundFile, MOST_COPIED_BYTES, NewDrive, OpenFile, OpenFiles, OpenLayer,
};
pub use qcow2::ImageError;
pub(crate) use qcow2::{
    backing, backing as qcow2_backing, format_of, virtual_bytes as qcow2_bytes,
};

/// Socket of the console in a VM's run directory.
pub const SERIAL_SOCKET: &str = "serial.sock";
/// Output of the guest's console.
pub const CONSOLE_LOG: &str = "console.log";
/// Returns the name of the socket of a serial port, from 1.
#[must_use]
pub fn serial_socket(port: u32) -> String {
    if port <= 1 { SERIAL_SOCKET.to_owned() } else { format!("serial{port}.sock") }
}

/// Returns the name of the log of a serial port's output, from 1.
#[must_use]
pub fn console_log(port: u32) -> String {
    if port <= 1 { CONSOLE_LOG.to_owned() } else { format!("console{port}.log") }
}

/// Output of QEMU itself.
pub const QEMU_LOG: &str = "qemu.log";

/// Bytes at the end of QEMU's log that are searched for its last words.
const LAST_WORDS_BYTES: u64 = 8 << 10;
/// Most lines of QEMU's log in an error.
const LAST_WORDS_LINES: usize = 6;

/// Parameters of a start of QEMU.
#[derive(Debug)]
pub struct Launch {
    /// The VM.
    pub spec: ResolvedSpec,
    /// The binary, absolute.
    pub qemu: PathBuf,
    /// The VM's own directory, for sockets and logs. It must exist, and may be closed to QEMU's
    /// user.
    pub run_dir: PathBuf,
    /// The host's files that the specification names.
    pub files: OpenFiles,
    /// Files of the shared memory blocks, in the order and with the sizes of the blocks. They
    /// belong to QEMU's user; the directories above may be closed to it.
    pub ram_files: Vec<PathBuf>,
    /// The tap of each NIC, in order.
    pub taps: Vec<Tap>,
    /// Connection to the TPM, if the VM has one.
    pub tpm: Option<OwnedFd>,
    /// The library that passes on QEMU's userfaultfd. `None`: the external engine cannot move this
    /// VM.
    pub tracker: Option<Tracker>,
    /// User and group that QEMU runs as; `None` for the agent's own. Supplementary groups are
    /// dropped.
    pub user: Option<(u32, u32)>,
    /// Whether QEMU gives up rights that it never needs (seccomp): to start programs, to change its
    /// rights or priorities.
    pub sandbox: bool,
    /// Limits of the process, in effect before its first instruction.
    pub limits: ChildLimits,
    /// Whether QEMU waits for a migration.
    pub incoming: bool,
    /// Whether the vCPUs wait for [`Qmp::cont`]. An incoming VM that is not paused takes its disks
    /// and runs by itself as soon as its state is loaded, if it ran at the source.
    pub paused: bool,
}

/// A tap that QEMU inherits. It exists as long as a process has it open.
#[derive(Debug)]
pub struct Tap {
    /// The open tap: a descriptor for each queue.
    pub files: Vec<OwnedFd>,
    /// The open vhost-net devices of the kernel, one for each queue, if that serves the NIC; empty
    /// if QEMU does.
    pub vhosts: Vec<OwnedFd>,
}

/// The library that is preloaded into QEMU.
#[derive(Debug)]
pub struct Tracker {
    pub library: PathBuf,
    /// Listening socket of the library.
    pub listener: OwnedFd,
    /// User that may connect.
    pub peer_uid: u32,
}

/// Files and sockets that a start creates in the run directory and passes to QEMU.
#[derive(Debug)]
struct Prepared {
    qmp: OwnedFd,
    serial: OwnedFd,
    console_log: OwnedFd,
    /// Sockets and logs of the other serial ports.
    further_serial: Vec<[OwnedFd; 2]>,
    ram: Vec<OwnedFd>,
    kernel: Option<OwnedFd>,
    initrd: Option<OwnedFd>,
    disks: Vec<Vec<OpenLayer>>,
    /// Settings for cloud-init.
    seed: Option<OwnedFd>,
    cdroms: Vec<Option<OpenFile>>,
    firmware: Option<OpenFirmware>,
    taps: Vec<Tap>,
    /// Listening socket of the guest agent's port.
    guest_agent: Option<OwnedFd>,
    tpm: Option<OwnedFd>,
    tracker: Option<PreparedTracker>,
    qemu_log: File,
    /// Size of the log before this start.
    qemu_log_start_bytes: u64,
}

#[derive(Debug)]
struct PreparedTracker {
    library: OwnedFd,
    listener: OwnedFd,
    peer_uid: u32,
}

impl Launch {
    /// Starts QEMU and connects to its monitor. When this returns, the machine is built and, unless
    /// paused, runs.
    ///
    /// # Errors
    /// The files cannot be created, the binary cannot be started, or QEMU ends at once; then the
    /// error has its last words. No process is left; the run directory stays the caller's.
    pub async fn start(mut self) -> Result<QemuProcess, StartError> {
        let run_dir = self.run_dir.clone();
        let log_path = run_dir.join(QEMU_LOG);
        // Files may have to be copied, which must not block the runtime.
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
        // Either QEMU has ended, or it must not be left behind.
        let exit = process.end_now(&error).await;
        let last_words = last_words(&log_path, log_start_bytes);
        Err(match exit {
            Some(exit) => StartError::Exited { exit, last_words },
            None => StartError::NotReady { why: error, last_words },
        })
    }

    /// Opens and creates everything that QEMU inherits.
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
        let further_serial = (2..=self.spec.serial_ports).map(|port| {
            let socket = self.listen(&serial_socket(port))?;
            Ok([socket, self.open_log(&console_log(port))?.into()])
        });
        let further_serial = further_serial.collect::<Result<_, StartError>>()?;
        Ok(Prepared {
            further_serial,
            qmp: self.listen(QMP_SOCKET)?,
            serial: self.listen(SERIAL_SOCKET)?,
            console_log: self.open_log(CONSOLE_LOG)?.into(),
            ram: self.ram_files.iter().map(open_ram).collect::<Result<_, _>>()?,
            kernel: hand_over(files.kernel)?,
            initrd: hand_over(files.initrd)?,
            disks: files.disks,
            seed: seed::open_seed(&self.spec)
                .map_err(|why| StartError::prepare("write settings for", &self.run_dir, &why))?,
            cdroms: files.cdroms,
            firmware: files.firmware,
            guest_agent: match self.spec.guest_agent {
                true => Some(self.listen(GUEST_AGENT_SOCKET)?),
                false => None,
            },
            taps: std::mem::take(&mut self.taps),
            tpm: self.tpm.take(),
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
        // A pidfd watches the child, as it does for adopted processes. The command is dropped with
        // this function, which closes the agent's ends of what QEMU inherited: a disk's lock is
        // released with QEMU's.
        let child = command
            .wrap(ProcessSession)
            .spawn()
            .map_err(|why| StartError::Spawn { qemu: self.qemu.clone(), why: why.to_string() })?;
        Ok(child.id().cast_signed())
    }
}

impl Prepared {
    /// Returns the numbers of the descriptors, which are the same in QEMU.
    fn numbers(&self) -> Inherited {
        let numbers = |fds: &[OwnedFd]| fds.iter().map(AsRawFd::as_raw_fd).collect();
        let layer = |layer: &OpenLayer| (layer.file.as_fd().as_raw_fd(), layer.format);
        let rbd = |layer: &OpenLayer| Some((layer.file.as_fd().as_raw_fd(), layer.rbd.clone()?));
        let devices = self.disks.iter().flatten().filter(|layer| layer.is_device());
        Inherited {
            qmp: self.qmp.as_raw_fd(),
            serial: self.serial.as_raw_fd(),
            console_log: self.console_log.as_raw_fd(),
            further_serial: (self.further_serial.iter())
                .map(|[socket, log]| (socket.as_raw_fd(), log.as_raw_fd()))
                .collect(),
            ram: numbers(&self.ram),
            kernel: self.kernel.as_ref().map(AsRawFd::as_raw_fd),
            initrd: self.initrd.as_ref().map(AsRawFd::as_raw_fd),
            disks: self.disks.iter().map(|layers| layers.iter().map(layer).collect()).collect(),
            rbd: self.disks.iter().flatten().filter_map(rbd).collect(),
            devices: devices.map(|layer| layer.file.as_fd().as_raw_fd()).collect(),
            seed: self.seed.as_ref().map(AsRawFd::as_raw_fd),
            guest_agent: self.guest_agent.as_ref().map(AsRawFd::as_raw_fd),
            tpm: self.tpm.as_ref().map(AsRawFd::as_raw_fd),
            cdroms: (self.cdroms.iter())
                .map(|image| image.as_ref().map(|file| file.as_fd().as_raw_fd()))
                .collect(),
            firmware: self.firmware.as_ref().map(OpenFirmware::numbers),
            taps: (self.taps.iter())
                .map(|tap| (numbers(&tap.files), numbers(&tap.vhosts)))
                .collect(),
        }
    }

    fn into_fds(self) -> Vec<OwnedFd> {
        let taps = self.taps.into_iter().flat_map(|tap| tap.files.into_iter().chain(tap.vhosts));
        let tracker = self.tracker.map(|tracker| [tracker.library, tracker.listener]);
        let disks = self.disks.into_iter().flatten().map(|layer| layer.file.into());
        let firmware = self.firmware.map(|images| [images.code, images.variables]);
        [self.qmp, self.serial, self.console_log]
            .into_iter()
            .chain(self.further_serial.into_iter().flatten())
            .chain(self.ram)
            .chain(self.kernel)
            .chain(self.initrd)
            .chain(disks)
            .chain(self.seed)
            .chain(self.guest_agent)
            .chain(self.tpm)
            .chain(self.cdroms.into_iter().flatten().map(OwnedFd::from))
            .chain(firmware.into_iter().flatten())
            .chain(taps)
            .chain(tracker.into_iter().flatten())
            .collect()
    }
}

/// Opens the library, which may be in a directory that QEMU's user cannot enter.
fn prepare_tracker(tracker: Tracker) -> Result<PreparedTracker, StartError> {
    let opened =
        File::open(&tracker.library).and_then(|file| files::readable_by_all(file, "tracker"));
    let library = opened.map_err(|why| StartError::prepare("read", &tracker.library, &why))?;
    Ok(PreparedTracker { library, listener: tracker.listener, peer_uid: tracker.peer_uid })
}

/// Returns the last lines that QEMU wrote after the first `start_bytes` of the log, without time
/// stamps.
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
    // Where there are errors, warnings explain little.
    let errors: Vec<&str> =
        lines.iter().copied().filter(|line| !line.contains("warning: ")).collect();
    let shown = if errors.is_empty() { &lines } else { &errors };
    let shown = shown[shown.len().saturating_sub(LAST_WORDS_LINES)..].iter();
    shown.map(|line| line.trim_start_matches("qemu-system-x86_64: ")).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
