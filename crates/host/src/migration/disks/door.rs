//! Connections to the exports of a VM's QEMU.
//!
//! A QEMU that does not survive their end exports nothing: see [`Qmp::export_is_unsound`].

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

use super::wires::Wires;
use crate::store::DiskTransferNote;
use crate::vm::Vm;

/// Longest time for QEMU to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Interval at which a wait for an answer looks whether the transfer is to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Most connections to a QEMU.
const MOST_CONNECTIONS: u32 = 512;

/// Access to the exports.
#[derive(Clone)]
pub(super) struct Door {
    host: String,
    socket: PathBuf,
    wires: Arc<Wires>,
    /// Connections for reads, with their disks, that no stream uses at the moment.
    idle: Arc<Mutex<Vec<(usize, Connection)>>>,
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
        Ok(Door { host: host.to_owned(), socket, wires: Arc::clone(wires), idle: Arc::default() })
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
        self.idle.lock().push((disk, connection));
    }

    pub(super) fn failed(&self, verb: &str, export: &str, why: &NbdError) -> Failure {
        if self.wires.is_over() {
            return Failure::new(FailureCode::Cancelled, "the transfer of the disks was ended");
        }
        disk_failure(&self.host, &format!("cannot {verb} {export}: {why}"))
    }
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
    match qmp.start_nbd(listener.as_fd(), MOST_CONNECTIONS).await {
        Ok(true) => Ok(()),
        Ok(false) => Err("its NBD server listens on a socket that is gone".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// A connection whose calls end when the transfer does.
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
            let mut idle = door.idle.lock();
            let place = idle.iter().position(|(of, _)| *of == disk);
            place.map(|place| idle.swap_remove(place).1)
        };
        let mut connection = match idle {
            Some(connection) => connection,
            None => door.connect(&name, &[], None)?,
        };
        connection.stream_mut().begin();
        connection.read_at(at, buffer).map_err(|error| door.failed("read", &name, &error))?;
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
    fn a_wait_ends_with_the_transfer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
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
    }
}
