//! Interruption of slow set-up steps from outside: connecting and TLS handshakes, which otherwise
//! block until their time limits.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use parking_lot::{Mutex, MutexGuard};
use rustix::net::Shutdown;

/// Ends the set-up of the streams that it watches, from any thread and permanently.
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
    /// Interrupts: all connects and handshakes under it fail at once, also those that begin later.
    pub fn end(&self) {
        let mut state = self.lock();
        state.over = true;
        state.sockets.values().for_each(shut);
    }

    /// Returns whether [`Interrupt::end`] was called.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Watches a socket while the result lives: an interruption shuts it down.
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
        self.state.lock()
    }
}

/// Shuts the socket down, which wakes threads that wait for it and ends an attempt to connect.
fn shut(socket: &OwnedFd) {
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

/// Socket under the watch of an [`Interrupt`].
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

    use std::time::Duration;

    use godwit_pki::{Authority, Grant, Identity, Role};
    use godwit_types::Lane;
    use rustix::net::{AddressFamily, SocketType};

    use super::*;
    use crate::{Carries, LaneError, Stream};

    /// So long that a test that waits for it hangs.
    const LIMIT: Duration = Duration::from_secs(3600);

    /// Checks an interruption of set-ups begun before it and after it.
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
    fn connecting_to_no_listener_returns_at_once() {
        // It queues one connection for later; the kernel answers no other.
        let full = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&full, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let full = TcpListener::from(full);
        let to = full.local_addr().unwrap();
        let _first = TcpStream::connect(to).unwrap();
        interrupted(|interrupt| interrupt.connect(Lane { from: None, to }, LIMIT, Carries::Pages));
    }

    #[test]
    fn a_handshake_with_no_listener_returns_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(folder.path(), "test", 1).unwrap();
        let grant =
            Grant { name: "a".to_owned(), role: Role::Host, addresses: Vec::new(), days: 1 };
        let issued = authority.issue(&grant).unwrap();
        let identity =
            Identity::load(&authority.certificate(), &issued.certificate, &issued.key).unwrap();
        let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let lane = Lane { from: None, to: silent.local_addr().unwrap() };
        interrupted(|interrupt| interrupt.secure(crate::connect(lane, LIMIT)?, &identity, "b"));
    }
}
