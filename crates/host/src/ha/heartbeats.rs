//! Heartbeats on datastores: this host's own, which are written while it holds a term, and those
//! of other hosts, which it reads and opens for the manager.
//!
//! It owns the turns at the datastores. It knows no guard and no agent: the caller brings
//! directories, the term, and whom to report to. A datastore may hang, so each access has a thread
//! of its own, one of each kind at a datastore.

pub(super) mod block_file;
pub(super) mod turns;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures::future::join_all;
use godwit_api::{HeartbeatReading, HeartbeatSlot};
use godwit_ha::Term;
use godwit_qemu::Uuid;
use tokio::sync::oneshot;

pub(crate) use block_file::HeartbeatError;
use turns::{Turns, Work};

use super::boot_clock;

/// Time limit of a reading, and of opening a heartbeat.
const LIMIT: Duration = Duration::from_secs(2);

/// Heartbeats that this host writes, reads and opens.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    limit: Duration,
    turns: Turns,
}

impl Default for Heartbeats {
    fn default() -> Self {
        Heartbeats { limit: LIMIT, turns: Turns::default() }
    }
}

impl Heartbeats {
    /// Begins to write the next heartbeat. Calls `report` when that has ended, however long it
    /// takes, with the time at which the write began on the boot clock, or with the reason why
    /// nothing was written. `directory`: the datastore's, if the host has it.
    pub(crate) fn write(
        &self,
        directory: Option<&PathBuf>,
        slot: HeartbeatSlot,
        term: Term,
        report: impl FnOnce(Result<Duration, HeartbeatError>) + Send + 'static,
    ) {
        let Some(directory) = directory.cloned() else {
            return report(Err(HeartbeatError::NoDatastore));
        };
        let Some(turn) = self.turns.begin(slot.datastore, Work::Write) else {
            return report(Err(HeartbeatError::Busy));
        };
        let work = move || {
            let started_at = boot_clock();
            // A term ends with the boot, and so does the clock: no number comes twice in a term,
            // also if another agent process wrote the last one.
            let least = u64::try_from(started_at.as_millis()).unwrap_or(u64::MAX);
            let written = block_file::write(&directory, slot, term, least);
            report(written.map(|()| started_at));
            drop(turn);
        };
        if let Err(error) = in_thread(work) {
            tracing::error!(%error, "cannot start a thread that writes a heartbeat");
        }
    }

    /// Reads heartbeats of other hosts, those of each datastore in a thread of its own; returns
    /// what was found in their order. What is not read within the time limit is a failed reading.
    pub(crate) async fn read(
        &self,
        directories: &BTreeMap<Uuid, PathBuf>,
        slots: &[HeartbeatSlot],
    ) -> Vec<HeartbeatReading> {
        let mut by_datastore = BTreeMap::<Uuid, Vec<HeartbeatSlot>>::new();
        for slot in slots {
            by_datastore.entry(slot.datastore).or_default().push(*slot);
        }
        let reads = by_datastore.into_iter().map(|(datastore, slots)| {
            let directory = directories.get(&datastore).cloned();
            async move { (datastore, self.read_at(directory, datastore, slots).await.into_iter()) }
        });
        let mut found: BTreeMap<_, _> = join_all(reads).await.into_iter().collect();
        let readings = slots.iter().map(|slot| {
            let next = found.get_mut(&slot.datastore).and_then(Iterator::next);
            next.unwrap_or_else(|| HeartbeatError::Late.reading())
        });
        readings.collect()
    }

    async fn read_at(
        &self,
        directory: Option<PathBuf>,
        datastore: Uuid,
        slots: Vec<HeartbeatSlot>,
    ) -> Vec<HeartbeatReading> {
        let number = slots.len();
        let readings = match directory {
            Some(directory) => {
                self.at(datastore, move |_| block_file::read(&directory, datastore, &slots)).await
            }
            None => Err(HeartbeatError::NoDatastore),
        };
        readings.unwrap_or_else(|error| vec![error.reading(); number])
    }

    /// Opens a term of another host on a datastore.
    ///
    /// # Errors
    /// A later term is open, or the heartbeat cannot be written within the time limit.
    pub(crate) async fn open(
        &self,
        directory: Option<PathBuf>,
        slot: HeartbeatSlot,
        term: Term,
    ) -> Result<(), HeartbeatError> {
        let directory = directory.ok_or(HeartbeatError::NoDatastore)?;
        let work = move |until| block_file::open(&directory, slot, term, until);
        self.at(slot.datastore, work).await
    }

    /// Works at a datastore in a thread, with the time at which nobody waits for it any more.
    async fn at<T: Send + 'static>(
        &self,
        datastore: Uuid,
        work: impl FnOnce(Instant) -> Result<T, HeartbeatError> + Send + 'static,
    ) -> Result<T, HeartbeatError> {
        let until = Instant::now() + self.limit;
        let outcome = async {
            let turn = self.turns.wait(datastore, Work::Read).await.ok_or(HeartbeatError::Late)?;
            let (done, outcome) = oneshot::channel();
            in_thread(move || {
                let found = work(until);
                drop(turn);
                let _ = done.send(found);
            })?;
            outcome.await.unwrap_or(Err(HeartbeatError::Late))
        };
        tokio::time::timeout(self.limit, outcome).await.unwrap_or(Err(HeartbeatError::Late))
    }
}

/// Runs work in a thread that may hang.
pub(super) fn in_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name("heartbeat".into()).spawn(work).map(drop)
}

#[cfg(test)]
mod tests;
