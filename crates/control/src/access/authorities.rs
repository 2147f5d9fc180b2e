//! Who else than the manager itself vouches for callers: the authority that signs for hosts that
//! join, and the issuer of people's web tokens.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use godwit_api::control::{Problem, ProblemCode};
use godwit_pki::{Authority, Fingerprint, PkiError};
use serde::Deserialize;

use crate::access::issuer::Oidc;
use crate::access::oidc::OidcRules;

/// The authority's files, as `godwit pki init` makes them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuthorityConfig {
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
        Ok(SigningAuthority {
            authority,
            fingerprint: Fingerprint::of_certificate(&files.certificate)?,
        })
    }
}

/// Why an authority or an issuer can't be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The authority can't be used.
    #[error("{0}")]
    Authority(#[from] PkiError),
    /// The certificates by which the issuer is checked can't be read.
    #[error("the OIDC issuer's certificate can't be checked: {0}")]
    Oidc(std::io::Error),
}

impl AuthorityError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            AuthorityError::Authority(error) => error.remedy_and(
                "correct [authority] in the configuration; `godwit pki init` makes one",
            ),
            AuthorityError::Oidc(_) => {
                "correct authority of [oidc] in the configuration".to_owned()
            }
        }
    }
}

/// The authority and the issuer that a manager has; none, until they are set.
#[derive(Debug, Default)]
pub(crate) struct Authorities {
    authority: OnceLock<SigningAuthority>,
    oidc: OnceLock<Oidc>,
}

impl Authorities {
    /// What a configuration names: the authority that signs, the certificate of the one that this
    /// manager trusts, an issuer.
    pub(crate) fn open(
        authority: Option<&AuthorityConfig>,
        trusted: Option<&Path>,
        issuer: Option<&OidcRules>,
    ) -> Result<Authorities, AuthorityError> {
        let authorities = Authorities::default();
        if let Some(files) = authority {
            let signing = SigningAuthority::open(files)?;
            // What it signs has to be what this manager trusts.
            if let Some(trusted) = trusted
                && Fingerprint::of_certificate(trusted)? != signing.fingerprint
            {
                let why = format!("it is another authority than {} of [tls]", trusted.display());
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

    /// With this issuer.
    #[cfg(test)]
    pub(crate) fn trusting(oidc: Oidc) -> Authorities {
        let authorities = Authorities::default();
        let _ = authorities.oidc.set(oidc);
        authorities
    }

    /// Has these from now on.
    pub(crate) fn set(&self, authorities: Authorities) {
        if let Some(authority) = authorities.authority.into_inner() {
            let _ = self.authority.set(authority);
        }
        if let Some(oidc) = authorities.oidc.into_inner() {
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
            let remedy = "name its files in the manager's configuration: [authority] certificate, \
                key; or make the host's certificate with `godwit pki issue` and add it with \
                `godwit control host add`";
            Problem::new(
                ProblemCode::WrongState,
                "this manager has no authority that signs for \
                hosts",
                remedy,
            )
        })
    }
}
