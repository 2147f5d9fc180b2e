//! TPM 2.0 of a VM: swtpm, a process beside QEMU.
//!
//! QEMU and swtpm share one unnamed socket, which each inherits: no socket has a path, and no other
//! process can connect. swtpm ends when QEMU closes its connection (`--terminate`), however QEMU
//! ends and whether an agent runs.
//!
//! **A move.** QEMU reads the TPM's state from swtpm once the vCPUs have stopped, as part of its
//! device state, and gives it to the destination's swtpm, which writes the permanent part to its
//! directory at once (tpm_emulator.c, QEMU 7.2 to 10.0; swtpm 0.7). Each host has a directory of
//! its own, so the locks that swtpm can pass on for shared storage (`--migration`, swtpm 0.8) are
//! not needed: the source's swtpm keeps its lock, and serves a guest that stays.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use command_fds::CommandFdExt;
use godwit_ram::{ChildLimits, limit_child};
use process_wrap::std::{CommandWrap, ProcessSession};
use serde_json::json;

use crate::process::{Exit, Process, path_in_qemu};

/// Output of swtpm in a VM's run directory.
pub const TPM_LOG: &str = "tpm.log";
/// Address space of swtpm. It uses 10 MiB (0.7).
const ADDRESS_SPACE_BYTES: u64 = 256 << 20;
/// Longest file that it writes: its state has at most 1 MiB, and its log a few lines.
const FILE_BYTES: u64 = 4 << 20;
/// Descriptors beside those that it inherits. It uses 10 (0.7).
const OPEN_FILES: u64 = 64;
/// Threads. It has two (0.7).
const TASKS: u64 = 16;
/// Time for it to say its version.
const VERSION_LIMIT: Duration = Duration::from_secs(5);
/// ID of the TPM and of its connection in QEMU.
const TPM: &str = "tpm0";

/// Parameters of a start of swtpm.
#[derive(Debug)]
pub struct TpmLaunch {
    /// The program, absolute.
    pub program: PathBuf,
    /// Directory of the state, which belongs to `user`. The directories above may be closed to it.
    pub state: OwnedFd,
    /// Output of swtpm.
    pub log: File,
    /// User and group that it runs as; supplementary groups are dropped.
    pub user: (u32, u32),
    /// Whether no other process has that user.
    pub has_user: bool,
}

/// A running swtpm. Dropping this does not end it.
#[derive(Clone, Debug)]
pub struct Tpm(Process);

impl Tpm {
    /// Takes over a swtpm that an earlier agent started.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if it has ended; otherwise it cannot be watched.
    pub fn adopt(pid: i32, start_time: u64) -> io::Result<Tpm> {
        Process::watch(pid, Some(start_time)).map(Tpm)
    }

    /// Returns its number, and its start time in clock ticks since the host's boot.
    #[must_use]
    pub fn identity(&self) -> (i32, u64) {
        self.0.identity()
    }

    /// Waits until it has ended.
    pub async fn exited(&self) -> Exit {
        self.0.exited().await
    }

    /// Ends it by SIGKILL, and does not wait. It has written each change of its state at once.
    pub fn kill(&self) {
        self.0.send_kill();
    }
}

impl TpmLaunch {
    /// Starts swtpm, and returns QEMU's end of its connection. Blocks for milliseconds.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(self) -> io::Result<(Tpm, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        let (state, control) = (self.state.as_raw_fd(), theirs.as_raw_fd());
        let mut command = Command::new(&self.program);
        command
            .args(["socket", "--tpm2", "--terminate"])
            .args(["--tpmstate", &format!("dir={},mode=0600", path_in_qemu(state))])
            .args(["--ctrl", &format!("type=unixio,clientfd={control}")])
            .current_dir("/")
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .stdin(Stdio::null())
            .stdout(self.log.try_clone()?)
            .stderr(self.log);
        let (uid, gid) = self.user;
        // The standard library drops supplementary groups with the change of user (Rust 1.95).
        command.uid(uid).gid(gid);
        command.preserved_fds(vec![self.state, theirs.into()]);
        let limits = ChildLimits {
            address_space_bytes: Some(ADDRESS_SPACE_BYTES),
            // The kernel counts the tasks of a user, not of a process.
            tasks: self.has_user.then_some(TASKS),
            open_files: Some(OPEN_FILES),
            file_bytes: Some(FILE_BYTES),
        };
        limit_child(&mut command, limits);
        let child = CommandWrap::from(command).wrap(ProcessSession).spawn()?;
        // Its thread reaps the child.
        let process = Process::of_child(child.id().cast_signed())?;
        Ok((Tpm(process), ours.into()))
    }
}

/// Returns the version that swtpm says it has; `None` if it says none in time. `user`: user and
/// group that it runs as.
pub async fn swtpm_version(program: &Path, (uid, gid): (u32, u32)) -> Option<String> {
    let mut command = tokio::process::Command::new(program);
    command.arg("--version").current_dir("/").env_clear().stdin(Stdio::null());
    command.uid(uid).gid(gid).kill_on_drop(true);
    let output = tokio::time::timeout(VERSION_LIMIT, command.output()).await.ok()?.ok()?;
    version_in(&String::from_utf8_lossy(&output.stdout))
}

/// Returns the version in the first line of `swtpm --version`.
fn version_in(text: &str) -> Option<String> {
    let (_, rest) = text.lines().next()?.split_once("version ")?;
    let version = rest.split([',', ' ']).next()?;
    let is_one = version.len() <= 32 && version.starts_with(|first: char| first.is_ascii_digit());
    is_one.then(|| version.to_owned())
}

/// Returns the arguments of a TPM: option and value. `number`: QEMU's end of the connection.
pub(crate) fn arguments(number: RawFd) -> Vec<(&'static str, String)> {
    vec![
        ("-chardev", format!("socket,id={TPM},fd={number}")),
        ("-tpmdev", format!("emulator,id={TPM},chardev={TPM}")),
        ("-device", json!({"driver": "tpm-crb", "id": "tpm-crb0", "tpmdev": TPM}).to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_found() {
        let line = "TPM emulator version 0.7.1, Copyright (c) 2014-2021 IBM Corp.\n";
        assert_eq!(version_in(line).as_deref(), Some("0.7.1"));
        for other in ["", "version", "version x", &format!("version {}", "1".repeat(33))] {
            assert_eq!(version_in(other), None, "{other}");
        }
    }
}
