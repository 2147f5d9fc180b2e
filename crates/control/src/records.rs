//! What the manager keeps in the store, as it is saved: promises to later versions, apart from what it works with.

use std::collections::BTreeMap;

use godwit_api::control::{PlannedPower, Role, TokenInfo};
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use crate::access::repeat::{Answered, Asked};
use crate::access::{JoinTokenRecord, JoinUse, TokenRecord};
use crate::inventory::{HostPlan, VmPlan};

pub(crate) const HOSTS: Table<SavedHost> = Table::new();
pub(crate) const VMS: Table<SavedVm> = Table::new();
pub(crate) const TOKENS: Table<SavedToken> = Table::new();
pub(crate) const REPEATS: Table<SavedRepeat> = Table::new();
pub(crate) const JOIN_TOKENS: Table<SavedJoinToken> = Table::new();

/// What is planned of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedHost {
    address: String,
    labels: BTreeMap<String, String>,
    link_bits_per_s: Option<u64>,
    most_moves: Option<u32>,
    maintenance: bool,
}

impl Record for SavedHost {
    const KIND: &'static str = "host";
    const PREFIX: &'static str = "hosts/";
    const VERSION: u32 = 1;
}

impl From<&HostPlan> for SavedHost {
    fn from(plan: &HostPlan) -> SavedHost {
        let HostPlan { address, labels, link_bits_per_s, most_moves, maintenance } = plan.clone();
        SavedHost { address, labels, link_bits_per_s, most_moves, maintenance }
    }
}

impl From<SavedHost> for HostPlan {
    fn from(saved: SavedHost) -> HostPlan {
        let SavedHost { address, labels, link_bits_per_s, most_moves, maintenance } = saved;
        HostPlan { address, labels, link_bits_per_s, most_moves, maintenance }
    }
}

/// What is planned of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedVm {
    power: PlannedPower,
    labels: BTreeMap<String, String>,
}

impl Record for SavedVm {
    const KIND: &'static str = "vm";
    const PREFIX: &'static str = "vms/";
    const VERSION: u32 = 1;
}

impl From<&VmPlan> for SavedVm {
    fn from(plan: &VmPlan) -> SavedVm {
        SavedVm { power: plan.power, labels: plan.labels.clone() }
    }
}

impl From<SavedVm> for VmPlan {
    fn from(saved: SavedVm) -> VmPlan {
        VmPlan { power: saved.power, labels: saved.labels }
    }
}

/// A token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedToken {
    name: String,
    role: Role,
    made_unix_ms: u64,
    expires_unix_ms: u64,
    made_by: String,
    /// BLAKE3 of the secret, in hexadecimal digits.
    digest: blake3::Hash,
}

impl Record for SavedToken {
    const KIND: &'static str = "token";
    const PREFIX: &'static str = "tokens/";
    const VERSION: u32 = 1;
}

impl From<&TokenRecord> for SavedToken {
    fn from(record: &TokenRecord) -> SavedToken {
        let TokenInfo { name, role, made_unix_ms, expires_unix_ms, made_by, .. } = record.info.clone();
        SavedToken { name, role, made_unix_ms, expires_unix_ms, made_by, digest: record.digest }
    }
}

impl SavedToken {
    pub(crate) fn expires_unix_ms(&self) -> u64 {
        self.expires_unix_ms
    }

    pub(crate) fn record(self, id: &str) -> TokenRecord {
        let SavedToken { name, role, made_unix_ms, expires_unix_ms, made_by, digest } = self;
        let info = TokenInfo { id: id.to_owned(), name, role, made_unix_ms, expires_unix_ms, made_by };
        TokenRecord { info, digest }
    }
}

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

/// Which key a join token was used for.
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
        let JoinTokenRecord { host, address, made_unix_ms, expires_unix_ms, made_by, digest, used } =
            record.clone();
        let used = used.map(|JoinUse { unix_ms, key }| SavedJoinUse { unix_ms, key });
        SavedJoinToken { host, address, made_unix_ms, expires_unix_ms, made_by, digest, used }
    }
}

impl From<SavedJoinToken> for JoinTokenRecord {
    fn from(saved: SavedJoinToken) -> JoinTokenRecord {
        let SavedJoinToken { host, address, made_unix_ms, expires_unix_ms, made_by, digest, used } = saved;
        let used = used.map(|SavedJoinUse { unix_ms, key }| JoinUse { unix_ms, key });
        JoinTokenRecord { host, address, made_unix_ms, expires_unix_ms, made_by, digest, used }
    }
}

/// A request with an idempotency key, and its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedRepeat {
    unix_ms: u64,
    /// BLAKE3 of method, path and body, in hexadecimal digits.
    digest: blake3::Hash,
    answer: Option<SavedAnswer>,
}

/// How it was answered.
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

impl From<&Asked> for SavedRepeat {
    fn from(asked: &Asked) -> SavedRepeat {
        let Asked { unix_ms, digest, answer } = asked.clone();
        let answer =
            answer.map(|Answered { status, media_type, body }| SavedAnswer { status, media_type, body });
        SavedRepeat { unix_ms, digest, answer }
    }
}

impl From<SavedRepeat> for Asked {
    fn from(saved: SavedRepeat) -> Asked {
        let SavedRepeat { unix_ms, digest, answer } = saved;
        let answer =
            answer.map(|SavedAnswer { status, media_type, body }| Answered { status, media_type, body });
        Asked { unix_ms, digest, answer }
    }
}
