//! Moments of a migration at which faults are injected, in the users' terms, and their hold points.

use serde::{Deserialize, Serialize};

/// Moment of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moment {
    /// The source has checked the VM and has sent no request yet.
    Preflight,
    /// The destination has made the shadow and has not responded yet.
    Prepare,
    /// Pages of round 0 are on their way.
    PreCopy,
    /// A later round is about to be sent.
    Round,
    /// The guest has been stopped; its last pages and its device state are to be sent.
    Switchover,
    /// Everything except the commit is sent.
    LastPages,
    /// The commit is sent, and the destination is still to load the device state.
    Committed,
    /// The destination has loaded the guest and has not started it.
    Loaded,
    /// The guest runs at the destination, which has neither recorded that nor notified the source.
    Started,
    /// The guest runs at the destination, and some of its pages are still at the source.
    PageIn,
    /// The source knows that the guest runs at the destination, and has not released it.
    Release,
}

/// One of the two hosts of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Side {
    /// Host that runs the guest before.
    Source,
    /// Host that is to run the guest afterwards.
    Destination,
}

impl Moment {
    /// All moments, in the order of a migration.
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

    /// Returns the name in options and tables.
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

    /// Returns a description of the migration's state at this moment.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Moment::Preflight => "the source has checked the VM and has sent no request yet",
            Moment::Prepare => "the destination has made the shadow VM and has not responded",
            Moment::PreCopy => "pages of round 0 are on their way",
            Moment::Round => "a later round begins",
            Moment::Switchover => {
                "the guest is stopped; last pages and device state are to be sent"
            }
            Moment::LastPages => "everything except the commit is sent",
            Moment::Committed => {
                "the commit is sent; the destination is about to load the device state"
            }
            Moment::Loaded => {
                "the destination has commit and device state, and is about to run the guest"
            }
            Moment::Started => "the guest runs at the destination, which has not reported it yet",
            Moment::PageIn => {
                "the guest runs at the destination, and some of its pages are at the source"
            }
            Moment::Release => {
                "the source knows that the guest runs at the destination, and is about to \
                 release it"
            }
        }
    }

    /// Returns the side and the hold point. `None` if the moment is observed in the progress of a
    /// running migration.
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

    /// Returns whether the source still owns the guest.
    #[must_use]
    pub fn is_before_commit(self) -> bool {
        self < Moment::Committed
    }

    /// Returns whether the guest has run at the destination.
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
