//! Contents of certificates.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;
use x509_parser::prelude::FromDer;

use crate::PkiError;
use crate::error::file_error;
use crate::serial::Serial;

/// Rights of a certificate's holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A host: may hand guests over to other hosts and accept them.
    Host,
    /// An operator: may do everything.
    Operator,
    /// A monitor: may read the metrics of hosts.
    Monitor,
    /// A server for browsers: has no rights in the cluster. An authority of its own issues its
    /// certificate.
    Web,
}

impl Role {
    /// Returns the role as it appears in the subject's organisational unit.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Role::Host => "godwit host",
            Role::Operator => "godwit operator",
            Role::Monitor => "godwit monitor",
            Role::Web => "godwit web",
        }
    }

    fn of_unit(unit: &str) -> Option<Role> {
        [Role::Host, Role::Operator, Role::Monitor, Role::Web]
            .into_iter()
            .find(|role| role.unit() == unit)
    }
}

/// Summary of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    pub name: String,
    /// The holder's role. A certificate without a role belongs to a host.
    pub role: Role,
    /// Whether the certificate may sign others.
    pub is_authority: bool,
    /// IP addresses that the certificate is valid for.
    pub addresses: Vec<IpAddr>,
    /// Serial number, by which the certificate can be revoked.
    pub serial: Serial,
    pub issuer: String,
    /// Start of validity.
    pub not_before: OffsetDateTime,
    /// End of validity.
    pub not_after: OffsetDateTime,
}

impl Description {
    /// Returns what is wrong with the validity period at `now`, or `None` if the certificate is
    /// valid.
    #[must_use]
    pub fn out_of_date(&self, now: OffsetDateTime) -> Option<String> {
        if now > self.not_after {
            return Some(format!("expired on {}", day(self.not_after)));
        }
        (now < self.not_before).then(|| format!("is not valid before {}", day(self.not_before)))
    }
}

fn day(time: OffsetDateTime) -> String {
    format!("{}", time.date())
}

/// Reads a certificate from a file (PEM).
///
/// # Errors
/// [`PkiError::File`], [`PkiError::Unreadable`].
pub fn describe(path: &Path) -> Result<Description, PkiError> {
    let bytes = fs::read(path).map_err(file_error(path, "read"))?;
    let unreadable = |why: String| PkiError::Unreadable { path: path.to_owned(), why };
    let (_, pem) = parse_x509_pem(&bytes)
        .map_err(|error| unreadable(format!("it is not a certificate: {error}")))?;
    describe_der(&pem.contents).ok_or_else(|| unreadable("it is not a certificate".to_owned()))
}

/// Reads a certificate as TLS presents it. Returns `None` if this crate did not issue it.
#[must_use]
pub fn describe_der(der: &[u8]) -> Option<Description> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let unit =
        certificate.subject().iter_organizational_unit().next().and_then(|unit| unit.as_str().ok());
    let common =
        certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let names = certificate.subject_alternative_name().ok().flatten();
    let names = names.map(|names| names.value.general_names.clone()).unwrap_or_default();
    let dns = names.iter().find_map(|name| match name {
        GeneralName::DNSName(name) => Some(*name),
        _ => None,
    });
    let addresses = names.iter().filter_map(|name| match name {
        GeneralName::IPAddress(bytes) => address(bytes),
        _ => None,
    });
    let issuer = certificate.issuer().iter_common_name().next().and_then(|name| name.as_str().ok());
    Some(Description {
        name: dns.or(common)?.to_owned(),
        role: unit.and_then(Role::of_unit).unwrap_or(Role::Host),
        is_authority: certificate.is_ca(),
        addresses: addresses.collect(),
        serial: Serial::of(certificate.raw_serial())?,
        issuer: issuer.unwrap_or_default().to_owned(),
        not_before: certificate.validity().not_before.to_datetime(),
        not_after: certificate.validity().not_after.to_datetime(),
    })
}

/// Returns whether this authority signed the certificate.
pub(crate) fn is_signed_by(certificate: &[u8], authority: &[u8]) -> bool {
    let read = |der| X509Certificate::from_der(der).ok().map(|(_, certificate)| certificate);
    read(certificate)
        .zip(read(authority))
        .is_some_and(|(one, issuer)| one.verify_signature(Some(issuer.public_key())).is_ok())
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    v4.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}
