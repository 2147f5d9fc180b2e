//! Watches of etcd.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{Event, EventType, WatchOptions, WatchResponse, WatchStream};
use tokio::time::timeout;

use super::connection::{Connection, Failure, Session, judge};
use super::{Layout, MOST_ANSWER_BYTES, revision};
use crate::error::{StoreError, Written};
use crate::history::{Change, ChangeSource, Changes};

/// Longest time until etcd has created a watch.
const BEGIN: Duration = Duration::from_secs(3);

/// Watches one range of keys. After a broken connection it continues on the next one, from the
/// first change that it has not received.
pub(super) struct Follower {
    connection: Arc<Connection>,
    layout: Layout,
    from: String,
    /// `None`: a single key.
    to: Option<String>,
    /// Everything up to this revision has been returned, or is in `ready`.
    since: i64,
    stream: Option<(Session, WatchStream)>,
    ready: VecDeque<Changes>,
    gone: bool,
}

impl Follower {
    pub(super) fn new(
        connection: Arc<Connection>,
        layout: Layout,
        (from, to): (String, String),
        since: i64,
    ) -> Follower {
        let (ready, to) = (VecDeque::new(), Some(to));
        Follower { connection, layout, from, to, since, stream: None, ready, gone: false }
    }

    /// Watches one key, by its full name in etcd.
    pub(super) fn of_key(connection: Arc<Connection>, key: String, since: i64) -> Follower {
        let layout = Layout { items: String::new(), leader: String::new() };
        let mut follower = Follower::new(connection, layout, (key, String::new()), since);
        follower.to = None;
        follower
    }

    /// Creates the watch.
    async fn begin(&self) -> Result<(Session, WatchStream), Failure> {
        let session = self.connection.session().await?;
        let mut options = WatchOptions::new().with_start_revision(self.since + 1);
        if let Some(to) = &self.to {
            options = options.with_range(to.as_str());
        }
        let mut client = session.client.watch_client().max_decoding_message_size(MOST_ANSWER_BYTES);
        let failure = match timeout(BEGIN, client.watch(self.from.as_str(), Some(options))).await {
            Ok(Ok(stream)) => return Ok((session, stream)),
            Ok(Err(error)) => judge(&error),
            Err(_) => Failure::Lost(format!("no watch within {BEGIN:?}")),
        };
        self.connection.leave(&session).await;
        Err(failure)
    }

    /// Handles the end of the stream.
    async fn ended(&mut self, failure: Failure) -> StoreError {
        if let Some((session, _)) = self.stream.take()
            && matches!(failure, Failure::Lost(_))
        {
            self.connection.leave(&session).await;
        }
        failure.into_error(self.connection.name(), Written::No)
    }

    /// Groups events by the transactions that made them. Each group has its transaction's revision.
    fn apply(&mut self, message: &WatchResponse) {
        for event in message.events() {
            let Some((revision, change)) = self.change(event) else { continue };
            match self.ready.back_mut() {
                Some(last) if last.revision == revision => last.changes.push(change),
                _ => self.ready.push_back(Changes { revision, changes: vec![change] }),
            }
        }
        let newest = message.events().last().and_then(Event::kv);
        self.since = newest.map_or(self.since, etcd_client::KeyValue::mod_revision);
    }

    fn change(&self, event: &Event) -> Option<(super::Revision, Change)> {
        let item = event.kv()?;
        let value = match event.event_type() {
            EventType::Put => Some(String::from_utf8_lossy(item.value()).into_owned()),
            EventType::Delete => None,
        };
        Some((revision(item.mod_revision()), Change { key: self.layout.strip(item.key()), value }))
    }
}

#[async_trait]
impl ChangeSource for Follower {
    async fn next(&mut self) -> Result<Changes, StoreError> {
        loop {
            if let Some(changes) = self.ready.pop_front() {
                return Ok(changes);
            }
            if self.gone {
                return Err(StoreError::HistoryGone { since: revision(self.since) });
            }
            let Some((_, stream)) = &mut self.stream else {
                let begun = self.begin().await;
                self.stream =
                    Some(begun.map_err(|failure| {
                        failure.into_error(self.connection.name(), Written::No)
                    })?);
                continue;
            };
            match stream.message().await {
                Ok(Some(message)) if message.canceled() && message.compact_revision() != 0 => {
                    self.gone = true;
                }
                Ok(Some(message)) if message.canceled() => {
                    let why = format!("it ended a watch: {}", message.cancel_reason());
                    return Err(self.ended(Failure::Lost(why)).await);
                }
                Ok(Some(message)) => self.apply(&message),
                Ok(None) => {
                    return Err(self.ended(Failure::Lost("it ended a watch".to_owned())).await);
                }
                Err(error) => return Err(self.ended(judge(&error)).await),
            }
        }
    }
}
