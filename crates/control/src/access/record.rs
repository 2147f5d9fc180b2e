//! Saved form of tokens.

use godwit_api::control::{Role, TokenInfo};
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use super::TokenRecord;

pub(crate) const TOKENS: Table<SavedToken> = Table::new();

/// Token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedToken {
    name: String,
    role: Role,
    made_unix_ms: u64,
    expires_unix_ms: u64,
    made_by: String,
    /// BLAKE3 digest of the secret, in hexadecimal digits.
    digest: blake3::Hash,
}

impl Record for SavedToken {
    const KIND: &'static str = "token";
    const PREFIX: &'static str = "tokens/";
    const VERSION: u32 = 1;
}

impl From<&TokenRecord> for SavedToken {
    fn from(record: &TokenRecord) -> SavedToken {
        let TokenInfo { name, role, made_unix_ms, expires_unix_ms, made_by, .. } =
            record.info.clone();
        SavedToken { name, role, made_unix_ms, expires_unix_ms, made_by, digest: record.digest }
    }
}

impl SavedToken {
    pub(crate) fn expires_unix_ms(&self) -> u64 {
        self.expires_unix_ms
    }

    pub(crate) fn record(self, id: &str) -> TokenRecord {
        let SavedToken { name, role, made_unix_ms, expires_unix_ms, made_by, digest } = self;
        let info =
            TokenInfo { id: id.to_owned(), name, role, made_unix_ms, expires_unix_ms, made_by };
        TokenRecord { info, digest }
    }
}
