//! QEMU as the hypervisor of a migration's source.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_migration::Failure;
use godwit_migration::drive::{HypervisorEvent, Inbox, SourceHypervisor};
use godwit_migration::reference::Content;
use godwit_qemu::{MigrationStatus, Qmp, QmpEvent, STOP, VmName};
use godwit_types::FailureCode;
use godwit_wire::BlockRun;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::{broadcast, oneshot};
use tokio::task::JoinHandle;

use super::disks::source::DiskTravel;
use super::image_cache::ImageCache;
use crate::agent::Agent;
use crate::agent::ended::shut_down;
use crate::firmware::VariablesWatch;
use crate::references::Departed;
use crate::state_stream::{STREAM, qemu_failure, undo_hand_over};
use crate::vm::{Begin, Vm};

/// Size of the pieces in which the device state is read.
const CHUNK_BYTES: usize = 128 * 1024;

/// The source's QEMU. It is driven from a plain thread; QMP runs on the agent's runtime.
pub(super) struct QemuSource {
    agent: Arc<Agent>,
    vm: Arc<Vm>,
    images: ImageCache,
    /// The destination.
    to: String,
    runtime: Handle,
    /// Whether the guest ran when the migration began.
    runs: bool,
    /// Its memory, if that is retained for its return.
    departing: Option<Arc<Content>>,
    /// Set when the hand-over begins.
    hands_over: Arc<AtomicBool>,
    /// Disks that travel with the VM.
    disks: Option<Arc<DiskTravel>>,
    relay: Option<JoinHandle<()>>,
    /// Permits the relay to have the device state written.
    write: Option<oneshot::Sender<()>>,
}

impl QemuSource {
    pub(super) fn new(
        agent: Arc<Agent>,
        vm: Arc<Vm>,
        to: String,
        runtime: Handle,
        runs: bool,
        departing: Option<Arc<Content>>,
        hands_over: Arc<AtomicBool>,
    ) -> Self {
        let images = ImageCache::new(Arc::clone(&agent), Arc::clone(&vm), Begin::Boot);
        QemuSource {
            agent,
            vm,
            images,
            to,
            runtime,
            runs,
            departing,
            hands_over,
            disks: None,
            relay: None,
            write: None,
        }
    }

    /// Hands the guest over together with disks that travel.
    pub(super) fn with_disks(self, disks: Option<Arc<DiskTravel>>) -> Self {
        QemuSource { disks, ..self }
    }

    fn qmp(&self) -> &Qmp {
        &self.vm.process.qmp
    }

    fn failure(&self, what: &str, error: &godwit_qemu::QmpError) -> Failure {
        qemu_failure(&self.agent.config().name, what, error)
    }

    async fn begin(
        &self,
        inbox: &Inbox,
        write: oneshot::Receiver<()>,
    ) -> Result<JoinHandle<()>, Failure> {
        let local = |error: std::io::Error| {
            Failure::new(
                FailureCode::Internal,
                format!("cannot create the stream of the device state: {error}"),
            )
        };
        let (ours, theirs) = UnixStream::pair().map_err(local)?;
        let theirs = theirs.into_std().map_err(local)?;
        theirs.set_nonblocking(false).map_err(local)?;
        let variables = self.agent.watch_variables(&self.vm)?;
        // Subscribed before the command, so that no event is missed.
        let events = self.qmp().events();
        let failed =
            |what: &'static str| move |error: godwit_qemu::QmpError| self.failure(what, &error);
        self.qmp()
            .getfd(STREAM, std::os::fd::AsFd::as_fd(&theirs))
            .await
            .map_err(failed("pass the stream"))?;
        drop(theirs);
        if let Err(error) = self.qmp().migrate(&format!("fd:{STREAM}")).await {
            return Err(self.failure("start the migration", &error));
        }
        let relay = Relay {
            qmp: self.qmp().clone(),
            host: self.agent.config().name.clone(),
            vm: self.vm.name.clone(),
            state: StateReader {
                stream: ours,
                chunk: vec![0; CHUNK_BYTES],
                inbox: inbox.clone(),
                passed_bytes: 0,
            },
            inbox: inbox.clone(),
            stopped_at: None,
            drained: Duration::ZERO,
            written_from: Duration::ZERO,
            awaits_state: false,
            write: Some(write),
            variables,
            disks: self.disks.clone(),
        };
        Ok(self.runtime.spawn(relay.run(events)))
    }
}

impl SourceHypervisor for QemuSource {
    fn expect_switchover(&mut self) {
        self.images.flush();
        if let Some(disks) = &self.disks {
            disks.hurry();
        }
    }

    fn settles(&self) -> bool {
        self.disks.is_some()
    }

    fn settle(&mut self) -> Result<bool, Failure> {
        self.disks.as_ref().map_or(Ok(true), |disks| disks.settle(&self.runtime))
    }

    fn begin_switchover(&mut self, events: &Inbox, page_in: bool) -> Result<(), Failure> {
        self.hands_over.store(true, Ordering::SeqCst);
        // Beside the record and QEMU's preparations.
        self.images.flush();
        // From here on, a restarted agent that finds the guest paused asks before it resumes it.
        self.agent
            .mark_hand_over(&self.vm, &self.to, page_in, self.runs)
            .map_err(|error| Failure::new(FailureCode::Internal, error.to_string()))?;
        let (write, allowed) = oneshot::channel();
        self.relay = Some(self.runtime.block_on(self.begin(events, allowed))?);
        self.write = Some(write);
        Ok(())
    }

    fn write_device_state(&mut self) -> Result<(), Failure> {
        // QEMU may not be ready yet. The relay knows when it is, and this thread has pages to send
        // meanwhile.
        if let Some(write) = self.write.take() {
            // A relay that has ended has reported why.
            let _ = write.send(());
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        if let Some(relay) = self.relay.take() {
            relay.abort();
        }
        if let Some(disks) = &self.disks {
            disks.stop();
        }
        let undone = self.runtime.block_on(undo_hand_over(&self.vm, self.runs));
        undone.map_err(|error| {
            let host = &self.agent.config().name;
            Failure::new(FailureCode::HypervisorFailed, format!("host {host}: {}", error.message))
        })
    }

    fn release(&mut self, hot: Vec<BlockRun>) {
        let keep = self.departing.take().map(|content| Departed { content, hot });
        if let Err(error) = self.runtime.block_on(self.agent.release(&self.vm, keep)) {
            let vm = self.vm.name.as_str();
            tracing::error!(vm, %error, "cannot remove what is left of the migrated VM");
        }
    }
}

/// Relays QEMU's events and device state from the start of its migration to the end.
struct Relay {
    qmp: Qmp,
    host: String,
    vm: VmName,
    state: StateReader,
    inbox: Inbox,
    /// When the vCPUs stopped, as reported.
    stopped_at: Option<Instant>,
    /// From then until requests of disks were over and their data was on the disks.
    drained: Duration,
    /// From then until QEMU began to write the device state.
    written_from: Duration,
    /// QEMU may write the device state, and no byte of it has come.
    awaits_state: bool,
    /// Permits writing the device state; `None` once it has been permitted.
    write: Option<oneshot::Receiver<()>>,
    /// Variables of the VM's firmware, if it has any.
    variables: Option<VariablesWatch>,
    /// Disks that travel with the VM.
    disks: Option<Arc<DiskTravel>>,
}

impl Relay {
    async fn run(mut self, mut events: broadcast::Receiver<QmpEvent>) {
        let mut open = true;
        loop {
            tokio::select! {
                ready = self.state.stream.ready(Interest::READABLE), if open => {
                    open = ready.is_ok() && self.pass_on();
                }
                event = events.recv() => match event {
                    Ok(event) => if self.handle(&event).await { return },
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => {
                        return self.fail("its monitor is closed");
                    }
                },
                why = self.qmp.closed() => return self.fail(&why),
            }
        }
    }

    /// Passes on what QEMU has written. Returns false at the end of its stream.
    ///
    /// From the first byte of the device state on, QEMU's migration thread has its global lock
    /// until the state is written (`migration_completion`, 7.2 to 10.0): no other thread runs a
    /// device, and requests of disks are over.
    fn pass_on(&mut self) -> bool {
        let before = self.state.passed_bytes;
        let goes_on = self.state.pass_on(UnixStream::try_read);
        if self.awaits_state && self.state.passed_bytes > before {
            self.awaits_state = false;
            self.written_from = self.since_stop();
            self.inbox.hypervisor(Instant::now(), HypervisorEvent::DevicesStopped);
        }
        goes_on
    }

    fn since_stop(&self) -> Duration {
        self.stopped_at.map_or(Duration::ZERO, |at| at.elapsed())
    }

    /// Handles an event. Returns true if no more events follow.
    async fn handle(&mut self, event: &QmpEvent) -> bool {
        if event.name == STOP {
            self.send_stopped(event.at);
        }
        match MigrationStatus::of_event(event) {
            Some(MigrationStatus::PreSwitchover) => {
                // A guest that was already paused does not stop again: it is stopped from here on.
                self.send_stopped(event.at);
                self.drained = self.since_stop();
                if let Some(Err(failure)) = self.variables.as_ref().map(VariablesWatch::unchanged) {
                    self.inbox.hypervisor(Instant::now(), HypervisorEvent::Failed(failure));
                    return true;
                }
                // About a millisecond after the stop (QEMU 7.2 waits that long for its own
                // threads); the last pages are sent meanwhile. A stock QEMU reports this state
                // once.
                let Some(write) = self.write.take() else { return false };
                // The images are still QEMU's, and nobody writes them any more. The last pages are
                // sent at the same time.
                if let Some(disks) = &self.disks
                    && let Err(failure) = disks.last_round().await
                {
                    self.inbox.hypervisor(Instant::now(), HypervisorEvent::Failed(failure));
                    return true;
                }
                if write.await.is_err() {
                    return true;
                }
                // QEMU's migration thread waits: what comes after this is written after it.
                self.state.pass_on(read_now);
                self.awaits_state = true;
                self.go_on();
                false
            }
            Some(MigrationStatus::Completed) => {
                // QEMU flushes its stream before it reports this: the rest is in the socket.
                self.state.pass_on(read_now);
                self.inbox.hypervisor(Instant::now(), completed(&self.qmp, self.vm.as_str()));
                let (vm, drained, from) = (self.vm.as_str(), self.drained, self.written_from);
                let until = self.since_stop();
                tracing::debug!(vm, ?drained, ?from, ?until, "device state written after the stop");
                true
            }
            Some(status @ (MigrationStatus::Failed | MigrationStatus::Cancelled)) => {
                self.fail(&format!("its migration is {status}"));
                true
            }
            _ => false,
        }
    }

    /// Has QEMU write the device state. The answer is not waited for: what QEMU writes may come
    /// before it.
    fn go_on(&self) {
        let (qmp, host, inbox) = (self.qmp.clone(), self.host.clone(), self.inbox.clone());
        tokio::spawn(async move {
            if let Err(error) = qmp.migrate_continue(&MigrationStatus::PreSwitchover).await {
                let why = format!("it cannot write the device state: {error}");
                let failed = HypervisorEvent::Failed(failure_of(&host, &why));
                inbox.hypervisor(Instant::now(), failed);
            }
        });
    }

    fn send_stopped(&mut self, at: Instant) {
        if self.stopped_at.is_none() {
            self.stopped_at = Some(at);
            self.inbox.hypervisor(at, HypervisorEvent::Stopped);
        }
    }

    fn fail(&self, why: &str) {
        let failed = HypervisorEvent::Failed(failure_of(&self.host, why));
        self.inbox.hypervisor(Instant::now(), failed);
    }
}

fn failure_of(host: &str, why: &str) -> Failure {
    Failure::new(FailureCode::HypervisorFailed, format!("QEMU on host {host} failed: {why}"))
}

/// Reads the device state, up to the inbox's limit. A guest that escaped into QEMU may have forged
/// it.
struct StateReader {
    stream: UnixStream,
    chunk: Vec<u8>,
    inbox: Inbox,
    /// Bytes that were passed on.
    passed_bytes: u64,
}

impl StateReader {
    /// Passes on what `read` returns. Returns false at the end of the stream, or when it exceeds
    /// the longest valid device state.
    fn pass_on(&mut self, read: impl Fn(&UnixStream, &mut [u8]) -> std::io::Result<usize>) -> bool {
        loop {
            match read(&self.stream, &mut self.chunk) {
                Ok(0) => return false,
                Ok(read) => {
                    self.passed_bytes += read as u64;
                    // The failure ends the migration, and the guest continues here.
                    if let Err(failure) = self.inbox.device_state(&self.chunk[..read]) {
                        tracing::warn!(%failure, "reading of QEMU's stream ended");
                        return false;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            }
        }
    }
}

/// Returns the event of a migration that QEMU has completed. A shutdown that the guest requested
/// before it was stopped is not in the device state: a destination would run a guest that has
/// ended.
fn completed(qmp: &Qmp, vm: &str) -> HypervisorEvent {
    match qmp.guest_has_shut_down() {
        true => HypervisorEvent::Failed(shut_down(vm)),
        false => HypervisorEvent::DeviceStateEnded,
    }
}

/// Reads what the socket holds now, directly from the kernel. Tokio's `try_read` only knows the
/// result of its last poll and may report an empty socket that is not empty.
fn read_now(stream: &UnixStream, into: &mut [u8]) -> std::io::Result<usize> {
    let (received, _) = rustix::net::recv(stream, into, rustix::net::RecvFlags::DONTWAIT)?;
    Ok(received)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use godwit_migration::drive::{MOST_DEVICE_STATE_BYTES, inbox};
    use serde_json::{Value, json};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;

    use super::*;
    use crate::state_stream::roll_back;

    /// Starts a QMP server in place of a QEMU. `answers` returns the lines for a command; each line
    /// except events gets its id.
    async fn stand_in(mut answers: impl FnMut(&str) -> Vec<Value> + Send + 'static) -> Qmp {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
        tokio::spawn(async move {
            let mut stream = BufReader::new(listener.accept().await.unwrap().0);
            let greeting = json!({"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": []}});
            let mut lines = vec![greeting];
            loop {
                for line in lines {
                    stream.write_all(format!("{line}\r\n").as_bytes()).await.unwrap();
                }
                let mut request = String::new();
                if stream.read_line(&mut request).await.unwrap() == 0 {
                    return;
                }
                let request: Value = serde_json::from_str(&request).unwrap();
                let with_id = |mut line: Value| {
                    if line.get("event").is_none() {
                        line["id"] = request["id"].clone();
                    }
                    line
                };
                let command = request["execute"].as_str().unwrap();
                lines = match command {
                    "qmp_capabilities" => vec![with_id(json!({"return": {}}))],
                    _ => answers(command).into_iter().map(with_id).collect(),
                };
            }
        });
        Qmp::connect(dir.path().join("qmp")).await.unwrap()
    }

    #[tokio::test]
    async fn a_rollback_waits_until_qemu_has_finished_its_migration() {
        let (sender, mut commands) = tokio::sync::mpsc::unbounded_channel();
        let (mut refusals, mut runs) = (20, false);
        let qmp = stand_in(move |command| {
            sender.send(command.to_owned()).unwrap();
            vec![match command {
                "query-migrate" => json!({"return": {"status": "completed"}}),
                "query-status" => {
                    let state = if runs { "running" } else { "finish-migrate" };
                    json!({"return": {"status": state, "running": runs}})
                }
                "cont" if refusals > 0 => {
                    refusals -= 1;
                    let desc = "Migration is not finalized yet";
                    json!({"error": {"class": "GenericError", "desc": desc}})
                }
                "cont" => {
                    runs = true;
                    json!({"return": {}})
                }
                _ => json!({"return": {}}),
            }]
        })
        .await;
        roll_back(&qmp, "web", true).await.unwrap();
        assert!(qmp.status().await.unwrap().is_running());
        let mut asked = 0;
        while let Ok(command) = commands.try_recv() {
            asked += usize::from(command == "cont");
        }
        assert_eq!(asked, 21);
    }

    #[tokio::test]
    async fn a_guest_that_shut_down_before_its_migration_completed_is_not_handed_over() {
        for by_guest in [false, true] {
            let qmp = stand_in(move |_| {
                let at = json!({"seconds": 1, "microseconds": 2});
                let shutdown =
                    json!({"event": "SHUTDOWN", "data": {"guest": by_guest}, "timestamp": at});
                vec![shutdown, json!({"return": {"status": "completed"}})]
            })
            .await;
            assert_eq!(completed(&qmp, "web"), HypervisorEvent::DeviceStateEnded);
            qmp.query_migrate().await.unwrap();
            match completed(&qmp, "web") {
                HypervisorEvent::Failed(failure) => {
                    assert!(by_guest);
                    assert_eq!(failure.code, FailureCode::GuestShutDown);
                }
                event => assert!(!by_guest, "{event:?}"),
            }
        }
    }

    #[tokio::test]
    async fn the_socket_is_read_before_the_runtime_has_polled_it() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = theirs.into_std().unwrap();
        // Nothing is awaited, so the runtime has not polled the socket.
        theirs.write_all(b"the end of the state").unwrap();
        let mut into = [0; 64];
        assert_eq!(read_now(&ours, &mut into).unwrap(), 20);
        assert_eq!(read_now(&ours, &mut into).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        drop(theirs);
        assert_eq!(read_now(&ours, &mut into).unwrap(), 0);
    }

    #[tokio::test]
    async fn an_endless_device_state_is_read_up_to_the_limit() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = theirs.into_std().unwrap();
        theirs.set_nonblocking(false).unwrap();
        let qemu = std::thread::spawn(move || {
            let (piece, mut written) = (vec![7; CHUNK_BYTES], 0);
            // Until nothing reads.
            while written < 2 * MOST_DEVICE_STATE_BYTES && theirs.write_all(&piece).is_ok() {
                written += CHUNK_BYTES as u64;
            }
            written
        });
        let (inbox, _events) = inbox();
        let chunk = vec![0; CHUNK_BYTES];
        let mut state = StateReader { stream: ours, chunk, inbox, passed_bytes: 0 };
        loop {
            state.stream.ready(Interest::READABLE).await.unwrap();
            if !state.pass_on(UnixStream::try_read) {
                break;
            }
        }
        drop(state);
        let written = qemu.join().unwrap();
        // The socket's buffer, and the piece beyond the limit.
        assert!(written < MOST_DEVICE_STATE_BYTES + (16 << 20), "{written} bytes were read");
    }
}
