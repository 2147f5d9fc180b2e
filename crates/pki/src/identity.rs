//! A host's certificate as TLS uses it, in both directions.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs;
use rustls::crypto::ring::cipher_suite;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use time::OffsetDateTime;

use crate::certificate::{Role, describe, describe_der};
use crate::{PkiError, check_key};

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
    /// [`PkiError::File`], [`PkiError::Unreadable`], [`PkiError::OutOfDate`], [`PkiError::OpenKey`], [`PkiError::Mismatch`].
    pub fn load(authority: &Path, certificate: &Path, key: &Path) -> Result<Identity, PkiError> {
        let own = describe(certificate)?;
        if let Some(why) = own.out_of_date(OffsetDateTime::now_utc()) {
            return Err(PkiError::OutOfDate { path: certificate.to_owned(), why });
        }
        check_key(key)?;
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
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(|error| mismatch(error.to_string()))?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key_der.clone_key())
            .map_err(|error| mismatch(error.to_string()))?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|error| mismatch(error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(|error| mismatch(error.to_string()))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key_der)
            .map_err(|error| mismatch(error.to_string()))?;
        // A session that is taken up again is one whose certificates nobody looks at: each connection shows its own.
        client.resumption = Resumption::disabled();
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Identity { name: own.name, client: Arc::new(client), server: Arc::new(server) })
    }

    /// The same, which judges others' certificates by another clock than the host's: the time since 1970 as `now` tells it. Tests
    /// have one of their own.
    #[must_use]
    pub fn with_clock(self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Identity {
        let clock: Arc<dyn TimeProvider> = Arc::new(Clock(now));
        let (mut client, mut server) = ((*self.client).clone(), (*self.server).clone());
        (client.time_provider, server.time_provider) = (Arc::clone(&clock), clock);
        Identity { client: Arc::new(client), server: Arc::new(server), ..self }
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

struct Clock<F>(F);

impl<F> std::fmt::Debug for Clock<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Clock")
    }
}

impl<F: Fn() -> Duration + Send + Sync> TimeProvider for Clock<F> {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch((self.0)()))
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
