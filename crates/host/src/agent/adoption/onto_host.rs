//! Adoption of a guest onto another host. The guest's QEMU is the source of a move by QEMU's own
//! engine: the other host's agent receives it like any guest that arrives so
//! (`migration/qemu_engine`), except that the agents carry the stream. The hand-over is that of
//! docs/handover.md. This host has no record of the VM; the note stands for it:
//!
//! | note | stands for | after a crash of this agent |
//! |---|---|---|
//! | saved before the shadow is requested | `owner` | undone, and resumed here |
//! | `offered`, saved before that host is asked to run it | `handing-over` | the host is asked |
//! | `committed`, saved after the record `gone` | gone | the other QEMU is ended |
//!
//! The commit point is the request that tells the host to run the guest. It is sent only when the
//! other QEMU will not run the guest by itself any more, and that host has loaded all of it.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use godwit_api::{
    ApiError, Client, ClientError, ErrorCode, IncomingAccepted, IncomingChecked, IncomingFirmware,
    IncomingRequest, IncomingRun, IncomingState, IncomingStatus, QemuEngineOptions,
};
use godwit_lanes::pacing::MigrationPace;
use godwit_lanes::{Carries, Interrupt, Stream};
use godwit_migration::Failure;
use godwit_migration::drive::{Hello, say_hello};
use godwit_migration::handover::{Known, OfDestination, Role, Standing, of_destination};
use godwit_qemu::ResolvedSpec;
use godwit_types::{EngineKind, FailureCode, Lane, Ownership, Phase};
use godwit_wire::{CONTROL_STREAM, MigrationId, SUPPORTED};
use tokio::sync::oneshot;

use super::{Candidate, MOST_VARIABLES_BYTES, file_bytes, new_ownership, not_undone};
use crate::adoptions::Course;
use crate::agent::Agent;
use crate::agent::adoption::monitor::{Monitor, Sent};
use crate::agent::adoption::note::{Destination, Note};
use crate::agent::adoption::transfer::{
    LOAD_LIMIT, POLL_INTERVAL, cancelled_here, not_sent, sent_whole,
};
use crate::block_devices::names_of;
use crate::failure::{host_failed, of_peer, task_failed};
use crate::hold::hold;
use crate::network;
use crate::paths::Paths;
use crate::peer_record::ask_known;
use crate::relayed_stream;
use crate::verdict::{Answer, HandOver};

/// Most addresses of the other host that are tried.
const MOST_LANES: usize = 16;
/// First and longest interval between two questions to the other host.
const ASK_INTERVAL: Duration = Duration::from_millis(5);
const ASK_AGAIN: Duration = Duration::from_millis(300);
const ASK_AGAIN_MOST: Duration = Duration::from_secs(5);
/// Time for an answer of the other host: more than it waits for its QEMU.
const ANSWER_LIMIT: Duration = Duration::from_secs(7);
/// Time for an answer that the other host has at once; the guest is paused meanwhile.
const STATUS_LIMIT: Duration = Duration::from_secs(2);
/// Time in which the other host is asked to remove its shadow. It removes one by itself that
/// nothing arrives for.
const FORGET_LIMIT: Duration = Duration::from_secs(300);

impl Agent {
    /// Checks that another host can run a guest: all that it would refuse before QEMU starts.
    pub(super) async fn check_there(
        &self,
        to: &str,
        candidate: &Candidate,
        spec: &ResolvedSpec,
    ) -> Result<(), ApiError> {
        let request = self.incoming_of(candidate, spec, new_ownership(), false)?;
        let checked: Result<IncomingChecked, ClientError> =
            self.peer(to)?.post_incoming("/v1/incoming/checks", &request).await;
        checked.map(drop).map_err(|error| refused_by(to, error))
    }

    /// Returns the request to the other host. With `content`, it has the variables of the firmware.
    fn incoming_of(
        &self,
        candidate: &Candidate,
        spec: &ResolvedSpec,
        ownership: Ownership,
        content: bool,
    ) -> Result<IncomingRequest, ApiError> {
        let Ownership { incarnation, epoch } = ownership.offered();
        let (major, minor, micro) = candidate.qemu_version;
        Ok(IncomingRequest {
            spec: spec.clone(),
            incarnation,
            epoch,
            from: self.config.name.clone(),
            qemu_version: format!("{major}.{minor}.{micro}"),
            engine: EngineKind::Qemu,
            qemu: QemuEngineOptions::default(),
            references: None,
            cut_limit_ms: 0,
            firmware: firmware_of(candidate, content)?,
            pci: Vec::new(),
            relayed: true,
            disks: None,
            attempt: None,
            devices: names_of(spec.images()),
        })
    }

    /// Adopts a guest onto the host of a note.
    pub(super) async fn adopt_onto_host(
        self: &Arc<Self>,
        candidate: &Candidate,
        spec: &ResolvedSpec,
        (note, to): (&Note, &Destination),
        monitor: Monitor,
        course: &Course,
    ) -> Result<(), ApiError> {
        course.phase(Phase::Prepare);
        let request = self.incoming_of(candidate, spec, note.ownership, true)?;
        let peer = self.peer(&to.host)?;
        self.save_note(note)?;
        let moved = RemoteTransfer { agent: self, monitor: &monitor, course, note, to, peer }
            .run(&request)
            .await;
        if let Err(error) = moved {
            let undone = monitor.take_back().await;
            self.have_shadow_removed(note, to);
            return Err(match undone {
                Ok(()) => {
                    self.end_taken_back(note, to);
                    error
                }
                Err(undo) => {
                    // It is tried again for as long as it takes.
                    tokio::spawn(Arc::clone(self).end_adoption(note.clone(), None));
                    not_undone(&note.from, &error, &undo)
                }
            });
        }
        course.phase(Phase::Announce);
        let runs = format!("VM \"{}\" runs on host {}", note.vm, to.host);
        if let Err(error) = self.commit_gone(note, to).await {
            tracing::error!(vm = note.vm.as_str(), %error, "cannot save that a guest is gone");
            tokio::spawn(Arc::clone(self).end_adoption(note.clone(), None));
            let kept = "the guest's copy here stays paused until that can be saved; do not run it";
            course.notes(vec![runs, kept.to_owned()]);
            return Ok(());
        }
        drop(monitor);
        let ended = self.finish_adoption(note).await;
        course.notes(std::iter::once(runs).chain(ended).collect());
        Ok(())
    }

    /// Saves that a guest runs at another host, which may ask for it later.
    async fn commit_gone(&self, note: &Note, to: &Destination) -> Result<(), ApiError> {
        self.note_guest_gone(note, to, note.ownership)?;
        self.commit_note(note).await
    }

    fn note_guest_gone(
        &self,
        note: &Note,
        to: &Destination,
        ownership: Ownership,
    ) -> Result<(), ApiError> {
        let save = || self.store.note_gone_guest(&note.vm, to.uuid, ownership);
        Ok(tokio::task::block_in_place(save)?)
    }

    /// Ends the note of a guest that runs on in the other QEMU, or has ended with it. A host that
    /// was asked to run it can learn later that it need not.
    fn end_taken_back(self: &Arc<Self>, note: &Note, to: &Destination) {
        let saved = self.saved_note(note.ownership).and_then(|note| note.onto);
        if saved.is_some_and(|to| to.offered)
            && let Err(error) = self.note_guest_gone(note, to, note.ownership.taken_back())
        {
            tracing::error!(vm = note.vm.as_str(), %error, "cannot save the end of an adoption");
            tokio::spawn(Arc::clone(self).end_adoption(note.clone(), None));
            return;
        }
        self.drop_note_if_same(note);
    }

    /// Has the other host remove its shadow, in a task of its own.
    fn have_shadow_removed(self: &Arc<Self>, note: &Note, to: &Destination) {
        let (agent, vm, to) = (Arc::clone(self), note.vm.clone(), to.clone());
        let incarnation = note.ownership.incarnation;
        tokio::spawn(async move {
            let (begun, mut wait) = (Instant::now(), ASK_AGAIN);
            while begun.elapsed() < FORGET_LIMIT
                && agent.peer(&to.host).is_ok()
                && !agent.forget_once(&to.host, &vm, to.uuid, incarnation).await
            {
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(ASK_AGAIN_MOST);
            }
        });
    }

    /// After a restart, or while a disk is full: decides about a guest that goes to another host,
    /// and carries that out. Asks for as long as it takes.
    pub(super) async fn end_adoption_onto_host(self: Arc<Self>, mut note: Note) {
        let mut wait = ASK_AGAIN;
        // Without a note, something else has decided.
        while let Some(saved) = self.saved_note(note.ownership) {
            note = saved;
            let Some(to) = note.onto.clone() else { return };
            match self.try_end_onto_host(&note, &to).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => tracing::error!(
                    vm = note.vm.as_str(), from = %note.from, host = to.host, %error,
                    "an adoption is undecided: the guest's copy here stays as it is"
                ),
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(ASK_AGAIN_MOST);
        }
    }

    /// Returns whether it is decided.
    async fn try_end_onto_host(
        self: &Arc<Self>,
        note: &Note,
        to: &Destination,
    ) -> Result<bool, ApiError> {
        let decided = match (note.committed, to.offered) {
            (true, _) => OfDestination::Took,
            (false, false) => OfDestination::Refused,
            (false, true) => self.ask_about(note, to).await?,
        };
        match decided {
            OfDestination::Open => return Ok(false),
            OfDestination::Took => {
                if !note.committed {
                    self.commit_gone(note, to).await?;
                }
                let done = self.finish_adoption(note).await;
                tracing::info!(vm = note.vm.as_str(), host = to.host, ?done, "adoption completed");
            }
            OfDestination::Refused => {
                if let Some(monitor) = note.monitor(&self.config.libvirt).await? {
                    monitor.take_back().await?;
                }
                tracing::warn!(vm = note.vm.as_str(), from = %note.from, "adoption undone");
                self.have_shadow_removed(note, to);
                self.end_taken_back(note, to);
            }
        }
        Ok(true)
    }

    /// Asks the other host about a guest that it may have been asked to run. One that runs here was
    /// taken back by hand, or before the note of that could be saved.
    async fn ask_about(&self, note: &Note, to: &Destination) -> Result<OfDestination, ApiError> {
        let monitor = note.monitor(&self.config.libvirt).await.ok().flatten();
        if let Some(monitor) = &monitor
            && monitor.runs_untouched().await.unwrap_or(false)
        {
            return Ok(OfDestination::Refused);
        }
        let incarnation = note.ownership.incarnation;
        let known = ask_known(&self.peer(&to.host)?, &note.vm, to.uuid, incarnation).await?;
        // It waits for the word of an agent that has ended.
        if matches!(known, Known::Has(Standing { role: Role::Shadow, .. })) {
            self.forget_once(&to.host, &note.vm, to.uuid, incarnation).await;
        }
        Ok(of_destination(known, note.ownership.offered()))
    }
}

/// A guest on its way to another host.
struct RemoteTransfer<'a> {
    agent: &'a Arc<Agent>,
    monitor: &'a Monitor,
    course: &'a Course,
    note: &'a Note,
    to: &'a Destination,
    peer: Client,
}

impl RemoteTransfer<'_> {
    /// Moves the guest. On success it runs at the other host. On failure it never will; the other
    /// QEMU may still migrate, or have paused it.
    async fn run(&self, request: &IncomingRequest) -> Result<(), ApiError> {
        let accepted: Result<IncomingAccepted, ClientError> =
            self.peer.post_incoming("/v1/incoming", request).await;
        let accepted = accepted.map_err(|error| refused_by(&self.to.host, error))?;
        hold("adoption-prepared");
        let (sent, completed) = self.send(&accepted).await?;
        hold("adoption-loaded");
        if !self.course.hand_over() {
            return Err(cancelled_here());
        }
        self.hand_over(&accepted).await?;
        // From the stop to its own end by the other QEMU's figure, and from there on.
        let stopped_ms = sent.downtime_ms.unwrap_or_default();
        self.course.paused_ms(stopped_ms + completed.elapsed().as_secs_f64() * 1e3);
        hold("adoption-runs");
        Ok(())
    }

    /// Sends the guest until the other host has loaded it. Returns when the other QEMU was done.
    async fn send(&self, accepted: &IncomingAccepted) -> Result<(Sent, Instant), ApiError> {
        let pace = self.agent.limits.migration(None);
        let lane = self.connect(accepted, &pace).await?;
        let pair = UnixStream::pair().map_err(|error| host_failed("cannot make a socket", &error));
        let (theirs, ours) = pair?;
        let mut relay = Relay::begin(lane, ours)?;
        self.monitor.send_to(OwnedFd::from(theirs)).await?;
        self.course.phase(Phase::PreCopy);
        self.follow(&mut relay, &pace, &accepted.id).await?;
        let completed = Instant::now();
        self.course.phase(Phase::Switchover);
        let sent = sent_whole(self.monitor, &self.note.vm).await?;
        self.until_loaded(&accepted.id).await?;
        Ok((sent, completed))
    }

    /// Opens a lane to the other host: the first that answers.
    async fn connect(
        &self,
        accepted: &IncomingAccepted,
        pace: &MigrationPace,
    ) -> Result<Stream, ApiError> {
        let host = &self.to.host;
        let Ok(migration) = accepted.id.parse::<MigrationId>() else {
            let message = format!("host {host} returned an invalid migration ID");
            let remedy = "install compatible releases of the agent on both hosts";
            return Err(ApiError::new(ErrorCode::PeerVersion, message, remedy));
        };
        let ours = network::near(&self.agent.config.migration_addresses).await;
        let mut lanes = godwit_lanes::pair(&ours, &accepted.addresses);
        lanes.truncate(MOST_LANES);
        let identity = self.agent.identity();
        let paths = Paths { lanes, host: host.clone(), identity, pace: pace.clone() };
        let connecting = tokio::task::spawn_blocking(move || {
            let none = "the destination returned no lane address";
            let mut last = Failure::new(FailureCode::LaneLost, none);
            for lane in &paths.lanes {
                match connect_lane(&paths, *lane, migration) {
                    Ok(stream) => return Ok(stream),
                    Err(failure) => last = failure,
                }
            }
            Err(last)
        });
        let connected = connecting.await.map_err(|error| task_failed(&error))?;
        let stream = connected.map_err(|failure| self.lost(&failure))?;
        if let Ok(near) = stream.local() {
            pace.uses(near.ip());
        }
        Ok(stream)
    }

    /// Follows the migration until the other QEMU has sent everything.
    async fn follow(
        &self,
        relay: &mut Relay,
        pace: &MigrationPace,
        id: &str,
    ) -> Result<(), ApiError> {
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        let mut limit = None;
        loop {
            tokio::select! {
                // That QEMU has closed its end; whether it was done is checked afterwards.
                ended = &mut relay.ended => return match ended {
                    Ok(Ok(())) => Ok(()),
                    _ if self.course.is_cancelled() => Err(cancelled_here()),
                    Ok(Err(failure)) => Err(self.broken(id, &failure).await),
                    Err(_) => Err(not_sent(&self.note.vm, "the thread of its stream ended")),
                },
                _ = poll.tick() => {}
            }
            if self.course.is_cancelled() {
                return Err(cancelled_here());
            }
            let now = pace.data_bytes_per_s();
            if now != limit {
                self.monitor.limit(now).await?;
                limit = now;
            }
            let sent = self.monitor.sent().await?;
            self.course.remaining(sent.remaining_bytes);
            match sent.status.as_str() {
                "completed" => return Ok(()),
                status @ ("failed" | "cancelled") => {
                    return Err(not_sent(&self.note.vm, sent.why.as_deref().unwrap_or(status)));
                }
                _ => {}
            }
        }
    }

    /// Waits until the other host has loaded what was sent. It has not been asked to run the guest,
    /// so a failure leaves no doubt.
    async fn until_loaded(&self, id: &str) -> Result<(), ApiError> {
        let (path, host) = (format!("/v1/incoming/{id}"), &self.to.host);
        let limit = Instant::now() + LOAD_LIMIT;
        let mut every = tokio::time::interval(ASK_INTERVAL);
        while Instant::now() < limit {
            every.tick().await;
            let asked = tokio::time::timeout(STATUS_LIMIT, self.peer.get(&path)).await;
            let status: IncomingStatus = match asked {
                Ok(Ok(status)) => status,
                Ok(Err(error @ ClientError::Refused(_))) => return Err(refused_by(host, error)),
                // The next answer may come.
                Ok(Err(_)) | Err(_) => continue,
            };
            match status.state {
                IncomingState::Receiving if status.loaded => return Ok(()),
                IncomingState::Receiving => {}
                _ => {
                    let why = status.failure.map_or("no reason given".into(), |why| why.message);
                    return Err(self.not_taken(&why));
                }
            }
        }
        Err(self.not_taken("it did not load in time what was sent"))
    }

    /// Hands the guest over. Returns when the other host runs it; fails if it never will. Asks for
    /// as long as it takes: until then, the guest is paused here.
    async fn hand_over(&self, accepted: &IncomingAccepted) -> Result<(), ApiError> {
        let offered = Destination { offered: true, ..self.to.clone() };
        self.agent.save_note(&Note { onto: Some(offered), ..self.note.clone() })?;
        hold("adoption-offered");
        let hand_over = HandOver {
            peer: &self.peer,
            id: &accepted.id,
            vm: &self.note.vm,
            uuid: self.to.uuid,
            offered: self.note.ownership.offered(),
        };
        let path = format!("/v1/incoming/{}/run", accepted.id);
        let (word, mut wait) = (IncomingRun { run: true }, ASK_INTERVAL);
        loop {
            // The commit point: from here on the other host may run the guest.
            let asked = self.peer.post(&path, &word);
            if let Ok(status) = tokio::time::timeout(ANSWER_LIMIT, asked).await {
                match hand_over.answer(status).await {
                    Answer::Runs(_) => return Ok(()),
                    Answer::Refused(why) => return Err(self.not_taken(&why)),
                    Answer::Open => {}
                }
            }
            if wait >= ASK_AGAIN {
                let (vm, host) = (self.note.vm.as_str(), &self.to.host);
                tracing::warn!(vm, host, "a host that may run an adopted guest does not say so");
                if self.monitor.runs_untouched().await.unwrap_or(false) {
                    return Err(self.not_taken("the guest was resumed here by hand"));
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(ASK_AGAIN_MOST);
        }
    }

    /// Returns the error of a stream that broke: what became of it at the other host, if that says
    /// so, and otherwise what became of the lane.
    async fn broken(&self, id: &str, failure: &Failure) -> ApiError {
        let path = format!("/v1/incoming/{id}");
        let asking = async {
            loop {
                let status: IncomingStatus = self.peer.get(&path).await.ok()?;
                if status.state != IncomingState::Receiving {
                    return status.failure;
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        match tokio::time::timeout(STATUS_LIMIT, asking).await {
            Ok(Some(why)) => self.not_taken(&why.message),
            Ok(None) | Err(_) => self.lost(failure),
        }
    }

    fn lost(&self, failure: &Failure) -> ApiError {
        let message = format!(
            "cannot adopt VM \"{}\" onto host {}: the link failed: {}",
            self.note.vm, self.to.host, failure.detail
        );
        let remedy = "the guest runs on where it was; check the migration network of both hosts \
                      (`godwit probe`), and adopt it again";
        ApiError::new(ErrorCode::MigrationFailed, message, remedy)
    }

    fn not_taken(&self, why: &str) -> ApiError {
        let host = &self.to.host;
        let message = format!("cannot adopt VM \"{}\" onto host {host}: {why}", self.note.vm);
        let remedy = "the guest runs on where it was; see the agent's log on that host";
        ApiError::new(ErrorCode::MigrationFailed, message, remedy)
    }
}

/// Stream on its way, on a thread of its own; it ends with this.
struct Relay {
    lane: Stream,
    socket: UnixStream,
    ended: oneshot::Receiver<Result<(), Failure>>,
}

impl Relay {
    fn begin(lane: Stream, socket: UnixStream) -> Result<Relay, ApiError> {
        let failed = |error: std::io::Error| host_failed("cannot pass a stream on", &error);
        let (done, ended) = oneshot::channel();
        let (to, from) = (lane.clone(), socket.try_clone().map_err(failed)?);
        std::thread::Builder::new()
            .name("adoption".to_owned())
            .spawn(move || drop(done.send(relayed_stream::send(&to, &from))))
            .map_err(failed)?;
        Ok(Relay { lane, socket, ended })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.lane.close();
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

fn connect_lane(paths: &Paths, lane: Lane, migration: MigrationId) -> Result<Stream, Failure> {
    let stream = paths.connect(lane, Carries::Pages, &Interrupt::default())?;
    let hello = Hello { migration, stream: CONTROL_STREAM, versions: SUPPORTED };
    say_hello(&mut stream.sender(), &mut stream.receiver(), hello)?;
    Ok(stream)
}

/// Returns what the other host has to know of a guest's firmware, if it is in flash.
fn firmware_of(candidate: &Candidate, content: bool) -> Result<Option<IncomingFirmware>, ApiError> {
    let firmware = candidate.vm.as_ref().and_then(|vm| vm.firmware.as_ref());
    let Some(firmware) = firmware else { return Ok(None) };
    let bytes = |path: &Path| {
        let failed =
            |error: std::io::Error| host_failed(&format!("cannot read {}", path.display()), &error);
        file_bytes(path).map_err(failed)
    };
    let variables = match content {
        true => {
            let path = &firmware.variables;
            BASE64.encode(candidate.process.read_open_file(path, MOST_VARIABLES_BYTES)?)
        }
        false => String::new(),
    };
    Ok(Some(IncomingFirmware {
        code_bytes: bytes(&firmware.code)?,
        variables_bytes: bytes(&firmware.variables)?,
        variables,
    }))
}

/// Returns the error of a host that refuses a guest, or does not answer.
fn refused_by(host: &str, error: ClientError) -> ApiError {
    of_peer(host, error, |error| {
        let message = format!("cannot adopt the guest onto host {host}: {}", error.message);
        ApiError::new(error.code, message, error.remedy)
    })
}
