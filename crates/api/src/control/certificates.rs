//! Certificates of hosts, and revoked certificates.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A certificate that the manager issued, saw at a host, or revoked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "serial": "5f0c9a3b77d24e1f8a6b3c2d1e0f9a8b", "holder": "host-c",
    "noted_unix_ms": 1_795_445_030_237_u64,
    "ends_unix_ms": 1_826_981_030_237_u64, "revoked_unix_ms": 1_795_545_030_000_u64
}))]
pub struct CertificateInfo {
    /// Serial number, in hexadecimal digits.
    pub serial: String,
    /// Host named in the certificate; absent if it was revoked by its serial number alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// Time at which it was issued or first seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noted_unix_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_unix_ms: Option<u64>,
    /// Time of the revocation; absent if the certificate is not revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_unix_ms: Option<u64>,
}

/// List of revoked certificates, as every agent receives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "number": 1_795_545_030_u64, "certificates": 1,
    "list": "-----BEGIN X509 CRL-----\nBASE64\n-----END X509 CRL-----\n"
}))]
pub struct RevokedCertificates {
    /// Number of the list; it increases with each new list.
    pub number: u64,
    pub certificates: usize,
    /// X.509 certificate revocation list signed by the cluster's certificate authority, PEM.
    pub list: String,
}
