//! Exports of a running QEMU's images over NBD, and bitmaps of what the guest writes to them.
//!
//! The server listens on a socket that the caller made. It is never stopped: QEMU 7.2 hangs in
//! `nbd-server-stop` while a client is in its handshake, and a server without exports gives nothing
//! to anyone and costs a descriptor. It ends with its QEMU.
//!
//! **A connection to a disk with a thread of its own must not end before its export does.** QEMU
//! 7.2 handles the end in that thread, where an assertion ends QEMU and its guest (since 7.2.14,
//! `nbd_blockdev_client_closed`; 9.0 does it in the main thread). The removal of an export ends its
//! connections as well, in the main thread. So a client passes a duplicate of its end to QEMU
//! ([`Qmp::getfd`]) before the handshake: the connection then outlives the client. It closes the
//! duplicate ([`Qmp::closefd`]) after [`Qmp::remove_export`].
//!
//! A bitmap is not saved in the image: it exists as long as its QEMU, also when the agent ends.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;

use crate::drives;
use crate::hotplug::PlugError;
use crate::qmp::{Qmp, QmpError, QmpEvent};
use crate::spec::{DiskBus, ResolvedDisk};

/// Bytes of a disk for each bit of a bitmap: QEMU's default for images with clusters of that size.
const GRANULARITY_BYTES: u32 = 64 << 10;
/// Name under which the listening socket is passed.
const LISTENER: &str = "nbd-listener";
/// Event: an export is gone, and its connections with it.
const EXPORT_DELETED: &str = "BLOCK_EXPORT_DELETED";
/// Longest time until an export is gone: its requests wait for disks.
const REMOVAL_LIMIT: Duration = Duration::from_secs(30);
/// Interval at which an export that is being removed is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// First version of QEMU in which exports of disks with threads are sound.
const FIRST_SOUND_MAJOR: u64 = 9;
/// Largest limit that QEMU accepts (7.2 `THROTTLE_VALUE_MAX`).
const MOST_BYTES_PER_S: u64 = 1_000_000_000_000_000;

/// A disk of a VM whose image is exported and tracked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrackedDisk {
    /// Node of the image in the running QEMU.
    pub node: String,
    /// ID of the export.
    pub export: String,
}

impl Qmp {
    /// Starts QEMU's NBD server on a listening unix socket, for at most so many connections;
    /// returns whether it uses this socket. It does not if the server runs already: it then listens
    /// where it did.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn start_nbd(
        &self,
        listener: BorrowedFd<'_>,
        most_connections: u32,
    ) -> Result<bool, QmpError> {
        self.getfd(LISTENER, listener).await?;
        let server = json!({"addr": {"type": "fd", "data": {"str": LISTENER}},
            "max-connections": most_connections});
        let Err(error) = self.execute("nbd-server-start", server).await else { return Ok(true) };
        // It may have been taken, depending on where QEMU failed.
        let _ = self.closefd(LISTENER).await;
        match &error {
            QmpError::Command { desc, .. } if desc.contains("already running") => Ok(false),
            _ => Err(error),
        }
    }

    /// Returns the node with the image of the disk at `index` of the running machine's definition,
    /// and the size of the disk.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if QEMU has other disks.
    pub async fn image_node(
        &self,
        disks: &[ResolvedDisk],
        index: usize,
    ) -> Result<(String, u64), PlugError> {
        let disk = disks.get(index).ok_or(PlugError::OtherDisks)?;
        let blocks = self.execute("query-block", Value::Null).await?;
        let found = drives::find_disk(&blocks, disks, index).ok_or(PlugError::OtherDisks)?;
        let node = drives::image_name(&drives::disk_name(disks, index), disk);
        // With limits, the image is below what the device uses.
        if found.top != node {
            let nodes = self.execute("query-named-block-nodes", json!({"flat": true})).await?;
            node_of(&nodes, &node).ok_or(PlugError::OtherDisks)?;
        }
        Ok((node, found.bytes))
    }

    /// Returns whether an export of a disk puts its guest at risk: before 9.0, QEMU aborts when a
    /// client disconnects and a thread of its own serves the disk (docs/engines.md). A SCSI
    /// controller may have a thread although no disk of the definition asks for one any more.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn export_is_unsound(&self, disk: &ResolvedDisk) -> Result<bool, QmpError> {
        let version = self.execute("query-version", Value::Null).await?;
        if version["qemu"]["major"].as_u64().is_some_and(|major| major >= FIRST_SOUND_MAJOR) {
            return Ok(false);
        }
        match disk.bus {
            DiskBus::Virtio => Ok(disk.iothread),
            DiskBus::Scsi => {
                let threads = self.execute("query-iothreads", Value::Null).await?;
                Ok(threads.as_array().is_none_or(|threads| !threads.is_empty()))
            }
            DiskBus::Sata | DiskBus::Nvme => Ok(false),
        }
    }

    /// Begins to note what is written to a node, in a new bitmap.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if there is a bitmap of that name.
    pub async fn add_bitmap(&self, node: &str, bitmap: &str) -> Result<(), QmpError> {
        self.execute("block-dirty-bitmap-add", new_bitmap(node, bitmap)).await.map(drop)
    }

    /// Returns the names of the bitmaps of a node; none if there is no such node.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn bitmaps(&self, node: &str) -> Result<Vec<String>, QmpError> {
        let nodes = self.execute("query-named-block-nodes", json!({"flat": true})).await?;
        let bitmaps = node_of(&nodes, node).and_then(|node| node["dirty-bitmaps"].as_array());
        let names = bitmaps.into_iter().flatten().filter_map(|bitmap| bitmap["name"].as_str());
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns node and name of each bitmap in which nothing is noted.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn empty_bitmaps(&self) -> Result<HashSet<(String, String)>, QmpError> {
        let nodes = self.execute("query-named-block-nodes", json!({"flat": true})).await?;
        Ok(empty_of(&nodes))
    }

    /// Lets another bitmap of each node note what is written, and ends that of the present ones,
    /// all at once. `swaps`: node, present and next bitmap. A write in between is in both, never
    /// in none.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; nothing has changed if QEMU refuses.
    pub async fn swap_bitmaps(&self, swaps: &[(String, String, String)]) -> Result<(), QmpError> {
        let action = |kind: &str, data: Value| json!({"type": kind, "data": data});
        // In this order: a disk with a thread of its own writes between two actions.
        let begun = swaps
            .iter()
            .map(|(node, _, next)| action("block-dirty-bitmap-add", new_bitmap(node, next)));
        let ended = swaps.iter().map(|(node, present, _)| {
            action("block-dirty-bitmap-disable", json!({"node": node, "name": present}))
        });
        let actions: Vec<Value> = begun.chain(ended).collect();
        self.execute("transaction", json!({ "actions": actions })).await.map(drop)
    }

    /// Removes a bitmap, which no export may use. One that does not exist is removed.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn remove_bitmap(&self, node: &str, bitmap: &str) -> Result<(), QmpError> {
        let bitmap_of = json!({"node": node, "name": bitmap});
        let Err(error) = self.execute("block-dirty-bitmap-remove", bitmap_of).await else {
            return Ok(());
        };
        let is_refused = matches!(error, QmpError::Command { .. });
        if is_refused && !self.bitmaps(node).await?.iter().any(|name| name == bitmap) {
            return Ok(());
        }
        Err(error)
    }

    /// Exports a node under the name `id`. Clients may ask what it has (`base:allocation`), which
    /// layer has it (`qemu:allocation-depth`, 1 for the image itself) and what the bitmaps have
    /// noted (`qemu:dirty-bitmap:NAME`). An export that is not `writable` takes only bitmaps that
    /// were ended by [`Qmp::swap_bitmaps`].
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn add_export(
        &self,
        id: &str,
        node: &str,
        bitmaps: &[&str],
        writable: bool,
    ) -> Result<(), QmpError> {
        let export = json!({"type": "nbd", "id": id, "name": id, "node-name": node,
            "writable": writable, "bitmaps": bitmaps, "allocation-depth": true});
        self.execute("block-export-add", export).await.map(drop)
    }

    /// Removes an export, ends its connections, and waits until it is gone. One that does not exist
    /// is removed.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if it is not gone within 30 s.
    pub async fn remove_export(&self, id: &str) -> Result<(), QmpError> {
        let mut events = self.events();
        let removal = json!({"id": id, "mode": "hard"});
        if let Err(error) = self.execute("block-export-del", removal).await {
            let is_refused = matches!(error, QmpError::Command { .. });
            // A removal that was requested before may still go on.
            if !is_refused {
                return Err(error);
            }
            tracing::debug!(id, %error, "the removal of an export is not requested");
            if !self.has_export(id).await? {
                return Ok(());
            }
        }
        let gone = async {
            loop {
                if is_deleted(&mut events, id).await || !self.has_export(id).await? {
                    return Ok::<(), QmpError>(());
                }
            }
        };
        let late =
            || QmpError::Timeout { command: "block-export-del".to_owned(), limit: REMOVAL_LIMIT };
        timeout(REMOVAL_LIMIT, gone).await.map_err(|_| late())?
    }

    async fn has_export(&self, id: &str) -> Result<bool, QmpError> {
        let exports = self.execute("query-block-exports", Value::Null).await?;
        Ok(exports.as_array().into_iter().flatten().any(|export| export["id"] == id))
    }

    /// Limits what the guest writes to the disk at `index` of the running machine's definition,
    /// beside the disk's own limits, which stay. `None` ends that.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if QEMU has other disks.
    pub async fn limit_writes(
        &self,
        disks: &[ResolvedDisk],
        index: usize,
        bytes_per_s: Option<u64>,
    ) -> Result<(), PlugError> {
        let blocks = self.execute("query-block", Value::Null).await?;
        let found = drives::find_disk(&blocks, disks, index).ok_or(PlugError::OtherDisks)?;
        let device = device_of(&blocks, &found.top).ok_or(PlugError::OtherDisks)?;
        let most = bytes_per_s.map_or(0, |bytes| bytes.clamp(1, MOST_BYTES_PER_S));
        // Of the device, above the node with the limits of the definition.
        let limits = json!({"id": device, "bps": 0, "bps_rd": 0, "bps_wr": most, "iops": 0,
            "iops_rd": 0, "iops_wr": 0});
        self.execute("block_set_io_throttle", limits).await?;
        Ok(())
    }
}

fn new_bitmap(node: &str, bitmap: &str) -> Value {
    json!({"node": node, "name": bitmap, "granularity": GRANULARITY_BYTES, "persistent": false})
}

/// Returns a node. `nodes`: what `query-named-block-nodes` returns.
fn node_of<'a>(nodes: &'a Value, name: &str) -> Option<&'a Value> {
    nodes.as_array()?.iter().find(|node| node["node-name"] == name)
}

/// Returns node and name of each empty bitmap. `nodes`: what `query-named-block-nodes` returns.
fn empty_of(nodes: &Value) -> HashSet<(String, String)> {
    let nodes = nodes.as_array().into_iter().flatten();
    let all = nodes.flat_map(|node| {
        let bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
        bitmaps.map(|bitmap| (&node["node-name"], bitmap))
    });
    let empty = all.filter(|(_, bitmap)| bitmap["count"] == 0);
    empty
        .filter_map(|(node, bitmap)| {
            Some((node.as_str()?.to_owned(), bitmap["name"].as_str()?.to_owned()))
        })
        .collect()
}

/// Returns the device that uses a node. `blocks`: what `query-block` returns.
fn device_of(blocks: &Value, top: &str) -> Option<String> {
    let mut blocks = blocks.as_array()?.iter();
    let block = blocks.find(|block| block["inserted"]["node-name"] == top)?;
    block["qdev"].as_str().map(str::to_owned)
}

/// Waits until an event says that an export is gone, or until it should be looked for.
async fn is_deleted(events: &mut Receiver<QmpEvent>, id: &str) -> bool {
    let deleted = async {
        loop {
            match events.recv().await {
                Ok(event) if event.name == EXPORT_DELETED && event.data["id"] == id => return true,
                Ok(_) => {}
                // With a closed connection, the next query fails.
                Err(RecvError::Lagged(_) | RecvError::Closed) => return false,
            }
        }
    };
    timeout(LOOK_INTERVAL, deleted).await.unwrap_or(false)
}

#[cfg(test)]
mod tests;
