//! The begin of a transfer of disks: an earlier one is continued or removed, the destination makes
//! the images, QEMU exports the disks, the streams are opened, the thread starts. What fails is
//! undone.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ArrivingDisksAccepted, Client, ClientError, ErrorCode};
use godwit_migration::{Failure, millis};
use godwit_qemu::ResolvedSpec;
use godwit_types::{DiskReport, Fault, ReferenceUse};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::connecting::{Connecting, Image, images_of};
use super::departure::Departure;
use super::exports::FoundBitmaps;
use super::figures::Figures;
use super::patience::{NoAnswer, answer, over, shows};
use super::plan::Plan;
use super::rounds::{Parts, Rounds, Shown};
use super::source::DiskTravel;
use super::stage::{Settling, Stage};
use super::tracking::Tracking;
use super::wires::Wires;
use crate::doorman::fresh_id;
use crate::failure::{host_failed, of_peer, task_failed};
use crate::hold::hold;
use crate::migrations::MigrationControl;
use crate::state_stream::qemu_failure;

/// Orders that wait for the thread: the migration has at most one of each kind in it, and a few to
/// settle that it does not wait for any more.
const MOST_ORDERS: usize = 16;
/// Longest answer of a destination, which lists parts of disks.
const MOST_ANSWER_BYTES: usize = 32 << 20;

/// A transfer that begins.
pub(crate) struct Making<'a> {
    departure: &'a Departure,
    plan: Plan,
    /// Bitmaps of an earlier transfer, which this one continues.
    found: Option<FoundBitmaps>,
    shown: Arc<Shown>,
    /// The thread that opens the streams.
    opening: Option<JoinHandle<Result<Rounds, Failure>>>,
    begun: Instant,
}

impl<'a> Making<'a> {
    pub(crate) fn new(departure: &'a Departure, plan: Plan) -> Making<'a> {
        let shown = Shown {
            stage: watch::Sender::new(Stage::Rounds),
            figures: Figures::default(),
            wires: Arc::<Wires>::default(),
            hurries: AtomicBool::new(false),
        };
        let (shown, begun) = (Arc::new(shown), Instant::now());
        Making { departure, plan, found: None, shown, opening: None, begun }
    }

    /// Whether it continues an earlier transfer, which must not be lost.
    pub(crate) fn continues(&self) -> bool {
        self.found.is_some()
    }

    /// Begins the transfer. What it has made when it fails, or when it is dropped, is removed by
    /// [`Making::undo`].
    ///
    /// # Errors
    /// The disks cannot travel now.
    pub(crate) async fn make(
        &mut self,
        control: &MigrationControl,
    ) -> Result<Arc<DiskTravel>, Fault> {
        self.look_back().await?;
        self.note()?;
        hold("disks-noted");
        let peer = self.departure.peer.clone().with_answers_of_at_most(MOST_ANSWER_BYTES);
        let (accepted, images) = self.ask(&peer, control).await?;
        let Departure { agent, vm, request, .. } = self.departure;
        let (host, wires) = (&agent.config().name, &self.shown.wires);
        let tracking = Tracking::open(host, vm, &self.plan.note, wires, self.found.clone()).await;
        let tracking = tracking.map_err(|failure| failure.to_fault())?;
        let references = agent.config().references.by.min(request.references);
        let connecting = Connecting {
            agent: Arc::clone(agent),
            peer,
            to: request.to.clone(),
            request: self.plan.request.clone(),
            images: images.clone(),
            pace: control.pace.clone(),
            compression: request.compression,
            refers: references == ReferenceUse::All,
            streams: request.streams,
            wires: Arc::clone(wires),
        };
        let parts = Parts {
            agent: Arc::clone(agent),
            vm: Arc::clone(vm),
            note: self.plan.note.clone(),
            shown: Arc::clone(&self.shown),
            connecting,
            tracking,
            cut_limit: Duration::from_millis(request.cut_limit_ms),
        };
        let rounds = self.open(parts, accepted, control).await?;
        self.start(rounds, &images)
    }

    /// Opens the streams. Shows that it waits while the link is cut.
    async fn open(
        &mut self,
        parts: Parts,
        accepted: ArrivingDisksAccepted,
        control: &MigrationControl,
    ) -> Result<Rounds, Fault> {
        let Departure { vm, begun, .. } = self.departure;
        let (runtime, mut stage) = (Handle::current(), self.shown.stage.subscribe());
        let opening = self
            .opening
            .insert(tokio::task::spawn_blocking(move || Rounds::new(parts, runtime, accepted)));
        let cut = async {
            if stage.wait_for(|stage| *stage == Stage::Cut).await.is_ok() {
                control.reconnects(millis(begun.elapsed()));
            }
            over(vm, control).await
        };
        let opened = tokio::select! {
            opened = &mut *opening => opened,
            failure = cut => return Err(failure.to_fault()),
        };
        self.opening = None;
        let opened = opened.map_err(|error| Fault::from(task_failed(&error)))?;
        opened.map_err(|failure| failure.to_fault())
    }

    /// Starts the thread.
    fn start(&self, rounds: Rounds, images: &[Image]) -> Result<Arc<DiskTravel>, Fault> {
        let Departure { vm, .. } = self.departure;
        let (orders, received) = sync_channel(MOST_ORDERS);
        std::thread::Builder::new()
            .name(format!("disks-{}", vm.name))
            .spawn(move || rounds.run(&received))
            .map_err(|error| Fault::from(host_failed("cannot start a thread", &error)))?;
        let asked = self.plan.request.disks.iter().zip(images);
        let disks = asked.map(|(disk, image)| DiskReport {
            from: disk.path.display().to_string(),
            to: image.path.display().to_string(),
            virtual_bytes: disk.virtual_bytes,
            base_was_there: !disk.base.is_empty(),
            ..DiskReport::default()
        });
        Ok(Arc::new(DiskTravel {
            departure: self.departure.clone(),
            transfer: self.plan.note.transfer.clone(),
            can_continue: !self.plan.note.mirrored,
            spec_there: self.spec_there(images),
            disks: disks.collect(),
            stage: self.shown.stage.subscribe(),
            shown: Arc::clone(&self.shown),
            orders,
            settling: Settling::default(),
            handed_over: AtomicBool::new(false),
            begun: self.begun,
            alone: Mutex::default(),
        }))
    }

    fn spec_there(&self, images: &[Image]) -> ResolvedSpec {
        let mut spec = ResolvedSpec::clone(&self.departure.vm.spec());
        for (index, image) in self.plan.indexes.iter().zip(images) {
            if let Some(disk) = spec.disks.get_mut(*index) {
                *disk = image.of(disk);
            }
        }
        spec.with_fresh_node_names()
    }

    /// Finds an earlier transfer that this one can continue. Removes another one.
    async fn look_back(&mut self) -> Result<(), Fault> {
        let Departure { agent, vm, .. } = self.departure;
        if let Some(earlier) = agent.disk_transfer(&vm.name) {
            if self.plan.continues(&earlier) {
                let found = FoundBitmaps::find(&vm.process.qmp, &earlier).await;
                let host = &agent.config().name;
                self.found = found
                    .map_err(|error| qemu_failure(host, "list the bitmaps of the disks", &error))
                    .map_err(|failure| failure.to_fault())?;
            }
            let continues = self.continues();
            if !agent.clear_disk_transfer(vm, &earlier, continues).await {
                return Err(self.not_cleared());
            }
            if continues {
                let (vm, transfer) = (vm.name.as_str(), &earlier.transfer);
                tracing::info!(vm, transfer, "an earlier transfer of the disks is continued");
                self.plan.set_transfer(earlier.transfer);
                return Ok(());
            }
            agent.forget_disk_transfer(&vm.name);
            // The guest may have run there on its images: then they are no business of this host.
            if !earlier.handed_over {
                self.departure.forget_there(&earlier.to, &earlier.transfer).await;
            }
        }
        // Bitmaps whose note was lost.
        match agent.clear_disk_transfer(vm, &self.plan.note, false).await {
            true => Ok(()),
            false => Err(self.not_cleared()),
        }
    }

    fn not_cleared(&self) -> Fault {
        let name = &self.departure.vm.name;
        let message = format!(
            "cannot move VM \"{name}\" together with its disks: QEMU keeps parts of an earlier \
             attempt"
        );
        let remedy = "see the agent's log, then try again";
        Fault::from(ApiError::new(ErrorCode::HypervisorFailed, message, remedy))
    }

    fn note(&self) -> Result<(), Fault> {
        let Departure { agent, vm, .. } = self.departure;
        agent.note_disk_transfer(&vm.name, &self.plan.note).map_err(Fault::from)
    }

    /// Asks the destination for images. If it does not continue an earlier transfer, that one is
    /// given up.
    async fn ask(
        &mut self,
        peer: &Client,
        control: &MigrationControl,
    ) -> Result<(ArrivingDisksAccepted, Vec<Image>), Fault> {
        let Departure { agent, vm, request, .. } = self.departure;
        // A destination that is away from the begin is not waited for.
        peer.connection().await.map_err(|error| refused_disks(&request.to, error))?;
        let mut answer = self.ask_for_images(peer, control).await;
        let no_longer = [ErrorCode::InvalidRequest, ErrorCode::NotFound, ErrorCode::WrongState];
        if let Err(NoAnswer::Error(ClientError::Refused(error))) = &answer
            && no_longer.contains(&error.code)
            && self.continues()
        {
            tracing::info!(vm = vm.name.as_str(), %error, "an earlier transfer is given up");
            agent.clear_disk_transfer(vm, &self.plan.note, false).await;
            self.found = None;
            self.departure.forget_there(&request.to, &self.plan.note.transfer).await;
            self.plan.set_transfer(fresh_id().map_err(Fault::from)?.to_string());
            self.note()?;
            answer = self.ask_for_images(peer, control).await;
        }
        let accepted = answer.map_err(|why| match why {
            NoAnswer::Error(error) => refused_disks(&request.to, error),
            NoAnswer::Ended(failure) => failure.to_fault(),
        })?;
        let images = images_of(&self.plan.request, &accepted);
        let images = images.map_err(|failure| failure.to_fault())?;
        Ok((accepted, images))
    }

    /// Asks until there is an answer: the destination knows the transfer by its ID.
    async fn ask_for_images(
        &self,
        peer: &Client,
        control: &MigrationControl,
    ) -> Result<ArrivingDisksAccepted, NoAnswer> {
        let Departure { vm, request, begun, .. } = self.departure;
        let limit = Duration::from_millis(request.cut_limit_ms);
        let ask = || peer.receive_disks(&self.plan.request);
        let waits = |error: &ClientError| shows(vm, control, *begun, error);
        answer(limit, ask, over(vm, control), waits).await
    }

    /// Removes what was made. An earlier transfer can still be continued.
    pub(crate) async fn undo(&mut self) {
        let Departure { agent, vm, request, .. } = self.departure;
        self.shown.wires.end();
        // It may be asking for images, which must not be made after they were removed.
        if let Some(opening) = self.opening.take() {
            let _ = opening.await;
        }
        let continues = self.continues();
        let cleared = agent.clear_disk_transfer(vm, &self.plan.note, continues).await;
        if continues {
            return;
        }
        if cleared {
            agent.forget_disk_transfer(&vm.name);
        }
        self.departure.forget_there(&request.to, &self.plan.note.transfer).await;
    }
}

/// Converts a failed request for images.
pub(crate) fn refused_disks(to: &str, error: ClientError) -> Fault {
    Fault::from(of_peer(to, error, |error| {
        let message = format!("host {to} refuses the disks: {}", error.message);
        ApiError::new(error.code, message, error.remedy)
    }))
}
