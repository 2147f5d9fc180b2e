//! Connections to the exports of a VM's QEMU.
//!
//! **A connection must not end while its export exists.** If the disk has a thread of its own, QEMU
//! handles the end in that thread, where an assertion ends QEMU and its guest (7.2:
//! `nbd_blockdev_client_closed`; 9.0 handles it in the main thread). The removal of an export ends
//! its connections in the main thread in every version. So:
//! - QEMU gets a duplicate of this end of each connection before the handshake, and keeps it until
//!   the export is removed. Whatever closes this end, the agent's death included, the connection
//!   stays. Nothing shuts one down.
//! - No answer is longer than the buffer of a socket. One that nobody reads any more would be a
//!   request without an end, for which QEMU waits whenever it drains the disk.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_migration::Failure;
use godwit_migration::disks::DiskReader;
use godwit_nbd::{NbdError, NbdExport};
use godwit_qemu::Qmp;
use godwit_types::FailureCode;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::wires::Wires;
use crate::store::DiskTransferNote;
use crate::vm::Vm;

/// Longest time for QEMU to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Interval at which a wait for an answer looks whether the transfer is to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes that are read at once: with its head, the answer fits into the buffer of a socket.
const READ_BYTES: usize = 64 << 10;
/// Most connections to a QEMU.
const MOST_CONNECTIONS: usize = 256;

/// Access to the exports.
#[derive(Clone)]
pub(super) struct Door {
    host: String,
    vm: Arc<Vm>,
    runtime: Handle,
    socket: PathBuf,
    wires: Arc<Wires>,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    /// For each number of a descriptor that QEMU keeps: the export that its connection uses.
    kept: Vec<Option<String>>,
    /// Connections for reads, with their disks, that no stream uses at the moment.
    idle: Vec<(usize, Connection)>,
}

/// A connection to an export.
pub(super) type Connection = NbdExport<Patient>;

impl Door {
    /// Has QEMU serve NBD, unless it does so already.
    ///
    /// # Errors
    /// The reason, in words.
    pub(super) async fn open(host: &str, vm: &Arc<Vm>, wires: &Arc<Wires>) -> Result<Door, String> {
        let socket = vm.files.disks_socket();
        serve(&vm.process.qmp, &socket).await?;
        Ok(Door {
            host: host.to_owned(),
            vm: Arc::clone(vm),
            runtime: Handle::current(),
            socket,
            wires: Arc::clone(wires),
            shared: Arc::default(),
        })
    }

    /// Connects to an export, with the contexts that are asked for. Blocks.
    pub(super) fn connect(
        &self,
        name: &str,
        contexts: &[&str],
        bytes: Option<u64>,
    ) -> Result<Connection, Failure> {
        let connected = UnixStream::connect(&self.socket).and_then(|stream| {
            stream.set_read_timeout(Some(LOOK_INTERVAL))?;
            stream.set_write_timeout(Some(LOOK_INTERVAL))?;
            Ok(stream)
        });
        let stream = connected.map_err(|error| self.failed("open", name, &error.into()))?;
        let number = self.shared.lock().take_number(name).ok_or_else(|| {
            disk_failure(&self.host, "QEMU keeps too many connections for its disks")
        })?;
        let kept_as = descriptor(number);
        let kept = self.vm.process.qmp.getfd(&kept_as, stream.as_fd());
        self.runtime.block_on(kept).map_err(|error| {
            crate::state_stream::qemu_failure(&self.host, "pass a connection", &error)
        })?;
        let stream = Patient::new(stream, Arc::clone(&self.wires));
        let opened = match contexts {
            [] => NbdExport::open(stream, name),
            contexts => NbdExport::open_with(stream, name, contexts),
        };
        let export = opened.map_err(|error| self.failed("open", name, &error))?;
        if bytes.is_some_and(|bytes| export.bytes() != bytes) {
            let now = export.bytes();
            return Err(disk_failure(&self.host, &format!("a disk has {now} bytes now")));
        }
        Ok(export)
    }

    /// Takes a connection back that can read a disk.
    pub(super) fn put_back(&self, disk: usize, connection: Connection) {
        self.shared.lock().idle.push((disk, connection));
    }

    /// Closes what QEMU keeps for the connections to exports that are removed: those of this name,
    /// or all.
    pub(super) fn release(&self, name: Option<fn(usize) -> String>) {
        let numbers = {
            let mut shared = self.shared.lock();
            if name.is_none() {
                shared.idle.clear();
            }
            shared.free_numbers(name)
        };
        for number in numbers {
            let kept_as = descriptor(number);
            let closing = self.vm.process.qmp.closefd(&kept_as);
            if let Err(error) = self.runtime.block_on(closing) {
                let vm = self.vm.name.as_str();
                tracing::debug!(vm, %error, "QEMU keeps a descriptor");
            }
        }
    }

    pub(super) fn failed(&self, verb: &str, export: &str, why: &NbdError) -> Failure {
        if self.wires.is_over() {
            return Failure::new(FailureCode::Cancelled, "the transfer of the disks was ended");
        }
        disk_failure(&self.host, &format!("cannot {verb} {export}: {why}"))
    }
}

impl Shared {
    /// Takes the lowest number that is free.
    fn take_number(&mut self, export: &str) -> Option<usize> {
        let number = self.kept.iter().position(Option::is_none).unwrap_or(self.kept.len());
        if number == MOST_CONNECTIONS {
            return None;
        }
        if number == self.kept.len() {
            self.kept.push(None);
        }
        self.kept[number] = Some(export.to_owned());
        Some(number)
    }

    /// Frees the numbers of an export of each disk, or all; returns them.
    fn free_numbers(&mut self, name: Option<fn(usize) -> String>) -> Vec<usize> {
        let is_meant = |export: &str| match name {
            Some(name) => (0..godwit_api::MOST_TRAVELLING_DISKS).any(|disk| name(disk) == export),
            None => true,
        };
        let mut freed = Vec::new();
        for (number, kept) in self.kept.iter_mut().enumerate() {
            if kept.as_deref().is_some_and(is_meant) {
                *kept = None;
                freed.push(number);
            }
        }
        freed
    }
}

/// Returns the name of a descriptor that QEMU keeps.
fn descriptor(number: usize) -> String {
    format!("godwit-nbd-{number}")
}

/// Has QEMU serve NBD on a socket, unless it does so already.
async fn serve(qmp: &Qmp, socket: &Path) -> Result<(), String> {
    if UnixStream::connect(socket).is_ok() {
        return Ok(());
    }
    let failed = |error: io::Error| format!("{}: {error}", socket.display());
    if let Err(error) = std::fs::remove_file(socket)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(failed(error));
    }
    let listener = UnixListener::bind(socket).map_err(failed)?;
    let most = u32::try_from(2 * MOST_CONNECTIONS).unwrap_or(u32::MAX);
    match qmp.start_nbd(listener.as_fd(), most).await {
        Ok(true) => Ok(()),
        Ok(false) => Err("its NBD server listens on a socket that is gone".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// A connection whose calls end when the transfer does. It is never shut down.
#[derive(Debug)]
pub(super) struct Patient {
    stream: UnixStream,
    wires: Arc<Wires>,
    until: Instant,
}

impl Patient {
    fn new(stream: UnixStream, wires: Arc<Wires>) -> Patient {
        Patient { stream, wires, until: Instant::now() + ANSWER_LIMIT }
    }

    /// Begins the time limit of another answer.
    pub(super) fn begin(&mut self) {
        self.until = Instant::now() + ANSWER_LIMIT;
    }

    /// Repeats a call until it is not for want of time that it fails.
    fn wait<T>(&self, mut call: impl FnMut(&UnixStream) -> io::Result<T>) -> io::Result<T> {
        loop {
            if self.wires.is_over() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            match call(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            if Instant::now() >= self.until {
                let why = format!("QEMU has not answered in {} s", ANSWER_LIMIT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
    }
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait(|mut stream| stream.read(buffer))
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads the disks for one stream. Streams share what connections there are.
pub(super) struct ExportReader(pub(super) Door);

impl DiskReader for ExportReader {
    fn read_at(&mut self, disk: usize, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        let (door, name) = (&self.0, DiskTransferNote::export(disk));
        let idle = {
            let mut shared = door.shared.lock();
            let place = shared.idle.iter().position(|(of, _)| *of == disk);
            place.map(|place| shared.idle.swap_remove(place).1)
        };
        let mut connection = match idle {
            Some(connection) => connection,
            None => door.connect(&name, &[], None)?,
        };
        let mut at = at;
        for part in buffer.chunks_mut(READ_BYTES) {
            connection.stream_mut().begin();
            connection.read_at(at, part).map_err(|error| door.failed("read", &name, &error))?;
            at = at.saturating_add(part.len() as u64);
        }
        door.put_back(disk, connection);
        Ok(())
    }
}

pub(super) fn disk_failure(host: &str, why: &str) -> Failure {
    Failure::new(FailureCode::DiskFailed, format!("host {host}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_free_again_when_its_export_is_removed() {
        let mut shared = Shared::default();
        let (read, dirty) = (DiskTransferNote::export, DiskTransferNote::dirty_export);
        for name in [read(0), dirty(0), read(1), dirty(1)] {
            assert!(shared.take_number(&name).is_some());
        }
        assert_eq!(shared.free_numbers(Some(dirty)), [1, 3]);
        assert_eq!(shared.take_number(&dirty(0)), Some(1));
        assert_eq!(shared.free_numbers(None), [0, 1, 2]);
        for number in 0..MOST_CONNECTIONS {
            assert_eq!(shared.take_number(&read(0)), Some(number));
        }
        assert_eq!(shared.take_number(&read(0)), None);
    }

    #[test]
    fn a_wait_ends_with_the_transfer_and_leaves_the_connection_open() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let kept = ours.try_clone().unwrap();
        let wires = Arc::new(Wires::default());
        let mut patient = Patient::new(ours, Arc::clone(&wires));
        theirs.write_all(&[7]).unwrap();
        let mut byte = [0];
        patient.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [7]);
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| patient.read(&mut [0]).map_err(|error| error.kind()));
            wires.end();
            assert_eq!(reading.join().unwrap(), Err(io::ErrorKind::ConnectionAborted));
        });
        drop(patient);
        // No end is seen at the other side.
        theirs.set_nonblocking(true).unwrap();
        assert_eq!(theirs.read(&mut byte).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(kept);
        assert_eq!(theirs.read(&mut byte).unwrap(), 0);
    }
}
