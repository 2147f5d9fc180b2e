//! Metrics of the manager in the Prometheus format, and the counters of moves and restarts.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use godwit_api::control::{Change, JournalEntry, JournalKind, JournalSeverity};
use http::header::CONTENT_TYPE;

use crate::clock::now_unix_ms;
use crate::journal::events::Next as NextEvents;
use crate::manager::Manager;
use crate::metrics::METRICS;

/// Most finished moves to remember, so that a repeated event does not count a move twice.
const MOST_COUNTED: usize = 20_000;

/// Serves `GET /metrics`.
pub(crate) async fn show(State(manager): State<Arc<Manager>>) -> Response {
    {
        let leading = manager.leading().ok();
        let moves = leading.as_ref().map(|leading| leading.moves.all());
        METRICS.update_gauges(&manager.state, moves.as_ref().map(|moves| moves.open()));
        let alarms = leading.as_ref().map(|leading| leading.alarms.all());
        let raised = alarms.iter().flat_map(|alarms| alarms.values());
        METRICS.update_alarms(raised.map(|alarm| alarm.severity));
        METRICS.update_ha(leading.as_ref().map(|leading| leading.judges.status()).as_ref());
    }
    match METRICS.text() {
        Ok(text) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
                .into_response()
        }
        Err(_) => http::StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Returns whether an entry says that a protected VM started on another host. One that need not
/// start has an entry of this kind too.
fn is_restart(entry: &JournalEntry) -> bool {
    entry.kind == JournalKind::VmRestarted && entry.severity == JournalSeverity::Warning
}

/// Counts moves as they end, and restarts of protected VMs, while the manager runs. Moves that
/// ended before its start are not counted.
pub(crate) async fn follow(manager: Arc<Manager>) {
    let since_unix_ms = now_unix_ms();
    let mut listener = manager.state.events().listen(None);
    let mut counted = BTreeSet::new();
    while let Some(next) = listener.next().await {
        let NextEvents::Events(events) = next else { continue };
        for event in events {
            let over = match &event.change {
                Change::Move(over) => over,
                Change::Journal(entry) if is_restart(entry) => {
                    METRICS.restarted();
                    continue;
                }
                _ => continue,
            };
            let is_new = over.ended_unix_ms.is_some_and(|ended| ended >= since_unix_ms);
            if !over.state.is_over() || !is_new || !counted.insert(over.id.clone()) {
                continue;
            }
            if counted.len() > MOST_COUNTED {
                // IDs sort by time.
                counted.pop_first();
            }
            let whole = manager
                .leading()
                .ok()
                .and_then(|leading| leading.moves.all().get(&over.id).cloned());
            METRICS.ended(whole.as_ref().unwrap_or(over));
        }
    }
}
