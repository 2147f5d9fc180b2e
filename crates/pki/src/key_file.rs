//! Files of private keys.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{PkiError, file_error};

/// Refuses a key that users other than this program's user and root may read or replace.
pub(crate) fn check_key(path: &Path) -> Result<(), PkiError> {
    let data = std::fs::metadata(path).map_err(file_error(path, "read"))?;
    let (mode, uid, expected) =
        (data.mode() & 0o7777, data.uid(), rustix::process::geteuid().as_raw());
    if mode & 0o077 == 0 && (uid == expected || uid == 0) {
        return Ok(());
    }
    Err(PkiError::OpenKey { path: path.to_owned(), mode, uid, expected })
}
