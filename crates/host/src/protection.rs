//! This host's certificate, as its files hold it now: one that is renewed is taken without a restart.

use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use godwit_pki::{Identity, PkiError};

use crate::config::TlsConfig;

/// A host's identity and the files that it is read from.
#[derive(Debug)]
pub(crate) struct Protection {
    files: TlsConfig,
    /// As last read, with the time of the certificate's last change.
    known: Mutex<(Option<SystemTime>, Identity)>,
}

impl Protection {
    /// Reads the files.
    ///
    /// # Errors
    /// [`PkiError`]: what is wrong with them.
    pub(crate) fn load(files: &TlsConfig) -> Result<Protection, PkiError> {
        let changed = changed(files);
        let identity = read(files)?;
        Ok(Protection { files: files.clone(), known: Mutex::new((changed, identity)) })
    }

    /// The identity as the files have it; as they had it, while they can't be read.
    #[must_use]
    pub(crate) fn identity(&self) -> Identity {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = changed(&self.files);
        if changed != known.0 {
            match read(&self.files) {
                Ok(identity) => {
                    tracing::info!(certificate = %self.files.certificate.display(), "a new certificate is taken");
                    *known = (changed, identity);
                }
                // Half written: the next connection looks again.
                Err(error) => tracing::warn!(%error, "the new certificate is not taken"),
            }
        }
        known.1.clone()
    }
}

fn read(files: &TlsConfig) -> Result<Identity, PkiError> {
    Identity::load(&files.authority, &files.certificate, &files.key)
}

fn changed(files: &TlsConfig) -> Option<SystemTime> {
    fs::metadata(&files.certificate).and_then(|data| data.modified()).ok()
}
