//! `GET /v1/watch`: the complete state of the host, then each change. A manager follows many hosts
//! over one connection each.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::{get, put};
use axum::{Json, Router, body};
use futures::Stream;
use godwit_api::{
    ApiError, ErrorCode, HostInfo, LoadSample, MigrationStatus, RevocationsTaken, SetPeers,
    SetRevocations, VmInfo,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::agent::Agent;
use crate::server::answers::{Refusal, json_event};

/// Poll interval for changes.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Refresh interval for the host information, whose memory figures always change.
const HOST_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of keep-alive events. A reader that misses several in a row regards the agent as down.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Events queued for a slow reader. It then misses intermediate states, but not the last one.
const WAITING_EVENTS: usize = 64;

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/load", get(load))
        .route("/v1/watch", get(watch))
        .route("/v1/peers", put(set_peers))
        .route("/v1/revocations", put(set_revocations))
}

async fn load(State(agent): State<Arc<Agent>>) -> Result<Json<LoadSample>, Refusal> {
    let newest = agent.newest_load().ok_or_else(|| {
        let message = "cannot show the load: the agent has just started and has no sample yet";
        ApiError::new(ErrorCode::Busy, message, "repeat the request in 10 s")
    })?;
    Ok(Json(LoadSample::clone(&newest)))
}

async fn set_revocations(
    State(agent): State<Arc<Agent>>,
    bytes: body::Bytes,
) -> Result<Json<RevocationsTaken>, Refusal> {
    let list: SetRevocations = crate::server::answers::body(&bytes)?;
    Ok(Json(agent.set_revocations(&list)?))
}

async fn set_peers(
    State(agent): State<Arc<Agent>>,
    bytes: body::Bytes,
) -> Result<Json<SetPeers>, Refusal> {
    let peers: SetPeers = crate::server::answers::body(&bytes)?;
    Ok(Json(agent.set_peers(peers)?))
}

async fn watch(
    State(agent): State<Arc<Agent>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let (events, stream) = mpsc::channel(WAITING_EVENTS);
    tokio::spawn(send_changes(agent, events));
    let stream = tokio_stream::wrappers::ReceiverStream::new(stream);
    Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}

/// Sends the complete state, then each change, until the reader is gone.
async fn send_changes(agent: Arc<Agent>, events: mpsc::Sender<Result<Event, Infallible>>) {
    let mut sent = Sent::default();
    let mut poll = interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut host_read: Option<Instant> = None;
    let mut first = true;
    loop {
        tokio::select! {
            _ = poll.tick() => {}
            () = events.closed() => return,
        }
        let mut news = Vec::new();
        if host_read.is_none_or(|read| read.elapsed() >= HOST_INTERVAL) {
            host_read = Some(Instant::now());
            match agent.host_info().await {
                Ok(host) => news.extend(sent.host(host)),
                Err(error) => tracing::warn!(%error, "cannot send the host information"),
            }
        }
        news.extend(sent.vms(agent.vms()));
        news.extend(sent.migrations(agent.migrations().list()));
        if std::mem::take(&mut first) {
            news.push(json_event("known", &()));
        }
        news.extend(sent.load(agent.newest_load()));
        for event in news {
            if events.send(Ok(event)).await.is_err() {
                return;
            }
        }
    }
}

/// State that the reader received last.
#[derive(Debug, Default)]
struct Sent {
    host: Option<HostInfo>,
    vms: BTreeMap<String, VmInfo>,
    /// Running migrations by ID, as last sent.
    running: BTreeMap<String, MigrationStatus>,
    /// IDs of the ended migrations at the last poll; `None` before the first poll.
    over: Option<BTreeSet<String>>,
    /// Newest sample of the load.
    load: Option<Arc<LoadSample>>,
}

impl Sent {
    fn host(&mut self, now: HostInfo) -> Option<Event> {
        (self.host.as_ref() != Some(&now)).then(|| {
            let event = json_event("host", &now);
            self.host = Some(now);
            event
        })
    }

    /// Returns the newest sample if it was not sent yet.
    fn load(&mut self, now: Option<Arc<LoadSample>>) -> Option<Event> {
        let now = now?;
        let is_sent = self.load.as_ref().is_some_and(|sent| Arc::ptr_eq(sent, &now));
        (!is_sent).then(|| {
            let event = json_event("load", &*now);
            self.load = Some(now);
            event
        })
    }

    fn vms(&mut self, now: Vec<VmInfo>) -> Vec<Event> {
        let now: BTreeMap<String, VmInfo> =
            now.into_iter().map(|vm| (vm.name.clone(), vm)).collect();
        let gone = self.vms.keys().filter(|name| !now.contains_key(*name));
        let mut events: Vec<Event> = gone.map(|name| json_event("vm-gone", name)).collect();
        let changed = now.iter().filter(|(name, vm)| self.vms.get(*name) != Some(*vm));
        events.extend(changed.map(|(_, vm)| json_event("vm", vm)));
        self.vms = now;
        events
    }

    /// Returns the running migrations that changed, and those that ended since the first poll.
    fn migrations(&mut self, now: Vec<MigrationStatus>) -> Vec<Event> {
        let (over, running): (Vec<_>, Vec<_>) =
            now.into_iter().partition(|status| status.report.is_some());
        let is_news = |status: &&MigrationStatus| {
            self.over.as_ref().is_some_and(|known| !known.contains(&status.id))
        };
        let changed = |status: &&MigrationStatus| self.running.get(&status.id) != Some(*status);
        let news = running.iter().filter(changed).chain(over.iter().filter(is_news));
        let events = news.map(|status| json_event("migration", status)).collect();
        self.over = Some(over.into_iter().map(|status| status.id).collect());
        self.running = running.into_iter().map(|status| (status.id.clone(), status)).collect();
        events
    }
}

#[cfg(test)]
mod tests {
    use godwit_types::Progress;

    use super::*;

    fn status(id: &str, sent_bytes: u64, report: Option<godwit_types::Report>) -> MigrationStatus {
        MigrationStatus {
            progress: Progress { sent_bytes, ..Progress::begin(1 << 20) },
            report,
            ..MigrationStatus::begun(id, "web", "a", "b", 1 << 20)
        }
    }

    #[test]
    fn each_sample_is_sent_once() {
        let mut sent = Sent::default();
        let (first, second) = (Arc::new(LoadSample::default()), Arc::new(LoadSample::default()));
        assert!(sent.load(None).is_none());
        let polls = [&first, &first, &second, &second];
        let counts = polls.map(|newest| sent.load(Some(Arc::clone(newest))).iter().count());
        assert_eq!(counts, [1, 0, 1, 0]);
    }

    #[test]
    fn a_migration_is_sent_while_it_runs_and_when_it_ends() {
        let over = || Some(crate::migrations::tests::report("web"));
        let mut sent = Sent::default();
        let counts = [
            // A migration that ended before the first poll is not sent.
            vec![status("m1", 0, over())],
            vec![status("m1", 0, over()), status("m2", 0, None)],
            vec![status("m1", 0, over()), status("m2", 0, None)],
            vec![status("m1", 0, over()), status("m2", 5, None)],
            vec![status("m1", 0, over()), status("m2", 5, over())],
            // A migration that no poll saw running.
            vec![status("m1", 0, over()), status("m2", 5, over()), status("m3", 9, over())],
            vec![status("m2", 5, over()), status("m3", 9, over())],
        ]
        .map(|now| sent.migrations(now).len());
        assert_eq!(counts, [0, 1, 0, 1, 1, 1, 0]);
    }
}
