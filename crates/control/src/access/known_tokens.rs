//! The tokens that a manager knows, and who is told when one has gone.

use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use godwit_api::control::{Problem, TokenInfo};
use tokio::sync::watch;

use super::record::SavedToken;
use super::{Caller, TokenRecord, Tokens};
use crate::clock::now_unix_ms;
use crate::storage::planned::Planned;

/// How long a caller's token is taken for good without another look at the clock.
const LONGEST_TRUST: Duration = Duration::from_secs(60);

/// Tokens, behind their lock.
#[derive(Debug)]
pub(crate) struct KnownTokens {
    tokens: RwLock<Tokens>,
    /// Changes whenever a token has gone.
    gone: watch::Sender<()>,
}

impl Default for KnownTokens {
    fn default() -> KnownTokens {
        KnownTokens { tokens: RwLock::default(), gone: watch::Sender::new(()) }
    }
}

impl KnownTokens {
    /// Knows a token from now on.
    pub(crate) fn know(&self, record: TokenRecord) {
        self.tokens.write().unwrap_or_else(PoisonError::into_inner).insert(record);
    }

    /// Knows a token no more.
    pub(crate) fn forget(&self, id: &str) {
        self.tokens.write().unwrap_or_else(PoisonError::into_inner).remove(id);
        self.gone.send_replace(());
    }

    /// Waits until what a caller showed is good no more: it was revoked, or is over.
    pub(crate) async fn is_good_no_more(&self, caller: &Caller) {
        let mut gone = self.gone.subscribe();
        loop {
            gone.borrow_and_update();
            let is_known =
                |id: &String| self.tokens.read().unwrap_or_else(PoisonError::into_inner).has(id);
            let left_ms = caller.until_unix_ms.map(|until| until.saturating_sub(now_unix_ms()));
            if !caller.token.as_ref().is_none_or(is_known) || left_ms == Some(0) {
                return;
            }
            // The clock may be set meanwhile.
            let left = Duration::from_millis(left_ms.unwrap_or(u64::MAX)).min(LONGEST_TRUST);
            // It can't fail: the sender is part of self.
            let _ = tokio::time::timeout(left, gone.changed()).await;
        }
    }

    /// Who shows that token.
    pub(crate) fn caller(&self, token: &str, now_unix_ms: u64) -> Result<Caller, Problem> {
        self.tokens.read().unwrap_or_else(PoisonError::into_inner).caller(token, now_unix_ms)
    }

    /// Every token, without its secret.
    pub(crate) fn infos(&self) -> Vec<TokenInfo> {
        let tokens = self.tokens.read().unwrap_or_else(PoisonError::into_inner);
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
