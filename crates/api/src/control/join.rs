//! Host enrollment: a single-use join token and the certificate it is exchanged for.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use godwit_pki::Fingerprint;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::schema::{
    AnyOfBuilder, Array, ArrayBuilder, KnownFormat, ObjectBuilder, SchemaFormat, Type,
};

/// Request of `POST /api/v1/join-tokens`: allows one host to join, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "host": "host-a", "minutes": 60 }))]
pub struct JoinGrant {
    /// Name of the host.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub host: String,
    /// Address of the host's agent; absent: the host provides it, and its certificate contains no
    /// address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = super::hosts::optional_address)]
    pub address: Option<String>,
    /// Validity in minutes.
    #[serde(default = "default_minutes")]
    #[schema(minimum = 1, maximum = 10080)]
    pub minutes: u32,
}

fn default_minutes() -> u32 {
    60
}

/// A join token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "1c9035cc7e6c241b", "host": "host-c", "address": "https://10.0.0.13:7700",
    "made_unix_ms": 1_795_444_970_237_u64,
    "expires_unix_ms": 1_795_448_570_237_u64, "made_by": "ana",
    "used_unix_ms": 1_795_445_030_237_u64
}))]
pub struct JoinTokenInfo {
    /// ID of the token.
    pub id: String,
    /// Host that may join with the token.
    pub host: String,
    /// Address of the host's agent, if it is fixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Creation time.
    pub made_unix_ms: u64,
    /// Expiry time.
    pub expires_unix_ms: u64,
    pub made_by: String,
    /// Time at which the host joined; absent if the token is unused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_unix_ms: Option<u64>,
}

/// Response to a [`JoinGrant`]. It is the only response that contains the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "1c9035cc7e6c241b", "host": "host-c", "address": "https://10.0.0.13:7700",
    "made_unix_ms": 1_795_444_970_237_u64,
    "expires_unix_ms": 1_795_448_570_237_u64, "made_by": "ana",
    "token": "godwit_1c9035cc7e6c241b_SECRET.FINGERPRINT.host-c"
}))]
pub struct JoinToken {
    /// Stored properties of the token.
    #[serde(flatten)]
    pub info: JoinTokenInfo,
    /// Token for `godwit host join`.
    pub token: String,
}

/// Returns the schema of host addresses, at most 64.
fn ip_addresses() -> Array {
    let ip = |format| {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(format)))
    };
    let either = AnyOfBuilder::new().item(ip(KnownFormat::Ipv4)).item(ip(KnownFormat::Ipv6));
    let what = "Ignored: a certificate contains the host name and agent address of the join token.";
    ArrayBuilder::new().items(either).max_items(Some(64)).description(Some(what)).build()
}

/// Request of `POST /api/v1/join`. The join token in it authenticates the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "token": "godwit_1c9035cc7e6c241b_SECRET.FINGERPRINT.host-c", "host": "host-c",
    "address": "https://10.0.0.13:7700",
    "request": "-----BEGIN CERTIFICATE REQUEST-----\nBASE64\n-----END CERTIFICATE REQUEST-----\n"
}))]
pub struct JoinRequest {
    /// Join token, unchanged.
    pub token: String,
    /// Name of the host, which the token was created for.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub host: String,
    /// Address of the host's agent; absent: the address in the token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Ignored: a certificate contains the host name and agent address of the join token. Hosts of
    /// earlier versions send addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(schema_with = ip_addresses)]
    pub addresses: Vec<IpAddr>,
    /// Certificate signing request, PEM (PKCS #10). The private key never leaves the host.
    pub request: String,
}

/// Response to a [`JoinRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "address": "https://10.0.0.13:7700",
    "certificate": "-----BEGIN CERTIFICATE-----\nBASE64\n-----END CERTIFICATE-----\n",
    "authority": "-----BEGIN CERTIFICATE-----\nBASE64\n-----END CERTIFICATE-----\n"
}))]
pub struct Joined {
    /// Address of the host's agent, as the manager stores it.
    pub address: String,
    /// Certificate of the host, PEM.
    pub certificate: String,
    pub authority: String,
}

/// Text of a join token: `godwit_ID_SECRET.FINGERPRINT.HOST`. The fingerprint is that of the
/// certificate authority; the host verifies the manager with it.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinTokenText {
    /// Secret part. The manager stores only its digest.
    pub secret: String,
    pub authority: Fingerprint,
    /// Host that the token was created for.
    pub host: String,
}

impl fmt::Display for JoinTokenText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.secret, self.authority.hex(), self.host)
    }
}

impl fmt::Debug for JoinTokenText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a join token for {} by {}", self.host, self.authority)
    }
}

impl FromStr for JoinTokenText {
    type Err = String;

    fn from_str(text: &str) -> Result<JoinTokenText, String> {
        let wrong = || "not a join token".to_owned();
        let mut parts = text.trim().splitn(3, '.');
        let (Some(secret), Some(authority), Some(host)) =
            (parts.next(), parts.next(), parts.next())
        else {
            return Err(wrong());
        };
        if secret.is_empty() || host.is_empty() {
            return Err(wrong());
        }
        let authority = authority.parse().map_err(|_| wrong())?;
        Ok(JoinTokenText { secret: secret.to_owned(), authority, host: host.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_round_trips_and_its_debug_output_hides_the_secret() {
        let token = JoinTokenText {
            secret: "godwit_00_11".into(),
            authority: Fingerprint::of(b"an authority"),
            host: "rack1.host-a".into(),
        };
        assert_eq!(format!("{token}\n").parse(), Ok(token.clone()));
        assert!(!format!("{token:?}").contains("11"), "{token:?}");
        for text in ["", "godwit_00_11", "godwit_00_11.00.a", "a.b.c"] {
            assert!(text.parse::<JoinTokenText>().is_err(), "{text}");
        }
    }
}
