//! Files of other platforms: opened by path, read as bytes, their formats found.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use godwit_api::ApiError;
use godwit_import::SourceFormat;
use godwit_qemu::{DiskFormat, FoundFile, ImageError, OpenFile, OpenFiles, image_head};

use crate::agent::Agent;
use crate::agent::vm_files::FileRule;
use crate::failure::image_unusable;

impl Agent {
    /// Opens a file that the caller names, without a look at its content.
    pub(super) fn open_any(&self, path: &Path, rule: FileRule) -> Result<OpenFile, ApiError> {
        let may_open = |file: &FoundFile| rule.allows(file, &self.config().vm_dirs);
        OpenFiles::open_foreign(path, &may_open).map_err(|error| image_unusable(&error))
    }
}

/// Returns the length of a file or block device.
pub(super) fn length_of(file: &OpenFile) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// Reads up to `most` bytes.
pub(super) fn read_bytes(file: &OpenFile, at: u64, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(most).map_err(io::Error::other)?];
    let mut length = 0;
    while length < bytes.len() {
        match rustix::io::pread(file, &mut bytes[length..], at + length as u64)? {
            0 => break,
            read => length += read,
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

/// Finds the format of an image by its header, where the definition names none.
pub(super) fn format_of(file: &OpenFile) -> Result<SourceFormat, String> {
    let file = file.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    match image_head(&file.into()) {
        Ok(head) => Ok(match head.format {
            DiskFormat::Raw => SourceFormat::Raw,
            DiskFormat::Qcow2 => SourceFormat::Qcow2,
        }),
        Err(ImageError::NotRaw { format }) => SourceFormat::named(format)
            .ok_or_else(|| format!("its format {format} cannot be imported")),
        Err(error) => Err(error.to_string()),
    }
}
