//! Authorities of servers outside the cluster that the manager connects to, and TLS with them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Files with the certificates of public authorities, by distribution family: Debian, Fedora,
/// openSUSE.
const PUBLIC_AUTHORITIES: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
];

/// Reads the usable certificates of a file; by default, those of the distribution's public
/// authorities.
pub(crate) fn authorities(file: Option<&Path>) -> io::Result<Vec<CertificateDer<'static>>> {
    let file = match file {
        Some(file) => file.to_owned(),
        None => {
            let mut files = PUBLIC_AUTHORITIES.iter().map(PathBuf::from);
            files.find(|file| file.exists()).ok_or_else(|| {
                io::Error::other(
                    "no certificates of public authorities are installed (set authority to a file)",
                )
            })?
        }
    };
    let failed =
        |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", file.display()));
    let mut usable = Vec::new();
    for certificate in CertificateDer::pem_file_iter(&file).map_err(|error| failed(&error))? {
        let certificate = certificate.map_err(|error| failed(&error))?;
        // One unusable certificate of hundreds must not disable the others.
        if RootCertStore::empty().add(certificate.clone()).is_ok() {
            usable.push(certificate);
        }
    }
    Ok(usable)
}

/// Returns the configuration of a client that trusts these authorities alone.
pub(crate) fn client(authorities: Vec<CertificateDer<'static>>) -> io::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(authorities);
    let tls = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(tls))
}
