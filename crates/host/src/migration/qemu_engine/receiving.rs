//! QEMU's own migration at the destination: QEMU listens for the source's QEMU; a task follows it
//! to its end.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode, IncomingAccepted, QemuEngineOptions};
use godwit_migration::Failure;
use godwit_qemu::{AnnounceParameters, MigrationStatus, QmpError, QmpEvent, RESUME};
use godwit_types::FailureCode;
use serde_json::Value;
use tokio::sync::broadcast;

use super::relayed;
use super::settings::{Side, queued, set_up};
use crate::agent::Agent;
use crate::incoming_migrations::Entry;
use crate::state_stream::qemu_failure;
use crate::vm::Vm;

/// Time for the source's QEMU to connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Time for which a loaded guest waits for the source's decision: longer than the source keeps
/// asking.
const WORD_LIMIT: Duration = Duration::from_secs(60);
/// Poll interval for a cancellation and the time limits.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Part of QEMU's error if its user has no right to a userfaultfd for the kernel's own faults (7.2
/// to 10.0).
const NO_POSTCOPY: &str = "Postcopy is not supported";
const POSTCOPY_REMEDY: &str = "allow page faults to QEMU's user: \
    `sysctl vm.unprivileged_userfaultfd=1` on that host; or use Godwit's own page-in, which needs \
    no such right (--engine godwit --page-in)";

/// Way of the stream between the two QEMUs.
pub(crate) enum Way<'a> {
    /// QEMU connects to QEMU, with these options.
    Direct(&'a QemuEngineOptions),
    /// The agents carry it, over a lane that these accept.
    Agents(Vec<TcpListener>),
}

/// Makes QEMU ready for the stream. A task follows it to its end.
pub(crate) async fn begin_incoming(
    agent: &Arc<Agent>,
    vm: &Arc<Vm>,
    entry: Arc<Entry>,
    cancel: mpsc::Receiver<()>,
    way: Way<'_>,
) -> Result<IncomingAccepted, ApiError> {
    let qmp = &vm.process.qmp;
    let plain = QemuEngineOptions::default();
    let options = match way {
        Way::Direct(options) => options,
        Way::Agents(_) => &plain,
    };
    set_up(qmp, options, Side::Destination)
        .await
        .map_err(|error| failed(agent, "prepare QEMU", &error))?;
    let events = qmp.events();
    let (by_itself, relayed) = (options.runs_by_itself(), matches!(way, Way::Agents(_)));
    let addresses = match way {
        Way::Direct(_) => vec![listen(agent, vm).await?],
        Way::Agents(listeners) => relayed::open(agent, vm, &entry, listeners).await?,
    };
    let accepted = IncomingAccepted {
        id: entry.id.to_string(),
        addresses,
        references: None,
        contents: Vec::new(),
    };
    let receiving = Receiving {
        agent: Arc::clone(agent),
        vm: Arc::clone(vm),
        entry,
        begun: Instant::now(),
        by_itself,
        relayed,
        connected: false,
        loaded: None,
        running: None,
    };
    tokio::spawn(receiving.run(cancel, events));
    Ok(accepted)
}

pub(super) fn failed(agent: &Agent, what: &str, error: &QmpError) -> ApiError {
    let failure = qemu_failure(&agent.config().name, what, error);
    let no_postcopy = failure.detail.contains(NO_POSTCOPY);
    let remedy = if no_postcopy { POSTCOPY_REMEDY } else { failure.code.remedy() };
    ApiError::new(ErrorCode::HypervisorFailed, failure.detail, remedy)
}

/// Makes QEMU listen. Returns where.
async fn listen(agent: &Agent, vm: &Vm) -> Result<SocketAddr, ApiError> {
    let qmp = &vm.process.qmp;
    let Some(&ip) = agent.config().migration_addresses.first() else {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            "cannot receive a VM: this host has no address for migrations",
            "set migration_addresses",
        ));
    };
    let uri = format!("tcp:{}", SocketAddr::new(ip, 0));
    qmp.migrate_incoming(&uri)
        .await
        .map_err(|error| failed(agent, "listen for the source", &error))?;
    let info = qmp
        .execute("query-migrate", Value::Null)
        .await
        .map_err(|error| failed(agent, "read the listen address", &error))?;
    let port = info["socket-address"][0]["port"].as_str().and_then(|port| port.parse().ok());
    let Some(port) = port else {
        let message = format!("cannot read QEMU's listen address on host {}", agent.config().name);
        return Err(ApiError::new(ErrorCode::HypervisorFailed, message, "use QEMU 7.2 or later"));
    };
    Ok(SocketAddr::new(ip, port))
}

/// An arriving guest.
struct Receiving {
    agent: Arc<Agent>,
    vm: Arc<Vm>,
    entry: Arc<Entry>,
    begun: Instant,
    /// QEMU runs the guest as soon as it is loaded.
    by_itself: bool,
    /// The agents carry the stream.
    relayed: bool,
    connected: bool,
    /// Time at which the guest was complete here.
    loaded: Option<Instant>,
    /// Time since which the vCPUs run.
    running: Option<Instant>,
}

/// Outcome at the destination.
enum End {
    Runs,
    /// Post-copy failed.
    Broken,
    Not(Failure),
}

impl Receiving {
    async fn run(
        mut self,
        mut cancel: mpsc::Receiver<()>,
        mut events: broadcast::Receiver<QmpEvent>,
    ) {
        match self.follow(&mut cancel, &mut events).await {
            End::Runs => {
                // QEMU's answer follows its earlier events. A guest that was paused at the source
                // stays paused.
                let _ = self.vm.is_running().await;
                queued(&mut events).for_each(|event| self.note(&event));
                self.agent.promote(&self.vm).await;
                self.entry.runs(self.running);
                if self.relayed {
                    self.announce().await;
                }
            }
            End::Broken => {
                self.agent.strand(&self.vm).await;
                self.entry.broken();
            }
            End::Not(failure) => {
                tracing::warn!(vm = self.vm.name.as_str(), %failure, "shadow discarded");
                self.agent.discard(&self.vm).await;
                self.entry.refused(&failure);
            }
        }
    }

    async fn follow(
        &mut self,
        cancel: &mut mpsc::Receiver<()>,
        events: &mut broadcast::Receiver<QmpEvent>,
    ) -> End {
        let entry = Arc::clone(&self.entry);
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        loop {
            tokio::select! {
                event = events.recv() => {
                    let event = match event {
                        Ok(event) => event,
                        Err(broadcast::error::RecvError::Lagged(_)) => continue,
                        Err(broadcast::error::RecvError::Closed) => {
                            let what = "QEMU's monitor closed while the guest arrived";
                            return End::Not(Failure::new(FailureCode::HypervisorFailed, what));
                        }
                    };
                    if let Some(end) = self.handle(&event) {
                        return end;
                    }
                }
                run = entry.word(), if self.loaded.is_some() => return self.obey(run, events).await,
                _ = poll.tick() => {
                    if let Some(failure) = self.overdue(cancel) {
                        return End::Not(failure);
                    }
                }
                _ = self.vm.process.exited() => {
                    let what = "QEMU ended while the guest arrived";
                    return End::Not(Failure::new(FailureCode::HypervisorFailed, what));
                }
            }
        }
    }

    /// Announces the addresses of an adopted guest again, now that it answers: its switches have
    /// known them on another port for as long as it ran there.
    async fn announce(&self) {
        let qmp = &self.vm.process.qmp;
        if let Err(error) = qmp.announce_self(AnnounceParameters::default()).await {
            let vm = self.vm.name.as_str();
            tracing::warn!(vm, %error, "cannot announce the addresses a second time");
        }
    }

    fn note(&mut self, event: &QmpEvent) {
        if event.name == RESUME {
            self.running = Some(event.at);
        }
    }

    fn handle(&mut self, event: &QmpEvent) -> Option<End> {
        self.note(event);
        match MigrationStatus::of_event(event)? {
            MigrationStatus::Active => self.connected = true,
            MigrationStatus::Completed if self.by_itself => return Some(End::Runs),
            MigrationStatus::Completed => {
                self.loaded = Some(event.at);
                self.entry.loaded();
            }
            MigrationStatus::PostcopyPaused => return Some(End::Broken),
            MigrationStatus::Failed => {
                let what = "QEMU's incoming migration failed";
                return Some(End::Not(Failure::new(FailureCode::HypervisorFailed, what)));
            }
            _ => {}
        }
        None
    }

    /// Carries out the decision of a source that has released the guest.
    async fn obey(&mut self, run: bool, events: &mut broadcast::Receiver<QmpEvent>) -> End {
        if let Err(error) = self.agent.note_take_over(&self.vm) {
            return End::Not(Failure::new(FailureCode::Internal, error.message));
        }
        if let Err(error) = self.vm.files.note_run_permitted() {
            let detail = format!("cannot record that the guest may run: {error}");
            return End::Not(Failure::new(FailureCode::Internal, detail));
        }
        if run && let Err(error) = self.vm.process.qmp.resume().await {
            // QEMU reports running vCPUs before it answers. If it ends or stalls after that, the
            // guest has run here, and must not run at the source again.
            queued(events).for_each(|event| self.note(&event));
            if self.running.is_some() {
                return End::Runs;
            }
            return End::Not(qemu_failure(&self.agent.config().name, "resume the guest", &error));
        }
        End::Runs
    }

    fn overdue(&self, cancel: &mut mpsc::Receiver<()>) -> Option<Failure> {
        if cancel.try_recv().is_ok() && self.running.is_none() {
            return Some(Failure::new(FailureCode::Cancelled, "cancelled by the source"));
        }
        if !self.connected && self.begun.elapsed() > CONNECT_LIMIT {
            return Some(Failure::new(
                FailureCode::LaneLost,
                "the source's QEMU did not connect in time",
            ));
        }
        let silent = self.loaded.is_some_and(|since| since.elapsed() > WORD_LIMIT);
        silent.then(|| {
            Failure::new(
                FailureCode::LaneLost,
                "the source did not permit the guest to run in time",
            )
        })
    }
}
