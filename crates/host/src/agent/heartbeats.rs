//! Heartbeats of this host while it holds a term of HA, and those of other hosts that the manager
//! has it read and open.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_api::{
    ApiError, ErrorCode, HeartbeatReading, HeartbeatSlot, MOST_HEARTBEATS_READ, OpenHeartbeat,
};
use godwit_ha::{Term, Timing};
use godwit_qemu::Uuid;
use tokio::time::{MissedTickBehavior, interval};

use super::Agent;
use crate::ha::heartbeats::HeartbeatError;

impl Agent {
    /// Writes the heartbeats of this host's term, each interval, until the agent ends.
    pub(super) async fn keep_heartbeats(agent: Weak<Agent>) {
        let mut ticks = interval(Timing::default().interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(agent) = agent.upgrade() else { return };
            agent.write_heartbeats();
        }
    }

    /// Begins a write to each heartbeat datastore of the term.
    fn write_heartbeats(&self) {
        let duty = self.ha().heartbeats().borrow().clone();
        let Some(duty) = duty else { return };
        let directories = self.datastore_directories();
        for (index, &datastore) in duty.datastores.iter().enumerate() {
            let slot =
                HeartbeatSlot { cluster: duty.holder.cluster, host: duty.holder.host, datastore };
            let (guard, term) = (Arc::clone(self.ha()), duty.term);
            let report = move |written: Result<Duration, HeartbeatError>| match written {
                Ok(started_at) => guard.confirm_written(term, index, started_at),
                Err(error) => guard.write_failed(term, index, error.to_string()),
            };
            self.heartbeats.write(directories.get(&datastore), slot, term, report);
        }
    }

    /// Reads heartbeats of other hosts; returns what was found in their order.
    ///
    /// # Errors
    /// There are too many.
    pub(crate) async fn read_heartbeats(
        &self,
        slots: &[HeartbeatSlot],
    ) -> Result<Vec<HeartbeatReading>, ApiError> {
        if slots.len() > MOST_HEARTBEATS_READ {
            let message = format!("cannot read {} heartbeats at once", slots.len());
            let remedy = format!("name at most {MOST_HEARTBEATS_READ}");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        }
        Ok(self.heartbeats.read(&self.datastore_directories(), slots).await)
    }

    /// Opens a term of another host on a datastore.
    ///
    /// # Errors
    /// A later term is open, or the heartbeat cannot be written.
    pub(crate) async fn open_heartbeat(&self, request: OpenHeartbeat) -> Result<(), ApiError> {
        let OpenHeartbeat { slot, term } = request;
        let refuse = |code, why: &dyn std::fmt::Display, remedy: &str| {
            let message = format!("cannot open the heartbeat of host {}: {why}", slot.host);
            ApiError::new(code, message, remedy)
        };
        if term == 0 {
            return Err(refuse(ErrorCode::InvalidRequest, &"there is no term 0", "see docs/ha.md"));
        }
        let directory = self.datastore_directories().remove(&slot.datastore);
        let opened = self.heartbeats.open(directory, slot, Term(term)).await;
        opened.map_err(|error| match error {
            HeartbeatError::NoDatastore => {
                let remedy = "mount it, and name its directory in vm_dirs";
                refuse(ErrorCode::NotFound, &error, remedy)
            }
            HeartbeatError::Newer(_) => {
                let remedy = "another manager leads: see `godwit control status`";
                refuse(ErrorCode::WrongState, &error, remedy)
            }
            _ => {
                let remedy = "see docs/ha.md, and the datastore's folder .godwit/heartbeats";
                refuse(ErrorCode::HostFailed, &error, remedy)
            }
        })
    }

    /// Returns the directories of this host's datastores, by identity: of one that has several
    /// names, that of `vm_dirs`.
    pub(super) fn datastore_directories(&self) -> BTreeMap<Uuid, PathBuf> {
        let infos = self.datastores.infos(&self.directories(), &self.config.vm_dirs);
        let known = infos.into_iter().filter_map(|(directory, info)| {
            let identity = info.identity?.parse().ok()?;
            Some((identity, directory))
        });
        by_identity(known, &self.config.vm_dirs)
    }
}

fn by_identity(
    known: impl Iterator<Item = (Uuid, PathBuf)>,
    vm_dirs: &[PathBuf],
) -> BTreeMap<Uuid, PathBuf> {
    let (own, others): (Vec<_>, Vec<_>) = known.partition(|(_, path)| vm_dirs.contains(path));
    // A later one replaces an earlier one.
    others.into_iter().chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datastore_has_its_path_in_vm_dirs() {
        let (one, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let (own, alone) = (PathBuf::from("/b/vms"), PathBuf::from("/d"));
        let known = ["/a/link", "/b/vms", "/c/link"].map(|path| (one, PathBuf::from(path)));
        let known = known.into_iter().chain([(other, alone.clone())]);
        let found = by_identity(known, std::slice::from_ref(&own));
        assert_eq!(found, BTreeMap::from([(one, own), (other, alone)]));
    }
}
