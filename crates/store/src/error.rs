//! Errors of a store.

use std::io;
use std::path::{Path, PathBuf};

use super::loss::Loss;
use super::revision::{KeyState, Revision};

/// Whether a failed change may have been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The change was not written.
    No,
    /// The response was lost; only another read shows whether the change was written.
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
    #[error("{key} has changed meanwhile: expected {expected}, found {found}")]
    Conflict {
        /// The first conflicting key.
        key: String,
        /// The state that the transaction expected.
        expected: KeyState,
        found: KeyState,
    },
    /// This manager is no longer the leader. Nothing was written.
    #[error("this manager is no longer the leader: {why}")]
    LeadershipLost {
        /// How the leadership ended.
        why: Loss,
    },
    /// The store cannot be reached or does not respond.
    #[error("the store {store} is unavailable: {why}; {written}")]
    Unavailable {
        /// The file, or the endpoints.
        store: String,
        /// What happened.
        why: String,
        /// Whether the requested change may have been written.
        written: Written,
    },
    /// The store responds but rejects the request.
    #[error("the store {store} rejects the request: {why}")]
    Refused {
        /// The file, or the endpoints.
        store: String,
        /// The store's own message.
        why: String,
        /// What the operator can do about it.
        remedy: &'static str,
    },
    /// Changes that a watch should report are no longer in the history.
    #[error("changes after revision {since} are no longer available")]
    HistoryGone {
        /// Revision that the watch had reached.
        since: Revision,
    },
    /// A transaction exceeds a limit that all stores share.
    #[error("a transaction has {is} {what}; the limit is {most}")]
    TooBig {
        /// The unit that exceeds its limit.
        what: &'static str,
        /// The transaction's value.
        is: usize,
        /// The limit.
        most: usize,
    },
    /// A key or prefix that every store rejects.
    #[error("\"{key}\" is not a valid key: {why}")]
    BadKey {
        key: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A transaction writes one key twice.
    #[error("a transaction writes {key} twice")]
    WrittenTwice { key: String },
    /// Another manager uses the file.
    #[error("another manager uses {path} already")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file is damaged.
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
    /// A later version of the manager wrote the file.
    #[error("{path} has format {found}, this version knows {known} at most")]
    Later {
        /// The file.
        path: PathBuf,
        /// The format of the file.
        found: u32,
        /// The newest format that this version knows.
        known: u32,
    },
    /// The file system refuses an operation.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The operation, as a verb.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The settings are invalid.
    #[error("invalid store settings: {why}")]
    Settings {
        /// What is wrong, and what is valid.
        why: String,
    },
}

impl StoreError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        let remedy = match self {
            StoreError::Conflict { .. } => "read it again and decide again",
            StoreError::LeadershipLost { .. } => "send requests to the leader",
            StoreError::Unavailable { .. } => {
                "try again in a moment; if the problem persists, check the store: docs/store.md"
            }
            StoreError::Refused { remedy, .. } => remedy,
            StoreError::HistoryGone { .. } => "read everything again and watch from there",
            StoreError::TooBig { .. } => "request less at a time: fewer names, labels or VMs",
            StoreError::WrittenTwice { .. } => "write the last value only",
            StoreError::InUse { .. } => {
                "stop it, give this manager its own file, or use etcd for several managers"
            }
            StoreError::Damaged { .. } => {
                "stop the manager, keep the file aside, and restore the last backup: docs/store.md"
            }
            StoreError::Foreign { .. } => "give the manager its own file",
            StoreError::Later { .. } => {
                "start the later version again, or restore the backup from before the upgrade"
            }
            StoreError::File { .. } => "check that the disk is writable and not full",
            StoreError::BadKey { .. } | StoreError::Settings { .. } => "",
        };
        remedy.to_owned()
    }
}

pub(crate) fn file_error(
    path: &Path,
    action: &'static str,
) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::File { path, action, source }
}
