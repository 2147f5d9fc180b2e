//! Block devices for disks that arrive. The operator has made them, under the names of the disks;
//! nothing is made or deleted here. ([`super::thin`] makes some, which are then found and filled
//! here.) A device is used if the configuration allows it to VMs, nothing on this host uses it, and
//! it is empty, or is to be overwritten. It may hold anything, so the source sends all of a disk.
//!
//! A device is known again by its identity ([`DeviceIdentity`]): nothing is written once another
//! device has its path. If the VM does not come, both ends of the device are cleared, so that
//! nothing takes a part of a disk for a whole one.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use godwit_api::{ApiError, ArrivingDisk, ArrivingDisks, ArrivingImage, ErrorCode};
use godwit_qemu::{ByteSize, DiskFormat, FoundFile, VmName};
use godwit_wire::MigrationId;

use super::Claims;
use crate::agent::Agent;
use crate::agent::images::in_work::{self, WriteClaim, is_being_made};
use crate::agent::images::{NO_VM, WRITER_INTERVAL, WRITER_LOOKS, WRITTEN};
use crate::block_devices::{
    DeviceIdentity, allows, are_apart, bytes_of, ends_of, has_content, holders_of,
    is_physical_volume, is_unused, open_exclusively, overlapping,
};
use crate::disk_arrivals::{DiskArrival, OpenedContent, OpenedImage, now_unix_s};
use crate::hold::hold;
use crate::store::{SavedArrival, SavedArrivingDisk};
use crate::zeros::make_zero;

/// What a device may have more than its disk: volume managers round sizes up. It is made zero, as
/// the guest sees it later.
const MOST_REST_BYTES: u64 = 1 << 30;

/// A device that is free for a disk. Nobody else uses it until this is dropped.
struct FreeDevice {
    path: PathBuf,
    /// Path of its node, with every link resolved.
    real: PathBuf,
    file: File,
    bytes: u64,
    identity: DeviceIdentity,
    claim: WriteClaim,
}

/// Whether a request is for block devices.
pub(super) fn are_wanted(request: &ArrivingDisks) -> bool {
    request.disks.iter().any(|disk| disk.onto.is_some())
}

/// Checks what a request for block devices says.
///
/// # Errors
/// What is wrong with it.
pub(super) fn check(request: &ArrivingDisks) -> Result<(), &'static str> {
    if !are_wanted(request) {
        return Ok(());
    }
    if request.disks.iter().any(|disk| disk.onto.is_none()) {
        return Err("some of them are to be on block devices, and others are not");
    }
    if request.disks.iter().any(|disk| disk.format != DiskFormat::Raw) {
        return Err("one of them is to be on a block device and is not raw");
    }
    Ok(())
}

/// Whether the device at a path is the one that was recorded.
///
/// # Errors
/// There is nothing at the path, or the kernel does not say what.
pub(super) fn is_still(path: &Path, recorded: &DeviceIdentity) -> io::Result<bool> {
    let node = fs::metadata(path)?;
    if !node.file_type().is_block_device() {
        return Ok(false);
    }
    Ok(recorded.is_still(&DeviceIdentity::of(&node)?))
}

impl Agent {
    /// Whether a disk is a block device that the configuration allows to VMs, and that this host
    /// does not use itself. A device that a transfer fills is the VM's already.
    pub(in crate::agent) fn is_device_for_vms(&self, file: &FoundFile) -> bool {
        file.is_device
            && file.role == "disk"
            && allows(&self.config().block_devices, &file.path)
            && (is_being_made(&file.real, NO_VM) || is_unused(&file.real))
    }

    /// Returns the devices that a transfer would use. Changes nothing. Those that an interrupted
    /// transfer of the VM has, it would use again.
    pub(super) fn images_on_devices(
        &self,
        request: &ArrivingDisks,
    ) -> Result<Vec<ArrivingImage>, ApiError> {
        let mut own = self.arrivals.all();
        own.retain(|known| known.is_of(&request.vm, request.uuid));
        let is_own = |path: &Path| {
            let mut disks = own.iter().flat_map(|known| &known.record.disks);
            disks.any(|disk| disk.path == path)
        };
        let (mut images, mut held) = (Vec::new(), Vec::new());
        for disk in &request.disks {
            let path = self.device_for(request.to.as_deref(), disk)?;
            if !is_own(&path) {
                held.push(self.free_device(path.clone(), disk)?);
            }
            let (backing, present) = (Vec::new(), Vec::new());
            images.push(ArrivingImage { path, backing, cluster: None, present, identity: None });
        }
        drop(held);
        Ok(images)
    }

    /// Takes the devices for a transfer. If that fails, nothing of it remains.
    pub(super) fn make_arrival_on_devices(
        &self,
        id: MigrationId,
        request: &ArrivingDisks,
    ) -> Result<DiskArrival, ApiError> {
        let to = request.to.as_deref();
        let free = |disk: &ArrivingDisk| self.free_device(self.device_for(to, disk)?, disk);
        let free = request.disks.iter().map(free).collect::<Result<Vec<FreeDevice>, ApiError>>()?;
        let disks = free.iter().zip(&request.disks).map(|(device, disk)| device.record(disk));
        let vm = (request.vm.clone(), request.uuid);
        let disks = disks.collect();
        let record = SavedArrival::new(id, vm, request.from.clone(), now_unix_s(), disks);
        for (device, disk) in free.iter().zip(&request.disks) {
            // Before the record: a transfer that has one goes on, and does not clear them again.
            let cleared = device.clear(disk.virtual_bytes);
            cleared.map_err(|error| failed("clear", &device.path, &error))?;
        }
        self.store.save_arrival(&record)?;
        hold("disks-recorded");
        let (mut images, mut held) = (Vec::new(), Claims::new());
        for FreeDevice { real, claim, .. } in free {
            claim.reserve_for(&request.vm);
            images.push(real);
            held.push(Box::new(claim));
        }
        let present = self.map_of(id, &record, true);
        tracing::info!(vm = request.vm.as_str(), from = request.from, "block devices taken");
        Ok(DiskArrival::new(id, record, images, present, held))
    }

    /// Takes a device for a disk.
    fn free_device(&self, path: PathBuf, disk: &ArrivingDisk) -> Result<FreeDevice, ApiError> {
        let device = self.take_device(path)?;
        device.check_for(disk)?;
        Ok(device)
    }

    /// Returns the path of the device that has the name of a disk, with its ending or without.
    fn device_for(&self, to: Option<&Path>, disk: &ArrivingDisk) -> Result<PathBuf, ApiError> {
        let dir = to.or_else(|| disk.path.parent()).unwrap_or(Path::new("/"));
        let names = [disk.path.file_name(), disk.path.file_stem()];
        let paths = names.into_iter().flatten().map(|name| dir.join(name));
        let allowed: Vec<PathBuf> =
            paths.filter(|path| allows(&self.config().block_devices, path)).collect();
        if let Some(found) = allowed.iter().find(|path| path.exists()) {
            return Ok(found.clone());
        }
        let (host, source, bytes) = (&self.config().name, disk.path.display(), disk.virtual_bytes);
        let (code, why, remedy) = match allowed.first() {
            Some(path) => (
                ErrorCode::NotFound,
                format!("host {host} has no block device {}", path.display()),
                format!("create it there with {bytes} bytes, for example by `lvcreate`"),
            ),
            None => (
                ErrorCode::InvalidRequest,
                format!(
                    "host {host} lets VMs use no block device of its name in {}",
                    dir.display()
                ),
                "add that directory to block_devices in its configuration".to_owned(),
            ),
        };
        Err(ApiError::new(code, format!("cannot accept disk {source}: {why}"), remedy))
    }

    /// Takes a device that nothing on this host uses: no VM, no other transfer, no other program,
    /// and not the host itself.
    fn take_device(&self, path: PathBuf) -> Result<FreeDevice, ApiError> {
        let real = path.canonicalize().map_err(|error| failed("use", &path, &error))?;
        // A thin volume that is being made for another transfer is claimed by its path first.
        let is_made = || path != real && is_being_made(&path, NO_VM);
        let claim = soon(|| in_work::claim(&real).filter(|_| !is_made())).ok_or_else(|| {
            let remedy = "wait until that ends, then try again";
            refused("use", &path, ErrorCode::Busy, "another transfer or import uses it", remedy)
        })?;
        // Once it is claimed, no VM gets it any more.
        self.refuse_users(&path, &real)?;
        let file = open_unused("use", &path)?;
        let described = bytes_of(&file)
            .and_then(|bytes| Ok((bytes, DeviceIdentity::of(&file.metadata()?)?)))
            .map_err(|error| failed("use", &path, &error));
        let (bytes, identity) = described?;
        Ok(FreeDevice { path, real, file, bytes, identity, claim })
    }

    /// Refuses a device of which a VM of this host or work on images has bytes, also as a partition
    /// of it, or as the disk that it is a partition of: only some of them open it exclusively.
    fn refuse_users(&self, path: &Path, real: &Path) -> Result<(), ApiError> {
        let beside = overlapping(real).map_err(|error| failed("use", path, &error))?;
        for node in [real].into_iter().chain(beside.iter().map(PathBuf::as_path)) {
            if let Some(vm) = self.user_before_removal(node)? {
                let why = format!("VM \"{vm}\" uses it");
                let remedy = "use another device, or detach it from that VM";
                return Err(refused("use", path, ErrorCode::WrongState, &why, remedy));
            }
            if in_work::is_read(node) || (node != real && is_being_made(node, NO_VM)) {
                let (why, remedy) = ("another transfer or import uses it", "wait until that ends");
                return Err(refused("use", path, ErrorCode::Busy, why, remedy));
            }
        }
        // A VM whose record cannot be read is in no table.
        if self.is_recorded(path) || self.is_recorded(real) {
            let (why, remedy) = ("the record of a VM names it, or cannot be read", "see the log");
            return Err(refused("use", path, ErrorCode::WrongState, why, remedy));
        }
        Ok(())
    }

    /// Finds the device of a transfer of an earlier agent: its claim and its real path. `None`: it
    /// is another device. `vm`: the VM that arrives.
    ///
    /// # Errors
    /// It is not there, not for VMs any more, or another VM has got it while no agent found it.
    pub(super) fn find_device(
        &self,
        vm: &VmName,
        disk: &SavedArrivingDisk,
        recorded: &DeviceIdentity,
    ) -> Result<Option<(WriteClaim, PathBuf)>, ApiError> {
        let path = &disk.path;
        self.check_allowed("find", path)?;
        let missing = |error: io::Error| failed("find", path, &error);
        if !is_still(path, recorded).map_err(missing)? {
            return Ok(None);
        }
        let real = path.canonicalize().map_err(missing)?;
        let claim = in_work::claim(&real).ok_or_else(|| {
            let (why, remedy) = ("something else uses it", "wait until that ends");
            refused("find", path, ErrorCode::Busy, why, remedy)
        })?;
        let mut users = self.users_of_file(&real);
        for node in overlapping(&real).map_err(missing)? {
            users.extend(self.users_of_file(&node));
        }
        if let Some((user, _)) = users.iter().find(|(user, _)| user != vm) {
            let why = format!("VM \"{user}\" uses it by now");
            let remedy = "detach it from that VM, or migrate onto another device";
            return Err(refused("find", path, ErrorCode::WrongState, &why, remedy));
        }
        Ok(Some((claim, real)))
    }

    /// Opens the device of a transfer to fill it.
    ///
    /// # Errors
    /// It is gone, another device, too small by now, or something uses it.
    pub(super) fn open_device(
        &self,
        disk: &SavedArrivingDisk,
        recorded: &DeviceIdentity,
    ) -> Result<OpenedImage, ApiError> {
        let path = &disk.path;
        self.check_allowed("write", path)?;
        let file = open_recorded("write", path, recorded)?;
        let bytes = bytes_of(&file).map_err(|error| failed("write", path, &error))?;
        if bytes < disk.virtual_bytes {
            let why = format!("it has {bytes} bytes by now");
            return Err(refused("write", path, ErrorCode::WrongState, &why, "make it larger"));
        }
        Ok(OpenedImage {
            path: path.clone(),
            content: OpenedContent::Raw(file),
            cached: None,
            // It has all its room.
            check_growth: Box::new(|| Ok(())),
        })
    }

    /// Clears both ends of the device of a transfer that is given up, if it is still that device.
    /// One that a VM may have stays as it is.
    pub(super) fn clear_device(&self, path: &Path, recorded: &DeviceIdentity) {
        let shown = path.display();
        match self.clear_recorded(path, recorded) {
            Ok(()) => tracing::info!(path = %shown, "the ends of a block device are cleared"),
            Err(error) => tracing::warn!(%error, "a block device stays as it is"),
        }
    }

    fn clear_recorded(&self, path: &Path, recorded: &DeviceIdentity) -> Result<(), ApiError> {
        self.check_allowed("clear", path)?;
        let cannot = |error: io::Error| failed("clear", path, &error);
        let real = path.canonicalize().map_err(cannot)?;
        let mut is_used = self.is_recorded(path) || self.is_recorded(&real);
        for node in [real.clone()].into_iter().chain(overlapping(&real).map_err(cannot)?) {
            is_used |= self.user_before_removal(&node)?.is_some();
        }
        if is_used {
            let (why, remedy) = ("a VM may have it", "see `godwit vm list`");
            return Err(refused("clear", path, ErrorCode::WrongState, why, remedy));
        }
        let file = open_recorded("clear", path, recorded)?;
        let bytes = bytes_of(&file).map_err(cannot)?;
        clear_ends(&file, bytes).and_then(|()| file.sync_data()).map_err(cannot)
    }

    fn check_allowed(&self, verb: &str, path: &Path) -> Result<(), ApiError> {
        if allows(&self.config().block_devices, path) {
            return Ok(());
        }
        let why = format!("host {} does not let VMs use it any more", self.config().name);
        let remedy = "add it to block_devices in that host's configuration";
        Err(refused(verb, path, ErrorCode::WrongState, &why, remedy))
    }
}

impl FreeDevice {
    /// Checks that a disk may be written to it.
    fn check_for(&self, disk: &ArrivingDisk) -> Result<(), ApiError> {
        let refuse = |code, why: &str, remedy: &str| {
            let source = disk.path.display();
            let message = format!("cannot accept disk {source} on {}: {why}", self.path.display());
            Err(ApiError::new(code, message, remedy))
        };
        let (bytes, wanted) = (self.bytes, disk.virtual_bytes);
        if bytes < wanted {
            let why = format!("the device has {bytes} bytes, and the disk has {wanted}");
            return refuse(ErrorCode::WrongState, &why, "make the device larger");
        }
        if bytes - wanted > MOST_REST_BYTES {
            let most = ByteSize::from_bytes(MOST_REST_BYTES);
            let why = format!("the device has {bytes} bytes, and the disk only {wanted}");
            let remedy = format!("use a device that has at most {most} more than the disk");
            return refuse(ErrorCode::WrongState, &why, &remedy);
        }
        let onto = disk.onto.as_ref();
        let (name, source) = (&self.identity.name, onto.and_then(|onto| onto.source.as_ref()));
        if let Some(source) = source.filter(|source| source.is_empty() || name.is_empty()) {
            let which = if source.is_empty() { "the source's" } else { "this" };
            let why = format!(
                "nothing shows that it is not the source's own: {which} device has no name of its \
                 own"
            );
            let remedy = "use a logical volume or a LUN, or move the disk to a file first";
            return refuse(ErrorCode::WrongState, &why, remedy);
        }
        if source.is_some_and(|source| !are_apart(source, name)) {
            let why = "it is the device that the disk is on, or may have bytes of it";
            let remedy = "move the VM without its disks, or use another device";
            return refuse(ErrorCode::WrongState, why, remedy);
        }
        // The volume group of the source's volume may be on it.
        let label = source.map_or(Ok(false), |_| is_physical_volume(&self.file));
        if label.map_err(|error| failed("read", &self.path, &error))? {
            let why = "it is a physical volume of LVM, maybe below the source's own device";
            return refuse(ErrorCode::WrongState, why, "use another device, or clear this one");
        }
        if onto.is_some_and(|onto| onto.overwrite) {
            return Ok(());
        }
        match has_content(&self.file, bytes) {
            Ok(false) => Ok(()),
            Ok(true) => {
                let remedy = "use an empty one, clear it (`blkdiscard -z`), or overwrite it \
                              (--overwrite-devices)";
                refuse(ErrorCode::AlreadyExists, "the device has content", remedy)
            }
            Err(error) => Err(failed("read", &self.path, &error)),
        }
    }

    fn record(&self, disk: &ArrivingDisk) -> SavedArrivingDisk {
        SavedArrivingDisk {
            source: disk.path.clone(),
            path: self.path.clone(),
            format: DiskFormat::Raw,
            virtual_bytes: disk.virtual_bytes,
            inode: self.identity.number,
            born_unix_ns: self.identity.sequence,
            backing: Vec::new(),
            unnamed: None,
            device: Some(self.identity.clone()),
            thin: None,
        }
    }

    /// Clears both ends, and what the device has more than a disk of so many bytes.
    fn clear(&self, disk_bytes: u64) -> io::Result<()> {
        clear_ends(&self.file, self.bytes)?;
        make_zero(&self.file, disk_bytes, self.bytes.saturating_sub(disk_bytes))?;
        self.file.sync_data()
    }
}

fn clear_ends(file: &File, bytes: u64) -> io::Result<()> {
    ends_of(bytes).into_iter().try_for_each(|(at, length)| make_zero(file, at, length))
}

/// Opens a device that nothing on this host uses, to write it.
fn open_unused(verb: &str, path: &Path) -> Result<File, ApiError> {
    let is_busy = |error: &io::Error| error.kind() == io::ErrorKind::ResourceBusy;
    let opened = soon(|| match open_exclusively(path) {
        Err(error) if is_busy(&error) => None,
        opened => Some(opened),
    });
    let file = opened.ok_or_else(|| {
        let holders = holders_of(path);
        let by = match holders.is_empty() {
            true => "mounted, swap space, or open in another program".to_owned(),
            false => format!("a part of {}", holders.join(", ")),
        };
        let remedy = "release it there, or use another device";
        refused(verb, path, ErrorCode::WrongState, &format!("the host uses it: {by}"), remedy)
    })?;
    let file = file.map_err(|error| failed(verb, path, &error))?;
    // A QEMU of another program does not open it exclusively, and locks it.
    if godwit_ram::lock_against_writers(&file).is_ok_and(|is_locked| !is_locked) {
        return Err(refused(verb, path, ErrorCode::Busy, WRITTEN, "end that program first"));
    }
    Ok(file)
}

/// Opens a device to write it, if it is the one that was recorded.
fn open_recorded(verb: &str, path: &Path, recorded: &DeviceIdentity) -> Result<File, ApiError> {
    let file = open_unused(verb, path)?;
    let now = file.metadata().and_then(|node| DeviceIdentity::of(&node));
    if recorded.is_still(&now.map_err(|error| failed(verb, path, &error))?) {
        return Ok(file);
    }
    let (why, remedy) = ("it is another device than before", "migrate again");
    Err(refused(verb, path, ErrorCode::WrongState, why, remedy))
}

/// Repeats an attempt for a moment: something that has just ended, or that only looks, may have the
/// device a little longer.
#[expect(clippy::disallowed_methods, reason = "nothing says when a device is closed")]
pub(super) fn soon<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    for look in 0..WRITER_LOOKS {
        if look > 0 {
            tokio::task::block_in_place(|| std::thread::sleep(WRITER_INTERVAL));
        }
        if let Some(done) = attempt() {
            return Some(done);
        }
    }
    None
}

fn refused(verb: &str, path: &Path, code: ErrorCode, why: &str, remedy: &str) -> ApiError {
    ApiError::new(code, format!("cannot {verb} block device {}: {why}", path.display()), remedy)
}

fn failed(verb: &str, path: &Path, error: &io::Error) -> ApiError {
    let (code, remedy) = match error.kind() {
        io::ErrorKind::NotFound => (ErrorCode::NotFound, "make it there first"),
        io::ErrorKind::InvalidInput => (ErrorCode::InvalidRequest, "name a block device"),
        _ => (ErrorCode::HostFailed, "see the host's kernel log"),
    };
    refused(verb, path, code, &error.to_string(), remedy)
}

#[cfg(test)]
mod tests;
