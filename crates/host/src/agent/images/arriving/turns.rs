//! Turns of arrivals: requests for one transfer or VM follow each other, and so does work on images
//! on one storage. Where the storage of one arrival hangs, those on other storage go on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::{ApiError, ArrivingDisks, ErrorCode};
use godwit_qemu::RbdImage;
use godwit_wire::MigrationId;

use crate::agent::Agent;
use crate::agent::images::arriving::destination::Destination;
use crate::disk_arrivals::{ArrivalTurn, DiskArrival, Subject, Turn};
use crate::real_paths::dir_of;
use crate::store::SavedArrivingDisk;

impl Agent {
    /// Waits for the turn of a transfer, and begins it.
    ///
    /// # Errors
    /// An earlier request for it does not end, or too many begin.
    pub(super) async fn arrival_turn(
        &self,
        id: MigrationId,
        request: &ArrivingDisks,
    ) -> Result<ArrivalTurn, ApiError> {
        let mut subjects = vec![Subject::Transfer(id), Subject::Vm(request.vm.to_string())];
        if !request.uuid.is_nil() {
            subjects.push(Subject::Guest(request.uuid));
        }
        self.begin_in_turn(id, request, subjects).await
    }

    /// Waits for the turn of a check, which counts among the transfers that begin. Other transfers
    /// of the VM do not wait for it.
    ///
    /// # Errors
    /// Those of [`Agent::arrival_turn`].
    pub(super) async fn check_turn(
        &self,
        id: MigrationId,
        request: &ArrivingDisks,
    ) -> Result<ArrivalTurn, ApiError> {
        self.begin_in_turn(id, request, vec![Subject::Transfer(id)]).await
    }

    async fn begin_in_turn(
        &self,
        id: MigrationId,
        request: &ArrivingDisks,
        subjects: Vec<Subject>,
    ) -> Result<ArrivalTurn, ApiError> {
        let own = self.arrivals.turn(subjects).await;
        let own = own.map_err(|subject| self.no_turn(&of_vm(&request.vm), &subject))?;
        let beginning = self.arrivals.begin(id, &request.from, &request.vm).ok_or_else(|| {
            let (vm, host) = (&request.vm, &self.config().name);
            let message = format!(
                "cannot accept the disks of VM \"{vm}\": too many moves with disks begin on host \
                 {host}, of this VM, of its host, or of all"
            );
            ApiError::new(ErrorCode::Busy, message, "check that its storage answers, and wait")
        })?;
        Ok(ArrivalTurn::new(beginning, own))
    }

    /// Waits for the turn to make, find or remove images of a VM on these storages. Meanwhile
    /// nothing is waited for that is on another.
    ///
    /// # Errors
    /// One of them is busy for too long.
    pub(super) async fn storage_turn(
        &self,
        vm: &str,
        storages: Vec<Subject>,
    ) -> Result<Turn, ApiError> {
        let turn = self.arrivals.turn(storages).await;
        turn.map_err(|subject| self.no_turn(&of_vm(vm), &subject))
    }

    /// Waits for the turn to remove a transfer; `None`: there is none. The transfer comes last, so
    /// that its claims end before the turn.
    ///
    /// # Errors
    /// It is being made, or its storage is busy for too long.
    pub(super) async fn removal_turn(
        &self,
        id: MigrationId,
    ) -> Result<Option<([Turn; 2], Arc<DiskArrival>)>, ApiError> {
        let own = self.arrivals.turn([Subject::Transfer(id)]).await;
        let own = own.map_err(|subject| self.no_turn(&format!("transfer {id}"), &subject))?;
        let Some(arrival) = self.arrivals.find(id) else { return Ok(None) };
        let storages = self.storages_of_arrival(&arrival);
        let storage = self.storage_turn(&arrival.record.vm, storages).await?;
        // A later transfer of its VM may have given it up meanwhile.
        let known = self.arrivals.find(id);
        let is_known = known.is_some_and(|known| Arc::ptr_eq(&known, &arrival));
        Ok(is_known.then_some(([storage, own], arrival)))
    }

    /// The refusal of work on the disks of a VM or transfer whose turn does not come.
    fn no_turn(&self, of: &str, subject: &Subject) -> ApiError {
        let host = &self.config().name;
        let what = format!("cannot accept or remove the disks of {of} on host {host}");
        let (why, remedy) = match subject {
            Subject::Storage(storage) => {
                let why = format!("work on other disks in {} does not end", storage.display());
                (why, "check that this storage answers (`godwit host show`), then try again")
            }
            Subject::Transfer(_) | Subject::Vm(_) | Subject::Guest(_) => {
                let why = "an earlier request for them is still being carried out".to_owned();
                (why, "wait until that ends, then try again")
            }
        };
        ApiError::new(ErrorCode::Busy, format!("{what}: {why}"), remedy)
    }

    /// Returns the storages on which images for a request would be.
    pub(super) fn storages_of(&self, request: &ArrivingDisks) -> Vec<Subject> {
        if let Some(pool) = Destination::of(request).storage() {
            return vec![Subject::Storage(pool)];
        }
        let to = request.to.as_deref();
        let dirs = request.disks.iter().map(|disk| {
            let dir = to.or_else(|| disk.path.parent()).unwrap_or(Path::new("/"));
            Subject::Storage(self.storage_at(dir))
        });
        dirs.collect()
    }

    /// Returns also the storages of the transfers that a new one gives up.
    pub(super) fn storages_for(&self, id: MigrationId, request: &ArrivingDisks) -> Vec<Subject> {
        let mut all = self.storages_of(request);
        for known in self.arrivals.all() {
            if known.id == id || known.is_of(&request.vm, request.uuid) {
                all.append(&mut self.storages_of_arrival(&known));
            }
        }
        all
    }

    pub(super) fn storages_of_arrival(&self, arrival: &DiskArrival) -> Vec<Subject> {
        let storage = |disk: &SavedArrivingDisk| match (RbdImage::of(&disk.path), &disk.thin) {
            (Some(image), _) => PathBuf::from(format!("rbd:{}", image.place())),
            (None, Some(thin)) => thin.pool.place(),
            (None, None) => self.storage_at(disk.path.parent().unwrap_or(&disk.path)),
        };
        arrival.record.disks.iter().map(|disk| Subject::Storage(storage(disk))).collect()
    }

    /// Returns the directory for VMs that a directory is in. One outside of them, with block
    /// devices, is itself.
    fn storage_at(&self, dir: &Path) -> PathBuf {
        let found = dir_of(dir, &self.config().vm_dirs);
        if found == Path::new("/") { dir.to_owned() } else { found.to_owned() }
    }
}

fn of_vm(vm: &str) -> String {
    format!("VM \"{vm}\"")
}
