//! Moves of a running VM's disk to another image of its host: QEMU copies it while the guest runs,
//! then exchanges the image below the device.
//!
//! The copy is a mirror that writes to both images whatever the guest writes. At its end QEMU holds
//! the guest's requests, with both images the same and the new one flushed ([`DiskMove::hold`]).
//! The caller records the new image then, and only after that QEMU uses it ([`DiskMove::finish`]).
//! So the recorded image is the right one whenever the host loses power.
//!
//! The job stays in QEMU until it is dismissed: its end is read, not caught as an event, and an
//! agent that starts finds it ([`Qmp::settle_disk_move`]).

use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;

use super::{PlugError, is_refusal};
use crate::drives::{self, PassedLayer};
use crate::launch::OpenLayer;
use crate::qmp::{Qmp, QmpError, QmpEvent};
use crate::rbd::RbdImage;
use crate::spec::ResolvedDisk;

/// Longest time until the images are the same and the guest's requests are held, and until a job
/// that ends has ended. Both wait for disks.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Interval at which the progress is asked for.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// What is copied, and how fast.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskCopy {
    /// Whether the new image gets all of the disk, also what backing files have.
    pub whole: bool,
    /// Most bytes a second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
}

/// A disk of a running QEMU that moves to a new image.
#[derive(Debug)]
pub struct DiskMove {
    qmp: Qmp,
    /// Name of the disk.
    name: String,
    old: ResolvedDisk,
    new: ResolvedDisk,
}

/// The job in QEMU (`query-jobs`).
#[derive(Clone, Debug, PartialEq, Eq)]
struct FoundJob {
    status: String,
    done: u64,
    /// All that is to be done, by what is known now.
    total: u64,
    error: Option<String>,
}

impl FoundJob {
    fn find(jobs: &Value, id: &str) -> Option<FoundJob> {
        let job = jobs.as_array()?.iter().find(|job| job["id"] == id)?;
        Some(FoundJob {
            status: job["status"].as_str()?.to_owned(),
            done: job["current-progress"].as_u64().unwrap_or(0),
            total: job["total-progress"].as_u64().unwrap_or(0),
            error: job["error"].as_str().map(str::to_owned),
        })
    }

    /// Whether it has ended, and waits to be dismissed.
    fn is_over(&self) -> bool {
        self.status == "concluded"
    }

    /// Returns why it has ended without a result.
    fn failure(&self) -> PlugError {
        PlugError::Copy(self.error.clone().unwrap_or_else(|| "it was cancelled".to_owned()))
    }
}

impl Qmp {
    /// Returns the size of the disk at `index` of the running machine's definition.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if QEMU has other disks.
    pub async fn disk_bytes(&self, disks: &[ResolvedDisk], index: usize) -> Result<u64, PlugError> {
        let blocks = self.execute("query-block", Value::Null).await?;
        let found = drives::find_disk(&blocks, disks, index);
        found.map(|found| found.bytes).ok_or(PlugError::OtherDisks)
    }

    /// Begins to move the disk at `index` of the running machine's definition to a new image of the
    /// same size. `new`: the disk with that image. `layers`: the open image and its backing files.
    ///
    /// # Errors
    /// QEMU refuses; nothing of the new image remains in it. Or it does not respond.
    pub async fn begin_disk_move(
        &self,
        (disks, index): (&[ResolvedDisk], usize),
        (new, layers): (&ResolvedDisk, &[OpenLayer]),
        copy: DiskCopy,
    ) -> Result<DiskMove, PlugError> {
        let blocks = self.execute("query-block", Value::Null).await?;
        let found = drives::find_disk(&blocks, disks, index).ok_or(PlugError::OtherDisks)?;
        let old = disks.get(index).ok_or(PlugError::OtherDisks)?.clone();
        let name = drives::disk_name(disks, index);
        let moving = DiskMove { qmp: self.clone(), name, old, new: new.clone() };
        match moving.start(&found.top, layers, copy).await {
            Ok(()) => Ok(moving),
            Err(error) => {
                if is_refusal(&error) {
                    moving.remove_image(&moving.new, layers.len()).await;
                }
                Err(error.into())
            }
        }
    }

    /// Ends a move that an agent which has ended left unfinished. `committed`: the new image was
    /// recorded. Returns whether the machine uses it; the other one is no longer open.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if QEMU has neither image.
    pub async fn settle_disk_move(
        &self,
        (disks, index): (&[ResolvedDisk], usize),
        (old, new): (&ResolvedDisk, &ResolvedDisk),
        committed: bool,
    ) -> Result<bool, PlugError> {
        let name = drives::disk_name(disks, index);
        let moving = DiskMove { qmp: self.clone(), name, old: old.clone(), new: new.clone() };
        if let Some(job) = moving.job().await? {
            let end =
                if committed && job.status == "pending" { "job-finalize" } else { "job-cancel" };
            match moving.end(end).await {
                // It failed: the machine uses the old image.
                Ok(()) | Err(PlugError::Copy(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let uses_new = moving.uses_new().await?;
        let unused = if uses_new { &moving.old } else { &moving.new };
        moving.remove_image(unused, layers_of(unused)).await;
        Ok(uses_new)
    }
}

impl DiskMove {
    async fn start(&self, top: &str, layers: &[OpenLayer], copy: DiskCopy) -> Result<(), QmpError> {
        let image = drives::image_name(&self.name, &self.new);
        let passed = self.qmp.add_layers(&image, layers).await?;
        for node in drives::image_nodes(&self.name, &self.new, &passed) {
            self.qmp.execute("blockdev-add", node).await?;
        }
        // With `top`, QEMU looks only at what the image has itself. An image without a backing file
        // has everything itself, and the new one is empty: it needs no zeros.
        let has_base = self.old.backing.as_ref().is_some_and(|backing| !backing.is_empty());
        let sync = if copy.whole && has_base { "full" } else { "top" };
        let mut job = json!({
            "job-id": self.job_id(), "device": top, "target": image, "sync": sync,
            "copy-mode": "write-blocking", "filter-node-name": format!("{}-mirror", self.name),
            "on-source-error": "report", "on-target-error": "report",
            "auto-finalize": false, "auto-dismiss": false,
        });
        let old = drives::image_name(&self.name, &self.old);
        if old != top {
            // The limits stay above the image.
            job["replaces"] = old.into();
        }
        if let Some(bytes) = copy.bytes_per_second {
            job["speed"] = i64::try_from(bytes).unwrap_or(i64::MAX).into();
        }
        self.qmp.execute("blockdev-mirror", job).await.map(drop)
    }

    fn job_id(&self) -> String {
        format!("move-{}", self.name)
    }

    async fn job(&self) -> Result<Option<FoundJob>, QmpError> {
        let jobs = self.qmp.execute("query-jobs", Value::Null).await?;
        Ok(FoundJob::find(&jobs, &self.job_id()))
    }

    /// Waits until the new image has all of the disk. `progress` gets the bytes that are copied,
    /// and of how many.
    ///
    /// # Errors
    /// QEMU cannot read or write an image, or does not respond.
    pub async fn until_ready(
        &self,
        progress: &(dyn Fn(u64, u64) + Send + Sync),
    ) -> Result<(), PlugError> {
        self.until("ready", progress).await
    }

    /// Lets QEMU hold the guest's requests when both images are the same. They wait until
    /// [`DiskMove::finish`] or [`DiskMove::cancel`].
    ///
    /// # Errors
    /// As [`DiskMove::until_ready`]; also if that takes too long.
    pub async fn hold(&self) -> Result<(), PlugError> {
        self.qmp.execute("job-complete", json!({"id": self.job_id()})).await?;
        let late = || QmpError::Timeout { command: "job-complete".to_owned(), limit: END_LIMIT };
        timeout(END_LIMIT, self.until("pending", &|_, _| {})).await.map_err(|_| late())?
    }

    /// Exchanges the images: the guest's requests go to the new one.
    ///
    /// # Errors
    /// QEMU refuses, and uses the old one; or it does not respond, and may use either.
    pub async fn finish(self) -> Result<(), PlugError> {
        let ended = self.end("job-finalize").await;
        let unused = match ended {
            Ok(()) => &self.old,
            Err(PlugError::Copy(_)) => &self.new,
            Err(_) => return ended,
        };
        self.remove_image(unused, layers_of(unused)).await;
        ended
    }

    /// Ends the copy: the guest's requests go to the old image, as they did. Returns whether it has
    /// ended; if not, QEMU does not respond.
    pub async fn cancel(self) -> bool {
        match self.end("job-cancel").await {
            Ok(()) | Err(PlugError::Copy(_)) => {
                self.remove_image(&self.new, layers_of(&self.new)).await;
                true
            }
            Err(error) => {
                tracing::warn!(disk = self.name, %error, "the copy of a disk has no known end");
                false
            }
        }
    }

    /// Ends the job by a command, and dismisses it.
    ///
    /// # Errors
    /// [`PlugError::Copy`] if it has ended without a result; otherwise QEMU does not respond.
    async fn end(&self, command: &str) -> Result<(), PlugError> {
        let id = json!({"id": self.job_id()});
        match self.qmp.execute(command, id.clone()).await {
            // It is over already, which is seen below.
            Err(error) if is_refusal(&error) => {
                tracing::debug!(disk = self.name, %error, "the job's end is not requested");
            }
            asked => drop(asked?),
        }
        let late = || QmpError::Timeout { command: command.to_owned(), limit: END_LIMIT };
        let ended = timeout(END_LIMIT, self.until("concluded", &|_, _| {})).await;
        let ended = ended.map_err(|_| late())?;
        if !matches!(ended, Ok(()) | Err(PlugError::Copy(_))) {
            return ended;
        }
        self.qmp.execute("job-dismiss", id).await?;
        ended
    }

    /// Waits for a state of the job.
    async fn until(
        &self,
        wanted: &str,
        progress: &(dyn Fn(u64, u64) + Send + Sync),
    ) -> Result<(), PlugError> {
        let mut events = self.qmp.events();
        loop {
            let found = self.job().await?;
            let job = found.ok_or_else(|| PlugError::Copy("QEMU has no such job".to_owned()))?;
            progress(job.done, job.total);
            if job.is_over() && (wanted != "concluded" || job.error.is_some()) {
                return Err(job.failure());
            }
            if job.status == wanted {
                return Ok(());
            }
            self.changed(&mut events).await;
        }
    }

    /// Waits until the job's state may have changed.
    async fn changed(&self, events: &mut Receiver<QmpEvent>) {
        let id = self.job_id();
        let ours = async {
            loop {
                match events.recv().await {
                    Ok(event) if event.name == "JOB_STATUS_CHANGE" && event.data["id"] == *id => {
                        return;
                    }
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    // The next query fails.
                    Err(RecvError::Closed) => return,
                }
            }
        };
        let _ = timeout(PROGRESS_INTERVAL, ours).await;
    }

    /// Asks QEMU which of the two images the disk has.
    async fn uses_new(&self) -> Result<bool, PlugError> {
        let blocks = self.qmp.execute("query-block", Value::Null).await?;
        let nodes = self.qmp.execute("query-named-block-nodes", json!({"flat": true})).await?;
        let found = |disk: &ResolvedDisk| is_used(&blocks, &nodes, &self.name, disk);
        match (found(&self.old), found(&self.new)) {
            (_, true) => Ok(true),
            (true, false) => Ok(false),
            (false, false) => Err(PlugError::OtherDisks),
        }
    }

    /// Removes the nodes and the descriptors of an image that the disk does not use.
    async fn remove_image(&self, disk: &ResolvedDisk, layers: usize) {
        // The format of a backing file does not matter for its names.
        let passed = vec![PassedLayer::file(0, disk.format); layers.max(1)];
        let nodes = drives::image_nodes(&self.name, disk, &passed);
        let all = self.qmp.execute("query-named-block-nodes", json!({"flat": true})).await;
        let all = all.unwrap_or_default();
        let sets: Vec<i64> = nodes.iter().filter_map(|node| set_of(&all, node)).collect();
        for node in nodes.iter().rev() {
            let name = json!({"node-name": node["node-name"]});
            if let Err(error) = self.qmp.execute("blockdev-del", name).await {
                tracing::debug!(disk = self.name, %error, "not removed from QEMU");
            }
        }
        for set in sets {
            if let Err(error) = self.qmp.execute("remove-fd", json!({"fdset-id": set})).await {
                tracing::debug!(disk = self.name, %error, "not removed from QEMU");
            }
        }
        // Those whose nodes were not added.
        self.qmp.remove_sets(&drives::image_name(&self.name, disk)).await;
    }
}

/// Returns the number of images that a disk has, its own and its backing files.
fn layers_of(disk: &ResolvedDisk) -> usize {
    disk.backing.as_ref().map_or(1, |backing| backing.len() + 1)
}

/// Whether a device uses this image. `blocks` and `nodes`: what `query-block` and
/// `query-named-block-nodes` return. Limits stay above the image when it is exchanged, so a limited
/// disk is known by its file.
fn is_used(blocks: &Value, nodes: &Value, name: &str, disk: &ResolvedDisk) -> bool {
    let image = drives::image_name(name, disk);
    let top = drives::disk_parts(name, disk, &[]).top;
    let blocks = blocks.as_array().map(Vec::as_slice).unwrap_or_default();
    let inserted = blocks.iter().map(|block| &block["inserted"]);
    let mut inserted = inserted.filter(|inserted| inserted["node-name"] == *top);
    let Some(inserted) = inserted.next() else { return false };
    if top == image {
        return true;
    }
    let used = inserted["file"].as_str();
    if let Some(image) = RbdImage::of(&disk.path) {
        return used.is_some_and(|used| image.is_file(used));
    }
    let file = file_of(nodes, &format!("{image}-file"));
    file.is_some() && used == file
}

/// Returns the file of a block node, as QEMU has it.
fn file_of<'a>(nodes: &'a Value, name: &str) -> Option<&'a str> {
    nodes.as_array()?.iter().find(|node| node["node-name"] == name)?["file"].as_str()
}

/// Returns the descriptor set of a node; `None` if it is no file, or not there.
fn set_of(nodes: &Value, node: &Value) -> Option<i64> {
    if node["driver"] != "file" {
        return None;
    }
    file_of(nodes, node["node-name"].as_str()?)?.strip_prefix("/dev/fdset/")?.parse().ok()
}

#[cfg(test)]
mod tests;
