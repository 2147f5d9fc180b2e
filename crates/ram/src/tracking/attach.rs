//! From a process and its RAM files to a tracker: every check that must hold, in the order of what is most likely wrong.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use super::maps::{BlockMappings, Mapping, mappings_of, segments_of};
use super::pagemap::{EMPTY_RUN, Pagemap, Scan};
use super::uffd::Userfaultfd;
use super::{Block, DirtyTracker, RUNS_A_SCAN, check_kernel, io_or_gone, library};
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
    let lowest = blocks.iter().flat_map(|block| &block.mappings).map(|mapping| mapping.address).min();
    let tracker = DirtyTracker {
        pid,
        tracker_socket: tracker_socket.to_owned(),
        vcpus: Vec::new(),
        userfaultfd,
        throttle: None,
        pagemap,
        blocks,
        untracked_address: lowest.unwrap_or(1 << 30).saturating_sub(PAGE_SIZE),
        runs: vec![EMPTY_RUN; RUNS_A_SCAN],
    };
    for (block, region) in tracker.blocks.iter().zip(regions) {
        for mapping in &block.mappings {
            register(&tracker, mapping, region)?;
        }
    }
    Ok(tracker)
}

/// To be opened before anything else: it holds on to the address space, should the pid be given to another process meanwhile.
pub(crate) fn open_pagemap(pid: i32) -> Result<Pagemap, TrackError> {
    Pagemap::open(&pid.to_string()).map_err(|errno| match errno {
        Errno::NOENT | Errno::SRCH => TrackError::ProcessGone { pid },
        _ => io_or_gone("open the page map", pid, errno),
    })
}

/// Where process `pid` maps each region, and how that cuts the region.
pub(crate) fn find_blocks(pid: i32, regions: &[Arc<Region>]) -> Result<Vec<BlockMappings>, TrackError> {
    let maps = read_maps(pid)?;
    regions.iter().map(|region| find_block(&maps, pid, region)).collect()
}

/// /proc/PID/maps, whose numbers and paths are read; bytes that are no text can only be in a path.
fn read_maps(pid: i32) -> Result<String, TrackError> {
    let gone = TrackError::ProcessGone { pid };
    match std::fs::read(format!("/proc/{pid}/maps")) {
        // A zombie has no address space.
        Ok(maps) if maps.is_empty() => Err(gone),
        Ok(maps) => Ok(String::from_utf8_lossy(&maps).into_owned()),
        Err(source) if source.kind() == io::ErrorKind::NotFound => Err(gone),
        Err(source) if source.raw_os_error() == Some(libc::ESRCH) => Err(gone),
        Err(source) => Err(TrackError::Io { what: "read the mappings", pid, source }),
    }
}

fn find_block(maps: &str, pid: i32, region: &Region) -> Result<BlockMappings, TrackError> {
    let path = || region.path().to_owned();
    if !region.is_on_tmpfs() {
        return Err(TrackError::NotTrackable { path: path() });
    }
    let found = mappings_of(maps, region.file_id(), region.all_pages());
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
    tracker.userfaultfd.register(mapping.address, mapping.count * PAGE_SIZE).map_err(
        |errno| match errno {
            Errno::BUSY => TrackError::AlreadyTracked { path: region.path().to_owned() },
            // The file is of a kind that can be registered, so what is at this address over there is something else.
            Errno::INVAL => TrackError::WrongProcess { pid },
            _ => io_or_gone("register the RAM", pid, errno),
        },
    )?;
    // The userfaultfd acts on the process that answered, the page map shows the process that was named: are they one?
    let mut run = [EMPTY_RUN];
    match tracker.pagemap.scan(Scan::Look, mapping.address, mapping.address + PAGE_SIZE, 0, &mut run) {
        Ok(_) => Ok(()),
        Err(Errno::PERM) => Err(TrackError::WrongProcess { pid }),
        Err(errno) => Err(io_or_gone("scan the page map", pid, errno)),
    }
}
