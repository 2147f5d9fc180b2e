//! Removal of expired tokens and idempotency keys by the leader.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::Problem;

use crate::access::certificates::CERTIFICATES;
use crate::access::record::TOKENS;
use crate::clock::now_unix_ms;
use crate::hosts::join::record::JOIN_TOKENS;
use crate::idempotency::keys::KEPT_MS;
use crate::idempotency::record::REPEATS;
use crate::manager::Manager;
use crate::storage::keeper::Keeper;

const INTERVAL: Duration = Duration::from_secs(3600);
const DAY_MS: u64 = 24 * 3600 * 1000;
/// Time for which an expired token is reported as expired, not as unknown.
const TOKENS_KEPT_MS: u64 = 30 * DAY_MS;
/// Time for which a join token is retained after its expiry, used or not.
const JOIN_TOKENS_KEPT_MS: u64 = 7 * DAY_MS;

/// Prunes every hour while this manager leads.
pub(crate) async fn prune_hourly(manager: Arc<Manager>) {
    let mut interval = tokio::time::interval(INTERVAL);
    loop {
        interval.tick().await;
        let Ok(leading) = manager.leading() else { continue };
        match prune(&manager, &leading.keeper, now_unix_ms()).await {
            Ok(0) => {}
            Ok(records) => {
                tracing::info!(records, "removed expired tokens and idempotency keys");
            }
            Err(problem) => {
                tracing::warn!(%problem, "cannot remove expired records; retrying in an hour");
            }
        }
    }
}

/// Removes expired records. Returns their number.
pub(crate) async fn prune(
    manager: &Manager,
    keeper: &Keeper,
    now_unix_ms: u64,
) -> Result<usize, Problem> {
    let tokens = keeper
        .prune(TOKENS, |token| token.expires_unix_ms() + TOKENS_KEPT_MS <= now_unix_ms)
        .await?;
    for id in &tokens {
        manager.tokens.forget(id);
    }
    let join_tokens = keeper
        .prune(JOIN_TOKENS, |token| token.expires_unix_ms() + JOIN_TOKENS_KEPT_MS <= now_unix_ms)
        .await?;
    let repeats = keeper.prune(REPEATS, |asked| asked.unix_ms() + KEPT_MS <= now_unix_ms).await?;
    let certificates = keeper.prune(CERTIFICATES, |noted| noted.is_over(now_unix_ms)).await?;
    if let Ok(leading) = manager.leading() {
        leading.repeats.expire(now_unix_ms).await;
    }
    Ok(tokens.len() + join_tokens.len() + repeats.len() + certificates.len())
}
