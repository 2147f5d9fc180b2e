//! Streams that a transfer of disks blocks on, and how its calls are ended from outside: a guest
//! that is to be resumed waits for none of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_lanes::{Interrupt, Stream};
use parking_lot::{Condvar, Mutex};

/// The streams of one transfer. Once ended, nothing on them succeeds any more. Connections to QEMU
/// look at [`Wires::is_over`] while they wait.
#[derive(Debug, Default)]
pub(super) struct Wires {
    streams: Mutex<Vec<Stream>>,
    ended: Condvar,
    /// Set when the transfer is to end.
    pub(super) is_over: AtomicBool,
    /// Ends connects and handshakes of streams.
    pub(super) connecting: Interrupt,
}

impl Wires {
    /// Ends every call on the streams, permanently.
    pub(super) fn end(&self) {
        self.connecting.end();
        let streams = self.streams.lock();
        self.is_over.store(true, Ordering::SeqCst);
        streams.iter().for_each(Stream::close);
        self.ended.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Waits until the transfer is to end, or for this long.
    pub(super) fn wait(&self, limit: Duration) {
        let mut streams = self.streams.lock();
        if !self.is_over() {
            self.ended.wait_for(&mut streams, limit);
        }
    }

    /// Adds a stream to the destination.
    pub(super) fn add(&self, stream: &Stream) {
        let mut streams = self.streams.lock();
        if self.is_over() {
            stream.close();
        }
        streams.push(stream.clone());
    }

    /// Forgets the streams of a connection that was cut.
    pub(super) fn forget_streams(&self) {
        let streams = std::mem::take(&mut *self.streams.lock());
        streams.iter().for_each(Stream::close);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_wakes_who_waits() {
        let wires = Wires::default();
        assert!(!wires.is_over());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wires.wait(Duration::from_secs(3600)));
            wires.end();
            waiting.join().unwrap();
        });
        wires.wait(Duration::from_secs(3600));
        assert!(wires.is_over() && wires.connecting.is_over());
    }
}
