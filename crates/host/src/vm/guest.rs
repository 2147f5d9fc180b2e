//! A VM's agent in the guest, and the freeze that it keeps.

use std::fs;
use std::io;
use std::path::PathBuf;

use godwit_qemu::{GUEST_AGENT_SOCKET, GuestAgent, ResolvedSpec};
use parking_lot::Mutex;

use crate::vm::VmFiles;

/// Agent in a VM's guest.
#[derive(Debug)]
pub(crate) struct Guest {
    /// `None`: the VM has no port for one.
    pub agent: Option<GuestAgent>,
    /// Note of a freeze, for the next agent of this host. It is beside the sockets and ends with
    /// the process.
    note: PathBuf,
    /// Time of the thaw, in milliseconds since 1970, if the guest may be frozen.
    frozen_until_ms: Mutex<Option<u64>>,
}

impl Guest {
    /// Reads the note that an earlier agent left.
    pub(super) fn of(files: &VmFiles, spec: &ResolvedSpec) -> Guest {
        let note = files.dir.join("frozen");
        let agent = spec.guest_agent.then(|| GuestAgent::new(files.dir.join(GUEST_AGENT_SOCKET)));
        let noted = fs::read_to_string(&note).ok();
        // A note that was cut short is one of a freeze that begins: thaw at once.
        let frozen_until_ms = noted.map(|text| text.trim().parse().unwrap_or(0));
        Guest { agent, note, frozen_until_ms: Mutex::new(frozen_until_ms) }
    }

    pub(crate) fn frozen_until_ms(&self) -> Option<u64> {
        *self.frozen_until_ms.lock()
    }

    /// Records a freeze. Must be called before the guest is asked for it. Returns false if one is
    /// recorded already.
    pub(crate) fn note_freeze(&self, until_ms: u64) -> io::Result<bool> {
        let mut frozen = self.frozen_until_ms.lock();
        if frozen.is_some() {
            return Ok(false);
        }
        fs::write(&self.note, format!("{until_ms}\n"))?;
        *frozen = Some(until_ms);
        Ok(true)
    }

    /// Records that the guest is not frozen.
    pub(crate) fn note_thaw(&self) {
        let mut frozen = self.frozen_until_ms.lock();
        if frozen.take().is_some()
            && let Err(error) = fs::remove_file(&self.note)
            && error.kind() != io::ErrorKind::NotFound
        {
            // The next agent thaws once more, which does nothing.
            let note = self.note.display();
            tracing::warn!(%note, %error, "cannot remove the note of a freeze");
        }
    }
}
