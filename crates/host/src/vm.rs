//! A VM with a process on this host: its start, in steps that each have an undo; its adoption by
//! the next agent; and its end.

mod admission;
mod files;
mod guest;
mod tpm;
mod tracking_turn;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_migration::reference::Content;
use godwit_qemu::{
    AdoptError, Launch, NicLink, OpenFiles, QemuLimits, QemuProcess, ResolvedSpec, Tap, Tpm,
    Tracker, VmName, nic_id, nic_number,
};
use godwit_ram::{Region, tracker_listener};
use godwit_types::{Incarnation, Ownership};
use parking_lot::Mutex;

pub(crate) use admission::{Condition, Operation};
pub use files::VmFiles;
pub(crate) use files::{Places, Processes, StagedFiles};
pub(crate) use guest::Guest;
pub(crate) use tpm::{TpmSite, sync_state as sync_tpm_state};
pub(crate) use tracking_turn::TrackingTurn;

use crate::config::NetworkConfig;
use crate::failure::{host_failed, no_user, ram_failed};
use crate::ha::Starting;
use crate::network::attach_tap;
use crate::network::filter::Filters;
use crate::user::User;

/// Time for the kernel to end a process that has closed its files; it frees the guest's memory.
const ENDING_LIMIT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A VM whose QEMU runs here: the guest itself, or a shadow that waits for it.
#[derive(Debug)]
pub struct Vm {
    pub name: VmName,
    /// Complete specification, with no value left to defaults. It may change while the VM runs,
    /// under [`Condition::Plugging`].
    spec: Mutex<Arc<ResolvedSpec>>,
    /// Incarnation of the VM that this process runs.
    pub incarnation: Incarnation,
    /// Epoch of its ownership. An operator who takes back a guest in doubt begins a new one.
    epoch: AtomicU64,
    pub process: QemuProcess,
    /// Process of its TPM; `None` if it has none, or if that process has ended.
    pub(crate) tpm: Option<Tpm>,
    /// Shared memory blocks, in the blocks' order (private ones are left out). Some may come while
    /// the VM runs, under [`Condition::Plugging`].
    regions: Mutex<Vec<Arc<Region>>>,
    /// Socket on which the library in QEMU hands out a userfaultfd.
    pub tracker_socket: PathBuf,
    pub files: VmFiles,
    /// Agent in the guest.
    pub(crate) guest: Guest,
    /// Turns of tracking the guest's writes.
    pub(crate) tracking: TrackingTurn,
    /// The memory offered as a source of pages for arriving guests, if it is offered.
    content: Mutex<Option<Arc<Content>>>,
    /// What it has lost while it runs.
    losses: Mutex<Losses>,
}

/// What a VM has lost while it runs, each with its text; `None`: nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Losses {
    /// Its swtpm has ended. Nothing brings it back.
    pub(crate) tpm: Option<String>,
    /// The filter of a NIC cannot be set again.
    pub(crate) filter: Option<String>,
}

/// A VM's process, described without contacting its QEMU: all that is needed to fetch its missing
/// pages.
#[derive(Clone, Debug)]
pub(crate) struct UnaskedVm {
    pub name: VmName,
    pub pid: i32,
    pub start_time: u64,
    /// Shared memory blocks, as in [`Vm`].
    pub regions: Vec<Arc<Region>>,
    pub files: VmFiles,
}

impl UnaskedVm {
    /// Finds a VM's process that an earlier agent started; `None` if it has ended.
    pub(crate) fn find(files: VmFiles, spec: &ResolvedSpec) -> Result<Option<UnaskedVm>, ApiError> {
        let Some((pid, start_time)) = files.living_process() else { return Ok(None) };
        let regions = open_memory(&files, spec)?;
        Ok(Some(UnaskedVm { name: spec.name.clone(), pid, start_time, regions, files }))
    }

    /// Whether the process ends within the limit, or has ended. Blocks.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        godwit_qemu::ends_within(self.pid, self.start_time, limit)
    }
}

/// Host parameters of a VM's start.
#[derive(Clone, Debug)]
pub(crate) struct LaunchSite<'a> {
    pub host: &'a str,
    pub places: &'a Places,
    /// QEMU program, an absolute path.
    pub qemu: &'a Path,
    /// Library preloaded into QEMU.
    pub tracker: &'a Path,
    /// Network of each of the specification's NICs, in order.
    pub bridges: &'a [NetworkConfig],
    /// Filters of what guests send.
    pub filters: &'a Filters,
    /// Whether QEMU runs with its seccomp filter.
    pub sandbox: bool,
    /// Parameters of the VM's TPM, if it has one.
    pub tpm: Option<TpmSite>,
    /// Admission of a protected VM.
    pub starting: Option<&'a Starting>,
}

/// Mode of a VM's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// The VM boots from its kernel or disk.
    Boot,
    /// The VM continues from its saved memory and waits for that.
    Saved,
    /// A shadow waits for a migration and for permission to run its guest.
    Incoming,
    /// A shadow whose QEMU runs the guest as soon as its state is loaded.
    IncomingRuns,
}

impl Vm {
    fn new(
        files: VmFiles,
        spec: &ResolvedSpec,
        ownership: Ownership,
        (process, tpm): (QemuProcess, Option<Tpm>),
        regions: Vec<Arc<Region>>,
    ) -> Vm {
        Vm {
            name: spec.name.clone(),
            spec: Mutex::new(Arc::new(spec.clone())),
            incarnation: ownership.incarnation,
            epoch: AtomicU64::new(ownership.epoch),
            process,
            tpm,
            regions: Mutex::new(regions),
            tracker_socket: files.tracker_socket.clone(),
            guest: Guest::of(&files, spec),
            files,
            tracking: TrackingTurn::default(),
            content: Mutex::default(),
            losses: Mutex::default(),
        }
    }

    /// Starts a VM. On success, its process runs (and the vCPUs of a booting guest). On failure,
    /// nothing remains: files are removed when `staged` is dropped, taps with their open files, and
    /// QEMU is ended before the error returns.
    pub(crate) async fn launch(
        site: &LaunchSite<'_>,
        spec: &ResolvedSpec,
        opened: OpenFiles,
        ownership: Ownership,
        begin: Begin,
    ) -> Result<Vm, ApiError> {
        let files = site.places.vm(&spec.name);
        let staged = StagedFiles::new(files.clone());
        files
            .make_dir()
            .map_err(|error| host_failed("cannot create the VM's run directory", &error))?;
        files
            .clear_notes()
            .map_err(|error| host_failed("cannot remove the notes of an older process", &error))?;
        let user = files.claim_user(spec.accel).map_err(|error| no_user(&error))?;
        let regions = make_memory(&files, spec, user)?;
        let taps = attach_taps(site, spec).await?;
        let tracker = make_tracker(site, &files)?;
        let (limits, has_user) = (QemuLimits::of(spec), site.places.users.shared().is_none());
        let keeps = matches!(begin, Begin::Boot | Begin::Saved);
        let start = |tpm: &TpmSite| tpm::blocking(|| tpm.start(&files, &limits, keeps));
        let tpm = site.tpm.as_ref().map(start).transpose()?;
        let (tpm, tpm_connection) = tpm.unzip();
        let launch = Launch {
            spec: spec.clone(),
            qemu: site.qemu.to_owned(),
            run_dir: files.dir.clone(),
            files: opened,
            ram_files: files.memory_of(spec),
            taps,
            tpm: tpm_connection,
            tracker,
            user: Some((user.uid, user.gid)),
            sandbox: site.sandbox,
            limits: limits.of_process(has_user, site.places.groups.is_some()),
            incoming: begin != Begin::Boot,
            paused: begin != Begin::IncomingRuns,
        };
        let process = launch.start().await.map_err(|error| crate::failure::start_failed(&error))?;
        // Takes effect before the guest's first instruction.
        files.confine(process.pid, &limits);
        let vm = Vm::new(files, spec, ownership, (process, tpm), regions);
        match vm.finish_launch(begin, site.starting).await {
            Ok(()) => {
                staged.keep();
                Ok(vm)
            }
            Err(error) => {
                vm.process.quit().await;
                Err(error)
            }
        }
    }

    async fn finish_launch(
        &self,
        begin: Begin,
        starting: Option<&Starting>,
    ) -> Result<(), ApiError> {
        self.files
            .write_pid(self.process.pid, self.process.start_time)
            .map_err(|error| host_failed("cannot record the VM's process", &error))?;
        if let Some(starting) = starting {
            starting.process(self.process.pid, self.process.start_time)?;
        }
        for (index, nic) in self.spec().nics.iter().enumerate().filter(|(_, nic)| !nic.link.is_up())
        {
            self.set_link(index, nic.link).await?;
        }
        if begin == Begin::Boot { self.resume().await } else { Ok(()) }
    }

    /// Adopts a VM's process that an earlier agent started; `None` if it has ended. `process`: its
    /// PID and start time, if known; otherwise the VM's files identify it. [`Vm::spec`] then says
    /// what the process has: an agent that ended during a change may have recorded something else.
    pub(crate) async fn adopt(
        files: VmFiles,
        spec: &ResolvedSpec,
        ownership: Ownership,
        process: Option<(i32, u64)>,
    ) -> Result<Option<Vm>, ApiError> {
        let noted = process.or_else(|| files.read_pid()).or_else(|| files.find_process());
        let Some((pid, start_time)) = noted else {
            return Ok(None);
        };
        let process = match QemuProcess::adopt(files.dir.clone(), pid, start_time).await {
            Ok(process) => process,
            Err(AdoptError::Gone { .. }) => return Ok(None),
            // The monitor closes before the process ends: a QEMU that is ending does not hang.
            Err(AdoptError::Monitor { .. }) if ends_soon(pid, start_time).await => return Ok(None),
            Err(error) => {
                let message = format!("cannot adopt QEMU of VM \"{}\": {error}", spec.name);
                return Err(ApiError::new(ErrorCode::HypervisorFailed, message, error.remedy()));
            }
        };
        let real = process.qmp.as_plugged(spec).await.map_err(|error| {
            let message = format!("cannot adopt QEMU of VM \"{}\": {error}", spec.name);
            ApiError::new(ErrorCode::HypervisorFailed, message, error.remedy())
        })?;
        if let Some(real) = &real {
            let (vcpus, memory_bytes) = (real.vcpus, real.memory_bytes());
            tracing::warn!(vm = spec.name.as_str(), vcpus, memory_bytes, "its record is corrected");
            process.qmp.remove_released(spec, real).await;
        }
        let spec = real.as_ref().unwrap_or(spec);
        let regions = open_memory(&files, spec)?;
        // An agent that was killed may have missed this step.
        files.confine_adopted(process.pid, &QemuLimits::of(spec));
        let tpm = files.find_tpm();
        Ok(Some(Vm::new(files, spec, ownership, (process, tpm), regions)))
    }

    /// Returns the specification of what runs.
    #[must_use]
    pub fn spec(&self) -> Arc<ResolvedSpec> {
        self.spec.lock().clone()
    }

    /// Returns its shared memory blocks, in the blocks' order.
    #[must_use]
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.lock().clone()
    }

    /// Adds a shared memory block, behind the others.
    pub(crate) fn add_region(&self, region: Arc<Region>) {
        self.regions.lock().push(region);
    }

    /// Records what a change made of the specification.
    pub(crate) fn set_spec(&self, spec: Arc<ResolvedSpec>) {
        *self.spec.lock() = spec;
    }

    /// Returns the description of its process that needs no contact with QEMU.
    pub(crate) fn unasked(&self) -> UnaskedVm {
        UnaskedVm {
            name: self.name.clone(),
            pid: self.process.pid,
            start_time: self.process.start_time,
            regions: self.regions(),
            files: self.files.clone(),
        }
    }

    /// Returns what it has lost while it runs.
    pub(crate) fn losses(&self) -> Losses {
        self.losses.lock().clone()
    }

    /// Notes that its TPM has ended.
    pub(crate) fn note_tpm_lost(&self, why: String) {
        self.losses.lock().tpm = Some(why);
    }

    /// Notes whether the filters of its NICs are in place.
    pub(crate) fn note_filter_lost(&self, why: Option<String>) {
        self.losses.lock().filter = why;
    }

    /// Offers the VM's memory as a source of pages for other guests, for as long as this VM is
    /// here.
    pub(crate) fn offers(&self, content: Arc<Content>) {
        *self.content.lock() = Some(content);
    }

    pub(crate) fn offered(&self) -> Option<Arc<Content>> {
        self.content.lock().clone()
    }

    /// Withdraws the offer of the VM's memory and returns it.
    pub(crate) fn withdraws(&self) -> Option<Arc<Content>> {
        self.content.lock().take()
    }

    /// Sets the link of a NIC in QEMU.
    pub(crate) async fn set_link(&self, nic: usize, link: NicLink) -> Result<(), ApiError> {
        let id = nic_id(&self.spec().nics, nic);
        let set = self.process.qmp.set_link(&id, link.is_up()).await;
        set.map_err(|error| self.hypervisor_failed("set the link of a NIC", &error))
    }

    /// Returns the epoch of its ownership.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Returns the incarnation of the VM and the epoch of its ownership.
    #[must_use]
    pub fn ownership(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch() }
    }

    pub(crate) fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::SeqCst);
    }

    /// Resumes paused vCPUs.
    pub async fn resume(&self) -> Result<(), ApiError> {
        self.process
            .qmp
            .resume()
            .await
            .map_err(|error| self.hypervisor_failed("resume the vCPUs", &error))
    }

    pub(crate) async fn reset(&self) -> Result<(), ApiError> {
        let reset = self.process.qmp.system_reset().await;
        reset.map_err(|error| self.hypervisor_failed("reset the guest", &error))?;
        self.guest.note_thaw();
        Ok(())
    }

    /// Whether the vCPUs run; `None` if QEMU does not respond.
    pub async fn is_running(&self) -> Option<bool> {
        self.process.qmp.status().await.ok().map(|state| state.is_running())
    }

    /// Ends QEMU. With `grace`, shuts the guest down first and gives it that much time. Returns
    /// whether that was enough.
    pub async fn end(&self, grace: Option<Duration>) -> bool {
        if let Some(grace) = grace
            && tokio::time::timeout(grace, self.shut_down(grace)).await == Ok(true)
        {
            return true;
        }
        self.process.quit().await;
        false
    }

    /// Asks the guest's agent for a shutdown. Presses the power button if the guest has no agent,
    /// if its agent refuses, and if the guest still runs after half of `grace`. Returns whether
    /// QEMU has ended; it has not if the button cannot be pressed.
    async fn shut_down(&self, grace: Duration) -> bool {
        if let Some(guest) = &self.guest.agent {
            if self.guest.frozen_until_ms().is_some() && guest.thaw().await.is_ok() {
                self.guest.note_thaw();
            }
            if let Err(error) = guest.shut_down().await {
                tracing::info!(vm = self.name.as_str(), %error, "no shutdown by the guest's agent");
            } else if tokio::time::timeout(grace / 2, self.process.exited()).await.is_ok() {
                return true;
            }
        }
        if self.process.qmp.system_powerdown().await.is_err() {
            return self.process.exit().is_some();
        }
        self.process.exited().await;
        true
    }

    /// Lowers the priority of QEMU's main thread, which frees the guest's memory. The process is no
    /// longer needed.
    pub(crate) fn yield_the_cpu(&self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.process.pid)
            && let Err(error) = rustix::process::setpriority_process(Some(pid), 19)
        {
            tracing::debug!(vm = self.name.as_str(), %error, "cannot lower the priority of QEMU");
        }
    }

    /// Returns how much memory its files already hold, in bytes.
    #[must_use]
    pub fn memory_taken_bytes(&self) -> u64 {
        self.regions().iter().map(|region| files::taken_bytes(region.path())).sum()
    }

    pub(crate) fn hypervisor_failed(&self, what: &str, error: &godwit_qemu::QmpError) -> ApiError {
        let words = self
            .files
            .last_words()
            .map_or(String::new(), |words| format!(" (last log lines: {words})"));
        ApiError::new(
            ErrorCode::HypervisorFailed,
            format!("cannot {what} of VM \"{}\": QEMU: {error}{words}", self.name),
            "see its log with `godwit vm logs --qemu`",
        )
    }
}

/// Whether a process that may be ending ends within the limit.
async fn ends_soon(pid: i32, start_time: u64) -> bool {
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    let gone = async {
        while godwit_qemu::is_alive(pid, start_time) {
            poll.tick().await;
        }
    };
    tokio::time::timeout(ENDING_LIMIT, gone).await.is_ok()
}

/// Opens the files of the shared memory blocks that an earlier agent created.
fn open_memory(files: &VmFiles, spec: &ResolvedSpec) -> Result<Vec<Arc<Region>>, ApiError> {
    let paths = files.memory_of(spec);
    paths
        .iter()
        .map(|path| Region::open(path).map(Arc::new).map_err(|error| ram_failed(&error)))
        .collect()
}

/// Creates the files of the shared memory blocks; they are removed with the staged files.
fn make_memory(
    files: &VmFiles,
    spec: &ResolvedSpec,
    user: User,
) -> Result<Vec<Arc<Region>>, ApiError> {
    let owner = Some((user.uid, user.gid));
    let mut regions = Vec::new();
    for (index, block) in spec.memory.iter().enumerate() {
        if block.backing == godwit_qemu::Backing::Shared {
            let region = Region::create(&files.memory(index), block.size.bytes(), owner)
                .map_err(|error| ram_failed(&error))?;
            regions.push(Arc::new(region));
        }
    }
    Ok(regions)
}

async fn attach_taps(site: &LaunchSite<'_>, spec: &ResolvedSpec) -> Result<Vec<Tap>, ApiError> {
    let mut taps = Vec::new();
    for (index, (nic, network)) in spec.nics.iter().zip(site.bridges).enumerate() {
        let number = nic_number(&spec.nics, index);
        taps.push(attach_tap(site.host, &spec.name, number, nic, network, site.filters).await?);
    }
    Ok(taps)
}

/// Creates the library's socket; `None` if the library is not installed. The VM then runs without
/// it, and a migration by the external engine reports what is missing.
fn make_tracker(site: &LaunchSite<'_>, files: &VmFiles) -> Result<Option<Tracker>, ApiError> {
    if !site.tracker.exists() {
        tracing::warn!(
            library = %site.tracker.display(),
            "no tracker library: only QEMU's own engine can migrate this VM"
        );
        return Ok(None);
    }
    let listener = tracker_listener(&files.tracker_socket)
        .map_err(|error| host_failed("cannot create the tracker's socket", &error))?;
    Ok(Some(Tracker {
        library: site.tracker.to_owned(),
        listener,
        peer_uid: rustix::process::geteuid().as_raw(),
    }))
}
