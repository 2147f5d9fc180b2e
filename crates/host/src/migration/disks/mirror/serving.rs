//! The agent's NBD server for the mirrors of one VM's QEMU: a thread that accepts, and one for each
//! mirror. They end with the transfer, or when QEMU closes its connections.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use godwit_nbd::{NbdError, NbdRequest, NbdServer};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::pending::Pending;
use super::written::Content;

/// Interval at which a wait for QEMU looks whether the transfer is to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Whether the transfer is to end.
pub(super) type IsOver = Arc<dyn Fn() -> bool + Send + Sync>;

/// What the threads share.
pub(super) struct Serving {
    /// Name and size of each export.
    exports: Vec<(String, u64)>,
    pending: Arc<Pending>,
    is_over: IsOver,
    /// Exports that were opened: the order of writes is that of one connection.
    opened: Mutex<Vec<usize>>,
}

impl Serving {
    /// Starts to serve on a socket: one connection for each export.
    ///
    /// # Errors
    /// There is no thread to spare.
    pub(super) fn start(
        listener: UnixListener,
        exports: Vec<(String, u64)>,
        pending: &Arc<Pending>,
        is_over: IsOver,
    ) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let serving = Arc::new(Serving {
            exports,
            pending: Arc::clone(pending),
            is_over,
            opened: Mutex::default(),
        });
        let thread = std::thread::Builder::new().name("mirrors".to_owned());
        thread.spawn(move || serving.accept(&listener)).map(drop)
    }

    fn accept(self: &Arc<Serving>, listener: &UnixListener) {
        let limit = Timespec::try_from(LOOK_INTERVAL).unwrap_or_default();
        for _ in 0..self.exports.len() {
            let stream = loop {
                if (self.is_over)() {
                    return;
                }
                match listener.accept() {
                    Ok((stream, _)) => break stream,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit));
                    }
                    Err(error) => {
                        let why = format!("cannot accept the connection of a mirror: {error}");
                        return self.pending.break_off(why);
                    }
                }
            };
            let serving = Arc::clone(self);
            let thread = std::thread::Builder::new().name("mirror".to_owned());
            let begun = thread.spawn(move || serving.serve(stream));
            if let Err(error) = begun {
                return self.pending.break_off(format!("cannot start a thread: {error}"));
            }
        }
    }

    /// Serves a mirror until its end. An end that nobody has ordered is that of the transfer.
    fn serve(&self, stream: UnixStream) {
        let _ended = Panicked(&self.pending);
        match self.take_writes(stream) {
            Ok(()) => tracing::debug!("a mirror has disconnected"),
            Err(_) if (self.is_over)() => {}
            Err(error) => {
                self.pending.break_off(format!("the connection of a mirror has ended: {error}"));
            }
        }
    }

    fn take_writes(&self, stream: UnixStream) -> Result<(), NbdError> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LOOK_INTERVAL))?;
        stream.set_write_timeout(Some(LOOK_INTERVAL))?;
        let stream = UntilOver { stream, is_over: Arc::clone(&self.is_over) };
        let mut server = NbdServer::accept(stream, &self.exports)?;
        let disk = server.export();
        {
            let mut opened = self.opened.lock();
            if opened.contains(&disk) {
                return Err(NbdError::Protocol("two connections for one disk"));
            }
            opened.push(disk);
        }
        while let Some((cookie, request)) = server.next_request()? {
            let is_done = match request {
                NbdRequest::Write { at, bytes } => {
                    self.pending.write(disk, at, Content::Bytes(bytes))
                }
                NbdRequest::Zeros { at, bytes } => {
                    self.pending.write(disk, at, Content::Zeros(bytes))
                }
                // The hand-over waits for the destination's disk, not the mirror.
                NbdRequest::Flush => true,
            };
            server.reply(cookie, is_done)?;
        }
        Ok(())
    }
}

/// Ends the rounds when its thread panics: nothing comes from that mirror any more.
struct Panicked<'a>(&'a Pending);

impl Drop for Panicked<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.break_off("the thread of a mirror panicked".to_owned());
        }
    }
}

/// A connection whose calls wait for QEMU until the transfer ends.
struct UntilOver {
    stream: UnixStream,
    is_over: IsOver,
}

impl UntilOver {
    fn wait<T>(&self, mut call: impl FnMut(&UnixStream) -> io::Result<T>) -> io::Result<T> {
        loop {
            if (self.is_over)() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            match call(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}

impl Read for UntilOver {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait(|mut stream| stream.read(buffer))
    }
}

impl Write for UntilOver {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use godwit_migration::disks::DiskRange;
    use godwit_nbd::NbdExport;

    use super::*;

    fn serve(disks: usize) -> (tempfile::TempDir, Arc<Pending>, Arc<AtomicBool>) {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let exports = (0..disks).map(|disk| (format!("disk{disk}"), 1 << 20)).collect();
        let pending = Arc::new(Pending::new(&vec![(1 << 20, false); disks]));
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let is_over = Arc::new(move || is_over.load(Ordering::SeqCst));
        Serving::start(listener, exports, &pending, is_over).unwrap();
        (dir, pending, over)
    }

    fn connect(dir: &tempfile::TempDir, disk: &str) -> Result<NbdExport<UnixStream>, NbdError> {
        NbdExport::open(UnixStream::connect(dir.path().join("socket"))?, disk)
    }

    #[test]
    fn writes_of_all_disks_become_what_is_to_be_sent() {
        let (dir, pending, over) = serve(2);
        let mut second = connect(&dir, "disk1").unwrap();
        let mut first = connect(&dir, "disk0").unwrap();
        first.write_at(4096, b"first").unwrap();
        second.write_at(0, b"second").unwrap();
        second.write_zeroes(2, 2).unwrap();
        second.flush().unwrap();
        let range = |disk, offset, bytes| DiskRange { disk, offset, bytes };
        let ranges = pending.exchange().unwrap();
        assert_eq!(ranges, [range(0, 4096, 5), range(1, 0, 2), range(1, 2, 2), range(1, 4, 2)]);
        let mut read = [9; 6];
        assert!(pending.read(1, 0, &mut read));
        assert_eq!(&read, b"se\0\0nd");
        over.store(true, Ordering::SeqCst);
        assert!(first.write_at(0, b"late").is_err());
        assert_eq!(pending.exchange().unwrap().len(), 4);
    }

    #[test]
    fn a_lost_connection_ends_the_transfer() {
        let (dir, pending, _over) = serve(1);
        let mut only = connect(&dir, "disk0").unwrap();
        only.write_at(0, b"some").unwrap();
        drop(only);
        pending.wait(Duration::from_secs(3600));
        assert!(pending.exchange().unwrap_err().contains("has ended"));
    }

    #[test]
    fn a_disk_has_one_connection() {
        let (dir, pending, _over) = serve(2);
        let _first = connect(&dir, "disk0").unwrap();
        let again = connect(&dir, "disk0");
        pending.wait(Duration::from_secs(3600));
        assert!(pending.exchange().unwrap_err().contains("two connections"));
        drop(again);
    }
}
