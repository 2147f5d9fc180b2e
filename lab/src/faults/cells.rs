//! Which faults are tried at which moments, and where the guest must be afterwards.

use serde::{Deserialize, Serialize};

use super::{Fault, Moment};

/// A fault at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cell {
    /// When.
    pub moment: Moment,
    /// What.
    pub fault: Fault,
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
}

/// Every fault of the matrix at every moment at which there is something to strike.
#[must_use]
pub fn matrix() -> Vec<Cell> {
    let at = |moment| Fault::MATRIX.map(|fault| Cell { moment, fault });
    Moment::ALL.into_iter().flat_map(at).filter(|cell| cell.is_possible()).collect()
}

/// The other faults, each at the moments at which it tells most.
#[must_use]
pub fn singles() -> Vec<Cell> {
    use Moment::{Committed, Loaded, PageIn, PreCopy, Prepare, Release, Round, Started, Switchover};
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
    ];
    let of = |(fault, moments): &(Fault, &[Moment])| {
        let fault = *fault;
        moments.iter().map(move |moment| Cell { moment: *moment, fault }).collect::<Vec<_>>()
    };
    cells.iter().flat_map(of).collect()
}

impl Cell {
    /// Whether there is something to strike: before the destination is asked it has no QEMU.
    #[must_use]
    pub fn is_possible(self) -> bool {
        self != Cell { moment: Moment::Preflight, fault: Fault::KillDestinationQemu }
    }

    /// The places of which the guest may be in one afterwards. It is where ownership was at the moment; between the commit and the first
    /// instruction at the destination either host may come to have it.
    #[must_use]
    pub fn allowed(self) -> &'static [Place] {
        use Place::{Destination, Nowhere, Source};
        let Cell { moment, fault } = self;
        match fault {
            // All that the destination needs has left the source already, or the agent has it still.
            Fault::KillSourceQemu if matches!(moment, Moment::LastPages | Moment::PageIn) => {
                &[Destination, Nowhere]
            }
            Fault::KillSourceQemu if moment.is_before_commit() => &[Nowhere],
            Fault::KillDestinationQemu if moment.has_run_there() => &[Nowhere],
            Fault::KillDestinationQemu => &[Source],
            Fault::KillSourceAgent | Fault::KillDestinationAgent if moment.is_before_commit() => &[Source],
            // The shadow had not run: the agent that finds it lets it go.
            Fault::KillDestinationAgent if !moment.has_run_there() => &[Source],
            // What holds nobody up for long ends in the move.
            Fault::KillCli | Fault::ClockForward | Fault::ClockBackward => &[Destination],
            // Before the guest is stopped a short cut costs time.
            Fault::CutBriefly if matches!(moment, Moment::PreCopy | Moment::Round) => &[Destination],
            _ if moment.has_run_there() => &[Destination],
            _ => &[Source, Destination],
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
