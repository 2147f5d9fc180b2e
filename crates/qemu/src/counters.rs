//! Counters of a running QEMU: requests of the guest to its disks, and the size of its balloon.

use std::time::Duration;

use serde_json::Value;

use crate::drives::{disk_device_id, disk_name, disk_parts};
use crate::qmp::{Qmp, QmpError};
use crate::spec::{Part, ResolvedDisk, ResolvedSpec};

/// Most block nodes of a VM whose counters are queried. QEMU 7.2 describes each in about 1.2 KB,
/// and all of them are one line, which the monitor's connection must accept.
const MOST_NODES: usize = 512;
/// Most block devices of an answer that are read.
const MOST_DEVICES: usize = 256;

/// Requests of a guest to a disk since its QEMU has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Completed reads.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
    /// Sum of the times of all reads and writes, in nanoseconds.
    pub busy_ns: u64,
}

impl DiskCounters {
    /// Reads the counters of one device of `query-blockstats`; `None` if one is missing.
    fn of(device: &Value) -> Option<DiskCounters> {
        let stats = device.get("stats")?;
        let counter = |name: &str| stats.get(name)?.as_u64();
        let read_ns = counter("rd_total_time_ns")?;
        Some(DiskCounters {
            reads: counter("rd_operations")?,
            writes: counter("wr_operations")?,
            read_bytes: counter("rd_bytes")?,
            write_bytes: counter("wr_bytes")?,
            busy_ns: read_ns.saturating_add(counter("wr_total_time_ns")?),
        })
    }
}

impl Qmp {
    /// Returns the counters of each disk, in order; `None` for one that QEMU does not report.
    /// `disks`: those of the running machine's definition.
    ///
    /// # Errors
    /// Those of [`Qmp::execute_within`].
    pub async fn disk_counters(
        &self,
        disks: &[ResolvedDisk],
        limit: Duration,
    ) -> Result<Vec<Option<DiskCounters>>, QmpError> {
        let answer = self.execute_within("query-blockstats", Value::Null, limit).await?;
        Ok(of_disks(&answer, disks))
    }

    /// Returns the memory that the guest has without what the balloon has taken; `None` if QEMU
    /// does not report it.
    ///
    /// # Errors
    /// Those of [`Qmp::execute_within`].
    pub async fn balloon_leaves(&self, limit: Duration) -> Result<Option<u64>, QmpError> {
        match self.execute_within("query-balloon", Value::Null, limit).await {
            Ok(answer) => Ok(answer["actual"].as_u64()),
            // The guest's driver has not started, or there is no balloon.
            Err(QmpError::Command { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Whether the answer to a query of these disks' counters is short enough.
#[must_use]
pub fn may_query_counters(disks: &[ResolvedDisk]) -> bool {
    let nodes = |disk: &ResolvedDisk| {
        // An image and its file each. Below a node that limits the rate, QEMU reports all twice.
        let images = 1 + disk.backing.as_ref().map_or(0, Vec::len);
        let is_limited = disk.iops.is_some() || disk.bytes_per_second.is_some();
        1 + images * (if is_limited { 4 } else { 2 })
    };
    disks.iter().map(nodes).sum::<usize>() <= MOST_NODES
}

impl ResolvedSpec {
    /// Whether the machine has a memory balloon.
    #[must_use]
    pub fn has_balloon(&self) -> bool {
        let parts = self.topology.iter().flat_map(|topology| &topology.parts);
        let mut adopted = parts.filter_map(|part| match part {
            Part::Device(device) => device.get("driver"),
            _ => None,
        });
        self.free_page_reporting
            || self.extra_devices.iter().any(|device| device.contains("balloon"))
            || adopted.any(|driver| driver.contains("balloon"))
    }
}

/// Finds the counters of each disk in the answer to `query-blockstats`: by the node that the
/// device uses, or by the device, which stays when a job puts a node of its own on top.
pub(crate) fn of_disks(answer: &Value, disks: &[ResolvedDisk]) -> Vec<Option<DiskCounters>> {
    let devices = || answer.as_array().into_iter().flatten().take(MOST_DEVICES);
    let counters = |(index, disk): (usize, &ResolvedDisk)| {
        let name = disk_name(disks, index);
        let top = disk_parts(&name, disk, &[]).top;
        let device = devices()
            .find(|device| device["node-name"].as_str() == Some(top.as_str()))
            .or_else(|| {
                let id = disk_device_id(&name, disk);
                devices().find(|device| is_at(&device["qdev"], &id))
            })?;
        DiskCounters::of(device)
    };
    disks.iter().enumerate().map(counters).collect()
}

/// Whether QEMU's name of a device is this ID, or a path with it, such as
/// `/machine/peripheral/ID/virtio-backend` (7.2, virtio disks).
fn is_at(qdev: &Value, id: &str) -> bool {
    qdev.as_str().is_some_and(|qdev| qdev.split('/').any(|part| part == id))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;
    use crate::spec::{BackingFile, Disk, DiskBus, DiskFormat};

    fn disk(bus: DiskBus, unit: Option<u32>) -> ResolvedDisk {
        ResolvedDisk { bus, unit, ..Disk::new("/d", DiskFormat::Raw).into() }
    }

    /// One device as QEMU 7.2 reports it, without most of its fields.
    fn device(node: &str, qdev: &str, reads: u64) -> Value {
        json!({
            "device": "", "node-name": node, "qdev": qdev,
            "stats": {
                "rd_bytes": 4096 * reads, "rd_operations": reads, "rd_total_time_ns": 1000 * reads,
                "wr_bytes": 512, "wr_operations": 1, "wr_total_time_ns": 7000,
                "flush_operations": 0, "flush_total_time_ns": 0, "timed_stats": [],
            },
            "parent": { "node-name": "x-file", "stats": { "rd_operations": 99 } },
        })
    }

    #[test]
    fn counters_are_found_by_node_and_by_device() {
        let disks =
            [disk(DiskBus::Virtio, None), disk(DiskBus::Scsi, Some(3)), disk(DiskBus::Nvme, None)];
        let answer = json!([
            {"device": "", "qdev": "cd-sata2"},
            device("disk0", "/machine/peripheral/virtio-disk0/virtio-backend", 5),
            // A job has put a node of its own on top.
            device("copying", "drive-scsi3", 8),
        ]);
        let found = of_disks(&answer, &disks);
        let first = DiskCounters {
            reads: 5,
            writes: 1,
            read_bytes: 5 * 4096,
            write_bytes: 512,
            busy_ns: 12_000,
        };
        assert_eq!(found[0], Some(first));
        assert_eq!(found[1].map(|counters| counters.reads), Some(8));
        assert_eq!(found[2], None);
        let below_a_job = json!([device("mirror", "/machine/peripheral/virtio-disk0/x", 6)]);
        assert_eq!(of_disks(&below_a_job, &disks)[0].map(|counters| counters.reads), Some(6));
    }

    #[test]
    fn a_lying_answer_gives_no_counters() {
        let disks = [disk(DiskBus::Virtio, None)];
        let mut negative = device("disk0", "", 1);
        negative["stats"]["rd_operations"] = json!(-1);
        let mut text = device("disk0", "", 1);
        text["stats"] = json!("many");
        let mut most = device("disk0", "", 1);
        most["stats"]["rd_total_time_ns"] = json!(u64::MAX);
        for answer in [json!(null), json!({}), json!([1, [], "x"]), json!([negative, text])] {
            assert_eq!(of_disks(&answer, &disks), [None], "{answer}");
        }
        assert_eq!(of_disks(&json!([text]), &disks), [None]);
        assert_eq!(of_disks(&json!([most]), &disks)[0].unwrap().busy_ns, u64::MAX);
    }

    #[test]
    fn long_chains_of_many_disks_are_not_queried() {
        let file = BackingFile { path: PathBuf::from("/base"), format: DiskFormat::Qcow2 };
        let deep = ResolvedDisk { backing: Some(vec![file; 31]), ..disk(DiskBus::Virtio, None) };
        assert!(may_query_counters(&vec![disk(DiskBus::Virtio, None); 64]));
        assert!(may_query_counters(&vec![deep.clone(); 4]));
        assert!(!may_query_counters(&vec![deep; 16]));
    }
}
