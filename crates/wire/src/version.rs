//! Negotiation of the protocol version between two peers. It is pure, so tests cover every pair
//! without a socket.
//!
//! Support window: a release speaks its own version and the one before it.

use std::fmt;

/// A closed range of versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRange {
    /// Oldest version spoken.
    pub oldest: u16,
    /// Newest version spoken.
    pub newest: u16,
}

/// Versions that this build speaks.
pub const SUPPORTED: VersionRange = VersionRange { oldest: 1, newest: 1 };

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.newest {
            write!(f, "{}", self.newest)
        } else {
            write!(f, "{} to {}", self.oldest, self.newest)
        }
    }
}

/// Error when no version is spoken by both peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the peer speaks protocol version {theirs}, this agent {ours}: upgrade the older of the two \
    agents"
)]
pub struct Incompatible {
    /// Versions that this agent speaks.
    pub ours: VersionRange,
    /// Versions that the peer speaks.
    pub theirs: VersionRange,
}

/// Returns the newest version that both peers speak.
///
/// # Errors
/// [`Incompatible`] if the ranges do not overlap, or the peer's range is reversed.
pub fn negotiate(ours: VersionRange, theirs: VersionRange) -> Result<u16, Incompatible> {
    let newest = ours.newest.min(theirs.newest);
    if theirs.oldest <= theirs.newest && newest >= ours.oldest && newest >= theirs.oldest {
        Ok(newest)
    } else {
        Err(Incompatible { ours, theirs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(oldest: u16, newest: u16) -> VersionRange {
        VersionRange { oldest, newest }
    }

    #[test]
    fn the_newest_common_version_wins() {
        assert_eq!(negotiate(range(1, 3), range(2, 5)), Ok(3));
        assert_eq!(negotiate(range(2, 5), range(1, 3)), Ok(3));
        assert_eq!(negotiate(range(4, 4), range(4, 4)), Ok(4));
    }

    #[test]
    fn ranges_that_do_not_meet_are_refused() {
        let refused = negotiate(range(1, 1), range(2, 3)).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the peer speaks protocol version 2 to 3, this agent 1: upgrade the older of the two \
            agents"
        );
        assert!(negotiate(range(1, 9), range(5, 4)).is_err());
    }
}
