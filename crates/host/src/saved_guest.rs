//! A suspended guest's file: where it is, what it says of the guest, and how QEMU's device state
//! gets into it and out of it. The engine's part of the file is [`godwit_migration::saved`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_migration::destination::MOST_DEVICE_STATE_BYTES;
use godwit_migration::saved::{GuestWriter, Progress, SavedError, SavedGuest, WrittenGuest};
use godwit_qemu::{ByteSize, MigrationStatus, Qmp, QmpEvent, Uuid, VmName};
use godwit_types::Ownership;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use crate::datastores::room;
use crate::failure::task_failed;
use crate::state_stream::{self, LOAD_LIMIT, STREAM};
use crate::vm::Vm;

/// Time for QEMU to stop the guest, drain its disks and write its device state.
const STATE_LIMIT: Duration = Duration::from_secs(60);
/// Space that is left to the records of VMs, which may be on the same file system.
const RESERVE_BYTES: u64 = 64 << 20;
/// Version of [`Caption`].
const FORMAT: u32 = 1;
/// Most threads that save or load a guest. More do not make a disk faster.
const MOST_THREADS: usize = 8;

/// Paths of a suspended guest's file.
#[derive(Clone, Debug)]
pub(crate) struct SavedFile {
    /// The complete file.
    path: PathBuf,
    /// The file while it is written.
    partial: PathBuf,
}

/// What a file says of its guest, for the agent that resumes it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Caption {
    format: u32,
    uuid: Uuid,
    ownership: Ownership,
}

impl SavedFile {
    /// Returns the paths in `dir` for a VM.
    pub(crate) fn of(dir: &Path, name: &VmName) -> SavedFile {
        SavedFile {
            path: dir.join(format!("{name}.guest")),
            partial: dir.join(format!("{name}.guest.partial")),
        }
    }

    /// Returns the paths in `dir` for the memory of a snapshot.
    pub(crate) fn of_snapshot(dir: &Path, id: Uuid) -> SavedFile {
        SavedFile {
            path: dir.join(format!("snapshot-{id}.guest")),
            partial: dir.join(format!("snapshot-{id}.guest.partial")),
        }
    }

    /// Gives a complete file a second name. Its content never changes.
    pub(crate) fn link_to(&self, other: &SavedFile) -> io::Result<()> {
        fs::hard_link(&self.path, &other.path)?;
        other.path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    }

    /// Gives a complete file a second name: that of the other one while it is written. The other
    /// one stays until [`SavedFile::complete`].
    pub(crate) fn stage_as(&self, other: &SavedFile) -> io::Result<()> {
        other.remove_partial();
        fs::hard_link(&self.path, &other.partial)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the complete file is there.
    pub(crate) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Whether a complete or a partial file is there.
    pub(crate) fn is_left(&self) -> bool {
        self.exists() || self.partial.exists()
    }

    /// Removes what is there. A failure is logged: the file is never used without a record.
    pub(crate) fn remove(&self) {
        remove(&self.path);
        self.remove_partial();
    }

    pub(crate) fn remove_partial(&self) {
        remove(&self.partial);
    }

    /// Refuses to save a guest whose memory might fill the file system.
    pub(crate) fn check_room(&self, vm: &Vm) -> Result<(), ApiError> {
        let dir = self.path.parent().unwrap_or(Path::new("/"));
        let needed = vm.memory_taken_bytes().saturating_add(RESERVE_BYTES);
        let known = fs::create_dir_all(dir).ok().and_then(|()| Some(room(dir)?.free_bytes));
        let Some(free) = known.filter(|free| *free < needed) else { return Ok(()) };
        let (free, needed) = (ByteSize::from_bytes(free), ByteSize::from_bytes(needed));
        let message = format!(
            "cannot suspend VM \"{}\": its memory may need {needed}, and {} has {free} free",
            vm.name,
            dir.display()
        );
        let remedy = "free space there, or set suspend_dir in the agent's configuration";
        Err(ApiError::new(ErrorCode::HostFailed, message, remedy))
    }

    fn create(&self) -> io::Result<File> {
        if let Some(dir) = self.path.parent() {
            fs::create_dir_all(dir)?;
        }
        // Guest memory: for root alone. A new file, so that nothing else has it open.
        let _ = fs::remove_file(&self.partial);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600).open(&self.partial)
    }

    /// Gives the complete file its name, in a way that survives a power cut.
    pub(crate) fn complete(&self) -> io::Result<()> {
        fs::rename(&self.partial, &self.path)?;
        // Of two names of one file, the old one is still there (rename(2)).
        self.remove_partial();
        self.path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    }
}

/// Pauses a VM's guest and saves it. QEMU stays, and the guest can be resumed in it by
/// [`state_stream::undo_hand_over`], also after an error.
///
/// # Errors
/// The file cannot be written, or QEMU does not give its device state.
pub(crate) async fn save(
    vm: &Arc<Vm>,
    file: &SavedFile,
    progress: &Arc<Progress>,
) -> Result<WrittenGuest, ApiError> {
    let failed = |error: &SavedError| unusable("suspend", &vm.name, file, error);
    let partial =
        file.create().map_err(|source| failed(&SavedError::Io { what: "create", source }))?;
    let qmp = &vm.process.qmp;
    let of_qemu =
        |what: &str, error: &dyn std::fmt::Display| qemu_failed("suspend", vm, what, error);
    state_stream::set_up(qmp, true).await.map_err(|error| of_qemu("prepare QEMU", &error))?;
    let (ours, theirs) = UnixStream::pair().map_err(|error| of_qemu("create a socket", &error))?;
    let mut events = qmp.events();
    qmp.getfd(STREAM, theirs.as_fd()).await.map_err(|error| of_qemu("pass the stream", &error))?;
    drop(theirs);
    // Memory outside the shared blocks comes before the guest stops.
    let state = tokio::task::spawn_blocking(move || read_device_state(&ours));
    qmp.migrate(&format!("fd:{STREAM}"))
        .await
        .map_err(|error| of_qemu("stop the guest", &error))?;
    let until = MigrationStatus::PreSwitchover;
    reached(qmp, &mut events, &until).await.map_err(|why| of_qemu("stop the guest", &why))?;
    let (regions, work) = (vm.regions(), progress.clone());
    let memory = tokio::task::spawn_blocking(move || {
        GuestWriter::save_memory(partial, &regions, threads(), &work)
    });
    let writer =
        memory.await.map_err(|error| task_failed(&error))?.map_err(|error| failed(&error))?;
    qmp.migrate_continue(&until).await.map_err(|error| of_qemu("read the devices", &error))?;
    let done = reached(qmp, &mut events, &MigrationStatus::Completed).await;
    done.map_err(|why| of_qemu("read the devices", &why))?;
    if qmp.guest_has_shut_down() {
        return Err(of_qemu("suspend", &"the guest has shut itself down"));
    }
    let state = state.await.map_err(|error| task_failed(&error))?;
    let state = state.map_err(|error| of_qemu("read the devices", &error))?;
    let caption = Caption { format: FORMAT, uuid: vm.spec().uuid, ownership: vm.ownership() };
    let (file, vm) = (file.clone(), vm.clone());
    let finished = tokio::task::spawn_blocking(move || {
        let finish = || {
            let caption = serde_json::to_vec(&caption).map_err(io::Error::from);
            let caption = caption.map_err(|source| SavedError::Io { what: "write", source })?;
            let written = writer.finish(&state, &caption)?;
            file.complete().map_err(|source| SavedError::Io { what: "rename", source })?;
            Ok(written)
        };
        finish().map_err(|error| unusable("suspend", &vm.name, &file, &error))
    });
    finished.await.map_err(|error| task_failed(&error))?
}

/// A saved guest that has been checked against its VM.
#[derive(Debug)]
pub(crate) struct Resumable(SavedGuest);

impl Resumable {
    /// Opens a VM's file. Blocks.
    ///
    /// # Errors
    /// It is missing, damaged, or of another VM.
    pub(crate) fn open(
        file: &SavedFile,
        name: &VmName,
        uuid: Uuid,
        ownership: Ownership,
    ) -> Result<Resumable, ApiError> {
        let open = || {
            let opened = File::open(&file.path);
            let opened = opened.map_err(|source| SavedError::Io { what: "open", source })?;
            let guest = SavedGuest::open(opened)?;
            let caption: Caption = serde_json::from_slice(guest.caption())
                .map_err(|_| SavedError::Damaged("it does not describe a guest"))?;
            if (caption.format, caption.uuid, caption.ownership) != (FORMAT, uuid, ownership) {
                return Err(SavedError::Damaged("it is of another VM, or of another time"));
            }
            Ok(Resumable(guest))
        };
        open().map_err(|error| unusable("resume", name, file, &error))
    }

    /// Returns the bytes of the guest's memory that are not zero.
    pub(crate) fn content_bytes(&self) -> u64 {
        self.0.content_bytes()
    }

    /// Loads memory and device state into a VM that was started for it.
    ///
    /// # Errors
    /// The file is damaged, or QEMU refuses the device state. The VM's process is then of no use.
    pub(crate) async fn load(
        self,
        vm: &Arc<Vm>,
        file: &SavedFile,
        progress: &Arc<Progress>,
    ) -> Result<(), ApiError> {
        let qmp = &vm.process.qmp;
        let of_qemu =
            |what: &str, error: &dyn std::fmt::Display| qemu_failed("resume", vm, what, error);
        state_stream::set_up(qmp, false).await.map_err(|error| of_qemu("prepare QEMU", &error))?;
        let (ours, theirs) =
            UnixStream::pair().map_err(|error| of_qemu("create a socket", &error))?;
        let limit = ours.set_write_timeout(Some(LOAD_LIMIT));
        limit.map_err(|error| of_qemu("create a socket", &error))?;
        let mut events = qmp.events();
        qmp.getfd(STREAM, theirs.as_fd())
            .await
            .map_err(|error| of_qemu("pass the stream", &error))?;
        qmp.migrate_incoming(&format!("fd:{STREAM}"))
            .await
            .map_err(|error| of_qemu("open the stream", &error))?;
        let (regions, progress) = (vm.regions(), progress.clone());
        let loading = tokio::task::spawn_blocking(move || {
            self.0.load_memory(&regions, threads(), &progress)?;
            let written = (&ours).write_all(self.0.device_state());
            written.map_err(|source| SavedError::Io { what: "pass the device state", source })
        });
        let loaded = loading.await.map_err(|error| task_failed(&error))?;
        loaded.map_err(|error| unusable("resume", &vm.name, file, &error))?;
        let loaded = tokio::time::timeout(LOAD_LIMIT, state_stream::until_loaded(vm, &mut events));
        match loaded.await {
            Ok(loaded) => loaded.map_err(|why| of_qemu("load the devices", &why)),
            Err(_) => Err(of_qemu("load the devices", &"it takes too long")),
        }?;
        state_stream::reset(qmp).await.map_err(|error| of_qemu("prepare QEMU", &error))
    }
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "cannot remove the file");
        }
        _ => {}
    }
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS)
}

/// Reads QEMU's stream up to its end, and at most as much as a valid device state has.
fn read_device_state(stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut state = Vec::new();
    let read = stream.take(MOST_DEVICE_STATE_BYTES + 1).read_to_end(&mut state)?;
    match read as u64 > MOST_DEVICE_STATE_BYTES {
        false => Ok(state),
        true => Err(io::Error::other("the device state is too long")),
    }
}

/// Waits until QEMU's migration has the status.
async fn reached(
    qmp: &Qmp,
    events: &mut broadcast::Receiver<QmpEvent>,
    wanted: &MigrationStatus,
) -> Result<(), String> {
    let wait = async {
        loop {
            let status = tokio::select! {
                event = events.recv() => match event {
                    Ok(event) => MigrationStatus::of_event(&event),
                    // Events were missed.
                    Err(_) => qmp.query_migrate().await.map_err(|error| error.to_string())?.status,
                },
                why = qmp.closed() => return Err(why),
            };
            match status {
                Some(status) if status == *wanted => return Ok(()),
                Some(status @ (MigrationStatus::Failed | MigrationStatus::Cancelled)) => {
                    return Err(format!("its migration is {status}"));
                }
                _ => {}
            }
        }
    };
    let limit = STATE_LIMIT.as_secs();
    tokio::time::timeout(STATE_LIMIT, wait)
        .await
        .unwrap_or_else(|_| Err(format!("it takes longer than {limit} s")))
}

fn unusable(verb: &str, name: &VmName, file: &SavedFile, error: &SavedError) -> ApiError {
    let message = format!("cannot {verb} VM \"{name}\": {}: {error}", file.path.display());
    let remedy = match error {
        SavedError::Io { .. } if verb == "suspend" => {
            "free space there, or set suspend_dir in the agent's configuration"
        }
        SavedError::Io { .. } | SavedError::Damaged(_) | SavedError::OtherMemory => {
            "restore the file; or give the guest's memory up with `godwit vm stop --force`, and \
             start the VM"
        }
        SavedError::Ram(_) | SavedError::Cancelled => "see the agent's log, then retry",
    };
    ApiError::new(ErrorCode::HostFailed, message, remedy)
}

fn qemu_failed(verb: &str, vm: &Vm, what: &str, error: &dyn std::fmt::Display) -> ApiError {
    let words = vm.files.last_words();
    let words = words.map_or(String::new(), |words| format!(" (last log lines: {words})"));
    ApiError::new(
        ErrorCode::HypervisorFailed,
        format!("cannot {verb} VM \"{}\": cannot {what}: QEMU: {error}{words}", vm.name),
        "see its log with `godwit vm logs --qemu`",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_by_that_of_a_snapshot_in_one_step() {
        let dir = tempfile::tempdir().unwrap();
        let saved = SavedFile::of(dir.path(), &VmName::new("web").unwrap());
        let snapshot = SavedFile::of_snapshot(dir.path(), Uuid::from_u128(1));
        fs::write(&saved.path, "now").unwrap();
        fs::write(&saved.partial, "left").unwrap();
        snapshot.stage_as(&saved).unwrap_err();
        fs::write(&snapshot.path, "then").unwrap();
        snapshot.stage_as(&saved).unwrap();
        assert_eq!(fs::read_to_string(&saved.path).unwrap(), "now");
        saved.complete().unwrap();
        // Again, while the VM has the snapshot's own file.
        snapshot.stage_as(&saved).unwrap();
        saved.complete().unwrap();
        assert_eq!(fs::read_to_string(&saved.path).unwrap(), "then");
        assert!(!saved.partial.exists());
        saved.remove();
        assert!(snapshot.exists() && !saved.is_left());
    }
}
