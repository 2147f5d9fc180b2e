//! An OVA: its descriptor, disks and manifest are read where they are in the archive.

use std::io;
use std::path::{Path, PathBuf};

use godwit_api::{ApiError, ErrorCode};
use godwit_import::{
    Imported, Kind, MOST_TEXT_BYTES, Manifest, Ova, VmdkImage, ova_members, read_vmdk,
};
use godwit_qemu::OpenFile;

use super::opened::Opened;
use crate::agent::images::foreign::{length_of, read_bytes};

/// Bytes of a file that are read between two chances to end.
const READ_BYTES: usize = 4 << 20;

/// An archive that is open.
pub(super) struct Archive {
    file: OpenFile,
    pub(super) path: PathBuf,
    ova: Ova,
}

/// Reads the descriptor of an archive. The error is the reason.
pub(super) fn load_archive(file: OpenFile, path: &Path) -> Result<(Imported, Archive), String> {
    let failed = |error: io::Error| error.to_string();
    let length = length_of(&file).map_err(failed)?;
    let read = |at: u64, buffer: &mut [u8]| -> io::Result<usize> {
        Ok(rustix::io::pread(&file, buffer, at)?)
    };
    let ova = ova_members(&read, length).map_err(|error| error.to_string())?;
    let descriptor = ova.descriptor();
    let text = read_bytes(&file, descriptor.at, descriptor.bytes).map_err(failed)?;
    let imported = godwit_import::read(Kind::Ovf, &text).map_err(|error| error.to_string())?;
    Ok((imported, Archive { file, path: path.to_owned(), ova }))
}

/// Opens a disk in an archive.
pub(super) fn open_member(archive: &Archive, name: &str) -> Result<Opened, String> {
    let member = archive.ova.member(name).ok_or_else(|| format!("the archive has no {name}"))?;
    let read = |at: u64, buffer: &mut [u8]| -> io::Result<usize> {
        let left = usize::try_from(member.bytes.saturating_sub(at)).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        Ok(rustix::io::pread(&archive.file, &mut buffer[..length], member.at + at)?)
    };
    let image =
        read_vmdk(&read, member.bytes).map_err(|error| format!("cannot use {name}: {error}"))?;
    let VmdkImage::Sparse { .. } = image else {
        return Err(format!("cannot use {name}: it refers to other files"));
    };
    if !member.bytes.is_multiple_of(512) {
        return Err(format!("cannot use {name}: it ends within a sector"));
    }
    let window = Some((member.at, member.bytes));
    let file = archive.file.try_clone().map_err(|error| error.to_string())?;
    Ok(Opened::Foreign { file, driver: "vmdk", window })
}

/// Compares the members of an archive with its manifest.
pub(super) async fn check_manifest(archive: &Archive) -> Result<(), ApiError> {
    let Some(manifest) = archive.ova.manifest() else { return Ok(()) };
    let damaged = |why: String| {
        let message = format!("cannot import {}: {why}", archive.path.display());
        ApiError::new(ErrorCode::InvalidRequest, message, "copy or export the package again")
    };
    let failed = |error: io::Error| damaged(error.to_string());
    let text = read_bytes(&archive.file, manifest.at, manifest.bytes.min(MOST_TEXT_BYTES as u64));
    let text = String::from_utf8_lossy(&text.map_err(failed)?).into_owned();
    let digests = Manifest::parse(&text).map_err(|error| damaged(error.to_string()))?;
    for member in archive.ova.members() {
        let Some((mut digest, wanted)) = digests.check_of(&member.name) else { continue };
        let mut at = 0;
        while at < member.bytes {
            let most = (READ_BYTES as u64).min(member.bytes - at);
            let bytes =
                tokio::task::block_in_place(|| read_bytes(&archive.file, member.at + at, most));
            let bytes = bytes.map_err(failed)?;
            if bytes.is_empty() {
                return Err(damaged(format!("{} is cut", member.name)));
            }
            digest.update(&bytes);
            at += bytes.len() as u64;
            tokio::task::yield_now().await;
        }
        if digest.hex() != wanted {
            return Err(damaged(format!("{} differs from the manifest", member.name)));
        }
    }
    Ok(())
}
