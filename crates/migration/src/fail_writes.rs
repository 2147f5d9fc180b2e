//! Injected write failures, for tests of faults with real agents. Off unless the environment
//! variable [`VARIABLE`] names a directory. Then a write of a kind fails while the file `fail/KIND`
//! exists there, with the error in that file: `EIO` or `ENOSPC`, followed by `once` for a single
//! failure. The file `failed/KIND` shows that it has failed.
//!
//! A hook for tests, like [`crate::hold`]: no part of an agent may depend on it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::io::Errno;

/// Environment variable that names the directory.
pub const VARIABLE: &str = "GODWIT_FAIL_WRITES";

/// Returns the injected error of a write, if there is one. Call it before each write.
///
/// # Errors
/// A test has this kind of write fail.
pub fn check(kind: &str) -> io::Result<()> {
    static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| std::env::var_os(VARIABLE).map(PathBuf::from));
    directory.as_deref().map_or(Ok(()), |directory| check_in(directory, kind))
}

fn check_in(directory: &Path, kind: &str) -> io::Result<()> {
    let plan = directory.join("fail").join(kind);
    let Ok(text) = std::fs::read_to_string(&plan) else { return Ok(()) };
    let mut words = text.split_whitespace();
    let errno = match words.next() {
        Some("EIO") => Errno::IO,
        Some("ENOSPC") => Errno::NOSPC,
        // The test is just writing the file, or removing it.
        _ => return Ok(()),
    };
    if words.next() == Some("once") {
        std::fs::remove_file(&plan)?;
    }
    tracing::info!(kind, %errno, "injected write failure");
    if let Err(error) = std::fs::write(directory.join("failed").join(kind), "") {
        tracing::warn!(kind, %error, "cannot report the injected failure");
    }
    Err(errno.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_planned_writes_fail_and_as_often_as_planned() {
        let directory = tempfile::tempdir().unwrap();
        for folder in ["fail", "failed"] {
            std::fs::create_dir(directory.path().join(folder)).unwrap();
        }
        let plan = directory.path().join("fail/handing-over");
        let failed = directory.path().join("failed/handing-over");
        let check =
            |kind: &str| check_in(directory.path(), kind).map_err(|error| error.raw_os_error());
        check("handing-over").unwrap();
        std::fs::write(&plan, "ENOSPC").unwrap();
        for _ in 0..2 {
            assert_eq!(check("handing-over"), Err(Some(Errno::NOSPC.raw_os_error())));
        }
        check("owner").unwrap();
        assert!(failed.exists() && !directory.path().join("failed/owner").exists());
        std::fs::write(&plan, "EIO once").unwrap();
        assert_eq!(check("handing-over"), Err(Some(Errno::IO.raw_os_error())));
        check("handing-over").unwrap();
        // Without the variable no write fails.
        std::fs::write(&plan, "ENOSPC").unwrap();
        super::check("handing-over").unwrap();
    }
}
