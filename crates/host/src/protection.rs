//! This host's certificate and the revoked certificates, as in their files now. A renewed
//! certificate and a new list take effect without a restart.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use godwit_api::{ApiError, ErrorCode, RevocationsTaken};
use godwit_pki::{Identity, MOST_LIST_BYTES, PkiError, RevocationList, Revocations, Serial};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::config::TlsConfig;
use crate::failure::host_failed;

/// The list that a manager sent last: `STATE_DIR/revoked.pem`.
const LIST: &str = "revoked.pem";

/// A host's identity and the files that hold it.
#[derive(Debug)]
pub(crate) struct Protection {
    files: TlsConfig,
    list: PathBuf,
    revocations: Revocations,
    /// Notified whenever a list changes.
    lists: watch::Sender<()>,
    known: Mutex<LoadedFiles>,
}

#[derive(Debug)]
struct LoadedFiles {
    /// Modification time of the certificate when last read.
    changed: Option<SystemTime>,
    /// Modification time of the configured list when last read.
    list_changed: Option<SystemTime>,
    identity: Identity,
}

impl Protection {
    /// Reads the files, and the list that a manager sent earlier.
    ///
    /// # Errors
    /// [`PkiError`]: what is wrong with the files. An invalid list of a manager is ignored.
    pub(crate) fn load(files: &TlsConfig, state_dir: &Path) -> Result<Protection, PkiError> {
        let (revocations, list) = (Revocations::default(), state_dir.join(LIST));
        let (changed, list_changed) = (changed(&files.certificate), configured_change(files));
        revocations.configure(configured(files)?);
        match read_list(&list, &files.authority) {
            Ok(kept) => drop(kept.map(|kept| revocations.accept(kept))),
            Err(error) => {
                tracing::warn!(list = %list.display(), %error, "revocation list ignored");
            }
        }
        let identity = read(files, &revocations)?;
        let known = Mutex::new(LoadedFiles { changed, list_changed, identity });
        Ok(Protection {
            files: files.clone(),
            list,
            revocations,
            lists: watch::Sender::new(()),
            known,
        })
    }

    /// Returns the identity that is in the files, or the last valid one while they cannot be read.
    #[must_use]
    pub(crate) fn identity(&self) -> Identity {
        let mut known = self.known.lock();
        let changed = changed(&self.files.certificate);
        if changed != known.changed {
            match read(&self.files, &self.revocations) {
                Ok(identity) => {
                    let certificate = self.files.certificate.display();
                    tracing::info!(%certificate, "new certificate loaded");
                    (known.changed, known.identity) = (changed, identity);
                }
                // The file may be incomplete; the next connection tries again.
                Err(error) => tracing::warn!(%error, "cannot load the new certificate"),
            }
        }
        let list_changed = configured_change(&self.files);
        if list_changed != known.list_changed {
            match configured(&self.files) {
                Ok(list) => {
                    tracing::info!(?list, "configured revocation list loaded");
                    self.revocations.configure(list);
                    known.list_changed = list_changed;
                    self.lists.send_replace(());
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot load the configured revocation list");
                }
            }
        }
        known.identity.clone()
    }

    /// Replaces the manager's list. Once this returns, the list is on disk; it applies from the
    /// next handshake on.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`]: the list is not signed by an authority trusted here.
    /// [`ErrorCode::WrongState`]: a later list is already loaded. [`ErrorCode::HostFailed`]: the
    /// list cannot be written. In each case the old list stays.
    pub(crate) fn revoke(&self, list: &str) -> Result<RevocationsTaken, ApiError> {
        let list =
            RevocationList::read(list, &self.files.authority).map_err(|error| refused(&error))?;
        let taken = RevocationsTaken { number: list.number(), certificates: list.revoked().len() };
        // One at a time, so that the list on disk is the one in force.
        let _alone = self.known.lock();
        if self.revocations.check_newer(&list).map_err(|error| refused(&error))? {
            replace(&self.list, list.pem())
                .map_err(|error| host_failed("cannot write the revocation list", &error))?;
            tracing::info!(?list, "revocation list loaded");
            self.revocations.accept(list).map_err(|error| refused(&error))?;
            self.lists.send_replace(());
        }
        Ok(taken)
    }

    /// Waits until a certificate is revoked.
    pub(crate) async fn until_revoked(&self, serial: &Serial) {
        let mut lists = self.lists.subscribe();
        while !self.revocations.has(serial) {
            // Cannot fail: `self` owns the sender.
            let _ = lists.changed().await;
        }
    }
}

fn refused(error: &PkiError) -> ApiError {
    let code = match error {
        PkiError::OldList { .. } => ErrorCode::WrongState,
        PkiError::BadList { .. } => ErrorCode::InvalidRequest,
        _ => ErrorCode::HostFailed,
    };
    let remedy = "sign a new list with the manager or `godwit pki crl`";
    ApiError::new(code, error.to_string(), remedy)
}

fn read(files: &TlsConfig, revocations: &Revocations) -> Result<Identity, PkiError> {
    Identity::load_with(&files.authority, &files.certificate, &files.key, revocations)
}

/// Reads the list that the configuration names; `None` if it names none.
fn configured(files: &TlsConfig) -> Result<Option<RevocationList>, PkiError> {
    let Some(path) = &files.revoked else { return Ok(None) };
    match read_list(path, &files.authority)? {
        Some(list) => Ok(Some(list)),
        None => {
            let source = io::Error::from(io::ErrorKind::NotFound);
            Err(PkiError::File { path: path.clone(), action: "read", source })
        }
    }
}

/// Reads a list from a file; `None` if there is no file.
fn read_list(path: &Path, authority: &Path) -> Result<Option<RevocationList>, PkiError> {
    let failed = |source| PkiError::File { path: path.to_owned(), action: "read", source };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(data) if data.len() > MOST_LIST_BYTES as u64 => {
            return Err(PkiError::BadList { why: format!("{} is too long", path.display()) });
        }
        Ok(_) | Err(_) => {}
    }
    RevocationList::read(&fs::read_to_string(path).map_err(failed)?, authority).map(Some)
}

/// Replaces a file; the new one survives a power cut.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let fresh = path.with_extension("pem.new");
    let mut file = File::create(&fresh)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

fn changed(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|data| data.modified()).ok()
}

fn configured_change(files: &TlsConfig) -> Option<SystemTime> {
    files.revoked.as_deref().and_then(changed)
}
