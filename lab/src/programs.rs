//! The programs that a lab's processes run.

use std::path::PathBuf;

/// Where the programs of a lab are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programs {
    /// `godwit`: agents and the manager.
    pub godwit: PathBuf,
    /// `godwit-lab`: the lab's own daemons ([`DaemonKind`](crate::DaemonKind)).
    pub lab: PathBuf,
}

impl Programs {
    /// Returns `lab` and the `godwit` in the same folder, which a lab without agents does not need.
    #[must_use]
    pub fn beside(lab: PathBuf) -> Programs {
        Programs { godwit: lab.with_file_name("godwit"), lab }
    }
}
