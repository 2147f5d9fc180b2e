//! What snapshots have beside the record of their VM: their own record, and the variables of its
//! firmware.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use godwit_qemu::{ResolvedSpec, Uuid, VmName};

use super::{Store, StoreError, failed};
use crate::snapshots::Snapshots;

impl Store {
    /// Returns the snapshots of a VM; none if there is no record of any.
    pub(crate) fn snapshots(&self, name: &VmName) -> Result<Snapshots, StoreError> {
        let path = self.vms.join(name).join("snapshots.json");
        match fs::read(&path) {
            Ok(text) => Snapshots::parse(&text).map_err(|why| StoreError::Format { path, why }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Snapshots::default()),
            Err(error) => Err(failed(&path, "read", error)),
        }
    }

    /// Writes the record of a VM's snapshots. It is removed with the VM's record.
    pub(crate) fn save_snapshots(
        &self,
        name: &VmName,
        snapshots: &Snapshots,
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        self.replace(&self.vms.join(name).join("snapshots.json"), snapshots, "snapshots")
    }

    /// File with the boot of the host in which a VM was suspended for a snapshot.
    fn resumption(&self, name: &VmName) -> PathBuf {
        self.vms.join(name).join("resumes")
    }

    /// Records, before a VM is suspended for a snapshot, that it continues afterwards, in this boot
    /// of the host.
    pub(crate) fn note_resumption(&self, name: &VmName, boot_id: &str) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let path = self.resumption(name);
        let written = self.disk.replace(&path, boot_id.as_bytes());
        written.map_err(|source| failed(&path, "write", source))
    }

    /// Returns the boot in which a VM was suspended for a snapshot and was to continue; `None` if
    /// it was not.
    pub(crate) fn resumption_of(&self, name: &VmName) -> Option<String> {
        fs::read_to_string(self.resumption(name)).ok()
    }

    /// Removes the record of [`Store::note_resumption`]. A failure is logged.
    pub(crate) fn forget_resumption(&self, name: &VmName) {
        let _alone = self.writing.lock();
        let path = self.resumption(name);
        if let Err(error) = self.disk.remove(&path) {
            tracing::error!(path = %path.display(), %error, "a suspended VM may be resumed");
        }
    }

    fn snapshot_variables(&self, name: &VmName, id: Uuid) -> PathBuf {
        self.vms.join(name).join(format!("snapshot-{id}.variables"))
    }

    /// Keeps the variables of a VM's firmware for a snapshot.
    pub(crate) fn save_snapshot_variables(
        &self,
        name: &VmName,
        id: Uuid,
        content: &[u8],
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let path = self.snapshot_variables(name, id);
        self.disk.replace(&path, content).map_err(|source| failed(&path, "write", source))
    }

    /// File of the variables that a revert gives to a VM.
    fn staged_variables(&self, name: &VmName) -> PathBuf {
        self.vms.join(name).join("reverted.variables")
    }

    /// Copies the variables of a snapshot, for [`Store::take_variables`]. `wanted`: it has some.
    pub(crate) fn stage_variables(
        &self,
        name: &VmName,
        id: Uuid,
        wanted: bool,
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let (kept, staged) = (self.snapshot_variables(name, id), self.staged_variables(name));
        let (action, done) = match fs::read(&kept) {
            Ok(content) => ("write", self.disk.replace(&staged, &content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !wanted => {
                ("remove", self.disk.remove(&staged))
            }
            Err(error) => return Err(failed(&kept, "read", error)),
        };
        done.map_err(|source| failed(&staged, action, source))
    }

    /// Gives a VM the copied variables. Without any, its firmware begins with new ones.
    pub(crate) fn take_variables(&self, spec: &ResolvedSpec) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let (staged, path) = (self.staged_variables(&spec.name), self.variables_path(spec));
        let taken = staged.try_exists().and_then(|exists| match exists {
            true => self.disk.put(&staged, &path),
            false => self.disk.remove(&path),
        });
        taken.map_err(|source| failed(&path, "replace", source))
    }

    /// Removes copied variables that are not needed. A failure is logged.
    pub(crate) fn drop_staged_variables(&self, name: &VmName) {
        self.remove_leftover(&self.staged_variables(name));
    }

    /// Removes the variables of a snapshot. A failure is logged: nothing uses them.
    pub(crate) fn remove_snapshot_variables(&self, name: &VmName, id: Uuid) {
        self.remove_leftover(&self.snapshot_variables(name, id));
    }

    fn remove_leftover(&self, path: &Path) {
        if let Err(error) = self.disk.remove(path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove variables of a snapshot");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::spec;
    use super::*;

    #[test]
    fn a_resumption_is_known_until_it_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let web = spec("web");
        store.save_variables(&web, b"now").unwrap();
        assert_eq!(store.resumption_of(&web.name), None);
        store.note_resumption(&web.name, "boot").unwrap();
        assert_eq!(store.resumption_of(&web.name).as_deref(), Some("boot"));
        store.forget_resumption(&web.name);
        store.forget_resumption(&web.name);
        assert_eq!(store.resumption_of(&web.name), None);
    }

    #[test]
    fn a_revert_takes_the_variables_of_its_snapshot_and_loses_none() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let (web, id) = (spec("web"), Uuid::from_u128(1));
        let path = store.variables_path(&web);
        store.save_variables(&web, b"now").unwrap();
        // They are missing: nothing is taken from the VM.
        store.stage_variables(&web.name, id, true).unwrap_err();
        store.save_snapshot_variables(&web.name, id, b"then").unwrap();
        store.stage_variables(&web.name, id, true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"now");
        store.take_variables(&web).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"then");
        // A snapshot of a VM that had never started has none.
        store.stage_variables(&web.name, Uuid::from_u128(2), false).unwrap();
        store.take_variables(&web).unwrap();
        assert!(!path.exists());
    }
}
