//! History of the load of VMs, hosts, datastores and the cluster, and what uses most right now.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{HostLoad, StorageLoad, VmLoad};

/// Most points of a [`LoadHistory`].
pub const MOST_LOAD_POINTS: u64 = 1_500;

/// Resolution in which load is kept.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
pub enum LoadResolution {
    /// Five seconds, kept for an hour.
    #[serde(rename = "5s")]
    FiveSeconds,
    /// A minute, kept for a day.
    #[serde(rename = "1min")]
    Minute,
    /// An hour, kept for a year.
    #[serde(rename = "1h")]
    Hour,
}

impl LoadResolution {
    /// All resolutions, the finest first.
    pub const ALL: [LoadResolution; 3] =
        [LoadResolution::FiveSeconds, LoadResolution::Minute, LoadResolution::Hour];

    /// Returns the length of a period, in milliseconds.
    #[must_use]
    pub const fn period_ms(self) -> u64 {
        match self {
            LoadResolution::FiveSeconds => 5_000,
            LoadResolution::Minute => 60_000,
            LoadResolution::Hour => 3_600_000,
        }
    }

    /// Returns the number of periods that are kept.
    #[must_use]
    pub const fn kept_periods(self) -> u64 {
        match self {
            LoadResolution::FiveSeconds => 720,
            LoadResolution::Minute => 1_440,
            LoadResolution::Hour => 365 * 24,
        }
    }
}

/// Figure of a load. Its unit is in its name; a millicore is a thousandth of a logical processor.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum LoadMetric {
    /// CPU time used.
    CpuUsedMillicores,
    /// Time that threads of VMs waited for a processor.
    CpuReadyMillicores,
    /// Memory in use; of a VM, what its host holds of it.
    MemoryUsedBytes,
    /// Memory that balloons have taken from guests.
    MemoryBalloonedBytes,
    /// Memory that guests dirty a second; known while they migrate.
    DirtyBytesPerS,
    /// Reads of VMs from their disks.
    ReadsPerS,
    /// Writes of VMs to their disks.
    WritesPerS,
    /// Bytes that VMs read from their disks.
    ReadBytesPerS,
    /// Bytes that VMs wrote to their disks.
    WriteBytesPerS,
    /// Mean time of a read or write.
    LatencyUs,
    /// Bytes received from the network.
    RxBytesPerS,
    /// Bytes sent to the network.
    TxBytesPerS,
    /// Space of a datastore that is in use.
    SpaceUsedBytes,
}

/// One figure over time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoadSeries {
    /// Figure.
    pub metric: LoadMetric,
    /// Mean of each period; null: a gap, nothing was measured.
    pub mean: Vec<Option<u64>>,
    /// Highest value of each period; null: a gap.
    pub max: Vec<Option<u64>>,
}

/// Present upper limits of an object's figures, for the axes of charts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoadCapacity {
    /// Virtual CPUs of a VM or processors of hosts, in thousandths; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_millicores: Option<u64>,
    /// Memory; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Space of a datastore; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub space_bytes: Option<u64>,
}

/// Response of `GET /api/v1/load`: the load of an object in periods of equal length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "object": "vm:web", "resolution": "1min", "from_unix_ms": 1_795_444_920_000_u64,
    "step_ms": 60_000, "points": 3,
    "capacity": { "cpu_millicores": 2000, "memory_bytes": 4_294_967_296_u64 },
    "series": [
        { "metric": "cpu_used_millicores", "mean": [812, null, 640], "max": [1_990, null, 702] },
        { "metric": "latency_us", "mean": [310, null, 295], "max": [1_204, null, 350] }
    ]
}))]
pub struct LoadHistory {
    /// Object, as requested: `vm:NAME`, `host:NAME`, `datastore:ID` or `cluster`.
    pub object: String,
    /// Resolution of the data.
    pub resolution: LoadResolution,
    /// Begin of the first period, in milliseconds since 1970.
    pub from_unix_ms: u64,
    /// Length of a period: that of the resolution, or a multiple of it where there would be more
    /// than 1,500 points.
    pub step_ms: u64,
    /// Number of periods, and length of each list.
    pub points: u64,
    /// Present upper limits.
    pub capacity: LoadCapacity,
    /// Figures that were measured in any of the periods.
    pub series: Vec<LoadSeries>,
}

/// Order of a [`LoadTop`]: the largest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TopBy {
    /// By CPU time used.
    #[default]
    Cpu,
    /// By time waited for a processor.
    Ready,
    /// By memory used.
    Memory,
    /// By bytes read and written a second.
    Disk,
    /// By bytes received and sent a second.
    Network,
}

/// Latest load of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TopVm {
    /// Host that runs it.
    pub host: String,
    /// Load, each disk by itself.
    pub load: VmLoad,
    /// All its disks together; absent if its disks are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageLoad>,
}

/// Latest load of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TopHost {
    /// Name of the host.
    pub host: String,
    /// Load, each directory with disks by itself.
    pub load: HostLoad,
    /// All its directories together.
    pub storage: StorageLoad,
    /// Time that threads of its VMs waited for a processor, in thousandths of a second a second.
    pub cpu_ready_millicores: u64,
}

/// Response of `GET /api/v1/top`: the VMs and hosts that use most, by their latest samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "at_unix_ms": 1_795_444_970_237_u64, "by": "cpu", "vms_total": 1, "hosts_total": 1,
    "vms": [{
        "host": "a",
        "load": { "name": "web", "uuid": "0c9ed8ac-7b34-4b8c-8f0a-2d4d8a9a2b44",
            "cpu_used_millicores": 812, "cpu_ready_millicores": 4, "vcpus": 2,
            "memory_total_bytes": 4_294_967_296_u64, "memory_used_bytes": 2_147_483_648_u64,
            "rx_bytes_per_s": 120_000, "tx_bytes_per_s": 940_000 },
        "storage": { "reads_per_s": 12, "writes_per_s": 80, "read_bytes_per_s": 49_152,
            "write_bytes_per_s": 655_360, "latency_us": 310 }
    }],
    "hosts": [{
        "host": "a",
        "load": { "cores": 16, "cpu_used_millicores": 2_310,
            "memory_total_bytes": 68_719_476_736_u64, "memory_used_bytes": 9_663_676_416_u64,
            "rx_bytes_per_s": 150_000, "tx_bytes_per_s": 990_000, "directories": {} },
        "storage": { "reads_per_s": 12, "writes_per_s": 80, "read_bytes_per_s": 49_152,
            "write_bytes_per_s": 655_360, "latency_us": 310 },
        "cpu_ready_millicores": 4
    }]
}))]
pub struct LoadTop {
    /// Time of the answer, in milliseconds since 1970. Samples older than 30 s are left out.
    pub at_unix_ms: u64,
    /// Order.
    pub by: TopBy,
    /// Number of VMs with a sample.
    pub vms_total: u64,
    /// Number of hosts with a sample.
    pub hosts_total: u64,
    /// VMs, the largest first.
    pub vms: Vec<TopVm>,
    /// Hosts, the largest first.
    pub hosts: Vec<TopHost>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_json_are_those_of_the_documentation() {
        let names: Vec<String> = LoadResolution::ALL.iter().map(crate::json_name).collect();
        assert_eq!(names, ["5s", "1min", "1h"]);
        assert_eq!(crate::json_name(&LoadMetric::DirtyBytesPerS), "dirty_bytes_per_s");
        assert_eq!(crate::json_name(&TopBy::Network), "network");
    }
}
