//! A VM with a process on this host: how it is started, step by step with the undo of each, how it is found again
//! by the next agent, and how it ends.

mod admission;
mod files;
mod tracking_turn;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_migration::reference::Content;
use godwit_qemu::{
    AdoptError, Launch, OpenFiles, QemuLimits, QemuProcess, ResolvedSpec, Tap, Tracker, VmName,
};
use godwit_ram::{Region, tracker_listener};
use godwit_types::{Incarnation, Ownership};

pub(crate) use admission::{Condition, Operation};
pub use files::VmFiles;
pub(crate) use files::{Places, StagedFiles};
pub(crate) use tracking_turn::TrackingTurn;

use crate::config::NetworkConfig;
use crate::failure::{host_failed, no_user, ram_failed};
use crate::network::attach_tap;
use crate::user::User;

/// How long the kernel may take to end a process that has closed its files: it frees the guest's memory.
const ENDING_LIMIT: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A VM whose QEMU runs here: the guest itself, or a shadow that waits for it.
#[derive(Debug)]
pub struct Vm {
    pub name: VmName,
    /// What it is, nothing left to defaults.
    pub spec: ResolvedSpec,
    /// Which life of the VM it is.
    pub incarnation: Incarnation,
    /// The generation of its ownership. An operator who takes a guest in doubt back begins a new one.
    epoch: AtomicU64,
    pub process: QemuProcess,
    /// The shared memory blocks, in the blocks' order (private ones are left out).
    pub regions: Vec<Arc<Region>>,
    /// Where the library in QEMU hands out a userfaultfd.
    pub tracker_socket: PathBuf,
    /// Its files on this host.
    pub files: VmFiles,
    /// Who tracks its writes.
    pub(crate) tracking: TrackingTurn,
    /// Its memory as other guests' pages may be made of it, where it is offered.
    content: Mutex<Option<Arc<Content>>>,
}

/// A VM's process as far as it is known without a word of its QEMU: all that it takes to bring the pages which it lacks.
#[derive(Clone, Debug)]
pub(crate) struct UnaskedVm {
    pub name: VmName,
    /// Its number.
    pub pid: i32,
    pub start_time: u64,
    /// The shared memory blocks, as of a [`Vm`].
    pub regions: Vec<Arc<Region>>,
    /// Its files on this host.
    pub files: VmFiles,
}

impl UnaskedVm {
    /// A VM's process that an earlier agent started; none where it is gone.
    pub(crate) fn find(files: VmFiles, spec: &ResolvedSpec) -> Result<Option<UnaskedVm>, ApiError> {
        let Some((pid, start_time)) = files.living_process() else { return Ok(None) };
        let regions = open_memory(&files, spec)?;
        Ok(Some(UnaskedVm { name: spec.name.clone(), pid, start_time, regions, files }))
    }

    /// Whether it ends within the limit, or has ended. Blocks.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        godwit_qemu::ends_within(self.pid, self.start_time, limit)
    }
}

/// What a start needs to know of the host.
#[derive(Clone, Debug)]
pub(crate) struct LaunchSite<'a> {
    pub host: &'a str,
    /// Where files go.
    pub places: &'a Places,
    /// The QEMU binary, absolute.
    pub qemu: &'a Path,
    /// The library preloaded into it.
    pub tracker: &'a Path,
    /// The bridge of each of the specification's NICs, in order.
    pub bridges: &'a [NetworkConfig],
    /// Whether QEMU gives up the system calls that it never needs.
    pub sandbox: bool,
}

/// How a VM begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// By running its kernel or disk.
    Boot,
    /// As a shadow that waits for a migration and for the word that its guest may run.
    Incoming,
    /// As a shadow whose QEMU lets the guest run as soon as its state is loaded.
    IncomingRuns,
}

impl Vm {
    /// Starts a VM. On success its process runs (a booting guest's vCPUs too); on failure nothing of it is left:
    /// files go when `staged` is dropped, taps with their open files, and QEMU is ended before the error returns.
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
            .map_err(|error| host_failed("the VM's run directory can't be made", &error))?;
        files
            .clear_notes()
            .map_err(|error| host_failed("notes of an older process can't be removed", &error))?;
        let user = files.claim_user(spec.accel).map_err(|error| no_user(&error))?;
        let regions = make_memory(&files, spec, user)?;
        let taps = attach_taps(site, spec).await?;
        let tracker = make_tracker(site, &files)?;
        let (limits, has_user) = (QemuLimits::of(spec), site.places.users.shared().is_none());
        let launch = Launch {
            spec: spec.clone(),
            qemu: site.qemu.to_owned(),
            run_dir: files.dir.clone(),
            files: opened,
            ram_files: files.memory_of(spec),
            taps,
            tracker,
            user: Some((user.uid, user.gid)),
            sandbox: site.sandbox,
            limits: limits.of_process(has_user, site.places.groups.is_some()),
            incoming: begin != Begin::Boot,
            paused: begin != Begin::IncomingRuns,
        };
        let process = launch.start().await.map_err(|error| crate::failure::start_failed(&error))?;
        // Before the guest's first instruction.
        files.confine(process.pid, &limits);
        let vm = Vm {
            name: spec.name.clone(),
            spec: spec.clone(),
            incarnation: ownership.incarnation,
            epoch: AtomicU64::new(ownership.epoch),
            process,
            regions,
            tracker_socket: files.tracker_socket.clone(),
            files,
            tracking: TrackingTurn::default(),
            content: Mutex::default(),
        };
        match vm.finish_launch(begin).await {
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

    async fn finish_launch(&self, begin: Begin) -> Result<(), ApiError> {
        self.files
            .write_pid(self.process.pid, self.process.start_time)
            .map_err(|error| host_failed("the VM's process can't be noted", &error))?;
        if begin == Begin::Boot { self.resume().await } else { Ok(()) }
    }

    /// Finds a VM's process again that an earlier agent started; none when it is gone. `process`: its number and start time, where they
    /// are known; else its files tell.
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
            // Its monitor closes before the process is gone: a QEMU that is just ending is no QEMU that hangs.
            Err(AdoptError::Monitor { .. }) if ends_soon(pid, start_time).await => return Ok(None),
            Err(error) => {
                let message = format!("QEMU of VM \"{}\" can't be adopted: {error}", spec.name);
                return Err(ApiError::new(ErrorCode::HypervisorFailed, message, error.remedy()));
            }
        };
        let regions = open_memory(&files, spec)?;
        // An agent that was killed may not have come to it.
        files.confine_adopted(process.pid, &QemuLimits::of(spec));
        Ok(Some(Vm {
            name: spec.name.clone(),
            spec: spec.clone(),
            incarnation: ownership.incarnation,
            epoch: AtomicU64::new(ownership.epoch),
            process,
            regions,
            tracker_socket: files.tracker_socket.clone(),
            files,
            tracking: TrackingTurn::default(),
            content: Mutex::default(),
        }))
    }

    /// What is known of its process without asking it.
    pub(crate) fn unasked(&self) -> UnaskedVm {
        UnaskedVm {
            name: self.name.clone(),
            pid: self.process.pid,
            start_time: self.process.start_time,
            regions: self.regions.clone(),
            files: self.files.clone(),
        }
    }

    /// Its memory is offered to other guests, as long as this is here.
    pub(crate) fn offers(&self, content: Arc<Content>) {
        *self.content.lock().unwrap_or_else(PoisonError::into_inner) = Some(content);
    }

    pub(crate) fn offered(&self) -> Option<Arc<Content>> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What it has offered, which it offers no more.
    pub(crate) fn withdraws(&self) -> Option<Arc<Content>> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The generation of its ownership.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// The life of the VM and the generation of its ownership.
    #[must_use]
    pub fn ownership(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch() }
    }

    pub(crate) fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::SeqCst);
    }

    /// Lets paused vCPUs go on.
    pub async fn resume(&self) -> Result<(), ApiError> {
        self.process
            .qmp
            .resume()
            .await
            .map_err(|error| self.hypervisor_failed("let the vCPUs run", &error))
    }

    /// Whether the vCPUs run; none when QEMU does not answer.
    pub async fn is_running(&self) -> Option<bool> {
        self.process.qmp.status().await.ok().map(|state| state.is_running())
    }

    /// Ends QEMU: where `grace` is given, by the power button first, with that much time for the guest. Whether that was enough.
    pub async fn end(&self, grace: Option<Duration>) -> bool {
        if let Some(grace) = grace {
            let pressed = self.process.qmp.system_powerdown().await;
            if pressed.is_ok() && tokio::time::timeout(grace, self.process.exited()).await.is_ok() {
                return true;
            }
        }
        self.process.quit().await;
        false
    }

    /// Puts QEMU's main thread, which tears everything down, behind all that runs: what it was needed for is over.
    pub(crate) fn yield_the_cpu(&self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.process.pid)
            && let Err(error) = rustix::process::setpriority_process(Some(pid), 19)
        {
            tracing::debug!(vm = self.name.as_str(), %error, "the ended VM's QEMU keeps its priority");
        }
    }

    /// Memory that its files hold already, in bytes.
    #[must_use]
    pub fn memory_taken_bytes(&self) -> u64 {
        self.regions.iter().map(|region| files::taken_bytes(region.path())).sum()
    }

    fn hypervisor_failed(&self, what: &str, error: &godwit_qemu::QmpError) -> ApiError {
        let words = self
            .files
            .last_words()
            .map_or(String::new(), |words| format!(" (its last words: {words})"));
        ApiError::new(
            ErrorCode::HypervisorFailed,
            format!("QEMU of VM \"{}\" would not {what}: {error}{words}", self.name),
            "see its log with `godwit vm logs --qemu`",
        )
    }
}

/// Whether a process that may be ending is gone within the limit.
async fn ends_soon(pid: i32, start_time: u64) -> bool {
    let mut look = tokio::time::interval(LOOK_AGAIN);
    let gone = async {
        while godwit_qemu::is_alive(pid, start_time) {
            look.tick().await;
        }
    };
    tokio::time::timeout(ENDING_LIMIT, gone).await.is_ok()
}

/// Opens the shared memory blocks' files that an earlier agent made.
fn open_memory(files: &VmFiles, spec: &ResolvedSpec) -> Result<Vec<Arc<Region>>, ApiError> {
    let paths = files.memory_of(spec);
    paths
        .iter()
        .map(|path| Region::open(path).map(Arc::new).map_err(|error| ram_failed(&error)))
        .collect()
}

/// Makes the shared memory blocks' files; they are removed with the staged files.
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
        taps.push(attach_tap(site.host, &spec.name, index, nic, network).await?);
    }
    Ok(taps)
}

/// The library and its socket; none where the library is not installed: the VM then runs all the same, and a
/// migration by the external engine says what is missing.
fn make_tracker(site: &LaunchSite<'_>, files: &VmFiles) -> Result<Option<Tracker>, ApiError> {
    if !site.tracker.exists() {
        tracing::warn!(library = %site.tracker.display(), "no tracker library: only QEMU's own engine can move this VM");
        return Ok(None);
    }
    let listener = tracker_listener(&files.tracker_socket)
        .map_err(|error| host_failed("the tracker's socket can't be made", &error))?;
    Ok(Some(Tracker {
        library: site.tracker.to_owned(),
        listener,
        peer_uid: rustix::process::geteuid().as_raw(),
    }))
}
