//! Errors of certificates, keys and lists, with their remedies.

use std::path::{Path, PathBuf};

/// Reason why a certificate cannot be made, read or used.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file cannot be read or written.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The file exists already.
    #[error("cannot create {path}: it already exists")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    #[error("cannot find an authority in {dir}")]
    NoAuthority {
        /// The directory in which it was expected.
        dir: PathBuf,
    },
    /// Users other than the owner may read the key, or its owner is neither this program's user nor
    /// root.
    #[error("cannot use the key {path}: it can be read by others (mode {mode:04o}, owner {uid})")]
    OpenKey {
        /// The key.
        path: PathBuf,
        mode: u32,
        /// Its owner.
        uid: u32,
        expected: u32,
    },
    /// The name is not valid in a certificate.
    #[error("cannot use \"{name}\" as a name in a certificate: {why}")]
    BadName {
        name: String,
        /// The reason.
        why: String,
    },
    /// The file holds no certificate or key.
    #[error("cannot use {path}: {why}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The certificate is not valid at this time.
    #[error("cannot use the certificate {path}: it {why}")]
    OutOfDate {
        /// The file.
        path: PathBuf,
        /// Since or from when.
        why: String,
    },
    /// Certificate, key and authority do not belong together.
    #[error("cannot use {path}: {why}")]
    Mismatch {
        /// The certificate.
        path: PathBuf,
        /// TLS's error.
        why: String,
    },
    /// The request is invalid, or does not prove that its sender has the key.
    #[error("cannot sign the certificate signing request: {why}")]
    BadRequest {
        /// The reason.
        why: String,
    },
    /// The cluster's authority has issued a certificate for browsers.
    #[error(
        "cannot show {path} to browsers: the cluster's authority has issued it, and browsers that \
        trust that authority trust every host"
    )]
    ClusterAuthority {
        /// The certificate.
        path: PathBuf,
    },
    /// The authority does not issue certificates of the requested kind.
    #[error("cannot issue a certificate for {role}: {path} is an authority for {kind}")]
    OtherAuthority {
        /// The authority's certificate.
        path: PathBuf,
        role: &'static str,
        /// The kind of certificates that the authority issues.
        kind: &'static str,
    },
    /// A revocation list cannot be used.
    #[error("cannot use the revocation list: {why}")]
    BadList {
        /// The reason.
        why: String,
    },
    /// A revocation list is older than the one in force.
    #[error(
        "cannot use the revocation list: its number is {number}, and list {newest} is in force"
    )]
    OldList {
        number: u64,
        /// The number of the list that stays in force.
        newest: u64,
    },
    /// A certificate cannot be made.
    #[error("cannot create a certificate: {0}")]
    Make(#[from] rcgen::Error),
}

impl PkiError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            PkiError::Exists { .. } => "name another --dir, or remove the file (hosts \
                with its certificates then lose access)"
                .to_owned(),
            PkiError::NoAuthority { dir } => {
                format!("create one with `godwit pki init --dir {}`", dir.display())
            }
            PkiError::OpenKey { path, expected, .. } => {
                let path = path.display();
                format!(
                    "run `chown {expected} {path} && chmod 600 {path}`; if others may have read \
                    the key, issue a new one with `godwit pki renew`"
                )
            }
            PkiError::BadName { .. } => "use letters, digits, dots and hyphens".to_owned(),
            PkiError::OutOfDate { .. } => "issue a new one with `godwit pki renew` where the \
                authority is; a host that joined through a manager joins again with a new token"
                .to_owned(),
            PkiError::Mismatch { .. } => {
                "use a certificate, a key and an authority that belong together".to_owned()
            }
            PkiError::BadRequest { .. } => {
                "send PKCS #10 as PEM, signed by the key that it is for".to_owned()
            }
            PkiError::ClusterAuthority { .. } => "create an authority for browsers with `godwit \
                pki init --web` and issue the certificate there"
                .to_owned(),
            PkiError::OtherAuthority { .. } => "name another --dir".to_owned(),
            PkiError::BadList { .. } => {
                "get a new list from the manager, or with `godwit pki crl`".to_owned()
            }
            PkiError::File { .. }
            | PkiError::Unreadable { .. }
            | PkiError::OldList { .. }
            | PkiError::Make(_) => String::new(),
        }
    }

    /// Returns the remedy, followed by what else the caller advises.
    #[must_use]
    pub fn remedy_and(&self, more: &str) -> String {
        let own = self.remedy();
        if own.is_empty() { more.to_owned() } else { format!("{own}; {more}") }
    }
}

pub(crate) fn file_error(
    path: &Path,
    action: &'static str,
) -> impl FnOnce(std::io::Error) -> PkiError {
    let path = path.to_owned();
    move |source| PkiError::File { path, action, source }
}
