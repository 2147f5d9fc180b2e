//! Keeps the memory warm that a destination will take. If this machine is itself virtual, the first
//! touch of memory that was unused for a while costs more than the rest of a migration: its host
//! has to find a page for it again, and takes back memory that is free for a few seconds. So the
//! memory is touched before each measured move, for every engine, and stays in use until shortly
//! before the guests take it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::Trial;

use crate::size::available_bytes;

const FILE: &str = "warming-up";
const STEP_BYTES: usize = 2 << 20;
/// Memory that is free for the guests at any time. They take it before it is cold if the link
/// carries 1 Gb/s or more.
const AHEAD_BYTES: u64 = 128 << 20;
const INTERVAL: Duration = Duration::from_millis(20);

/// Warm memory of a host, until it is dropped.
#[derive(Debug)]
#[must_use = "memory stays warm while this exists"]
pub(crate) struct Warm {
    path: PathBuf,
    /// Dropped to end the thread that frees the memory.
    ends: Option<SyncSender<()>>,
    frees: Option<JoinHandle<()>>,
}

impl Drop for Warm {
    fn drop(&mut self) {
        drop(self.ends.take());
        if self.frees.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("cannot keep memory warm: its thread panicked");
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            eprintln!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Touches so much memory in a host's file system for guest memory, and frees it as the files of
/// guests grow there.
pub(crate) fn memory(trial: &Trial, host: &str, bytes: u64) -> Result<Warm> {
    // The agent counts what is held as used while it admits the guests.
    ensure!(
        available_bytes()? >= 2 * bytes,
        "cannot keep {} MiB of memory warm: twice as much must be available",
        bytes >> 20
    );
    let folder = trial.paths().host(host).join("ram");
    let path = folder.join(FILE);
    let file =
        File::create_new(&path).with_context(|| format!("cannot create {}", path.display()))?;
    let mut warm = Warm { path, ends: None, frees: None };
    let step = vec![1; STEP_BYTES];
    // Huge pages are used within the size that a file has (`huge=within_size`).
    file.set_len(bytes)
        .and_then(|()| {
            (0..bytes).step_by(STEP_BYTES).try_for_each(|at| file.write_all_at(&step, at))
        })
        .with_context(|| format!("cannot write {}", warm.path.display()))?;
    let before = taken_bytes(&folder)?;
    let (ends, end) = sync_channel(1);
    warm.ends = Some(ends);
    warm.frees = Some(std::thread::spawn(move || {
        if let Err(error) = free_as_taken(&file, bytes, &folder, &before, &end) {
            eprintln!("cannot keep memory warm: {error:#}");
            let _ = file.set_len(0);
        }
    }));
    Ok(warm)
}

fn free_as_taken(
    file: &File,
    bytes: u64,
    folder: &Path,
    before: &HashMap<OsString, u64>,
    end: &Receiver<()>,
) -> Result<()> {
    let mut held = bytes;
    loop {
        // A file that shrinks, as retained memory does, must not hide that another one grows.
        let growth = taken_bytes(folder)?.into_iter().map(|(name, taken)| {
            taken.saturating_sub(before.get(&name).copied().unwrap_or_default())
        });
        let taken: u64 = growth.sum();
        let left = bytes.saturating_sub(taken + AHEAD_BYTES).next_multiple_of(STEP_BYTES as u64);
        if left < held {
            file.set_len(left)?;
            held = left;
        }
        if end.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
            return Ok(());
        }
    }
}

/// Returns the memory that each of the guests' files takes.
fn taken_bytes(folder: &Path) -> Result<HashMap<OsString, u64>> {
    let mut files = HashMap::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name() != FILE {
            // A file that has just been removed takes none.
            let taken = entry.metadata().map_or(0, |metadata| metadata.blocks() * 512);
            files.insert(entry.file_name(), taken);
        }
    }
    Ok(files)
}
