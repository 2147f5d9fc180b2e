//! QEMU's own migration as an engine: for VMs that the external engine can't take, and as its peer in benchmarks. The same
//! request, the same report.

use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode, IncomingAccepted, IncomingState, IncomingStatus, QemuEngineOptions};
use godwit_migration::{
    Failure, FailureCode, FailureReport, Outcome, Phase, PhaseReport, Progress, Report, RoundReport, millis,
};
use godwit_qemu::{
    Accelerator, EVENTS, MigrateInfo, MigrationStatus, PAUSE_BEFORE_SWITCHOVER, QemuInfo, Qmp, QmpError,
    QmpEvent, RESUME, ResolvedSpec, STOP, X_IGNORE_SHARED,
};
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::incoming::Entry;
use super::outgoing::{Outgoing, report_of_api};
use super::state_stream::qemu_failure;
use crate::agent::Agent;
use crate::migrations::MigrationControl;
use crate::vm::Vm;

/// Between two looks at QEMU's figures.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the destination may take to run the guest once QEMU says that its migration is complete.
const ARRIVAL_LIMIT: Duration = Duration::from_secs(20);
/// How long the destination may take to remove its shadow.
const FORGET_LIMIT: Duration = Duration::from_secs(5);
/// How long the source's QEMU may take to connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// QEMU's own default for multifd.
const DEFAULT_CHANNELS: u32 = 2;
/// No limit that matters: the link is the limit.
const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;

/// Under TCG, QEMU before this version loses writes to guest memory: when it takes its dirty bitmap word by word it clears
/// the bits, but leaves the vCPUs' TLBs thinking that they are set, and what is written through those is not noted again.
/// ("physmem: Fix migration dirty bitmap coherency with TCG memory access", QEMU 9.0.)
const SOUND_UNDER_TCG: (u32, u32, u32) = (9, 0, 0);
/// One word of QEMU's dirty bitmap: 64 pages. A RAM block that is no multiple of it is taken page by page, which is sound.
const BITMAP_WORD_BYTES: u64 = 64 * 4096;

/// Sets one side's QEMU up; both sides get the same.
async fn set_up(qmp: &Qmp, options: &QemuEngineOptions, downtime_ms: Option<f64>) -> Result<(), QmpError> {
    qmp.migrate_set_capabilities(&[
        (EVENTS, true),
        (X_IGNORE_SHARED, false),
        (PAUSE_BEFORE_SWITCHOVER, false),
        ("multifd", options.multifd_channels.is_some()),
        ("auto-converge", options.auto_converge),
        ("postcopy-ram", options.postcopy),
    ])
    .await?;
    let mut parameters = json!({ "max-bandwidth": UNLIMITED_BYTES_PER_S });
    if options.multifd_channels.is_some() || options.compression.is_some() {
        parameters["multifd-channels"] = options.multifd_channels.unwrap_or(DEFAULT_CHANNELS).into();
        parameters["multifd-compression"] = options.compression.as_deref().unwrap_or("none").into();
    }
    if let Some(downtime_ms) = downtime_ms {
        // Whole milliseconds, at least one.
        let millis = Duration::from_secs_f64(downtime_ms / 1e3).as_millis().max(1);
        parameters["downtime-limit"] = u64::try_from(millis).unwrap_or(u64::MAX).into();
    }
    qmp.migrate_set_parameters(parameters).await
}

/// What is wrong with the options, before anything is made.
fn check(options: &QemuEngineOptions) -> Result<(), FailureReport> {
    let refuse = |message: String, mend: &str| {
        Err(FailureReport { code: ErrorCode::InvalidRequest.to_string(), message, mend: mend.into() })
    };
    match options.multifd_channels {
        Some(channels) if !(1..=255).contains(&channels) => {
            return refuse(format!("{channels} multifd channels are not possible"), "give 1 to 255");
        }
        Some(_) if options.postcopy => {
            return refuse(
                "post-copy and multifd do not go together in QEMU".into(),
                "leave one of them out",
            );
        }
        None if options.compression.is_some() => {
            return refuse("compression needs multifd".into(), "give --multifd-channels as well");
        }
        _ => {}
    }
    match options.compression.as_deref() {
        None | Some("none" | "zlib" | "zstd") => Ok(()),
        Some(other) => refuse(format!("QEMU knows no compression \"{other}\""), "give none, zlib or zstd"),
    }
}

/// Refuses a VM whose memory this QEMU would spoil.
fn check_tracking(spec: &ResolvedSpec, qemu: &QemuInfo) -> Result<(), FailureReport> {
    let sound = spec.accel != Accelerator::Tcg
        || qemu.version >= SOUND_UNDER_TCG
        || spec.memory.iter().all(|block| !block.size.bytes().is_multiple_of(BITMAP_WORD_BYTES));
    if sound {
        return Ok(());
    }
    Err(FailureReport {
        code: ErrorCode::Preflight.to_string(),
        message: format!(
            "QEMU {} loses writes to the guest's memory when it migrates VM \"{}\" under TCG",
            qemu.version_text(),
            spec.name
        ),
        mend: "use Godwit's own engine or QEMU 9.0, or create the VM with 64 KiB more in each memory block \
            (docs/engines.md)"
            .into(),
    })
}

/// Moves the VM by QEMU's own migration.
pub(super) async fn run(outgoing: &Outgoing, control: &MigrationControl) -> Report {
    match prepare(outgoing).await {
        Ok(accepted) => Sending::new(outgoing, accepted).run(control).await,
        Err(failure) => outgoing.failed(failure),
    }
}

async fn prepare(outgoing: &Outgoing) -> Result<IncomingAccepted, FailureReport> {
    check(&outgoing.request.qemu)?;
    let vm = &outgoing.vm;
    let qemu = outgoing.agent.qemu(vm.spec.qemu.as_deref()).await.map_err(report_of_api)?;
    check_tracking(&vm.spec, &qemu)?;
    set_up(&vm.process.qmp, &outgoing.request.qemu, Some(outgoing.request.switchover_budget_ms))
        .await
        .map_err(|error| qemu_failure(&outgoing.agent.config().name, "prepare", &error).to_report())?;
    outgoing.ask_destination(&qemu).await
}

/// A migration under way at the source.
struct Sending<'a> {
    outgoing: &'a Outgoing,
    accepted: IncomingAccepted,
    prepared: Instant,
    /// The vCPUs stopped.
    stopped: Option<Instant>,
    rounds: Vec<RoundReport>,
    round_begun: Instant,
    bytes_before_round: u64,
    postcopy_since: Option<Instant>,
    last: MigrateInfo,
}

/// How QEMU's migration ended.
enum End {
    Completed,
    Not(Outcome, FailureReport),
}

impl<'a> Sending<'a> {
    fn new(outgoing: &'a Outgoing, accepted: IncomingAccepted) -> Self {
        Sending {
            outgoing,
            accepted,
            prepared: Instant::now(),
            stopped: None,
            rounds: Vec::new(),
            round_begun: Instant::now(),
            bytes_before_round: 0,
            postcopy_since: None,
            last: MigrateInfo::default(),
        }
    }

    fn qmp(&self) -> &'a Qmp {
        &self.outgoing.vm.process.qmp
    }

    async fn run(mut self, control: &MigrationControl) -> Report {
        let end = match self.follow(control).await {
            Ok(end) => end,
            Err(failure) => End::Not(self.lost(), failure.to_report()),
        };
        match end {
            End::Completed => self.arrive().await,
            End::Not(outcome, failure) => {
                self.forget().await;
                if outcome != Outcome::InDoubt && self.outgoing.vm.is_running().await == Some(false) {
                    // QEMU resumes by itself where it can; a second time does no harm.
                    let _ = self.qmp().cont().await;
                }
                Report { error: Some(failure), ..self.report(outcome, None) }
            }
        }
    }

    /// Has the destination remove its shadow, so that the next attempt does not find it.
    async fn forget(&self) {
        let path = format!("/v1/incoming/{}", self.accepted.id);
        let gone = async {
            self.outgoing.peer.delete(&path).await?;
            let mut every = tokio::time::interval(POLL_INTERVAL);
            while self.outgoing.peer.get::<IncomingStatus>(&path).await?.state == IncomingState::Receiving {
                every.tick().await;
            }
            Ok::<(), godwit_api::ClientError>(())
        };
        match tokio::time::timeout(FORGET_LIMIT, gone).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(vm = self.outgoing.vm.name, %error, "shadow left to itself"),
            Err(_) => tracing::warn!(vm = self.outgoing.vm.name, "the shadow is not removed yet"),
        }
    }

    /// Where the guest is when QEMU failed: after the begin of post-copy it may run at the destination.
    fn lost(&self) -> Outcome {
        if self.postcopy_since.is_some() { Outcome::InDoubt } else { Outcome::Failed }
    }

    async fn follow(&mut self, control: &MigrationControl) -> Result<End, Failure> {
        let host = &self.outgoing.agent.config().name;
        let Some(address) = self.accepted.addresses.first() else {
            return Err(Failure::new(FailureCode::ProtocolBroken, "the destination named no address"));
        };
        let agent = &self.outgoing.agent;
        let marked = agent.mark_hand_over(&self.outgoing.vm).await;
        marked.map_err(|error| Failure::new(FailureCode::Internal, error.to_string()))?;
        let mut events = self.qmp().events();
        self.round_begun = Instant::now();
        let begun = self.qmp().migrate(&format!("tcp:{address}")).await;
        begun.map_err(|error| qemu_failure(host, "begin to migrate", &error))?;
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        let mut cancelled = false;
        loop {
            tokio::select! {
                event = events.recv() => {
                    let Ok(event) = event else { continue };
                    self.note(&event);
                    if !MigrationStatus::of_event(&event).is_some_and(|status| status.is_over()) {
                        continue;
                    }
                }
                _ = poll.tick() => {}
                // In post-copy the guest runs at the destination: QEMU would take a cancel and lose the guest.
                () = control.cancelled(), if !cancelled && self.postcopy_since.is_none() => {
                    cancelled = true;
                    let asked = self.qmp().migrate_cancel().await;
                    asked.map_err(|error| qemu_failure(host, "cancel its migration", &error))?;
                }
                why = self.qmp().closed() => {
                    let detail = format!("QEMU on host {host} ended: {why}");
                    return Err(Failure::new(FailureCode::HypervisorFailed, detail));
                }
            }
            let info = self.qmp().query_migrate().await;
            let info = info.map_err(|error| qemu_failure(host, "say how it stands", &error))?;
            // What QEMU told before its answer is in the queue, and belongs before it.
            queued(&mut events).for_each(|event| self.note(&event));
            self.look(info, control);
            if let Some(end) = self.ended(cancelled) {
                return Ok(end);
            }
            if !cancelled {
                let begun = self.maybe_postcopy().await;
                begun.map_err(|error| qemu_failure(host, "begin post-copy", &error))?;
            }
        }
    }

    fn note(&mut self, event: &QmpEvent) {
        if event.name == STOP && self.stopped.is_none() {
            self.stopped = Some(event.at);
        }
    }

    fn look(&mut self, info: MigrateInfo, control: &MigrationControl) {
        let ram = info.ram.clone().unwrap_or_default();
        if self.rounds.len() as u64 + 1 < ram.dirty_sync_count {
            self.end_round(&ram);
        }
        let elapsed = self.outgoing.begun.elapsed();
        let bandwidth = ram.transferred as f64 / self.prepared.elapsed().as_secs_f64().max(1e-3);
        let dirty = ram.dirty_pages_rate as f64 * 4096.0;
        let net = bandwidth - dirty;
        let phase = match (&info.status, self.stopped) {
            _ if self.postcopy_since.is_some() => Phase::PageIn,
            (Some(MigrationStatus::Setup), _) => Phase::Prepare,
            (_, Some(_)) => Phase::Switchover,
            _ => Phase::PreCopy,
        };
        control.progress(Progress {
            phase,
            round: u32::try_from(self.rounds.len()).unwrap_or(u32::MAX),
            remaining_bytes: ram.remaining,
            total_bytes: self.outgoing.vm.spec.memory_bytes(),
            sent_bytes: ram.transferred,
            dirty_bytes_per_s: dirty,
            bandwidth_bytes_per_s: bandwidth,
            eta_ms: (net > 0.0).then(|| ram.remaining as f64 / net * 1e3),
            elapsed_ms: millis(elapsed),
        });
        self.last = info;
    }

    /// QEMU tells sums since the begin: a round is what was added since the one before.
    fn end_round(&mut self, ram: &godwit_qemu::RamInfo) {
        let pages_before: u64 = self.rounds.iter().map(|round| round.pages).sum();
        let zeros_before: u64 = self.rounds.iter().map(|round| round.zero_pages).sum();
        self.rounds.push(RoundReport {
            round: u32::try_from(self.rounds.len()).unwrap_or(u32::MAX),
            pages: (ram.normal + ram.duplicate).saturating_sub(pages_before),
            zero_pages: ram.duplicate.saturating_sub(zeros_before),
            bytes: ram.transferred.saturating_sub(self.bytes_before_round),
            duration_ms: millis(self.round_begun.elapsed()),
            dirty_pages_per_s: ram.dirty_pages_rate as f64,
        });
        self.bytes_before_round = ram.transferred;
        self.round_begun = Instant::now();
    }

    fn ended(&mut self, cancelled: bool) -> Option<End> {
        let failed = |code: &str, message: String, mend: &str| FailureReport {
            code: code.to_owned(),
            message,
            mend: mend.to_owned(),
        };
        match self.last.status.as_ref()? {
            MigrationStatus::Completed => {
                let ram = self.last.ram.clone().unwrap_or_default();
                self.end_round(&ram);
                Some(End::Completed)
            }
            MigrationStatus::Cancelled => {
                let code = FailureCode::Cancelled;
                Some(End::Not(Outcome::Cancelled, failed(code.name(), "cancelled".into(), code.mend())))
            }
            MigrationStatus::Failed => {
                let why = self.last.error_desc.clone().unwrap_or_else(|| "it does not say why".into());
                let code = if cancelled { FailureCode::Cancelled } else { FailureCode::HypervisorFailed };
                let outcome = if cancelled { Outcome::Cancelled } else { self.lost() };
                Some(End::Not(
                    outcome,
                    failed(code.name(), format!("QEMU's migration failed: {why}"), code.mend()),
                ))
            }
            MigrationStatus::PostcopyPaused => {
                let message =
                    "the link broke during QEMU's post-copy: the guest is paused at the destination";
                Some(End::Not(
                    Outcome::InDoubt,
                    failed(FailureCode::InDoubt.name(), message.into(), FailureCode::InDoubt.mend()),
                ))
            }
            _ => None,
        }
    }

    /// Post-copy begins when everything has been sent once.
    async fn maybe_postcopy(&mut self) -> Result<(), QmpError> {
        let active = self.last.status == Some(MigrationStatus::Active);
        if self.outgoing.request.qemu.postcopy
            && active
            && self.postcopy_since.is_none()
            && !self.rounds.is_empty()
        {
            self.qmp().migrate_start_postcopy().await?;
            self.postcopy_since = Some(Instant::now());
        }
        Ok(())
    }

    /// QEMU says that it is done: the destination must say so as well before the source lets go.
    async fn arrive(self) -> Report {
        let path = format!("/v1/incoming/{}", self.accepted.id);
        let limit = Instant::now() + ARRIVAL_LIMIT;
        let mut every = tokio::time::interval(Duration::from_millis(5));
        let mut clock = ShortestAnswer::default();
        while Instant::now() < limit {
            every.tick().await;
            let asked = Instant::now();
            let Ok(status) = self.outgoing.peer.get::<IncomingStatus>(&path).await else { continue };
            clock.take(asked, &status);
            match status.state {
                IncomingState::Runs => {
                    // Three answers, so that the clocks are compared by a short one.
                    for _ in 0..2 {
                        let asked = Instant::now();
                        if let Ok(status) = self.outgoing.peer.get::<IncomingStatus>(&path).await {
                            clock.take(asked, &status);
                        }
                    }
                    let running = status.running_ns.and_then(|ns| clock.to_local(ns));
                    if let Err(error) = self.outgoing.agent.release(&self.outgoing.vm).await {
                        tracing::error!(%error, "the moved VM's remains could not be removed");
                    }
                    return self.report(Outcome::Completed, running);
                }
                IncomingState::Refused => {
                    // The guest stands still here and does not run there.
                    let resumed = self.qmp().cont().await;
                    let why = status.failure.map_or_else(String::new, |failure| failure.message);
                    let failure =
                        Failure::new(FailureCode::HypervisorFailed, format!("the destination failed: {why}"));
                    let outcome = if resumed.is_ok() { Outcome::Failed } else { Outcome::InDoubt };
                    return Report { error: Some(failure.to_report()), ..self.report(outcome, None) };
                }
                IncomingState::Receiving => {}
            }
        }
        let failure =
            Failure::new(FailureCode::InDoubt, "QEMU says that it is done; the destination does not answer");
        Report { error: Some(failure.to_report()), ..self.report(Outcome::InDoubt, None) }
    }

    fn report(self, outcome: Outcome, running: Option<Instant>) -> Report {
        let begun = self.outgoing.begun;
        let stopped = self.stopped.unwrap_or_else(Instant::now);
        let span = |from: Instant, to: Instant| millis(to.saturating_duration_since(from));
        let mut phases = vec![
            PhaseReport { phase: Phase::Prepare, duration_ms: span(begun, self.prepared) },
            PhaseReport { phase: Phase::PreCopy, duration_ms: span(self.prepared, stopped) },
        ];
        if let Some(running) = running {
            phases.push(PhaseReport { phase: Phase::Switchover, duration_ms: span(stopped, running) });
            let announce = if self.postcopy_since.is_some() { Phase::PageIn } else { Phase::Announce };
            phases.push(PhaseReport { phase: announce, duration_ms: span(running, Instant::now()) });
        }
        let ram = self.last.ram.unwrap_or_default();
        Report {
            switchover_ms: self.stopped.zip(running).map(|(stopped, running)| span(stopped, running)),
            wire_bytes: ram.transferred,
            rounds: self.rounds,
            phases,
            ..self.outgoing.blank(outcome)
        }
    }
}

/// The events that have come and were not looked at.
fn queued(events: &mut broadcast::Receiver<QmpEvent>) -> impl Iterator<Item = QmpEvent> {
    std::iter::from_fn(|| {
        loop {
            match events.try_recv() {
                Ok(event) => return Some(event),
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(_) => return None,
            }
        }
    })
}

/// The destination's clock by the answer that came soonest: its time stands for the middle of the exchange.
#[derive(Default)]
struct ShortestAnswer {
    best: Option<(Duration, Instant, u64)>,
}

impl ShortestAnswer {
    fn take(&mut self, asked: Instant, status: &IncomingStatus) {
        let took = asked.elapsed();
        if self.best.is_none_or(|(shortest, ..)| took < shortest) {
            self.best = Some((took, asked + took / 2, status.now_ns));
        }
    }

    fn to_local(&self, peer_ns: u64) -> Option<Instant> {
        let (_, middle, now_ns) = self.best?;
        if peer_ns >= now_ns {
            middle.checked_add(Duration::from_nanos(peer_ns - now_ns))
        } else {
            middle.checked_sub(Duration::from_nanos(now_ns - peer_ns))
        }
    }
}

/// At the destination: QEMU listens for QEMU. A task watches it to its end.
pub(super) async fn begin_incoming(
    agent: &Arc<Agent>,
    vm: &Arc<Vm>,
    entry: Arc<Entry>,
    cancel: mpsc::Receiver<()>,
    options: &QemuEngineOptions,
) -> Result<IncomingAccepted, ApiError> {
    let qmp = &vm.process.qmp;
    let failed = |what: &str, error: QmpError| {
        let failure = qemu_failure(&agent.config().name, what, &error);
        ApiError::new(ErrorCode::HypervisorFailed, failure.detail, failure.code.mend())
    };
    set_up(qmp, options, None).await.map_err(|error| failed("prepare", error))?;
    let events = qmp.events();
    let Some(&ip) = agent.config().migration_addresses.first() else {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            "no address for migrations",
            "set migration_addresses",
        ));
    };
    let uri = format!("tcp:{}", SocketAddr::new(ip, 0));
    qmp.migrate_incoming(&uri).await.map_err(|error| failed("listen", error))?;
    let info = qmp
        .execute("query-migrate", Value::Null)
        .await
        .map_err(|error| failed("say where it listens", error))?;
    let port = info["socket-address"][0]["port"].as_str().and_then(|port| port.parse().ok());
    let Some(port) = port else {
        let message = format!("QEMU on host {} does not say where it listens", agent.config().name);
        return Err(ApiError::new(ErrorCode::HypervisorFailed, message, "use a QEMU of 7.2 or later"));
    };
    let accepted =
        IncomingAccepted { id: entry.id().to_string(), addresses: vec![SocketAddr::new(ip, port)] };
    tokio::spawn(watch_incoming(Arc::clone(agent), Arc::clone(vm), entry, cancel, events));
    Ok(accepted)
}

async fn watch_incoming(
    agent: Arc<Agent>,
    vm: Arc<Vm>,
    entry: Arc<Entry>,
    cancel: mpsc::Receiver<()>,
    mut events: broadcast::Receiver<QmpEvent>,
) {
    let begun = Instant::now();
    let (mut connected, mut running) = (false, None);
    let mut poll = tokio::time::interval(Duration::from_millis(100));
    let failure = loop {
        tokio::select! {
            event = events.recv() => {
                let Ok(event) = event else { continue };
                if event.name == RESUME {
                    running = Some(event.at);
                }
                match MigrationStatus::of_event(&event) {
                    Some(MigrationStatus::Active) => connected = true,
                    Some(MigrationStatus::Completed) => {
                        // An answer comes after the events before it; a guest that was paused at the source stays so.
                        let _ = vm.is_running().await;
                        let resumed = queued(&mut events).find(|event| event.name == RESUME);
                        return arrived(&agent, &vm, &entry, running.or(resumed.map(|event| event.at))).await;
                    }
                    Some(MigrationStatus::Failed) => {
                        break Failure::new(FailureCode::HypervisorFailed, "QEMU's incoming migration failed");
                    }
                    _ => {}
                }
            }
            _ = poll.tick() => {
                if cancel.try_recv().is_ok() && running.is_none() {
                    break Failure::new(FailureCode::Cancelled, "cancelled by the source");
                }
                if !connected && begun.elapsed() > CONNECT_LIMIT {
                    break Failure::new(FailureCode::LaneLost, "the source's QEMU did not connect in time");
                }
            }
            _ = vm.process.exited() => {
                break Failure::new(FailureCode::HypervisorFailed, "QEMU ended while the guest arrived");
            }
        }
    };
    tracing::warn!(vm = vm.name, %failure, "shadow discarded");
    agent.discard(&vm).await;
    entry.refused(&failure);
}

/// The migration is complete.
async fn arrived(agent: &Arc<Agent>, vm: &Arc<Vm>, entry: &Entry, running: Option<Instant>) {
    if let Err(error) = agent.promote(vm).await {
        tracing::error!(vm = vm.name, %error, "the VM's record could not be saved");
    }
    entry.runs(running);
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_qemu::{Accel, AccelProbe, ByteSize, MachineType, MemoryBlock, VmSpec};

    fn qemu(version: (u32, u32, u32)) -> QemuInfo {
        let machine = MachineType { name: "pc-q35-7.2".into(), alias: Some("q35".into()), is_default: true };
        let cpu_models = vec!["Westmere-v1".into(), "host".into()];
        QemuInfo { path: "/q".into(), version, machines: vec![machine], cpu_models }
    }

    fn vm(accel: Accel, block_bytes: &[u64]) -> ResolvedSpec {
        let memory = block_bytes.iter().map(|&bytes| MemoryBlock::shared(ByteSize::from_bytes(bytes)));
        let spec =
            VmSpec { accel, memory: memory.collect(), kernel: Some("/k".into()), ..VmSpec::new("web") };
        spec.resolve(&qemu((7, 2, 22)), &AccelProbe { kvm: true, reason: String::new() }).unwrap()
    }

    #[test]
    fn memory_that_qemu_would_spoil_is_refused() {
        const GIB: u64 = 1 << 30;
        let (debian_12, mended) = (qemu((7, 2, 22)), qemu((9, 0, 0)));
        let refused = check_tracking(&vm(Accel::Tcg, &[GIB]), &debian_12).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Preflight.to_string());
        assert!(refused.message.contains("7.2.22") && refused.mend.contains("64 KiB"), "{refused:?}");
        // One block of two is one too many.
        assert!(check_tracking(&vm(Accel::Tcg, &[GIB + 0x1_0000, GIB]), &debian_12).is_err());
        assert!(check_tracking(&vm(Accel::Tcg, &[GIB + 0x1_0000]), &debian_12).is_ok());
        assert!(check_tracking(&vm(Accel::Tcg, &[GIB]), &mended).is_ok());
        assert!(check_tracking(&vm(Accel::Kvm, &[GIB]), &debian_12).is_ok());
    }

    #[test]
    fn queued_events_are_all_looked_at_also_when_some_were_lost() {
        let (sender, mut events) = broadcast::channel(2);
        for name in ["RESUME", "MIGRATION", STOP] {
            let (data, at) = (Value::Null, Instant::now());
            sender.send(QmpEvent { name: name.into(), data, at, emitted: None }).unwrap();
        }
        let names: Vec<_> = queued(&mut events).map(|event| event.name).collect();
        assert_eq!(names, ["MIGRATION", STOP]);
        assert_eq!(queued(&mut events).count(), 0);
        drop(sender);
        assert_eq!(queued(&mut events).count(), 0);
    }
}
