//! Codes of failed migrations: one code for the wire, for programs and for people.

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal, $remedy:literal;)*) => {
        /// Stable code of a failure. The numbers are those of docs/protocol.md.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum FailureCode { $($(#[$doc])* $name = $code),* }

        impl FailureCode {
            /// Returns the code of a number from the wire; unknown ones become
            /// [`FailureCode::Internal`].
            #[must_use]
            pub fn from_wire(code: u16) -> Self {
                match code { $($code => FailureCode::$name,)* _ => FailureCode::Internal }
            }

            /// Returns the code's name for programs.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(FailureCode::$name => $text),* }
            }

            #[must_use]
            pub fn remedy(self) -> &'static str {
                match self { $(FailureCode::$name => $remedy),* }
            }
        }
    };
}

codes! {
    /// The peers speak no common version.
    VersionMismatch = 1, "version-mismatch", "upgrade the older of the two agents";
    /// The destination expects no such migration.
    UnknownMigration = 2, "unknown-migration", "the destination's agent restarted or gave up \
        waiting, or the address is another host's (see migration_addresses): migrate again";
    /// The shadow VM has other RAM blocks than the source.
    MemoryMismatch = 3, "memory-mismatch", "both agents must run the same release; migrate again";
    /// The peer violated the protocol.
    ProtocolBroken = 4, "protocol-broken", "check that both agents run compatible releases and \
        that nothing alters the connection";
    /// Guest memory could not be read, written or tracked.
    MemoryFailed = 5, "memory-failed", "see the agent's log on the host that is named";
    /// The hypervisor failed.
    HypervisorFailed = 6, "hypervisor-failed", "see the VM's qemu.log on the host that is named";
    /// An operator cancelled the migration.
    Cancelled = 7, "cancelled", "migrate again when it suits";
    /// The guest dirties memory faster than the wire carries it.
    NotConverging = 8, "not-converging", "move it when it is less busy, over a faster link, \
        with a larger --switchover-budget, or with --engine qemu --auto-converge";
    /// The peer knows a newer owner.
    StaleEpoch = 9, "stale-epoch", "this host's record of the VM is old: see where the VM runs \
        before anything else";
    /// Another failure.
    Internal = 10, "internal", "see the logs of both agents";
    /// The connection to the peer broke.
    LaneLost = 11, "lane-lost", "check the migration network between the two hosts (`godwit \
        probe` shows which lane carries nothing, also where that is its MTU), then migrate again";
    /// More streams were requested than a migration may have.
    TooManyStreams = 13, "too-many-streams", "ask for fewer with --streams, or leave that to \
        measurement";
    /// The guest powered itself off before it was handed over.
    GuestShutDown = 14, "guest-shut-down", "start the VM again where it is to run";
    /// The guest wrote variables of its firmware while QEMU moved them.
    FirmwareWritten = 15, "firmware-written", "migrate again: the guest writes them rarely";
    /// A disk that travels with the VM cannot be read or written.
    DiskFailed = 16, "disk-failed", "see the message: free space or correct the storage there, \
        then migrate again, which goes on where it was";
    /// The guest writes its disks faster than they can be copied.
    DisksNotConverging = 17, "disks-not-converging", "move it when it writes less, or over a \
        faster link";
    /// The destination did not answer after the commit.
    InDoubt = 12, "in-doubt", "see whether the destination runs the VM; start it at the source \
        only if the destination does not and can't";
}
