//! Folder of a host for the images of disks, on a file system of its own whose power can be cut:
//! what was written and not flushed is lost then, as on a machine.
//!
//! ext4 offers that for tests of its own: `EXT4_IOC_SHUTDOWN` with the flag that leaves even its
//! journal where it is. No write reaches the device afterwards, and the next mount replays the
//! journal.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::trial::until;

/// Programs that a [`Store`] needs.
const PROGRAMS: [(&str, &str); 3] = [
    ("/usr/sbin/mkfs.ext4", "e2fsprogs"),
    ("/usr/bin/mount", "mount"),
    ("/usr/bin/perl", "perl-base"),
];
/// Stops a file system: `_IOR('X', 125, u32)` with `EXT4_GOING_FLAGS_NOLOGFLUSH`.
const SHUT_DOWN: &str = "open F, '<', $ARGV[0] or die $!; my $how = pack 'I', 2; \
    ioctl F, 0x8004587d, $how or die $!";
/// Longest time until nothing uses a file system any more.
const FREE_LIMIT: Duration = Duration::from_secs(30);

/// File system in a file, mounted on a folder. It is unmounted when this is dropped.
#[derive(Debug)]
pub struct Store {
    device: PathBuf,
    folder: PathBuf,
}

impl Store {
    /// Returns what is missing on this machine; `None` if nothing is.
    #[must_use]
    pub fn missing() -> Option<String> {
        let of = |(program, package): &(&str, &str)| {
            let is_missing = !Path::new(program).exists();
            is_missing.then(|| format!("no {program} (apt-get install {package})"))
        };
        let no_loop = || {
            let is_missing = !Path::new("/dev/loop-control").exists();
            is_missing.then(|| "this kernel has no loop devices".to_owned())
        };
        PROGRAMS.iter().find_map(of).or_else(no_loop)
    }

    /// Makes a file system in a new file and mounts it on a folder, which it creates.
    ///
    /// # Errors
    /// Something is missing, or the file or the folder exists.
    pub fn make(device: &Path, folder: &Path, bytes: u64) -> Result<Store> {
        let file = File::create_new(device);
        file.and_then(|file| file.set_len(bytes))
            .with_context(|| format!("cannot make {}", device.display()))?;
        run(Command::new("/usr/sbin/mkfs.ext4").args(["-q", "-F"]).arg(device))?;
        std::fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let store = Store { device: device.to_owned(), folder: folder.to_owned() };
        store.mount()?;
        let lost_and_found = folder.join("lost+found");
        if lost_and_found.exists() {
            std::fs::remove_dir(lost_and_found)?;
        }
        Ok(store)
    }

    /// Returns the folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Cuts the power: what was not flushed is lost. Every access fails until
    /// [`Store::restore_power`].
    ///
    /// # Errors
    /// The file system cannot be stopped.
    pub fn cut_power(&self) -> Result<()> {
        run(Command::new("/usr/bin/perl").args(["-e", SHUT_DOWN]).arg(&self.folder))
    }

    /// Mounts the file system again, with what the device has. No process may use it.
    ///
    /// # Errors
    /// It is in use, or cannot be mounted.
    pub fn restore_power(&self) -> Result<()> {
        until("nothing uses the file system without power", FREE_LIMIT, || {
            self.unmount().map(Some)
        })?;
        self.mount()
    }

    /// Returns the processes that have a file of the file system open.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn users(&self) -> Result<Vec<i32>> {
        let is_open = |pid: &i32| {
            let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
            let mut targets = files.flatten().filter_map(|file| file.path().read_link().ok());
            targets.any(|target| target.starts_with(&self.folder))
        };
        let entries = std::fs::read_dir("/proc")?.flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        Ok(pids.filter(is_open).collect())
    }

    fn mount(&self) -> Result<()> {
        run(Command::new("/usr/bin/mount").args(["-o", "loop"]).arg(&self.device).arg(&self.folder))
    }

    fn unmount(&self) -> Result<()> {
        run(Command::new("/usr/bin/umount").arg(&self.folder))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Err(error) = self.unmount() {
            eprintln!("cannot unmount {}: {error:#}", self.folder.display());
        }
    }
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_was_not_flushed_is_lost_with_the_power() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: mounting needs root");
            return;
        }
        if let Some(why) = Store::missing() {
            eprintln!("skipped: {why}");
            return;
        }
        let root = tempfile::tempdir_in("/var/tmp").unwrap();
        let folder = root.path().join("store");
        let store = Store::make(&root.path().join("device"), &folder, 32 << 20).unwrap();
        let mut flushed = File::create(folder.join("flushed")).unwrap();
        flushed.write_all(&[1_u8; 4096]).unwrap();
        flushed.sync_all().unwrap();
        flushed.write_all(&[2_u8; 4096]).unwrap();
        std::fs::write(folder.join("lost"), [3_u8; 4096]).unwrap();
        assert!(store.users().unwrap().contains(&std::process::id().cast_signed()));
        store.cut_power().unwrap();
        assert!(std::fs::write(folder.join("late"), [4_u8]).is_err());
        drop(flushed);
        store.restore_power().unwrap();
        assert_eq!(std::fs::read(folder.join("flushed")).unwrap(), [1_u8; 4096]);
        assert!(!folder.join("lost").exists() && !folder.join("late").exists());
    }
}
