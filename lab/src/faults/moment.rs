//! The moments of a migration at which it is struck, as its users know them, and the hold points that they are.

use serde::{Deserialize, Serialize};

/// A moment of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moment {
    /// The source has checked the VM, and asks nobody yet.
    Preflight,
    /// The destination has made the shadow, and has not answered yet.
    Prepare,
    /// Pages of round 0 are on their way.
    PreCopy,
    /// A later round is about to be sent.
    Round,
    /// The guest has been stopped; its last pages and its device state are to be sent.
    Switchover,
    /// All of it is sent, and the commit is not.
    LastPages,
    /// The commit is sent, and the destination is still to load the device state.
    Committed,
    /// The destination has loaded the guest, and has not let it run.
    Loaded,
    /// The guest runs at the destination, which has neither written that down nor told the source.
    Started,
    /// The guest runs at the destination, and pages of it are at the source.
    PageIn,
    /// The source knows that the guest runs at the destination, and has not let go of it.
    Release,
}

/// One of the two hosts of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Side {
    /// It runs the guest before.
    Source,
    /// It is to run it afterwards.
    Destination,
}

impl Moment {
    /// All of them, in the order in which a migration comes to them.
    pub const ALL: [Moment; 11] = [
        Moment::Preflight,
        Moment::Prepare,
        Moment::PreCopy,
        Moment::Round,
        Moment::Switchover,
        Moment::LastPages,
        Moment::Committed,
        Moment::Loaded,
        Moment::Started,
        Moment::PageIn,
        Moment::Release,
    ];

    /// Its name in options and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Moment::Preflight => "preflight",
            Moment::Prepare => "prepare",
            Moment::PreCopy => "pre-copy",
            Moment::Round => "round",
            Moment::Switchover => "switchover",
            Moment::LastPages => "last-pages",
            Moment::Committed => "committed",
            Moment::Loaded => "loaded",
            Moment::Started => "started",
            Moment::PageIn => "page-in",
            Moment::Release => "release",
        }
    }

    /// What is so then.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Moment::Preflight => "the source has checked the VM and has asked nobody yet",
            Moment::Prepare => "the destination has made the shadow VM and has not answered",
            Moment::PreCopy => "pages of round 0 are on their way",
            Moment::Round => "a later round begins",
            Moment::Switchover => {
                "the guest is stopped; last pages and device state are to be sent"
            }
            Moment::LastPages => "all is sent but the commit",
            Moment::Committed => {
                "the commit is sent; the destination is about to load the device state"
            }
            Moment::Loaded => {
                "the destination has commit and device state, and is about to run the guest"
            }
            Moment::Started => "the guest runs at the destination, which has told nobody yet",
            Moment::PageIn => {
                "the guest runs at the destination, and pages of it are at the source"
            }
            Moment::Release => {
                "the source knows that the guest runs at the destination, and is about to let go of it"
            }
        }
    }

    /// Who is held where; none: it is seen by the progress of a migration that goes on.
    pub(super) fn held(self) -> Option<(Side, &'static str)> {
        match self {
            Moment::Preflight => Some((Side::Source, "host.preflight")),
            Moment::Prepare => Some((Side::Destination, "host.incoming-prepared")),
            Moment::Round => Some((Side::Source, "source.send-round")),
            Moment::Switchover => Some((Side::Source, "source.write-device-state")),
            Moment::LastPages => Some((Side::Source, "source.send-commit")),
            Moment::Committed => Some((Side::Destination, "destination.finish-load")),
            Moment::Loaded => Some((Side::Destination, "destination.run-guest")),
            Moment::Started => Some((Side::Destination, "destination.promote")),
            Moment::Release => Some((Side::Source, "source.release-guest")),
            Moment::PreCopy | Moment::PageIn => None,
        }
    }

    /// Whether the source still owns the guest then.
    #[must_use]
    pub fn is_before_commit(self) -> bool {
        self < Moment::Committed
    }

    /// Whether the guest has run at the destination by then.
    #[must_use]
    pub fn has_run_there(self) -> bool {
        self >= Moment::Started
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_json() {
        for moment in Moment::ALL {
            assert_eq!(serde_json::to_value(moment).unwrap(), moment.name());
        }
        assert!(Moment::ALL.is_sorted());
    }
}
