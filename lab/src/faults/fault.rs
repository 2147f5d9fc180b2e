//! What happens to a migration.

use serde::{Deserialize, Serialize};

/// A fault, injected for real.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// `kill -9` of the source's agent, which is started again.
    KillSourceAgent,
    /// `kill -9` of the destination's agent, which is started again.
    KillDestinationAgent,
    /// `kill -9` of the source's QEMU.
    KillSourceQemu,
    /// `kill -9` of the destination's QEMU.
    KillDestinationQemu,
    /// `kill -9` of the `godwit migrate` that began it and follows it.
    KillCli,
    /// The link between the hosts carries nothing for two seconds.
    CutBriefly,
    /// The link carries nothing until the source has given its verdict, or for a minute where it gives none: before the switchover a
    /// migration waits for less.
    CutForGood,
    /// The source's agent stands still (SIGSTOP) for as long.
    SilentSource,
    /// The destination's agent stands still.
    SilentDestination,
    /// The link carries 256 kbit/s for as long.
    SlowLink,
    /// No byte more fits on the disk with the source's records, for as long.
    SourceDiskFull,
    /// The same at the destination.
    DestinationDiskFull,
    /// No page more fits in the destination's tmpfs for guest memory, for as long.
    RamFull,
    /// The kernel's OOM killer strikes the destination's agent or its QEMU.
    OutOfMemory,
    /// Both agents' clocks jump ahead by an hour.
    ClockForward,
    /// Both agents' clocks jump back by an hour.
    ClockBackward,
    /// A byte is changed on its way in the clear, with TCP's checksum made to fit.
    CorruptByte,
    /// One kind of write of a host's state fails ([`super::FailingWrite`]).
    WriteFails,
    /// The VM was deleted and created again under its uuid, the destination remembers its older life, and the destination's agent is killed.
    CreatedAgain,
    /// The guest powers itself off.
    GuestShutDown,
}

impl Fault {
    /// Those that are tried at every moment.
    pub const MATRIX: [Fault; 7] = [
        Fault::KillSourceAgent,
        Fault::KillDestinationAgent,
        Fault::KillSourceQemu,
        Fault::KillDestinationQemu,
        Fault::KillCli,
        Fault::CutBriefly,
        Fault::CutForGood,
    ];

    /// Those that are tried where they tell most.
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

    /// The same at the other host, where it is one of the source's.
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

    /// As the head of a column.
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
