//! Connections that follow the hosts' agents. An agent first reports everything it has, then each
//! change.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{Client, ClientError, HostEvent, LoadSample, MigrationStatus};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::cluster::bounds::{MOST_REASON_BYTES, Misreport, check_load};
use crate::cluster::state::State;
use crate::cluster::text::beginning;

/// Longest silence of an agent before its connection counts as lost. Agents send at least a
/// heartbeat every 2 s.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// First pause between two attempts to reach an agent.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause between two attempts to reach an agent.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// Capacity of the queue of news for the listener.
const WAITING_NEWS: usize = 1_024;
/// Most events of one host that are processed within [`EVENTS_INTERVAL`], so that a host that
/// reports all the time leaves time for others.
const MOST_EVENTS: u32 = 512;
const EVENTS_INTERVAL: Duration = Duration::from_millis(100);

/// Tasks that follow agents, by host.
#[derive(Debug)]
pub(crate) struct Following {
    state: Arc<State>,
    tasks: Mutex<BTreeMap<String, AbortHandle>>,
    feed: Arc<NewsFeed>,
}

/// News of hosts for the executor of moves.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    /// Progress or outcome of a migration, reported by this host, which is its source.
    Migration(String, Box<MigrationStatus>),
    /// This host's agent has reported everything after a new connection. It reports migrations that
    /// ended while it was unreachable, or that a restart has lost, only on request.
    Synchronized(String),
}

/// Taker of the hosts' samples of load.
pub(crate) trait LoadSink: fmt::Debug + Send + Sync {
    /// Takes a valid sample of a host. Does not block.
    fn take(&self, host: &str, sample: Box<LoadSample>);
}

/// Channel of news of hosts. News go to the latest listener, and are dropped without one.
#[derive(Debug, Default)]
pub(crate) struct NewsFeed {
    listener: Mutex<Option<mpsc::Sender<News>>>,
    loads: Option<Arc<dyn LoadSink>>,
}

impl NewsFeed {
    /// Returns a feed whose samples of load go to `loads`.
    pub(crate) fn with_loads(loads: Arc<dyn LoadSink>) -> NewsFeed {
        NewsFeed { listener: Mutex::default(), loads: Some(loads) }
    }

    /// Returns a receiver of all news from now on. It replaces the previous one.
    pub(crate) fn listen(&self) -> mpsc::Receiver<News> {
        let (sender, receiver) = mpsc::channel(WAITING_NEWS);
        *self.listener.lock() = Some(sender);
        receiver
    }

    /// Sends news to the listener. Waits while its queue is full; the host's events are not read
    /// meanwhile.
    async fn publish(&self, news: News) {
        let listener = self.listener.lock().clone();
        if let Some(listener) = listener {
            // The receiver is gone if this manager no longer leads.
            let _ = listener.send(news).await;
        }
    }
}

impl Following {
    /// Returns a set without connections. News of each host's migrations go to `feed`.
    pub(crate) fn new(state: Arc<State>, feed: Arc<NewsFeed>) -> Following {
        Following { state, tasks: Mutex::default(), feed }
    }

    /// Follows a host with this client, which replaces the previous one.
    pub(crate) fn follow(&self, host: &str, client: Client) {
        let task = follow(Arc::clone(&self.state), host.to_owned(), client, Arc::clone(&self.feed));
        let handle = tokio::spawn(task).abort_handle();
        if let Some(before) = self.tasks().insert(host.to_owned(), handle) {
            before.abort();
        }
    }

    /// Stops following a host.
    pub(crate) fn leave(&self, host: &str) {
        if let Some(task) = self.tasks().remove(host) {
            task.abort();
        }
    }

    fn tasks(&self) -> parking_lot::MutexGuard<'_, BTreeMap<String, AbortHandle>> {
        self.tasks.lock()
    }
}

async fn follow(state: Arc<State>, host: String, client: Client, feed: Arc<NewsFeed>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let mut received = Received::default();
        let why = match read_events(&state, &host, &client, &feed, &mut received).await {
            Ok(()) => "its agent closed the connection".to_owned(),
            Err(error) => beginning(&error.to_string(), MOST_REASON_BYTES),
        };
        tracing::warn!(host, why, "a host is away");
        if received.faulty_since.is_none() {
            state.lost(&host, &why);
        }
        pause = if received.is_complete { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        sleep(pause).await;
    }
}

/// State of one connection to an agent.
#[derive(Debug, Default)]
struct Received {
    /// Whether the host has reported everything.
    is_complete: bool,
    /// Time of the first invalid report.
    faulty_since: Option<Instant>,
}

impl Received {
    /// Marks a host as faulty and away. Its events are read for [`LONGEST_PAUSE`] more, so that the
    /// manager does not reconnect all the time.
    fn blame(&mut self, state: &State, host: &str, fault: &Misreport) {
        state.blame(host, fault);
        if self.faulty_since.is_none() {
            self.faulty_since = Some(Instant::now());
            state.lost(host, &format!("its agent reports invalid data: {fault}"));
        }
    }

    fn is_over(&self) -> bool {
        self.faulty_since.is_some_and(|since| since.elapsed() >= LONGEST_PAUSE)
    }
}

/// Reads the events of one connection until it ends.
async fn read_events(
    state: &State,
    host: &str,
    client: &Client,
    feed: &NewsFeed,
    received: &mut Received,
) -> Result<(), ClientError> {
    let mut events = client.watch().await?;
    state.reached(host);
    let (mut taken, mut since) = (0, Instant::now());
    while !received.is_over() {
        taken += 1;
        if taken == MOST_EVENTS {
            sleep_until(since + EVENTS_INTERVAL).await;
            (taken, since) = (0, Instant::now());
        }
        let event = match events.next_unless_silent(SILENCE_LIMIT).await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(()),
            Err(error @ ClientError::Protocol { .. }) => {
                received.blame(state, host, &Misreport::new(error.to_string()));
                continue;
            }
            Err(error) => return Err(error),
        };
        let event = match event {
            HostEvent::Load(sample) => {
                match (check_load(&sample), &feed.loads) {
                    (Err(fault), _) => received.blame(state, host, &fault),
                    (Ok(()), Some(loads)) if received.faulty_since.is_none() => {
                        loads.take(host, sample);
                    }
                    (Ok(()), _) => {}
                }
                continue;
            }
            event => event,
        };
        let news = match &event {
            HostEvent::Migration(status) => Some(News::Migration(host.to_owned(), status.clone())),
            // Sent only once the host's VMs are known: their places show the outcome of a migration
            // that no agent remembers.
            HostEvent::Known if received.faulty_since.is_none() => {
                received.is_complete = true;
                Some(News::Synchronized(host.to_owned()))
            }
            _ => None,
        };
        match state.try_apply(host, event) {
            Ok(()) => {
                if let Some(news) = news {
                    feed.publish(news).await;
                }
            }
            Err(fault) => received.blame(state, host, &fault),
        }
    }
    Ok(())
}
