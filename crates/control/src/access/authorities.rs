//! How others than holders of tokens come in: hosts that join, by an authority that signs for them; people, by an issuer of web tokens. And that each request with a key comes in
//! once at a time.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use godwit_api::control::{Problem, ProblemCode};
use godwit_pki::{Authority, Fingerprint, PkiError};
use serde::Deserialize;

use crate::access::issuer::Oidc;
use crate::access::oidc::OidcRules;

/// The authority's files, as `godwit pki init` makes them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuthorityConfig {
    /// Its certificate.
    pub certificate: PathBuf,
    /// Its key: who has it is every host and every operator.
    pub key: PathBuf,
}

/// An authority that signs, and what hosts know it by.
#[derive(Debug)]
pub(crate) struct SigningAuthority {
    pub(crate) authority: Authority,
    pub(crate) fingerprint: Fingerprint,
}

impl SigningAuthority {
    pub(crate) fn open(files: &AuthorityConfig) -> Result<SigningAuthority, PkiError> {
        let authority = Authority::load(&files.certificate, &files.key)?;
        Ok(SigningAuthority { authority, fingerprint: Fingerprint::of_certificate(&files.certificate)? })
    }
}

/// Why a door can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    /// The authority can't be used.
    #[error("{0} (correct [authority] in the configuration; `godwit pki init` makes one)")]
    Authority(#[from] PkiError),
    /// The certificates by which the issuer is checked can't be read.
    #[error(
        "the OIDC issuer's certificate can't be checked: {0} (correct authority of [oidc] in the configuration)"
    )]
    Oidc(std::io::Error),
}

/// What of that a manager has; nothing, until it is told.
#[derive(Debug, Default)]
pub(crate) struct Doors {
    authority: OnceLock<SigningAuthority>,
    oidc: OnceLock<Oidc>,
    /// Of requests with an idempotency key.
    pub(crate) turns: Turns,
}

/// What is being carried out, by its id.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns(Arc<Mutex<BTreeSet<String>>>);

/// A place among what is being carried out; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Turns,
    id: String,
}

impl Turns {
    /// A turn for this; none: it is being carried out.
    pub(crate) fn take(&self, id: &str) -> Option<Turn> {
        let is_new = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned());
        is_new.then(|| Turn { turns: self.clone(), id: id.to_owned() })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

impl Doors {
    /// What a configuration names: the authority that signs, the certificate of the one that this manager trusts, an issuer.
    pub(crate) fn open(
        authority: Option<&AuthorityConfig>,
        trusted: Option<&Path>,
        issuer: Option<&OidcRules>,
    ) -> Result<Doors, DoorError> {
        let doors = Doors::default();
        if let Some(files) = authority {
            let signing = SigningAuthority::open(files)?;
            // What it signs has to be what this manager trusts.
            if let Some(trusted) = trusted
                && Fingerprint::of_certificate(trusted)? != signing.fingerprint
            {
                let why = format!("it is another authority than {} of [tls]", trusted.display());
                return Err(PkiError::Mismatch { path: files.certificate.clone(), why }.into());
            }
            let _ = doors.authority.set(signing);
        }
        if let Some(rules) = issuer {
            let _ = doors.oidc.set(Oidc::open(rules.clone()).map_err(DoorError::Oidc)?);
        }
        Ok(doors)
    }

    /// With this authority.
    #[cfg(test)]
    pub(crate) fn signing(files: &AuthorityConfig) -> Doors {
        let doors = Doors::default();
        let _ = doors.authority.set(SigningAuthority::open(files).unwrap());
        doors
    }

    /// With this issuer.
    #[cfg(test)]
    pub(crate) fn trusting(oidc: Oidc) -> Doors {
        let doors = Doors::default();
        let _ = doors.oidc.set(oidc);
        doors
    }

    /// Has these from now on.
    pub(crate) fn set(&self, doors: Doors) {
        if let Some(authority) = doors.authority.into_inner() {
            let _ = self.authority.set(authority);
        }
        if let Some(oidc) = doors.oidc.into_inner() {
            let _ = self.oidc.set(oidc);
        }
    }

    /// The issuer whose web tokens are accepted; none: none are.
    pub(crate) fn oidc(&self) -> Option<&Oidc> {
        self.oidc.get()
    }

    /// The authority that signs for hosts that join.
    ///
    /// # Errors
    /// [`ProblemCode::WrongState`]: this manager has none.
    pub(crate) fn authority(&self) -> Result<&SigningAuthority, Problem> {
        self.authority.get().ok_or_else(|| {
            let mend = "name its files in the manager's configuration: [authority] certificate, key; or make the host's \
                certificate with `godwit pki issue` and add it with `godwit control host add`";
            Problem::new(ProblemCode::WrongState, "this manager has no authority that signs for hosts", mend)
        })
    }
}
