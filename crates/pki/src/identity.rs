//! A host's certificate as TLS uses it, in both directions.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::aws_lc_rs;
use rustls::crypto::ring::cipher_suite;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use time::OffsetDateTime;

use crate::certificate::{Role, describe, describe_der};
use crate::{Fingerprint, PkiError, check_key};

/// What a host shows, and what it expects to be shown.
#[derive(Clone, Debug)]
pub struct Identity {
    name: String,
    client: Arc<ClientConfig>,
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
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(|error| mismatch(error.to_string()))?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key_der.clone_key())
            .map_err(|error| mismatch(error.to_string()))?;
        let verifier =
            || WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let (required, offered) = (verifier().build(), verifier().allow_unauthenticated().build());
        let server = || {
            ServerConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(versions)
                .map_err(|error| mismatch(error.to_string()))
        };
        let mut users = server()?
            .with_client_cert_verifier(offered.map_err(|error| mismatch(error.to_string()))?)
            .with_single_cert(chain_for_users, key_der.clone_key())
            .map_err(|error| mismatch(error.to_string()))?;
        users.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut server = server()?
            .with_client_cert_verifier(required.map_err(|error| mismatch(error.to_string()))?)
            .with_single_cert(chain, key_der)
            .map_err(|error| mismatch(error.to_string()))?;
        // A session that is taken up again is one whose certificates nobody looks at: each connection shows its own.
        client.resumption = Resumption::disabled();
        for server in [&mut server, &mut users] {
            server.session_storage = Arc::new(NoServerSessionStorage {});
            server.send_tls13_tickets = 0;
        }
        let (client, server, users) = (Arc::new(client), Arc::new(server), Arc::new(users));
        Ok(Identity { name: own.name, client, server, users })
    }

    /// The same, which judges others' certificates by another clock than the host's: the time since 1970 as `now` tells it. Tests
    /// have one of their own.
    #[must_use]
    pub fn with_clock(self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Identity {
        let clock: Arc<dyn TimeProvider> = Arc::new(Clock(now));
        let (mut client, mut server) = ((*self.client).clone(), (*self.server).clone());
        let mut users = (*self.users).clone();
        (client.time_provider, server.time_provider) = (Arc::clone(&clock), Arc::clone(&clock));
        users.time_provider = clock;
        Identity { client: Arc::new(client), server: Arc::new(server), users: Arc::new(users), ..self }
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
        let verifier = by_roots(roots, &provider).map_err(|error| tls_mismatch(authority, &error))?;
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
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(ManagersAlone { known, provider }))
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

fn tls_mismatch(path: &Path, error: &rustls::Error) -> PkiError {
    PkiError::Mismatch { path: path.to_owned(), why: error.to_string() }
}

fn by_roots(
    roots: RootCertStore,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))
}

/// How the authority is known.
#[derive(Debug)]
enum AuthorityKnown {
    /// Its certificate is here.
    Whole(Arc<WebPkiServerVerifier>),
    /// Who asks for trust has to show it.
    ByFingerprint(Fingerprint),
}

/// Lets an operator's certificate pass, as a manager has one: hosts have certificates of the same authority, and none of them may pass for the
/// manager.
#[derive(Debug)]
struct ManagersAlone {
    known: AuthorityKnown,
    provider: Arc<CryptoProvider>,
}

impl ManagersAlone {
    fn verifier(&self, others: &[CertificateDer<'_>]) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
        let fingerprint = match &self.known {
            AuthorityKnown::Whole(verifier) => return Ok(Arc::clone(verifier)),
            AuthorityKnown::ByFingerprint(fingerprint) => fingerprint,
        };
        let Some(authority) = others.iter().find(|other| Fingerprint::of(other) == *fingerprint) else {
            let why = format!("it shows no authority with the fingerprint {fingerprint}");
            return Err(rustls::Error::General(why));
        };
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        by_roots(roots, &self.provider)
    }
}

impl ServerCertVerifier for ManagersAlone {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.verifier(others)?.verify_server_cert(shown, &[], name, ocsp, now)?;
        match describe_der(shown).map(|holder| holder.role) {
            Some(Role::Operator) => Ok(verified),
            _ => Err(rustls::Error::General("its certificate is a host's, not a manager's".to_owned())),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
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
