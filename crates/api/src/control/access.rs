//! Who may do what, and who did what.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What the holder of a token may do; each may do what those before it may.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Look.
    Viewer,
    /// Work with VMs, moves and drains.
    Operator,
    /// Work with hosts, rules, limits and tokens.
    Admin,
}

impl Role {
    /// The name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Viewer => "viewer",
            Role::Operator => "operator",
            Role::Admin => "admin",
        }
    }
}

/// `GET /api/v1/me`: who asks, as the manager knows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({ "name": "ana", "role": "operator" }))]
pub struct Me {
    /// As the audit log names them.
    pub name: String,
    /// What they may.
    pub role: Role,
}

/// `POST /api/v1/tokens`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "monitoring", "role": "viewer", "days": 90 }))]
pub struct CreateToken {
    /// Whose it is; stands in the audit log.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub name: String,
    /// What it allows.
    pub role: Role,
    /// How long it is good for.
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
    "id": "8c1f0a52b7d94e36", "name": "monitoring", "role": "viewer", "made_unix_ms": 1_795_444_970_237_u64,
    "expires_unix_ms": 1_803_220_970_237_u64, "made_by": "root"
}))]
pub struct TokenInfo {
    /// Names it.
    pub id: String,
    pub name: String,
    /// What it allows.
    pub role: Role,
    /// When it was made.
    pub made_unix_ms: u64,
    /// Until when it is good.
    pub expires_unix_ms: u64,
    pub made_by: String,
}

/// The answer to [`CreateToken`]: the one time that its secret is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "8c1f0a52b7d94e36", "name": "monitoring", "role": "viewer", "made_unix_ms": 1_795_444_970_237_u64,
    "expires_unix_ms": 1_803_220_970_237_u64, "made_by": "root", "token": "godwit_8c1f0a52b7d94e36_SECRET"
}))]
pub struct CreatedToken {
    /// What is kept of it.
    #[serde(flatten)]
    pub info: TokenInfo,
    /// What goes behind `Authorization: Bearer`.
    pub token: String,
}

/// How a request ended that stands in the audit log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AuditOutcome {
    /// It was done, or begun.
    Done,
    /// It was refused, or failed.
    Refused,
}

/// A line of the audit log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "unix_ms": 1_795_444_970_253_u64, "who": "ana", "role": "viewer", "token": "9f86d081884c", "from": "10.0.0.9", "what": "POST /api/v1/vms/web/moves",
    "outcome": "refused", "status": 403, "reason": "the role viewer may not do that"
}))]
pub struct AuditEntry {
    /// When, milliseconds since 1970.
    pub unix_ms: u64,
    /// Who: a token's name, an OIDC subject, a certificate's name; `nobody` where that was not known.
    pub who: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// The id of its token: names may be those of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// From where.
    #[schema(value_type = Option<String>)]
    pub from: Option<IpAddr>,
    /// What: a method and a path; `500 more requests` for those of nobody's that were counted.
    pub what: String,
    /// How it ended.
    pub outcome: AuditOutcome,
    pub status: u16,
    /// Why it was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What was made by it, with its id or name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<String>,
}
