//! The guest's way from the other QEMU into Godwit's: QEMU's own migration, through the agent.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{
    EVENTS, LATE_BLOCK_ACTIVATE, PAUSE_BEFORE_SWITCHOVER, QmpEvent, X_IGNORE_SHARED,
};
use godwit_types::Phase;
use tokio::io::AsyncWriteExt;
use tokio::sync::broadcast;
use tokio::task::JoinHandle;

use crate::adoptions::Course;
use crate::agent::Agent;
use crate::agent::adoption::findings::pause;
use crate::agent::adoption::monitor::{Monitor, Sent};
use crate::failure::host_failed;
use crate::hold::hold;
use crate::state_stream::until_loaded;
use crate::vm::Vm;

/// Name of the new QEMU's end of the stream.
const STREAM: &str = "godwit-adoption";
/// Interval between two questions about the progress.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for the new QEMU to load what the other one has sent whole, and for that one to say so.
pub(super) const LOAD_LIMIT: Duration = Duration::from_secs(10);
/// Bytes on their way through the agent.
const RELAY_BYTES: usize = 1 << 20;

/// A transfer between two QEMUs of this host.
pub(super) struct Transfer<'a> {
    pub(super) agent: &'a Arc<Agent>,
    pub(super) monitor: &'a Monitor,
    /// The new QEMU, which waits.
    pub(super) vm: &'a Arc<Vm>,
    pub(super) course: &'a Course,
}

/// Tasks that pass the stream on; it ends with them.
pub(super) struct Relay(JoinHandle<()>);

impl Drop for Relay {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Transfer<'_> {
    /// Moves the guest. On success it runs in the new QEMU. On failure it has not run there and
    /// never will; the other QEMU may still migrate, or have paused it.
    pub(super) async fn run(&self) -> Result<(), ApiError> {
        let qmp = &self.vm.process.qmp;
        let mut events = qmp.events();
        let _relay = self.connect().await?;
        self.course.phase(Phase::PreCopy);
        let loaded = self.follow(&mut events).await?;
        self.course.phase(Phase::Switchover);
        hold("adoption-loaded");
        if self.course.is_cancelled() {
            return Err(cancelled_here());
        }
        let sent = self.check_sent_whole().await?;
        if !self.course.hand_over() {
            return Err(cancelled_here());
        }
        self.agent.note_take_over(self.vm)?;
        hold("adoption-take-over");
        // The commit point: from here on the new QEMU may run the guest.
        self.vm
            .files
            .note_run_permitted()
            .map_err(|error| host_failed("cannot record that the guest may run", &error))?;
        let mut after = qmp.events();
        if let Err(error) = qmp.resume().await {
            // QEMU reports running vCPUs before it answers.
            let ran = std::iter::from_fn(|| after.try_recv().ok())
                .any(|event: QmpEvent| event.name == godwit_qemu::RESUME);
            if !ran {
                // For the next agent: it has not run in this process, which ends now.
                let _ = self.vm.files.note_unrun();
                return Err(self.vm.hypervisor_failed("run the guest", &error));
            }
        }
        // From the stop to its own end by the other QEMU's figure, and from there on.
        let stopped_ms = sent.downtime_ms.unwrap_or_default();
        self.course.paused_ms(stopped_ms + loaded.elapsed().as_secs_f64() * 1e3);
        hold("adoption-runs");
        Ok(())
    }

    /// Connects the two QEMUs through the agent.
    async fn connect(&self) -> Result<Relay, ApiError> {
        let qmp = &self.vm.process.qmp;
        let failed = |error| self.vm.hypervisor_failed("prepare the arrival", &error);
        qmp.migrate_set_capabilities(&[
            (EVENTS, true),
            (X_IGNORE_SHARED, false),
            (PAUSE_BEFORE_SWITCHOVER, false),
            (LATE_BLOCK_ACTIVATE, true),
        ])
        .await
        .map_err(failed)?;
        let pair = || UnixStream::pair().map_err(|error| host_failed("make a socket", &error));
        let ((theirs, from), (to, ours)) = (pair()?, pair()?);
        qmp.getfd(STREAM, ours.as_fd()).await.map_err(failed)?;
        drop(ours);
        qmp.migrate_incoming(&format!("fd:{STREAM}")).await.map_err(failed)?;
        let relay = relay(from, to).map_err(|error| host_failed("pass a stream on", &error))?;
        self.monitor.send_to(OwnedFd::from(theirs)).await?;
        Ok(relay)
    }

    /// Follows the migration until the new QEMU has loaded everything. Returns when that was.
    async fn follow(
        &self,
        events: &mut broadcast::Receiver<QmpEvent>,
    ) -> Result<Instant, ApiError> {
        let mut loading = std::pin::pin!(until_loaded(self.vm, events));
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        let mut cancelled = false;
        // Since when the other QEMU sends nothing more.
        let mut completed: Option<Instant> = None;
        loop {
            tokio::select! {
                loaded = &mut loading => return match loaded {
                    _ if cancelled => Err(cancelled_here()),
                    Ok(()) => Ok(Instant::now()),
                    Err(why) => Err(self.failed(why)),
                },
                _ = poll.tick() => {}
            }
            if self.course.is_cancelled() && !cancelled {
                cancelled = true;
                self.monitor.cancel().await?;
            }
            let sent = self.monitor.sent().await?;
            self.course.remaining(sent.remaining_bytes);
            match sent.status.as_str() {
                "cancelled" => return Err(cancelled_here()),
                "failed" => {
                    return Err(self.failed(sent.why.as_deref().unwrap_or("no reason given")));
                }
                _ if sent.is_over() => {
                    // Nothing is left that could report a cancellation.
                    if cancelled || self.course.is_cancelled() {
                        return Err(cancelled_here());
                    }
                    if completed.get_or_insert_with(Instant::now).elapsed() > LOAD_LIMIT {
                        return Err(self.failed("the new QEMU did not load what was sent"));
                    }
                }
                _ => {}
            }
        }
    }

    async fn check_sent_whole(&self) -> Result<Sent, ApiError> {
        sent_whole(self.monitor, &self.vm.name).await
    }

    fn failed(&self, why: &str) -> ApiError {
        not_sent(&self.vm.name, why)
    }
}

/// Checks that the other QEMU has sent everything and will not run the guest by itself. A guest
/// that shut itself down meanwhile is not handed over.
pub(super) async fn sent_whole(monitor: &Monitor, vm: &str) -> Result<Sent, ApiError> {
    let limit = Instant::now() + LOAD_LIMIT;
    let sent: Sent = loop {
        let sent = monitor.sent().await?;
        if sent.is_over() || Instant::now() > limit {
            break sent;
        }
        pause().await;
    };
    if sent.status != "completed" {
        let why = sent.why.unwrap_or(sent.status);
        return Err(not_sent(vm, &why));
    }
    match monitor.run_state().await?.as_str() {
        "postmigrate" => Ok(sent),
        state => Err(not_sent(vm, &format!("it is in state {state} afterwards"))),
    }
}

/// Returns the error of a guest that could not be sent.
pub(super) fn not_sent(vm: &str, why: &str) -> ApiError {
    let message = format!("the guest's QEMU could not send VM \"{vm}\": {why}");
    ApiError::new(
        ErrorCode::MigrationFailed,
        message,
        "the guest runs on where it was; see \
        `godwit vm logs --qemu` if the VM is there, and the log of the guest's QEMU",
    )
}

pub(super) fn cancelled_here() -> ApiError {
    ApiError::new(ErrorCode::Cancelled, "cancelled: the guest runs on where it was", "")
}

/// Passes on what one QEMU sends to the other, for as long as the result lives.
pub(super) fn relay(from: UnixStream, to: UnixStream) -> std::io::Result<Relay> {
    from.set_nonblocking(true)?;
    to.set_nonblocking(true)?;
    let from = tokio::net::UnixStream::from_std(from)?;
    let mut to = tokio::net::UnixStream::from_std(to)?;
    let mut from = tokio::io::BufReader::with_capacity(RELAY_BYTES, from);
    Ok(Relay(tokio::spawn(async move {
        if let Err(error) = tokio::io::copy_buf(&mut from, &mut to).await {
            tracing::debug!(%error, "the stream of an adoption ended");
        }
        let _ = to.shutdown().await;
    })))
}
