//! Memory that was not used for a while costs more at its first touch than all else of a migration where this machine is
//! itself virtual: its host has to find a page for it again, and takes back what lies free for a few seconds. Right before each move that measures bandwidth the memory that the
//! destination will take is touched and given back, whoever moves.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use godwit_lab::trial::Trial;

const STEP_BYTES: usize = 2 << 20;

/// Touches so much memory in a host's file system for guest memory, and gives it back.
pub(crate) fn memory(trial: &Trial, host: &str, bytes: u64) -> Result<()> {
    let path = trial.paths().host(host).join("ram").join("warming-up");
    let write = || -> std::io::Result<()> {
        let file = File::create_new(&path)?;
        let step = vec![1; STEP_BYTES];
        (0..bytes).step_by(STEP_BYTES).try_for_each(|at| file.write_all_at(&step, at))
    };
    let written = write().with_context(|| format!("touching memory by {}", path.display()));
    // Where nothing could be created the first error says more.
    let removed = std::fs::remove_file(&path).with_context(|| format!("giving back {}", path.display()));
    written.and(removed)
}
