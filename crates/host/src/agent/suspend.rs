//! Suspension of a VM: its guest is saved to a file and its process ends; a start resumes it.
//!
//! The order of the steps makes an agent or host that fails in between lose nothing, and keeps a
//! guest from running twice from one file:
//!
//! 1. The file is complete and on the disk before the record says `suspended`. Until then the guest
//!    is only paused, and continues.
//! 2. QEMU ends after that. A QEMU found beside such a record has not run since, and is ended.
//! 3. At a resume, the record says `running` before the guest runs. From then on the file is of no
//!    use, and is removed.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode, VmInfo};
use godwit_migration::saved::Progress;
use godwit_qemu::{AnnounceParameters, Backing, VmName};

use crate::agent::{Agent, Begun, Slot, autostart};
use crate::hold::hold;
use crate::references::References;
use crate::saved_guest::{self, Resumable, SavedFile};
use crate::state_stream;
use crate::store::{Desired, Role, SavedVm};
use crate::vm::{Begin, Condition, Operation, Vm};
use crate::whole::whole;

/// Interval at which the progress is shown.
const SHOW_INTERVAL: Duration = Duration::from_millis(500);

impl Agent {
    /// Saves the guest to a file and ends its process. If that fails, the guest continues.
    pub async fn suspend(self: &Arc<Self>, name: &VmName) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let begun = agent.begin(&name, &Operation::Suspend)?;
            agent.suspend_now(&name, begun).await?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Returns the file of a VM's guest while it is suspended.
    pub(super) fn saved_file(&self, name: &VmName) -> SavedFile {
        SavedFile::of(&self.config.suspend_dir(), name)
    }

    async fn suspend_now(
        self: &Arc<Self>,
        name: &VmName,
        mut begun: Begun,
    ) -> Result<(), ApiError> {
        let suspended = match &begun.vm {
            Some(vm) => self.save_guest(vm, &begun).await.map(|()| vm.clone()),
            None => Err(self.no_vm(name)),
        };
        match suspended {
            Ok(vm) => {
                hold("suspend-recorded");
                vm.end(None).await;
                vm.files.remove_runtime();
                References::withdraw(&vm);
                self.settle(name, Condition::Suspended, None, None);
                Ok(())
            }
            Err(error) => {
                self.saved_file(name).remove();
                begun.lose_what_ended();
                match &begun.vm {
                    Some(vm) if vm.process.exit().is_none() => {
                        let vm = vm.clone();
                        self.settle(name, begun.before, begun.vm, begun.reason);
                        self.notice_process(&vm).await;
                    }
                    _ => {
                        let reason = format!("QEMU ended while it was suspended: {error}");
                        self.settle(name, Condition::Failed, None, Some(reason));
                    }
                }
                Err(error)
            }
        }
    }

    /// Saves a guest and records that it is suspended. On failure, the guest continues.
    async fn save_guest(self: &Arc<Self>, vm: &Arc<Vm>, begun: &Begun) -> Result<(), ApiError> {
        self.check_memory_is_here(vm)?;
        let (file, progress) = (self.saved_file(&vm.name), Arc::new(Progress::default()));
        tokio::task::block_in_place(|| file.check_room(vm))?;
        self.thaw_before_move(vm).await;
        let begin = std::time::Instant::now();
        let shown = self.show_progress(&vm.name, begun.spec.memory_bytes(), "saved", &progress);
        let saved = saved_guest::save(vm, &file, &progress).await;
        shown.abort();
        let recorded = saved.and_then(|written| {
            hold("suspend-saved");
            self.save(&begun.spec, Role::Owner, Desired::Suspended, begun.ownership)?;
            Ok(written)
        });
        match recorded {
            Ok(written) => {
                tracing::info!(
                    vm = vm.name.as_str(),
                    file = %file.path().display(),
                    content_bytes = written.content_bytes,
                    file_bytes = written.file_bytes,
                    took_ms = begin.elapsed().as_millis(),
                    "suspended"
                );
                Ok(())
            }
            Err(error) => {
                if let Err(stuck) = state_stream::undo_hand_over(vm, true).await {
                    tracing::error!(vm = vm.name.as_str(), %stuck, "the guest stays paused");
                }
                Err(error)
            }
        }
    }

    /// Refuses to suspend a guest whose memory is not all in the host's files.
    fn check_memory_is_here(&self, vm: &Vm) -> Result<(), ApiError> {
        let refuse = |why: &str, remedy: &str| {
            let message = format!("cannot suspend VM \"{}\": {why}", vm.name);
            Err(ApiError::new(ErrorCode::WrongState, message, remedy))
        };
        if self.page_ins.state(&vm.name).is_some() || vm.files.missing().exists() {
            return refuse("pages of its memory are still on another host", "wait until they came");
        }
        match vm.spec().memory.iter().any(|block| block.backing == Backing::Private) {
            true => refuse("its memory is private to QEMU", "give it shared memory"),
            false => Ok(()),
        }
    }

    /// Shows in a VM's reason how much of its memory is done.
    fn show_progress(
        self: &Arc<Self>,
        name: &VmName,
        of_bytes: u64,
        what: &'static str,
        progress: &Arc<Progress>,
    ) -> tokio::task::JoinHandle<()> {
        let (agent, name, progress) = (self.clone(), name.clone(), progress.clone());
        tokio::spawn(async move {
            let mut every = tokio::time::interval(SHOW_INTERVAL);
            loop {
                every.tick().await;
                let percent = progress.done_bytes().saturating_mul(100) / of_bytes.max(1);
                let mut table = agent.table();
                let Some(slot) = table.get_mut(&name) else { return };
                if matches!(slot.condition, Condition::Suspending | Condition::Starting) {
                    slot.reason = Some(format!("{} % of its memory is {what}", percent.min(100)));
                }
            }
        })
    }

    /// Starts QEMU with a suspended guest, and lets it run. If that last step fails, the guest is
    /// left paused in its process.
    pub(super) async fn resume_saved(self: &Arc<Self>, begun: &Begun) -> Result<Arc<Vm>, ApiError> {
        let (spec, ownership) = (&begun.spec, begun.ownership);
        let file = self.saved_file(&spec.name);
        let opened = tokio::task::block_in_place(|| {
            Resumable::open(&file, &spec.name, spec.uuid, ownership)
        });
        let guest = opened?;
        let begin = std::time::Instant::now();
        let vm = self.launch(spec, ownership, Begin::Saved).await?;
        let progress = Arc::new(Progress::default());
        let shown = self.show_progress(&spec.name, guest.content_bytes(), "loaded", &progress);
        let loaded = guest.load(&vm, &file, &progress).await;
        shown.abort();
        hold("resume-loaded");
        let recorded =
            loaded.and_then(|()| self.save(&vm.spec(), Role::Owner, Desired::Running, ownership));
        if let Err(error) = recorded {
            vm.process.quit().await;
            vm.files.remove_all();
            return Err(error);
        }
        hold("resume-recorded");
        // From here on the guest may have run, so the file is of no use even if QEMU reports a
        // failure. The guest is then in its process, paused.
        if let Err(error) = vm.resume().await {
            tracing::error!(vm = vm.name.as_str(), %error, "the guest stays paused");
        }
        let announced = vm.process.qmp.announce_self(AnnounceParameters::default()).await;
        if let Err(error) = announced {
            tracing::warn!(vm = vm.name.as_str(), %error, "cannot announce the addresses");
        }
        file.remove();
        self.store.forget_resumption(&spec.name);
        Agent::greet_arrived_guest(&vm);
        let took_ms = begin.elapsed().as_millis();
        tracing::info!(vm = vm.name.as_str(), took_ms, "resumed from its file");
        self.watch(&vm);
        Ok(vm)
    }

    /// At the agent's start: adds a suspended VM. A QEMU beside it was being ended, or had not run
    /// its guest yet.
    pub(super) async fn adopt_suspended(&self, record: SavedVm) -> Result<(), ApiError> {
        let name = record.spec.name.clone();
        self.end_stray(&name).await?;
        self.places.vm(&name).remove_runtime();
        let file = self.saved_file(&name);
        let ownership = record.ownership();
        let mut slot = Slot::new(record.spec, ownership, Condition::Suspended);
        if let Some(boot_id) = self.store.resumption_of(&name) {
            // In another boot, somebody may have started the VM on another host.
            slot.resumes = file.exists() && boot_id == autostart::boot_id();
            slot.reason = Some(format!(
                "it was suspended for a snapshot when its host or agent ended; resume it with \
                 `godwit vm resume {name}` if no other host runs it"
            ));
        }
        if !file.exists() {
            let path = file.path().display();
            slot.reason = Some(format!("its memory is missing: there is no {path}"));
        }
        self.insert(slot)
    }

    /// At the agent's start: lets a guest continue whose suspension or resumption was cut off, and
    /// removes its file, which is of no use. Returns whether it continues. The file stays for the
    /// next agent if it does not.
    pub(super) async fn undo_suspension(&self, record: &SavedVm, vm: &Vm) -> bool {
        let file = self.saved_file(&record.spec.name);
        // A guest that another host may run never continues here.
        let is_own = record.role == Role::Owner && record.other.is_none();
        if !is_own || !file.is_left() {
            return false;
        }
        if let Err(error) = state_stream::undo_hand_over(vm, true).await {
            tracing::error!(vm = vm.name.as_str(), %error, "the guest stays paused");
            return false;
        }
        file.remove();
        true
    }

    /// At the agent's start: removes what a suspension has left of a guest whose process has ended.
    pub(super) fn forget_suspension(&self, record: &SavedVm) {
        self.saved_file(&record.spec.name).remove();
    }
}
