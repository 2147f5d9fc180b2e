//! A host's certificate as TLS uses it, in both directions.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs;
use rustls::crypto::ring::cipher_suite;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use time::OffsetDateTime;

use crate::PkiError;
use crate::certificate::{Role, describe, describe_der};

/// What a host shows, and what it expects to be shown.
#[derive(Clone, Debug)]
pub struct Identity {
    name: String,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// Who is at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The holder of its certificate.
    pub name: String,
    /// What it may do.
    pub role: Role,
}

impl Peer {
    /// By the certificates that TLS has checked.
    #[must_use]
    pub fn of(certificates: Option<&[CertificateDer<'_>]>) -> Option<Peer> {
        let description = describe_der(certificates?.first()?)?;
        Some(Peer { name: description.name, role: description.role })
    }
}

impl Identity {
    /// Reads an authority's certificate, a certificate that it issued, and its key.
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::Unreadable`], [`PkiError::OutOfDate`], [`PkiError::Mismatch`].
    pub fn load(authority: &Path, certificate: &Path, key: &Path) -> Result<Identity, PkiError> {
        let own = describe(certificate)?;
        if let Some(why) = own.out_of_date(OffsetDateTime::now_utc()) {
            return Err(PkiError::OutOfDate { path: certificate.to_owned(), why });
        }
        let mismatch = |error: String| PkiError::Mismatch { path: certificate.to_owned(), why: error };
        let mut roots = RootCertStore::empty();
        for root in certificates(authority)? {
            roots.add(root).map_err(|error| mismatch(error.to_string()))?;
        }
        let chain = certificates(certificate)?;
        let key_der = PrivateKeyDer::from_pem_file(key)
            .map_err(|error| PkiError::Unreadable { path: key.to_owned(), why: error.to_string() })?;
        let (roots, provider) = (Arc::new(roots), Arc::new(provider()));
        let versions: &[_] = &[&rustls::version::TLS13];
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(|error| mismatch(error.to_string()))?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key_der.clone_key())
            .map_err(|error| mismatch(error.to_string()))?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|error| mismatch(error.to_string()))?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(|error| mismatch(error.to_string()))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key_der)
            .map_err(|error| mismatch(error.to_string()))?;
        Ok(Identity { name: own.name, client: Arc::new(client), server: Arc::new(server) })
    }

    /// The holder's own name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// For connections to others.
    #[must_use]
    pub fn client(&self) -> &Arc<ClientConfig> {
        &self.client
    }

    /// For connections from others.
    #[must_use]
    pub fn server(&self) -> &Arc<ServerConfig> {
        &self.server
    }

    /// A host's name as TLS checks it.
    ///
    /// # Errors
    /// It can't stand in a certificate.
    pub fn server_name(host: &str) -> Result<ServerName<'static>, InvalidDnsNameError> {
        ServerName::try_from(host.to_owned())
    }
}

/// AES-GCM alone, the shorter key first: both are as safe, and it is faster. Ring's: where a CPU has VAES and no AVX-512 it is
/// twice as fast as AWS-LC's (8.5 against 4.5 GB/s by a core); key exchange and signatures are AWS-LC's.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![cipher_suite::TLS13_AES_128_GCM_SHA256, cipher_suite::TLS13_AES_256_GCM_SHA384],
        ..aws_lc_rs::default_provider()
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, PkiError> {
    let unreadable = |why: String| PkiError::Unreadable { path: path.to_owned(), why };
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(|error| unreadable(error.to_string()))?
        .collect::<Result<_, _>>()
        .map_err(|error| unreadable(error.to_string()))?;
    if found.is_empty() { Err(unreadable("it holds no certificate".to_owned())) } else { Ok(found) }
}
