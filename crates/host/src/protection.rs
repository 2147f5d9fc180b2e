//! This host's certificate, as its files hold it now, and the certificates that are revoked: a renewed certificate and a
//! new list are taken without a restart.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use godwit_api::{ApiError, ErrorCode, RevocationsTaken};
use godwit_pki::{Identity, MOST_LIST_BYTES, PkiError, RevocationList, Revocations, Serial};
use tokio::sync::watch;

use crate::config::TlsConfig;
use crate::failure::host_failed;

/// The list that a manager sent last: `STATE_DIR/revoked.pem`.
const LIST: &str = "revoked.pem";

/// A host's identity and the files that it is read from.
#[derive(Debug)]
pub(crate) struct Protection {
    files: TlsConfig,
    list: PathBuf,
    revocations: Revocations,
    /// Notified whenever a list changes.
    lists: watch::Sender<()>,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    /// The time of the certificate's last change, as last read.
    changed: Option<SystemTime>,
    /// The same of the configured list.
    list_changed: Option<SystemTime>,
    identity: Identity,
}

impl Protection {
    /// Reads the files, and the list that a manager sent before.
    ///
    /// # Errors
    /// [`PkiError`]: what is wrong with the files. A list of a manager that is not good any more is left out.
    pub(crate) fn load(files: &TlsConfig, state_dir: &Path) -> Result<Protection, PkiError> {
        let (revocations, list) = (Revocations::default(), state_dir.join(LIST));
        let (changed, list_changed) = (changed(&files.certificate), configured_change(files));
        revocations.configure(configured(files)?);
        match read_list(&list, &files.authority) {
            Ok(kept) => drop(kept.map(|kept| revocations.accept(kept))),
            Err(error) => {
                tracing::warn!(list = %list.display(), %error, "the list of revoked certificates is left out");
            }
        }
        let identity = read(files, &revocations)?;
        let known = Mutex::new(Known { changed, list_changed, identity });
        Ok(Protection {
            files: files.clone(),
            list,
            revocations,
            lists: watch::Sender::new(()),
            known,
        })
    }

    /// The identity as the files have it; as they had it, while they can't be read.
    #[must_use]
    pub(crate) fn identity(&self) -> Identity {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = changed(&self.files.certificate);
        if changed != known.changed {
            match read(&self.files, &self.revocations) {
                Ok(identity) => {
                    tracing::info!(certificate = %self.files.certificate.display(), "a new certificate is taken");
                    (known.changed, known.identity) = (changed, identity);
                }
                // Half written: the next connection looks again.
                Err(error) => tracing::warn!(%error, "the new certificate is not taken"),
            }
        }
        let list_changed = configured_change(&self.files);
        if list_changed != known.list_changed {
            match configured(&self.files) {
                Ok(list) => {
                    tracing::info!(?list, "the configured list of revoked certificates is taken");
                    self.revocations.configure(list);
                    known.list_changed = list_changed;
                    self.lists.send_replace(());
                }
                Err(error) => {
                    tracing::warn!(%error, "the configured list of revoked certificates is not taken");
                }
            }
        }
        known.identity.clone()
    }

    /// Takes a manager's list in the place of the one before. It is on disk when this returns, and counts from the next
    /// handshake on.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`]: no list of an authority that is trusted here; [`ErrorCode::WrongState`]: a later one
    /// is here; [`ErrorCode::HostFailed`]: it cannot be written. The one before stays.
    pub(crate) fn revoke(&self, list: &str) -> Result<RevocationsTaken, ApiError> {
        let list =
            RevocationList::read(list, &self.files.authority).map_err(|error| refused(&error))?;
        let taken = RevocationsTaken { number: list.number(), certificates: list.revoked().len() };
        // One at a time: what is on disk is what counts.
        let _alone = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if self.revocations.check_newer(&list).map_err(|error| refused(&error))? {
            replace(&self.list, list.pem()).map_err(|error| {
                host_failed("the list of revoked certificates can't be written", &error)
            })?;
            tracing::info!(?list, "a list of revoked certificates is taken");
            self.revocations.accept(list).map_err(|error| refused(&error))?;
            self.lists.send_replace(());
        }
        Ok(taken)
    }

    /// Waits until a certificate is revoked.
    pub(crate) async fn until_revoked(&self, serial: &Serial) {
        let mut lists = self.lists.subscribe();
        while !self.revocations.has(serial) {
            // It cannot fail: the sender is part of self.
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
    ApiError::new(code, error.to_string(), "have the manager, or `godwit pki crl`, sign a new list")
}

fn read(files: &TlsConfig, revocations: &Revocations) -> Result<Identity, PkiError> {
    Identity::load_with(&files.authority, &files.certificate, &files.key, revocations)
}

/// The list that the configuration names; none: it names none.
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

/// A list that is kept in a file; none: there is no file.
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

/// Replaces a file by one that survives a power cut.
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
