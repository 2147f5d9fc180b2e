//! QEMU's own migration at the source: followed to its end, and the hand-over by the agents.
//!
//! Ownership: unless the destination's QEMU runs the guest by itself
//! ([`QemuEngineOptions::runs_by_itself`]), it waits for [`Sending::hand_over`]. That is called
//! only once the source's QEMU has completed and can no longer resume by itself. Before that, the
//! guest belongs to the source, whatever fails.
//!
//! [`QemuEngineOptions::runs_by_itself`]: godwit_api::QemuEngineOptions::runs_by_itself

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use godwit_api::{IncomingAccepted, IncomingRun, IncomingState, IncomingStatus};
use godwit_migration::{Failure, millis};
use godwit_qemu::{MigrateInfo, MigrationStatus, Qmp, QmpError, QmpEvent, STOP};
use godwit_types::{
    FailureCode, Fault, Outcome, Phase, PhaseReport, Progress, Report, RoundReport,
};

use super::settings::{bandwidth, queued};
use crate::agent::ended::shut_down;
use crate::firmware::VariablesWatch;
use crate::migration::outgoing::Outgoing;
use crate::migrations::MigrationControl;
use crate::state_stream::qemu_failure;
use crate::verdict::{self, Answer, HandOver};

/// Poll interval for QEMU's figures.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time for the destination to run the guest after QEMU reports a completed migration.
const ARRIVAL_LIMIT: Duration = Duration::from_secs(20);
/// Interval between two queries whether it does.
const ARRIVAL_INTERVAL: Duration = Duration::from_millis(5);
/// Time for QEMU to end a migration that can no longer be followed.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Migrates the guest to the accepted shadow.
pub(super) async fn send(
    outgoing: &Outgoing,
    accepted: IncomingAccepted,
    control: &MigrationControl,
) -> Report {
    let runs = outgoing.vm.is_running().await == Some(true);
    Sending::new(outgoing, accepted, runs).run(control).await
}

/// A running migration at the source.
struct Sending<'a> {
    outgoing: &'a Outgoing,
    accepted: IncomingAccepted,
    /// Whether the guest ran when the migration began.
    runs: bool,
    prepared: Instant,
    stopped: Option<Instant>,
    rounds: Vec<RoundReport>,
    round_begun: Instant,
    bytes_before_round: u64,
    postcopy_since: Option<Instant>,
    /// The bandwidth limit that QEMU has.
    limit_bytes_per_s: Option<u64>,
    last: MigrateInfo,
    /// Variables of the VM's firmware, if it has any.
    variables: Option<VariablesWatch>,
}

/// Outcome of QEMU's migration.
enum End {
    Completed,
    Not(Outcome, Fault),
}

impl<'a> Sending<'a> {
    fn new(outgoing: &'a Outgoing, accepted: IncomingAccepted, runs: bool) -> Self {
        Sending {
            outgoing,
            accepted,
            runs,
            prepared: Instant::now(),
            stopped: None,
            rounds: Vec::new(),
            round_begun: Instant::now(),
            bytes_before_round: 0,
            postcopy_since: None,
            limit_bytes_per_s: None,
            last: MigrateInfo::default(),
            variables: None,
        }
    }

    fn qmp(&self) -> &'a Qmp {
        &self.outgoing.vm.process.qmp
    }

    async fn run(mut self, control: &MigrationControl) -> Report {
        match self.follow(control).await {
            Ok(End::Completed) if self.guest_has_shut_down().await => {
                let failure = shut_down(&self.outgoing.vm.name);
                self.stay(Outcome::Failed, failure.to_fault()).await
            }
            Ok(End::Completed) => match self.variables_arrive() {
                Ok(()) => self.arrive().await,
                Err(failure) => self.stay(Outcome::Failed, failure.to_fault()).await,
            },
            Ok(End::Not(outcome, failure)) => self.stay(outcome, failure).await,
            Err(failure) => {
                let outcome =
                    if self.end_migration().await { Outcome::Failed } else { Outcome::InDoubt };
                self.stay(outcome, failure.to_fault()).await
            }
        }
    }

    /// Whether the guest had shut itself down when it was stopped for its hand-over. It is then not
    /// handed over, because the destination would not know. A destination that runs the guest by
    /// itself has it by now.
    async fn guest_has_shut_down(&self) -> bool {
        if self.outgoing.request.qemu.runs_by_itself() {
            return false;
        }
        // QEMU's main loop reports a shutdown at the latest in the turn in which it takes this
        // query.
        let _ = self.outgoing.vm.is_running().await;
        let _ = self.outgoing.vm.is_running().await;
        self.qmp().guest_has_shut_down()
    }

    /// Checks that all variables of the guest's firmware are in QEMU's stream. A destination that
    /// runs the guest by itself has it by now, whatever the result.
    fn variables_arrive(&self) -> Result<(), Failure> {
        let checked = self.variables.as_ref().map_or(Ok(()), VariablesWatch::unchanged);
        match checked {
            Err(failure) if self.outgoing.request.qemu.runs_by_itself() => {
                let vm = self.outgoing.vm.name.as_str();
                tracing::error!(vm, %failure, "variables of the guest's firmware are lost");
                Ok(())
            }
            checked => checked,
        }
    }

    /// Ends QEMU's migration when its state is unknown, so that it does not stop the guest later.
    /// Returns false if it may continue.
    async fn end_migration(&self) -> bool {
        let over = async {
            let mut every = tokio::time::interval(POLL_INTERVAL);
            loop {
                every.tick().await;
                match self.qmp().query_migrate().await {
                    Ok(info) if info.status.as_ref().is_none_or(MigrationStatus::is_over) => return,
                    Ok(_) => drop(self.qmp().migrate_cancel().await),
                    Err(_) => {}
                }
            }
        };
        tokio::select! {
            // A QEMU that has ended migrates nothing.
            _ = self.outgoing.vm.process.exited() => true,
            ended = tokio::time::timeout(END_LIMIT, over) => ended.is_ok(),
        }
    }

    /// Ends a failed migration: the guest continues here, unless the destination's QEMU may run it.
    async fn stay(self, outcome: Outcome, mut failure: Fault) -> Report {
        let there =
            verdict::forget(&self.outgoing.peer, &self.accepted.id, &self.outgoing.vm.name).await;
        let complete_there = self.stopped.is_some() && self.outgoing.request.qemu.runs_by_itself();
        if outcome == Outcome::InDoubt || (complete_there && there != Some(IncomingState::Refused))
        {
            let doubt = FailureCode::InDoubt;
            let failure = Fault {
                code: doubt.name().to_owned(),
                message: format!("{}; the destination's QEMU may run the guest", failure.message),
                remedy: doubt.remedy().to_owned(),
            };
            return Report { error: Some(failure), ..self.report(Outcome::InDoubt, None) };
        }
        if self.runs && self.outgoing.vm.is_running().await == Some(false) {
            // QEMU resumes by itself if it can; a second resume does no harm.
            if let Err(error) = self.qmp().resume().await {
                let vm = self.outgoing.vm.name.as_str();
                tracing::error!(vm, %error, "cannot resume the guest on this host");
                failure.message =
                    format!("{}; cannot resume the guest on this host: {error}", failure.message);
            }
        }
        Report { error: Some(failure), ..self.report(outcome, None) }
    }

    async fn follow(&mut self, control: &MigrationControl) -> Result<End, Failure> {
        let host = &self.outgoing.agent.config().name;
        let Some(&address) = self.accepted.addresses.first() else {
            return Err(Failure::new(
                FailureCode::ProtocolBroken,
                "the destination returned no address",
            ));
        };
        if let Some(near) = near_address(address) {
            control.pace.uses(near);
        }
        self.keep_limit(control)
            .await
            .map_err(|error| qemu_failure(host, "set the bandwidth limit", &error))?;
        let agent = &self.outgoing.agent;
        let marked =
            agent.mark_hand_over(&self.outgoing.vm, &self.outgoing.request.to, false, self.runs);
        marked.map_err(|error| Failure::new(FailureCode::Internal, error.to_string()))?;
        self.variables = agent.watch_variables(&self.outgoing.vm)?;
        let mut events = self.qmp().events();
        self.round_begun = Instant::now();
        let begun = self.qmp().migrate(&format!("tcp:{address}")).await;
        begun.map_err(|error| qemu_failure(host, "start the migration", &error))?;
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
                // In post-copy the guest runs at the destination: QEMU would accept a cancellation
                // and lose the guest.
                () = control.cancelled(), if !cancelled && self.postcopy_since.is_none() => {
                    cancelled = true;
                    let asked = self.qmp().migrate_cancel().await;
                    asked.map_err(|error| qemu_failure(host, "cancel the migration", &error))?;
                }
                why = self.qmp().closed() => {
                    let detail = format!("QEMU on host {host} ended: {why}");
                    return Err(Failure::new(FailureCode::HypervisorFailed, detail));
                }
            }
            let info = self.qmp().query_migrate().await;
            let info =
                info.map_err(|error| qemu_failure(host, "read the migration status", &error))?;
            // Events that QEMU sent before its answer are queued, and belong before it.
            queued(&mut events).for_each(|event| self.note(&event));
            self.update(info, control);
            if let Some(end) = self.ended(cancelled) {
                return Ok(end);
            }
            if !cancelled {
                let limited = self.keep_limit(control).await;
                limited.map_err(|error| qemu_failure(host, "set the bandwidth limit", &error))?;
                let begun = self.maybe_postcopy().await;
                begun.map_err(|error| qemu_failure(host, "start post-copy", &error))?;
            }
        }
    }

    /// Sets the current bandwidth limit in QEMU, if it has changed.
    async fn keep_limit(&mut self, control: &MigrationControl) -> Result<(), QmpError> {
        let limit = control.pace.data_bytes_per_s();
        if limit != self.limit_bytes_per_s {
            self.qmp().migrate_set_parameters(bandwidth(limit)).await?;
            self.limit_bytes_per_s = limit;
        }
        Ok(())
    }

    fn note(&mut self, event: &QmpEvent) {
        if event.name == STOP && self.stopped.is_none() {
            self.stopped = Some(event.at);
        }
    }

    fn update(&mut self, info: MigrateInfo, control: &MigrationControl) {
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
            total_bytes: self.outgoing.vm.spec().memory_bytes(),
            sent_bytes: ram.transferred,
            dirty_bytes_per_s: dirty,
            bandwidth_bytes_per_s: bandwidth,
            bandwidth_limit: control.pace.holding(),
            eta_ms: (net > 0.0).then(|| ram.remaining as f64 / net * 1e3),
            elapsed_ms: millis(elapsed),
            ..Progress::begin(0)
        });
        self.last = info;
    }

    /// Ends a round. QEMU reports totals since the start; a round is the increase since the
    /// previous one.
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
            throttled_to_pages_per_s: None,
        });
        self.bytes_before_round = ram.transferred;
        self.round_begun = Instant::now();
    }

    fn ended(&mut self, cancelled: bool) -> Option<End> {
        let failed = |code: &str, message: String, remedy: &str| Fault {
            code: code.to_owned(),
            message,
            remedy: remedy.to_owned(),
        };
        match self.last.status.as_ref()? {
            MigrationStatus::Completed => {
                let ram = self.last.ram.clone().unwrap_or_default();
                self.end_round(&ram);
                Some(End::Completed)
            }
            MigrationStatus::Cancelled => {
                let code = FailureCode::Cancelled;
                Some(End::Not(
                    Outcome::Cancelled,
                    failed(code.name(), "cancelled".into(), code.remedy()),
                ))
            }
            MigrationStatus::Failed => {
                let why = self.last.error_desc.clone().unwrap_or_else(|| "no reason given".into());
                let code =
                    if cancelled { FailureCode::Cancelled } else { FailureCode::HypervisorFailed };
                let outcome = if cancelled { Outcome::Cancelled } else { Outcome::Failed };
                Some(End::Not(
                    outcome,
                    failed(code.name(), format!("QEMU's migration failed: {why}"), code.remedy()),
                ))
            }
            MigrationStatus::PostcopyPaused => {
                let message = "the link broke during QEMU's post-copy: the guest is paused at the \
                               destination";
                Some(End::Not(
                    Outcome::InDoubt,
                    failed(
                        FailureCode::InDoubt.name(),
                        message.into(),
                        FailureCode::InDoubt.remedy(),
                    ),
                ))
            }
            _ => None,
        }
    }

    /// Starts post-copy once everything has been sent once.
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

    /// Completes the migration: QEMU has finished, and the destination must run the guest before
    /// the source releases it.
    async fn arrive(self) -> Report {
        let limit = Instant::now() + ARRIVAL_LIMIT;
        let mut every = tokio::time::interval(ARRIVAL_INTERVAL);
        let mut clock = ShortestAnswer::default();
        while Instant::now() < limit {
            every.tick().await;
            match self.hand_over(&mut clock).await {
                Answer::Runs(status) => {
                    let running = status.and_then(|status| clock.to_local(status.running_ns?));
                    if let Err(error) = self.outgoing.agent.release(&self.outgoing.vm, None).await {
                        tracing::error!(%error, "cannot remove what is left of the migrated VM");
                    }
                    return self.report(Outcome::Completed, running);
                }
                Answer::Refused(why) => {
                    // The guest is paused here and does not run there.
                    let resumed = if self.runs { self.qmp().resume().await } else { Ok(()) };
                    let failure = Failure::new(
                        FailureCode::HypervisorFailed,
                        format!("the destination failed: {why}"),
                    );
                    let outcome = if resumed.is_ok() { Outcome::Failed } else { Outcome::InDoubt };
                    return Report {
                        error: Some(failure.to_fault()),
                        ..self.report(outcome, None)
                    };
                }
                Answer::Open => {}
            }
        }
        let failure = Failure::new(
            FailureCode::InDoubt,
            "QEMU has completed the migration, but the destination does not answer",
        );
        Report { error: Some(failure.to_fault()), ..self.report(Outcome::InDoubt, None) }
    }

    /// Permits the destination to run the guest, or asks whether it does if it needs no permission.
    async fn hand_over(&self, clock: &mut ShortestAnswer) -> Answer {
        let Outgoing { peer, request, vm, .. } = self.outgoing;
        let offered = vm.ownership().offered();
        let hand_over =
            HandOver { peer, id: &self.accepted.id, vm: &vm.name, uuid: vm.spec().uuid, offered };
        let path = format!("/v1/incoming/{}", self.accepted.id);
        let asked = Instant::now();
        let status = if request.qemu.runs_by_itself() {
            peer.get(&path).await
        } else {
            peer.post(&format!("{path}/run"), &IncomingRun { run: self.runs }).await
        };
        if let Ok(status) = &status {
            clock.add(asked, status);
        }
        let answer = hand_over.answer(status).await;
        if let Answer::Runs(Some(_)) = answer {
            // Two more answers, so that a short one compares the clocks.
            for _ in 0..2 {
                let asked = Instant::now();
                if let Ok(status) = peer.get(&path).await {
                    clock.add(asked, &status);
                }
            }
        }
        answer
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
            phases.push(PhaseReport {
                phase: Phase::Switchover,
                duration_ms: span(stopped, running),
            });
            let announce =
                if self.postcopy_since.is_some() { Phase::PageIn } else { Phase::Announce };
            phases
                .push(PhaseReport { phase: announce, duration_ms: span(running, Instant::now()) });
        }
        let ram = self.last.ram.unwrap_or_default();
        Report {
            switchover_ms: self
                .stopped
                .zip(running)
                .map(|(stopped, running)| span(stopped, running)),
            wire_bytes: ram.transferred,
            rounds: self.rounds,
            phases,
            ..self.outgoing.blank(outcome)
        }
    }
}

/// Returns the address of this host from which the kernel reaches another, without sending a
/// packet.
fn near_address(to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr =
        if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|near| near.ip())
}

/// The destination's clock, from the answer with the shortest round trip. Its time is taken as the
/// middle of the exchange.
#[derive(Default)]
struct ShortestAnswer {
    best: Option<(Duration, Instant, u64)>,
}

impl ShortestAnswer {
    fn add(&mut self, asked: Instant, status: &IncomingStatus) {
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
