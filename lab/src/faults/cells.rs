//! Which faults are tried at which moments, and where the guest must be afterwards.

use serde::{Deserialize, Serialize};

use super::moment::Side;
use super::{FailingWrite, Fault, Moment};

/// A fault at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cell {
    /// When.
    pub moment: Moment,
    pub fault: Fault,
    /// Which write fails, where that is the fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<FailingWrite>,
}

/// Where the guest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// It runs on at the source, and there alone.
    Source,
    /// It runs at the destination, and there alone.
    Destination,
    /// The fault was the end of the QEMU that had it: it runs nowhere, and that is told.
    Nowhere,
    /// It has shut itself down: it is stopped at its source, and the destination knows nothing of it.
    StoppedAtSource,
    /// It has shut itself down: it is stopped at the destination, and its source knows nothing of it.
    StoppedAtDestination,
}

/// Every fault of the matrix at every moment at which there is something to strike.
#[must_use]
pub fn matrix() -> Vec<Cell> {
    let at = |moment| Fault::MATRIX.map(|fault| Cell::at(moment, fault));
    Moment::ALL.into_iter().flat_map(at).filter(|cell| cell.is_possible()).collect()
}

/// The other faults, each at the moments at which it tells most.
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
        // A guest that stands still does nothing.
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
    /// A fault at a moment.
    #[must_use]
    pub fn at(moment: Moment, fault: Fault) -> Cell {
        Cell { moment, fault, write: None }
    }

    /// Its fault's name in options, with the write that fails.
    #[must_use]
    pub fn fault_name(self) -> String {
        match self.write {
            Some(write) => format!("{}-{}", self.fault.name(), write.name()),
            None => self.fault.name().to_owned(),
        }
    }

    /// Its fault in a table.
    #[must_use]
    pub fn title(self) -> String {
        self.write.map_or_else(|| self.fault.title().to_owned(), FailingWrite::title)
    }

    /// Who is held where; none: it is seen by the progress of a migration that goes on.
    pub(super) fn held(self) -> Option<(Side, &'static str)> {
        match (self.fault, self.moment) {
            // Its last instructions are to come before it is stopped, or right when it is.
            (Fault::GuestShutDown, Moment::Switchover) => {
                Some((Side::Source, "source.begin-switchover"))
            }
            (_, moment) => moment.held(),
        }
    }

    /// Whether there is something to strike: before the destination is asked it has no QEMU.
    #[must_use]
    pub fn is_possible(self) -> bool {
        self != Cell::at(Moment::Preflight, Fault::KillDestinationQemu)
    }

    /// The places of which the guest may be in one afterwards: as a rule one. It is where ownership was at the moment.
    #[must_use]
    pub fn allowed(self) -> &'static [Place] {
        use Place::{Destination, Nowhere, Source, StoppedAtDestination, StoppedAtSource};
        let Cell { moment, fault, write } = self;
        match fault {
            Fault::WriteFails => write.map_or(&[], |failing| failing.write.allowed()),
            // It is stopped for its hand-over before it comes to that, or not.
            Fault::GuestShutDown if moment == Moment::Switchover => {
                &[StoppedAtSource, StoppedAtDestination]
            }
            Fault::GuestShutDown if moment.is_before_commit() => &[StoppedAtSource],
            Fault::GuestShutDown => &[StoppedAtDestination],
            Fault::CreatedAgain => &[Source],
            // All that the destination needs has left the source already, or the agent has it still; or it had not.
            Fault::KillSourceQemu if matches!(moment, Moment::LastPages | Moment::PageIn) => {
                &[Destination, Nowhere]
            }
            Fault::KillSourceQemu if moment.is_before_commit() => &[Nowhere],
            Fault::KillDestinationQemu if moment.has_run_there() => &[Nowhere],
            // The shadow had not run: the agent that finds it lets it go.
            Fault::KillDestinationAgent if !moment.has_run_there() => &[Source],
            Fault::KillDestinationQemu | Fault::RamFull | Fault::OutOfMemory => &[Source],
            Fault::KillSourceAgent if moment.is_before_commit() => &[Source],
            Fault::SourceDiskFull | Fault::DestinationDiskFull if moment.is_before_commit() => {
                &[Source]
            }
            // Longer than it is waited for: before the guest stands still by the request's limit, then by the engine's.
            Fault::CutForGood if moment.is_before_commit() => &[Source],
            Fault::SilentSource | Fault::SilentDestination if moment == Moment::Switchover => {
                &[Source]
            }
            // What holds nobody up for long ends in the move.
            Fault::KillCli | Fault::ClockForward | Fault::ClockBackward | Fault::CorruptByte => {
                &[Destination]
            }
            // Before the guest is stopped it costs time alone: less than the limit for cuts.
            Fault::SilentSource | Fault::SilentDestination if moment.is_before_commit() => {
                &[Destination]
            }
            Fault::CutBriefly | Fault::SlowLink
                if matches!(moment, Moment::PreCopy | Moment::Round) =>
            {
                &[Destination]
            }
            // A connection that is being made, an answer under way, or a guest that stands still: two seconds are about as long as each
            // of them is waited for.
            Fault::CutBriefly if moment.is_before_commit() => &[Source, Destination],
            // What is left to send may be little enough even for this link, or not.
            Fault::SlowLink if moment.is_before_commit() => &[Source, Destination],
            // The commit may be in the link's queue yet, or unread where the killed agent's end resets the connection: without it the
            // destination lets go.
            Fault::CutForGood | Fault::KillSourceAgent if moment == Moment::Committed => {
                &[Source, Destination]
            }
            // The destination has all that it needs.
            _ => &[Destination],
        }
    }

    /// Where the guest stays at its source: the report must say why, by one of these, which are codes and parts of messages. Empty: it
    /// may say anything, or whoever would say it was killed.
    #[must_use]
    pub fn reasons(self) -> &'static [&'static str] {
        match self.fault {
            // As the store of records says it of any disk: it names the file.
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
            // All that is sent, the commit too, may fit the buffers of a socket that nobody reads.
            Fault::SilentDestination => &["lane-lost", "not-converging", "in-doubt"],
            _ => &[],
        }
    }

    /// Whether the migration can't complete before the fault is mended: where it does, there was no fault.
    #[must_use]
    pub fn holds_up(self) -> bool {
        match self.fault {
            // At the release the source has heard already that the guest runs.
            Fault::CutForGood => self.moment != Moment::Release,
            Fault::SlowLink => matches!(self.moment, Moment::PreCopy | Moment::PageIn),
            Fault::SilentDestination => true,
            _ => false,
        }
    }
}

impl Place {
    /// Its word in the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Place::Source => "source",
            Place::Destination => "destination",
            Place::Nowhere => "ended with its QEMU",
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
