//! Follows each host's agent by one connection: everything it has, and then each change.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_api::{Client, ClientError, HostEvent, MigrationStatus};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::state::State;

/// An agent says something every 2 s, if only that it lives.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// Between two attempts to reach an agent, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

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
    /// How far a migration is, or how it ended, as its source tells it.
    Migration(Box<MigrationStatus>),
    /// This host's agent has told everything anew. What ended while it was not heard, or was forgotten by a restart, it tells only who asks.
    Heard(String),
}

/// News of hosts: to whoever listens last, and to nobody where nobody does.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<Option<mpsc::UnboundedSender<News>>>);

impl Told {
    /// All news from now on.
    pub(crate) fn listen(&self) -> mpsc::UnboundedReceiver<News> {
        let (sender, receiver) = mpsc::unbounded_channel();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        receiver
    }

    fn tell(&self, news: News) {
        if let Some(listener) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            // Nobody listens any more where this manager stopped leading.
            let _ = listener.send(news);
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
        let mut was_known = false;
        let why = match hear(&state, &host, &client, &told, &mut was_known).await {
            Ok(()) => "its agent closed the connection".to_owned(),
            Err(error) => error.to_string(),
        };
        tracing::warn!(host, why, "a host is away");
        state.lost(&host, &why);
        pause = if was_known { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        sleep(pause).await;
    }
}

/// One connection, until it ends.
async fn hear(
    state: &State,
    host: &str,
    client: &Client,
    told: &Told,
    was_known: &mut bool,
) -> Result<(), ClientError> {
    let mut events = client.watch().await?;
    state.reached(host);
    loop {
        let Some(event) = events.next_unless_silent(SILENCE_LIMIT).await? else { return Ok(()) };
        match event {
            HostEvent::Migration(status) => told.tell(News::Migration(status)),
            HostEvent::Known => {
                *was_known = true;
                state.heard(host, HostEvent::Known);
                // Not before its VMs are known: where they are says what became of a migration that nobody knows any more.
                told.tell(News::Heard(host.to_owned()));
            }
            event => state.heard(host, event),
        }
    }
}
