//! Watchdog process of a host together with a hardware watchdog, which no lab has: the protocol of
//! `godwit host watchdog`, and the end of the host's power when its timer runs out. A frozen host's
//! process does nothing; its hardware goes on.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use godwit_prober::clock::duration_timespec;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;

use crate::process::ProcessId;

/// Timeout of the hardware: a second less than the grace (docs/ha-terms.md).
const TIMEOUT: Duration = Duration::from_secs(5);
/// Poll interval.
const PACE: Duration = Duration::from_millis(20);
/// Longest message.
const MOST_BYTES: usize = 256 << 10;
const ANSWER: &[u8] = b"{\"kernel\":true,\"version\":2}\n";

/// A host's watchdog, until it is dropped.
#[derive(Debug)]
pub(super) struct Watchdog {
    flags: Arc<Flags>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Flags {
    ends: AtomicBool,
    is_frozen: AtomicBool,
}

/// What an agent's message says: the first group of processes, and others.
#[derive(Debug, Default, Deserialize)]
struct Message {
    #[serde(flatten)]
    first: Guarded,
    #[serde(default)]
    others: Vec<Guarded>,
}

/// Processes with one deadline.
#[derive(Debug, Default, Deserialize)]
struct Guarded {
    deadline_ns: Option<u64>,
    pids: Vec<(i32, u64)>,
}

impl Guarded {
    /// Returns the same by this machine's clock, if the host's is so many seconds ahead.
    fn by_clock_ahead(self, seconds: u32) -> Guarded {
        let ahead_ns = u64::from(seconds) * 1_000_000_000;
        let machine = |(pid, start_time)| {
            let id = ProcessId { pid, start_time }.on_clock_ahead(seconds);
            (id.pid, id.start_time)
        };
        Guarded {
            deadline_ns: self.deadline_ns.map(|deadline| deadline.saturating_sub(ahead_ns)),
            pids: self.pids.into_iter().map(machine).collect(),
        }
    }

    /// Kills the processes if the deadline has passed; returns whether one of them still lives.
    fn must_end(&self) -> bool {
        if self.deadline_ns.is_some_and(|deadline| boot_clock_ns() < deadline) {
            return false;
        }
        let of = |(pid, start_time): &(i32, u64)| ProcessId { pid: *pid, start_time: *start_time };
        let left: Vec<ProcessId> = self.pids.iter().map(of).filter(|id| id.is_alive()).collect();
        for pid in left.iter().filter_map(|id| Pid::from_raw(id.pid)) {
            // It may have ended meanwhile.
            let _ = kill_process(pid, Signal::KILL);
        }
        !left.is_empty()
    }
}

impl Watchdog {
    /// Starts a watchdog that listens at a socket, of a host whose boot clock is so many seconds
    /// ahead of the machine's. `reset` cuts the host's power.
    pub(super) fn start(
        socket: &Path,
        clock_ahead_s: u32,
        reset: impl Fn() + Send + 'static,
    ) -> Result<Watchdog> {
        let listener = UnixListener::bind(socket)
            .with_context(|| format!("cannot listen on {}", socket.display()))?;
        listener.set_nonblocking(true)?;
        let flags = Arc::<Flags>::default();
        let shared = Arc::clone(&flags);
        let thread = std::thread::spawn(move || {
            let mut device = Device { groups: Vec::new(), petted: Instant::now(), clock_ahead_s };
            let mut connections = Vec::new();
            while !shared.ends.load(Ordering::Acquire) {
                let is_frozen = shared.is_frozen.load(Ordering::Acquire);
                if !is_frozen {
                    serve(&listener, &mut connections, &mut device);
                }
                if device.runs_out(is_frozen) {
                    reset();
                    return;
                }
                let mut listening = [PollFd::new(&listener, PollFlags::IN)];
                // Only the time limit ends it, unless an agent connects.
                let _ = poll(&mut listening, Some(&duration_timespec(PACE)));
            }
        });
        Ok(Watchdog { flags, thread: Some(thread) })
    }

    /// Stops the process, or lets it go on. The hardware's timer runs.
    pub(super) fn freeze(&self, is_frozen: bool) {
        self.flags.is_frozen.store(is_frozen, Ordering::Release);
    }

    /// Returns whether its timer has run out.
    pub(super) fn has_reset(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.flags.ends.store(true, Ordering::Release);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("the thread of a watchdog panicked");
        }
    }
}

struct Device {
    groups: Vec<Guarded>,
    petted: Instant,
    clock_ahead_s: u32,
}

impl Device {
    /// Does the work of the process, unless it is frozen; returns whether the timer has run out.
    fn runs_out(&mut self, is_frozen: bool) -> bool {
        if is_frozen {
            // The device has been armed only while something is guarded.
            let is_armed = self.groups.iter().any(|group| !group.pids.is_empty());
            return is_armed && self.petted.elapsed() >= TIMEOUT;
        }
        // Each group is looked at: none must wait for another one.
        let ending = self.groups.iter().filter(|group| group.must_end()).count();
        if ending == 0 {
            self.petted = Instant::now();
        }
        self.petted.elapsed() >= TIMEOUT
    }
}

/// Connection of an agent, with what has come of its next line.
struct Connection {
    stream: UnixStream,
    begun: Vec<u8>,
}

/// Accepts agents and reads what they say.
fn serve(listener: &UnixListener, connections: &mut Vec<Connection>, device: &mut Device) {
    while let Ok((stream, _)) = listener.accept() {
        if stream.set_nonblocking(true).is_ok() {
            connections.push(Connection { stream, begun: Vec::new() });
        }
    }
    connections.retain_mut(|connection| connection.read(device));
}

impl Connection {
    /// Reads and answers what there is. Returns false if the connection has ended.
    fn read(&mut self, device: &mut Device) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(count) => self.begun.extend_from_slice(bytes.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return false,
            }
        }
        while let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.begun.drain(..=end).collect();
            let Ok(Message { first, others }) = serde_json::from_slice(&line) else { return false };
            let groups = std::iter::once(first).chain(others);
            device.groups =
                groups.map(|group| group.by_clock_ahead(device.clock_ahead_s)).collect();
            if self.stream.write_all(ANSWER).is_err() {
                return false;
            }
        }
        self.begun.len() <= MOST_BYTES
    }
}

fn boot_clock_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::Command;

    use super::*;
    use crate::trial::{LIMIT, until};

    #[test]
    fn what_runs_at_the_deadline_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("watchdog.sock");
        let watchdog = Watchdog::start(&socket, 0, || {}).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let id = ProcessId::of(i32::try_from(child.id()).unwrap()).unwrap();
        let mut agent = UnixStream::connect(&socket).unwrap();
        let pids = format!("[[{},{}]]", id.pid, id.start_time);
        let other = format!("{{\"deadline_ns\":1,\"pids\":{pids}}}");
        let message = format!("{{\"deadline_ns\":null,\"pids\":[],\"others\":[{other}]}}\n");
        agent.write_all(message.as_bytes()).unwrap();
        let mut answer = String::new();
        BufReader::new(&agent).read_line(&mut answer).unwrap();
        assert_eq!(answer.as_bytes(), ANSWER);
        child.wait().unwrap();
        assert!(!watchdog.has_reset());
    }

    #[test]
    fn what_a_clock_ahead_says_counts_by_the_machines() {
        let guarded = Guarded { deadline_ns: Some(3_600_000_000_001), pids: vec![(7, 360_045)] };
        let machine = guarded.by_clock_ahead(3600);
        assert_eq!((machine.deadline_ns, machine.pids), (Some(1), vec![(7, 45)]));
        let passed = Guarded { deadline_ns: None, pids: Vec::new() }.by_clock_ahead(1);
        assert_eq!(passed.deadline_ns, None);
    }

    #[test]
    fn a_frozen_host_is_reset_only_if_something_is_guarded() {
        let long_ago = Instant::now().checked_sub(2 * TIMEOUT).unwrap();
        let pids = vec![(1, 1)];
        let guarded = Guarded { deadline_ns: Some(u64::MAX), pids };
        let mut device = Device { groups: vec![guarded], petted: long_ago, clock_ahead_s: 0 };
        assert!(device.runs_out(true));
        assert!(!device.runs_out(false));
        assert!(!device.runs_out(true));
        let mut idle =
            Device { groups: vec![Guarded::default()], petted: long_ago, clock_ahead_s: 0 };
        assert!(!idle.runs_out(true));
    }

    #[test]
    fn the_power_is_cut_once() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("watchdog.sock");
        let (cut, cuts) = std::sync::mpsc::sync_channel(2);
        let watchdog = Watchdog::start(&socket, 0, move || cut.send(()).unwrap()).unwrap();
        let mut agent = UnixStream::connect(&socket).unwrap();
        agent.write_all(b"{\"deadline_ns\":18446744073709551615,\"pids\":[[1,1]]}\n").unwrap();
        BufReader::new(&agent).read_line(&mut String::new()).unwrap();
        watchdog.freeze(true);
        cuts.recv_timeout(LIMIT).unwrap();
        until("the thread ends", LIMIT, || Ok(watchdog.has_reset().then_some(()))).unwrap();
        assert!(cuts.try_recv().is_err());
    }
}
