//! Moves of a VM's disk to another datastore or format of its host.
//!
//! While the guest runs, its QEMU copies the image and writes to both ([`godwit_qemu::DiskMove`]).
//! Whichever image the VM's record names is the right one at every moment:
//! 1. The move is noted, for an agent that starts in the middle.
//! 2. The new image has no name. If this agent ends, the next one removes it.
//! 3. QEMU holds the guest's requests; both images are the same, and on disk.
//! 4. The new image gets its name, and the record names it. **From here on the move is done.**
//! 5. QEMU uses the new image, and closes the old one.
//!
//! The disk of a VM without a process is copied by a QEMU without a guest; then its record is
//! changed. The old image stays where it is, as an image that no VM uses, unless its deletion was
//! requested.

mod recovery;
mod target;

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use godwit_api::{ApiError, ErrorCode, ImportFinding, JobStatus, MoveDisk};
use godwit_qemu::{
    ByteSize, DiskCopy, DiskFormat, DiskMove, OpenLayer, PlugError, RbdImage, ResolvedDisk,
    ResolvedSpec, VmName, is_rbd,
};
use godwit_types::RateLimit;
use tokio::sync::Semaphore;

use super::walk_permit;
use super::{COPIES, WriteClaim, allocated_bytes, room_of, tool_failed};
use crate::agent::{Agent, Begun};
use crate::hold::hold;
use crate::jobs::{Job, JobRequest};
use crate::store::{DiskMoveNote, SavedVm};
use crate::vm::{Operation, Vm};

use target::{NewImage, Target};

/// Most names that are tried for a new image.
const MOST_NAMES: usize = 100;
/// Most disks of running VMs that move at once. Their copies are the work of the VMs' QEMUs, and
/// may be slow by request: no other work on images waits for them.
const MOST_MIRRORS: usize = 8;

/// Places for copies of running VMs' disks.
static MIRRORS: Semaphore = Semaphore::const_new(MOST_MIRRORS);

/// Place of the number of internal snapshots in a qcow2 header (QEMU's docs/interop/qcow2.txt).
const SNAPSHOTS_OFFSET: u64 = 60;

/// A move that can begin.
#[derive(Debug)]
struct MovePlan {
    /// Position of the disk.
    index: usize,
    old: ResolvedDisk,
    new: ResolvedDisk,
    /// Where the new image goes.
    target: Target,
    _claim: WriteClaim,
    /// The old image and its backing files.
    layers: Vec<OpenLayer>,
    /// Backing files of the new image, open once more: locks belong to open files.
    base: Vec<OpenLayer>,
}

impl MovePlan {
    fn spec_of(&self, spec: &ResolvedSpec) -> ResolvedSpec {
        let mut moved = spec.clone();
        if let Some(disk) = moved.disks.get_mut(self.index) {
            *disk = self.new.clone();
        }
        moved
    }

    /// Returns the bytes that the new image may take. `bytes`: size of the disk.
    fn needed(&self, vm: &str, bytes: u64) -> Result<u64, ApiError> {
        let copied = if self.base.is_empty() { &self.layers[..] } else { &self.layers[..1] };
        let mut needed = 0_u64;
        // Of an image in a pool it is not known.
        for layer in copied.iter().filter(|layer| layer.rbd.is_none()) {
            let taken = allocated_bytes(&layer.file).map_err(|error| {
                let (why, remedy) = (error.to_string(), "check the storage of the disk");
                refused(&self.old, vm, ErrorCode::HostFailed, &why, remedy)
            })?;
            needed = needed.saturating_add(taken);
        }
        // Without discard, zeros are written.
        Ok(if self.old.discard { needed.min(bytes) } else { bytes })
    }

    /// Writes the new image, which is empty, and opens it with its backing files.
    async fn make(
        &mut self,
        agent: &Agent,
        vm: &str,
        bytes: u64,
    ) -> Result<(NewImage<'_>, Vec<OpenLayer>), ApiError> {
        let needed = self.needed(vm, bytes)?;
        let no_room = |why: &str| {
            let remedy = "free space there, or give another --to";
            refused(&self.old, vm, ErrorCode::HostFailed, why, remedy)
        };
        let place = match &self.target {
            Target::File(place) => place,
            Target::Pool(pooled) => {
                if let Some(why) = pooled.lacks_room(needed).await {
                    return Err(no_room(&why));
                }
                agent.make_in_pool(pooled, bytes).await?;
                return NewImage::in_pool(&self.target, pooled).await;
            }
        };
        let staged = place.stage().map_err(|error| place.failed("create", &error))?;
        let room = room_of(&staged.file).map_err(|error| place.failed("create", &error))?;
        if needed > room {
            let (needed, room) = (ByteSize::from_bytes(needed), ByteSize::from_bytes(room));
            let dir = place.path.parent().unwrap_or(Path::new("/")).display();
            return Err(no_room(&format!("it may need {needed}, and {dir} has room for {room}")));
        }
        let backing = self.base.first().map(|base| (base.file.real.as_path(), base.format));
        staged.write(self.new.format, bytes, backing)?;
        let mut layers = staged.open_layers(self.new.format)?;
        layers.append(&mut self.base);
        Ok((NewImage::file(&self.target, staged), layers))
    }
}

impl Agent {
    /// Begins to move a disk of a VM to another datastore or format of this host.
    pub fn move_disk(
        self: &Arc<Self>,
        name: &VmName,
        request: MoveDisk,
    ) -> Result<JobStatus, ApiError> {
        self.vm(name)?;
        let name = name.clone();
        self.begin_job(JobRequest::disk_move(&name, &request), |agent, job| async move {
            agent.run_move(&job, &name, &request).await
        })
    }

    async fn run_move(
        self: Arc<Self>,
        job: &Job,
        name: &VmName,
        request: &MoveDisk,
    ) -> Result<(), ApiError> {
        let (old, new) = if let Ok(begun) = self.begin(name, &Operation::Plug) {
            let moved = self.move_of_running(job, &begun, request).await;
            self.end_plug(&begun).await;
            moved?
        } else {
            let begun = self.begin(name, &Operation::Change)?;
            let moved = self.move_of_stopped(job, &begun, request).await;
            self.settle(name, begun.before, begun.vm, begun.reason);
            moved?
        };
        let (from, to) = (old.path.display(), new.path.display());
        tracing::info!(vm = name.as_str(), %from, %to, "disk moved");
        if request.delete_source {
            self.delete_source(job, &old.path).await;
        }
        let vm = self.vm_info(name).ok();
        job.set(|status| {
            status.vm = vm;
            status.files = vec![new.path.clone()];
        });
        Ok(())
    }

    /// Moves a disk of a running VM; returns the disk before and after. If that fails, the guest
    /// has its old image, and nothing of the new one remains.
    async fn move_of_running(
        self: &Arc<Self>,
        job: &Job,
        begun: &Begun,
        request: &MoveDisk,
    ) -> Result<(ResolvedDisk, ResolvedDisk), ApiError> {
        let Some(vm) = &begun.vm else { return Err(self.no_vm(&begun.spec.name)) };
        let spec = &begun.spec;
        let mut plan = self.plan_move(spec, request).await?;
        if tokio::task::block_in_place(|| self.store.disk_move(&spec.name))?.is_some() {
            let why = "it is unknown whether an earlier move of a disk has ended";
            let remedy = "restart this host's agent, which asks the VM's QEMU";
            return Err(refused(&plan.old, &spec.name, ErrorCode::Busy, why, remedy));
        }
        let (old, new, index) = (plan.old.clone(), plan.new.clone(), plan.index);
        let moved = plan.spec_of(spec);
        let failed = |error: &PlugError| copy_failed(&old, &spec.name, error);
        let _turn = job.until_cancelled(async { Ok(MIRRORS.acquire().await) }).await?;
        let qmp = &vm.process.qmp;
        let bytes = qmp.disk_bytes(&spec.disks, index).await.map_err(|error| failed(&error))?;
        job.set(|status| status.total_bytes = bytes);
        let (staged, layers) = plan.make(self, &spec.name, bytes).await?;
        let note = note_of(&old, &new, &staged)?;
        tokio::task::block_in_place(|| self.store.save_disk_move(&spec.name, &note))?;
        let copy = DiskCopy { whole: layers.len() == 1, bytes_per_second: speed_of(request) };
        let moving = qmp.begin_disk_move((&spec.disks, index), (&new, &layers), copy).await;
        let moving = moving.map_err(|error| {
            // A QEMU that does not respond may still begin: the next agent ends that.
            self.forget_move(vm, !error.is_unknown());
            failed(&error)
        })?;
        drop(layers);
        let copied = copy_until_same(job, &moving, &staged, &failed).await;
        let since = Instant::now();
        let committed = match copied {
            // The guest's requests wait until QEMU uses one of the images.
            Ok(()) => {
                hold("disk-move-held");
                tokio::task::block_in_place(|| self.commit_move(job, vm, staged, moved, &note))
            }
            Err(error) => {
                drop(staged);
                Err(error)
            }
        };
        if let Err(error) = committed {
            self.forget_move(vm, moving.cancel().await);
            return Err(error);
        }
        hold("disk-move-recorded");
        let Err(error) = moving.finish().await else {
            let at_most_ms = since.elapsed().as_secs_f64() * 1e3;
            tracing::info!(vm = vm.name.as_str(), at_most_ms, "requests waited for the exchange");
            self.forget_move(vm, true);
            return Ok((old, new));
        };
        if error.is_unknown() {
            // The record names the new image. A QEMU that has ended leaves two that are the same;
            // one that does not respond may use the new one.
            let written = DiskMoveNote { committed: true, ..note };
            let noted =
                tokio::task::block_in_place(|| self.store.save_disk_move(&spec.name, &written));
            if let Err(error) = noted {
                tracing::error!(vm = vm.name.as_str(), %error, "a move is not noted as done");
            }
            self.forget_move(vm, false);
        } else if self.restore_old(vm, spec, &note) {
            plan.target.remove(note.inode);
            self.forget_move(vm, true);
        } else {
            tokio::spawn(self.clone().restore_old_later(vm.name.clone(), note));
        }
        Err(failed(&error))
    }

    /// Removes the note of a move if it has ended, or the VM's QEMU has.
    fn forget_move(&self, vm: &Vm, has_ended: bool) {
        if has_ended || vm.process.exit().is_some() {
            tokio::task::block_in_place(|| self.store.forget_disk_move(&vm.name));
        }
    }

    /// Names the new image, and records it. If that fails, nothing of it remains.
    fn commit_move(
        &self,
        job: &Job,
        vm: &Vm,
        staged: NewImage<'_>,
        spec: ResolvedSpec,
        note: &DiskMoveNote,
    ) -> Result<(), ApiError> {
        close_to_cancellation(job)?;
        // The plan's claim keeps an image from being deleted that no record names yet.
        let (target, before) = (staged.target, vm.spec());
        staged.name_it()?;
        // First, because the end of the process is saved with it.
        vm.set_spec(Arc::new(spec.clone()));
        self.save_plugged(vm, spec).inspect_err(|_| {
            if self.restore_old(vm, &before, note) {
                target.remove(note.inode);
            }
        })
    }

    /// Moves a disk of a VM without a process, as [`Agent::move_of_running`] does.
    async fn move_of_stopped(
        self: &Arc<Self>,
        job: &Job,
        begun: &Begun,
        request: &MoveDisk,
    ) -> Result<(ResolvedDisk, ResolvedDisk), ApiError> {
        let name = &begun.spec.name;
        self.refuse_second_process(name, &begun.before)?;
        let mut plan = self.plan_move(&begun.spec, request).await?;
        // The names of a QEMU that will start are its own.
        plan.new.image_generation = 0;
        let (old, new, spec) = (plan.old.clone(), plan.new.clone(), plan.spec_of(&begun.spec));
        let _turn = job.until_cancelled(async { Ok(COPIES.acquire().await) }).await?;
        let failed = |error| tool_failed("move", &old.path, &error);
        let tool = self.image_tool().await?;
        let source = tool.open_source(&plan.layers).await.map_err(failed)?;
        job.set(|status| status.total_bytes = source.bytes);
        let (staged, layers) = plan.make(self, name, source.bytes).await?;
        let note = note_of(&old, &new, &staged)?;
        // If this agent ends, the next one removes an image in a pool, which has its name already.
        tokio::task::block_in_place(|| self.store.save_disk_move(name, &note))?;
        let progress = |bytes| job.set(|status| status.done_bytes = bytes);
        let copied = async {
            match layers.len() {
                1 => tool.copy_source(&source, &layers, &progress).await,
                _ => tool.copy_layer(&source, &layers, &progress).await,
            }
        };
        let copied = async {
            tokio::select! {
                copied = copied => copied.map_err(failed),
                full = staged.until_full() => Err(full),
            }
        };
        let copied = job.until_cancelled(copied).await;
        // Its descriptors hold locks.
        tool.end().await;
        let moved = tokio::task::block_in_place(|| {
            let moved = copied.and_then(|()| {
                close_to_cancellation(job)?;
                self.name_and_record(name, staged, spec)
            });
            self.store.forget_disk_move(name);
            moved
        });
        moved?;
        job.set(|status| status.done_bytes = status.total_bytes);
        Ok((old, new))
    }

    /// Names the new image, and records it for a VM without a process. If that fails, nothing of it
    /// remains.
    fn name_and_record(
        &self,
        name: &VmName,
        staged: NewImage<'_>,
        spec: ResolvedSpec,
    ) -> Result<(), ApiError> {
        let (target, number) = (staged.target, staged.id()?);
        staged.name_it()?;
        let saved = self.read_record(name).and_then(|record| {
            let record = record.ok_or_else(|| self.no_vm(name))?;
            self.save_record(&SavedVm { spec: spec.clone(), ..record })
        });
        saved.inspect_err(|_| target.remove(number))?;
        self.set_spec(name, Arc::new(spec));
        Ok(())
    }

    /// Finds out everything about a move, and changes nothing.
    async fn plan_move(
        &self,
        spec: &ResolvedSpec,
        request: &MoveDisk,
    ) -> Result<MovePlan, ApiError> {
        let index = index_of(spec, &request.disk)?;
        let old = spec.disks[index].clone();
        let refuse =
            |code, why: &str, remedy: &str| Err(refused(&old, &spec.name, code, why, remedy));
        if old.readonly {
            let remedy = "copy it with `godwit disk create --base FILE --full-copy`";
            let why = "the VM only reads it, and others may, too";
            return refuse(ErrorCode::WrongState, why, remedy);
        }
        let snapshots = self.snapshots_of(&spec.name)?.all.len();
        if snapshots > 0 {
            let why = format!("the VM has {snapshots} snapshots, which refer to its images");
            return refuse(ErrorCode::WrongState, &why, "delete them first");
        }
        let to_pool = is_rbd(&request.to);
        let format = request.format.unwrap_or(if to_pool { DiskFormat::Raw } else { old.format });
        if to_pool && format != DiskFormat::Raw {
            let why = "an image in a pool of Ceph has format raw";
            return refuse(ErrorCode::InvalidRequest, why, "leave --format out");
        }
        let layers = self.open_layers_of(spec, index)?;
        let has_base = layers.len() > 1;
        let keeps_base = has_base && !request.flatten;
        if keeps_base && format == DiskFormat::Raw {
            let why = "a raw image has no backing file";
            let remedy = "use format qcow2, or `--flatten`, which copies what its base has, too";
            return refuse(ErrorCode::InvalidRequest, why, remedy);
        }
        let internal = layers.first().map_or(0, internal_snapshots);
        if internal > 0 {
            let why = format!("its image has {internal} internal snapshots, which a copy loses");
            let remedy = "delete them with `qemu-img snapshot -d` while the VM is stopped";
            return refuse(ErrorCode::WrongState, &why, remedy);
        }
        let (target, claim) = self.place_to_move(&old, &request.to, format).await?;
        if target.has(&old.path) && format == old.format && keeps_base == has_base {
            let name = format.name();
            let why = format!("the image is there already, with format {name}");
            return refuse(ErrorCode::InvalidRequest, &why, "give another --to or --format");
        }
        let mut base = Vec::new();
        if keeps_base {
            base = self.open_layers_of(spec, index)?;
            base.remove(0);
        }
        let backing = base.iter().map(OpenLayer::as_backing).collect();
        let backing = (format == DiskFormat::Qcow2).then_some(backing);
        let path = match &target {
            Target::File(place) => place.path.clone(),
            Target::Pool(pooled) => pooled.path.clone(),
        };
        let mut new = old.with_image(path, format, backing);
        if let Target::Pool(pooled) = &target {
            new.cluster = Some(pooled.cluster());
        }
        let plan = MovePlan { index, old, new, target, _claim: claim, layers, base };
        let moved = plan.spec_of(spec).to_vm_spec();
        tokio::task::block_in_place(|| self.check_stays(spec, &moved))?;
        Ok(plan)
    }

    /// Opens the image of a disk, and its backing files, to read them.
    fn open_layers_of(
        &self,
        spec: &ResolvedSpec,
        index: usize,
    ) -> Result<Vec<OpenLayer>, ApiError> {
        let mut disks = self.open_to_read(spec)?.disks;
        match index < disks.len() {
            true => Ok(disks.swap_remove(index)),
            false => Err(self.no_vm(&spec.name)),
        }
    }

    /// Returns a free name in a datastore, and the right to create it.
    async fn place_to_move(
        &self,
        old: &ResolvedDisk,
        dir: &Path,
        format: DiskFormat,
    ) -> Result<(Target, WriteClaim), ApiError> {
        let stem = old.path.file_stem().unwrap_or(OsStr::new("disk")).to_string_lossy();
        if is_rbd(dir) {
            let place = dir.to_string_lossy();
            let place = place.strip_prefix("rbd:").unwrap_or(&place);
            let (pooled, claim) = self.free_in_pool(place, &stem).await?;
            return Ok((Target::Pool(pooled), claim));
        }
        for number in 0..MOST_NAMES {
            let number = if number == 0 { String::new() } else { format!("-{number}") };
            let place =
                self.place(&dir.join(format!("{stem}{number}.{}", format.name())), "create")?;
            place.check_name()?;
            if !place.exists()
                && let Ok(claim) = place.claim()
            {
                return Ok((Target::File(place), claim));
            }
        }
        let why = format!("there are {MOST_NAMES} images of its name in {}", dir.display());
        let message = format!("cannot move disk {}: {why}", old.path.display());
        Err(ApiError::new(ErrorCode::AlreadyExists, message, "delete those that no VM uses"))
    }

    /// Deletes an image that its VM no longer uses. One that is needed stays, which is a finding.
    async fn delete_source(&self, job: &Job, path: &Path) {
        let _turn = walk_permit().await;
        if let Some(image) = RbdImage::of(path) {
            if let Err(error) = self.delete_from_pool(image).await {
                let (what, why) = (format!("{} stays", path.display()), error.to_string());
                job.set(|status| status.findings.push(ImportFinding::note(what, why)));
            }
            return;
        }
        let why = match tokio::task::block_in_place(|| self.remove_layer(path)) {
            Ok(true) => return,
            Ok(false) => "a VM or another image uses it".to_owned(),
            Err(error) => error.to_string(),
        };
        let what = format!("{} stays", path.display());
        job.set(|status| status.findings.push(ImportFinding::note(what, why)));
    }
}

/// Returns the note of a move.
fn note_of(
    old: &ResolvedDisk,
    new: &ResolvedDisk,
    staged: &NewImage<'_>,
) -> Result<DiskMoveNote, ApiError> {
    let inode = staged.id()?;
    Ok(DiskMoveNote { old: old.clone(), new: new.clone(), inode, committed: false })
}

/// Refuses later requests to end a move.
///
/// # Errors
/// There was one.
fn close_to_cancellation(job: &Job) -> Result<(), ApiError> {
    match job.commit("the VM has its new image") {
        true => Ok(()),
        false => Err(ApiError::new(ErrorCode::Cancelled, "cancelled: nothing of it remains", "")),
    }
}

/// Copies until both images are the same, and QEMU holds the guest's requests.
async fn copy_until_same(
    job: &Job,
    moving: &DiskMove,
    staged: &NewImage<'_>,
    failed: &(dyn Fn(&PlugError) -> ApiError + Sync),
) -> Result<(), ApiError> {
    let progress = |done: u64, total: u64| {
        job.set(|status| {
            status.done_bytes = done;
            status.total_bytes = if total > 0 { total } else { status.total_bytes };
        });
    };
    let ready = async {
        tokio::select! {
            ready = moving.until_ready(&progress) => ready.map_err(|error| failed(&error)),
            full = staged.until_full() => Err(full),
        }
    };
    job.until_cancelled(ready).await?;
    moving.hold().await.map_err(|error| failed(&error))
}

/// Returns the position of the disk with this image.
fn index_of(spec: &ResolvedSpec, path: &Path) -> Result<usize, ApiError> {
    let real = path.canonicalize().ok();
    let is_it = |known: &Path| known == path || real.is_some() && known.canonicalize().ok() == real;
    if let Some(index) = spec.disks.iter().position(|disk| is_it(&disk.path)) {
        return Ok(index);
    }
    let refuse = |code, why: &str, remedy: &str| {
        let message = format!("cannot move {} of VM \"{}\": {why}", path.display(), spec.name);
        Err(ApiError::new(code, message, remedy))
    };
    if spec.cdroms.iter().filter_map(|drive| drive.image.as_deref()).any(is_it) {
        let remedy = "eject it, copy the file, and insert the copy";
        return refuse(ErrorCode::InvalidRequest, "it is a CD", remedy);
    }
    let remedy = format!("see `godwit vm show {}`", spec.name);
    refuse(ErrorCode::NotFound, "the VM has no disk with that image", &remedy)
}

/// Returns the number of internal snapshots of an image; a raw one has none.
pub(super) fn internal_snapshots(layer: &OpenLayer) -> u32 {
    let mut count = [0; 4];
    let is_qcow2 = layer.format == DiskFormat::Qcow2;
    match rustix::io::pread(layer.file.as_fd(), &mut count[..], SNAPSHOTS_OFFSET) {
        Ok(4) if is_qcow2 => u32::from_be_bytes(count),
        _ => 0,
    }
}

/// Returns the limit of a copy, in bytes a second.
fn speed_of(request: &MoveDisk) -> Option<u64> {
    let rate = request.bandwidth_limit.and_then(RateLimit::rate);
    rate.map(|rate| (rate.bits_per_second() / 8).max(1))
}

fn refused(disk: &ResolvedDisk, vm: &str, code: ErrorCode, why: &str, remedy: &str) -> ApiError {
    let message = format!("cannot move disk {} of VM \"{vm}\": {why}", disk.path.display());
    ApiError::new(code, message, remedy)
}

fn copy_failed(disk: &ResolvedDisk, vm: &str, error: &PlugError) -> ApiError {
    let code = match error {
        PlugError::Qmp(_) | PlugError::Copy(_) => ErrorCode::HypervisorFailed,
        _ => ErrorCode::WrongState,
    };
    refused(disk, vm, code, &error.to_string(), &error.remedy())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use godwit_qemu::write_image;
    use serde_json::json;

    use super::*;

    fn spec(dir: &Path) -> ResolvedSpec {
        serde_json::from_value(json!({
            "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
            "machine": "pc-q35-7.2", "accel": "tcg", "kernel": "/boot/vmlinuz",
            "disks": [
                {"path": dir.join("a.raw"), "format": "raw"},
                {"path": dir.join("b.qcow2"), "format": "qcow2"},
            ],
            "cdroms": [{"image": dir.join("cd.iso"), "bus": "sata", "unit": 1}],
        }))
        .unwrap()
    }

    #[test]
    fn a_disk_is_found_by_its_image_and_a_cd_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let spec = spec(dir.path());
        let at = |name: &str| dir.path().join(name);
        assert_eq!(index_of(&spec, &at("b.qcow2")).unwrap(), 1);
        File::create(at("a.raw")).unwrap();
        std::os::unix::fs::symlink(at("a.raw"), at("link")).unwrap();
        assert_eq!(index_of(&spec, &at("link")).unwrap(), 0);
        let cd = index_of(&spec, &at("cd.iso")).unwrap_err();
        assert!(cd.code == ErrorCode::InvalidRequest && cd.message.contains("it is a CD"), "{cd}");
        assert_eq!(index_of(&spec, &at("none")).unwrap_err().code, ErrorCode::NotFound);
    }

    #[test]
    fn internal_snapshots_are_counted_in_a_qcow2_header_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        write_image(&file, DiskFormat::Qcow2, 1 << 20, None).unwrap();
        let count = |format| {
            let file = File::open(&path).unwrap();
            internal_snapshots(&OpenLayer::new(file.into(), &path, format))
        };
        assert_eq!(count(DiskFormat::Qcow2), 0);
        file.write_all_at(&3_u32.to_be_bytes(), SNAPSHOTS_OFFSET).unwrap();
        assert_eq!((count(DiskFormat::Qcow2), count(DiskFormat::Raw)), (3, 0));
        file.set_len(10).unwrap();
        assert_eq!(count(DiskFormat::Qcow2), 0);
    }

    #[test]
    fn a_limit_is_in_bits_and_none_is_none() {
        let request = |limit: Option<&str>| MoveDisk {
            bandwidth_limit: limit.map(|limit| limit.parse().unwrap()),
            ..MoveDisk::new("/a", "/b")
        };
        assert_eq!(speed_of(&request(Some("80mbit"))), Some(10_000_000));
        assert_eq!(speed_of(&request(Some("none"))), None);
        assert_eq!(speed_of(&request(None)), None);
    }
}
