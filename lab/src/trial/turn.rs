//! Which trials may run at the same time on this machine.
//!
//! A machine has a few places for labs, each a locked file. A trial that measures takes all of
//! them, because another one would disturb its figures. Tests that measure nothing may share the
//! machine: each takes one place of the first [`SHARED`].

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

use super::DIRECTORY;
use crate::down;
use crate::down::LabName;

/// Number of trials that may run at the same time; 1 if it is not set.
const SHARED: &str = "GODWIT_TRIALS_AT_ONCE";
/// Number of places for labs on a machine.
const PLACES: u32 = 4;
/// First part of the names of trials' labs. The process ID follows, and a number.
const PREFIX: &str = "gwtrial";

/// Place for a lab, held until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    /// Number of the place, from 0.
    pub(super) place: u32,
    _locks: Vec<File>,
}

impl Turn {
    /// Waits for a place among so many, and takes down the labs of processes that were killed. The
    /// number is that of the environment if none is given.
    pub(super) fn wait(at_once: Option<u32>) -> Result<Turn> {
        let of_environment = || std::env::var(SHARED).ok().and_then(|number| number.parse().ok());
        let shared: Option<u32> = at_once.or_else(of_environment);
        let turn = match shared.filter(|number| (2..=PLACES).contains(number)) {
            Some(places) => Turn::share(places)?,
            None => Turn { place: 0, _locks: (0..PLACES).map(locked).collect::<Result<_>>()? },
        };
        remove_abandoned()?;
        Ok(turn)
    }

    fn share(places: u32) -> Result<Turn> {
        for place in 0..places {
            let file = open(place)?;
            match file.try_lock() {
                Ok(()) => return Ok(Turn { place, _locks: vec![file] }),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => {
                    return Err(error).context("cannot lock a place for a lab");
                }
            }
        }
        let place = number() % places;
        Ok(Turn { place, _locks: vec![locked(place)?] })
    }
}

fn open(place: u32) -> Result<File> {
    let path = PathBuf::from(format!("/run/lock/godwit-trial.{place}.lock"));
    File::create(&path).with_context(|| format!("cannot write {}", path.display()))
}

fn locked(place: u32) -> Result<File> {
    let file = open(place)?;
    file.lock().context("cannot wait for other trials")?;
    Ok(file)
}

/// Returns another number at each call.
fn number() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// Returns the prefix of a new lab of this process. It is short because the paths of unix sockets
/// below the lab's directory have at most 107 bytes.
pub(super) fn new_prefix() -> String {
    format!("{PREFIX}{}-{}", std::process::id(), number())
}

/// Takes down the labs of trials whose process was killed.
fn remove_abandoned() -> Result<()> {
    for entry in std::fs::read_dir(DIRECTORY)?.flatten() {
        let file_name = entry.file_name();
        let Some(prefix) = file_name.to_str() else { continue };
        if process_of(prefix).is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            eprintln!("trial: taking down lab {prefix}, whose process was killed");
            // Two trials that begin at the same time both find it: one of them takes it down.
            if let Err(error) =
                down(&LabName { prefix: prefix.to_owned(), state_dir: entry.path() })
            {
                eprintln!("trial: cannot take down lab {prefix}: {error:#}");
            }
        }
    }
    Ok(())
}

fn process_of(prefix: &str) -> Option<u32> {
    prefix.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_names_its_process_and_no_two_are_alike() {
        let (one, other) = (new_prefix(), new_prefix());
        assert_ne!(one, other);
        assert_eq!(process_of(&one), Some(std::process::id()));
        assert_eq!(process_of("gwtrial77"), Some(77));
        assert_eq!(process_of("gwtrialx-1"), None);
        assert_eq!(process_of("godwit-lab"), None);
    }
}
