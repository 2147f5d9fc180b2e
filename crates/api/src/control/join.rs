//! How hosts join: a token for one of them, once, and what it is exchanged for.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use godwit_pki::Fingerprint;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::schema::{
    AnyOfBuilder, Array, ArrayBuilder, KnownFormat, ObjectBuilder, SchemaFormat, Type,
};

/// `POST /api/v1/join-tokens`: lets one host join, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "host": "host-a", "minutes": 60 }))]
pub struct JoinGrant {
    /// The host's name.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub host: String,
    /// Its agent's address; none: the host says it itself, and its certificate has no address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = super::hosts::optional_address)]
    pub address: Option<String>,
    /// How long it is good for.
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
    "id": "1c9035cc7e6c241b", "host": "host-c", "address": "https://10.0.0.13:7700", "made_unix_ms": 1_795_444_970_237_u64,
    "expires_unix_ms": 1_795_448_570_237_u64, "made_by": "ana", "used_unix_ms": 1_795_445_030_237_u64
}))]
pub struct JoinTokenInfo {
    /// Names it.
    pub id: String,
    /// The host that may join by it.
    pub host: String,
    /// Its agent's address, where that is fixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// When it was made.
    pub made_unix_ms: u64,
    /// Until when it is good.
    pub expires_unix_ms: u64,
    pub made_by: String,
    /// When a host joined by it; none: none has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_unix_ms: Option<u64>,
}

/// The answer to a [`JoinGrant`]: the one time that its secret is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "1c9035cc7e6c241b", "host": "host-c", "address": "https://10.0.0.13:7700", "made_unix_ms": 1_795_444_970_237_u64,
    "expires_unix_ms": 1_795_448_570_237_u64, "made_by": "ana", "token": "godwit_1c9035cc7e6c241b_SECRET.FINGERPRINT.host-c"
}))]
pub struct JoinToken {
    /// What is kept of it.
    #[serde(flatten)]
    pub info: JoinTokenInfo,
    /// What `godwit host join` is given.
    pub token: String,
}

/// Addresses of hosts, 64 at most.
fn ip_addresses() -> Array {
    let ip = |format| {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(format)))
    };
    let either = AnyOfBuilder::new().item(ip(KnownFormat::Ipv4)).item(ip(KnownFormat::Ipv6));
    let what =
        "Ignored: a certificate has the host's name and the agent's address of the join token.";
    ArrayBuilder::new().items(either).max_items(Some(64)).description(Some(what)).build()
}

/// `POST /api/v1/join`: the token in it says that the host may.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "token": "godwit_1c9035cc7e6c241b_SECRET.FINGERPRINT.host-c", "host": "host-c", "address": "https://10.0.0.13:7700",
    "request": "-----BEGIN CERTIFICATE REQUEST-----\nBASE64\n-----END CERTIFICATE REQUEST-----\n"
}))]
pub struct JoinRequest {
    /// The join token, as it was made.
    pub token: String,
    /// The host's name, as the token was made for.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub host: String,
    /// The host's agent's address; none: the one that the token was made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Ignored: a certificate has the host's name and the agent's address of the join token. Hosts of versions before
    /// this one send addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(schema_with = ip_addresses)]
    pub addresses: Vec<IpAddr>,
    /// A certificate signing request, PEM (PKCS #10): its key never leaves the host.
    pub request: String,
}

/// The answer to a [`JoinRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "address": "https://10.0.0.13:7700", "certificate": "-----BEGIN CERTIFICATE-----\nBASE64\n-----END CERTIFICATE-----\n",
    "authority": "-----BEGIN CERTIFICATE-----\nBASE64\n-----END CERTIFICATE-----\n"
}))]
pub struct Joined {
    /// The host's agent's address, as the manager knows it now.
    pub address: String,
    /// The host's certificate, PEM.
    pub certificate: String,
    pub authority: String,
}

/// A join token's text: `godwit_ID_SECRET.FINGERPRINT.HOST`. The fingerprint is the authority's: by it the host knows the manager.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinTokenText {
    /// What the manager knows: its digest alone.
    pub secret: String,
    pub authority: Fingerprint,
    /// Whom it is for.
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
        let wrong = || "that is no join token".to_owned();
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
    fn a_token_is_read_as_it_is_written_and_tells_no_secret_by_accident() {
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
