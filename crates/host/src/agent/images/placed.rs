//! Directories of new images: the one that a request names, or the best of the host's directories
//! for VMs by space and latency.

use std::path::{Component, Path, PathBuf};

use godwit_api::{ApiError, CreateDisk, DatastoreInfo, ErrorCode};
use godwit_qemu::{ByteSize, DiskFormat, is_rbd};
use godwit_types::{DatastoreCandidate, choose_datastore};

use super::Place;
use crate::agent::Agent;
use crate::datastores::room;

/// Word of a request for the best directory.
pub(super) const AUTO: &str = "auto";

/// Directory of a new image.
#[derive(Debug)]
pub(super) struct ImageDir {
    pub(super) dir: PathBuf,
    /// Why it was chosen; none: the request named it.
    pub(super) why: Option<String>,
}

impl Agent {
    /// Returns the directory for a new image of so many bytes. `wanted`: a directory; none or
    /// `auto`: the best one.
    pub(super) fn image_dir(&self, wanted: Option<&str>, bytes: u64) -> Result<ImageDir, ApiError> {
        match wanted.filter(|wanted| *wanted != AUTO) {
            None => self.best_dir(bytes),
            Some(dir) if Path::new(dir).is_absolute() => {
                Ok(ImageDir { dir: dir.into(), why: None })
            }
            Some(pool) if is_rbd(Path::new(pool)) => {
                let message = format!("cannot use pool {pool}: the copies of an import are files");
                let remedy =
                    "import into a directory, then use `godwit disk move VM DISK --to POOL`";
                Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
            }
            Some(name) => {
                let message = format!("cannot use datastore {name}: only the manager knows names");
                let remedy = "give its directory, or send the request to the manager";
                Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
            }
        }
    }

    /// Chooses the directory of a new image of which only the name is given; returns why.
    pub(super) fn complete_path(
        &self,
        request: &mut CreateDisk,
    ) -> Result<Option<String>, ApiError> {
        if !is_bare_name(&request.path) {
            return Ok(None);
        }
        let found = self.image_dir(None, request.size.map_or(0, ByteSize::bytes))?;
        request.path = found.dir.join(&request.path);
        Ok(found.why)
    }

    /// Returns the place of an image of a new VM in a directory for VMs.
    pub(super) fn image_place(
        &self,
        dir: &Path,
        vm: &str,
        index: usize,
        format: DiskFormat,
    ) -> Result<Place, ApiError> {
        let number = if index == 0 { String::new() } else { format!("-{index}") };
        let path = dir.join(format!("{vm}{number}.{}", format.name()));
        let place = self.place(&path, "create")?;
        place.check_name()?;
        Ok(place)
    }

    fn best_dir(&self, bytes: u64) -> Result<ImageDir, ApiError> {
        let known = self.datastores.last(&self.config().vm_dirs);
        let described = self.config().vm_dirs.iter().filter_map(|dir| {
            let info = known.get(dir).cloned().or_else(|| unqueried(dir))?;
            Some((dir, candidate(dir, &info)))
        });
        let (dirs, candidates): (Vec<&PathBuf>, Vec<_>) = described.unzip();
        let host = &self.config().name;
        let refuse = |code, why: String, remedy: &str| {
            let message = format!("cannot create a disk on host {host}: {why}");
            Err(ApiError::new(code, message, remedy))
        };
        if candidates.is_empty() {
            let why = "it has none of its vm_dirs".to_owned();
            let remedy = "create one of them, or name others in the agent's configuration";
            return refuse(ErrorCode::NotFound, why, remedy);
        }
        match choose_datastore(&candidates, bytes) {
            Ok(choice) => Ok(ImageDir { dir: dirs[choice.index].clone(), why: Some(choice.why) }),
            Err(why) => {
                refuse(ErrorCode::HostFailed, why, "free space in one, or mount one for writing")
            }
        }
    }
}

/// Returns whether a path is only the name of a file: its directory is to be chosen.
fn is_bare_name(path: &Path) -> bool {
    let mut parts = path.components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}

fn candidate(dir: &Path, info: &DatastoreInfo) -> DatastoreCandidate {
    DatastoreCandidate {
        name: dir.display().to_string(),
        free_bytes: info.free_bytes,
        write_us: info.speed.map(|speed| speed.write_us),
        health: info.health,
        is_shared: info.is_remote(),
        refused: None,
    }
}

/// Describes a directory of which nothing is known yet.
fn unqueried(dir: &Path) -> Option<DatastoreInfo> {
    let room = room(dir).filter(|_| dir.is_dir())?;
    Some(DatastoreInfo {
        total_bytes: room.total_bytes,
        free_bytes: room.free_bytes,
        ..DatastoreInfo::default()
    })
}
