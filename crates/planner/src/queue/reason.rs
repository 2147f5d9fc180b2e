//! What a job waits for: typed for programs, in one line for people.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::retry;
use crate::words::{Bytes, Count, Names};

/// A limit that is reached, and the moves that use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    pub limit: u32,
    /// Running moves under the limit, including those that start now; more than the limit if that
    /// was lowered meanwhile.
    pub running: u32,
    /// The first few of their VMs.
    pub moving: Vec<String>,
    /// How many of `running` were begun at an agent, without a job.
    #[serde(default)]
    pub at_agents: u32,
    /// The job's place in the line of the limit, from 1.
    pub place: u32,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.limit == 0 {
            return write!(f, "the limit is 0 (place {} in line)", self.place);
        }
        let Line { limit, running, moving, at_agents, place } = self;
        let moving = Names(moving, *running as usize);
        write!(f, "{running} of {limit} at once ({moving})")?;
        if *at_agents > 0 {
            write!(f, ", {at_agents} started at an agent")?;
        }
        write!(f, "; place {place} in line")
    }
}

/// Why a job does not go to one of its targets now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum TargetObstacle {
    /// The inventory has no such host.
    NotInInventory { host: String },
    /// The VM runs there.
    IsSource { host: String },
    /// Its agent does not respond.
    Away { host: String },
    /// Its agent has not reported since this manager started.
    Unknown { host: String },
    /// It accepts no VMs.
    Maintenance { host: String },
    /// The limit of incoming moves is reached.
    Limit { host: String, line: Line },
    /// It lacks memory: `left_bytes` are free and not reserved.
    Memory { host: String, needed_bytes: u64, left_bytes: u64, total_bytes: u64 },
    /// Free capacity there is reserved for a job that has been passed over for long.
    Turn { host: String, behind: String },
}

impl fmt::Display for TargetObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TargetObstacle::NotInInventory { host } => {
                write!(f, "target {host} is not in the inventory")
            }
            TargetObstacle::IsSource { host } => {
                write!(f, "the VM already runs on its target {host}")
            }
            TargetObstacle::Away { host } => {
                write!(f, "target {host} is away: its agent does not answer")
            }
            TargetObstacle::Unknown { host } => {
                write!(f, "target {host} has not reported since this manager started")
            }
            TargetObstacle::Maintenance { host } => {
                write!(f, "target {host} is in maintenance and accepts no VMs")
            }
            TargetObstacle::Limit { host, line } => write!(f, "moves into target {host}: {line}"),
            TargetObstacle::Memory { host, needed_bytes, left_bytes, total_bytes } => {
                let (needed, left) = (Bytes(*needed_bytes), Bytes(*left_bytes));
                write!(f, "memory at target {host}: it needs {needed}, {left} are left")?;
                if needed_bytes > total_bytes {
                    write!(
                        f,
                        "; the host has {} in all, so it never fits there",
                        Bytes(*total_bytes)
                    )?;
                }
                Ok(())
            }
            TargetObstacle::Turn { host, behind } => {
                write!(
                    f,
                    "waits for its turn: free capacity at target {host} is reserved for job \
                    {behind}, which has waited longer"
                )
            }
        }
    }
}

/// Numbers of a job's unavailable targets, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// The limit of incoming moves is reached.
    pub at_limit: u32,
    /// They lack memory.
    pub without_memory: u32,
    /// Free capacity there is reserved for another job.
    pub kept_for_others: u32,
    /// Away, or without a report so far.
    pub away: u32,
    pub in_maintenance: u32,
    /// Not in the inventory, or the source itself.
    pub unusable: u32,
}

/// What bars a target, without its figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bar {
    NotInInventory,
    IsSource,
    Away,
    Unknown,
    Maintenance,
    Limit,
    Memory,
    Reserved,
}

impl Bar {
    /// Whether the bar disappears as moves end.
    pub(super) fn is_of_capacity(self) -> bool {
        matches!(self, Bar::Limit | Bar::Memory | Bar::Reserved)
    }
}

impl Tally {
    pub(super) fn count(&mut self, bar: Bar) {
        *match bar {
            Bar::NotInInventory | Bar::IsSource => &mut self.unusable,
            Bar::Away | Bar::Unknown => &mut self.away,
            Bar::Maintenance => &mut self.in_maintenance,
            Bar::Limit => &mut self.at_limit,
            Bar::Memory => &mut self.without_memory,
            Bar::Reserved => &mut self.kept_for_others,
        } += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.at_limit, "at its limit"),
            (self.without_memory, "without enough memory"),
            (self.kept_for_others, "reserved for other jobs"),
            (self.away, "away"),
            (self.in_maintenance, "in maintenance"),
            (self.unusable, "unusable"),
        ];
        let shown: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        f.write_str(&shown.join(", "))
    }
}

/// What a job waits for: the first obstacle, in the order of the variants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum WaitReason {
    /// The VM is in a migration.
    VmBusy {
        migration: String,
        source: String,
        target: String,
    },
    /// An earlier job of the same VM has not ended.
    EarlierJob {
        job: String,
    },
    /// Its last migration failed; the next attempt is at this time.
    RetryAt {
        at_ms: u64,
        in_ms: u64,
        failed_attempts: u32,
        failure: Option<String>,
    },
    /// The inventory has no such host.
    SourceNotInInventory {
        host: String,
    },
    /// The source's agent does not respond.
    SourceAway {
        host: String,
    },
    /// The source's agent has not reported since this manager started.
    SourceUnknown {
        host: String,
    },
    /// The limit of all moves is reached.
    TotalLimit {
        line: Line,
    },
    /// The limit of outgoing moves of the source is reached.
    SourceLimit {
        host: String,
        line: Line,
    },
    /// The limit of a datastore of its disks is reached.
    DatastoreLimit {
        datastore: String,
        line: Line,
    },
    /// Free capacity is reserved for a job that has been passed over for long; `of` names the
    /// limit.
    Turn {
        of: String,
        behind: String,
    },
    NoTarget,
    /// Its only target is unavailable.
    Target {
        obstacle: TargetObstacle,
    },
    /// None of its targets is available; `best` is the preferred one.
    Targets {
        best: TargetObstacle,
        tally: Tally,
    },
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitReason::VmBusy { migration, source, target } => {
                write!(
                    f,
                    "the VM is moving already, from {source} to {target} (migration {migration})"
                )
            }
            WaitReason::EarlierJob { job } => {
                write!(f, "job {job} of the same VM was submitted before it")
            }
            WaitReason::RetryAt { in_ms, failed_attempts, failure, .. } => {
                let (tried, code) = (
                    Count(*failed_attempts as usize, "attempt"),
                    failure.as_deref().unwrap_or("failure"),
                );
                let again = crate::words::Span(*in_ms);
                write!(f, "retry in {again}: {tried} failed, the last with {code}")?;
                failure.as_deref().map_or(Ok(()), |code| write!(f, " ({})", retry::cause(code).why))
            }
            WaitReason::SourceNotInInventory { host } => {
                write!(f, "source {host} is not in the inventory")
            }
            WaitReason::SourceAway { host } => {
                write!(f, "source {host} is away: its agent does not answer")
            }
            WaitReason::SourceUnknown { host } => {
                write!(f, "source {host} has not reported since this manager started")
            }
            WaitReason::TotalLimit { line } => write!(f, "moves in all: {line}"),
            WaitReason::SourceLimit { host, line } => write!(f, "moves out of {host}: {line}"),
            WaitReason::DatastoreLimit { datastore, line } => {
                write!(f, "moves on datastore {datastore}: {line}")
            }
            WaitReason::Turn { of, behind } => {
                write!(
                    f,
                    "waits for its turn: free capacity for {of} is reserved for job {behind}, \
                    which has waited longer"
                )
            }
            WaitReason::NoTarget => f.write_str("no target is named"),
            WaitReason::Target { obstacle } => obstacle.fmt(f),
            WaitReason::Targets { best, tally } => {
                write!(f, "no target is available ({tally}); best: {best}")
            }
        }
    }
}
