//! Saved form of a request with an idempotency key.

use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use super::keys::{StoredRequest, StoredResponse};

pub(crate) const REPEATS: Table<SavedRepeat> = Table::new();

/// A request with an idempotency key, and its response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedRepeat {
    unix_ms: u64,
    /// BLAKE3 digest of method, path and body, as hexadecimal digits.
    digest: blake3::Hash,
    answer: Option<SavedAnswer>,
}

/// Response to the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedAnswer {
    status: u16,
    media_type: String,
    body: Option<String>,
}

impl Record for SavedRepeat {
    const KIND: &'static str = "idempotency-key";
    const PREFIX: &'static str = "idempotency/";
    const VERSION: u32 = 1;
}

impl SavedRepeat {
    pub(crate) fn unix_ms(&self) -> u64 {
        self.unix_ms
    }
}

impl From<&StoredRequest> for SavedRepeat {
    fn from(stored: &StoredRequest) -> SavedRepeat {
        let StoredRequest { unix_ms, digest, answer } = stored.clone();
        let answer = answer.map(|StoredResponse { status, media_type, body }| SavedAnswer {
            status,
            media_type,
            body,
        });
        SavedRepeat { unix_ms, digest, answer }
    }
}

impl From<SavedRepeat> for StoredRequest {
    fn from(saved: SavedRepeat) -> StoredRequest {
        let SavedRepeat { unix_ms, digest, answer } = saved;
        let answer = answer.map(|SavedAnswer { status, media_type, body }| StoredResponse {
            status,
            media_type,
            body,
        });
        StoredRequest { unix_ms, digest, answer }
    }
}
