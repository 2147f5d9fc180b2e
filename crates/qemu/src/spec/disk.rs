//! Disks of a VM, and the backing chains of their images.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::rbd::{RbdImage, is_rbd};
use crate::size::ByteSize;
use crate::spec::checks::check_path;
use crate::spec::error::SpecError;

/// Most backing files of a disk. A longer chain is a loop.
pub(crate) const MOST_BACKING_FILES: usize = 31;

/// Most disks of the SCSI controller.
pub const MOST_SCSI_DISKS: u32 = 32;
/// Ports of the SATA controller (ich9-ahci, QEMU 7.2).
const SATA_PORTS: u32 = 6;
/// Longest serial number that every bus passes on whole (VIRTIO_BLK_ID_BYTES).
const MOST_SERIAL_BYTES: usize = 20;

/// A disk: an image at a path that exists on every host of the VM, or in a pool of Ceph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Disk {
    /// Absolute path of the image, or `rbd:POOL/IMAGE` or `rbd:POOL/NAMESPACE/IMAGE` for an image
    /// in a pool of Ceph.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Format of the image. Never guessed from its content: a guest could write another header into
    /// a raw image.
    pub format: DiskFormat,
    /// Whether the guest may only read it.
    #[serde(default)]
    pub readonly: bool,
    /// Bus that the guest finds it on.
    #[serde(default, skip_serializing_if = "DiskBus::is_virtio")]
    pub bus: DiskBus,
    /// Target on the SCSI controller, or port of the SATA controller: the address of the disk, the
    /// same on every host. Default: the lowest free one when the VM is defined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// When a write of the guest is complete.
    #[serde(default, skip_serializing_if = "DiskCache::is_writeback")]
    pub cache: DiskCache,
    /// Whether space that the guest discards is freed on the host.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    #[cfg_attr(feature = "schema", schema(default = true))]
    pub discard: bool,
    /// Whether blocks of zeros take no space on the host. Costs CPU time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detect_zeroes: bool,
    /// Serial number that the guest reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Most requests a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Most bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub bytes_per_second: Option<ByteSize>,
    /// Whether QEMU serves the disk by a thread of its own instead of its main one; buses virtio
    /// and scsi. Disks on bus scsi share the thread of their controller.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub iothread: bool,
    /// Position in the order in which the firmware tries to boot, from 1. Devices without one
    /// follow: disks, then CD-ROM drives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u32>,
    /// Slot that it was plugged into while the VM ran, of the VM's `hotplug_slots`: the address of
    /// a disk on bus virtio, the same on every host. Absent: it is there from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
}

/// Bus of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum DiskBus {
    /// A virtio device of its own.
    #[default]
    Virtio,
    /// A target of the VM's virtio SCSI controller.
    Scsi,
    /// An NVMe controller of its own. QEMU cannot migrate it (7.2: "State blocked by non-migratable
    /// device").
    Nvme,
    /// A port of the VM's AHCI controller, for guests without virtio drivers.
    Sata,
}

impl DiskBus {
    /// Returns the name in specifications.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DiskBus::Virtio => "virtio",
            DiskBus::Scsi => "scsi",
            DiskBus::Nvme => "nvme",
            DiskBus::Sata => "sata",
        }
    }

    pub(crate) fn is_virtio(&self) -> bool {
        *self == DiskBus::Virtio
    }

    /// Number of units of the bus's controller; `None` if each disk is its own controller.
    pub(crate) fn units(self) -> Option<u32> {
        match self {
            DiskBus::Virtio | DiskBus::Nvme => None,
            DiskBus::Scsi => Some(MOST_SCSI_DISKS),
            DiskBus::Sata => Some(SATA_PORTS),
        }
    }
}

/// When a write of the guest is complete. There is no mode that bypasses the host's cache
/// (`O_DIRECT`): it would write into guest pages that the kernel has pinned, which dirty tracking
/// does not see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum DiskCache {
    /// When the host's cache has it. It is on the disk when the guest flushes.
    #[default]
    Writeback,
    /// When it is on the disk.
    Writethrough,
}

impl DiskCache {
    pub(crate) fn is_writeback(&self) -> bool {
        *self == DiskCache::Writeback
    }
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_yes(value: &bool) -> bool {
    *value
}

impl Disk {
    /// Returns a disk with the default of every option.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, format: DiskFormat) -> Disk {
        Disk {
            path: path.into(),
            format,
            readonly: false,
            bus: DiskBus::Virtio,
            unit: None,
            cache: DiskCache::Writeback,
            discard: true,
            detect_zeroes: false,
            serial: None,
            iops: None,
            bytes_per_second: None,
            iothread: false,
            boot_order: None,
            slot: None,
        }
    }

    /// Returns the disk, for a guest that may only read it.
    #[must_use]
    pub fn readonly(self) -> Disk {
        Disk { readonly: true, ..self }
    }

    /// Checks where its image is.
    fn check_place(&self) -> Result<(), SpecError> {
        if !is_rbd(&self.path) {
            return check_path("disk", &self.path);
        }
        let wrong = |why: &str| SpecError::Disk { path: self.path.clone(), why: why.to_owned() };
        if RbdImage::of(&self.path).is_none() {
            return Err(wrong(
                "its name is not rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE, with names of \
                 letters, digits, \"-\", \"_\" and \".\"",
            ));
        }
        if self.format != DiskFormat::Raw {
            return Err(wrong("an image in a pool of Ceph has format raw"));
        }
        Ok(())
    }

    /// Checks the options that do not depend on other disks.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        self.check_place()?;
        let wrong = |why: String| Err(SpecError::Disk { path: self.path.clone(), why });
        if let Some(serial) = &self.serial {
            let is_good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if serial.is_empty() || serial.len() > MOST_SERIAL_BYTES || !serial.chars().all(is_good)
            {
                return wrong(format!(
                    "a serial number has 1 to {MOST_SERIAL_BYTES} letters, digits, \"-\", \"_\" \
                     or \".\""
                ));
            }
        }
        if self.readonly && matches!(self.bus, DiskBus::Sata | DiskBus::Nvme) {
            return wrong(format!("a disk on bus {} cannot be readonly", self.bus.name()));
        }
        if self.iothread && !matches!(self.bus, DiskBus::Virtio | DiskBus::Scsi) {
            return wrong(format!("a disk on bus {} has no iothread", self.bus.name()));
        }
        let most = i64::MAX.unsigned_abs();
        let bytes = self.bytes_per_second.map(ByteSize::bytes);
        if self.iops.iter().chain(&bytes).any(|limit| *limit == 0 || *limit > most) {
            return wrong("a limit is not a positive number".to_owned());
        }
        Ok(())
    }
}

/// Formats of disk images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum DiskFormat {
    /// The bytes of the disk without a header.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

impl DiskFormat {
    /// Returns the name of QEMU's block driver.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DiskFormat::Raw => "raw",
            DiskFormat::Qcow2 => "qcow2",
        }
    }
}

/// A disk with its backing chain. A guest or the author of an image can change the chain in the
/// image's header, so it is recorded when an operator names the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolvedDisk {
    /// See [`Disk::path`].
    pub path: PathBuf,
    /// See [`Disk::format`].
    pub format: DiskFormat,
    /// See [`Disk::readonly`].
    #[serde(default)]
    pub readonly: bool,
    /// See [`Disk::bus`].
    #[serde(default, skip_serializing_if = "DiskBus::is_virtio")]
    pub bus: DiskBus,
    /// See [`Disk::unit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// See [`Disk::cache`].
    #[serde(default, skip_serializing_if = "DiskCache::is_writeback")]
    pub cache: DiskCache,
    /// See [`Disk::discard`].
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub discard: bool,
    /// See [`Disk::detect_zeroes`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detect_zeroes: bool,
    /// See [`Disk::serial`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// See [`Disk::iops`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// See [`Disk::bytes_per_second`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<ByteSize>,
    /// See [`Disk::iothread`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub iothread: bool,
    /// See [`Disk::boot_order`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u32>,
    /// See [`Disk::slot`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    /// Backing files, from the image's own down to the last one. `None`: not recorded, as in
    /// definitions of releases that recorded no chains. A raw image has no chain to record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<Vec<BackingFile>>,
    /// Identity (fsid) of the Ceph cluster that has the image, as it was when the disk was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Uuid>,
    /// Number of times that its image was exchanged while its QEMU ran: a part of the names of its
    /// block nodes there.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub image_generation: u16,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(times: &u16) -> bool {
    *times == 0
}

impl From<Disk> for ResolvedDisk {
    fn from(disk: Disk) -> Self {
        ResolvedDisk {
            path: disk.path,
            format: disk.format,
            readonly: disk.readonly,
            bus: disk.bus,
            unit: disk.unit,
            cache: disk.cache,
            discard: disk.discard,
            detect_zeroes: disk.detect_zeroes,
            serial: disk.serial,
            iops: disk.iops,
            bytes_per_second: disk.bytes_per_second,
            iothread: disk.iothread,
            boot_order: disk.boot_order,
            slot: disk.slot,
            backing: None,
            cluster: None,
            image_generation: 0,
        }
    }
}

impl ResolvedDisk {
    /// Returns the disk with another image, for the QEMU that has the disk. `backing`: see
    /// [`ResolvedDisk::backing`].
    #[must_use]
    pub fn with_image(
        &self,
        path: PathBuf,
        format: DiskFormat,
        backing: Option<Vec<BackingFile>>,
    ) -> ResolvedDisk {
        let image_generation = self.image_generation.checked_add(1).unwrap_or(1);
        ResolvedDisk { path, format, backing, cluster: None, image_generation, ..self.clone() }
    }

    /// Returns the disk as its user describes it.
    #[must_use]
    pub fn to_disk(&self) -> Disk {
        Disk {
            path: self.path.clone(),
            format: self.format,
            readonly: self.readonly,
            bus: self.bus,
            unit: self.unit,
            cache: self.cache,
            discard: self.discard,
            detect_zeroes: self.detect_zeroes,
            serial: self.serial.clone(),
            iops: self.iops,
            bytes_per_second: self.bytes_per_second,
            iothread: self.iothread,
            boot_order: self.boot_order,
            slot: self.slot,
        }
    }
}

/// A CD-ROM drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Cdrom {
    /// Absolute path of the inserted image, which every host of the VM has. Absent: the drive is
    /// empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub image: Option<PathBuf>,
    /// Bus that the guest finds it on: sata, which most installers know, or scsi, for guests
    /// without a driver for AHCI (Debian's cloud kernel).
    #[serde(default = "sata", skip_serializing_if = "is_sata")]
    #[cfg_attr(feature = "schema", schema(default = "sata"))]
    pub bus: DiskBus,
    /// See [`Disk::unit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// See [`Disk::boot_order`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u32>,
}

impl Default for Cdrom {
    fn default() -> Cdrom {
        Cdrom { image: None, bus: DiskBus::Sata, unit: None, boot_order: None }
    }
}

fn sata() -> DiskBus {
    DiskBus::Sata
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_sata(bus: &DiskBus) -> bool {
    *bus == DiskBus::Sata
}

/// A backing file of an image, or of another backing file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackingFile {
    /// Real path, with every link resolved.
    pub path: PathBuf,
    pub format: DiskFormat,
}

impl fmt::Display for BackingFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.path.display(), self.format.name())
    }
}

/// Checks a chain that a peer sent.
///
/// # Errors
/// It is too long, or a path in it is invalid.
pub(super) fn check_chain(backing: &[BackingFile]) -> Result<(), SpecError> {
    if let Some(beyond) = backing.get(MOST_BACKING_FILES) {
        return Err(SpecError::Path {
            role: "backing file",
            path: beyond.path.clone(),
            why: "beyond the longest backing chain",
        });
    }
    backing.iter().try_for_each(|file| check_path("backing file", &file.path))
}

/// Units of the controllers that disks and CD-ROM drives have, by bus.
type Taken = Vec<(DiskBus, u32)>;

/// Checks disks and CD-ROM drives against each other. `orders`: places in the boot order that other
/// devices have.
///
/// # Errors
/// Two have one unit or one place in the boot order, or a controller has too few units.
pub(super) fn check_drives(
    disks: &[Disk],
    cdroms: &[Cdrom],
    mut orders: Vec<u32>,
) -> Result<(), SpecError> {
    let mut taken = Taken::new();
    for disk in disks {
        disk.check()?;
        let wrong = |why| SpecError::Disk { path: disk.path.clone(), why };
        take(&mut taken, disk.bus, disk.unit).map_err(wrong)?;
        take_order(&mut orders, disk.boot_order).map_err(wrong)?;
    }
    for (index, drive) in cdroms.iter().enumerate() {
        if let Some(image) = &drive.image {
            check_path("CD image", image)?;
        }
        let wrong = |why| SpecError::Cdrom { index, why };
        if drive.bus.units().is_none() {
            return Err(wrong(format!("its bus is sata or scsi, not {}", drive.bus.name())));
        }
        take(&mut taken, drive.bus, drive.unit).map_err(wrong)?;
        take_order(&mut orders, drive.boot_order).map_err(wrong)?;
    }
    for bus in [DiskBus::Scsi, DiskBus::Sata] {
        let drives = cdroms.iter().filter(|drive| drive.bus == bus).count();
        let count = disks.iter().filter(|disk| disk.bus == bus).count() + drives;
        let most = bus.units().unwrap_or(0);
        if count > most as usize {
            return Err(SpecError::TooManyDrives { bus: bus.name(), count, most });
        }
    }
    Ok(())
}

fn take(taken: &mut Taken, bus: DiskBus, unit: Option<u32>) -> Result<(), String> {
    let Some(unit) = unit else { return Ok(()) };
    let Some(units) = bus.units() else {
        return Err(format!("a disk on bus {} has no unit", bus.name()));
    };
    if unit >= units {
        return Err(format!(
            "unit {unit} is beyond the last one of bus {}, {}",
            bus.name(),
            units - 1
        ));
    }
    if taken.contains(&(bus, unit)) {
        return Err(format!("unit {unit} of bus {} is taken", bus.name()));
    }
    taken.push((bus, unit));
    Ok(())
}

pub(super) fn take_order(orders: &mut Vec<u32>, order: Option<u32>) -> Result<(), String> {
    match order {
        Some(0) => return Err("boot_order begins with 1".to_owned()),
        Some(order) if orders.contains(&order) => {
            return Err(format!("boot_order {order} is taken"));
        }
        order => orders.extend(order),
    }
    Ok(())
}

/// Gives each disk and CD-ROM drive of a controller a unit. A checked specification has enough.
pub(super) fn assign_units(disks: &mut [ResolvedDisk], cdroms: &mut [Cdrom]) {
    let of_disks = disks.iter().filter_map(|disk| Some((disk.bus, disk.unit?)));
    let of_drives = cdroms.iter().filter_map(|drive| Some((drive.bus, drive.unit?)));
    let mut taken: Taken = of_disks.chain(of_drives).collect();
    let mut assign = |bus: DiskBus, unit: &mut Option<u32>| {
        let (Some(units), None) = (bus.units(), *unit) else { return };
        *unit = (0..units).find(|unit| !taken.contains(&(bus, *unit)));
        taken.extend(unit.map(|unit| (bus, unit)));
    };
    disks.iter_mut().for_each(|disk| assign(disk.bus, &mut disk.unit));
    cdroms.iter_mut().for_each(|drive| assign(drive.bus, &mut drive.unit));
}

/// Checks that a peer's disks and CD-ROM drives have their addresses.
pub(super) fn check_units(disks: &[ResolvedDisk], cdroms: &[Cdrom]) -> Result<(), SpecError> {
    let lacks = |disk: &&ResolvedDisk| disk.bus.units().is_some() && disk.unit.is_none();
    if let Some(disk) = disks.iter().find(lacks) {
        let why = "it has no unit".to_owned();
        return Err(SpecError::Disk { path: disk.path.clone(), why });
    }
    match cdroms.iter().position(|drive| drive.unit.is_none()) {
        Some(index) => Err(SpecError::Cdrom { index, why: "it has no unit".to_owned() }),
        None => Ok(()),
    }
}
