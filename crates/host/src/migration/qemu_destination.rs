//! QEMU as the hypervisor of a migration's destination: a shadow VM that waits for its device
//! state.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use godwit_migration::Failure;
use godwit_migration::drive::page_in::Faults;
use godwit_migration::drive::{DestinationHypervisor, Noted};
use godwit_qemu::{AnnounceParameters, PciFunction, QmpEvent, RESUME};
use godwit_ram::PageIn;
use godwit_types::FailureCode;
use tokio::runtime::Handle;
use tokio::sync::broadcast;
use tokio::task::JoinHandle;

use super::image_cache::ImageCache;
use crate::agent::Agent;
use crate::disk_arrivals::DiskArrival;
use crate::state_stream::{self, LOAD_LIMIT, STREAM, qemu_failure};
use crate::vm::{Begin, Vm};

/// The destination's QEMU. It is driven from a plain thread.
pub(super) struct QemuDestination {
    agent: Arc<Agent>,
    vm: Arc<Vm>,
    images: ImageCache,
    /// The source host.
    from: String,
    /// Whether its memory is offered as a source of other guests' pages.
    offers: bool,
    /// Disks that arrive with the VM.
    disks: Option<Arc<DiskArrival>>,
    runtime: Handle,
    stream: UnixStream,
    events: broadcast::Receiver<QmpEvent>,
    /// Task that places the PCI devices. It ends before the device state begins.
    placing: Option<JoinHandle<()>>,
    /// Task that records that the guest may run here.
    noting: Option<JoinHandle<()>>,
}

impl QemuDestination {
    /// Passes the shadow VM its stream, and has its PCI devices placed as `pci` says.
    pub(super) async fn new(
        agent: Arc<Agent>,
        vm: Arc<Vm>,
        from: String,
        offers: bool,
        pci: Vec<PciFunction>,
        disks: Option<Arc<DiskArrival>>,
    ) -> Result<Self, Failure> {
        let host = agent.config().name.clone();
        let local = |error: std::io::Error| {
            Failure::new(
                FailureCode::Internal,
                format!("cannot create the stream of the device state: {error}"),
            )
        };
        let qmp = &vm.process.qmp;
        state_stream::set_up(qmp, false)
            .await
            .map_err(|error| qemu_failure(&host, "prepare QEMU", &error))?;
        let (stream, theirs) = UnixStream::pair().map_err(local)?;
        stream.set_write_timeout(Some(LOAD_LIMIT)).map_err(local)?;
        qmp.getfd(STREAM, theirs.as_fd())
            .await
            .map_err(|error| qemu_failure(&host, "pass the stream", &error))?;
        let events = qmp.events();
        let uri = format!("fd:{STREAM}");
        qmp.migrate_incoming(&uri)
            .await
            .map_err(|error| qemu_failure(&host, "open the stream", &error))?;
        let arriving = Arc::clone(&vm);
        let placing = Some(tokio::spawn(async move {
            if let Err(error) = arriving.process.qmp.place_pci_functions(&pci).await {
                let vm = arriving.name.as_str();
                tracing::debug!(vm, %error, "the shadow maps its devices during the pause");
            }
        }));
        let images = ImageCache::new(Arc::clone(&agent), Arc::clone(&vm), Begin::Incoming);
        Ok(QemuDestination {
            agent,
            vm: Arc::clone(&vm),
            images,
            from,
            offers,
            disks,
            runtime: Handle::current(),
            stream,
            events,
            placing,
            noting: None,
        })
    }

    fn failure(&self, what: &str) -> Failure {
        let words = self
            .vm
            .files
            .last_words()
            .map_or(String::new(), |words| format!(" (last log lines: {words})"));
        let detail = format!("QEMU on host {} {what}{words}", self.agent.config().name);
        Failure::new(FailureCode::HypervisorFailed, detail)
    }
}

/// Whether QEMU has reported that the vCPUs have run.
fn has_resumed(events: &mut broadcast::Receiver<QmpEvent>) -> bool {
    loop {
        match events.try_recv() {
            Ok(event) if event.name == RESUME => return true,
            Ok(_) | Err(broadcast::error::TryRecvError::Lagged(_)) => {}
            Err(_) => return false,
        }
    }
}

impl DestinationHypervisor for QemuDestination {
    fn expect_switchover(&mut self) {
        self.images.drop_clean();
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if let Some(placing) = self.placing.take() {
            // The source refers to nothing any more.
            self.agent.references().give_way();
            self.images.drop_clean();
            // A write to a machine that is loaded would change the guest's devices.
            let placed = self.runtime.block_on(placing);
            placed.map_err(|error| self.failure(&format!("was not prepared: {error}")))?;
        }
        self.stream
            .write_all(bytes)
            .map_err(|error| self.failure(&format!("does not accept the device state: {error}")))
    }

    fn note_take_over(&mut self, noted: Noted) {
        let (agent, vm) = (Arc::clone(&self.agent), Arc::clone(&self.vm));
        self.noting = Some(self.runtime.spawn(async move {
            let begun = Instant::now();
            let saved = agent.note_take_over(&vm);
            tracing::debug!(vm = vm.name.as_str(), took = ?begun.elapsed(), "take-over recorded");
            let saved = saved.map_err(|error| Failure::new(FailureCode::Internal, error.message));
            // The receiver of this notice may be waiting for this task while its channel is full.
            tokio::task::spawn_blocking(move || noted(saved));
        }));
    }

    fn finish_load(&mut self) -> Result<(), Failure> {
        let (vm, events) = (&self.vm, &mut self.events);
        let loaded = self.runtime.block_on(async {
            tokio::time::timeout(LOAD_LIMIT, state_stream::until_loaded(vm, events)).await
        });
        match loaded {
            // The guest's last writes, which QEMU reads when it runs the guest.
            Ok(Ok(())) => {
                self.disks.as_ref().map_or(Ok(()), |disks| disks.wait_complete(LOAD_LIMIT))
            }
            Ok(Err(why)) => Err(self.failure(why)),
            Err(_) => Err(self.failure("did not load the device state in time")),
        }
    }

    fn prepare_page_in(&mut self) -> Result<(Box<dyn Faults>, PathBuf), Failure> {
        let Vm { tracker_socket, process, files, .. } = &*self.vm;
        let page_in = PageIn::attach(tracker_socket, process.pid, &self.vm.regions())
            .map_err(|error| Failure::new(FailureCode::MemoryFailed, error.to_string()))?;
        files.note_missing_from(&self.from).map_err(|error| {
            Failure::new(FailureCode::Internal, format!("cannot record the source's name: {error}"))
        })?;
        Ok((Box::new(page_in), files.missing()))
    }

    fn run(&mut self, run: bool) -> Result<(), Failure> {
        if !run {
            return Ok(());
        }
        self.vm.files.note_run_permitted().map_err(|error| {
            Failure::new(
                FailureCode::Internal,
                format!("cannot record that the guest may run: {error}"),
            )
        })?;
        let permitted = Instant::now();
        // The ownership is saved later: a shadow whose vCPUs run is known to be this host's
        // ([`Agent::open`]).
        let (qmp, events) = (&self.vm.process.qmp, &mut self.events);
        let running = self.runtime.block_on(async {
            let mut answer = std::pin::pin!(qmp.resume());
            let answered = loop {
                tokio::select! {
                    biased;
                    // QEMU reports running vCPUs before it answers the command; when it is busy,
                    // milliseconds before.
                    event = events.recv() => match event {
                        Ok(event) if event.name == RESUME => return Ok(()),
                        Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                        Err(broadcast::error::RecvError::Closed) => break answer.await,
                    },
                    answered = &mut answer => break answered,
                }
            };
            // A QEMU that ends right after the guest's first instruction has reported it, and the
            // guest has run.
            match answered {
                Err(_) if has_resumed(events) => Ok(()),
                answered => answered,
            }
        });
        tracing::debug!(vm = self.vm.name.as_str(), took = ?permitted.elapsed(), "resumed");
        running.map_err(|error| qemu_failure(&self.agent.config().name, "resume the guest", &error))
    }

    fn discard(&mut self, failure: &Failure) {
        tracing::warn!(vm = self.vm.name.as_str(), %failure, "shadow discarded");
        self.runtime.block_on(async {
            // A write after the removal of the record would create it again.
            if let Some(noting) = self.noting.take() {
                let _ = noting.await;
            }
            self.agent.discard(&self.vm).await;
        });
        // The source waits for the refusal, and not for this.
        if let Some(disks) = &self.disks {
            self.runtime.spawn(Arc::clone(&self.agent).drop_disks(Arc::clone(disks)));
        }
    }

    fn promote(&mut self) {
        // Page-in that could not be prepared completely leaves the note with the source's name.
        if !self.vm.files.missing().exists() {
            self.vm.files.remove_missing();
        }
        self.runtime.block_on(async {
            self.agent.promote(&self.vm).await;
            if let Some(disks) = &self.disks {
                self.agent.forget_disk_arrival(disks);
            }
            if self.offers {
                self.agent.references().arrived(&self.vm, self.agent.moves_guests());
            } else {
                self.agent.references().drop_bases_of(&self.vm.name);
            }
            // QEMU announced the addresses when it had loaded the state. It does so again now that
            // the guest answers.
            if let Err(error) =
                self.vm.process.qmp.announce_self(AnnounceParameters::default()).await
            {
                let vm = self.vm.name.as_str();
                tracing::warn!(vm, %error, "cannot announce the addresses a second time");
            }
            if let Err(error) = state_stream::reset(&self.vm.process.qmp).await {
                let vm = self.vm.name.as_str();
                tracing::warn!(vm, %error, "cannot reset the migration capabilities");
            }
        });
    }
}
