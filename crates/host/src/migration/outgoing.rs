//! The external engine at the source: checks, the request to the destination, the lane, the driver,
//! the report.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_api::{
    ApiError, Client, ClientError, ErrorCode, IncomingAccepted, IncomingRequest, MigrationRequest,
    OfferedContent,
};
use godwit_lanes::pacing::MigrationPace;
use godwit_lanes::{Carries, Interrupt, Stream};
use godwit_migration::drive::{
    self, HypervisorEvent, Inbox, Kept, LaneFigures, SourceJob, SourceResult, Throttled,
    Throttling, Unsent, tracks_by_faults,
};
use godwit_migration::reference::Content;
use godwit_migration::{Failure, Policy, millis};
use godwit_qemu::{PciFunction, VcpuGroup};
use godwit_ram::DirtyTracker;
use godwit_types::{
    CutReport, EngineKind, FailureCode, Fault, Lane, LaneReport, Means, Outcome, Ownership,
    PageInUse, Predicted, ReferenceUse, Report, SwitchoverReport, TrackingUse,
};
use godwit_wire::{MAX_STREAMS, MigrationId};
use tokio::runtime::Handle;

use super::cut::{Again, FirstLane};
use super::disks::source::DiskTravel;
use super::qemu_source::QemuSource;
use super::vcpu_quota::VcpuQuota;
use crate::agent::Agent;
use crate::agent::ended::shut_down;
use crate::agent::kept_pages::Serving;
use crate::doorman::fresh_id;
use crate::failure::of_peer;
use crate::hold::hold;
use crate::migrations::{MigrationControl, ProgressReporter};
use crate::network;
use crate::paths::Paths;
use crate::state_stream::{self, qemu_failure};
use crate::verdict::{self, HandOver};
use crate::vm::Vm;

/// A migration from this host.
#[derive(Clone)]
pub(super) struct Outgoing {
    pub(super) agent: Arc<Agent>,
    pub(super) vm: Arc<Vm>,
    pub(super) request: MigrationRequest,
    pub(super) peer: Client,
    pub(super) begun: Instant,
    /// The VM's disks, once they travel with it.
    pub(super) disks: Option<Arc<DiskTravel>>,
}

impl Outgoing {
    /// Migrates the VM with the external engine.
    pub(super) async fn run(&self, control: &MigrationControl) -> Report {
        match self.request.disks {
            Some(_) => self.run_with_disks(control).await,
            None => self.run_memory(control).await,
        }
    }

    /// Migrates the VM, whose disks are there already or travel at the same time.
    pub(super) async fn run_memory(&self, control: &MigrationControl) -> Report {
        match self.try_run(control).await {
            Ok((sent, preflight, predicted)) => {
                let report = Report { predicted, ..self.report_of(sent, preflight) };
                Report { means: report.means_of_rounds(), ..report }
            }
            Err(failure) => self.failed(failure),
        }
    }

    async fn try_run(
        &self,
        control: &MigrationControl,
    ) -> Result<(Sent, Duration, Option<Predicted>), Fault> {
        let qemu = self.agent.qemu(self.vm.spec().qemu.as_deref()).await.map_err(Fault::from)?;
        self.check(&qemu)?;
        hold("preflight");
        let tracker = self.attach().await?;
        let preflight = self.begun.elapsed();
        let request = self.ask_destination(&qemu, control);
        let (accepted, glance) = Outgoing::count_while(self.glance(tracker), request).await;
        let accepted = accepted?;
        let mut predicted = None;
        let sent = match glance {
            Ok(glance) => {
                let (tracker, seen) = tokio::task::block_in_place(|| glance.end());
                let tracker = tracker.by_faults(self.tracks_by_faults());
                predicted = self.predicted_report(seen, &accepted.addresses, preflight).await;
                if let Some(predicted) =
                    predicted.filter(|predicted| predicted.means != Means::None)
                {
                    control.set_predicted(predicted.migration_time_ms);
                }
                self.send_all(control, tracker, &accepted, preflight).await
            }
            Err(error) => Err(Failure::new(FailureCode::Internal, error.to_string())),
        };
        if !sent.as_ref().is_ok_and(|sent| sent.is(Outcome::Completed)) {
            // If the streams were never opened, nothing else has the destination remove its shadow.
            verdict::forget(&self.peer, &accepted.id, &self.vm.name).await;
        }
        Ok((sent.map_err(|failure| failure.to_fault())?, preflight, predicted))
    }

    /// Checks, before anything is created, that this engine can move the VM.
    pub(super) fn check(&self, qemu: &godwit_qemu::QemuInfo) -> Result<(), Fault> {
        let obstacles = godwit_qemu::external_engine_obstacles(&self.vm.spec(), qemu);
        if let Some(first) = obstacles.first() {
            let all: Vec<_> = obstacles.iter().map(|obstacle| obstacle.message.as_str()).collect();
            return Err(Fault {
                code: first.code.to_string(),
                message: format!(
                    "cannot migrate VM \"{}\" with Godwit's own engine: {}",
                    self.vm.name,
                    all.join("; ")
                ),
                remedy: first.remedy.clone(),
            });
        }
        match self.agent.tracking_problem() {
            Some(problem) => Err(Fault {
                code: ErrorCode::Preflight.to_string(),
                message: format!(
                    "cannot track memory on host {}: {problem}",
                    self.agent.config().name
                ),
                remedy: "fix that, or use --engine qemu".into(),
            }),
            None => Ok(()),
        }
    }

    /// Returns whether faults are to name the pages that the guest writes.
    pub(super) fn tracks_by_faults(&self) -> bool {
        let guest_bytes =
            self.vm.regions().iter().map(|region| region.all_pages().len_bytes()).sum();
        let permitted = match self.request.tracking {
            TrackingUse::Auto => self.agent.config().tracking.means,
            requested => requested,
        };
        tracks_by_faults(permitted, guest_bytes)
    }

    /// Attaches to the guest's memory, to find by scans what it writes.
    pub(super) async fn attach(&self) -> Result<Tracker, Fault> {
        let vm = Arc::clone(&self.vm);
        let attached = tokio::task::spawn_blocking(move || {
            DirtyTracker::attach(&vm.tracker_socket, vm.process.pid, &vm.regions())
        });
        let failed = |why: String| self.not_trackable(&why);
        match attached.await {
            Ok(Ok(tracker)) => match self.vm.process.qmp.vcpu_threads().await {
                Ok(vcpus) => Ok(self.with_vcpus(tracker, vcpus)),
                Err(error) => Err(failed(error.to_string())),
            },
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    pub(super) fn not_trackable(&self, why: &str) -> Fault {
        Fault {
            code: ErrorCode::Preflight.to_string(),
            message: format!("cannot track the memory of VM \"{}\": {why}", self.vm.name),
            remedy: "fix that, or use --engine qemu".into(),
        }
    }

    /// Returns the policy: when to switch over, and by what means.
    pub(super) fn policy(&self) -> Policy {
        let budget = Duration::try_from_secs_f64(self.request.switchover_budget_ms / 1e3)
            .unwrap_or(Duration::MAX);
        let page_in =
            if self.vm.spec().refuses_page_in { PageInUse::Never } else { self.request.page_in };
        let intent = self.request.policy;
        self.agent.config().policies.of(intent).applied_to(Policy::of(intent, budget, page_in))
    }

    /// Adds to the tracker the means to throttle these threads, and no others.
    fn with_vcpus(&self, tracker: DirtyTracker, vcpus: Vec<u32>) -> Tracker {
        let pid = self.vm.process.pid;
        let how = Throttling { means: self.agent.config().throttle.means, vcpus: vcpus.len(), pid };
        let quota = VcpuQuota(VcpuGroup::new(&self.vm.name, pid, vcpus.clone()));
        Throttled::new(tracker.with_vcpus(vcpus), quota, how)
    }

    /// Returns the references that this side permits.
    fn references(&self) -> ReferenceUse {
        match self.request.engine {
            EngineKind::Godwit => self.agent.config().references.by.min(self.request.references),
            EngineKind::Qemu => ReferenceUse::None,
        }
    }

    /// Has the destination create its shadow VM.
    pub(super) async fn ask_destination(
        &self,
        qemu: &godwit_qemu::QemuInfo,
        control: &MigrationControl,
    ) -> Result<IncomingAccepted, Fault> {
        // Recorded before the shadow exists, so that a restarted agent has it removed.
        self.agent.note_migrating(&self.vm, &self.request.to).map_err(Fault::from)?;
        let firmware = self.agent.outgoing_firmware(&self.vm, true).await?;
        let pci = self.pci_functions().await;
        // Without disks the request is not repeated.
        let attempt = self.disks.as_ref().map(|_| fresh_id()).transpose().map_err(Fault::from)?;
        let attempt = attempt.map(|attempt| attempt.to_string());
        let request = IncomingRequest { firmware, pci, attempt, ..self.incoming_request(qemu) };
        self.answer(Some(control), || self.peer.post_incoming("/v1/incoming", &request)).await
    }

    /// Returns where the guest's PCI devices are mapped; nothing if that is unknown, or of no use
    /// to the engine.
    async fn pci_functions(&self) -> Vec<PciFunction> {
        if self.request.engine != EngineKind::Godwit {
            return Vec::new();
        }
        let found = self.vm.process.qmp.pci_functions().await;
        found.unwrap_or_else(|error| {
            let vm = self.vm.name.as_str();
            tracing::debug!(vm, %error, "the shadow maps its devices during the pause");
            Vec::new()
        })
    }

    /// Returns the request to a destination, without the firmware.
    pub(super) fn incoming_request(&self, qemu: &godwit_qemu::QemuInfo) -> IncomingRequest {
        let Ownership { incarnation, epoch } = self.vm.ownership().offered();
        IncomingRequest {
            spec: self.spec_there(),
            incarnation,
            epoch,
            from: self.agent.config().name.clone(),
            qemu_version: qemu.version_text(),
            engine: self.request.engine,
            qemu: self.request.qemu.clone(),
            references: Some(self.references()).filter(|by| *by != ReferenceUse::None),
            cut_limit_ms: self.request.cut_limit_ms,
            firmware: None,
            pci: Vec::new(),
            relayed: false,
            disks: self.disks.as_ref().map(|travel| travel.transfer().to_owned()),
            attempt: None,
            devices: self.devices_that_stay(),
        }
    }

    /// Sends to the end of the migration, over a new connection after each cut.
    async fn send_all(
        &self,
        control: &MigrationControl,
        tracker: Tracker,
        accepted: &IncomingAccepted,
        preflight: Duration,
    ) -> Result<Sent, Failure> {
        let host = &self.agent.config().name;
        let migration: MigrationId = accepted.id.parse().map_err(|_| {
            Failure::new(
                FailureCode::ProtocolBroken,
                "the destination returned an invalid migration ID",
            )
        })?;
        let qmp = &self.vm.process.qmp;
        state_stream::set_up(qmp, true)
            .await
            .map_err(|error| qemu_failure(host, "prepare", &error))?;
        let runs = self.vm.is_running().await == Some(true);
        let FirstLane { stream, paths, left_out, migration, cuts } =
            self.first_lane(control, accepted, migration).await?;
        // This host decides what it retains, even if the destination wants no references.
        let retains = self.references() == ReferenceUse::All;
        let departing = retains.then(|| self.agent.references().departing(&self.vm)).flatten();
        let mut sent = Sent { left_out, cuts, ..Sent::default() };
        let mut job = Job {
            stream,
            paths,
            migration,
            tracker,
            resumes: None,
            preflight,
            shared: SharedJob {
                runs,
                references: self
                    .references()
                    .min(accepted.references.unwrap_or(ReferenceUse::None)),
                contents: described(&accepted.contents),
                departing,
                runtime: Handle::current(),
                course: control.course,
                progress: control.progress_reporter(),
                hands_over: Arc::default(),
            },
        };
        loop {
            let (lanes, shared) = (job.paths.lanes.clone(), job.shared.clone());
            let (result, kept) = self.send_leg(control, job, &accepted.id).await?;
            let why = result.failure.clone();
            sent.add(result, &lanes);
            // The guest was not stopped, so that its disks here are the newest.
            if let (Some(_), Some(travel)) = (&kept, &self.disks) {
                travel.go_on();
            }
            let (Some(kept), Some(why)) = (kept.filter(|_| self.request.cut_limit_ms > 0), why)
            else {
                return Ok(sent);
            };
            let unsent_pages = kept.unsent.pages();
            match self.reconnect(control, &accepted.id, &why, unsent_pages).await {
                Ok(again) => job = sent.goes_on(again, kept, shared, self.begun.elapsed()),
                Err(failure) => return Ok(sent.ended(failure)),
            }
        }
    }

    /// Sends until the migration ends or its connection is cut.
    async fn send_leg(
        &self,
        control: &MigrationControl,
        job: Job,
        id: &str,
    ) -> Result<LegResult, Failure> {
        let (inbox, events) = drive::inbox();
        let hands_over = Arc::clone(&job.shared.hands_over);
        let running = self.on_a_thread(control, job, inbox.clone(), events, id.to_owned())?;
        tokio::pin!(running);
        let result = tokio::select! {
            result = &mut running => result,
            () = control.cancelled() => {
                inbox.cancel();
                running.await
            }
            // At once, and not when the memory of an ended QEMU cannot be read. After the commit it
            // has no effect.
            () = self.vm.process.qmp.until_guest_shuts_down() => {
                inbox.hypervisor(Instant::now(), HypervisorEvent::Failed(shut_down(&self.vm.name)));
                running.await
            }
            failure = self.disks_failed() => {
                inbox.hypervisor(Instant::now(), HypervisorEvent::Failed(failure));
                running.await
            }
        };
        // The progress is unknown. Before the hand-over, though, the guest is certainly here.
        let code = || match hands_over.load(Ordering::SeqCst) {
            true => FailureCode::InDoubt,
            false => FailureCode::Internal,
        };
        let lost = |_| Failure::new(code(), "the thread of the engine ended without a result");
        result.map_err(lost)
    }

    /// Waits until disks that travel cannot go on; forever if there are none.
    pub(super) async fn disks_failed(&self) -> Failure {
        match &self.disks {
            Some(travel) => travel.failed().await,
            None => std::future::pending().await,
        }
    }

    pub(super) async fn connect_unless_cancelled(
        &self,
        control: &MigrationControl,
        theirs: &[SocketAddr],
    ) -> Result<(Stream, Paths, Vec<LaneReport>), Failure> {
        let interrupt = Arc::new(Interrupt::default());
        let connecting = self.connect(theirs, control.pace.clone(), Arc::clone(&interrupt));
        tokio::pin!(connecting);
        let connected = tokio::select! {
            connected = &mut connecting => connected,
            () = control.cancelled() => {
                interrupt.end();
                connecting.await
            }
        };
        // If the connection succeeded all the same, the driver receives the cancellation.
        let cancelled =
            || Failure::new(FailureCode::Cancelled, "cancelled while the lanes were connected");
        connected.map_err(|failure| if interrupt.is_over() { cancelled() } else { failure })
    }

    /// Checks the requested number of streams, which applies to each lane.
    pub(super) fn check_streams(&self, lanes: usize) -> Result<(), Failure> {
        let most = usize::from(MAX_STREAMS) / lanes.max(1);
        match self.request.streams.map(|streams| streams as usize) {
            Some(streams) if streams > most => {
                let detail = format!(
                    "{streams} streams on each of {lanes} lanes exceed the {MAX_STREAMS} of a \
                     migration: use at most {most}"
                );
                Err(Failure::new(FailureCode::TooManyStreams, detail))
            }
            _ => Ok(()),
        }
    }

    /// Returns the control stream, over the first lane that answers, the remaining lanes, and those
    /// that failed.
    async fn connect(
        &self,
        theirs: &[SocketAddr],
        pace: MigrationPace,
        interrupt: Arc<Interrupt>,
    ) -> Result<(Stream, Paths, Vec<LaneReport>), Failure> {
        let ours = network::near(&self.agent.config().migration_addresses).await;
        let lanes = godwit_lanes::pair(&ours, theirs);
        self.check_streams(lanes.len())?;
        let mut paths =
            Paths { lanes, host: self.request.to.clone(), identity: self.agent.identity(), pace };
        let connected = tokio::task::spawn_blocking(move || {
            let mut last =
                Failure::new(FailureCode::LaneLost, "the destination returned no lane address");
            let mut left_out = Vec::new();
            while let Some(lane) = paths.lanes.first() {
                match paths.connect(*lane, Carries::Urgent, &interrupt) {
                    Ok(stream) => return Ok((stream, paths, left_out)),
                    Err(failure) if interrupt.is_over() => return Err(failure),
                    Err(failure) => last = failure,
                }
                let lane = paths.lanes.remove(0);
                tracing::warn!(%lane, %last, "lane left out");
                left_out
                    .push(LaneReport { broken: vec![last.detail.clone()], ..LaneReport::of(lane) });
            }
            Err(last)
        });
        connected
            .await
            .unwrap_or_else(|error| Err(Failure::new(FailureCode::Internal, error.to_string())))
    }

    /// Runs the driver, which blocks on sockets, on a thread of its own.
    fn on_a_thread(
        &self,
        control: &MigrationControl,
        job: Job,
        inbox: Inbox,
        events: drive::Events,
        id: String,
    ) -> Result<tokio::sync::oneshot::Receiver<LegResult>, Failure> {
        let outgoing = self.clone();
        let (done, result) = tokio::sync::oneshot::channel();
        let body = move || {
            let _ = done.send(outgoing.drive(job, &inbox, events, &id));
        };
        control.engine_begins();
        let spawned = std::thread::Builder::new().name(format!("out-{}", self.vm.name)).spawn(body);
        match spawned {
            Ok(_) => Ok(result),
            Err(error) => {
                Err(Failure::new(FailureCode::Internal, format!("cannot start a thread: {error}")))
            }
        }
    }

    /// Runs the driver to the end of the leg.
    fn drive(&self, job: Job, inbox: &Inbox, events: drive::Events, id: &str) -> LegResult {
        let Outgoing { agent, vm, request, peer, begun, disks } = self;
        let offered = vm.ownership().offered();
        let hand_over = HandOver { peer, id, vm: &vm.name, uuid: vm.spec().uuid, offered };
        let serving = Serving {
            agent,
            vm: &vm.name,
            to: &request.to,
            peer,
            offered,
            runtime: &job.shared.runtime,
            pace: job.paths.pace.clone(),
            uuid: vm.spec().uuid,
        };
        let hypervisor = QemuSource::new(
            Arc::clone(agent),
            Arc::clone(vm),
            request.to.clone(),
            job.shared.runtime.clone(),
            job.shared.runs,
            job.shared.departing.clone(),
            job.shared.hands_over,
        )
        .with_disks(disks.clone());
        let pages = vm.regions().iter().map(|region| region.pages()).sum();
        let source = SourceJob {
            control: job.stream,
            connect: &|lane, carries, interrupt| job.paths.data(lane, carries, interrupt),
            lanes: job.paths.lanes.len(),
            streams: request.streams.map(|streams| streams as usize),
            pace: job.paths.pace.clone(),
            migration: job.migration,
            ownership: offered,
            runs: job.shared.runs,
            policy: self.policy(),
            compression: request.compression,
            references: drive::References {
                by: job.shared.references,
                known_bytes: drive::References::known_bytes(pages),
                ..drive::References::default()
            },
            contents: job.shared.contents,
            deltas: drive::Deltas {
                cache_bytes: agent.config().deltas.cache_memory.bytes(),
                ..drive::Deltas::default()
            },
            experience: agent.lanes_seen().experience(&request.to),
            course: job.shared.course,
            preflight: job.preflight,
            regions: vm.regions(),
            departing: job.shared.departing,
            tracker: job.tracker,
            hypervisor,
            begun: *begun,
            progress: &|mut progress| {
                for (shown, lane) in progress.lanes.iter_mut().zip(&job.paths.lanes) {
                    (shown.from, shown.to) = (lane.from, Some(lane.to));
                }
                progress.disks = disks.as_ref().map(|travel| travel.progress());
                job.shared.progress.send(progress);
            },
            ask_verdict: &|| job.shared.runtime.block_on(hand_over.verdict()),
            // Once its QEMU has ended, nothing is retained here.
            page_in_again: &|is_over| serving.again(&|| is_over() || vm.process.exit().is_some()),
            resumes: job.resumes,
        };
        drive::send(source, inbox, events)
    }

    fn report_of(&self, sent: Sent, preflight: Duration) -> Report {
        let Sent { result, lanes, left_out, cuts } = sent;
        let Some(result) = result else { return self.blank(Outcome::Failed) };
        tracing::debug!(
            preflight_ms = millis(preflight),
            vm = self.vm.name.as_str(),
            "driver ended"
        );
        Report {
            outcome: result.outcome,
            migration_time_ms: millis(self.begun.elapsed()),
            // For a failed migration: how long the guest was paused nevertheless.
            switchover_ms: result
                .switchover
                .as_ref()
                .map(SwitchoverReport::total_ms)
                .or(result.stood_still_ms),
            wire_bytes: result.wire_bytes,
            bandwidth_limit: result.bandwidth_limit,
            round_trip_ms: result.round_trip.map(millis),
            lanes: lanes.into_iter().chain(left_out).collect(),
            cuts,
            encodings: result.encodings,
            referenced: result.referenced,
            missing_pages: result.missing_pages,
            tracking: Some(result.tracking),
            throttle: result.throttle,
            page_in: result.page_in,
            rounds: result.rounds,
            phases: result.phases,
            switchover: result.switchover,
            error: result.failure.map(|failure| failure.to_fault()),
            ..self.blank(Outcome::Failed)
        }
    }

    pub(super) fn failed(&self, failure: Fault) -> Report {
        let outcome = match failure.code.as_str() {
            code if code == FailureCode::Cancelled.name() => Outcome::Cancelled,
            code if code == FailureCode::InDoubt.name() => Outcome::InDoubt,
            _ => Outcome::Failed,
        };
        Report { error: Some(failure), ..self.blank(outcome) }
    }

    /// Returns an empty report.
    pub(super) fn blank(&self, outcome: Outcome) -> Report {
        blank_report(&self.agent, &self.vm, &self.request, self.begun, outcome)
    }
}

/// Returns an empty report.
pub(crate) fn blank_report(
    agent: &Agent,
    vm: &Vm,
    request: &MigrationRequest,
    begun: Instant,
    outcome: Outcome,
) -> Report {
    Report {
        engine: request.engine,
        migration_time_ms: millis(begun.elapsed()),
        switchover_budget_ms: Some(request.switchover_budget_ms),
        guest_bytes: vm.spec().memory_bytes(),
        policy: (request.engine == EngineKind::Godwit).then_some(request.policy),
        ..Report::blank(outcome, vm.name.to_string(), &agent.config().name, &request.to)
    }
}

/// Result of one leg of the migration, from one connection to its end or cut, and the state to
/// continue from after a cut.
type LegResult = (SourceResult, Option<Kept<Tracker>>);

/// Result of all legs, with the lanes that were used and those that failed.
#[derive(Default)]
struct Sent {
    /// `None`: no result yet.
    result: Option<SourceResult>,
    lanes: Vec<LaneReport>,
    left_out: Vec<LaneReport>,
    cuts: Vec<CutReport>,
}

impl Sent {
    fn is(&self, outcome: Outcome) -> bool {
        self.result.as_ref().is_some_and(|result| result.outcome == outcome)
    }

    /// Adds the result of one leg.
    fn add(&mut self, mut result: SourceResult, lanes: &[Lane]) {
        for (lane, figures) in lanes.iter().zip(std::mem::take(&mut result.lanes)) {
            let LaneFigures { streams, bytes, broken, vanishing_mtu } = figures;
            let report =
                LaneReport { streams, bytes, broken, vanishing_mtu, ..LaneReport::of(*lane) };
            let is_same = |known: &&mut LaneReport| {
                known.from == report.from && known.to.ip() == report.to.ip()
            };
            match self.lanes.iter_mut().find(is_same) {
                Some(known) => {
                    known.streams += report.streams;
                    known.bytes += report.bytes;
                    known.broken.extend(report.broken);
                    known.vanishing_mtu = known.vanishing_mtu.max(report.vanishing_mtu);
                }
                None => self.lanes.push(report),
            }
        }
        let reconnect_ms = self.cuts.last().map_or(0.0, |cut| cut.lasted_ms);
        self.result = Some(match self.result.take() {
            Some(earlier) => result.after(earlier, reconnect_ms),
            None => result,
        });
    }

    /// Returns the job of the next leg.
    fn goes_on(
        &mut self,
        again: Again,
        kept: Kept<Tracker>,
        shared: SharedJob,
        at: Duration,
    ) -> Job {
        let Again { stream, paths, left_out, migration, cut } = again;
        self.left_out.extend(left_out);
        self.cuts.push(cut);
        Job {
            stream,
            paths,
            migration,
            tracker: kept.tracker,
            resumes: Some(kept.unsent),
            preflight: at,
            shared,
        }
    }

    /// Ends the migration with a failure.
    fn ended(self, failure: Failure) -> Sent {
        let outcome = match failure.code {
            FailureCode::Cancelled => Outcome::Cancelled,
            _ => Outcome::Failed,
        };
        let result =
            self.result.map(|result| SourceResult { outcome, failure: Some(failure), ..result });
        Sent { result, ..self }
    }
}

/// State that all legs of a migration share.
#[derive(Clone)]
struct SharedJob {
    runs: bool,
    references: ReferenceUse,
    /// The destination's contents.
    contents: Vec<drive::DescribedContent>,
    /// The guest's memory, if it is retained for its return.
    departing: Option<Arc<Content>>,
    runtime: Handle,
    course: drive::Course,
    progress: ProgressReporter,
    hands_over: Arc<AtomicBool>,
}

/// Tracker of the guest's memory, with the throttle of its vCPUs.
pub(super) type Tracker = Throttled<DirtyTracker, VcpuQuota>;

/// Input of the driver's thread for one leg.
struct Job {
    stream: Stream,
    paths: Paths,
    migration: MigrationId,
    tracker: Tracker,
    /// Pages that the destination lacks after a cut.
    resumes: Option<Unsent>,
    preflight: Duration,
    shared: SharedJob,
}

/// Returns what a destination says of its contents, as far as they have numbers.
fn described(contents: &[OfferedContent]) -> Vec<drive::DescribedContent> {
    let described = |content: &OfferedContent| drive::DescribedContent {
        kind: content.kind,
        read_bytes_per_s: content.read_bytes_per_s,
    };
    contents.iter().take(usize::from(u16::MAX)).map(described).collect()
}

pub(super) fn report_of_client(host: &str, error: ClientError) -> Fault {
    Fault::from(of_peer(host, error, |error| {
        let message = format!("host {host} refuses the VM: {}", error.message);
        ApiError::new(error.code, message, error.remedy)
    }))
}
