//! Durable changes of small files. A successful change survives a power cut completely. A failed
//! one leaves the old content, as far as the file system permits.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The file system that records are written to. Tests can make any step of a change fail.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    #[cfg(test)]
    pub(crate) faults: faults::Faults,
}

impl Disk {
    /// Precedes each step of a change that may fail.
    #[cfg(not(test))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests make it fail")]
    fn step(&self) -> io::Result<()> {
        Ok(())
    }

    #[cfg(test)]
    fn step(&self) -> io::Result<()> {
        self.faults.step()
    }

    /// Creates a directory if it does not exist.
    pub(crate) fn make_dir(&self, dir: &Path) -> io::Result<()> {
        self.step()?;
        fs::create_dir_all(dir)?;
        dir.parent().map_or(Ok(()), |parent| self.sync(parent))
    }

    pub(crate) fn replace(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let (fresh, before) = (path.with_extension("json.new"), path.with_extension("json.old"));
        self.step()?;
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
        self.step()?;
        file.write_all(content)?;
        self.step()?;
        file.sync_all()?;
        self.step()?;
        // A second name for the old content: going back takes no space on a full disk.
        let _ = fs::remove_file(&before);
        let has_before = fs::hard_link(path, &before).is_ok();
        fs::rename(&fresh, path)?;
        let synced = path.parent().map_or(Ok(()), |dir| self.sync(dir));
        match (&synced, has_before) {
            (Ok(()), true) => log_failure(&before, fs::remove_file(&before)),
            (Ok(()), false) => {}
            // It may not survive a power cut, so no reader may find it before that either.
            (Err(_), true) => log_failure(path, fs::rename(&before, path)),
            (Err(_), false) => log_failure(path, fs::remove_file(path)),
        }
        synced
    }

    /// Gives a directory another name, which nothing has.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        if to.exists() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        fs::rename(from, to)?;
        let synced = to.parent().map_or(Ok(()), |dir| self.sync(dir));
        if synced.is_err() {
            log_failure(from, fs::rename(to, from));
        }
        synced
    }

    /// Gives a complete file the name of another one, which it replaces.
    pub(crate) fn put(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        fs::rename(from, to)?;
        to.parent().map_or(Ok(()), |dir| self.sync(dir))
    }

    /// Removes a file; no error if it does not exist.
    pub(crate) fn remove(&self, path: &Path) -> io::Result<()> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        let aside = path.with_extension("removed");
        self.step()?;
        fs::rename(path, &aside)?;
        let synced = path.parent().map_or(Ok(()), |dir| self.sync(dir));
        match &synced {
            Ok(()) => log_failure(&aside, fs::remove_file(&aside)),
            Err(_) => log_failure(path, fs::rename(&aside, path)),
        }
        synced
    }

    fn sync(&self, dir: &Path) -> io::Result<()> {
        self.step()?;
        File::open(dir)?.sync_all()
    }
}

/// Logs a failed clean-up after a change whose outcome is already decided.
fn log_failure(path: &Path, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::error!(path = %path.display(), %error, "cannot clean up a file of a record");
    }
}

/// Fault injection for tests.
#[cfg(test)]
pub(crate) mod faults {
    use std::io;

    use parking_lot::Mutex;

    /// Planned faults; steps are counted from the time of the plan.
    #[derive(Debug, Default)]
    pub(crate) struct Faults(Mutex<State>);

    #[derive(Debug, Default)]
    struct State {
        steps: usize,
        /// First step that fails, its errno, and whether all later steps fail as well.
        plan: Option<(usize, i32, bool)>,
    }

    impl Faults {
        pub(super) fn step(&self) -> io::Result<()> {
            let mut state = self.0.lock();
            let step = state.steps;
            state.steps += 1;
            match state.plan {
                Some((at, errno, lasts)) if step == at || lasts && step > at => {
                    Err(io::Error::from_raw_os_error(errno))
                }
                _ => Ok(()),
            }
        }

        /// Makes the step numbered `at` fail (the next one is 0); with `lasts`, all later ones as
        /// well.
        pub(crate) fn plan(&self, at: usize, errno: i32, lasts: bool) {
            let mut state = self.0.lock();
            *state = State { steps: 0, plan: Some((at, errno, lasts)) };
        }

        /// Returns whether any step has failed since the plan.
        pub(crate) fn have_come(&self) -> bool {
            let state = self.0.lock();
            state.plan.is_some_and(|(at, _, _)| state.steps > at)
        }

        /// Cancels the plan and restarts the count of steps.
        pub(crate) fn heal(&self) {
            *self.0.lock() = State::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_fails_at_any_step_leaves_the_old_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.json");
        let disk = Disk::default();
        for before in [None, Some(&b"old"[..])] {
            for remove in [false, true] {
                let change =
                    || if remove { disk.remove(&path) } else { disk.replace(&path, b"new") };
                let mut failed = 0;
                for step in 0.. {
                    let _ = fs::remove_file(&path);
                    if let Some(before) = before {
                        fs::write(&path, before).unwrap();
                    }
                    disk.faults.plan(step, 28, true);
                    let changed = change();
                    disk.faults.heal();
                    if changed.is_ok() {
                        break;
                    }
                    failed += 1;
                    assert_eq!(fs::read(&path).ok().as_deref(), before, "step {step}");
                }
                let steps = match (remove, before) {
                    (true, None) => 0,
                    (true, Some(_)) => 2,
                    (false, _) => 5,
                };
                assert_eq!(failed, steps);
                assert_eq!(fs::read(&path).ok().as_deref(), (!remove).then_some(&b"new"[..]));
            }
        }
    }
}
