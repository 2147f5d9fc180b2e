//! `GET /v1/watch`: everything that the host has, then each change. For a manager, which follows many hosts by one connection each.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::{get, put};
use axum::{Json, Router, body};
use futures::Stream;
use godwit_api::{HostInfo, MigrationStatus, RevocationsTaken, SetPeers, SetRevocations, VmInfo};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::agent::Agent;
use crate::server::routes::{Refusal, json_event};

/// How often it is looked what has changed.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// How often what the host has is asked: memory changes all the time.
const HOST_INTERVAL: Duration = Duration::from_secs(2);
/// An agent that says nothing for longer than some of these is away.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Events that wait for a slow reader; it misses steps in between then, and no last state.
const WAITING_EVENTS: usize = 64;

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/watch", get(watch))
        .route("/v1/peers", put(set_peers))
        .route("/v1/revocations", put(set_revocations))
}

async fn set_revocations(
    State(agent): State<Arc<Agent>>,
    bytes: body::Bytes,
) -> Result<Json<RevocationsTaken>, Refusal> {
    let list: SetRevocations = crate::server::routes::body(&bytes)?;
    Ok(Json(agent.set_revocations(&list)?))
}

async fn set_peers(
    State(agent): State<Arc<Agent>>,
    bytes: body::Bytes,
) -> Result<Json<SetPeers>, Refusal> {
    let peers: SetPeers = crate::server::routes::body(&bytes)?;
    Ok(Json(agent.set_peers(peers)?))
}

async fn watch(
    State(agent): State<Arc<Agent>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let (events, stream) = mpsc::channel(WAITING_EVENTS);
    tokio::spawn(tell_all(agent, events));
    let stream = tokio_stream::wrappers::ReceiverStream::new(stream);
    Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}

/// Tells everything, and then each change. Ends with its reader.
async fn tell_all(agent: Arc<Agent>, events: mpsc::Sender<Result<Event, Infallible>>) {
    let mut told = Told::default();
    let mut look = interval(LOOK_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut host_asked: Option<Instant> = None;
    let mut first = true;
    loop {
        tokio::select! {
            _ = look.tick() => {}
            () = events.closed() => return,
        }
        let mut news = Vec::new();
        if host_asked.is_none_or(|asked| asked.elapsed() >= HOST_INTERVAL) {
            host_asked = Some(Instant::now());
            match agent.host_info().await {
                Ok(host) => news.extend(told.host(host)),
                Err(error) => tracing::warn!(%error, "a manager is not told what the host has"),
            }
        }
        news.extend(told.vms(agent.vms()));
        news.extend(told.migrations(agent.migrations().list()));
        if std::mem::take(&mut first) {
            news.push(json_event("known", &()));
        }
        for event in news {
            if events.send(Ok(event)).await.is_err() {
                return;
            }
        }
    }
}

/// What a reader has been told last.
#[derive(Debug, Default)]
struct Told {
    host: Option<HostInfo>,
    vms: BTreeMap<String, VmInfo>,
    /// Those that run, by id, as they were told.
    running: BTreeMap<String, MigrationStatus>,
    /// Those that are over and were told so, or were over before anything was told; none: nothing has been told.
    over: Option<BTreeSet<String>>,
}

impl Told {
    fn host(&mut self, now: HostInfo) -> Option<Event> {
        (self.host.as_ref() != Some(&now)).then(|| {
            let event = json_event("host", &now);
            self.host = Some(now);
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

    /// Those that run, and those that have ended since the first look.
    fn migrations(&mut self, now: Vec<MigrationStatus>) -> Vec<Event> {
        let (over, running): (Vec<_>, Vec<_>) =
            now.into_iter().partition(|status| status.report.is_some());
        let is_news = |status: &&MigrationStatus| {
            self.over.as_ref().is_some_and(|told| !told.contains(&status.id))
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
    fn a_migration_is_told_while_it_runs_and_when_it_ends() {
        let over = || Some(crate::migrations::tests::report("web"));
        let mut told = Told::default();
        let counts = [
            // What was over before is history.
            vec![status("m1", 0, over())],
            vec![status("m1", 0, over()), status("m2", 0, None)],
            vec![status("m1", 0, over()), status("m2", 0, None)],
            vec![status("m1", 0, over()), status("m2", 5, None)],
            vec![status("m1", 0, over()), status("m2", 5, over())],
            // One that nobody saw run.
            vec![status("m1", 0, over()), status("m2", 5, over()), status("m3", 9, over())],
            vec![status("m2", 5, over()), status("m3", 9, over())],
        ]
        .map(|now| told.migrations(now).len());
        assert_eq!(counts, [0, 1, 0, 1, 1, 1, 0]);
    }
}
