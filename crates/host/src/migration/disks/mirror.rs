//! The disks of a running VM as its QEMU mirrors them to this agent, for disks whose export is
//! unsafe ([`godwit_qemu::Qmp::export_is_unsound`]): QEMU is the client, so nobody reads from it.
//!
//! - Each disk has a mirror, which first sends what the disk has, and each write of the guest.
//! - What arrives is pending until it is on the destination's disk. A round sends what has arrived
//!   since the last one.
//! - Nothing of it outlives this agent: without it, the mirrors pause, the guest goes on, and the
//!   next agent removes them. Such a transfer is not continued.

mod pending;
mod serving;
mod written;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use futures::future::join_all;
use godwit_migration::Failure;
use godwit_migration::disks::{DiskRange, DiskReader};
use godwit_qemu::{Mirror, MirrorState};
use godwit_types::FailureCode;
use rustix::fs::{Mode, OFlags};
use tokio::runtime::Handle;

use self::pending::Pending;
use self::serving::Serving;
use super::door::disk_failure;
use super::wires::Wires;
use crate::state_stream::qemu_failure;
use crate::store::DiskTransferNote;
use crate::vm::Vm;

/// The mirrors of a transfer.
pub(super) struct Mirrors {
    host: String,
    vm: Arc<Vm>,
    runtime: Handle,
    names: Vec<String>,
    pending: Arc<Pending>,
}

/// What the mirrors have not sent yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Behind {
    pub(super) bytes: u64,
    /// Whether writes of a guest may be missing, or parts that it has not written.
    pub(super) is_incomplete: bool,
}

impl Mirrors {
    /// Begins the mirrors.
    ///
    /// # Errors
    /// QEMU refuses. What it has by then is removed by `Agent::clear_disk_transfer`.
    pub(super) async fn open(
        host: &str,
        vm: &Arc<Vm>,
        note: &DiskTransferNote,
        wires: &Arc<Wires>,
    ) -> Result<Mirrors, Failure> {
        let disks: Vec<_> =
            note.disks.iter().map(|noted| (noted.virtual_bytes, noted.is_layer)).collect();
        let pending = Arc::new(Pending::new(&disks));
        let names: Vec<_> = (0..disks.len()).map(DiskTransferNote::mirror).collect();
        let exports = names.iter().cloned().zip(disks.iter().map(|(bytes, _)| *bytes)).collect();
        let path = vm.files.mirrors_socket();
        let failed = |error: io::Error| {
            let name = &vm.name;
            disk_failure(host, &format!("cannot mirror the disks of VM \"{name}\": {error}"))
        };
        let listener = listen(&path).map_err(failed)?;
        let socket =
            rustix::fs::open(path.as_path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let socket = socket.map_err(|error| failed(error.into()))?;
        let is_over = Arc::clone(wires);
        let is_over = Arc::new(move || is_over.is_over());
        Serving::start(listener, exports, &pending, is_over).map_err(failed)?;
        let (host, runtime) = (host.to_owned(), Handle::current());
        let mirrors = Mirrors { host, vm: Arc::clone(vm), runtime, names, pending };
        let begun = mirrors.begin(note, socket.as_fd()).await;
        // What is connected needs no file.
        let removed = fs::remove_file(&path);
        begun?;
        removed.map_err(failed)?;
        Ok(mirrors)
    }

    async fn begin(&self, note: &DiskTransferNote, socket: BorrowedFd<'_>) -> Result<(), Failure> {
        let spec = self.vm.spec();
        for (noted, name) in note.disks.iter().zip(&self.names) {
            let index = noted.index_in(&spec.disks).ok_or_else(|| {
                let why = format!("VM \"{}\" has other disks now", self.vm.name);
                disk_failure(&self.host, &why)
            })?;
            let mirror = Mirror { name, export: name, socket, whole: !noted.is_layer };
            let begun = self.vm.process.qmp.begin_mirror((&spec.disks, index), mirror).await;
            begun.map_err(|error| {
                let path = noted.disk.path.display();
                disk_failure(&self.host, &format!("cannot mirror disk {path}: {error}"))
            })?;
        }
        Ok(())
    }

    /// Returns a reader of what is to be sent, for one stream.
    pub(super) fn reader(&self) -> Box<dyn DiskReader> {
        Box::new(PendingReader(Arc::clone(&self.pending)))
    }

    /// Waits until there is a good deal to send, or for this long.
    pub(super) fn wait(&self, limit: Duration) {
        self.pending.wait(limit);
    }

    /// Begins a round, and lists what is to be sent.
    ///
    /// # Errors
    /// A mirror has ended.
    pub(super) fn exchange(&self) -> Result<Vec<DiskRange>, Failure> {
        self.pending.exchange().map_err(|why| disk_failure(&self.host, &why))
    }

    /// Returns what the mirrors have not sent yet. Lets those go on of which a write was refused:
    /// there is room again.
    ///
    /// # Errors
    /// A mirror has ended, or QEMU does not respond.
    pub(super) fn behind(&self) -> Result<Behind, Failure> {
        let qmp = &self.vm.process.qmp;
        let failed = |error| qemu_failure(&self.host, "list the mirrors of the disks", &error);
        let states = self.runtime.block_on(qmp.mirrors(&self.names)).map_err(failed)?;
        let mut behind = Behind::default();
        for (name, state) in self.names.iter().zip(states) {
            let is_paused = matches!(state, MirrorState::Paused { .. });
            behind = behind.with(&state).map_err(|why| disk_failure(&self.host, &why))?;
            if is_paused {
                self.runtime.block_on(qmp.resume_mirror(name)).map_err(failed)?;
            }
        }
        Ok(behind)
    }

    /// Ends the mirrors of a stopped guest, when they have sent all that it has written.
    ///
    /// # Errors
    /// They have not, or QEMU does not respond.
    pub(super) fn end(&self) -> Result<(), Failure> {
        let qmp = &self.vm.process.qmp;
        let ended = join_all(self.names.iter().map(|name| qmp.end_mirror(name)));
        self.runtime.block_on(ended).into_iter().try_for_each(|ended| {
            ended.map_err(|error| {
                let detail = format!("host {}: a mirror is behind its disk: {error}", self.host);
                Failure::new(FailureCode::DisksNotConverging, detail)
            })
        })
    }

    /// Makes room for what the guest writes until it has stopped.
    pub(super) fn widen(&self) {
        self.pending.widen();
    }

    /// Ends a round: all of it is on the destination's disk.
    pub(super) fn forget(&self) {
        self.pending.forget();
    }

    /// Returns a small part of a disk that may be sent once more; `None`: nothing was sent yet.
    pub(super) fn sample(&self) -> Option<DiskRange> {
        self.pending.sample()
    }
}

impl Behind {
    /// Adds a mirror in this state.
    fn with(self, state: &MirrorState) -> Result<Behind, String> {
        let (left_bytes, is_incomplete) = match state {
            MirrorState::InStep { left_bytes } => (*left_bytes, false),
            // A mirror that has just begun does not know yet what is left.
            MirrorState::Copying { left_bytes } | MirrorState::Paused { left_bytes } => {
                ((*left_bytes).max(1), true)
            }
            MirrorState::Ended { error: Some(error) } => {
                return Err(format!("the mirror of a disk has ended: {error}"));
            }
            MirrorState::Ended { error: None } | MirrorState::Missing => {
                return Err("the mirror of a disk has ended".to_owned());
            }
        };
        Ok(Behind {
            bytes: self.bytes.saturating_add(left_bytes),
            is_incomplete: self.is_incomplete || is_incomplete,
        })
    }
}

/// Listens on a socket to which QEMU may connect, whatever its user. Only root reaches the folder;
/// QEMU gets a descriptor.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Reads what is to be sent.
struct PendingReader(Arc<Pending>);

impl DiskReader for PendingReader {
    fn read_at(&mut self, disk: usize, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        if self.0.read(disk, at, buffer) {
            return Ok(());
        }
        let detail = format!("disk {disk} of a transfer has nothing to send at {at}");
        Err(Failure::new(FailureCode::Internal, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_complete_when_all_are_in_step() {
        let of = |states: &[MirrorState]| states.iter().try_fold(Behind::default(), Behind::with);
        let in_step = MirrorState::InStep { left_bytes: 3 };
        let behind = |bytes, is_incomplete| Ok(Behind { bytes, is_incomplete });
        assert_eq!(of(&[in_step.clone(), in_step.clone()]), behind(6, false));
        let copying = MirrorState::Copying { left_bytes: 0 };
        assert_eq!(of(&[in_step.clone(), copying]), behind(4, true));
        let paused = MirrorState::Paused { left_bytes: 9 };
        assert_eq!(of(&[paused, in_step.clone()]), behind(12, true));
        for over in [
            MirrorState::Missing,
            MirrorState::Ended { error: None },
            MirrorState::Ended { error: Some("no".to_owned()) },
        ] {
            assert!(of(&[in_step.clone(), over]).is_err());
        }
    }

    #[test]
    fn a_socket_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(listen(&path).unwrap());
        drop(listen(&path).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
    }
}
