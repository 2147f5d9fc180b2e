//! TPM of a VM on this host: the directory of its state, and its swtpm.
//!
//! The state is in the directory `tpm` of the VM's record, which goes with that record: it survives
//! a stop, a rename and a crash, and is removed with the VM. Only swtpm's user can write there, and
//! a guest that controls swtpm can leave anything there. So each start takes over one regular file
//! and removes the other files, of which there are few; nothing is followed or entered.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_api::ApiError;
use godwit_qemu::{QemuLimits, TPM_LOG, Tpm, TpmLaunch};
use rustix::fs::{FileType, Gid, Mode, OFlags, Uid, fchown, fstat, openat};
use rustix::io::Errno;
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::failure::{host_failed, no_user};
use crate::user::User;
use crate::vm::files::{VmFiles, read_process};

/// File with the permanent state, as swtpm names it.
const STATE: &str = "tpm2-00.permall";
/// Longest permanent state that is taken over. libtpms 0.9 writes 1 to 20 KiB, and has 128 KiB for
/// indexes, keys and counters.
const MOST_STATE_BYTES: u64 = 1 << 20;
/// Most entries in the directory. swtpm has two or three.
const MOST_ENTRIES: usize = 16;
/// Record of the process in the VM's run directory.
const PID: &str = "tpm.pid";
/// Time for swtpm to end after QEMU has.
const END_LIMIT: Duration = Duration::from_millis(500);
/// Time for the kernel to end a killed swtpm.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Host parameters of a start of swtpm.
#[derive(Clone, Debug)]
pub(crate) struct TpmSite {
    /// The program, absolute.
    pub(crate) program: PathBuf,
    /// Directory of the VM's state; it need not exist.
    pub(crate) state: PathBuf,
}

impl TpmSite {
    /// Starts swtpm for a VM whose QEMU starts next, and returns QEMU's end of its connection.
    /// Blocks for milliseconds. `keeps`: whether it continues from its state. An arriving VM does
    /// not: QEMU brings it along.
    pub(super) fn start(
        &self,
        files: &VmFiles,
        limits: &QemuLimits,
        keeps: bool,
    ) -> Result<(Tpm, OwnedFd), ApiError> {
        let failed = |error| host_failed("cannot start the TPM (swtpm) of the VM", &error);
        let user = files.claim_tpm_user().map_err(|error| no_user(&error))?;
        let state = prepare_state(&self.state, keeps, user).map_err(|error| {
            let what = format!("cannot prepare the TPM's state in {}", self.state.display());
            host_failed(&what, &error)
        })?;
        let mut options = OpenOptions::new();
        options.create(true).append(true).mode(0o600);
        let log = options.open(files.dir.join(TPM_LOG)).map_err(failed)?;
        let program = self.program.clone();
        let has_user = files.has_own_users();
        let launch = TpmLaunch { program, state, log, user: (user.uid, user.gid), has_user };
        let (tpm, connection) = launch.start().map_err(failed)?;
        let (pid, start_time) = tpm.identity();
        if let Err(error) = fs::write(files.dir.join(PID), format!("{pid} {start_time}\n")) {
            // Nothing else would find it.
            tpm.kill();
            return Err(failed(error));
        }
        files.confine_adopted(pid, limits);
        Ok((tpm, connection))
    }
}

impl VmFiles {
    /// Finds the VM's swtpm that an earlier agent started; `None` if there is none or it has
    /// ended.
    pub(super) fn find_tpm(&self) -> Option<Tpm> {
        let (pid, start_time) = read_process(&self.dir.join(PID))?;
        Tpm::adopt(pid, start_time).ok()
    }

    /// Waits for the end of the VM's swtpm, whose QEMU has ended. One that stays is ended. Must be
    /// called before its state is removed, which it may still write. Blocks.
    pub(crate) fn end_tpm(&self) {
        let Some((pid, start_time)) = read_process(&self.dir.join(PID)) else { return };
        blocking(|| self.end_tpm_process(pid, start_time));
    }

    fn end_tpm_process(&self, pid: i32, start_time: u64) {
        if godwit_qemu::ends_within(pid, start_time, END_LIMIT) {
            return;
        }
        tracing::warn!(dir = %self.dir.display(), pid, "ending a TPM (swtpm) without a QEMU");
        if let Ok(tpm) = Tpm::adopt(pid, start_time) {
            tpm.kill();
        }
        if !godwit_qemu::ends_within(pid, start_time, KILL_LIMIT) {
            tracing::error!(pid, "a killed swtpm does not end: it hangs in the kernel");
        }
    }
}

/// Runs what blocks. On a worker of a runtime, another thread takes over its tasks meanwhile.
pub(super) fn blocking<T>(run: impl FnOnce() -> T) -> T {
    // Files are also removed by a drop, which may be outside of a runtime.
    match Handle::try_current() {
        Ok(runtime) if runtime.runtime_flavor() == RuntimeFlavor::MultiThread => {
            tokio::task::block_in_place(run)
        }
        _ => run(),
    }
}

/// Prepares the directory of a TPM's state for a user and opens it. Keeps or removes the permanent
/// state; removes other files.
///
/// # Errors
/// Also if the permanent state is not a regular file of one name, or too long, or if there is a
/// directory or more than a few entries: swtpm leaves none of these.
fn prepare_state(dir: &Path, keeps: bool, user: User) -> io::Result<OwnedFd> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(dir, flags | OFlags::DIRECTORY, Mode::empty())?;
    let not_its = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let entries = fs::read_dir(dir)?.take(MOST_ENTRIES + 1).collect::<io::Result<Vec<_>>>()?;
    if entries.len() > MOST_ENTRIES {
        return Err(not_its("it has more entries than swtpm makes: remove them"));
    }
    for entry in &entries {
        if entry.file_type()?.is_dir() {
            return Err(not_its("it has a directory, which swtpm never makes: remove it"));
        }
    }
    for entry in entries {
        if !keeps || entry.file_name() != STATE {
            fs::remove_file(entry.path())?;
        }
    }
    let owner = (Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)));
    match openat(&opened, STATE, flags | OFlags::NONBLOCK, Mode::empty()) {
        Ok(state) => {
            let data = fstat(&state)?;
            let is_regular = FileType::from_raw_mode(data.st_mode) == FileType::RegularFile;
            if !is_regular || data.st_nlink != 1 || data.st_size.unsigned_abs() > MOST_STATE_BYTES {
                return Err(not_its(&format!("{STATE} is not a file as swtpm writes it")));
            }
            fchown(&state, owner.0, owner.1)?;
        }
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    fchown(&opened, owner.0, owner.1)?;
    Ok(opened)
}

/// Brings a TPM's permanent state to the disk. swtpm 0.7 only writes it. Returns whether there is
/// one: a guest that controls swtpm may have removed it.
///
/// # Errors
/// The disk refuses.
pub(crate) fn sync_state(dir: &Path) -> io::Result<bool> {
    let opened = match File::open(dir) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let state = match openat(opened.as_fd(), STATE, flags, Mode::empty()) {
        Ok(state) => state,
        Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    if FileType::from_raw_mode(fstat(&state)?.st_mode) != FileType::RegularFile {
        return Ok(false);
    }
    rustix::fs::fsync(&state)?;
    opened.sync_all()?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_takes_over_the_state_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (dir, outside) = (folder.path().join("tpm"), folder.path().join("outside"));
        let own = User {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        };
        prepare_state(&dir, true, own).unwrap();
        fs::write(&outside, "a secret").unwrap();
        fs::write(dir.join(STATE), "keys").unwrap();
        fs::write(dir.join(".lock"), "").unwrap();
        std::os::unix::fs::symlink(&outside, dir.join("link")).unwrap();
        prepare_state(&dir, true, own).unwrap();
        let names = || fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names().collect::<Vec<_>>(), [STATE]);
        assert!(sync_state(&dir).unwrap());
        assert!(!sync_state(&folder.path().join("none")).unwrap());
        fs::create_dir_all(dir.join("a/b")).unwrap();
        prepare_state(&dir, true, own).expect_err("a directory");
        fs::remove_dir_all(dir.join("a")).unwrap();
        let others: Vec<_> = (0..MOST_ENTRIES).map(|n| dir.join(format!("{n}"))).collect();
        others.iter().for_each(|path| fs::write(path, "").unwrap());
        prepare_state(&dir, true, own).expect_err("too many entries");
        fs::remove_file(&others[0]).unwrap();
        prepare_state(&dir, true, own).unwrap();
        assert_eq!(names().collect::<Vec<_>>(), [STATE]);
        // Files that only the user of an earlier swtpm can have put there.
        let state = dir.join(STATE);
        let refused = |what: &str| {
            let error = prepare_state(&dir, true, own).expect_err(what);
            assert_eq!(fs::read(&outside).unwrap(), b"a secret", "{error}");
            fs::remove_file(&state).unwrap();
        };
        fs::hard_link(&state, folder.path().join("second name")).unwrap();
        refused("a second name");
        std::os::unix::fs::symlink(&outside, &state).unwrap();
        assert!(!sync_state(&dir).unwrap());
        refused("a link");
        File::create(&state).unwrap().set_len(MOST_STATE_BYTES + 1).unwrap();
        refused("too long");
        fs::write(&state, "of an older arrival").unwrap();
        prepare_state(&dir, false, own).unwrap();
        assert_eq!(names().count(), 0);
        fs::remove_dir(&dir).unwrap();
        std::os::unix::fs::symlink(folder.path(), &dir).unwrap();
        prepare_state(&dir, true, own).unwrap_err();
        assert!(outside.exists());
    }
}
