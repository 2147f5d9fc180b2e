//! Paths between two ends that carry less than what they are given, or something else.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;

use godwit_lanes::listen;
use godwit_types::Lane;
use godwit_wire::HEADER_LEN;

use super::world::loopback;

/// Length of the first frame of a stream.
const HELLO_BYTES: usize = HEADER_LEN + 30;
/// Length of its answer.
const WELCOME_BYTES: usize = HEADER_LEN + 2;

/// Returns a listener and the lane that leads to it.
pub(crate) fn path(address: SocketAddr) -> (TcpListener, Lane) {
    let listener = listen(address).unwrap();
    let to = listener.local_addr().unwrap();
    (listener, Lane { from: None, to })
}

/// Returns a lane whose connections are never answered while the sockets live.
pub(crate) fn unanswering() -> (TcpListener, TcpStream, Lane) {
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
    // It queues one connection for later; the kernel answers no other.
    let full = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&full, &loopback()).unwrap();
    listen(&full, 0).unwrap();
    let full = TcpListener::from(full);
    let to = full.local_addr().unwrap();
    (full, TcpStream::connect(to).unwrap(), Lane { from: None, to })
}

/// Returns a path that carries a hello and then nothing more; it carries all answers. The sockets
/// stay open.
pub(crate) fn stalling_lane<'scope>(
    scope: &'scope Scope<'scope, '_>,
    to: SocketAddr,
    keep: &mut Vec<TcpStream>,
    has_work: &Arc<AtomicBool>,
) -> Lane {
    let (listener, lane) = path(loopback());
    let far = TcpStream::connect(to).unwrap();
    keep.push(far.try_clone().unwrap());
    let has_work = Arc::clone(has_work);
    scope.spawn(move || {
        let (near, _) = listener.accept().unwrap();
        let mut hello = [0; HELLO_BYTES];
        (&near).read_exact(&mut hello).unwrap();
        (&far).write_all(&hello).unwrap();
        let answers = near.try_clone().unwrap();
        scope.spawn(move || {
            // What comes after the hello stays unread.
            let _ = answers.peek(&mut [0]);
            has_work.store(true, Ordering::SeqCst);
        });
        // Until the destination closes it.
        let _ = std::io::copy(&mut &far, &mut &near);
    });
    lane
}

/// Byte that changes: one of those that one end of a stream sends after its first frame.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Corrupted {
    /// To the destination, on the first data stream.
    Data(usize),
    /// To the destination, on the first stream for requested pages.
    Request(usize),
    /// To the destination, on the first stream for unrequested pages: this byte of what arrives
    /// once the guest runs.
    Unasked(usize),
    /// To the destination, on the control stream.
    Control(usize),
    /// To the source, on the control stream.
    Answer(usize),
}

/// Change of one byte in transit, once.
pub(crate) struct Corruption {
    what: Option<Corrupted>,
    /// Whether a stream uses the path on which the byte changes.
    begun: AtomicBool,
    /// Whether the stream for requested pages exists: streams that follow belong to page-in.
    requested: AtomicBool,
    /// Whether the byte has changed.
    done: Arc<AtomicBool>,
    /// Whether the guest runs at the destination.
    runs: Arc<AtomicBool>,
}

impl Corruption {
    pub(crate) fn new(what: Option<Corrupted>, runs: &Arc<AtomicBool>) -> Corruption {
        let done = Arc::default();
        let (begun, requested) = (AtomicBool::new(false), AtomicBool::new(false));
        Corruption { what, begun, requested, done, runs: Arc::clone(runs) }
    }

    /// Returns the path of the control stream.
    pub(crate) fn control_lane<'scope>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        lane: Lane,
    ) -> Lane {
        match self.what {
            Some(Corrupted::Control(byte)) => {
                self.relay(scope, lane, HELLO_BYTES + byte, usize::MAX)
            }
            Some(Corrupted::Answer(byte)) => {
                self.relay(scope, lane, usize::MAX, WELCOME_BYTES + byte)
            }
            _ => lane,
        }
    }

    /// Returns the path of another stream.
    pub(crate) fn lane<'scope>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        lane: Lane,
        is_request: bool,
    ) -> Lane {
        let page_in = self.requested.fetch_or(is_request, Ordering::SeqCst) || is_request;
        let byte = match self.what {
            Some(Corrupted::Request(byte)) if is_request => byte,
            Some(Corrupted::Unasked(byte)) if page_in && !is_request => byte,
            Some(Corrupted::Data(byte)) => byte,
            _ => return lane,
        };
        if self.begun.swap(true, Ordering::SeqCst) {
            // The other streams would do its work.
            while !page_in && !self.done.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            return lane;
        }
        let first = if matches!(self.what, Some(Corrupted::Unasked(_))) { 0 } else { HELLO_BYTES };
        self.relay(scope, lane, first + byte, usize::MAX)
    }

    /// Returns a path that changes these bytes of what one connection carries in each direction.
    fn relay<'scope>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        to: Lane,
        there: usize,
        back: usize,
    ) -> Lane {
        let (listener, lane) = path(loopback());
        let far = TcpStream::connect(to.to).unwrap();
        let (done, runs) = (Arc::clone(&self.done), Arc::clone(&self.runs));
        let early = !matches!(self.what, Some(Corrupted::Unasked(_)));
        scope.spawn(move || {
            let (near, _) = listener.accept().unwrap();
            let counts = || early || runs.load(Ordering::SeqCst);
            std::thread::scope(|scope| {
                scope.spawn(|| carry(&near, &far, there, &counts, &done));
                carry(&far, &near, back, &counts, &done);
            });
        });
        lane
    }
}

/// Carries bytes until the end of the stream, and changes one of those that count.
fn carry(
    mut from: &TcpStream,
    mut to: &TcpStream,
    changed: usize,
    counts: &dyn Fn() -> bool,
    done: &AtomicBool,
) {
    let (mut buffer, mut at) = (vec![0; 64 << 10], 0);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if counts() {
            if let Some(byte) =
                changed.checked_sub(at).and_then(|place| buffer[..read].get_mut(place))
            {
                *byte ^= 0x10;
                done.store(true, Ordering::SeqCst);
            }
            at += read;
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
}
