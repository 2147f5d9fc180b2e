//! A host's certificate as TLS uses it, in both directions.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs;
use rustls::crypto::ring::cipher_suite;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use time::OffsetDateTime;

use crate::Fingerprint;
use crate::PkiError;
use crate::certificate::{Description, Role, describe, describe_der, is_signed_by};
use crate::key_file::check_key;
use crate::verify::{AuthorityKnown, Clients, Servers, by_roots};
use crate::{Revocations, Serial};

/// Certificate that a host presents, and the certificates that it accepts.
#[derive(Clone, Debug)]
pub struct Identity {
    name: String,
    addresses: Vec<IpAddr>,
    serial: Serial,
    revocations: Revocations,
    client: Arc<ClientConfig>,
    managers_client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    users: Arc<ServerConfig>,
}

/// Peer of a connection, as its certificate identifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub name: String,
    pub role: Role,
    /// The serial number of the certificate.
    pub serial: Serial,
}

impl Peer {
    /// Reads the peer from the certificates that TLS has verified.
    #[must_use]
    pub fn of(certificates: Option<&[CertificateDer<'_>]>) -> Option<Peer> {
        let description = describe_der(certificates?.first()?)?;
        Some(Peer { name: description.name, role: description.role, serial: description.serial })
    }
}

impl Identity {
    /// Loads an authority's certificate, a certificate that it issued, and its key.
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::Unreadable`], [`PkiError::OutOfDate`],
    /// [`PkiError::OpenKey`], [`PkiError::Mismatch`].
    pub fn load(authority: &Path, certificate: &Path, key: &Path) -> Result<Identity, PkiError> {
        Identity::load_with(authority, certificate, key, &Revocations::default())
    }

    /// Loads an identity that refuses certificates which are on one of these lists at the time of a
    /// handshake.
    ///
    /// # Errors
    /// Those of [`Identity::load`].
    pub fn load_with(
        authority: &Path,
        certificate: &Path,
        key: &Path,
        revocations: &Revocations,
    ) -> Result<Identity, PkiError> {
        let (own, key) = certificate_and_key(certificate, key)?;
        let mismatch = |error: rustls::Error| tls_mismatch(certificate, &error);
        let mut roots = RootCertStore::empty();
        let authorities = certificates(authority)?;
        for root in &authorities {
            roots.add(root.clone()).map_err(mismatch)?;
        }
        let chain = certificates(certificate)?;
        // A host that joins knows the authority only by its fingerprint, so the server presents the
        // authority too.
        let chain_for_users = [chain.clone(), authorities].concat();
        let (roots, provider) = (Arc::new(roots), Arc::new(provider()));
        let client = |managers_alone| {
            let known = AuthorityKnown::Whole(by_roots(&roots, &provider)?);
            let (provider, revocations) = (Arc::clone(&provider), revocations.clone());
            let verifier = Servers { known, managers_alone, provider, revocations };
            showing(verifier, chain.clone(), key.clone_key())
        };
        let managers_client = client(true).map_err(mismatch)?;
        let client = client(false).map_err(mismatch)?;
        let verifier = || {
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
        };
        let server = |built: Result<Arc<dyn ClientCertVerifier>, VerifierBuilderError>, chain| {
            let inner = built.map_err(|error| PkiError::Mismatch {
                path: certificate.to_owned(),
                why: error.to_string(),
            })?;
            let verifier = Arc::new(Clients { inner, revocations: revocations.clone() });
            presenting(&provider, verifier, chain, key.clone_key()).map_err(mismatch)
        };
        let mut users = server(verifier().allow_unauthenticated().build(), chain_for_users)?;
        users.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut server = server(verifier().build(), chain)?;
        // Lanes open their records themselves.
        server.enable_secret_extraction = true;
        let (server, users) = (Arc::new(server), Arc::new(users));
        let revocations = revocations.clone();
        Ok(Identity {
            name: own.name,
            addresses: own.addresses,
            serial: own.serial,
            revocations,
            client,
            managers_client,
            server,
            users,
        })
    }

    /// Replaces the clock by which peers' certificates are judged. `now` returns the time
    /// since 1970. Tests use their own clock.
    #[must_use]
    pub fn with_clock(self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Identity {
        let clock: Arc<dyn TimeProvider> = Arc::new(Clock(now));
        let client = |config: &Arc<ClientConfig>| {
            let mut config = (**config).clone();
            config.time_provider = Arc::clone(&clock);
            Arc::new(config)
        };
        let server = |config: &Arc<ServerConfig>| {
            let mut config = (**config).clone();
            config.time_provider = Arc::clone(&clock);
            Arc::new(config)
        };
        Identity {
            client: client(&self.client),
            managers_client: client(&self.managers_client),
            server: server(&self.server),
            users: server(&self.users),
            ..self
        }
    }

    /// Returns the holder's own name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the serial number of the own certificate.
    #[must_use]
    pub fn serial(&self) -> &Serial {
        &self.serial
    }

    /// Returns the revocation lists that handshakes read.
    #[must_use]
    pub fn revocations(&self) -> &Revocations {
        &self.revocations
    }

    /// Returns the addresses that the own certificate is valid for.
    #[must_use]
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Returns the TLS configuration for connections to others.
    #[must_use]
    pub fn client(&self) -> &Arc<ClientConfig> {
        &self.client
    }

    /// Returns the TLS configuration for connections to managers. It refuses a host's certificate,
    /// whatever its name and addresses.
    #[must_use]
    pub fn client_of_managers(&self) -> &Arc<ClientConfig> {
        &self.managers_client
    }

    /// Returns the TLS configuration for connections from others.
    #[must_use]
    pub fn server(&self) -> &Arc<ServerConfig> {
        &self.server
    }

    /// Returns the TLS configuration for connections from clients that need no certificate: people,
    /// and hosts that have none yet. A certificate that a client does present must be valid.
    #[must_use]
    pub fn server_for_users(&self) -> &Arc<ServerConfig> {
        &self.users
    }

    /// Converts a host's name to the form that TLS verifies.
    ///
    /// # Errors
    /// The name is not valid in a certificate.
    pub fn server_name(host: &str) -> Result<ServerName<'static>, InvalidDnsNameError> {
        ServerName::try_from(host.to_owned())
    }
}

/// Builds a client configuration that presents a certificate and verifies servers'.
fn showing(
    verifier: Servers,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut client = ClientConfig::builder_with_provider(Arc::clone(&verifier.provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(chain, key)?;
    // A resumed session skips the verification of certificates, so each connection performs a full
    // handshake.
    client.resumption = Resumption::disabled();
    // Lanes seal their records themselves.
    client.enable_secret_extraction = true;
    Ok(Arc::new(client))
}

/// Builds a server configuration that presents a certificate and verifies clients'.
fn presenting(
    provider: &Arc<CryptoProvider>,
    verifier: Arc<dyn ClientCertVerifier>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, rustls::Error> {
    let mut server = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    Ok(server)
}

/// Reads a certificate, which must be valid now, and its key.
fn certificate_and_key(
    certificate: &Path,
    key: &Path,
) -> Result<(Description, PrivateKeyDer<'static>), PkiError> {
    let own = describe(certificate)?;
    if let Some(why) = own.out_of_date(OffsetDateTime::now_utc()) {
        return Err(PkiError::OutOfDate { path: certificate.to_owned(), why });
    }
    check_key(key)?;
    let key = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| PkiError::Unreadable { path: key.to_owned(), why: error.to_string() })?;
    Ok((own, key))
}

/// Trust of a client without a certificate. It accepts only managers.
#[derive(Clone, Debug)]
pub struct Trust(Arc<ClientConfig>);

impl Trust {
    /// Reads an authority's certificate.
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::Unreadable`], [`PkiError::Mismatch`].
    pub fn load(authority: &Path) -> Result<Trust, PkiError> {
        let mut roots = RootCertStore::empty();
        for root in certificates(authority)? {
            roots.add(root).map_err(|error| tls_mismatch(authority, &error))?;
        }
        let provider = Arc::new(provider());
        let verifier = by_roots(&Arc::new(roots), &provider)
            .map_err(|error| tls_mismatch(authority, &error))?;
        Trust::by(AuthorityKnown::Whole(verifier), provider)
            .map_err(|error| tls_mismatch(authority, &error))
    }

    /// Trusts an authority with this fingerprint. The server must present the authority's
    /// certificate.
    ///
    /// # Errors
    /// [`PkiError::Mismatch`]: TLS is unavailable.
    pub fn by_fingerprint(fingerprint: Fingerprint) -> Result<Trust, PkiError> {
        let known = AuthorityKnown::ByFingerprint(fingerprint);
        Trust::by(known, Arc::new(provider()))
            .map_err(|error| tls_mismatch(Path::new("TLS"), &error))
    }

    fn by(known: AuthorityKnown, provider: Arc<CryptoProvider>) -> Result<Trust, rustls::Error> {
        let revocations = Revocations::default();
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Servers {
                known,
                managers_alone: true,
                provider,
                revocations,
            }))
            .with_no_client_auth();
        client.resumption = Resumption::disabled();
        Ok(Trust(Arc::new(client)))
    }

    /// Returns the TLS configuration for connections to others.
    #[must_use]
    pub fn client(&self) -> &Arc<ClientConfig> {
        &self.0
    }
}

/// Loads the certificate that a server presents to browsers, and its key. The cluster's authority
/// must not have issued it. Clients are not asked for a certificate.
///
/// # Errors
/// [`PkiError::ClusterAuthority`]: browsers would have to trust the authority that signs for hosts.
/// [`PkiError::File`], [`PkiError::Unreadable`], [`PkiError::OutOfDate`], [`PkiError::OpenKey`],
/// [`PkiError::Mismatch`].
pub fn web_server(
    cluster_authority: Option<&Path>,
    certificate: &Path,
    key: &Path,
) -> Result<Arc<ServerConfig>, PkiError> {
    let (_, key) = certificate_and_key(certificate, key)?;
    let chain = certificates(certificate)?;
    if let Some(authority) = cluster_authority
        && certificates(authority)?
            .iter()
            .any(|issuer| chain.iter().any(|one| is_signed_by(one, issuer)))
    {
        return Err(PkiError::ClusterAuthority { path: certificate.to_owned() });
    }
    let anyone = WebPkiClientVerifier::no_client_auth();
    let mut server = presenting(&Arc::new(provider()), anyone, chain, key)
        .map_err(|error| tls_mismatch(certificate, &error))?;
    server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(server))
}

fn tls_mismatch(path: &Path, error: &rustls::Error) -> PkiError {
    PkiError::Mismatch { path: path.to_owned(), why: error.to_string() }
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

/// Returns the cryptography used: AES-GCM only, the shorter key first, because both are equally
/// safe and it is faster. The ciphers are ring's: on a CPU with VAES and without AVX-512 they are
/// twice as fast as AWS-LC's (8.5 against 4.5 GB/s per core). Key exchange and signatures are
/// AWS-LC's.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
        ],
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
