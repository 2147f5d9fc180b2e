//! What a guard saves: the newest term, which outlives the host's power, the attempts of starts in
//! it, and the lease, for an agent that is started again in the same boot.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_api::{HaStanding, MOST_HEARTBEAT_DATASTORES, TermHolder};
use godwit_ha::{Guard, Lease, Standing, Term, Timing};
use godwit_qemu::Uuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::store::Disk;

/// Format version of all files.
const FORMAT: u32 = 1;
/// Attempts of starts in a term that are remembered.
pub(super) const MOST_ATTEMPTS: usize = 4096;

/// `STATE_DIR/ha.json`: the newest term. It is on the disk before a VM starts in that term.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedTerm {
    format: u32,
    holder: TermHolder,
    term: u64,
}

/// `STATE_DIR/ha-attempts.json`: attempts of starts in a term, the newest last. Each is on the disk
/// before its VM starts. A file of another term counts for nothing. It is no part of [`SavedTerm`],
/// so that agents of earlier versions can still read that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedAttempts {
    format: u32,
    holder: TermHolder,
    term: u64,
    attempts: VecDeque<Uuid>,
    /// Those of them whose VM is not known to have started.
    #[serde(default)]
    unfinished: BTreeSet<Uuid>,
}

impl SavedAttempts {
    pub(super) fn new(
        holder: TermHolder,
        term: Term,
        attempts: &VecDeque<Uuid>,
        unfinished: &BTreeSet<Uuid>,
    ) -> SavedAttempts {
        let (attempts, unfinished) = (attempts.clone(), unfinished.clone());
        SavedAttempts { format: FORMAT, holder, term: term.0, attempts, unfinished }
    }
}

/// `RUN_DIR/ha.json`: how the guard stood to that term in this boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedLease {
    format: u32,
    boot_id: String,
    holder: TermHolder,
    term: u64,
    standing: HaStanding,
    /// Moment on the boot clock from which the lease counts.
    counts_from: Duration,
    datastores: Vec<Uuid>,
}

impl SavedLease {
    pub(super) fn new(
        boot_id: &str,
        holder: TermHolder,
        guard: &Guard,
        datastores: Vec<Uuid>,
    ) -> SavedLease {
        let (standing, counts_from) = match guard.standing() {
            Standing::Held(lease) => (HaStanding::Held, lease.counts_from()),
            Standing::Stopping => (HaStanding::Stopping, Duration::ZERO),
            Standing::Over => (HaStanding::Over, Duration::ZERO),
        };
        let (boot_id, term) = (boot_id.to_owned(), guard.term().0);
        SavedLease { format: FORMAT, boot_id, holder, term, standing, counts_from, datastores }
    }

    /// Returns it with its term over.
    pub(super) fn over(self) -> SavedLease {
        SavedLease { standing: HaStanding::Over, counts_from: Duration::ZERO, ..self }
    }
}

/// What an earlier agent left.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) holder: Option<TermHolder>,
    pub(super) guard: Guard,
    /// Datastores of the term.
    pub(super) datastores: Vec<Uuid>,
    /// Attempts of starts in the term.
    pub(super) attempts: VecDeque<Uuid>,
    /// Those of them whose VM is not known to have started.
    pub(super) unfinished: BTreeSet<Uuid>,
}

/// The files of a guard.
#[derive(Debug)]
pub(super) struct HaFiles {
    state: PathBuf,
    attempts: PathBuf,
    run: PathBuf,
    pub(super) boot_id: String,
    pub(super) disk: Disk,
}

impl HaFiles {
    pub(super) fn new(state_dir: &Path, run_dir: &Path, boot_id: String) -> HaFiles {
        let (state, run) = (state_dir.join("ha.json"), run_dir.join("ha.json"));
        let attempts = state_dir.join("ha-attempts.json");
        HaFiles { state, attempts, run, boot_id, disk: Disk::default() }
    }

    /// Returns the guard of an agent that starts. Unless the files say for sure that a term is held
    /// or over in this boot, protected VMs that run have to end first.
    pub(super) fn left(&self, timing: Timing) -> Left {
        let saved: Option<SavedTerm> = read(&self.state).filter(|saved: &SavedTerm| {
            let is_known = saved.format == FORMAT;
            if !is_known {
                tracing::error!(path = %self.state.display(), "file of another version ignored");
            }
            is_known
        });
        let holder = saved.as_ref().map(|saved| saved.holder);
        let term = Term(saved.as_ref().map_or(0, |saved| saved.term));
        let lease = read(&self.run).filter(|lease: &SavedLease| {
            lease.format == FORMAT
                && !self.boot_id.is_empty()
                && lease.boot_id == self.boot_id
                && Some(lease.holder) == holder
                && lease.term == term.0
                && lease.datastores.len() <= MOST_HEARTBEAT_DATASTORES
        });
        let standing = match &lease {
            None => Standing::Stopping,
            Some(lease) => match lease.standing {
                HaStanding::Held => {
                    Standing::Held(Lease::new(term, lease.datastores.len(), lease.counts_from))
                }
                HaStanding::Stopping => Standing::Stopping,
                HaStanding::Over => Standing::Over,
            },
        };
        let datastores = lease.map(|lease| lease.datastores).unwrap_or_default();
        let (attempts, unfinished) = self.attempts_in(holder, term);
        let guard = Guard::resumed(timing, term, standing);
        Left { holder, guard, datastores, attempts, unfinished }
    }

    /// Returns the newest attempts of starts that an earlier agent has recorded in a term, and
    /// which of them it has not finished.
    fn attempts_in(
        &self,
        holder: Option<TermHolder>,
        term: Term,
    ) -> (VecDeque<Uuid>, BTreeSet<Uuid>) {
        let saved = read(&self.attempts).filter(|saved: &SavedAttempts| {
            saved.format == FORMAT && Some(saved.holder) == holder && saved.term == term.0
        });
        let Some(SavedAttempts { mut attempts, mut unfinished, .. }) = saved else {
            return (VecDeque::new(), BTreeSet::new());
        };
        let oldest = attempts.len().saturating_sub(MOST_ATTEMPTS);
        attempts.drain(..oldest);
        let known: BTreeSet<Uuid> = attempts.iter().copied().collect();
        unfinished.retain(|attempt| known.contains(attempt));
        (attempts, unfinished)
    }

    /// Saves the attempts of starts. When this returns, they survive a power cut.
    pub(super) fn save_attempts(&self, attempts: &SavedAttempts) -> io::Result<()> {
        self.disk.replace(&self.attempts, &serde_json::to_vec(attempts)?)
    }

    /// Saves the newest term. When this returns, it survives a power cut.
    pub(super) fn save_term(&self, holder: TermHolder, term: Term) -> io::Result<()> {
        let saved = SavedTerm { format: FORMAT, holder, term: term.0 };
        self.disk.replace(&self.state, &serde_json::to_vec(&saved)?)
    }

    /// Saves the lease in place of the last one. If that fails, no lease remains, which is as safe:
    /// the next agent then ends all protected VMs.
    pub(super) fn save_lease(&self, lease: &SavedLease) -> io::Result<()> {
        let saved = serde_json::to_vec(lease)
            .map_err(io::Error::from)
            .and_then(|text| self.disk.replace(&self.run, &text));
        saved.or_else(|error| {
            tracing::error!(path = %self.run.display(), %error, "cannot save the lease");
            self.disk.remove(&self.run)
        })
    }
}

/// Reads a file; `None` if it is missing or unusable.
fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::error!(path = %path.display(), %error, "cannot read the guard's state");
            return None;
        }
    };
    let read = serde_json::from_slice(&text);
    read.inspect_err(|error| {
        tracing::error!(path = %path.display(), %error, "the guard's state is unusable");
    })
    .ok()
}
