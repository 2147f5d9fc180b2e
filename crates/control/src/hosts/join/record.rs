//! Stored form of a join token.

use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use super::token::{JoinTokenRecord, JoinUse};

pub(crate) const JOIN_TOKENS: Table<SavedJoinToken> = Table::new();

/// A join token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedJoinToken {
    host: String,
    address: Option<String>,
    made_unix_ms: u64,
    expires_unix_ms: u64,
    made_by: String,
    /// BLAKE3 of the secret, in hexadecimal digits.
    digest: blake3::Hash,
    used: Option<SavedJoinUse>,
}

/// Key for which a join token was used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedJoinUse {
    unix_ms: u64,
    /// SHA-256 of the public key, in hexadecimal digits.
    key: String,
}

impl SavedJoinToken {
    pub(crate) fn expires_unix_ms(&self) -> u64 {
        self.expires_unix_ms
    }
}

impl Record for SavedJoinToken {
    const KIND: &'static str = "join-token";
    const PREFIX: &'static str = "join-tokens/";
    const VERSION: u32 = 1;
}

impl From<&JoinTokenRecord> for SavedJoinToken {
    fn from(record: &JoinTokenRecord) -> SavedJoinToken {
        let record = record.clone();
        let JoinTokenRecord { host, address, made_unix_ms, made_by, digest, used, .. } = record;
        let expires_unix_ms = record.expires_unix_ms;
        let used = used.map(|JoinUse { unix_ms, key }| SavedJoinUse { unix_ms, key });
        SavedJoinToken { host, address, made_unix_ms, expires_unix_ms, made_by, digest, used }
    }
}

impl From<SavedJoinToken> for JoinTokenRecord {
    fn from(saved: SavedJoinToken) -> JoinTokenRecord {
        let SavedJoinToken { host, address, made_unix_ms, expires_unix_ms, made_by, digest, used } =
            saved;
        let used = used.map(|SavedJoinUse { unix_ms, key }| JoinUse { unix_ms, key });
        JoinTokenRecord { host, address, made_unix_ms, expires_unix_ms, made_by, digest, used }
    }
}
