//! Access control and the audit log.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Permissions of a token. Each role includes the permissions of those before it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Read everything.
    Viewer,
    /// Manage VMs, moves and drains.
    Operator,
    /// Manage hosts, rules, limits and tokens.
    Admin,
}

impl Role {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Viewer => "viewer",
            Role::Operator => "operator",
            Role::Admin => "admin",
        }
    }
}

/// Response of `GET /api/v1/me`: the authenticated user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({ "name": "ana", "role": "operator" }))]
pub struct Me {
    /// Name of the user, as in the audit log.
    pub name: String,
    /// Role of the user.
    pub role: Role,
}

/// Request of `POST /api/v1/tokens`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "monitoring", "role": "viewer", "days": 90 }))]
pub struct CreateToken {
    /// Name of the token's owner, as in the audit log.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub name: String,
    /// Role of the token.
    pub role: Role,
    /// Validity in days.
    #[serde(default = "default_days")]
    #[schema(minimum = 1, maximum = 3650)]
    pub days: u32,
}

fn default_days() -> u32 {
    90
}

/// A token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "8c1f0a52b7d94e36", "name": "monitoring", "role": "viewer",
    "made_unix_ms": 1_795_444_970_237_u64,
    "expires_unix_ms": 1_803_220_970_237_u64, "made_by": "root"
}))]
pub struct TokenInfo {
    /// ID of the token.
    pub id: String,
    pub name: String,
    /// Role of the token.
    pub role: Role,
    /// Creation time.
    pub made_unix_ms: u64,
    /// Expiry time.
    pub expires_unix_ms: u64,
    pub made_by: String,
}

/// Response to [`CreateToken`]. It is the only response that contains the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "8c1f0a52b7d94e36", "name": "monitoring", "role": "viewer",
    "made_unix_ms": 1_795_444_970_237_u64,
    "expires_unix_ms": 1_803_220_970_237_u64, "made_by": "root",
    "token": "godwit_8c1f0a52b7d94e36_SECRET"
}))]
pub struct CreatedToken {
    /// Stored properties of the token.
    #[serde(flatten)]
    pub info: TokenInfo,
    /// Token to send in the header `Authorization: Bearer`.
    pub token: String,
}

/// Outcome of a request in the audit log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AuditOutcome {
    /// The request was carried out or started.
    Done,
    /// The request was refused or failed.
    Refused,
}

/// An entry of the audit log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "unix_ms": 1_795_444_970_253_u64, "who": "ana", "role": "viewer", "token": "9f86d081884c",
    "from": "10.0.0.9", "what": "POST /api/v1/vms/web/moves",
    "outcome": "refused", "status": 403, "reason": "the role viewer may not do that"
}))]
pub struct AuditEntry {
    /// Time of the request, in milliseconds since 1970.
    pub unix_ms: u64,
    /// User: the name of a token, an OIDC subject or the name of a certificate; `nobody` if
    /// unknown.
    pub who: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// ID of the token, because several tokens can have the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Address of the client.
    #[schema(value_type = Option<String>)]
    pub from: Option<IpAddr>,
    /// Method and path; `500 more requests` for unauthenticated requests that were only counted.
    pub what: String,
    /// Outcome of the request.
    pub outcome: AuditOutcome,
    pub status: u16,
    /// Reason for the refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Created object, with its ID or name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<String>,
}
