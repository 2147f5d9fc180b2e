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

use crate::certificate::{Role, describe, describe_der, is_signed_by};
use crate::revocation::{Revocations, Serial};
use crate::verify::{AuthorityKnown, Clients, Servers, by_roots};
use crate::{Fingerprint, PkiError, check_key};

/// What a host shows, and what it expects to be shown.
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

/// Who is at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The holder of its certificate.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// The serial number of its certificate.
    pub serial: Serial,
}

impl Peer {
    /// By the certificates that TLS has checked.
    #[must_use]
    pub fn of(certificates: Option<&[CertificateDer<'_>]>) -> Option<Peer> {
        let description = describe_der(certificates?.first()?)?;
        Some(Peer { name: description.name, role: description.role, serial: description.serial })
    }
}

impl Identity {
    /// Reads an authority's certificate, a certificate that it issued, and its key.
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::Unreadable`], [`PkiError::OutOfDate`], [`PkiError::OpenKey`], [`PkiError::Mismatch`].
    pub fn load(authority: &Path, certificate: &Path, key: &Path) -> Result<Identity, PkiError> {
        Identity::load_with(authority, certificate, key, &Revocations::default())
    }

    /// Reads the same, and refuses certificates that are on one of these lists at the time of a handshake.
    ///
    /// # Errors
    /// Those of [`Identity::load`].
    pub fn load_with(
        authority: &Path,
        certificate: &Path,
        key: &Path,
        revocations: &Revocations,
    ) -> Result<Identity, PkiError> {
        let own = describe(certificate)?;
        if let Some(why) = own.out_of_date(OffsetDateTime::now_utc()) {
            return Err(PkiError::OutOfDate { path: certificate.to_owned(), why });
        }
        check_key(key)?;
        let mismatch = |error: String| PkiError::Mismatch { path: certificate.to_owned(), why: error };
        let mut roots = RootCertStore::empty();
        let authorities = certificates(authority)?;
        for root in &authorities {
            roots.add(root.clone()).map_err(|error| mismatch(error.to_string()))?;
        }
        let chain = certificates(certificate)?;
        // Who joins knows the authority by its fingerprint alone, and has to see it.
        let chain_for_users = [chain.clone(), authorities].concat();
        let key_der = PrivateKeyDer::from_pem_file(key)
            .map_err(|error| PkiError::Unreadable { path: key.to_owned(), why: error.to_string() })?;
        let (roots, provider) = (Arc::new(roots), Arc::new(provider()));
        let versions: &[_] = &[&rustls::version::TLS13];
        let client = |managers_alone| {
            let known = AuthorityKnown::Whole(by_roots(&roots, &provider)?);
            let (provider, revocations) = (Arc::clone(&provider), revocations.clone());
            let verifier = Servers { known, managers_alone, provider, revocations };
            showing(verifier, chain.clone(), key_der.clone_key())
        };
        let client = |managers_alone| client(managers_alone).map_err(|error| mismatch(error.to_string()));
        let (client, managers_client) = (client(false)?, client(true)?);
        let verifier =
            || WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let checked = |built: Result<Arc<dyn ClientCertVerifier>, VerifierBuilderError>| {
            let inner = built.map_err(|error| mismatch(error.to_string()))?;
            Ok::<_, PkiError>(Arc::new(Clients { inner, revocations: revocations.clone() }))
        };
        let required = checked(verifier().build())?;
        let offered = checked(verifier().allow_unauthenticated().build())?;
        let server = || {
            ServerConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(versions)
                .map_err(|error| mismatch(error.to_string()))
        };
        let mut users = server()?
            .with_client_cert_verifier(offered)
            .with_single_cert(chain_for_users, key_der.clone_key())
            .map_err(|error| mismatch(error.to_string()))?;
        users.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut server = server()?
            .with_client_cert_verifier(required)
            .with_single_cert(chain, key_der)
            .map_err(|error| mismatch(error.to_string()))?;
        for server in [&mut server, &mut users] {
            server.session_storage = Arc::new(NoServerSessionStorage {});
            server.send_tls13_tickets = 0;
        }
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

    /// The same, which judges others' certificates by another clock than the host's: the time since 1970 as `now` tells it. Tests
    /// have one of their own.
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

    /// The holder's own name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The serial number of its certificate.
    #[must_use]
    pub fn serial(&self) -> &Serial {
        &self.serial
    }

    /// The lists of revoked certificates that its handshakes read.
    #[must_use]
    pub fn revocations(&self) -> &Revocations {
        &self.revocations
    }

    /// Addresses that its certificate stands for.
    #[must_use]
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// For connections to others.
    #[must_use]
    pub fn client(&self) -> &Arc<ClientConfig> {
        &self.client
    }

    /// For connections to managers: a host's certificate is refused, whatever its name and addresses.
    #[must_use]
    pub fn client_of_managers(&self) -> &Arc<ClientConfig> {
        &self.managers_client
    }

    /// For connections from others.
    #[must_use]
    pub fn server(&self) -> &Arc<ServerConfig> {
        &self.server
    }

    /// For connections from those who need show no certificate: people, and hosts that have none yet. Who shows one shows a good one.
    #[must_use]
    pub fn server_for_users(&self) -> &Arc<ServerConfig> {
        &self.users
    }

    /// A host's name as TLS checks it.
    ///
    /// # Errors
    /// It can't stand in a certificate.
    pub fn server_name(host: &str) -> Result<ServerName<'static>, InvalidDnsNameError> {
        ServerName::try_from(host.to_owned())
    }
}

/// A client that shows a certificate and checks servers'.
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
    // A resumed session is one whose certificates nobody checks: each connection shows its own.
    client.resumption = Resumption::disabled();
    Ok(Arc::new(client))
}

/// Whose certificates are trusted, by who shows none: managers' alone.
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
        let verifier =
            by_roots(&Arc::new(roots), &provider).map_err(|error| tls_mismatch(authority, &error))?;
        Trust::by(AuthorityKnown::Whole(verifier), provider).map_err(|error| tls_mismatch(authority, &error))
    }

    /// Trusts an authority that has this fingerprint and is shown by who asks for trust.
    ///
    /// # Errors
    /// [`PkiError::Mismatch`]: TLS can't be had.
    pub fn by_fingerprint(fingerprint: Fingerprint) -> Result<Trust, PkiError> {
        let known = AuthorityKnown::ByFingerprint(fingerprint);
        Trust::by(known, Arc::new(provider())).map_err(|error| tls_mismatch(Path::new("TLS"), &error))
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

    /// For connections to others.
    #[must_use]
    pub fn client(&self) -> &Arc<ClientConfig> {
        &self.0
    }
}

/// Reads what a server shows to browsers: a certificate that the cluster's authority has not issued, and its key.
/// Nobody who connects is asked for a certificate.
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
    if let Some(why) = describe(certificate)?.out_of_date(OffsetDateTime::now_utc()) {
        return Err(PkiError::OutOfDate { path: certificate.to_owned(), why });
    }
    check_key(key)?;
    let chain = certificates(certificate)?;
    if let Some(authority) = cluster_authority
        && certificates(authority)?.iter().any(|issuer| chain.iter().any(|one| is_signed_by(one, issuer)))
    {
        return Err(PkiError::ClusterAuthority { path: certificate.to_owned() });
    }
    let key = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| PkiError::Unreadable { path: key.to_owned(), why: error.to_string() })?;
    let mut server = ServerConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .and_then(|config| config.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| tls_mismatch(certificate, &error))?;
    server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
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
