//! Follows each host's agent by one connection: everything it has, and then each change.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_api::{Client, ClientError, HostEvent, MigrationStatus};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::cluster::bounds::{MOST_REASON_BYTES, Misreport};
use crate::cluster::state::State;
use crate::cluster::text::beginning;

/// An agent says something every 2 s, if only that it lives.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// Between two attempts to reach an agent, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// News that wait for the listener.
const WAITING_NEWS: usize = 1_024;
/// Events of one host that are taken within [`EVENTS_INTERVAL`]: one that reports all the time leaves time for others.
const MOST_EVENTS: u32 = 512;
const EVENTS_INTERVAL: Duration = Duration::from_millis(100);

/// Those who follow, by host.
#[derive(Debug)]
pub(crate) struct Following {
    state: Arc<State>,
    tasks: Mutex<BTreeMap<String, AbortHandle>>,
    told: Arc<Told>,
}

/// What whoever carries moves out is told of hosts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    /// How far a migration is, or how it ended, as this host tells it, which it leaves.
    Migration(String, Box<MigrationStatus>),
    /// This host's agent has told everything anew. What ended while it was not heard, or was forgotten by a restart, it tells only who asks.
    Heard(String),
}

/// News of hosts: to whoever listens last, and to nobody where nobody does.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<Option<mpsc::Sender<News>>>);

impl Told {
    /// All news from now on.
    pub(crate) fn listen(&self) -> mpsc::Receiver<News> {
        let (sender, receiver) = mpsc::channel(WAITING_NEWS);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        receiver
    }

    /// Waits while the listener is behind: the host is read no further meanwhile.
    async fn tell(&self, news: News) {
        let listener = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(listener) = listener {
            // Nobody listens any more where this manager stopped leading.
            let _ = listener.send(news).await;
        }
    }
}

impl Following {
    /// Each host's migrations are told as they come.
    pub(crate) fn new(state: Arc<State>, told: Arc<Told>) -> Following {
        Following { state, tasks: Mutex::default(), told }
    }

    /// Follows a host by this client, in the place of the one before.
    pub(crate) fn follow(&self, host: &str, client: Client) {
        let task = follow(Arc::clone(&self.state), host.to_owned(), client, Arc::clone(&self.told));
        let handle = tokio::spawn(task).abort_handle();
        if let Some(before) = self.tasks().insert(host.to_owned(), handle) {
            before.abort();
        }
    }

    /// Follows a host no more.
    pub(crate) fn leave(&self, host: &str) {
        if let Some(task) = self.tasks().remove(host) {
            task.abort();
        }
    }

    fn tasks(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, AbortHandle>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn follow(state: Arc<State>, host: String, client: Client, told: Arc<Told>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let mut heard = Heard::default();
        let why = match hear(&state, &host, &client, &told, &mut heard).await {
            Ok(()) => "its agent closed the connection".to_owned(),
            Err(error) => beginning(&error.to_string(), MOST_REASON_BYTES),
        };
        tracing::warn!(host, why, "a host is away");
        if heard.faulty_since.is_none() {
            state.lost(&host, &why);
        }
        pause = if heard.is_known { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        sleep(pause).await;
    }
}

/// What was heard by one connection.
#[derive(Debug, Default)]
struct Heard {
    /// The host has told everything.
    is_known: bool,
    /// When it first reported what no agent reports.
    faulty_since: Option<Instant>,
}

impl Heard {
    /// Shows a host as faulty and away. It is read on for a while, so that it is not asked anew all the time.
    fn blame(&mut self, state: &State, host: &str, fault: &Misreport) {
        state.blame(host, fault);
        if self.faulty_since.is_none() {
            self.faulty_since = Some(Instant::now());
            state.lost(host, &format!("it reports what no agent reports: {fault}"));
        }
    }

    fn is_over(&self) -> bool {
        self.faulty_since.is_some_and(|since| since.elapsed() >= LONGEST_PAUSE)
    }
}

/// One connection, until it ends.
async fn hear(
    state: &State,
    host: &str,
    client: &Client,
    told: &Told,
    heard: &mut Heard,
) -> Result<(), ClientError> {
    let mut events = client.watch().await?;
    state.reached(host);
    let (mut taken, mut since) = (0, Instant::now());
    while !heard.is_over() {
        taken += 1;
        if taken == MOST_EVENTS {
            sleep_until(since + EVENTS_INTERVAL).await;
            (taken, since) = (0, Instant::now());
        }
        let event = match events.next_unless_silent(SILENCE_LIMIT).await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(()),
            Err(error @ ClientError::Protocol { .. }) => {
                heard.blame(state, host, &Misreport::new(error.to_string()));
                continue;
            }
            Err(error) => return Err(error),
        };
        let news = match &event {
            HostEvent::Migration(status) => Some(News::Migration(host.to_owned(), status.clone())),
            // Not before its VMs are known: where they are says what became of a migration that nobody knows any more.
            HostEvent::Known if heard.faulty_since.is_none() => {
                heard.is_known = true;
                Some(News::Heard(host.to_owned()))
            }
            _ => None,
        };
        match state.take(host, event) {
            Ok(()) => {
                if let Some(news) = news {
                    told.tell(news).await;
                }
            }
            Err(fault) => heard.blame(state, host, &fault),
        }
    }
    Ok(())
}
