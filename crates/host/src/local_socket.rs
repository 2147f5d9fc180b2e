//! Unix sockets that only this process's user may use.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use tokio::net::UnixListener;

/// Binds a socket, in place of one that a killed process left. It is bound under a temporary name,
/// so that no one connects before its mode is set.
pub(crate) fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(parent) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    }
    let fresh = path.with_extension("new");
    let _ = fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh)?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))?;
    fs::rename(&fresh, path)?;
    Ok(listener)
}

/// Whether a caller with this user number may use such a socket: root and this process's own user.
pub(crate) fn admits(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}
