//! Certificates of hosts, and those that are revoked.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A certificate that the manager has issued, has seen at a host, or has revoked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "serial": "5f0c9a3b77d24e1f8a6b3c2d1e0f9a8b", "holder": "host-c", "noted_unix_ms": 1_795_445_030_237_u64,
    "ends_unix_ms": 1_826_981_030_237_u64, "revoked_unix_ms": 1_795_545_030_000_u64
}))]
pub struct CertificateInfo {
    /// Its serial number, hexadecimal digits.
    pub serial: String,
    /// The host in it; none: it was revoked by its number alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// When it was issued, or first seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noted_unix_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_unix_ms: Option<u64>,
    /// When it was revoked; none: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_unix_ms: Option<u64>,
}

/// The list of revoked certificates, as every agent gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "number": 1_795_545_030_u64, "certificates": 1, "list": "-----BEGIN X509 CRL-----\nBASE64\n-----END X509 CRL-----\n"
}))]
pub struct RevokedCertificates {
    /// Its number: a later list has a higher one.
    pub number: u64,
    pub certificates: usize,
    /// An X.509 revocation list that the cluster's authority has signed, PEM.
    pub list: String,
}
