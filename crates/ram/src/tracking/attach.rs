//! Attaches a tracker to a process and its RAM files: every check that must hold, the most likely
//! obstacles first.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use super::ahead::Ahead;
use super::block::Block;
use super::cores::ScanCores;
use super::kernel::io_or_gone;
use super::maps::{
    BlockMappings, FileMappings, MOST_LINES, MOST_PLACES, Mapping, MapsError, WantedFile,
    read_mappings, segments_of,
};
use super::pagemap::{EMPTY_RUN, Pagemap, Scan};
use super::uffd::Userfaultfd;
use super::{DirtyTracker, RUNS_A_SCAN, check_kernel, library};
use crate::error::TrackError;
use crate::pages::PAGE_SIZE;
use crate::region::Region;

pub(super) fn attach(
    tracker_socket: &Path,
    pid: i32,
    regions: &[Arc<Region>],
) -> Result<DirtyTracker, TrackError> {
    check_kernel()?;
    let pagemap = open_pagemap(pid)?;
    let found = find_blocks(pid, regions)?.into_iter().zip(regions);
    let blocks: Vec<Block> = found
        .map(|(BlockMappings { mappings, segments }, region)| Block {
            pages: region.all_pages(),
            region: Arc::clone(region),
            mappings,
            segments,
        })
        .collect();
    let userfaultfd = Userfaultfd::new(library::request_userfaultfd(tracker_socket)?.0);
    userfaultfd.enable_tracking()?;

    // From here on, dropping the tracker undoes what was registered.
    let lowest =
        blocks.iter().flat_map(|block| &block.mappings).map(|mapping| mapping.address).min();
    let tracker = DirtyTracker {
        pid,
        tracker_socket: tracker_socket.to_owned(),
        vcpus: Vec::new(),
        userfaultfd,
        by_faults: false,
        sync_memory: None,
        pagemap,
        blocks,
        untracked_address: lowest.unwrap_or(1 << 30).saturating_sub(PAGE_SIZE),
        runs: vec![EMPTY_RUN; RUNS_A_SCAN],
        ahead: Ahead::default(),
        cores: ScanCores::of_this_machine(),
        is_stopping: false,
    };
    for (block, region) in tracker.blocks.iter().zip(regions) {
        for mapping in &block.mappings {
            register(&tracker, mapping, region)?;
        }
    }
    Ok(tracker)
}

/// Opens the page map. Call it before anything else: it holds on to the address space in case the
/// pid is reused meanwhile.
pub(crate) fn open_pagemap(pid: i32) -> Result<Pagemap, TrackError> {
    Pagemap::open(&pid.to_string()).map_err(|errno| match errno {
        Errno::NOENT | Errno::SRCH => TrackError::ProcessGone { pid },
        _ => io_or_gone("open the page map", pid, errno),
    })
}

/// Returns where process `pid` maps each region, and how the mappings divide the region.
pub(crate) fn find_blocks(
    pid: i32,
    regions: &[Arc<Region>],
) -> Result<Vec<BlockMappings>, TrackError> {
    if let Some(region) = regions.iter().find(|region| !region.is_on_tmpfs()) {
        return Err(TrackError::NotTrackable { path: region.path().to_owned() });
    }
    let found = read_maps(pid, regions)?;
    found.into_iter().zip(regions).map(|(found, region)| block_of(found, pid, region)).collect()
}

/// Reads /proc/PID/maps, within the bounds of [`read_mappings`].
fn read_maps(pid: i32, regions: &[Arc<Region>]) -> Result<Vec<FileMappings>, TrackError> {
    let wanted =
        |region: &Arc<Region>| WantedFile { id: region.file_id(), pages: region.all_pages() };
    let wanted: Vec<WantedFile> = regions.iter().map(wanted).collect();
    let maps = File::open(format!("/proc/{pid}/maps")).map_err(MapsError::Io);
    let found = maps.and_then(|maps| read_mappings(BufReader::new(maps), &wanted));
    found.map_err(|error| match error {
        MapsError::Empty => TrackError::ProcessGone { pid },
        MapsError::Io(source)
            if source.kind() == io::ErrorKind::NotFound
                || source.raw_os_error() == Some(libc::ESRCH) =>
        {
            TrackError::ProcessGone { pid }
        }
        MapsError::Io(source) => TrackError::Io { what: "read the mappings", pid, source },
        MapsError::TooManyPlaces(block) => {
            let path = regions[block].path().to_owned();
            TrackError::TooManyPlaces { pid, path, limit: MOST_PLACES }
        }
        MapsError::TooLong => TrackError::MapsTooLong { pid, limit: MOST_LINES },
    })
}

fn block_of(found: FileMappings, pid: i32, region: &Region) -> Result<BlockMappings, TrackError> {
    let path = || region.path().to_owned();
    if found.shared.is_empty() {
        return Err(match found.private {
            0 => TrackError::NotMapped { pid, path: path() },
            _ => TrackError::NotShared { pid, path: path() },
        });
    }
    let segments = segments_of(&found.shared);
    Ok(BlockMappings { mappings: found.shared, segments })
}

fn register(tracker: &DirtyTracker, mapping: &Mapping, region: &Region) -> Result<(), TrackError> {
    let pid = tracker.pid;
    tracker.userfaultfd.register(mapping.address, mapping.count * PAGE_SIZE).map_err(|errno| {
        match errno {
            Errno::BUSY => TrackError::AlreadyTracked { path: region.path().to_owned() },
            // This kind of file can be registered, so another kind of mapping is at this address in
            // the process.
            Errno::INVAL => TrackError::WrongProcess { pid },
            _ => io_or_gone("register the RAM", pid, errno),
        }
    })?;
    // The userfaultfd acts on the process that answered, and the page map shows the process that
    // was named: verify that they are one.
    let mut run = [EMPTY_RUN];
    match tracker.pagemap.scan(
        Scan::Look,
        mapping.address,
        mapping.address + PAGE_SIZE,
        0,
        &mut run,
    ) {
        Ok(_) => Ok(()),
        Err(Errno::PERM) => Err(TrackError::WrongProcess { pid }),
        Err(errno) => Err(io_or_gone("scan the page map", pid, errno)),
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "maps a file many times, as a hostile QEMU would")]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_maps_alternate_pages_of_its_memory_is_refused() {
        const MAPPINGS: u64 = 12_000;
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let region =
            Region::create(&folder.path().join("ram"), 2 * MAPPINGS * PAGE_SIZE, None).unwrap();
        if !region.is_on_tmpfs() {
            return eprintln!("skipped: /dev/shm is not a tmpfs");
        }
        let page = usize::try_from(PAGE_SIZE).unwrap();
        let map = |number: u64| {
            let (prot, flags) = (libc::PROT_READ, libc::MAP_SHARED);
            let (fd, offset) = (
                std::os::fd::AsRawFd::as_raw_fd(region.file()),
                i64::try_from(2 * number * PAGE_SIZE).unwrap(),
            );
            // SAFETY: a new mapping, at an address that the kernel chooses, that is never read.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), page, prot, flags, fd, offset) };
            assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
            at
        };
        let mapped: Vec<_> = (0..MAPPINGS).map(map).collect();
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let refused = find_blocks(pid, &[Arc::new(region)]).unwrap_err();
        assert!(
            matches!(refused, TrackError::TooManyPlaces { limit: MOST_PLACES, .. }),
            "{refused}"
        );
        for at in mapped {
            // SAFETY: the mapping was made above, and nothing else knows it.
            unsafe { libc::munmap(at, page) };
        }
    }
}
