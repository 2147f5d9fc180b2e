//! Note of a VM's crashes: `STATE_DIR/vms/NAME/crashes.json`. It is removed with the VM's record,
//! and stays when the VM is started by hand.

use godwit_qemu::VmName;

use super::{Store, StoreError};
use crate::crashes::Crashes;

/// Kind of the note.
const KIND: &str = "crashes";

impl Store {
    /// Notes crashes; once this returns, the note survives a power cut.
    pub(crate) fn save_crashes(&self, name: &VmName, crashes: &Crashes) -> Result<(), StoreError> {
        self.save_note(name, KIND, crashes)
    }

    /// Returns the crashes that were noted. A note that cannot be read is logged, and counts as
    /// none.
    pub(crate) fn crashes(&self, name: &VmName) -> Option<Crashes> {
        let note = self.read_note(name, KIND);
        note.unwrap_or_else(|error| {
            tracing::error!(vm = name.as_str(), %error, "cannot read the VM's crashes");
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn crashes_are_noted_beside_the_record() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let name = VmName::new("web").unwrap();
        assert_eq!(store.crashes(&name), None);
        fs::create_dir(dir.path().join("vms/web")).unwrap();
        let crashes = Crashes::default();
        store.save_crashes(&name, &crashes).unwrap();
        assert_eq!(store.crashes(&name), Some(crashes));
        fs::write(dir.path().join("vms/web/crashes.json"), "{\"at\":").unwrap();
        assert_eq!(store.crashes(&name), None);
        store.remove(&name).unwrap();
        assert!(!dir.path().join("vms/web").exists());
    }
}
