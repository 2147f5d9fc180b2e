//! Sockets that a transfer of disks blocks on, and how its calls are ended from outside: a guest
//! that is to be resumed waits for none of them.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_lanes::{Interrupt, Stream};
use parking_lot::{Condvar, Mutex};

/// The sockets of one transfer. Once ended, nothing on them succeeds any more.
#[derive(Debug, Default)]
pub(super) struct Wires {
    state: Mutex<State>,
    ended: Condvar,
    /// Set when the transfer is to end.
    pub(super) is_over: AtomicBool,
    /// Ends connects and handshakes of streams.
    pub(super) connecting: Interrupt,
}

#[derive(Debug, Default)]
struct State {
    /// Connections to QEMU.
    sockets: BTreeMap<u64, UnixStream>,
    next: u64,
    /// Streams to the destination.
    streams: Vec<Stream>,
}

impl Wires {
    /// Ends every call on the sockets, permanently.
    pub(super) fn end(&self) {
        self.connecting.end();
        let state = self.state.lock();
        self.is_over.store(true, Ordering::SeqCst);
        for socket in state.sockets.values() {
            // A peer that is gone has ended it already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        state.streams.iter().for_each(Stream::close);
        self.ended.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Waits until the transfer is to end, or for this long.
    pub(super) fn wait(&self, limit: Duration) {
        let mut state = self.state.lock();
        if !self.is_over() {
            self.ended.wait_for(&mut state, limit);
        }
    }

    /// Adds a stream to the destination.
    pub(super) fn add(&self, stream: &Stream) {
        let mut state = self.state.lock();
        if self.is_over() {
            stream.close();
        }
        state.streams.push(stream.clone());
    }

    /// Forgets the streams of a connection that was cut.
    pub(super) fn forget_streams(&self) {
        let streams = std::mem::take(&mut self.state.lock().streams);
        streams.iter().for_each(Stream::close);
    }

    /// Watches a connection to QEMU until the result is dropped.
    pub(super) fn watch(self: &Arc<Self>, socket: &UnixStream) -> io::Result<Watched> {
        let socket = socket.try_clone()?;
        let mut state = self.state.lock();
        if self.is_over() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let number = state.next;
        state.next += 1;
        state.sockets.insert(number, socket);
        Ok(Watched { wires: Arc::clone(self), number })
    }
}

/// Connection to QEMU under the watch of [`Wires`].
#[derive(Debug)]
pub(super) struct Watched {
    wires: Arc<Wires>,
    number: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.wires.state.lock().sockets.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn an_end_wakes_a_reader_and_refuses_what_comes_after_it() {
        let wires = Arc::new(Wires::default());
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let watched = wires.watch(&ours).unwrap();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| ours.read(&mut [0]));
            wires.end();
            assert_eq!(reading.join().unwrap().unwrap(), 0);
        });
        wires.wait(Duration::from_secs(3600));
        wires.watch(&theirs).unwrap_err();
        drop(watched);
        assert!(wires.is_over() && wires.state.lock().sockets.is_empty());
    }
}
