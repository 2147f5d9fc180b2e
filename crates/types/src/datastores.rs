//! Datastores: what an agent finds out about the directories with disks, and the choice among them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whether new disks can be written to a datastore, as seen from one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DatastoreHealth {
    /// It answers, and has room.
    Ok,
    /// Writes take long.
    Slow,
    /// Only the space reserved for the disks that are in it is left.
    Full,
    /// The agent may not write to it.
    ReadOnly,
    /// It does not answer.
    NoAnswer,
}

impl DatastoreHealth {
    /// Returns whether new disks can be written.
    #[must_use]
    pub fn takes_disks(self) -> bool {
        matches!(self, DatastoreHealth::Ok | DatastoreHealth::Slow)
    }
}

impl fmt::Display for DatastoreHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DatastoreHealth::Ok => "ok",
            DatastoreHealth::Slow => "slow",
            DatastoreHealth::Full => "full",
            DatastoreHealth::ReadOnly => "read-only",
            DatastoreHealth::NoAnswer => "no answer",
        })
    }
}

/// Latency and throughput of a datastore, measured by an agent with a small file of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DatastoreSpeed {
    /// Time until 4 KiB were on the disk, microseconds: the median of several writes.
    pub write_us: u64,
    /// Time of a read of 4 KiB that the page cache does not have, microseconds: the median.
    pub read_us: u64,
    /// Throughput of writes, up to the disk.
    pub write_bytes_per_s: u64,
    /// Throughput of reads.
    pub read_bytes_per_s: u64,
    /// Time of the measurement, milliseconds since 1970.
    pub measured_unix_ms: u64,
}
