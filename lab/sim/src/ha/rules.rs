//! Rules that a test may leave out, to check that each of them is needed.

/// A rule of docs/ha-terms.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// The guard counts from the moment before the renewal was sent, not from the answer.
    CountsFromSending,
    /// A confirmation after the deadline brings the term back neither to a guard nor to its VMs.
    DeadlineIsFinal,
    /// From the deadline on, the watchdog is not reset until the VMs have ended.
    WatchdogWaits,
    /// A guard reports that its term is over only after the VMs have ended.
    OverAfterVms,
    /// A majority of the datastores has to confirm a heartbeat.
    Majority,
    /// A request to start a VM is accepted only in its term.
    StartsInTerm,
    /// The judge adds the drift of both clocks.
    WaitsForDrift,
    /// The judge adds the grace.
    WaitsForGrace,
    /// The judge reads the heartbeats.
    ReadsHeartbeats,
    /// A failed reading is not a silence.
    FailedReadingProvesNothing,
    /// A reading counts from its start, not from its answer.
    ReadingCountsFromStart,
    /// Without a watchdog, the host has to be off.
    NeedsAssurance,
    /// A fencing device that reports "off" ends no wait.
    FencingShortensNoWait,
    /// A new leader counts from its takeover.
    CountsFromTakeover,
    /// A manager that no longer leads grants nothing.
    OnlyLeaderGrants,
    /// Where a VM will run is recorded before the request to start it.
    PlacementIsRecorded,
}

impl Rule {
    pub const ALL: [Rule; 16] = [
        Rule::CountsFromSending,
        Rule::DeadlineIsFinal,
        Rule::WatchdogWaits,
        Rule::OverAfterVms,
        Rule::Majority,
        Rule::StartsInTerm,
        Rule::WaitsForDrift,
        Rule::WaitsForGrace,
        Rule::ReadsHeartbeats,
        Rule::FailedReadingProvesNothing,
        Rule::ReadingCountsFromStart,
        Rule::NeedsAssurance,
        Rule::FencingShortensNoWait,
        Rule::CountsFromTakeover,
        Rule::OnlyLeaderGrants,
        Rule::PlacementIsRecorded,
    ];
}
