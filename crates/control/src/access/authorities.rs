//! External trust anchors: the authority that signs certificates of joining hosts, and the OpenID
//! Connect issuer of web tokens.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use godwit_api::control::{Problem, ProblemCode};
use godwit_pki::{Authority, Fingerprint, PkiError};
use serde::Deserialize;

use crate::access::issuer::Oidc;
use crate::access::oidc::OidcRules;

/// Files of the authority, as `godwit pki init` creates them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuthorityConfig {
    pub certificate: PathBuf,
    /// Private key. Its owner can impersonate every host and every operator.
    pub key: PathBuf,
}

/// Authority that signs host certificates, with the fingerprint by which hosts identify it.
#[derive(Debug)]
pub(crate) struct SigningAuthority {
    pub(crate) authority: Authority,
    pub(crate) fingerprint: Fingerprint,
}

impl SigningAuthority {
    pub(crate) fn open(files: &AuthorityConfig) -> Result<SigningAuthority, PkiError> {
        let authority = Authority::load(&files.certificate, &files.key)?;
        Ok(SigningAuthority {
            authority,
            fingerprint: Fingerprint::of_certificate(&files.certificate)?,
        })
    }
}

/// Errors of a configured authority or issuer.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// Authority unusable.
    #[error("{0}")]
    Authority(#[from] PkiError),
    /// Root certificates for the issuer unreadable.
    #[error("cannot load the root certificates for the OIDC issuer: {0}")]
    Oidc(std::io::Error),
}

impl AuthorityError {
    /// Returns the remedy; empty if the message contains it.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            AuthorityError::Authority(error) => error.remedy_and(
                "correct [authority] in the configuration; `godwit pki init` creates one",
            ),
            AuthorityError::Oidc(_) => {
                "correct authority of [oidc] in the configuration".to_owned()
            }
        }
    }
}

/// Authority and issuer of a manager; empty until they are set.
#[derive(Debug, Default)]
pub(crate) struct Authorities {
    authority: OnceLock<SigningAuthority>,
    oidc: OnceLock<Oidc>,
}

impl Authorities {
    /// Loads the configured signing authority and issuer. `trusted`: certificate of the authority
    /// that this manager trusts, which must be the signing one.
    pub(crate) fn open(
        authority: Option<&AuthorityConfig>,
        trusted: Option<&Path>,
        issuer: Option<&OidcRules>,
    ) -> Result<Authorities, AuthorityError> {
        let authorities = Authorities::default();
        if let Some(files) = authority {
            let signing = SigningAuthority::open(files)?;
            // The manager must trust the certificates that it signs.
            if let Some(trusted) = trusted
                && Fingerprint::of_certificate(trusted)? != signing.fingerprint
            {
                let why = format!("it is not the authority {} of [tls]", trusted.display());
                return Err(PkiError::Mismatch { path: files.certificate.clone(), why }.into());
            }
            let _ = authorities.authority.set(signing);
        }
        if let Some(rules) = issuer {
            let _ = authorities.oidc.set(Oidc::open(rules.clone()).map_err(AuthorityError::Oidc)?);
        }
        Ok(authorities)
    }

    #[cfg(test)]
    pub(crate) fn signing(files: &AuthorityConfig) -> Authorities {
        let authorities = Authorities::default();
        let _ = authorities.authority.set(SigningAuthority::open(files).unwrap());
        authorities
    }

    #[cfg(test)]
    pub(crate) fn trusting(oidc: Oidc) -> Authorities {
        let authorities = Authorities::default();
        let _ = authorities.oidc.set(oidc);
        authorities
    }

    /// Stores the authority and the issuer, each unless it is set already.
    pub(crate) fn set(&self, authorities: Authorities) {
        if let Some(authority) = authorities.authority.into_inner() {
            let _ = self.authority.set(authority);
        }
        if let Some(oidc) = authorities.oidc.into_inner() {
            let _ = self.oidc.set(oidc);
        }
    }

    /// Returns the issuer whose web tokens are accepted; `None`: web tokens are refused.
    pub(crate) fn oidc(&self) -> Option<&Oidc> {
        self.oidc.get()
    }

    /// Returns the authority that signs certificates of joining hosts.
    ///
    /// # Errors
    /// [`ProblemCode::WrongState`]: this manager has no authority.
    pub(crate) fn authority(&self) -> Result<&SigningAuthority, Problem> {
        self.authority.get().ok_or_else(|| {
            let detail = "this manager has no authority that signs for hosts";
            let remedy = "set its files in the manager's configuration: [authority] certificate, \
                key; or create the host's certificate with `godwit pki issue` and add the host \
                with `godwit control host add`";
            Problem::new(ProblemCode::WrongState, detail, remedy)
        })
    }
}
