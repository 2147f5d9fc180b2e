//! What can go wrong with a store.

use std::io;
use std::path::{Path, PathBuf};

use super::leadership::Loss;
use super::transaction::{KeyState, Revision};

/// Whether a change that failed may have been written all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It was not.
    No,
    /// The answer was lost: only reading again tells.
    Unknown,
}

impl std::fmt::Display for Written {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Written::No => "nothing was written",
            Written::Unknown => {
                "the change may have been written: read again before it is repeated"
            }
        })
    }
}

/// Why a store can't be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A key is not as the transaction expected it. Nothing was written.
    #[error("{key} has changed meanwhile: {expected} was expected, it is {found}")]
    Conflict {
        /// The first such key.
        key: String,
        /// What was expected of it.
        expected: KeyState,
        found: KeyState,
    },
    /// This manager leads no more. Nothing was written.
    #[error("this manager leads no more: {why}")]
    LeadershipLost {
        /// How that came.
        why: Loss,
    },
    /// The store can't be reached or does not answer.
    #[error("the store {store} is unavailable: {why}; {written}")]
    Unavailable {
        /// The file, or the endpoints.
        store: String,
        /// What happened.
        why: String,
        /// Whether the change that was asked for may be there.
        written: Written,
    },
    /// The store answers and does not want to.
    #[error("the store {store} refuses: {why}")]
    Refused {
        /// The file, or the endpoints.
        store: String,
        /// What it says.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Changes that a watch should tell are forgotten.
    #[error("the changes after revision {since} are not kept any more")]
    HistoryGone {
        /// Where the watch stood.
        since: Revision,
    },
    /// A transaction is beyond a bound that all stores share.
    #[error("a transaction has {is} {what}, {most} at most can be written at once")]
    TooBig {
        /// What there is too much of.
        what: &'static str,
        /// How much of it.
        is: usize,
        /// The bound.
        most: usize,
    },
    /// A key or prefix that no store takes.
    #[error("\"{key}\" can't be a key: {why}")]
    BadKey {
        key: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A transaction that says two things of one key.
    #[error("a transaction writes {key} twice")]
    WrittenTwice { key: String },
    /// Another manager works with the same file.
    #[error("another manager uses {path} already")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file is not whole.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        why: String,
    },
    /// The file belongs to another program.
    #[error("{path} is a database of another program")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The file was written by a later version.
    #[error("{path} has format {found}, this version knows {known} at most")]
    Later {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The newest one that is known.
        known: u32,
    },
    /// The file system says no.
    #[error("{path} can't be {action}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The settings make no sense.
    #[error("the store's settings: {why}")]
    Settings {
        /// What is wrong, and what is right.
        why: String,
    },
}

impl StoreError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            StoreError::Conflict { .. } => "read it again and decide anew".to_owned(),
            StoreError::LeadershipLost { .. } => "requests go to the manager that leads".to_owned(),
            StoreError::Unavailable { .. } => "ask again in a moment; if it stays so, see whether the store runs, and docs/store.md".to_owned(),
            StoreError::Refused { remedy, .. } => (*remedy).to_owned(),
            StoreError::HistoryGone { .. } => "read everything again and watch from there".to_owned(),
            StoreError::TooBig { .. } => "ask for less at a time: fewer names, labels or VMs".to_owned(),
            StoreError::WrittenTwice { .. } => "write the last value only".to_owned(),
            StoreError::InUse { .. } => "stop it, give this one its own file, or use etcd for several managers".to_owned(),
            StoreError::Damaged { .. } => "stop the manager, keep the file aside, and restore the last backup: docs/store.md".to_owned(),
            StoreError::Foreign { .. } => "give the manager a file of its own".to_owned(),
            StoreError::Later { .. } => "start the later version again, or restore the backup from before the upgrade".to_owned(),
            StoreError::File { .. } => "is the disk full or not writable?".to_owned(),
            StoreError::BadKey { .. } | StoreError::Settings { .. } => String::new(),
        }
    }
}

pub(crate) fn file_error(
    path: &Path,
    action: &'static str,
) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::File { path, action, source }
}
