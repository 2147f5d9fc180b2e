//! Mirrors of a running VM's disks to an NBD server of the caller: QEMU sends it what a disk has,
//! and from then on also whatever the guest writes.
//!
//! A mirror has one name, that of its job, its target's node and its descriptors. An agent that
//! started later ends it by that name. The filter that QEMU puts above the disk has no name, so
//! that `query-block` shows the disk as before.
//!
//! A write that the server refuses pauses the job, not the guest: QEMU notes what is missing, and
//! sends it when the job goes on. The job stays in QEMU until it is dismissed.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;

use crate::drives;
use crate::hotplug::{PlugError, is_refusal};
use crate::qmp::{Qmp, QmpError, QmpEvent};
use crate::spec::ResolvedDisk;

/// Longest time until a job that ends has ended.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Longest time until a mirror of a stopped guest is in step, and then until it has ended. If a
/// refused write pauses it once more, the guest waits so long.
const IN_STEP_LIMIT: Duration = Duration::from_secs(2);
/// Interval at which a job that ends is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// A mirror that begins.
#[derive(Clone, Copy, Debug)]
pub struct Mirror<'a> {
    /// Name of the mirror: at most 31 bytes.
    pub name: &'a str,
    /// Name of the server's export.
    pub export: &'a str,
    /// The server's socket, opened as a path: QEMU connects to it.
    pub socket: BorrowedFd<'a>,
    /// Whether what backing files have is sent, too.
    pub whole: bool,
}

/// What a mirror is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MirrorState {
    /// It sends what is missing: so many bytes.
    Copying { left_bytes: u64 },
    /// The server has all, and gets each write of the guest before that ends.
    InStep { left_bytes: u64 },
    /// The server has refused a write.
    Paused { left_bytes: u64 },
    /// It has ended, with the reason if that is an error.
    Ended { error: Option<String> },
    /// There is no such mirror.
    Missing,
}

impl MirrorState {
    /// Finds the state of a mirror. `jobs`: what `query-jobs` returns.
    fn of(jobs: &Value, name: &str) -> MirrorState {
        let mut jobs = jobs.as_array().into_iter().flatten();
        let Some(job) = jobs.find(|job| job["id"] == name) else { return MirrorState::Missing };
        let bytes = |key: &str| job[key].as_u64().unwrap_or(0);
        let left_bytes = bytes("total-progress").saturating_sub(bytes("current-progress"));
        match job["status"].as_str().unwrap_or_default() {
            "ready" => MirrorState::InStep { left_bytes },
            "paused" | "standby" => MirrorState::Paused { left_bytes },
            "aborting" | "concluded" | "null" => {
                MirrorState::Ended { error: job["error"].as_str().map(str::to_owned) }
            }
            _ => MirrorState::Copying { left_bytes },
        }
    }
}

impl Qmp {
    /// Begins to mirror the disk at `index` of the running machine's definition. The server must
    /// accept the connection meanwhile: QEMU waits for it.
    ///
    /// # Errors
    /// QEMU refuses or does not respond. What it has by then is removed by
    /// [`Qmp::remove_mirror`].
    pub async fn begin_mirror(
        &self,
        (disks, index): (&[ResolvedDisk], usize),
        mirror: Mirror<'_>,
    ) -> Result<(), PlugError> {
        let blocks = self.execute("query-block", Value::Null).await?;
        let found = drives::find_disk(&blocks, disks, index).ok_or(PlugError::OtherDisks)?;
        let disk = disks.get(index).ok_or(PlugError::OtherDisks)?;
        let number = self.add_descriptor(mirror.name, mirror.socket, "fd").await?;
        // Its sandbox has no way to the socket but the descriptor.
        let path = format!("/proc/self/fd/{number}");
        let target = json!({"driver": "nbd", "node-name": mirror.name, "export": mirror.export,
            "server": {"type": "unix", "path": path}, "discard": "unmap"});
        self.execute("blockdev-add", target).await?;
        // With `top`, QEMU looks only at what the image has itself. An image without a backing file
        // has everything itself, and the new one is empty: it needs no zeros.
        let has_base = disk.backing.as_ref().is_some_and(|backing| !backing.is_empty());
        let sync = if mirror.whole && has_base { "full" } else { "top" };
        let job = json!({
            "job-id": mirror.name, "device": found.top, "target": mirror.name, "sync": sync,
            "copy-mode": "write-blocking", "on-source-error": "report", "on-target-error": "stop",
            "auto-dismiss": false,
        });
        self.execute("blockdev-mirror", job).await?;
        Ok(())
    }

    /// Returns the state of each of these mirrors.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn mirrors(&self, names: &[String]) -> Result<Vec<MirrorState>, QmpError> {
        let jobs = self.execute("query-jobs", Value::Null).await?;
        Ok(names.iter().map(|name| MirrorState::of(&jobs, name)).collect())
    }

    /// Lets a paused mirror go on. One that QEMU has paused for a moment of its own goes on anyway.
    ///
    /// # Errors
    /// QEMU does not respond.
    pub async fn resume_mirror(&self, name: &str) -> Result<(), QmpError> {
        match self.execute("job-resume", json!({"id": name})).await {
            Err(error) if !is_refusal(&error) => Err(error),
            Err(error) => {
                tracing::debug!(name, %error, "a mirror does not resume");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Ends a mirror of a stopped guest, when the server has all that the guest has written.
    ///
    /// # Errors
    /// The server does not have all: [`PlugError::Copy`]; or QEMU does not respond.
    pub async fn end_mirror(&self, name: &str) -> Result<(), PlugError> {
        let mut events = self.events();
        // Without `force`, a mirror that is in step sends the rest before it ends; another one does
        // not. The stop of the guest pauses it for a moment.
        let ordered = async {
            loop {
                match self.mirror(name).await? {
                    MirrorState::InStep { .. } => {
                        let end = json!({"device": name, "force": false});
                        match self.execute("block-job-cancel", end).await {
                            // A write that was refused is pausing it.
                            Err(error) if is_refusal(&error) => {}
                            ordered => return ordered.map(drop).map_err(PlugError::from),
                        }
                    }
                    MirrorState::Paused { .. } => self.resume_mirror(name).await?,
                    other => return Err(not_complete(&other)),
                }
                changed(&mut events, name).await;
            }
        };
        let late = || PlugError::Copy("it is paused".to_owned());
        timeout(IN_STEP_LIMIT, ordered).await.map_err(|_| late())??;
        match self.until_ended(name, &mut events, IN_STEP_LIMIT).await? {
            MirrorState::Ended { error: None } => Ok(()),
            MirrorState::Ended { error: Some(error) } => Err(PlugError::Copy(error)),
            other => Err(not_complete(&other)),
        }
    }

    /// Removes a mirror from QEMU, whatever it is doing. One that does not exist is removed.
    ///
    /// # Errors
    /// QEMU keeps it, or does not respond.
    pub async fn remove_mirror(&self, name: &str) -> Result<(), QmpError> {
        let mut events = self.events();
        match self.mirror(name).await? {
            MirrorState::Missing => {}
            state => {
                if !matches!(state, MirrorState::Ended { .. }) {
                    let end = json!({"device": name, "force": true});
                    match self.execute("block-job-cancel", end).await {
                        Err(error) if !is_refusal(&error) => return Err(error),
                        // It may have ended meanwhile.
                        _ => {}
                    }
                }
                if self.until_ended(name, &mut events, END_LIMIT).await? != MirrorState::Missing {
                    self.execute("job-dismiss", json!({"id": name})).await?;
                }
            }
        }
        if let Err(error) = self.execute("blockdev-del", json!({"node-name": name})).await {
            let nodes = self.execute("query-named-block-nodes", json!({"flat": true})).await?;
            let mut nodes = nodes.as_array().into_iter().flatten();
            if nodes.any(|node| node["node-name"] == name) {
                return Err(error);
            }
        }
        self.remove_sets(name).await;
        Ok(())
    }

    async fn mirror(&self, name: &str) -> Result<MirrorState, QmpError> {
        let jobs = self.execute("query-jobs", Value::Null).await?;
        Ok(MirrorState::of(&jobs, name))
    }

    /// Waits until a mirror has ended, and can be dismissed. `events`: from before it was to end.
    async fn until_ended(
        &self,
        name: &str,
        events: &mut Receiver<QmpEvent>,
        limit: Duration,
    ) -> Result<MirrorState, QmpError> {
        let ended = async {
            loop {
                let jobs = self.execute("query-jobs", Value::Null).await?;
                let mut all = jobs.as_array().into_iter().flatten();
                let job = all.find(|job| job["id"] == name);
                if job.is_none_or(|job| job["status"] == "concluded") {
                    return Ok::<_, QmpError>(MirrorState::of(&jobs, name));
                }
                changed(events, name).await;
            }
        };
        let late = || QmpError::Timeout { command: "block-job-cancel".to_owned(), limit };
        timeout(limit, ended).await.map_err(|_| late())?
    }
}

fn not_complete(state: &MirrorState) -> PlugError {
    let state = match state {
        MirrorState::Ended { error: Some(error) } => return PlugError::Copy(error.clone()),
        MirrorState::Ended { error: None } | MirrorState::Missing => "it has ended",
        MirrorState::InStep { .. } => "it does not end",
        MirrorState::Copying { .. } => "it is not complete",
        MirrorState::Paused { .. } => "it is paused",
    };
    PlugError::Copy(state.to_owned())
}

/// Waits until the state of a job may have changed.
async fn changed(events: &mut Receiver<QmpEvent>, name: &str) {
    let ours = async {
        loop {
            match events.recv().await {
                Ok(event) if event.name == "JOB_STATUS_CHANGE" && event.data["id"] == name => {
                    return;
                }
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                // The next query fails.
                Err(RecvError::Closed) => return,
            }
        }
    };
    let _ = timeout(LOOK_INTERVAL, ours).await;
}

#[cfg(test)]
mod tests;
