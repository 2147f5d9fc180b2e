//! Disk images in this host's directories for VMs (`vm_dirs`): list, create, resize, delete.
//!
//! A path in a request is untrusted. Its directory is opened beneath one of `vm_dirs`, without
//! links, and everything is done by name in that open directory. A new image gets its name when it
//! is complete.

mod arriving;
mod cloned;
mod departing;
mod exported;
mod findings;
mod foreign;
mod imported;
mod in_work;
mod kept;
mod layers;
mod moved;
mod nbd_link;
mod owned;
mod placed;
mod pools;
mod staged;
mod warm;
mod warm_notes;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{
    ApiError, CreateDisk, CreateVm, DiskInfo, DiskList, ErrorCode, ResizeDisk, with_new_disks,
};
use godwit_qemu::{
    ByteSize, Disk, DiskFormat, ImageTool, ImageToolError, NewDrive, OpenFiles, OpenLayer,
    PlugError, ResolvedDisk, ResolvedSpec, VmName, check_image_bytes, image_head,
};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Begun};
use crate::datastores::reserve_of;
use crate::failure::{host_failed, image_unusable, spec_refused};
use crate::vm::Operation;
use crate::whole::whole;

use in_work::{Reading, WriteClaim};
use pools::{NewPooled, image_of_new, pool_image};
use staged::Staged;

pub(super) use in_work::is_being_made;

/// Most images in a list.
const MOST_LISTED: usize = 1000;
/// Most entries of a directory that are looked at.
const MOST_ENTRIES: usize = 10_000;
/// Depth of the directories below `vm_dirs` that are listed.
const MOST_DEEP: usize = 2;
/// Longest name of a file that a new image may have: its staged name is longer.
const MOST_NAME_BYTES: usize = 200;

/// Most copies at once: each has a QEMU and uses the host's disks.
const MOST_COPIES: usize = 2;

/// Why an image stays that libvirt's QEMU has, for example.
const WRITTEN: &str = "another program has it open for writing";
/// Attempts to see an image without a writer, and the time between: the files of a process that
/// has just ended may be closed a little later.
const WRITER_LOOKS: u32 = 10;
const WRITER_INTERVAL: Duration = Duration::from_millis(20);

/// Most walks through `vm_dirs` at once that requests cause.
const MOST_WALKS: usize = 2;

/// A name that no VM has: an image that is reserved for a VM is for none of that name.
const NO_VM: &str = "";

/// Places for copies.
static COPIES: Semaphore = Semaphore::const_new(MOST_COPIES);
/// Places for walks through `vm_dirs`, which read the header of each image.
static WALKS: Semaphore = Semaphore::const_new(MOST_WALKS);

/// Waits for the turn to walk through `vm_dirs`.
async fn walk_permit() -> Option<SemaphorePermit<'static>> {
    // Never closed.
    WALKS.acquire().await.ok()
}

/// A name in an open directory below `vm_dirs`.
#[derive(Debug)]
struct Place {
    dir: OwnedFd,
    name: OsString,
    /// Path as requested.
    path: PathBuf,
    /// Real path, with the links of the `vm_dirs` themselves resolved.
    real: PathBuf,
    /// Directory of the notes about unfinished images.
    notes: PathBuf,
}

/// The base of a new image.
#[derive(Debug)]
struct Base {
    layers: Vec<OpenLayer>,
    /// Size of the disk.
    bytes: u64,
    _reading: Reading,
}

/// Images that were created for a VM, as files and in pools; removed when dropped, unless kept.
#[derive(Debug, Default)]
pub(super) struct NewImages(Vec<Place>, Vec<NewPooled>);

impl NewImages {
    /// Returns the paths of the images.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let pooled = self.1.iter().map(NewPooled::path);
        self.0.iter().map(|place| &place.path).chain(pooled).cloned().collect()
    }

    /// Keeps the images: the VM has them.
    pub(super) fn keep(mut self) {
        self.0.clear();
        self.1.clear();
    }
}

impl Drop for NewImages {
    fn drop(&mut self) {
        self.0.iter().for_each(Place::remove);
        self.1.iter().for_each(NewPooled::remove_later);
    }
}

impl Agent {
    /// Lists the images below `vm_dirs`.
    pub async fn disks(&self) -> DiskList {
        let _turn = walk_permit().await;
        let mut list = tokio::task::block_in_place(|| self.list_now());
        list.disks.extend(self.pool_disks().await);
        list
    }

    fn list_now(&self) -> DiskList {
        let mut list = DiskList::default();
        for dir in &self.config().vm_dirs {
            self.list_below(dir, MOST_DEEP, &mut list);
        }
        list.disks.sort_by(|a, b| a.path.cmp(&b.path));
        list.disks.dedup_by(|a, b| a.path == b.path);
        list
    }

    fn list_below(&self, dir: &Path, deep: usize, list: &mut DiskList) {
        let Ok(entries) = std::fs::read_dir(dir) else { return };
        for entry in entries.flatten().take(MOST_ENTRIES) {
            let Ok(kind) = entry.file_type() else { continue };
            let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            if is_hidden || entry.path().to_str().is_none() {
                continue;
            }
            if kind.is_dir() && deep > 1 {
                self.list_below(&entry.path(), deep - 1, list);
            } else if kind.is_file() {
                if list.disks.len() == MOST_LISTED {
                    list.is_cut = true;
                    return;
                }
                list.disks.extend(self.disk(&entry.path()).ok());
            }
        }
    }

    /// Describes an image, also one in a pool of Ceph.
    pub async fn disk_info(&self, path: &Path) -> Result<DiskInfo, ApiError> {
        match pool_image(path)? {
            Some(image) => self.pool_disk(image).await,
            None => tokio::task::block_in_place(|| self.disk(path)),
        }
    }

    /// Describes an image that is a file.
    pub fn disk(&self, path: &Path) -> Result<DiskInfo, ApiError> {
        let place = self.place(path, "show")?;
        let file = place.open(OFlags::RDONLY).map_err(|error| place.failed("show", &error))?;
        self.describe_image(&place, &file)
    }

    fn describe_image(&self, place: &Place, file: &File) -> Result<DiskInfo, ApiError> {
        let data = file.metadata().map_err(|error| place.failed("show", &error))?;
        let head = image_head(file).ok();
        let users = self.users_of_file(&place.real);
        let vms: BTreeSet<String> = users.into_iter().map(|(name, _)| name.to_string()).collect();
        Ok(DiskInfo {
            path: place.path.clone(),
            format: head.as_ref().map(|head| head.format),
            virtual_bytes: head.as_ref().map_or(data.len(), |head| head.virtual_bytes),
            used_bytes: data.blocks().saturating_mul(512),
            backing: head.and_then(|head| head.backing),
            vms: vms.into_iter().collect(),
            placed: None,
        })
    }

    /// Creates an image. If that fails, nothing of it remains.
    pub async fn create_disk(self: &Arc<Self>, request: CreateDisk) -> Result<DiskInfo, ApiError> {
        let agent = self.clone();
        whole(async move {
            if let Some(image) = pool_image(&request.path)? {
                return agent.create_in_pool(image, &request).await;
            }
            let mut request = request;
            let placed = tokio::task::block_in_place(|| agent.complete_path(&mut request))?;
            let place = agent.place(&request.path, "create")?;
            place.check_name()?;
            agent.create_in(&place, &request).await?;
            tracing::info!(path = %place.path.display(), "disk image created");
            let file = place.open(OFlags::RDONLY).map_err(|error| place.failed("show", &error))?;
            Ok(DiskInfo { placed, ..agent.describe_image(&place, &file)? })
        })
        .await
    }

    /// Creates the images of a new VM's disks and adds them to its specification.
    pub(super) async fn make_disks(
        &self,
        request: &mut CreateVm,
        made: &mut NewImages,
    ) -> Result<(), ApiError> {
        if request.new_disks.is_empty() {
            return Ok(());
        }
        let checked = with_new_disks(&request.spec, &request.new_disks);
        checked.validate().map_err(|error| spec_refused(&error))?;
        let name = VmName::new(request.spec.name.as_str()).map_err(|error| spec_refused(&error))?;
        self.check_name(&name)?;
        for (index, new) in std::mem::take(&mut request.new_disks).into_iter().enumerate() {
            if let Some(image) = image_of_new(&new, &name, index)? {
                let (image, disk) = self.make_disk_in_pool(image, &new).await?;
                made.1.push(image);
                request.spec.disks.push(disk);
                continue;
            }
            let format = new.format.unwrap_or(DiskFormat::Qcow2);
            let bytes = new.size.map_or(0, ByteSize::bytes);
            let found = self.image_dir(new.datastore.as_deref(), bytes)?;
            let place = self.image_place(&found.dir, name.as_str(), index, format)?;
            let path = place.path.clone();
            if let Some(why) = found.why {
                tracing::info!(path = %path.display(), why, "datastore of a new disk chosen");
            }
            let create = CreateDisk {
                path: path.clone(),
                size: new.size,
                format: Some(format),
                base: new.base,
                base_format: new.base_format,
                full_copy: new.full_copy,
            };
            self.create_in(&place, &create).await?;
            made.0.push(place);
            request.spec.disks.push(Disk { bus: new.bus, ..Disk::new(path, format) });
        }
        Ok(())
    }

    async fn create_in(&self, place: &Place, request: &CreateDisk) -> Result<(), ApiError> {
        let format = request.format.unwrap_or(DiskFormat::Qcow2);
        let refuse = |why: String, remedy: &str| {
            let message = format!("cannot create disk {}: {why}", place.path.display());
            ApiError::new(ErrorCode::InvalidRequest, message, remedy)
        };
        let base = request.base.as_deref().map(|base| self.open_base(base, request)).transpose()?;
        let base_bytes = base.as_ref().map(|base| base.bytes);
        let bytes = request.size.map(ByteSize::bytes).or(base_bytes);
        let bytes = bytes
            .ok_or_else(|| refuse("it has no size and no base".to_owned(), "give its size"))?;
        check_image_bytes(bytes)
            .map_err(|why| refuse(format!("its size is invalid: {why}"), "give another size"))?;
        if base_bytes.is_some_and(|base| bytes < base) {
            let why = format!(
                "its base has {} bytes, and it would have {bytes}",
                base_bytes.unwrap_or(0)
            );
            return Err(refuse(why, "give at least the size of the base"));
        }
        if format == DiskFormat::Raw && base.is_some() && !request.full_copy {
            let why = "a raw image has no backing file".to_owned();
            return Err(refuse(why, "use format qcow2, or a full copy"));
        }
        if request.full_copy && base.is_none() {
            return Err(refuse("there is no base to copy".to_owned(), "name the base"));
        }
        let _claim = place.claim()?;
        if place.exists() {
            return Err(place.taken());
        }
        let staged = place.stage().map_err(|error| place.failed("create", &error))?;
        match &base {
            Some(base) if request.full_copy => {
                self.copy_into(&staged, format, &base.layers, (base.bytes, bytes)).await?;
            }
            Some(base) => staged.write_layer(bytes, &base.layers)?,
            None => staged.write(format, bytes, None)?,
        }
        staged.name_it()
    }

    /// Copies an image into a staged file. `sizes`: that of the disk, and that of the copy.
    async fn copy_into(
        &self,
        staged: &Staged<'_>,
        format: DiskFormat,
        layers: &[OpenLayer],
        sizes: (u64, u64),
    ) -> Result<(), ApiError> {
        let _turn = COPIES.acquire().await;
        staged.check_room(layers, sizes.0)?;
        staged.write(format, sizes.0, None)?;
        let target = staged.open_layers(format)?;
        let copied = self.image_tool().await?.copy(layers, &target, sizes.1).await;
        copied.map_err(|error| tool_failed("create", &staged.place.path, &error))
    }

    /// Opens the base of a new image.
    fn open_base(&self, base: &Path, request: &CreateDisk) -> Result<Base, ApiError> {
        let place = self.place(base, "use")?;
        let format = request.base_format.unwrap_or_else(|| format_by_name(base));
        let disk = ResolvedDisk::from(Disk::new(&place.real, format).readonly());
        let layers = self.open_image(&disk)?;
        let refuse = |code, why: String, remedy: &str| {
            let message = format!("cannot use base {}: {why}", base.display());
            ApiError::new(code, message, remedy)
        };
        // Before the checks: a merge that has ended has made its VM write the image, and a deletion
        // looks for readers when it has claimed it.
        let reading = in_work::read(&layers).map_err(|path| {
            let why = in_work::being_merged(&path);
            refuse(ErrorCode::Busy, why, "wait until that ends, then see `godwit disk info`")
        })?;
        if is_being_made(&place.real, NO_VM) {
            let why = "it is being written".to_owned();
            return Err(refuse(ErrorCode::Busy, why, "wait until that ends, then try again"));
        }
        let writer = self.users_of_image(&place.real).into_iter().find(|(_, writes)| *writes);
        if let Some((vm, _)) = writer {
            let why = format!("VM \"{vm}\" writes it");
            let remedy = "stop the VM and copy its disk, or use another base";
            return Err(refuse(ErrorCode::AlreadyExists, why, remedy));
        }
        let bytes = self.bytes_of(&layers, base)?;
        Ok(Base { layers, bytes, _reading: reading })
    }

    /// Opens an image and its backing files, all below `vm_dirs`.
    fn open_image(&self, disk: &ResolvedDisk) -> Result<Vec<OpenLayer>, ApiError> {
        let rule = FileRule::VmDirs;
        let may_open = |file: &godwit_qemu::FoundFile| rule.allows(file, &self.config().vm_dirs);
        let opened = OpenFiles::open_drive(&NewDrive::Disk(disk), &may_open);
        opened.map_err(|error| image_unusable(&error))
    }

    fn bytes_of(&self, layers: &[OpenLayer], path: &Path) -> Result<u64, ApiError> {
        let failed = |why: String| {
            let message = format!("cannot use image {}: {why}", path.display());
            ApiError::new(ErrorCode::InvalidRequest, message, "check it with `qemu-img check`")
        };
        let top = layers.first().ok_or_else(|| failed("it is not open".to_owned()))?;
        if top.rbd.is_some() {
            return Err(not_a_file(path));
        }
        let file = top.file.as_fd().try_clone_to_owned();
        let file = File::from(file.map_err(|error| failed(error.to_string()))?);
        match top.format {
            // The end of a block device, too. A guest can write any header into its raw image.
            DiskFormat::Raw => rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
                .map_err(|error| failed(error.to_string())),
            DiskFormat::Qcow2 => image_head(&file)
                .map(|head| head.virtual_bytes)
                .map_err(|error| failed(error.to_string())),
        }
    }

    /// Makes a disk larger. The guest of a running VM notices.
    pub async fn resize_disk(self: &Arc<Self>, request: ResizeDisk) -> Result<DiskInfo, ApiError> {
        let agent = self.clone();
        whole(async move {
            if let Some(image) = pool_image(&request.path)? {
                return agent.resize_in_pool(image, request.size.bytes()).await;
            }
            let place = agent.place(&request.path, "resize")?;
            agent.resize_in(&place, request.size.bytes()).await?;
            tracing::info!(path = %place.path.display(), size = %request.size, "disk resized");
            agent.disk(&request.path)
        })
        .await
    }

    async fn resize_in(self: &Arc<Self>, place: &Place, bytes: u64) -> Result<(), ApiError> {
        let invalid = ErrorCode::InvalidRequest;
        check_image_bytes(bytes).map_err(|why| {
            place.refused("resize", invalid, &format!("the size is invalid: {why}"), "give another")
        })?;
        if is_being_made(&place.real, NO_VM) {
            let (why, remedy) = ("it is being written", "wait until that ends, then try again");
            return Err(place.refused("resize", ErrorCode::Busy, why, remedy));
        }
        let users = self.users_of_file(&place.real);
        if let Some((vm, _)) = users.iter().find(|(_, writes)| !*writes) {
            let why = format!("VM \"{vm}\" only reads it, or has a disk on top of it");
            let remedy = "resize the disk on top of it";
            return Err(place.refused("resize", ErrorCode::WrongState, &why, remedy));
        }
        let Some((vm, _)) = users.into_iter().next() else {
            // Its header does not choose the format: a guest can write any into its raw image.
            let disk = ResolvedDisk::from(Disk::new(&place.real, format_by_name(&place.path)));
            drop(place.open(OFlags::PATH).map_err(|error| place.failed("resize", &error))?);
            let layers = self.open_smaller(place, &disk, bytes)?;
            return self.resize_offline(&layers, place, bytes).await;
        };
        // A running VM's QEMU resizes the image; a stopped VM does not start meanwhile.
        if let Ok(begun) = self.begin(&vm, &Operation::Plug) {
            let resized = self.resize_of_running(&begun, place, bytes).await;
            self.end_plug(&begun).await;
            return resized;
        }
        let begun = self.begin(&vm, &Operation::Change)?;
        let resized = self.resize_of_stopped(&begun, place, bytes).await;
        self.settle(&vm, begun.before, begun.vm, begun.reason);
        resized
    }

    async fn resize_of_running(
        &self,
        begun: &Begun,
        place: &Place,
        bytes: u64,
    ) -> Result<(), ApiError> {
        let Some(vm) = &begun.vm else { return Err(self.no_vm(&begun.spec.name)) };
        let index = place.disk_of(&begun.spec)?;
        let disks = &begun.spec.disks;
        drop(self.open_smaller(place, &disks[index], bytes)?);
        vm.process.qmp.resize_disk(disks, index, bytes).await.map_err(|error| {
            let code = match error {
                PlugError::Qmp(_) => ErrorCode::HypervisorFailed,
                PlugError::Larger { .. } => ErrorCode::InvalidRequest,
                _ => ErrorCode::WrongState,
            };
            place.refused("resize", code, &error.to_string(), &error.remedy())
        })
    }

    async fn resize_of_stopped(
        &self,
        begun: &Begun,
        place: &Place,
        bytes: u64,
    ) -> Result<(), ApiError> {
        let index = place.disk_of(&begun.spec)?;
        let layers = self.open_smaller(place, &begun.spec.disks[index], bytes)?;
        self.resize_offline(&layers, place, bytes).await
    }

    /// Opens an image that is to get this size, and its backing files. It must not be larger.
    fn open_smaller(
        &self,
        place: &Place,
        disk: &ResolvedDisk,
        bytes: u64,
    ) -> Result<Vec<OpenLayer>, ApiError> {
        let layers = self.open_image(disk)?;
        let now = self.bytes_of(&layers, &place.path)?;
        if bytes < now {
            let why = format!("it has {now} bytes, and a smaller disk would lose data");
            let invalid = ErrorCode::InvalidRequest;
            return Err(place.refused("resize", invalid, &why, "give a larger size"));
        }
        Ok(layers)
    }

    async fn resize_offline(
        &self,
        layers: &[OpenLayer],
        place: &Place,
        bytes: u64,
    ) -> Result<(), ApiError> {
        let resized = self.image_tool().await?.resize(layers, bytes).await;
        resized.map_err(|error| tool_failed("resize", &place.path, &error))
    }

    /// Returns the VMs here that use a file, also as a kernel or an initrd, each with whether it
    /// writes it.
    fn users_of_file(&self, real: &Path) -> Vec<(VmName, bool)> {
        self.users_of_any_file(real).users
    }

    /// Returns a VM here that uses a file which is to be removed, also as a kernel or an initrd.
    ///
    /// # Errors
    /// It is unknown whether one uses it: the storage of its files does not answer, or fails.
    fn user_before_removal(&self, real: &Path) -> Result<Option<VmName>, ApiError> {
        let found = self.users_of_any_file(real);
        if let Some((user, _)) = found.users.into_iter().next() {
            return Ok(Some(user));
        }
        let Some((vm, path)) = found.unknown else { return Ok(None) };
        let message = format!(
            "cannot find out whether VM \"{vm}\" uses image {}: the storage of its file {} does \
             not answer, or fails",
            real.display(),
            path.display()
        );
        let remedy = "wait until its storage answers again (`godwit host show`), then try again";
        Err(ApiError::new(ErrorCode::Busy, message, remedy))
    }

    async fn image_tool(&self) -> Result<ImageTool, ApiError> {
        let qemu = self.qemu(None).await?;
        let user = self.query_user();
        ImageTool::start(&qemu.path, Some(user)).await.map_err(|error| {
            let message = format!("cannot work on the image: {error}");
            ApiError::new(ErrorCode::HypervisorFailed, message, "check this host's QEMU")
        })
    }

    /// Deletes an image that no VM of this host uses, also as a backing file, CD, kernel or initrd.
    pub async fn delete_disk(self: &Arc<Self>, path: &Path) -> Result<(), ApiError> {
        let (agent, path) = (self.clone(), path.to_owned());
        whole(async move {
            if let Some(image) = pool_image(&path)? {
                return agent.delete_from_pool(image).await;
            }
            let place = agent.place(&path, "delete")?;
            place.open(OFlags::PATH).map_err(|error| place.failed("delete", &error))?;
            let busy = |why| place.refused("delete", ErrorCode::Busy, why, "wait until that ends");
            let Some(_claim) = in_work::claim(&place.real) else {
                return Err(busy("it is being created, or an import or a migration writes it"));
            };
            // Once it is claimed, no VM gets it any more.
            let user = tokio::task::block_in_place(|| agent.user_before_removal(&place.real))?;
            if let Some(vm) = user {
                let message = format!("cannot delete disk {}: VM \"{vm}\" uses it", path.display());
                let remedy = "detach it from the VM, or delete the VM first";
                return Err(ApiError::new(ErrorCode::WrongState, message, remedy));
            }
            if in_work::is_read(&place.real) {
                return Err(busy("a new image is being based on it"));
            }
            let _unwritten = place.refuse_writers()?;
            agent.forget_copy(&place);
            rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::empty())
                .map_err(|error| place.failed("delete", &error.into()))?;
            tracing::info!(path = %path.display(), "disk image deleted");
            Ok(())
        })
        .await
    }

    /// Opens the directory of a path beneath `vm_dirs`.
    fn place(&self, path: &Path, verb: &str) -> Result<Place, ApiError> {
        let dirs = &self.config().vm_dirs;
        let refuse = |why: &str| {
            let message = format!("cannot {verb} disk {}: {why}", path.display());
            let dirs = dirs.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>();
            let remedy = format!(
                "give a path below vm_dirs of host {}: {}",
                self.config().name,
                dirs.join(", ")
            );
            ApiError::new(ErrorCode::InvalidRequest, message, remedy)
        };
        let is_plain =
            path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let text = path.to_str().filter(|text| !text.chars().any(char::is_control));
        let (true, true, Some(name)) = (is_plain, text.is_some(), path.file_name()) else {
            return Err(refuse("it is not the plain absolute path of a file"));
        };
        let below = dirs.iter().filter(|dir| path.starts_with(dir) && path != dir.as_path());
        let Some(root) = below.max_by_key(|dir| dir.as_os_str().len()) else {
            return Err(refuse("it is below none of the directories for VMs"));
        };
        let parent = path.parent().and_then(|parent| parent.strip_prefix(root).ok());
        let parent = parent.filter(|parent| !parent.as_os_str().is_empty());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(root, flags, Mode::empty()).and_then(|root| {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let parent = parent.unwrap_or(Path::new("."));
            rustix::fs::openat2(&root, parent, flags, Mode::empty(), resolve)
        });
        let dir = match opened {
            Ok(dir) => dir,
            Err(rustix::io::Errno::LOOP) => return Err(refuse("a link leads elsewhere")),
            Err(error) => {
                let message = format!("cannot {verb} disk {}: {error}", path.display());
                let remedy = "create its directory on the host first";
                return Err(ApiError::new(ErrorCode::NotFound, message, remedy));
            }
        };
        let real = std::fs::read_link(format!("/proc/self/fd/{}", dir.as_raw_fd()))
            .map_err(|error| host_failed("cannot find the directory's path", &error))?;
        let (real, notes) = (real.join(name), self.staging_notes());
        Ok(Place { real, name: name.to_owned(), path: path.to_owned(), dir, notes })
    }
}

impl Place {
    /// Opens the file, which must be a regular one.
    fn open(&self, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // Not opened before it is known to be a file: opening a device can have side effects.
        let found = rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        if rustix::fs::FileType::from_raw_mode(found.st_mode) != rustix::fs::FileType::RegularFile {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(File::from(rustix::fs::openat(&self.dir, &self.name, flags, Mode::empty())?))
    }

    /// Refuses to delete an image that another program's QEMU has open for writing. Keeps others
    /// from opening it so, until the result is dropped. `None` if there are no locks, as on some
    /// file systems.
    #[expect(clippy::disallowed_methods, reason = "nothing says when a lock is given back")]
    fn refuse_writers(&self) -> Result<Option<File>, ApiError> {
        let Ok(file) = self.open(OFlags::RDWR) else { return Ok(None) };
        for look in 0..WRITER_LOOKS {
            if look > 0 {
                tokio::task::block_in_place(|| std::thread::sleep(WRITER_INTERVAL));
            }
            match godwit_ram::lock_against_writers(&file) {
                Ok(true) => return Ok(Some(file)),
                Ok(false) => {}
                Err(_) => return Ok(None),
            }
        }
        let message = format!("cannot delete image {}: {WRITTEN}", self.path.display());
        let remedy = "end that program first; after `vm export --live` it is libvirt's guest";
        Err(ApiError::new(ErrorCode::WrongState, message, remedy))
    }

    /// Removes an image that nothing uses.
    fn remove(&self) {
        if let Err(error) = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty()) {
            tracing::warn!(path = %self.path.display(), %error, "a new image stays");
        }
    }

    fn exists(&self) -> bool {
        rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Begins the only creation of this image, or a pass that writes it.
    fn claim(&self) -> Result<WriteClaim, ApiError> {
        in_work::claim(&self.real).ok_or_else(|| {
            let why = "it is being created, written or deleted";
            let remedy = "wait until that ends, then see `godwit disk list`";
            self.refused("create", ErrorCode::Busy, why, remedy)
        })
    }

    /// Returns the position of this image among a VM's disks.
    fn disk_of(&self, spec: &ResolvedSpec) -> Result<usize, ApiError> {
        let is_it =
            |disk: &ResolvedDisk| disk.path.canonicalize().is_ok_and(|path| path == self.real);
        spec.disks.iter().position(is_it).ok_or_else(|| {
            let why = format!("VM \"{}\" has just been changed", spec.name);
            self.refused("resize", ErrorCode::Busy, &why, "see the VM, then try again")
        })
    }

    fn refused(&self, verb: &str, code: ErrorCode, why: &str, remedy: &str) -> ApiError {
        let message = format!("cannot {verb} disk {}: {why}", self.path.display());
        ApiError::new(code, message, remedy)
    }

    fn check_name(&self) -> Result<(), ApiError> {
        let name = self.name.as_encoded_bytes();
        if name.len() <= MOST_NAME_BYTES && !name.starts_with(b".") {
            return Ok(());
        }
        let message = format!("cannot create disk {}: invalid name", self.path.display());
        let remedy = format!("use up to {MOST_NAME_BYTES} bytes, and no dot at the start");
        Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
    }

    /// Refuses that this image grows further if copies have used up the room. `file`: something
    /// open of its file system.
    fn check_growth(&self, file: &impl AsFd) -> Result<(), ApiError> {
        if room_of(file).map_err(|error| self.failed("write", &error))? > 0 {
            return Ok(());
        }
        let why = "only the space reserved for VMs is left in its directory";
        Err(self.refused("write", ErrorCode::HostFailed, why, "free space there, then try again"))
    }

    fn taken(&self) -> ApiError {
        let message = format!("cannot create disk {}: it exists", self.path.display());
        ApiError::new(ErrorCode::AlreadyExists, message, "give another path, or delete it first")
    }

    fn failed(&self, verb: &str, error: &io::Error) -> ApiError {
        let (code, remedy) = match error.kind() {
            io::ErrorKind::NotFound => (ErrorCode::NotFound, "see `godwit disk list`"),
            io::ErrorKind::InvalidInput => (ErrorCode::InvalidRequest, "name a regular file"),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                (ErrorCode::HostFailed, "free space in this directory, or use another one")
            }
            _ => (ErrorCode::HostFailed, "see the agent's log and the host's disk space"),
        };
        ApiError::new(code, format!("cannot {verb} disk {}: {error}", self.path.display()), remedy)
    }
}

/// Returns the room that copies may use in the file system of an open file.
fn room_of(file: &impl AsFd) -> io::Result<u64> {
    let found = rustix::fs::fstatvfs(file)?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok(bytes(found.f_bavail).saturating_sub(reserve_of(bytes(found.f_blocks))))
}

/// Returns the bytes of a file system that an open file takes.
fn allocated_bytes(file: &impl AsFd) -> io::Result<u64> {
    let blocks = rustix::fs::fstat(file)?.st_blocks;
    Ok(u64::try_from(blocks).unwrap_or(0).saturating_mul(512))
}

/// Brings the names in a directory, open as a path alone, to the disk.
fn sync_dir(dir: &impl AsFd) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::fsync(rustix::fs::openat(dir, ".", flags, Mode::empty())?)?)
}

/// Returns the format that a file's name says.
fn format_by_name(path: &Path) -> DiskFormat {
    match path.extension() {
        Some(extension) if extension == OsStr::new("qcow2") => DiskFormat::Qcow2,
        _ => DiskFormat::Raw,
    }
}

/// The refusal of work that only images in files can have.
fn not_a_file(path: &Path) -> ApiError {
    let message = format!("cannot use image {}: it is in a pool of Ceph", path.display());
    let remedy = "move the disk to a file first, with `godwit disk move`, or use `rbd`";
    ApiError::new(ErrorCode::WrongState, message, remedy)
}

fn tool_failed(verb: &str, path: &Path, error: &ImageToolError) -> ApiError {
    let message = format!("cannot {verb} disk {}: {error}", path.display());
    let remedy = "check the image with `qemu-img check`, and the space of its directory";
    ApiError::new(ErrorCode::HypervisorFailed, message, remedy)
}

#[cfg(test)]
mod tests;
