//! Pairs of fault and moment that are tried, and where the guest must be afterwards.

use serde::{Deserialize, Serialize};

use super::moment::Side;
use super::{FailingWrite, Fault, Moment};

/// Fault at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cell {
    pub moment: Moment,
    pub fault: Fault,
    /// Failing write, if that is the fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<FailingWrite>,
}

/// Location of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// Runs on the source only.
    Source,
    /// Runs on the destination only.
    Destination,
    /// Runs nowhere, because the fault ended its QEMU. The agents report that.
    Nowhere,
    /// Runs nowhere, and both hosts are in doubt for as long as no operator decides.
    InDoubt,
    /// Has shut itself down and is stopped at its source. The destination does not know the VM.
    StoppedAtSource,
    /// Has shut itself down and is stopped at the destination. The source does not know the VM.
    StoppedAtDestination,
}

/// Returns every fault of the matrix at every moment where it has a target.
#[must_use]
pub fn matrix() -> Vec<Cell> {
    let at = |moment| Fault::MATRIX.map(|fault| Cell::at(moment, fault));
    Moment::ALL.into_iter().flat_map(at).filter(|cell| cell.is_possible()).collect()
}

/// Returns the other faults, each at the moments where it is most informative.
#[must_use]
pub fn singles() -> Vec<Cell> {
    use Moment::{
        Committed, Loaded, PageIn, PreCopy, Preflight, Prepare, Release, Round, Started, Switchover,
    };
    let cells: &[(Fault, &[Moment])] = &[
        (Fault::SilentSource, &[PreCopy, Switchover, Committed, PageIn]),
        (Fault::SilentDestination, &[Prepare, PreCopy, Switchover, Loaded, PageIn]),
        (Fault::SlowLink, &[PreCopy, Switchover, PageIn]),
        (Fault::SourceDiskFull, &[PreCopy, Release]),
        (Fault::DestinationDiskFull, &[PreCopy, Started]),
        (Fault::RamFull, &[Prepare]),
        (Fault::OutOfMemory, &[Prepare]),
        (Fault::ClockForward, &[PreCopy, Switchover, PageIn]),
        (Fault::ClockBackward, &[PreCopy, Switchover, PageIn]),
        (Fault::CorruptByte, &[PreCopy, Round]),
        (Fault::CreatedAgain, &[Committed]),
        // A stopped guest cannot shut itself down.
        (
            Fault::GuestShutDown,
            &[Preflight, Prepare, PreCopy, Round, Switchover, Started, PageIn, Release],
        ),
    ];
    let of = |(fault, moments): &(Fault, &[Moment])| {
        let fault = *fault;
        moments.iter().map(move |moment| Cell::at(*moment, fault)).collect::<Vec<_>>()
    };
    let failing = |write| Cell { write: Some(write), ..Cell::at(Preflight, Fault::WriteFails) };
    cells.iter().flat_map(of).chain(FailingWrite::all().map(failing)).collect()
}

impl Cell {
    /// Makes a cell without a failing write.
    #[must_use]
    pub fn at(moment: Moment, fault: Fault) -> Cell {
        Cell { moment, fault, write: None }
    }

    /// Returns the fault's name in options, with the write that fails.
    #[must_use]
    pub fn fault_name(self) -> String {
        match self.write {
            Some(write) => format!("{}-{}", self.fault.name(), write.name()),
            None => self.fault.name().to_owned(),
        }
    }

    /// Returns the fault's title in a table.
    #[must_use]
    pub fn title(self) -> String {
        self.write.map_or_else(|| self.fault.title().to_owned(), FailingWrite::title)
    }

    /// Returns the side and the hold point. `None` if the moment is observed in the progress of a
    /// running migration.
    pub(super) fn held(self) -> Option<(Side, &'static str)> {
        match (self.fault, self.moment) {
            // The guest runs its last instructions before it is stopped, or just when it is
            // stopped.
            (Fault::GuestShutDown, Moment::Switchover) => {
                Some((Side::Source, "source.begin-switchover"))
            }
            (_, moment) => moment.held(),
        }
    }

    /// Returns whether the fault has a target. The destination has no QEMU before the prepare
    /// request.
    #[must_use]
    pub fn is_possible(self) -> bool {
        self != Cell::at(Moment::Preflight, Fault::KillDestinationQemu)
    }

    /// Returns the places that are allowed for the guest afterwards, usually one: where ownership
    /// was at the moment of the fault.
    #[must_use]
    pub fn allowed(self) -> &'static [Place] {
        use Place::{Destination, Nowhere, Source, StoppedAtDestination, StoppedAtSource};
        let Cell { moment, fault, write } = self;
        match fault {
            Fault::WriteFails => write.map_or(&[], |failing| failing.write.allowed()),
            // The hand-over may stop the guest before it powers off, or not.
            Fault::GuestShutDown if moment == Moment::Switchover => {
                &[StoppedAtSource, StoppedAtDestination]
            }
            Fault::GuestShutDown if moment.is_before_commit() => &[StoppedAtSource],
            Fault::GuestShutDown => &[StoppedAtDestination],
            Fault::CreatedAgain => &[Source],
            // The destination has all data, or the source's agent still holds it, or the data is
            // lost.
            Fault::KillSourceQemu if matches!(moment, Moment::LastPages | Moment::PageIn) => {
                &[Destination, Nowhere]
            }
            Fault::KillSourceQemu if moment.is_before_commit() => &[Nowhere],
            Fault::KillDestinationQemu if moment.has_run_there() => &[Nowhere],
            // The shadow has not run. The restarted agent finds it and discards it.
            Fault::KillDestinationAgent if !moment.has_run_there() => &[Source],
            Fault::KillDestinationQemu | Fault::RamFull | Fault::OutOfMemory => &[Source],
            Fault::KillSourceAgent if moment.is_before_commit() => &[Source],
            Fault::SourceDiskFull | Fault::DestinationDiskFull if moment.is_before_commit() => {
                &[Source]
            }
            // The cut outlasts the wait: the request's limit before the guest is stopped, the
            // engine's limit afterwards.
            Fault::CutForGood if moment.is_before_commit() => &[Source],
            Fault::SilentSource if moment == Moment::Switchover => &[Source],
            // The source awaits no answer before it commits. The stopped agent reads the commit
            // when it continues, unless the connection has been reset by then.
            Fault::SilentDestination if moment == Moment::Switchover => &[Source, Destination],
            // Faults that cause no long delay let the move complete.
            Fault::KillCli | Fault::ClockForward | Fault::ClockBackward | Fault::CorruptByte => {
                &[Destination]
            }
            // Before the guest is stopped, the fault only costs time, and less than the limit for
            // cuts.
            Fault::SilentSource | Fault::SilentDestination if moment.is_before_commit() => {
                &[Destination]
            }
            Fault::CutBriefly | Fault::SlowLink
                if matches!(moment, Moment::PreCopy | Moment::Round) =>
            {
                &[Destination]
            }
            // A connection attempt, a pending answer and a stopped guest are each waited for about
            // as long as this cut lasts (2 s).
            Fault::CutBriefly if moment.is_before_commit() => &[Source, Destination],
            // The remaining data may be small enough even for this link, or not.
            Fault::SlowLink if moment.is_before_commit() => &[Source, Destination],
            // The commit may still be in the link's queue, or unread when the end of the killed
            // agent resets the connection. Without the commit the destination discards the shadow.
            Fault::CutForGood | Fault::KillSourceAgent if moment == Moment::Committed => {
                &[Source, Destination]
            }
            // The destination has all data that it needs.
            _ => &[Destination],
        }
    }

    /// Returns the codes or parts of messages of which the report must contain one if the guest
    /// stays at its source. Empty if any reason will do or the process that would report was
    /// killed.
    #[must_use]
    pub fn reasons(self) -> &'static [&'static str] {
        match self.fault {
            // The store of records uses this text for any disk. It names the file.
            Fault::SourceDiskFull | Fault::DestinationDiskFull => &["is the disk full"],
            Fault::WriteFails => self.write.map_or(&[], |failing| failing.error.reasons()),
            Fault::RamFull => &["no memory left", "insufficient-memory", "memory-failed"],
            Fault::CutForGood if self.moment < Moment::PreCopy => {
                &["peer-unreachable", "lane-lost"]
            }
            Fault::CutForGood if matches!(self.moment, Moment::PreCopy | Moment::Round) => {
                &["was not restored"]
            }
            Fault::CutForGood => &["lane-lost", "in-doubt"],
            Fault::SilentSource => &["lane-lost", "not-converging"],
            // Everything sent, even the commit, may fit the buffers of a socket that nobody reads.
            Fault::SilentDestination => &["lane-lost", "not-converging", "in-doubt"],
            _ => &[],
        }
    }

    /// Returns whether the fault prevents completion until it is repaired. A migration that
    /// completes anyway shows that there was no fault.
    #[must_use]
    pub fn holds_up(self) -> bool {
        match self.fault {
            // At the release the source already knows that the guest runs.
            Fault::CutForGood => self.moment != Moment::Release,
            Fault::SlowLink => matches!(self.moment, Moment::PreCopy | Moment::PageIn),
            Fault::SilentDestination => true,
            _ => false,
        }
    }
}

impl Place {
    /// Returns the place's word in the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Place::Source => "source",
            Place::Destination => "destination",
            Place::Nowhere => "ended with its QEMU",
            Place::InDoubt => "in doubt at both",
            Place::StoppedAtSource => "stopped, source",
            Place::StoppedAtDestination => "stopped, destination",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_must_end_a_migration_before_its_commit_leaves_the_guest_at_its_source() {
        let cells: Vec<Cell> = matrix().into_iter().chain(singles()).collect();
        let either: Vec<String> = cells
            .iter()
            .filter(|cell| cell.allowed().len() > 1)
            .map(|cell| format!("{} at {}", cell.fault.name(), cell.moment.name()))
            .collect();
        let expected = [
            "cut-briefly at preflight",
            "cut-briefly at prepare",
            "kill-source-qemu at last-pages",
            "cut-briefly at switchover",
            "cut-briefly at last-pages",
            "kill-source-agent at committed",
            "cut-for-good at committed",
            "kill-source-qemu at page-in",
            "silent-destination at switchover",
            "slow-link at switchover",
            "guest-shut-down at switchover",
        ];
        assert_eq!(either.len(), expected.len(), "{either:?}");
        assert!(expected.iter().all(|name| either.iter().any(|found| found == name)), "{either:?}");
        for cell in cells.iter().filter(|cell| cell.allowed() == [Place::Source]) {
            let says_nothing = [
                Fault::KillSourceAgent,
                Fault::KillDestinationAgent,
                Fault::KillDestinationQemu,
                Fault::OutOfMemory,
                Fault::CreatedAgain,
            ];
            assert_eq!(cell.reasons().is_empty(), says_nothing.contains(&cell.fault), "{cell:?}");
        }
    }

    #[test]
    fn there_are_more_than_sixty_cells_and_each_says_where_the_guest_must_be() {
        let cells: Vec<Cell> = matrix().into_iter().chain(singles()).collect();
        assert_eq!(matrix().len(), 76);
        assert!(cells.iter().all(|cell| cell.is_possible() && !cell.allowed().is_empty()));
        // Only the end of a QEMU ends a guest.
        let kills = [Fault::KillSourceQemu, Fault::KillDestinationQemu];
        for cell in cells.iter().filter(|cell| !kills.contains(&cell.fault)) {
            assert!(!cell.allowed().contains(&Place::Nowhere), "{cell:?}");
        }
        // Only a guest stops itself.
        let is_stopped =
            |place: &Place| matches!(place, Place::StoppedAtSource | Place::StoppedAtDestination);
        for cell in &cells {
            let is_by_guest = cell.fault == Fault::GuestShutDown;
            assert_eq!(cell.allowed().iter().all(is_stopped), is_by_guest, "{cell:?}");
            assert_eq!(cell.write.is_some(), cell.fault == Fault::WriteFails, "{cell:?}");
        }
        let names: std::collections::BTreeSet<String> = cells
            .iter()
            .map(|cell| format!("{} at {}", cell.fault_name(), cell.moment.name()))
            .collect();
        assert_eq!(names.len(), cells.len(), "two cells have one name");
    }
}
