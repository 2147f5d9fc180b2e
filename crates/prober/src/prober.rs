//! Sends a probe to each target each millisecond, and records when each answer comes.
//!
//! A probe is a UDP datagram to the target's echo port: its sequence number (8 bytes, big-endian),
//! then a mark of this prober (8 bytes), by which it ignores answers to an earlier one.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::clock::{self, PROBER_PRIORITY};
use crate::record::ProbeLog;

/// The echo port (RFC 862).
pub const ECHO_PORT: u16 = 7;
/// Time between two probes of a target.
pub const PROBE_INTERVAL: Duration = Duration::from_millis(1);
/// Most targets of one prober. The records of each take at most 8 MiB.
pub const MAX_TARGETS: usize = 64;

const PROBE_BYTES: usize = 16;

/// One target and the record of its probes.
pub struct Target {
    address: SocketAddr,
    socket: UdpSocket,
    mark: [u8; 8],
    log: Mutex<ProbeLog>,
    answered: Condvar,
}

impl Target {
    /// Makes a target, which need not exist yet.
    ///
    /// The socket is not connected: a connected one would fail with each `ECONNREFUSED` of a guest
    /// that boots.
    ///
    /// # Errors
    /// The system gives no socket.
    pub fn new(address: IpAddr, port: u16) -> Result<Target> {
        let any: IpAddr = if address.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, 0))
            .with_context(|| format!("cannot open a socket to probe {address}"))?;
        socket.set_nonblocking(true)?;
        let mark = clock::monotonic_ns().to_be_bytes();
        let address = SocketAddr::new(address, port);
        Ok(Target { address, socket, mark, log: Mutex::default(), answered: Condvar::new() })
    }

    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address.ip()
    }

    /// Locks and returns the record of its probes.
    pub fn log(&self) -> MutexGuard<'_, ProbeLog> {
        self.log.lock()
    }

    /// Waits, at most `limit`, until an answer has come at or after `since_ns`. Returns its time.
    pub fn wait_answer(&self, since_ns: u64, limit: Duration) -> Option<u64> {
        let unanswered = |log: &mut ProbeLog| log.answered_since(since_ns).is_none();
        let mut log = self.log();
        self.answered.wait_while_for(&mut log, unanswered, limit);
        log.answered_since(since_ns)
    }

    /// Sends one probe. A probe that cannot be sent (no route, no neighbour yet) counts as sent and
    /// lost: the target is unreachable.
    pub fn send_probe(&self) {
        let sequence = self.log().sent(clock::monotonic_ns());
        let mut probe = [0; PROBE_BYTES];
        probe[..8].copy_from_slice(&sequence.to_be_bytes());
        probe[8..].copy_from_slice(&self.mark);
        drop(self.socket.send_to(&probe, self.address));
    }

    /// Records all answers that have come. Returns the time of the last one.
    pub fn take_answers(&self) -> Option<u64> {
        let mut last = None;
        // Bounded: a flood must not keep the prober from its other targets.
        for _ in 0..1024 {
            let mut answer = [0; PROBE_BYTES + 1];
            let received = match self.socket.recv_from(&mut answer) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            let now_ns = clock::monotonic_ns();
            let (length, from) = received;
            let Some((sequence, mark)) = answer[..length].split_first_chunk::<8>() else {
                continue;
            };
            if from.ip() != self.address.ip()
                || from.port() != self.address.port()
                || mark != self.mark
            {
                continue;
            }
            if self.log().received(u64::from_be_bytes(*sequence), now_ns) {
                last = Some(now_ns);
            }
        }
        if last.is_some() {
            self.answered.notify_all();
        }
        last
    }

    /// Returns the socket, to wait for answers.
    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }
}

/// A timer that fires each [`PROBE_INTERVAL`], counted from its start, so that delays do not add
/// up.
pub struct Pace {
    timer: OwnedFd,
}

impl Pace {
    /// Makes a timer that does not run yet.
    ///
    /// # Errors
    /// The system gives no timer.
    pub fn new() -> Result<Pace> {
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )
        .context("cannot make a timer")?;
        Ok(Pace { timer })
    }

    /// Starts it, or stops it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn run(&self, runs: bool) -> Result<()> {
        let interval =
            if runs { clock::duration_timespec(PROBE_INTERVAL) } else { clock::timespec(0) };
        let setting = Itimerspec { it_interval: interval, it_value: interval };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting)
            .context("cannot set the timer")?;
        Ok(())
    }

    /// Returns whether it has fired since the last call. Missed intervals are not made up for: a
    /// burst of probes would measure nothing.
    #[must_use]
    pub fn has_fired(&self) -> bool {
        rustix::io::read(&self.timer, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Pace {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

/// A prober. Targets may be added and removed while it runs.
pub struct Prober {
    targets: Mutex<Arc<Vec<Arc<Target>>>>,
    pace: Pace,
    /// Wakes the running prober when its targets have changed.
    changed: OwnedFd,
}

impl Prober {
    /// Makes a prober without targets, which uses no CPU time.
    ///
    /// # Errors
    /// The system gives no timer.
    pub fn new() -> Result<Prober> {
        let changed = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .context("cannot make an eventfd")?;
        Ok(Prober { targets: Mutex::default(), pace: Pace::new()?, changed })
    }

    /// Returns its present targets.
    pub fn targets(&self) -> Arc<Vec<Arc<Target>>> {
        Arc::clone(&self.lock())
    }

    /// Returns the target of that address, if there is one.
    pub fn target(&self, address: IpAddr) -> Option<Arc<Target>> {
        self.targets().iter().find(|target| target.address() == address).cloned()
    }

    /// Adds a target. Changes nothing if it is there already.
    ///
    /// # Errors
    /// There are [`MAX_TARGETS`] already, or the system gives no socket.
    pub fn watch(&self, address: IpAddr) -> Result<()> {
        let mut targets = self.lock();
        if targets.iter().any(|target| target.address() == address) {
            return Ok(());
        }
        if targets.len() >= MAX_TARGETS {
            bail!("the prober watches {MAX_TARGETS} targets already; unwatch one first");
        }
        let mut next = Vec::clone(&targets);
        next.push(Arc::new(Target::new(address, ECHO_PORT)?));
        self.pace.run(true)?;
        *targets = Arc::new(next);
        self.wake();
        Ok(())
    }

    /// Removes a target and its records.
    ///
    /// # Errors
    /// The timer cannot be stopped.
    pub fn unwatch(&self, address: IpAddr) -> Result<()> {
        let mut targets = self.lock();
        let rest: Vec<Arc<Target>> =
            targets.iter().filter(|target| target.address() != address).cloned().collect();
        if rest.is_empty() {
            self.pace.run(false)?;
        }
        *targets = Arc::new(rest);
        self.wake();
        Ok(())
    }

    /// Probes without an end.
    ///
    /// # Errors
    /// The kernel cannot wait for the sockets.
    pub fn run(&self) -> Result<()> {
        clock::be_punctual(PROBER_PRIORITY);
        loop {
            let targets = self.targets();
            self.run_with(&targets)?;
        }
    }

    /// Probes until the targets change.
    fn run_with(&self, targets: &[Arc<Target>]) -> Result<()> {
        let own =
            [PollFd::new(&self.changed, PollFlags::IN), PollFd::new(&self.pace, PollFlags::IN)];
        let sockets = targets
            .iter()
            .map(|target| PollFd::from_borrowed_fd(target.socket.as_fd(), PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = own.into_iter().chain(sockets).collect();
        loop {
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error).context("cannot wait for answers"),
            }
            // Answers first: their time is what is measured.
            for (target, _) in
                targets.iter().zip(&fds[2..]).filter(|(_, fd)| !fd.revents().is_empty())
            {
                target.take_answers();
            }
            if !fds[1].revents().is_empty() && self.pace.has_fired() {
                targets.iter().for_each(|target| target.send_probe());
            }
            if !fds[0].revents().is_empty() {
                let _ = rustix::io::read(&self.changed, &mut [0; 8]);
                return Ok(());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Vec<Arc<Target>>>> {
        self.targets.lock()
    }

    fn wake(&self) {
        // It fails only when the counter is full, and then the prober is woken already.
        let _ = rustix::io::write(&self.changed, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An echo on loopback that answers `answers` probes.
    fn echo(answers: usize) -> (SocketAddr, std::thread::JoinHandle<()>) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let serve = move || {
            let mut bytes = [0; 64];
            for _ in 0..answers {
                let (length, from) = socket.recv_from(&mut bytes).unwrap();
                socket.send_to(b"not a probe", from).unwrap();
                socket.send_to(&bytes[..length], from).unwrap();
            }
        };
        (address, std::thread::spawn(serve))
    }

    #[test]
    fn answers_are_recorded_and_other_datagrams_ignored() {
        let (address, server) = echo(3);
        let target = Target::new(address.ip(), address.port()).unwrap();
        for _ in 0..3 {
            target.send_probe();
        }
        server.join().unwrap();
        while target.log().gaps(0, u64::MAX, clock::monotonic_ns()).received < 3 {
            let limit = clock::duration_timespec(Duration::from_secs(60));
            let ready =
                poll(&mut [PollFd::new(target.socket(), PollFlags::IN)], Some(&limit)).unwrap();
            assert!(ready > 0, "an answer is missing");
            target.take_answers();
        }
        assert!(target.wait_answer(0, Duration::ZERO).is_some());
        assert!(target.wait_answer(clock::monotonic_ns(), Duration::ZERO).is_none());
    }

    #[test]
    fn targets_are_added_and_removed() {
        let prober = Prober::new().unwrap();
        let address: IpAddr = "127.0.0.1".parse().unwrap();
        for _ in 0..2 {
            prober.watch(address).unwrap();
        }
        assert_eq!(prober.targets().len(), 1);
        assert!(prober.target(address).is_some());
        for _ in 0..2 {
            prober.unwatch(address).unwrap();
        }
        assert!(prober.target(address).is_none());
        for last in 1..=64 {
            prober.watch(Ipv4Addr::new(127, 0, 0, last).into()).unwrap();
        }
        assert!(prober.watch(Ipv4Addr::new(127, 0, 0, 65).into()).is_err());
    }
}
