//! Warms the destination's memory. If this machine is itself virtual, the first touch of memory
//! that was unused for a while costs more than the rest of a migration: its host has to find a page
//! for it again, and takes back memory that is free for a few seconds. So right before each move
//! that measures bandwidth, the memory that the destination will take is touched and freed, for
//! every engine.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use godwit_lab::trial::Trial;

const STEP_BYTES: usize = 2 << 20;

/// Touches so much memory in a host's file system for guest memory, and frees it.
pub(crate) fn memory(trial: &Trial, host: &str, bytes: u64) -> Result<()> {
    let path = trial.paths().host(host).join("ram").join("warming-up");
    let write = || -> std::io::Result<()> {
        let file = File::create_new(&path)?;
        let step = vec![1; STEP_BYTES];
        (0..bytes).step_by(STEP_BYTES).try_for_each(|at| file.write_all_at(&step, at))
    };
    let written = write().with_context(|| format!("cannot write {}", path.display()));
    // If no file could be created, the first error says more.
    let removed =
        std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()));
    written.and(removed)
}
