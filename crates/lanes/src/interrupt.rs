//! Ends from outside what takes its time: connecting and shaking hands, which otherwise block until their limits.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_pki::Identity;
use rustix::net::Shutdown;

use crate::socket::connect_with;
use crate::{Carries, Lane, LaneError, Stream};

/// Ends the set-up of streams that are watched by it, from any thread and for good.
#[derive(Debug, Default)]
pub struct Interrupt {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    over: bool,
    /// Sockets of streams that are being set up.
    sockets: BTreeMap<u64, OwnedFd>,
    next: u64,
}

impl Interrupt {
    /// Whoever connects or shakes hands under it fails at once, also those who begin only now.
    pub fn end(&self) {
        let mut state = self.lock();
        state.over = true;
        state.sockets.values().for_each(shut);
    }

    /// Whether it has been ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Connects a stream of a lane within `limit`.
    ///
    /// # Errors
    /// [`LaneError::Connect`], also where this has been ended.
    pub fn connect(&self, lane: Lane, limit: Duration, carries: Carries) -> Result<Stream, LaneError> {
        connect_with(lane, limit, Some(self), carries, |_| Ok(()))
    }

    /// [`Stream::secure`].
    ///
    /// # Errors
    /// [`LaneError::Handshake`] with the reason; [`LaneError::Io`] where this has been ended.
    pub fn secure(&self, stream: Stream, identity: &Identity, host: &str) -> Result<Stream, LaneError> {
        let _watched = self.watch(stream.socket())?;
        stream.secure(identity, host)
    }

    /// The socket is shut down when this is ended, as long as the result lives.
    pub(crate) fn watch(&self, socket: impl AsFd) -> io::Result<Watched<'_>> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        let mut state = self.lock();
        if state.over {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let number = state.next;
        state.next += 1;
        state.sockets.insert(number, socket);
        Ok(Watched { interrupt: self, number })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under it panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes whoever waits for the socket; one that is being connected is so no more.
fn shut(socket: &OwnedFd) {
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

/// A socket that an [`Interrupt`] looks after.
#[derive(Debug)]
pub(crate) struct Watched<'a> {
    interrupt: &'a Interrupt,
    number: u64,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.interrupt.lock().sockets.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

    use godwit_pki::{Authority, Grant, Role};
    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    /// So long that a test which waits for it hangs.
    const LIMIT: Duration = Duration::from_secs(3600);

    /// Whatever was begun before, or is begun after.
    fn interrupted(set_up: impl Fn(&Interrupt) -> Result<Stream, LaneError> + Sync) {
        let interrupt = Interrupt::default();
        std::thread::scope(|scope| {
            let setting_up = scope.spawn(|| set_up(&interrupt));
            while interrupt.lock().sockets.is_empty() {
                std::thread::yield_now();
            }
            interrupt.end();
            setting_up.join().unwrap().unwrap_err();
        });
        assert!(interrupt.is_over() && interrupt.lock().sockets.is_empty());
        set_up(&interrupt).unwrap_err();
    }

    #[test]
    fn who_connects_to_nobody_returns_at_once() {
        // One connection is all that it keeps for later: the kernel answers no other.
        let full = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&full, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let full = TcpListener::from(full);
        let to = full.local_addr().unwrap();
        let _first = TcpStream::connect(to).unwrap();
        interrupted(|interrupt| interrupt.connect(Lane { from: None, to }, LIMIT, Carries::Pages));
    }

    #[test]
    fn who_shakes_hands_with_nobody_returns_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(folder.path(), "test", 1).unwrap();
        let grant = Grant { name: "a".to_owned(), role: Role::Host, addresses: Vec::new(), days: 1 };
        let issued = authority.issue(&grant).unwrap();
        let identity = Identity::load(&authority.certificate(), &issued.certificate, &issued.key).unwrap();
        let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let lane = Lane { from: None, to: silent.local_addr().unwrap() };
        interrupted(|interrupt| interrupt.secure(crate::connect(lane, LIMIT)?, &identity, "b"));
    }
}
