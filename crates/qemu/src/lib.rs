//! The hypervisor: VM specifications, QEMU's command line, its start and control over QMP, and the
//! abilities of its binary and of the host's KVM. Knows nothing of the migration protocol, of
//! networks or of the host agent.

mod accel;
mod commands;
mod counters;
mod cpu;
mod devices;
mod drives;
mod exports;
mod firmware;
mod foreign;
#[doc(hidden)]
pub mod fuzzing;
mod guest_agent;
mod helper;
mod hotplug;
mod images;
mod inspect;
mod launch;
mod limits;
mod mac;
mod mirrors;
mod nics;
mod pci;
mod pool_tool;
mod process;
mod qmp;
mod rbd;
mod resume;
mod running;
mod screen;
mod seed;
mod size;
mod slots;
mod spec;
mod thin_pool;
mod tpm;
mod vcpu_group;

pub use accel::{AccelProbe, Accelerator, DEFAULT_CPU_MODEL, usable_accel};
pub use commands::{
    AnnounceParameters, EVENTS, LATE_BLOCK_ACTIVATE, MIGRATION, MigrateInfo, MigrationStatus,
    PAUSE_BEFORE_SWITCHOVER, RESUME, RamInfo, RunState, STOP, X_IGNORE_SHARED,
};
pub use counters::{DiskCounters, may_query_counters};
pub use cpu::{
    AMD, AMD_GENERATIONS, Baseline, BaselineChange, Common, CpuError, CpuFeatures, CpuModel,
    HostCpu, INTEL, INTEL_GENERATIONS, LEVEL_MODELS, NoCommon, PsabiLevel, RunningVm, Unfit,
    UnknownLevel, Unmet, change_of_baseline, common_baseline, host_cpu,
};
pub use devices::{external_engine_obstacles, unmovable_disks, untrackable_parts};
pub use exports::TrackedDisk;
pub use firmware::{DESCRIPTION_DIRS, FLASH_SECTOR_BYTES, FirmwareImages, OpenFirmware};
pub use foreign::{
    ForeignFirmware, ForeignNic, ForeignTap, ForeignVm, MOST_ARGUMENTS_BYTES, read_foreign,
};
pub use guest_agent::{
    GUEST_AGENT_PORT, GUEST_AGENT_SOCKET, GuestAgent, GuestAgentError, GuestFacts, GuestInterface,
};
pub use helper::end_left_helpers;
pub use hotplug::{DiskCopy, DiskMove, PlugError, is_detachable_device};
pub use images::{
    ImageHead, ImageTool, ImageToolError, MOST_IMAGE_BYTES, OpenSource, check_image_bytes,
    image_head, write_image,
};
pub use inspect::{InspectError, MachineType, OLDEST_QEMU, QemuInfo, find_program, inspect};
pub use launch::{
    CONSOLE_LOG, FileError, FoundFile, ImageError, Inherited, Launch, MOST_COPIED_BYTES, NewDrive,
    OpenFile, OpenFiles, OpenLayer, QEMU_LOG, SERIAL_SOCKET, StartError, Tap, Tracker, console_log,
    memory_id, serial_socket,
};
pub use limits::{QemuLimits, VmGroupError, VmGroups};
pub use mac::{MacAddress, MacError};
pub use mirrors::{Mirror, MirrorState};
pub use nics::{nic_id, nic_number};
pub use pci::{PciBar, PciFunction};
pub use pool_tool::{
    ListedImage, PoolSpace, PoolToolError, delete_pool_image, list_pool, pool_image_id, pool_room,
    pool_spaces, rename_pool_image,
};
pub use process::{
    AdoptError, Ended, Exit, QMP_SOCKET, QemuProcess, end_process, ends_within, is_alive,
    start_time_of,
};
pub use qmp::{CrashSign, Qmp, QmpError, QmpEvent, SHUTDOWN, WATCHDOG, wait_for_event};
pub use rbd::{CephAccess, RbdAccess, RbdImage, is_pool, is_rbd, pool_stem, read_ceph_key};
pub use running::{RunningProcess, users_of_processes};
pub use screen::{MOST_PICTURE_BYTES, Picture, PictureError};
pub use seed::{SEED_BYTES, SeedFile, read_seed, seed_files, seed_image};
pub use size::{ByteSize, SizeError};
pub use spec::{
    Accel, AddressConflict, AddressWithPrefix, Autostart, Backing, BackingFile, Cdrom, ClaimedNic,
    CloudInit, DEFAULT_MACHINE, Disk, DiskBus, DiskCache, DiskFormat, Firmware, GuestNetwork,
    HIDDEN, MOST_HOTPLUG_SLOTS, MOST_QUEUES, MOST_SCSI_DISKS, MOST_SERIAL_PORTS,
    MOST_USER_DATA_BYTES, MemoryBlock, Nic, NicFilter, NicLink, NicModel, OnCrash, Part,
    Properties, ResolvedDisk, ResolvedNic, ResolvedSpec, RestartPriority, SpecError, SpecPatch,
    Topology, Video, VmName, VmSpec, Watchdog, address_conflict, kept_by_agents,
};
pub use thin_pool::{ThinPool, is_thin_pool};
pub use tpm::{TPM_LOG, Tpm, TpmLaunch, swtpm_version};
pub use uuid::Uuid;
pub use vcpu_group::{VcpuGroup, VcpuGroupError, put_back_vcpus, remove_ended_vcpu_groups};
