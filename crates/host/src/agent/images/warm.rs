//! Copies of disks while their guest still runs elsewhere. The first pass copies everything. An
//! incremental pass reads everything and writes what differs. The final pass follows the guest's
//! shutdown; then the VM is created with the copies. Sources are NBD exports and raw files.
//!
//! Between passes the copies are raw images with the names that the VM's disks will have. They are
//! of no use to a guest: each block is of another moment.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use godwit_api::{ApiError, CreateVm, ErrorCode, WarmImport, WarmStep};
use godwit_import::SourceFormat;
use godwit_nbd::{NbdExport, parse_nbd};
use godwit_qemu::{Disk, DiskFormat, OpenFile, VmName, VmSpec};
use rustix::fs::OFlags;
use tokio::sync::Semaphore;

use super::foreign::{format_of, length_of, read_bytes};
use super::in_work::WriteClaim;
use super::nbd_link::NbdLink;
use super::placed::AUTO;
use super::staged::{name_all, named_images};
use super::{COPIES, NewImages, Place, allocated_bytes};
use crate::agent::Agent;
use crate::agent::vm_files::FileRule;
use crate::failure::spec_refused;
use crate::jobs::Job;

/// Bytes that are read at once.
const READ_BYTES: usize = 2 << 20;
/// Bytes that are compared, and written if they differ.
const BLOCK_BYTES: usize = 64 << 10;
/// Most disks that are copied from servers at once.
const MOST_FROM_SERVERS: usize = 4;

/// Places for copies from servers: a slow server delays no other work on images.
static FROM_SERVERS: Semaphore = Semaphore::const_new(MOST_FROM_SERVERS);

/// A disk that is copied while its guest runs.
pub(super) enum WarmSource {
    Nbd(NbdExport<NbdLink>),
    File(OpenFile, u64),
}

impl WarmSource {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            WarmSource::Nbd(export) => export.bytes(),
            WarmSource::File(_, bytes) => *bytes,
        }
    }

    fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> Result<(), String> {
        match self {
            WarmSource::Nbd(export) => {
                export.stream_mut().begin();
                export.read_at(at, buffer).map_err(|error| error.to_string())
            }
            WarmSource::File(file, _) => {
                let bytes = read_bytes(file, at, buffer.len() as u64);
                let bytes = bytes.map_err(|error| error.to_string())?;
                // A file that has become shorter is not a disk of that size.
                if bytes.len() != buffer.len() {
                    return Err("it has become shorter".to_owned());
                }
                buffer.copy_from_slice(&bytes);
                Ok(())
            }
        }
    }
}

/// Copies that a pass has completed. While this exists they are not deleted, no other pass writes
/// them, and no VM but their own gets them.
pub(super) struct HeldCopies {
    claims: Vec<WriteClaim>,
    /// Copies that are locked as QEMU does; none after the first pass.
    locked: Vec<File>,
}

impl HeldCopies {
    fn reserve_for(&self, vm: &str) {
        self.claims.iter().for_each(|claim| claim.reserve_for(vm));
    }

    /// Lets a QEMU lock them.
    fn unlock(&mut self) {
        self.locked.clear();
    }
}

impl Agent {
    /// Opens a source: an NBD URI, or the path of a raw image.
    pub(super) fn open_warm(
        &self,
        job: &Job,
        source: &str,
        rule: FileRule,
    ) -> Result<WarmSource, ApiError> {
        let failed = |why: String| {
            let message = format!("cannot read {source}: {why}");
            let remedy = "give nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH, or a path";
            ApiError::new(ErrorCode::InvalidRequest, message, remedy)
        };
        let opened = match parse_nbd(source) {
            Some(_) if rule != FileRule::Operator => {
                let message = format!("cannot read {source}: only an admin may");
                return Err(ApiError::new(ErrorCode::Forbidden, message, "give a path"));
            }
            Some((address, export)) => {
                let cancelled = job.cancelled();
                let link = tokio::task::block_in_place(|| NbdLink::connect(&address, cancelled));
                let link = link.map_err(|error| failed(error.to_string()))?;
                let export = tokio::task::block_in_place(|| NbdExport::open(link, &export));
                WarmSource::Nbd(export.map_err(|error| failed(error.to_string()))?)
            }
            None if !source.starts_with('/') => return Err(failed("invalid source".to_owned())),
            None => {
                let file = self.open_any(Path::new(source), rule)?;
                match format_of(&file) {
                    Ok(SourceFormat::Raw) => {}
                    Ok(format) => {
                        return Err(failed(format!("it is in {} format, not raw", format.name())));
                    }
                    Err(why) => return Err(failed(why)),
                }
                let bytes = length_of(&file).map_err(|error| failed(error.to_string()))?;
                WarmSource::File(file, bytes)
            }
        };
        godwit_qemu::check_image_bytes(opened.bytes()).map_err(failed)?;
        Ok(opened)
    }

    /// Runs one pass over all disks. Returns the copies, which nothing else uses yet.
    pub(super) async fn warm_pass(
        &self,
        job: &Job,
        spec: &mut VmSpec,
        warm: &WarmImport,
        sources: &mut [WarmSource],
        datastore: Option<&str>,
    ) -> Result<HeldCopies, ApiError> {
        let mut places = Vec::new();
        // The passes of an import must find the same place.
        let first = || self.config().vm_dirs.iter().find(|dir| dir.is_dir()).cloned();
        let datastore = datastore.filter(|wanted| *wanted != AUTO);
        let dir = match (datastore, first()) {
            (None, Some(dir)) => dir,
            (wanted, _) => self.image_dir(wanted, 0)?.dir,
        };
        for index in 0..sources.len() {
            places.push(self.image_place(&dir, &spec.name, index, DiskFormat::Raw)?);
        }
        for (disk, place) in spec.disks.iter_mut().zip(&places) {
            *disk = Disk { path: place.path.clone(), format: DiskFormat::Raw, ..disk.clone() };
        }
        let claims = places.iter().map(Place::claim).collect::<Result<Vec<_>, _>>()?;
        if warm.step != WarmStep::Copy {
            let mut copies = Vec::new();
            for (place, source) in places.iter().zip(sources.iter()) {
                copies.push(self.open_copy(place, source.bytes())?);
            }
            for ((place, source), file) in places.iter().zip(sources.iter_mut()).zip(&copies) {
                copy(job, place, source, file).await?;
                let synced = tokio::task::block_in_place(|| file.sync_all());
                synced.map_err(|error| place.failed("write", &error))?;
            }
            return Ok(HeldCopies { claims, locked: copies });
        }
        let mut staged = Vec::new();
        for (place, source) in places.iter().zip(sources.iter_mut()) {
            if place.exists() {
                return Err(place.taken());
            }
            let file = place.stage().map_err(|error| place.failed("create", &error))?;
            if let WarmSource::File(source, bytes) = &*source {
                let taken =
                    allocated_bytes(source).map_err(|error| place.failed("create", &error))?;
                file.check_room_for(taken.min(*bytes))?;
            }
            file.write(DiskFormat::Raw, source.bytes(), None)?;
            copy(job, place, source, &file.file).await?;
            staged.push(file);
        }
        let named = name_all(staged);
        let images = named_images(places, named)?;
        for place in &images.0 {
            let file = place.open(OFlags::RDONLY);
            let noted = file.and_then(|file| self.warm_notes().add(&file, &place.real));
            noted.map_err(|error| place.failed("create the note about", &error))?;
        }
        images.keep();
        Ok(HeldCopies { claims, locked: Vec::new() })
    }

    /// Creates and starts the VM of a warm import after the final pass. If that fails, the copies
    /// stay. They are in work until the VM has them, or is removed again.
    pub(super) async fn cut_over(
        self: &Arc<Self>,
        job: &Job,
        create: CreateVm,
        mut copies: HeldCopies,
    ) -> Result<(), ApiError> {
        let name = VmName::new(create.spec.name.as_str()).map_err(|error| spec_refused(&error))?;
        let disks = create.spec.disks.clone();
        copies.reserve_for(&name);
        self.create(create).await?;
        copies.unlock();
        self.start_created(&name, NewImages::default()).await?.keep();
        for disk in &disks {
            if let Ok(place) = self.place(&disk.path, "use") {
                self.forget_copy(&place);
            }
        }
        tracing::info!(vm = name.as_str(), "imported");
        let vm = self.vm_info(&name)?;
        job.set(|status| status.vm = Some(vm));
        Ok(())
    }

    /// Removes the note about a warm copy: from now on it is an image as any.
    pub(super) fn forget_copy(&self, place: &Place) {
        let file = place.open(OFlags::RDONLY);
        if let Err(error) = file.and_then(|file| self.warm_notes().remove(&file)) {
            tracing::warn!(path = %place.path.display(), %error, "the note of a warm copy stays");
        }
    }

    /// Opens the copy that an earlier pass made, and locks it as QEMU does, until it is dropped.
    fn open_copy(&self, place: &Place, bytes: u64) -> Result<File, ApiError> {
        let failed = |error: io::Error| place.failed("write", &error);
        let refused = |code, why: &str, remedy| Err(place.refused("write", code, why, remedy));
        if let Some((vm, _)) = self.users_of_file(&place.real).first() {
            let why = format!("VM \"{vm}\" uses it");
            return refused(ErrorCode::WrongState, &why, "the import is done already");
        }
        let file = place.open(OFlags::RDWR).map_err(failed)?;
        if !self.warm_notes().has(&file, &place.real).map_err(failed)? {
            let why = "it is not known as a warm copy that this host made";
            let remedy = "start with a first pass, under another name (--name) if a VM uses it";
            return refused(ErrorCode::WrongState, why, remedy);
        }
        if !godwit_ram::lock_image(&file).map_err(failed)? {
            let remedy = "find the program, such as a QEMU on this or another host";
            return refused(ErrorCode::Busy, "another program uses it", remedy);
        }
        let length = file.metadata().map_err(failed)?.len();
        if length != bytes {
            let why = format!("it has {length} bytes, and its source has {bytes}");
            return refused(ErrorCode::WrongState, &why, "delete it, and start with a first pass");
        }
        Ok(file)
    }
}

/// Copies what differs.
async fn copy(
    job: &Job,
    place: &Place,
    source: &mut WarmSource,
    target: &File,
) -> Result<(), ApiError> {
    let turns = match source {
        WarmSource::Nbd(_) => &FROM_SERVERS,
        WarmSource::File(..) => &COPIES,
    };
    let _turn = turns.acquire().await;
    let (mut at, bytes) = (0, source.bytes());
    let mut buffers = (vec![0; READ_BYTES], vec![0; READ_BYTES]);
    while at < bytes {
        let length = usize::try_from(bytes - at).unwrap_or(READ_BYTES).min(READ_BYTES);
        let (new, old) = (&mut buffers.0[..length], &mut buffers.1[..length]);
        if let Err(why) = tokio::task::block_in_place(|| source.read_at(at, new)) {
            // A request to end is the reason then.
            tokio::task::yield_now().await;
            let message = format!("cannot read the source of {}: {why}", place.path.display());
            let remedy = "check the server, then try again";
            return Err(ApiError::new(ErrorCode::HostFailed, message, remedy));
        }
        let written = tokio::task::block_in_place(|| {
            let written = target.read_exact_at(old, at).and_then(|()| update(target, at, new, old));
            written.map_err(|error| place.failed("write", &error))
        })?;
        if written > 0 {
            place.check_growth(target)?;
        }
        at += length as u64;
        job.set(|status| {
            status.done_bytes += length as u64;
            status.written_bytes += written;
        });
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// Writes the blocks that differ; returns their bytes.
fn update(target: &File, at: u64, new: &[u8], old: &[u8]) -> io::Result<u64> {
    let mut written = 0;
    let blocks = new.chunks(BLOCK_BYTES).zip(old.chunks(BLOCK_BYTES));
    for (index, (new, old)) in blocks.enumerate() {
        if new != old {
            target.write_all_at(new, at + (index * BLOCK_BYTES) as u64)?;
            written += new.len() as u64;
        }
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_that_differ_are_written() {
        let target = tempfile::tempfile().unwrap();
        let old = vec![7; 3 * BLOCK_BYTES + 512];
        target.write_all_at(&old, 0).unwrap();
        let mut new = old.clone();
        new[BLOCK_BYTES + 5] = 1;
        new[3 * BLOCK_BYTES + 511] = 2;
        let written = update(&target, 0, &new, &old).unwrap();
        assert_eq!(written, BLOCK_BYTES as u64 + 512);
        let mut found = vec![0; new.len()];
        target.read_exact_at(&mut found, 0).unwrap();
        assert!(found == new);
        assert_eq!(update(&target, 0, &new, &found).unwrap(), 0);
    }
}
