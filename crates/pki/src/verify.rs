//! Verification of certificates that peers present.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme,
};

use crate::Fingerprint;
use crate::certificate::{Role, describe_der};
use crate::revocation::Revocations;

/// Creates a verifier of servers' certificates for these authorities.
pub(crate) fn by_roots(
    roots: &Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
    WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider))
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))
}

/// How the authority is known.
#[derive(Debug)]
pub(crate) enum AuthorityKnown {
    /// By its certificate.
    Whole(Arc<WebPkiServerVerifier>),
    /// By its fingerprint: the server must present the authority's certificate.
    ByFingerprint(Fingerprint),
}

/// Verifier of a server's certificate: its authority, its name and, for a manager, its role. Hosts
/// have certificates of the same authority, and must not pass for a manager.
#[derive(Debug)]
pub(crate) struct Servers {
    pub(crate) known: AuthorityKnown,
    /// Whether only a manager is accepted, that is, an operator's certificate.
    pub(crate) managers_alone: bool,
    pub(crate) provider: Arc<CryptoProvider>,
    pub(crate) revocations: Revocations,
}

impl Servers {
    fn verifier(
        &self,
        others: &[CertificateDer<'_>],
    ) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
        let fingerprint = match &self.known {
            AuthorityKnown::Whole(verifier) => return Ok(Arc::clone(verifier)),
            AuthorityKnown::ByFingerprint(fingerprint) => fingerprint,
        };
        let Some(authority) = others.iter().find(|other| Fingerprint::of(other) == *fingerprint)
        else {
            let why = format!("it shows no authority with the fingerprint {fingerprint}");
            return Err(rustls::Error::General(why));
        };
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        by_roots(&Arc::new(roots), &self.provider)
    }
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.verifier(others)?.verify_server_cert(shown, &[], name, ocsp, now)?;
        let Some(holder) = describe_der(shown) else {
            return Err(CertificateError::BadEncoding.into());
        };
        if self.managers_alone && holder.role != Role::Operator {
            return Err(rustls::Error::General(
                "its certificate is a host's, not a manager's".to_owned(),
            ));
        }
        if self.revocations.has(&holder.serial) {
            return Err(CertificateError::Revoked.into());
        }
        self.revocations.note_seen(holder);
        Ok(verified)
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

/// Verifier of a client's certificate: its authority, and that it is not revoked.
#[derive(Debug)]
pub(crate) struct Clients {
    pub(crate) inner: Arc<dyn ClientCertVerifier>,
    pub(crate) revocations: Revocations,
}

impl ClientCertVerifier for Clients {
    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.inner.verify_client_cert(shown, others, now)?;
        let Some(holder) = describe_der(shown) else {
            return Err(CertificateError::BadEncoding.into());
        };
        if self.revocations.has(&holder.serial) {
            Err(CertificateError::Revoked.into())
        } else {
            Ok(verified)
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
