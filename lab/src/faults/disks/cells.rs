//! Faults and moments of migrations in which disks travel, and where the guest must be afterwards.

use godwit_types::{Phase, Progress};
use serde::{Deserialize, Serialize};

use crate::faults::Place;
use crate::faults::moment::Side;

/// Moment of a migration with disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskMoment {
    /// Round 0 of the disks has begun.
    Begin,
    /// A quarter of round 0 has been sent.
    Quarter,
    /// Half of round 0 has been sent.
    Half,
    /// Nine tenths of round 0 have been sent.
    Most,
    /// A later round of the disks is under way.
    LaterRound,
    /// A later round of the memory is about to be sent, and rounds of the disks go on beside it.
    Memory,
    /// The guest is stopped; the last round of the disks is to be sent.
    LastRound,
    /// The last round and everything else except the commit is sent.
    LastSent,
    /// The commit is sent; the destination is to wait until its disks are complete.
    Committed,
    /// The guest runs at the destination, which has not reported it yet.
    Started,
}

impl DiskMoment {
    /// All moments, in the order of a migration.
    pub const ALL: [DiskMoment; 10] = [
        DiskMoment::Begin,
        DiskMoment::Quarter,
        DiskMoment::Half,
        DiskMoment::Most,
        DiskMoment::LaterRound,
        DiskMoment::Memory,
        DiskMoment::LastRound,
        DiskMoment::LastSent,
        DiskMoment::Committed,
        DiskMoment::Started,
    ];

    /// Returns the name in options and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DiskMoment::Begin => "disks-begin",
            DiskMoment::Quarter => "disks-quarter",
            DiskMoment::Half => "disks-half",
            DiskMoment::Most => "disks-most",
            DiskMoment::LaterRound => "disks-later-round",
            DiskMoment::Memory => "disks-memory",
            DiskMoment::LastRound => "disks-last-round",
            DiskMoment::LastSent => "disks-last-sent",
            DiskMoment::Committed => "disks-committed",
            DiskMoment::Started => "disks-started",
        }
    }

    /// Returns the side and the hold point. `None` if the moment is observed in the progress.
    pub(super) fn held(self) -> Option<(Side, &'static str)> {
        match self {
            DiskMoment::Memory => Some((Side::Source, "source.send-round")),
            DiskMoment::LastRound => Some((Side::Source, "source.write-device-state")),
            DiskMoment::LastSent => Some((Side::Source, "source.send-commit")),
            DiskMoment::Committed => Some((Side::Destination, "destination.finish-load")),
            DiskMoment::Started => Some((Side::Destination, "destination.promote")),
            _ => None,
        }
    }

    /// Returns whether the progress shows a moment without a hold point.
    pub(super) fn is_shown(self, progress: &Progress) -> bool {
        let Some(disks) = progress.disks else { return false };
        let is_sent = |percent: u64| {
            disks.sent_bytes.saturating_mul(100) >= disks.total_bytes.saturating_mul(percent)
        };
        let is_known = progress.phase == Phase::Disks && disks.total_bytes > 0;
        match self {
            DiskMoment::Begin => is_known,
            DiskMoment::Quarter => is_known && is_sent(25),
            DiskMoment::Half => is_known && is_sent(50),
            DiskMoment::Most => is_known && is_sent(90),
            DiskMoment::LaterRound => disks.round >= 1,
            _ => false,
        }
    }

    /// Returns whether only disks travel, and no memory yet.
    #[must_use]
    pub fn is_before_memory(self) -> bool {
        self <= DiskMoment::LaterRound
    }

    /// Returns whether so much had been sent that a transfer which begins again is noticed by its
    /// bytes.
    #[must_use]
    pub fn shows_a_fresh_start(self) -> bool {
        self.is_before_memory() && self != DiskMoment::Begin
    }
}

/// Fault of a migration with disks, injected for real.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskFault {
    /// Cut of the link for half a minute.
    CutForHalfMinute,
    /// Kill (`kill -9`) of the source's agent, which is restarted.
    KillSourceAgent,
    /// Kill (`kill -9`) of the destination's agent, which is restarted.
    KillDestinationAgent,
    /// Power loss of the destination: its processes are gone, and what was not flushed to its
    /// images is lost. It is switched on again.
    PowerLoss,
}

impl DiskFault {
    pub const ALL: [DiskFault; 4] = [
        DiskFault::CutForHalfMinute,
        DiskFault::KillSourceAgent,
        DiskFault::KillDestinationAgent,
        DiskFault::PowerLoss,
    ];

    /// Returns the name in options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DiskFault::CutForHalfMinute => "disks-cut-for-half-minute",
            DiskFault::KillSourceAgent => "disks-kill-source-agent",
            DiskFault::KillDestinationAgent => "disks-kill-destination-agent",
            DiskFault::PowerLoss => "disks-power-loss",
        }
    }

    /// Returns the title in a table.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            DiskFault::CutForHalfMinute => "link cut for 30 s",
            DiskFault::KillSourceAgent => "source's agent killed",
            DiskFault::KillDestinationAgent => "destination's agent killed",
            DiskFault::PowerLoss => "power loss of the destination",
        }
    }
}

/// Fault at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DiskCell {
    pub moment: DiskMoment,
    pub fault: DiskFault,
}

/// Returns every fault at every moment.
#[must_use]
pub fn disk_matrix() -> Vec<DiskCell> {
    let at = |moment| DiskFault::ALL.map(|fault| DiskCell { moment, fault });
    DiskMoment::ALL.into_iter().flat_map(at).collect()
}

impl DiskCell {
    /// Returns the places that are allowed for the guest afterwards.
    #[must_use]
    pub fn allowed(self) -> &'static [Place] {
        use Place::{Destination, InDoubt, Source};
        match (self.fault, self.moment) {
            // The destination's record says that the guest may run there, and with the power the
            // note was lost that says whether it has (docs/handover.md). The source has sent its
            // commit.
            (DiskFault::PowerLoss, DiskMoment::Started) => &[InDoubt],
            // That record may not be written yet. The source may notice that its commit cannot be
            // sent.
            (DiskFault::PowerLoss, DiskMoment::LastSent | DiskMoment::Committed) => {
                &[Source, InDoubt]
            }
            (_, DiskMoment::Started) => &[Destination],
            // The destination has the commit and all disks, or lacks one of them.
            (DiskFault::CutForHalfMinute | DiskFault::KillSourceAgent, DiskMoment::Committed) => {
                &[Source, Destination]
            }
            (DiskFault::KillSourceAgent, _) => &[Source],
            // The guest does not wait for so long; what is left may be on its way.
            (DiskFault::CutForHalfMinute, DiskMoment::LastRound | DiskMoment::LastSent) => {
                &[Source, Destination]
            }
            (DiskFault::CutForHalfMinute, _) => &[Destination],
            // The source reaches the restarted agent within the limit for cuts and goes on, or the
            // restarted agent has to be asked by the next migration.
            (_, moment) if moment.is_before_memory() => &[Source, Destination],
            // The shadow has not run. The restarted agent discards it.
            _ => &[Source],
        }
    }

    /// Returns the cell's name: fault and moment.
    #[must_use]
    pub fn name(self) -> String {
        format!("{} at {}", self.fault.name(), self.moment.name())
    }
}

#[cfg(test)]
mod tests {
    use godwit_types::DisksProgress;

    use super::*;

    #[test]
    fn there_are_forty_cells_and_each_says_where_the_guest_must_be() {
        let cells = disk_matrix();
        assert_eq!(cells.len(), 40);
        assert!(cells.iter().all(|cell| !cell.allowed().is_empty()));
        assert!(cells.iter().all(|cell| !cell.allowed().contains(&Place::Nowhere)));
        // A host that has kept its memory knows whether the guest has run there.
        for cell in cells.iter().filter(|cell| cell.allowed().contains(&Place::InDoubt)) {
            assert_eq!(cell.fault, DiskFault::PowerLoss, "{cell:?}");
            assert!(cell.moment >= DiskMoment::LastSent, "{cell:?}");
            let is_certain = cell.moment == DiskMoment::Started;
            assert_eq!(cell.allowed() == [Place::InDoubt], is_certain, "{cell:?}");
        }
        // A killed source never hands over before its commit, whatever the disks have.
        for cell in cells.iter().filter(|cell| cell.fault == DiskFault::KillSourceAgent) {
            let is_before = cell.moment < DiskMoment::Committed;
            assert_eq!(cell.allowed() == [Place::Source], is_before, "{cell:?}");
        }
        let names: std::collections::BTreeSet<String> =
            cells.iter().map(|cell| cell.name()).collect();
        assert_eq!(names.len(), cells.len(), "two cells have one name");
        assert!(DiskMoment::ALL.is_sorted());
    }

    #[test]
    fn moments_of_rounds_are_seen_in_the_progress() {
        let progress = |phase, round, sent_bytes| {
            let disks = DisksProgress { round, sent_bytes, total_bytes: 200, ..Default::default() };
            Progress { phase, disks: Some(disks), ..Progress::begin(1) }
        };
        let first = |sent_bytes| progress(Phase::Disks, 0, sent_bytes);
        assert!(DiskMoment::Begin.is_shown(&first(0)));
        assert!(!DiskMoment::Half.is_shown(&first(99)) && DiskMoment::Half.is_shown(&first(100)));
        assert!(!DiskMoment::Most.is_shown(&first(179)) && DiskMoment::Most.is_shown(&first(180)));
        assert!(!DiskMoment::LaterRound.is_shown(&first(200)));
        assert!(DiskMoment::LaterRound.is_shown(&progress(Phase::Disks, 1, 200)));
        assert!(!DiskMoment::Begin.is_shown(&Progress::begin(1)));
        for moment in DiskMoment::ALL {
            assert_eq!(moment.held().is_none(), moment.is_before_memory(), "{moment:?}");
        }
    }
}
