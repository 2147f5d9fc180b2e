//! Admission of the streams of a migration or a probe. One thread accepts connections, and each
//! handshake runs on its own thread, so that a silent connection delays no other. The number of
//! concurrent handshakes is bounded for all clients together.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode};
use godwit_lanes::{LaneError, Stream, accept};
use godwit_migration::Failure;
use godwit_migration::drive::{WelcomedStream, lane_failure, welcome};
use godwit_pki::Identity;
use godwit_types::FailureCode;
use godwit_wire::MigrationId;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::failure::host_failed;

/// Time for a connection to send its hello.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// Silence that ends an admitted lane.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// Time for which an accept call blocks.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(50);
/// Concurrent handshakes: more than a migration opens at once.
const MOST_HANDSHAKES: usize = 64;
/// Age at which a handshake gives way to the next one when all places are taken.
const GIVE_WAY: Duration = Duration::from_millis(500);

/// Creates a random ID that cannot be guessed.
pub(crate) fn fresh_id() -> Result<MigrationId, ApiError> {
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| host_failed("cannot generate a random ID", &error))?;
    Ok(MigrationId(id))
}

/// Listens on every migration address that the host has at the moment. A missing one (a NIC that
/// was down has lost its IPv6 address) does not prevent migrations over the others.
pub(crate) fn listen(addresses: &[IpAddr]) -> Result<Vec<TcpListener>, ApiError> {
    let mut listeners = Vec::new();
    let mut problem = None;
    for &address in addresses {
        match godwit_lanes::listen(SocketAddr::new(address, 0)) {
            Ok(listener) => listeners.push(listener),
            Err(error) => {
                tracing::warn!(%address, %error, "cannot receive migrations on this address");
                problem = Some(error);
            }
        }
    }
    match problem {
        Some(error) if listeners.is_empty() => {
            let remedy =
                "check that the host has one of the migration_addresses in its configuration";
            Err(ApiError::new(ErrorCode::HostFailed, error.to_string(), remedy))
        }
        _ => Ok(listeners),
    }
}

/// Conditions for admission.
pub(crate) struct Guard {
    pub(crate) id: MigrationId,
    /// The source host.
    pub(crate) from: String,
    /// `None`: this host is insecure.
    pub(crate) identity: Option<Identity>,
    pub(crate) listeners: Vec<TcpListener>,
}

/// Listens for one migration or one probe until it is dropped.
pub(crate) struct Doorman {
    shared: Arc<Shared>,
    welcomed: Mutex<Receiver<WelcomedStream>>,
    /// The listener thread; `None` while it is being ended.
    standing: Option<JoinHandle<()>>,
}

struct Shared {
    guard: Guard,
    patience: Patience,
    state: Mutex<State>,
    /// Notified when a handshake ends, or the doorman does.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    over: bool,
    /// Handshakes in progress, oldest first, with the time of their start.
    shaking: BTreeMap<u64, (Stream, Instant)>,
    next: u64,
}

#[derive(Clone, Copy)]
struct Patience {
    hello: Duration,
    give_way: Duration,
}

impl Doorman {
    /// Begins to listen.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn open(guard: Guard) -> Result<Doorman, ApiError> {
        Doorman::with(guard, Patience { hello: HELLO_LIMIT, give_way: GIVE_WAY })
    }

    fn with(guard: Guard, patience: Patience) -> Result<Doorman, ApiError> {
        let (sender, welcomed) = sync_channel(MOST_HANDSHAKES);
        let shared =
            Arc::new(Shared { guard, patience, state: Mutex::default(), changed: Condvar::new() });
        let door = Arc::clone(&shared);
        let standing = std::thread::Builder::new()
            .name("doorman".to_owned())
            .spawn(move || door.stand(&sender))
            .map_err(|error| host_failed("cannot start a thread", &error))?;
        Ok(Doorman { shared, welcomed: Mutex::new(welcomed), standing: Some(standing) })
    }

    /// Waits a moment for an admitted stream.
    pub(crate) fn let_in(&self) -> Option<WelcomedStream> {
        let welcomed = self.welcomed.lock();
        welcomed.recv_timeout(ACCEPT_INTERVAL).ok()
    }

    /// Ends the doorman; waits until it has stopped listening.
    fn end(mut self) {
        let standing = self.standing.take();
        drop(self);
        if standing.is_some_and(|standing| standing.join().is_err()) {
            tracing::error!("the thread of a doorman panicked");
        }
    }
}

impl Drop for Doorman {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.over = true;
        state.shaking.values().for_each(|(stream, _)| stream.close());
        self.shared.changed.notify_all();
    }
}

/// Holds the doorman of a further lane until its migration takes it. It holds one at a time: if a
/// peer asks for several, the newest stays.
#[derive(Default)]
pub(super) struct NextDoor(Mutex<Next>);

#[derive(Default)]
struct Next {
    door: Option<Doorman>,
    /// The receiver is gone.
    over: bool,
}

impl NextDoor {
    fn lock(&self) -> MutexGuard<'_, Next> {
        self.0.lock()
    }

    /// Opens a doorman in place of one that was never taken, once that one has ended. `None`: the
    /// receiver is gone.
    pub(super) fn replace<T, E>(
        &self,
        open: impl FnOnce() -> Result<(Doorman, T), E>,
    ) -> Result<Option<T>, E> {
        let mut next = self.lock();
        if next.over {
            return Ok(None);
        }
        if let Some(before) = next.door.take() {
            before.end();
        }
        let (door, result) = open()?;
        next.door = Some(door);
        Ok(Some(result))
    }
}

impl fmt::Debug for NextDoor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NextDoor").finish_non_exhaustive()
    }
}

/// Takes the doormen of a [`NextDoor`]; when dropped, ends them.
pub(super) struct Resumed(Arc<NextDoor>);

impl Resumed {
    pub(super) fn of(next: &Arc<NextDoor>) -> Resumed {
        Resumed(Arc::clone(next))
    }

    pub(super) fn take(&self) -> Option<Doorman> {
        self.0.lock().door.take()
    }
}

impl Drop for Resumed {
    fn drop(&mut self) {
        let mut next = self.0.lock();
        next.over = true;
        next.door = None;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn stand(self: Arc<Self>, welcomed: &SyncSender<WelcomedStream>) {
        while self.make_room() {
            match accept(&self.guard.listeners, ACCEPT_INTERVAL) {
                Ok(Some(stream)) => self.receive(stream, welcomed),
                Ok(None) => {}
                // A connection that was reset at once must not hide the source's.
                Err(error) => tracing::warn!(%error, "cannot accept a stream"),
            }
        }
    }

    /// Waits until another handshake may begin. Returns false when the doorman has ended.
    fn make_room(&self) -> bool {
        let mut state = self.lock();
        while !state.over && state.shaking.len() >= MOST_HANDSHAKES {
            let oldest = state
                .shaking
                .first_key_value()
                .map(|(_, (stream, since))| (stream, since.elapsed()));
            let left = oldest.map_or(Duration::ZERO, |(stream, age)| {
                if age >= self.patience.give_way {
                    let peer = stream.peer();
                    tracing::warn!(%peer, "too many handshakes: closing a silent connection");
                    stream.close();
                }
                self.patience.give_way.saturating_sub(age)
            });
            // Closed handshakes end on their own, at once.
            let wait = left.max(Duration::from_millis(1));
            self.changed.wait_for(&mut state, wait);
        }
        !state.over
    }

    /// Runs the handshake on a thread of its own.
    fn receive(self: &Arc<Self>, stream: Stream, welcomed: &SyncSender<WelcomedStream>) {
        let number = {
            let mut state = self.lock();
            if state.over {
                return stream.close();
            }
            let number = state.next;
            state.next += 1;
            state.shaking.insert(number, (stream.clone(), Instant::now()));
            number
        };
        let (shared, welcomed) = (Arc::clone(self), welcomed.clone());
        let spawned = std::thread::Builder::new().name("handshake".to_owned()).spawn(move || {
            let peer = stream.peer();
            let checked = shared.check(stream);
            shared.done(number);
            match checked {
                // Without a receiver, the stream is closed with its last handle.
                Ok(stream) => drop(welcomed.send(stream)),
                Err(failure) => tracing::warn!(%peer, %failure, "stream refused"),
            }
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot start a thread for a stream");
            self.done(number);
        }
    }

    fn done(&self, number: u64) {
        self.lock().shaking.remove(&number);
        self.changed.notify_all();
    }

    fn check(&self, stream: Stream) -> Result<WelcomedStream, Failure> {
        let lost = |error: LaneError| lane_failure(&error);
        let hello_limit = self.patience.hello;
        stream.limit_silence(hello_limit).map_err(lost)?;
        let stream = match &self.guard.identity {
            None => stream,
            Some(identity) => {
                let (stream, who) = stream.secure_accepted(identity).map_err(lost)?;
                if who.name != self.guard.from {
                    let detail = format!(
                        "host {} is not the source, which is host {}",
                        who.name, self.guard.from
                    );
                    return Err(Failure::new(FailureCode::UnknownMigration, detail));
                }
                stream
            }
        };
        let limits = stream.clone();
        let welcomed = welcome(stream, self.guard.id, hello_limit)?;
        limits.limit_silence(SILENCE_LIMIT).map_err(lost)?;
        Ok(welcomed)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpStream};
    use std::sync::Weak;

    use godwit_lanes::{connect, listen};
    use godwit_migration::drive::{Hello, say_hello};
    use godwit_pki::{Authority, Grant, Role};
    use godwit_types::Lane;
    use godwit_wire::SUPPORTED;

    use super::*;

    const ID: MigrationId = MigrationId([7; 16]);
    const LIMIT: Duration = Duration::from_secs(60);
    /// Long enough that a test which waits for it hangs.
    const FOR_EVER: Duration = Duration::from_secs(3600);

    fn doorman(give_way: Duration) -> (Doorman, SocketAddr) {
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let at = listener.local_addr().unwrap();
        let guard =
            Guard { id: ID, from: "a".to_owned(), identity: None, listeners: vec![listener] };
        (Doorman::with(guard, Patience { hello: FOR_EVER, give_way }).unwrap(), at)
    }

    /// Sends a hello and is admitted.
    fn come_in(doorman: &Doorman, at: SocketAddr, number: u16) {
        let stream = connect(Lane { from: None, to: at }, LIMIT).unwrap();
        let hello = Hello { migration: ID, stream: number, versions: SUPPORTED };
        say_hello(&mut stream.sender(), &mut stream.receiver(), hello).unwrap();
        let welcomed = std::iter::from_fn(|| Some(doorman.let_in())).flatten().next().unwrap();
        assert_eq!(welcomed.number, number);
    }

    #[test]
    fn a_silent_connection_delays_no_other() {
        let (doorman, at) = doorman(FOR_EVER);
        let _silent = [(); 3].map(|()| TcpStream::connect(at).unwrap());
        come_in(&doorman, at, 3);
    }

    #[test]
    fn a_silent_connection_gives_way_when_there_are_too_many() {
        let (doorman, at) = doorman(Duration::ZERO);
        let _silent: Vec<_> =
            (0..2 * MOST_HANDSHAKES).map(|_| TcpStream::connect(at).unwrap()).collect();
        come_in(&doorman, at, 4);
        assert!(doorman.shared.lock().shaking.len() <= MOST_HANDSHAKES);
    }

    #[test]
    fn only_the_newest_further_door_stays_open() {
        let (current, _) = doorman(FOR_EVER);
        let next = Arc::<NextDoor>::default();
        let resumed = Resumed::of(&next);
        let mut doors = vec![Arc::downgrade(&current.shared)];
        let standing =
            |doors: &[Weak<Shared>]| doors.iter().filter(|door| door.strong_count() > 0).count();
        let mut newest = None;
        for _ in 0..50 {
            let opened = next.replace(|| {
                let (door, at) = doorman(FOR_EVER);
                let shared = Arc::downgrade(&door.shared);
                Ok::<_, ApiError>((door, (shared, at)))
            });
            let (shared, at) = opened.unwrap().unwrap();
            doors.push(shared);
            newest = Some(at);
            assert_eq!(standing(&doors), 2, "the current one and the newest");
        }
        let taken = resumed.take().unwrap();
        assert!(resumed.take().is_none());
        come_in(&taken, newest.unwrap(), 0);
        drop(resumed);
        let refused =
            next.replace(|| -> Result<(Doorman, ()), ApiError> { panic!("the receiver is gone") });
        assert!(refused.unwrap().is_none());
    }

    #[test]
    fn the_certificate_of_a_third_host_opens_no_lane() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(folder.path(), "test", 1).unwrap();
        let identity = |name: &str| {
            let grant =
                Grant { name: name.to_owned(), role: Role::Host, addresses: Vec::new(), days: 1 };
            let issued = authority.issue(&grant).unwrap();
            Identity::load(&authority.certificate(), &issued.certificate, &issued.key).unwrap()
        };
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let at = listener.local_addr().unwrap();
        let (identity_of_a, from) = (Some(identity("a")), "b".to_owned());
        let guard = Guard { id: ID, from, identity: identity_of_a, listeners: vec![listener] };
        let doorman =
            Doorman::with(guard, Patience { hello: FOR_EVER, give_way: FOR_EVER }).unwrap();
        let greet = |identity: &Identity, number| {
            let stream = connect(Lane { from: None, to: at }, LIMIT).unwrap();
            let stream = stream.secure(identity, "a").unwrap();
            let hello = Hello { migration: ID, stream: number, versions: SUPPORTED };
            say_hello(&mut stream.sender(), &mut stream.receiver(), hello)
        };
        // This client knows the migration, and its authority is the right one.
        assert!(greet(&identity("c"), 3).is_err());
        greet(&identity("b"), 4).unwrap();
        let welcomed = std::iter::from_fn(|| Some(doorman.let_in())).flatten().next().unwrap();
        assert_eq!(welcomed.number, 4);
    }

    #[test]
    fn dropping_the_doorman_ends_every_handshake() {
        let (doorman, at) = doorman(FOR_EVER);
        let silent = TcpStream::connect(at).unwrap();
        let shared = Arc::clone(&doorman.shared);
        // A connection that was never accepted ends with the listener, which lives as long as
        // `shared` here.
        while shared.lock().shaking.is_empty() {
            std::thread::yield_now();
        }
        drop(doorman);
        assert!(!matches!(std::io::Read::read(&mut &silent, &mut [0]), Ok(1..)));
        while !shared.lock().shaking.is_empty() {
            std::thread::yield_now();
        }
    }
}
