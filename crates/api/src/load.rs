//! Load of a host and of its VMs over one interval, as the host's agent measures it.
//!
//! Rates are means over the interval. A figure that could not be measured is absent, not zero.

use std::collections::BTreeMap;

use godwit_qemu::Uuid;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Interval between two samples of an agent, in milliseconds.
pub const LOAD_INTERVAL_MS: u64 = 5_000;
/// Most VMs of a sample. An agent leaves out further ones.
pub const MOST_SAMPLED_VMS: usize = 2_048;
/// Most disks of a VM in a sample. An agent leaves out further ones.
pub const MOST_SAMPLED_DISKS: usize = 64;
/// Most directories of a host in a sample. An agent leaves out further ones.
pub const MOST_SAMPLED_DIRECTORIES: usize = 256;
/// Longest path of an image or a directory in a sample, in bytes. An agent leaves out longer ones.
pub const MOST_SAMPLED_PATH_BYTES: usize = 1_024;

/// Response of `GET /v1/load`, and the `load` event of `GET /v1/watch`: the load over the interval
/// that ended at `at_unix_ms`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoadSample {
    /// End of the interval by the host's clock, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// Length of the interval, in milliseconds. It is longer than planned on a busy host.
    pub interval_ms: u64,
    /// Load of the host.
    pub host: HostLoad,
    /// VMs with a process on this host for the whole interval, by name. Shadow VMs are left out.
    pub vms: Vec<VmLoad>,
}

/// Load of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostLoad {
    /// Online logical processors.
    pub cores: u32,
    /// CPU time used by everything on the host, in thousandths of a logical processor.
    pub cpu_used_millicores: u64,
    /// Memory of the host.
    pub memory_total_bytes: u64,
    /// Memory that is not available to new work.
    pub memory_used_bytes: u64,
    /// Bytes a second that the host's network interfaces received.
    pub rx_bytes_per_s: u64,
    /// Bytes a second that the host's network interfaces sent.
    pub tx_bytes_per_s: u64,
    /// Requests of the VMs to the images in each directory with disks: a key of the host's
    /// `datastores`. VMs whose QEMU did not answer are not counted.
    pub directories: BTreeMap<String, StorageLoad>,
}

/// Load of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmLoad {
    /// Name of the VM.
    pub name: String,
    /// UUID of the guest, which stays when the VM moves or gets another name.
    #[schema(value_type = String)]
    pub uuid: Uuid,
    /// CPU time used by the VM's QEMU, in thousandths of a logical processor.
    pub cpu_used_millicores: u64,
    /// Time that the threads of its QEMU were ready to run and waited for a processor, in
    /// thousandths of a second a second; absent if the kernel does not report it. It may exceed
    /// 1,000: threads wait at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ready_millicores: Option<u64>,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// Memory of the VM.
    pub memory_total_bytes: u64,
    /// Memory of the VM that the host holds: what the guest has touched and not given back.
    pub memory_used_bytes: u64,
    /// Memory that the guest's balloon has taken from the guest; absent without a balloon or if
    /// QEMU did not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_ballooned_bytes: Option<u64>,
    /// Memory that the guest dirties a second; known while a migration of it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_bytes_per_s: Option<u64>,
    /// Bytes a second that the guest received.
    pub rx_bytes_per_s: u64,
    /// Bytes a second that the guest sent.
    pub tx_bytes_per_s: u64,
    /// Requests of the guest to its disks; absent if its QEMU did not answer, or was not asked
    /// because the VM is migrating.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<Vec<DiskLoad>>,
}

/// Requests of a guest to one of its disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskLoad {
    /// Path of the image, as in the specification.
    pub path: String,
    /// Its requests.
    #[serde(flatten)]
    pub load: StorageLoad,
}

/// Requests to disks that were completed in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StorageLoad {
    /// Reads a second.
    pub reads_per_s: u64,
    /// Writes a second.
    pub writes_per_s: u64,
    /// Bytes read a second.
    pub read_bytes_per_s: u64,
    /// Bytes written a second.
    pub write_bytes_per_s: u64,
    /// Mean time of a read or write, in microseconds; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostEvent, StreamEvent};

    #[test]
    fn a_sample_travels_as_an_event_and_lies_are_refused() {
        let load = StorageLoad { reads_per_s: 3, latency_us: Some(900), ..StorageLoad::default() };
        let disks = Some(vec![DiskLoad { path: "/srv/a.raw".to_owned(), load }]);
        let vm = VmLoad { name: "web".to_owned(), disks, ..VmLoad::default() };
        let silent = VmLoad { cpu_ready_millicores: Some(4), ..VmLoad::default() };
        let sample = LoadSample { at_unix_ms: 7, vms: vec![vm, silent], ..LoadSample::default() };
        let text = serde_json::to_string(&sample).unwrap();
        let read = HostEvent::read("load", &text).unwrap();
        assert_eq!(read, Some(HostEvent::Load(Box::new(sample))));
        let later = text.replace("\"interval_ms\"", "\"later\":[{}],\"interval_ms\"");
        assert_eq!(HostEvent::read("load", &later).unwrap(), read);
        for (from, to) in [("\"at_unix_ms\":7", "\"at_unix_ms\":-7"), ("\"vms\":[", "\"vms\":[1,")]
        {
            assert!(HostEvent::read("load", &text.replace(from, to)).is_err(), "{to}");
        }
    }
}
