//! Faults of a migration.

use serde::{Deserialize, Serialize};

/// A fault, injected for real.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// Kill (`kill -9`) of the source's agent, which is restarted.
    KillSourceAgent,
    /// Kill (`kill -9`) of the destination's agent, which is restarted.
    KillDestinationAgent,
    /// `kill -9` of the source's QEMU.
    KillSourceQemu,
    /// `kill -9` of the destination's QEMU.
    KillDestinationQemu,
    /// Kill (`kill -9`) of the `godwit migrate` that started and follows the migration.
    KillCli,
    /// Cut of the link between the hosts for two seconds.
    CutBriefly,
    /// Cut of the link until the source has given its verdict, at most for a minute. A migration
    /// waits for less than that before the switchover.
    CutForGood,
    /// Stop (SIGSTOP) of the source's agent, until the verdict.
    SilentSource,
    /// Stop (SIGSTOP) of the destination's agent, until the verdict.
    SilentDestination,
    /// Link at 256 kbit/s, until the verdict.
    SlowLink,
    /// Full disk of the source's records, until the verdict.
    SourceDiskFull,
    /// Full disk of the destination's records, until the verdict.
    DestinationDiskFull,
    /// Full tmpfs for guest memory at the destination, until the verdict.
    RamFull,
    /// Kill of the destination's agent or QEMU by the kernel's OOM killer.
    OutOfMemory,
    /// Jump of both agents' clocks by an hour ahead.
    ClockForward,
    /// Jump of both agents' clocks by an hour back.
    ClockBackward,
    /// Change of a byte in flight without TLS; TCP's checksum is adjusted.
    CorruptByte,
    /// Failure of one kind of write of a host's state ([`super::FailingWrite`]).
    WriteFails,
    /// Kill of the destination's agent after the VM was deleted and created again under its UUID,
    /// while the destination remembers the older incarnation.
    CreatedAgain,
    /// Power-off by the guest itself.
    GuestShutDown,
}

impl Fault {
    /// Faults tried at every moment.
    pub const MATRIX: [Fault; 7] = [
        Fault::KillSourceAgent,
        Fault::KillDestinationAgent,
        Fault::KillSourceQemu,
        Fault::KillDestinationQemu,
        Fault::KillCli,
        Fault::CutBriefly,
        Fault::CutForGood,
    ];

    /// Faults tried at the most informative moments only.
    pub const SINGLE: [Fault; 13] = [
        Fault::SilentSource,
        Fault::SilentDestination,
        Fault::SlowLink,
        Fault::SourceDiskFull,
        Fault::DestinationDiskFull,
        Fault::RamFull,
        Fault::OutOfMemory,
        Fault::ClockForward,
        Fault::ClockBackward,
        Fault::CorruptByte,
        Fault::WriteFails,
        Fault::CreatedAgain,
        Fault::GuestShutDown,
    ];

    /// Returns the destination's counterpart of a fault of the source. Other faults are returned
    /// unchanged.
    #[must_use]
    pub fn at_destination(self) -> Fault {
        match self {
            Fault::KillSourceAgent => Fault::KillDestinationAgent,
            Fault::KillSourceQemu => Fault::KillDestinationQemu,
            Fault::SilentSource => Fault::SilentDestination,
            Fault::SourceDiskFull => Fault::DestinationDiskFull,
            other => other,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::KillSourceAgent => "kill-source-agent",
            Fault::KillDestinationAgent => "kill-destination-agent",
            Fault::KillSourceQemu => "kill-source-qemu",
            Fault::KillDestinationQemu => "kill-destination-qemu",
            Fault::KillCli => "kill-cli",
            Fault::CutBriefly => "cut-briefly",
            Fault::CutForGood => "cut-for-good",
            Fault::SilentSource => "silent-source",
            Fault::SilentDestination => "silent-destination",
            Fault::SlowLink => "slow-link",
            Fault::SourceDiskFull => "source-disk-full",
            Fault::DestinationDiskFull => "destination-disk-full",
            Fault::RamFull => "ram-full",
            Fault::OutOfMemory => "out-of-memory",
            Fault::ClockForward => "clock-forward",
            Fault::ClockBackward => "clock-backward",
            Fault::CorruptByte => "corrupt-byte",
            Fault::WriteFails => "write-fails",
            Fault::CreatedAgain => "created-again",
            Fault::GuestShutDown => "guest-shut-down",
        }
    }

    /// Returns the title of the fault's column.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Fault::KillSourceAgent => "source's agent killed",
            Fault::KillDestinationAgent => "destination's agent killed",
            Fault::KillSourceQemu => "source's QEMU killed",
            Fault::KillDestinationQemu => "destination's QEMU killed",
            Fault::KillCli => "CLI killed",
            Fault::CutBriefly => "link cut for 2 s",
            Fault::CutForGood => "link cut for good",
            Fault::SilentSource => "source's agent stopped (SIGSTOP)",
            Fault::SilentDestination => "destination's agent stopped (SIGSTOP)",
            Fault::SlowLink => "link at 256 kbit/s",
            Fault::SourceDiskFull => "source's disk for records full",
            Fault::DestinationDiskFull => "destination's disk for records full",
            Fault::RamFull => "destination's tmpfs for guest memory full",
            Fault::OutOfMemory => "destination out of memory (OOM killer)",
            Fault::ClockForward => "clocks an hour ahead",
            Fault::ClockBackward => "clocks an hour back",
            Fault::CorruptByte => "a byte changed in flight, in the clear",
            Fault::WriteFails => "a write fails",
            Fault::CreatedAgain => "VM created again under its uuid, destination's agent killed",
            Fault::GuestShutDown => "the guest shuts itself down",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_json() {
        for fault in Fault::MATRIX.into_iter().chain(Fault::SINGLE) {
            assert_eq!(serde_json::to_value(fault).unwrap(), fault.name());
        }
    }
}
