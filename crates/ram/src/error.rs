//! Errors of guest RAM, each with its cause and the remedy.

use std::io;
use std::path::PathBuf;

use crate::pages::PageRange;

/// Failure of a RAM block or of the file system that holds it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// A system call failed.
    #[error("cannot {what} {path}: {source}", path = path.display())]
    Io {
        /// The action that failed.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A RAM file with that name exists already.
    #[error(
        "{path} exists already: another VM of this name runs or has left its RAM behind; stop it, \
        or remove the file",
        path = path.display()
    )]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The size is zero or not in whole pages.
    #[error(
        "a RAM block of {size_bytes} bytes ({path}): the size must be a multiple of 4096 bytes and \
        not zero",
        path = path.display()
    )]
    Size {
        /// The file.
        path: PathBuf,
        size_bytes: u64,
    },
    /// The host has not enough memory left.
    #[error(
        "no memory left for {bytes} bytes of {path}: free memory on this host, or choose another",
        path = path.display()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// The bytes requested.
        bytes: u64,
    },
    /// The pages or bytes are outside the block.
    #[error(
        "bytes {offset_bytes} to {end_bytes} lie outside {path} of {size_bytes} bytes",
        path = path.display()
    )]
    OutOfBounds {
        /// The file.
        path: PathBuf,
        /// The first byte requested.
        offset_bytes: u64,
        /// The byte after the last.
        end_bytes: u64,
        size_bytes: u64,
    },
    /// Another file system than tmpfs is mounted where guest RAM should be.
    #[error(
        "{path} is a mount of another kind than tmpfs: guest RAM can only be tracked on tmpfs; \
        unmount it, or choose another ram_dir",
        path = path.display()
    )]
    NotTmpfs {
        /// The directory.
        path: PathBuf,
    },
    /// The tmpfs could not be mounted.
    #[error(
        "cannot mount a tmpfs for guest RAM at {path}: {source}; run the agent as root \
        (CAP_SYS_ADMIN), or mount one there beforehand (mount -t tmpfs -o \
        huge=within_size,size=100% godwit-ram {path})",
        path = path.display()
    )]
    Mount {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl RamError {
    pub(crate) fn io(
        what: &'static str,
        path: impl Into<PathBuf>,
        source: impl Into<io::Error>,
    ) -> RamError {
        RamError::Io { what, path: path.into(), source: source.into() }
    }
}

/// Failure of dirty tracking.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackError {
    /// The kernel lacks a feature that tracking needs.
    #[error(
        "this kernel ({found}) cannot track dirty pages from outside QEMU ({missing}): boot Linux \
        6.7 or later, or migrate with --engine qemu"
    )]
    KernelTooOld {
        /// The running kernel's release.
        found: String,
        missing: &'static str,
    },
    /// The kernel's page size is not 4 KiB.
    #[error(
        "this kernel's pages are of {found} bytes, and Godwit tracks pages of 4096: boot a kernel \
        with 4 KiB pages, or migrate with --engine qemu"
    )]
    PageSize {
        /// The page size, in bytes.
        found: usize,
    },
    /// No userfaultfd is available.
    #[error(
        "no userfaultfd available: {reason}; run the agent as root, and check that \
        /dev/userfaultfd is there (CONFIG_USERFAULTFD) and not barred by a container's device rules"
    )]
    NoUserfaultfd {
        /// What refused it, and why.
        reason: String,
    },
    /// QEMU runs without the tracker library.
    #[error(
        "QEMU does not answer at {socket} ({source}): it was not started with the tracker library; \
        stop the VM and start it by this agent (LD_PRELOAD=libgodwit_tracker.so), or migrate with \
        --engine qemu",
        socket = socket.display()
    )]
    LibraryMissing {
        socket: PathBuf,
        /// The error of connecting or waiting.
        source: io::Error,
    },
    /// The answer did not come from a tracker library of this version.
    #[error(
        "the tracker library at {socket} gave an answer that this agent does not understand: it is \
        of another version; restart the VM with this agent's library, or migrate with --engine \
        qemu",
        socket = socket.display()
    )]
    LibraryVersion { socket: PathBuf },
    /// The version of the library in QEMU keeps no userfaultfd.
    #[error(
        "the tracker library at {socket} is too old for a guest that runs before its memory is \
        there: an earlier agent started the VM; migrate it with pre-copy alone, or restart it by \
        this agent",
        socket = socket.display()
    )]
    LibraryTooOld { socket: PathBuf },
    /// The library in QEMU has no copy of a userfaultfd.
    #[error(
        "the tracker library at {socket} keeps no userfaultfd: no memory of this VM was waited for \
        when its agent ended, or QEMU has been started anew since",
        socket = socket.display()
    )]
    NothingKept { socket: PathBuf },
    /// The userfaultfd belongs to another process than the one to be tracked.
    #[error(
        "the tracker library that answered does not run in process {pid}: the VM's tracker socket \
        is another VM's; restart the VM by this agent"
    )]
    WrongProcess {
        /// The process that should have answered.
        pid: i32,
    },
    /// The RAM file is not in QEMU's address space.
    #[error(
        "process {pid} does not map {path}: the VM's RAM is not in that file; start it with \
        memory-backend-file,share=on,mem-path={path}, or migrate with --engine qemu",
        path = path.display()
    )]
    NotMapped {
        /// QEMU's process.
        pid: i32,
        /// The RAM file.
        path: PathBuf,
    },
    /// The RAM file is mapped privately.
    #[error(
        "process {pid} maps {path} privately: what the guest writes stays in QEMU; start the VM \
        with share=on in its memory-backend-file, or migrate with --engine qemu",
        path = path.display()
    )]
    NotShared {
        /// QEMU's process.
        pid: i32,
        /// The RAM file.
        path: PathBuf,
    },
    /// The file system does not support write protection from user space.
    #[error(
        "the kernel cannot track {path}: it must lie on a tmpfs; put ram_dir there, or migrate \
        with --engine qemu",
        path = path.display()
    )]
    NotTrackable {
        /// The RAM file.
        path: PathBuf,
    },
    /// Another program tracks the same memory.
    #[error(
        "{path} is being tracked already: another migration of this VM runs, or another tool holds \
        a userfaultfd of its QEMU; let it end first",
        path = path.display()
    )]
    AlreadyTracked {
        /// The RAM file.
        path: PathBuf,
    },
    /// The userfaultfd does not deliver faults that occur in the kernel.
    #[error(
        "cannot make the guest wait, for its writes to be slowed or its memory to come: QEMU may \
        only handle its own faults; run the agent as root with /dev/userfaultfd, or set \
        vm.unprivileged_userfaultfd=1, and start the VM again"
    )]
    NoKernelFaults,
    /// The thread that answers the waiting writes has ended.
    #[error("cannot answer the waiting writes of process {pid}: the thread for them has ended")]
    WritesUnanswered {
        /// QEMU's process.
        pid: i32,
    },
    /// Each watched stretch of memory is a mapping of its own, and there are as many as the kernel
    /// allows.
    #[error(
        "process {pid} has as many mappings as the kernel allows: what is missing of its memory is \
        too scattered; raise vm.max_map_count (sysctl) on this host, or migrate with pre-copy alone"
    )]
    TooManyMappings {
        /// QEMU's process.
        pid: i32,
    },
    /// QEMU maps a RAM block in more places than a stock QEMU ever does.
    #[error(
        "cannot track {path}: process {pid} maps it at more than {limit} places; its guest may \
        have broken out of QEMU: stop the VM and start it again",
        path = path.display()
    )]
    TooManyPlaces {
        /// QEMU's process.
        pid: i32,
        /// The block's file.
        path: PathBuf,
        /// Maximum number that is read.
        limit: usize,
    },
    /// QEMU's list of mappings is longer than the maximum that is read.
    #[error(
        "cannot read the mappings of process {pid}: there are more than {limit}, or the path of \
        one is too long; its guest may have broken out of QEMU: stop the VM and start it again"
    )]
    MapsTooLong {
        /// QEMU's process.
        pid: i32,
        /// Maximum number that is read.
        limit: usize,
    },
    /// There is no such RAM block, or the pages are outside it.
    #[error(
        "pages {} to {} of RAM block {block} are not among those tracked",
        range.first,
        range.end()
    )]
    OutOfBounds {
        block: usize,
        /// The pages requested.
        range: PageRange,
    },
    /// QEMU has ended.
    #[error("QEMU (process {pid}) has ended: its console log and qemu.log say why")]
    ProcessGone {
        /// QEMU's process.
        pid: i32,
    },
    /// A system call failed.
    #[error("cannot {what} of process {pid}: {source}")]
    Io {
        /// The action that failed.
        what: &'static str,
        /// QEMU's process.
        pid: i32,
        /// The system's error.
        source: io::Error,
    },
}
