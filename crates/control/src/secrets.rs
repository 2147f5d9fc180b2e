//! Files that contain a secret and nothing else: passwords and keys for programs and services that
//! the manager uses.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Longest secret, bytes.
const MOST_SECRET_BYTES: u64 = 4096;

/// Reads a secret from a file, without the end of its line. Errors are one line, and do not contain
/// it.
pub(crate) fn secret(path: &Path) -> Result<String, String> {
    let failed = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let metadata = fs::metadata(path).map_err(failed)?;
    if metadata.mode() & 0o077 != 0 {
        return Err(format!("{} can be read by others (chmod 600 it)", path.display()));
    }
    if metadata.len() > MOST_SECRET_BYTES {
        return Err(format!("{} is longer than {MOST_SECRET_BYTES} bytes", path.display()));
    }
    let text = fs::read_to_string(path).map_err(failed)?;
    let text = text.trim_end_matches(['\n', '\r']);
    if text.is_empty() {
        return Err(format!("{} is empty", path.display()));
    }
    Ok(text.to_owned())
}
