//! Revisions of the store and of its keys.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A state of the whole store. Each change has a greater number than all before it; numbers may be
/// skipped.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

/// Whether a key has a value, and the revision of its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// The key has no value.
    Absent,
    /// The key was last changed at this revision.
    At(Revision),
}

impl fmt::Display for KeyState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyState::Absent => out.write_str("absent"),
            KeyState::At(revision) => write!(out, "at revision {revision}"),
        }
    }
}
