//! Durable changes of small files. A change is there after a power cut, whole, or it fails; and where it fails, what was there
//! before is still there, as far as the file system lets it be.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// The file system, as records are written to it. Tests have any step of a change fail.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    #[cfg(test)]
    pub(crate) faults: faults::Faults,
}

impl Disk {
    /// Comes before each step of a change that may fail.
    #[cfg(not(test))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests have it fail")]
    fn step(&self) -> io::Result<()> {
        Ok(())
    }

    #[cfg(test)]
    fn step(&self) -> io::Result<()> {
        self.faults.step()
    }

    /// Makes a directory, where it is not there.
    pub(crate) fn make_dir(&self, dir: &Path) -> io::Result<()> {
        self.step()?;
        fs::create_dir_all(dir)?;
        dir.parent().map_or(Ok(()), |parent| self.sync(parent))
    }

    pub(crate) fn replace(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let (fresh, before) = (path.with_extension("json.new"), path.with_extension("json.old"));
        self.step()?;
        let mut file = File::create(&fresh)?;
        self.step()?;
        file.write_all(content)?;
        self.step()?;
        file.sync_all()?;
        self.step()?;
        // A second name of what is there now: the way back takes no room on a full disk.
        let _ = fs::remove_file(&before);
        let has_before = fs::hard_link(path, &before).is_ok();
        fs::rename(&fresh, path)?;
        let synced = path.parent().map_or(Ok(()), |dir| self.sync(dir));
        match (&synced, has_before) {
            (Ok(()), true) => told(&before, fs::remove_file(&before)),
            (Ok(()), false) => {}
            // It may not survive a power cut: nobody is to find it until then either.
            (Err(_), true) => told(path, fs::rename(&before, path)),
            (Err(_), false) => told(path, fs::remove_file(path)),
        }
        synced
    }

    /// Removes a file; no error where there is none.
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
            Ok(()) => told(&aside, fs::remove_file(&aside)),
            Err(_) => told(path, fs::rename(&aside, path)),
        }
        synced
    }

    fn sync(&self, dir: &Path) -> io::Result<()> {
        self.step()?;
        File::open(dir)?.sync_all()
    }
}

/// Logs what could not be tidied up after a change that was decided already.
fn told(path: &Path, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::error!(path = %path.display(), %error, "a record's file could not be tidied up");
    }
}

/// Steps that fail, for tests.
#[cfg(test)]
pub(crate) mod faults {
    use std::io;
    use std::sync::{Mutex, PoisonError};

    /// What fails, counted from the moment when it was planned.
    #[derive(Debug, Default)]
    pub(crate) struct Faults(Mutex<State>);

    #[derive(Debug, Default)]
    struct State {
        steps: usize,
        /// The first step that fails, by which error, and whether all after it fail as well.
        plan: Option<(usize, i32, bool)>,
    }

    impl Faults {
        pub(super) fn step(&self) -> io::Result<()> {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let step = state.steps;
            state.steps += 1;
            match state.plan {
                Some((at, errno, lasts)) if step == at || lasts && step > at => {
                    Err(io::Error::from_raw_os_error(errno))
                }
                _ => Ok(()),
            }
        }

        /// Has the step of that number fail, the next one being 0; with `lasts` all that follow as well.
        pub(crate) fn plan(&self, at: usize, errno: i32, lasts: bool) {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *state = State { steps: 0, plan: Some((at, errno, lasts)) };
        }

        /// Returns whether anything has failed since the plan.
        pub(crate) fn have_come(&self) -> bool {
            let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            state.plan.is_some_and(|(at, _, _)| state.steps > at)
        }

        /// Has nothing fail any more; the steps are counted anew.
        pub(crate) fn heal(&self) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = State::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_fails_at_any_step_leaves_what_was_there() {
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
