//! Audit log: the requests of users.

use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

/// An audit entry as it is saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditEntry {
    /// Time in milliseconds since 1970, by the clock of the manager that wrote the entry.
    pub at_unix_ms: u64,
    /// Name of the operator or token.
    pub who: String,
    /// Method and path of the request.
    pub what: String,
    /// Unused: the path says it.
    pub about: String,
    /// Whether the request was carried out, and otherwise the reason.
    pub outcome: String,
    /// The entry as the API returns it.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub detail: serde_json::Value,
}

impl Record for AuditEntry {
    const KIND: &'static str = "audit";
    const PREFIX: &'static str = "audit/";
    const VERSION: u32 = 1;
}

/// Entries of the audit log, newest first, for reading pages.
pub const AUDIT: Table<AuditEntry> = Table::new();
