//! The end of transfers whose VM does not come: their images are removed. What the record of a VM
//! names stays.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_api::{ApiError, ArrivingDisks, ErrorCode};
use godwit_qemu::{RbdImage, ResolvedSpec, VmName};
use godwit_wire::MigrationId;

use crate::agent::Agent;
use crate::agent::images::arriving::identity::is_ours;
use crate::agent::images::in_work;
use crate::disk_arrivals::{DiskArrival, PreparedArrival};
use crate::store::{SavedArrivingDisk, SavedThinVolume};
use crate::vm::Condition;

/// Time without a connection after which a transfer is given up.
const UNSEEN_LIMIT: Duration = Duration::from_secs(24 * 3600);
/// Interval at which transfers are looked at.
const SWEEP_INTERVAL: Duration = Duration::from_secs(600);

impl Agent {
    /// Gives up an earlier transfer of this ID that cannot go on, and others of the VM.
    pub(super) fn give_up_earlier(
        &self,
        id: MigrationId,
        request: &ArrivingDisks,
    ) -> Result<(), ApiError> {
        let all = self.arrivals.all();
        let earlier =
            all.iter().filter(|known| known.id == id || known.is_of(&request.vm, request.uuid));
        for known in earlier {
            let from = &known.record.from;
            if *from != request.from && known.is_connected() {
                let message = format!(
                    "cannot accept the disks of VM \"{}\": they arrive from host {from}",
                    request.vm
                );
                let remedy = "wait until that ends, or cancel it there";
                return Err(ApiError::new(ErrorCode::Busy, message, remedy));
            }
            self.remove_disk_arrival(known)?;
        }
        Ok(())
    }

    /// Removes a transfer with its images. What the record of a VM names stays. Blocks.
    ///
    /// # Errors
    /// A VM has them, also a shadow, or what is written does not end, or LVM fails. It is unknown
    /// which files a VM has whose storage does not answer.
    pub(super) fn remove_disk_arrival(&self, arrival: &DiskArrival) -> Result<(), ApiError> {
        disconnect(arrival)?;
        // Then no VM gets them any more: their own may come just now.
        let withdrawn = in_work::withdraw(&arrival.images, &arrival.record.vm);
        for image in &arrival.images {
            let Some(vm) = self.user_before_removal(image)? else { continue };
            let message = format!(
                "cannot remove the disks that arrived of VM \"{}\": VM \"{vm}\" has them",
                arrival.record.vm
            );
            let remedy = "wait until its migration ends, then try again";
            return Err(ApiError::new(ErrorCode::Busy, message, remedy));
        }
        let held = self.arrivals.find(arrival.id);
        let volumes = self.end_volumes(arrival)?;
        arrival.record.disks.iter().for_each(|disk| self.remove_arrived(disk, held.as_ref()));
        // Images in a pool are being deleted: their VM must not get them meanwhile.
        withdrawn.for_good();
        self.store.remove_arrival(arrival.id)?;
        self.arrivals.remove(arrival.id);
        let held: Arc<dyn Any + Send + Sync> = Arc::new(held);
        self.remove_volumes(volumes, &held);
        tracing::info!(vm = arrival.record.vm.as_str(), "disks that arrived are removed");
        Ok(())
    }

    /// Marks the thin volumes of a transfer for their removal. From here on the transfer cannot go
    /// on, also not with the next agent: if LVM fails, some of them may be marked.
    fn end_volumes(&self, arrival: &DiskArrival) -> Result<Vec<SavedThinVolume>, ApiError> {
        let record = &arrival.record;
        if !record.has_volumes() {
            return Ok(Vec::new());
        }
        arrival.give_up();
        let alone = arrival.recording.lock();
        self.store.save_arrival(&record.ended())?;
        drop(alone);
        self.mark_volumes(&record.disks)
    }

    /// Removes an image that was made for a transfer, if it is still that file. One in a pool is
    /// removed a little later; `held`: the transfer, whose claims last until then.
    pub(super) fn remove_arrived(&self, disk: &SavedArrivingDisk, held: Option<&Arc<DiskArrival>>) {
        let path = disk.path.display();
        if let Some(image) = RbdImage::of(&disk.path) {
            return self.remove_from_pool(disk, image, held);
        }
        if disk.thin.is_some() {
            // LVM removes it.
            return;
        }
        if let Some(device) = &disk.device {
            return self.clear_device(&disk.path, device);
        }
        match self.place(&disk.path, "remove") {
            Ok(place) if self.is_recorded(&disk.path) => {
                tracing::warn!(path = %place.path.display(), "image stays: a VM may have it");
            }
            Ok(place) => match is_ours(&place, disk) {
                Ok(true) => place.remove(),
                Ok(false) => tracing::info!(%path, "the image for a disk that arrived is gone"),
                Err(error) => tracing::warn!(%path, %error, "the image for a disk stays"),
            },
            Err(error) => tracing::warn!(%path, %error, "the image for a disk stays"),
        }
    }

    /// Looks at the transfers from time to time, for as long as the agent exists.
    pub(in crate::agent) async fn keep_disk_arrivals(agent: Weak<Agent>) {
        loop {
            if let Some(agent) = agent.upgrade() {
                agent.sweep_volumes().await;
            }
            tokio::time::sleep(SWEEP_INTERVAL).await;
            let Some(agent) = agent.upgrade() else { return };
            let unneeded = tokio::task::block_in_place(|| {
                agent.learn_real_paths();
                agent.unneeded_arrivals(UNSEEN_LIMIT)
            });
            for arrival in unneeded {
                // Storage that hangs delays nothing on another.
                tokio::spawn(
                    Arc::clone(&agent)
                        .remove_in_turn(arrival.id, |arrival| is_unneeded(arrival, UNSEEN_LIMIT)),
                );
            }
        }
    }

    /// Forgets transfers whose images a VM has, and gives up those whose source does not return.
    /// Blocks. At the agent's start, when no request has a turn.
    pub(super) fn sweep_disk_arrivals(&self) {
        self.give_up_unseen(UNSEEN_LIMIT);
    }

    /// Does the work of [`Agent::sweep_disk_arrivals`] for sources that were not seen for `limit`.
    pub(super) fn give_up_unseen(&self, limit: Duration) {
        for arrival in self.unneeded_arrivals(limit) {
            if let Err(error) = self.remove_disk_arrival(&arrival) {
                tracing::warn!(%error, "disks that arrived stay");
            }
        }
    }

    /// Forgets transfers whose images stay. Returns those that are to be removed.
    fn unneeded_arrivals(&self, limit: Duration) -> Vec<Arc<DiskArrival>> {
        let mut all = self.arrivals.all();
        all.retain(|arrival| {
            if arrival.is_connected() {
                // It may be connected for days.
                let _ = arrival.seen();
            }
            if self.has_become_a_vms(arrival) {
                self.forget_disk_arrival(arrival);
                return false;
            }
            if is_unseen(arrival, limit) && arrival.is_sealed() {
                // A guest may have written its images: they stay, whatever has become of it.
                self.arrivals.remove(arrival.id);
            }
            is_unneeded(arrival, limit)
        });
        all
    }

    /// Returns a transfer by its ID, also one that is being made, and its source.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn transfer_with_source(&self, id: &str) -> Result<(MigrationId, String), ApiError> {
        let id = id.parse::<MigrationId>().map_err(|_| no_transfer())?;
        let from = self.arrivals.source_of(id).ok_or_else(no_transfer)?;
        Ok((id, from))
    }

    /// Removes a transfer that its source gives up, with its images; with its shadow, if there is
    /// one. One that is being made ends, too. `from`: the source.
    ///
    /// # Errors
    /// There is none, it is being made, or its images cannot be removed now; they are later.
    pub(crate) async fn give_up_disks(&self, id: MigrationId, from: &str) -> Result<(), ApiError> {
        self.arrivals.give_up_beginning(id, from);
        let is_its = |arrival: &Arc<DiskArrival>| arrival.record.from == from;
        if let Some(arrival) = self.arrivals.find(id).filter(is_its) {
            arrival.give_up();
        }
        let in_turn = self.removal_turn(id).await?;
        let Some((_turn, arrival)) = in_turn.filter(|(_, arrival)| is_its(arrival)) else {
            return Err(no_transfer());
        };
        arrival.give_up();
        match tokio::task::block_in_place(|| self.remove_disk_arrival(&arrival)) {
            Err(_) if self.is_arriving(&arrival.record.vm) => Ok(()),
            removed => removed,
        }
    }

    fn is_arriving(&self, vm: &VmName) -> bool {
        let table = self.table();
        let condition = table.get(vm).map(|slot| &slot.condition);
        matches!(condition, Some(Condition::MigratingIn { .. }))
    }

    /// Removes a transfer whose VM does not come, if it is of no use.
    pub(crate) async fn drop_disks(self: Arc<Self>, arrival: Arc<DiskArrival>) {
        self.remove_in_turn(arrival.id, DiskArrival::is_abandoned).await;
    }

    /// Removes a transfer when its turn comes, if it is still of no use then.
    async fn remove_in_turn(
        self: Arc<Self>,
        id: MigrationId,
        is_useless: impl Fn(&DiskArrival) -> bool + Send,
    ) {
        let removed = match self.removal_turn(id).await {
            Ok(Some((_turn, arrival))) if is_useless(&arrival) => {
                tokio::task::block_in_place(|| self.remove_disk_arrival(&arrival))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::warn!(%error, "disks that arrived stay");
        }
    }

    /// Removes the images of a transfer that was prepared and cannot begin.
    pub(crate) async fn remove_unbegun(&self, prepared: &PreparedArrival) {
        let arrival = &prepared.arrival;
        // If this fails, it is tried again later.
        arrival.give_up();
        let storages = self.storages_of_arrival(arrival);
        let removed = match self.storage_turn(&arrival.record.vm, storages).await {
            Ok(_turn) => tokio::task::block_in_place(|| self.remove_disk_arrival(arrival)),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::error!(%error, "images for disks stay");
        }
    }

    /// Whether a VM that is certainly this host's has the images.
    fn has_become_a_vms(&self, arrival: &DiskArrival) -> bool {
        let has = |spec: &ResolvedSpec| {
            let mut disks = spec.disks.iter();
            disks.any(|disk| arrival.record.disks.iter().any(|saved| saved.path == disk.path))
        };
        self.table().values().any(|slot| {
            let is_settled = !slot.condition.is_in_doubt() && !slot.condition.is_being_adopted();
            is_settled && has(&slot.spec)
        })
    }
}

/// The refusal of a request for a transfer that is not known.
fn no_transfer() -> ApiError {
    let message = "no disks of that transfer arrive on this host";
    ApiError::new(ErrorCode::NotFound, message, "nothing of it is left here")
}

/// Whether the source of a transfer has not been connected for `limit`.
fn is_unseen(arrival: &DiskArrival, limit: Duration) -> bool {
    !arrival.is_connected() && arrival.unseen_for() >= limit
}

/// Whether a transfer is to be removed: its source does not return, or does not want it.
fn is_unneeded(arrival: &DiskArrival, limit: Duration) -> bool {
    (is_unseen(arrival, limit) || arrival.is_abandoned()) && !arrival.is_sealed()
}

/// Ends the present connection of a transfer.
pub(super) fn disconnect(arrival: &DiskArrival) -> Result<(), ApiError> {
    if arrival.disconnect() {
        return Ok(());
    }
    let message = format!(
        "cannot end the transfer of the disks of VM \"{}\": a write to a disk does not end",
        arrival.record.vm
    );
    Err(ApiError::new(ErrorCode::Busy, message, "check the host's storage, then try again"))
}
