//! Failing writes of the hosts' state during a migration: each kind of write of either host, with
//! each of two errors. The agents inject them (`godwit_migration::fail_writes`), so that exactly
//! one kind of write fails. A full disk would fail them all.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::Place;
use super::moment::Side;
use crate::agents::holds;
use crate::trial::Trial;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Write {
    /// The source's record with the other host's name, before the shadow is requested.
    OwnerMigrating,
    /// The source's record before the guest is stopped.
    HandingOver,
    /// The source's record after a failed hand-over. The record of the hand-over fails first.
    OwnerAgain,
    /// The source's note of a guest that has left.
    Gone,
    /// The removal of the source's record.
    SourceRemoval,
    /// The user of the shadow's QEMU.
    QemuUser,
    /// The number of the shadow's process.
    QemuPid,
    /// The destination's record before the shadow is made.
    Shadow,
    /// The note that the guest has not run yet.
    Unrun,
    /// The removal of that note.
    UnrunRemoval,
    /// The destination's record before the guest may run.
    TakingOver,
    /// The removal of the destination's record. The record before the guest may run fails first.
    ShadowRemoval,
    /// The destination's record of a guest that runs there.
    Owner,
    /// The note of the pages that are missing.
    Missing,
    /// The note of the host that has them.
    MissingFrom,
}

/// Error of a failing write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum WriteError {
    /// Fails once.
    #[serde(rename = "EIO")]
    Io,
    /// Fails until there is room again.
    #[serde(rename = "ENOSPC")]
    NoSpace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FailingWrite {
    pub write: Write,
    pub error: WriteError,
}

impl Write {
    /// All writes, in the order of a migration at either host.
    pub const ALL: [Write; 15] = [
        Write::OwnerMigrating,
        Write::HandingOver,
        Write::OwnerAgain,
        Write::Gone,
        Write::SourceRemoval,
        Write::QemuUser,
        Write::QemuPid,
        Write::Shadow,
        Write::Unrun,
        Write::UnrunRemoval,
        Write::TakingOver,
        Write::ShadowRemoval,
        Write::Owner,
        Write::Missing,
        Write::MissingFrom,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Write::OwnerMigrating => "owner-migrating",
            Write::HandingOver => "handing-over",
            Write::OwnerAgain => "owner-again",
            Write::Gone => "gone",
            Write::SourceRemoval => "source-removal",
            Write::QemuUser => "qemu-user",
            Write::QemuPid => "qemu-pid",
            Write::Shadow => "shadow",
            Write::Unrun => "unrun",
            Write::UnrunRemoval => "unrun-removal",
            Write::TakingOver => "taking-over",
            Write::ShadowRemoval => "shadow-removal",
            Write::Owner => "owner",
            Write::Missing => "missing",
            Write::MissingFrom => "missing-from",
        }
    }

    /// Returns the title in a table.
    fn title(self) -> &'static str {
        match self {
            Write::OwnerMigrating => "source: `owner`, with another host",
            Write::HandingOver => "source: `handing-over`",
            Write::OwnerAgain => "source: `owner` again, after a hand-over that ended",
            Write::Gone => "source: gone",
            Write::SourceRemoval => "source: removal of the record",
            Write::QemuUser => "destination: `qemu.user`",
            Write::QemuPid => "destination: `qemu.pid`",
            Write::Shadow => "destination: `shadow`",
            Write::Unrun => "destination: `.unrun` written",
            Write::UnrunRemoval => "destination: `.unrun` removed",
            Write::TakingOver => "destination: `taking-over`",
            Write::ShadowRemoval => "destination: removal of a shadow's record",
            Write::Owner => "destination: `owner`",
            Write::Missing => "destination: `.missing`",
            Write::MissingFrom => "destination: `.missing-from`",
        }
    }

    /// Returns where the guest must be afterwards: no host acts on a record that it could not
    /// write.
    pub(super) fn allowed(self) -> &'static [Place] {
        match self {
            Write::OwnerMigrating
            | Write::HandingOver
            | Write::OwnerAgain
            | Write::QemuUser
            | Write::QemuPid
            | Write::Shadow
            | Write::UnrunRemoval
            | Write::TakingOver
            | Write::ShadowRemoval => &[Place::Source],
            // The guest has left, or both ends go on without the note.
            Write::Gone
            | Write::SourceRemoval
            | Write::Unrun
            | Write::Owner
            | Write::Missing
            | Write::MissingFrom => &[Place::Destination],
        }
    }

    /// Returns whether only a page-in writes it.
    pub(super) fn is_for_page_in(self) -> bool {
        matches!(self, Write::Missing | Write::MissingFrom)
    }

    /// Returns the kinds to fail, by the agents' names, with their hosts. The last is the one
    /// tested.
    fn kinds(self) -> &'static [(Side, &'static str)] {
        use Side::{Destination, Source};
        match self {
            Write::OwnerMigrating => &[(Source, "owner-migrating")],
            Write::HandingOver => &[(Source, "handing-over")],
            Write::OwnerAgain => &[(Source, "handing-over"), (Source, "owner")],
            Write::Gone => &[(Source, "gone")],
            Write::SourceRemoval => &[(Source, "removal")],
            Write::QemuUser => &[(Destination, "qemu-user")],
            Write::QemuPid => &[(Destination, "qemu-pid")],
            Write::Shadow => &[(Destination, "shadow")],
            Write::Unrun => &[(Destination, "unrun")],
            Write::UnrunRemoval => &[(Destination, "unrun-removal")],
            Write::TakingOver => &[(Destination, "taking-over")],
            Write::ShadowRemoval => &[(Destination, "taking-over"), (Destination, "removal")],
            Write::Owner => &[(Destination, "owner")],
            Write::Missing => &[(Destination, "missing")],
            Write::MissingFrom => &[(Destination, "missing-from")],
        }
    }
}

impl WriteError {
    /// Both errors.
    pub const ALL: [WriteError; 2] = [WriteError::Io, WriteError::NoSpace];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            WriteError::Io => "EIO",
            WriteError::NoSpace => "ENOSPC",
        }
    }

    /// Returns the content of the file that the agents read.
    fn plan(self) -> &'static str {
        match self {
            WriteError::Io => "EIO once",
            WriteError::NoSpace => "ENOSPC",
        }
    }

    /// Returns the words of a report of a migration that it ended.
    pub(super) fn reasons(self) -> &'static [&'static str] {
        match self {
            WriteError::Io => &["os error 5)"],
            WriteError::NoSpace => &["os error 28)"],
        }
    }
}

impl FailingWrite {
    /// Each write by each error.
    pub fn all() -> impl Iterator<Item = FailingWrite> {
        let by_each = |write| WriteError::ALL.map(|error| FailingWrite { write, error });
        Write::ALL.into_iter().flat_map(by_each)
    }

    #[must_use]
    pub fn name(self) -> String {
        format!("{}-{}", self.write.name(), self.error.name().to_lowercase())
    }

    /// Returns the title in a table.
    #[must_use]
    pub fn title(self) -> String {
        format!("a write fails ({}), {}", self.error.name(), self.write.title())
    }

    pub(super) fn begin(self, trial: &Trial, source: &str, destination: &str) -> Result<()> {
        for (fail, failed) in self.files(trial, source, destination) {
            let _ = std::fs::remove_file(&failed);
            std::fs::write(&fail, self.error.plan())
                .with_context(|| format!("{}", fail.display()))?;
        }
        Ok(())
    }

    pub(super) fn end(self, trial: &Trial, source: &str, destination: &str) {
        for (fail, _) in self.files(trial, source, destination) {
            // The agent has removed it if it failed once.
            let _ = std::fs::remove_file(fail);
        }
    }

    /// Returns whether each kind has failed.
    pub(super) fn has_come(self, trial: &Trial, source: &str, destination: &str) -> bool {
        self.files(trial, source, destination).iter().all(|(_, failed)| failed.exists())
    }

    fn files(self, trial: &Trial, source: &str, destination: &str) -> Vec<(PathBuf, PathBuf)> {
        let files = |&(side, kind): &(Side, &str)| {
            let host = if side == Side::Source { source } else { destination };
            let folder = holds(trial.paths(), host);
            (folder.join("fail").join(kind), folder.join("failed").join(kind))
        };
        self.write.kinds().iter().map(files).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_write_fails_by_each_error_and_has_its_name() {
        assert_eq!(FailingWrite::all().count(), 2 * Write::ALL.len());
        for FailingWrite { write, error } in FailingWrite::all() {
            assert_eq!(serde_json::to_value(write).unwrap(), write.name());
            assert_eq!(serde_json::to_value(error).unwrap(), error.name());
            assert_eq!(write.allowed().len(), 1, "{write:?}");
        }
        let sorted: std::collections::BTreeSet<Write> = Write::ALL.into_iter().collect();
        assert!(sorted.into_iter().eq(Write::ALL), "each once, in order");
    }
}
