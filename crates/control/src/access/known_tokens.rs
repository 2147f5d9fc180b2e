//! Tokens that a manager accepts, with a notification when one is revoked.

use std::collections::BTreeSet;
use std::time::Duration;

use godwit_api::control::{Problem, TokenInfo};
use parking_lot::RwLock;
use tokio::sync::watch;

use super::record::SavedToken;
use super::{Caller, TokenRecord, Tokens};
use crate::clock::now_unix_ms;
use crate::storage::planned::Planned;

/// Longest time between two checks of the clock for an expired credential.
const LONGEST_TRUST: Duration = Duration::from_secs(60);

/// Tokens behind a lock.
#[derive(Debug)]
pub(crate) struct KnownTokens {
    tokens: RwLock<Tokens>,
    /// Changes whenever a token is revoked.
    gone: watch::Sender<()>,
}

impl Default for KnownTokens {
    fn default() -> KnownTokens {
        KnownTokens { tokens: RwLock::default(), gone: watch::Sender::new(()) }
    }
}

impl KnownTokens {
    /// Adds a token.
    pub(crate) fn know(&self, record: TokenRecord) {
        self.tokens.write().insert(record);
    }

    /// Removes a token.
    pub(crate) fn forget(&self, id: &str) {
        self.tokens.write().remove(id);
        self.gone.send_replace(());
    }

    /// Waits until a caller's credential has been revoked or has expired.
    pub(crate) async fn is_good_no_more(&self, caller: &Caller) {
        let mut gone = self.gone.subscribe();
        loop {
            gone.borrow_and_update();
            let is_known = |id: &String| self.tokens.read().has(id);
            let left_ms = caller.until_unix_ms.map(|until| until.saturating_sub(now_unix_ms()));
            if !caller.token.as_ref().is_none_or(is_known) || left_ms == Some(0) {
                return;
            }
            // The clock may be set in the meantime.
            let left = Duration::from_millis(left_ms.unwrap_or(u64::MAX)).min(LONGEST_TRUST);
            // `changed` cannot fail: the sender is part of self.
            let _ = tokio::time::timeout(left, gone.changed()).await;
        }
    }

    /// Returns the holder of a token.
    pub(crate) fn caller(&self, token: &str, now_unix_ms: u64) -> Result<Caller, Problem> {
        self.tokens.read().caller(token, now_unix_ms)
    }

    /// Returns all tokens, without their secrets.
    pub(crate) fn infos(&self) -> Vec<TokenInfo> {
        let tokens = self.tokens.read();
        tokens.iter().map(|record| record.info.clone()).collect()
    }
}

impl Planned<KnownTokens> for SavedToken {
    fn known(tokens: &KnownTokens) -> BTreeSet<String> {
        tokens.infos().into_iter().map(|token| token.id).collect()
    }

    fn set(tokens: &KnownTokens, id: &str, record: Option<SavedToken>) {
        match record {
            Some(saved) => tokens.know(saved.record(id)),
            None => tokens.forget(id),
        }
    }
}
