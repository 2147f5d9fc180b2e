//! A connection to one member of etcd at a time, and to the next member when that fails.
//!
//! etcd's client can spread requests over members, but keeps sending some to members that are
//! unavailable. So it gets one address, and a new connection after each failure.

use std::error::Error as _;
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Error, GetOptions};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::error::{StoreError, Written};

/// Longest time to a member's first response.
const FIRST_ANSWER: Duration = Duration::from_secs(3);

/// Why etcd did not carry out a request.
#[derive(Debug)]
pub(super) enum Failure {
    /// There was no response.
    Lost(String),
    /// The requested revision has been compacted.
    Compacted,
    /// etcd rejects the request.
    Refused { why: String, remedy: &'static str },
}

impl Failure {
    /// Converts to a store error; `lost` states what a lost response means.
    pub(super) fn into_error(self, store: &str, lost: Written) -> StoreError {
        let store = store.to_owned();
        match self {
            Failure::Lost(why) => StoreError::Unavailable { store, why, written: lost },
            Failure::Compacted => StoreError::Refused {
                store,
                why: "it compacts revisions while they are read".to_owned(),
                remedy: "let etcd compact after an hour: --auto-compaction-retention=1h",
            },
            Failure::Refused { why, remedy } => StoreError::Refused { store, why, remedy },
        }
    }
}

/// The connection to etcd.
pub(super) struct Connection {
    endpoints: Vec<String>,
    name: String,
    options: ConnectOptions,
    /// Key that each new connection reads first.
    first_key: String,
    current: Mutex<Current>,
}

struct Current {
    endpoint: usize,
    client: Option<Client>,
    /// Number of this connection, so that a failure is reported for the right one.
    turn: u64,
}

/// A connection that has responded.
pub(super) struct Session {
    pub(super) client: Client,
    turn: u64,
}

impl Connection {
    pub(super) fn new(
        endpoints: Vec<String>,
        options: ConnectOptions,
        first_key: String,
    ) -> Connection {
        let current = Current { endpoint: 0, client: None, turn: 0 };
        let name = endpoints.join(",");
        Connection { endpoints, name, options, first_key, current: Mutex::new(current) }
    }

    /// All endpoints, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Ensures a connection that has responded once.
    pub(super) async fn reach(&self) -> Result<(), Failure> {
        self.session().await.map(drop)
    }

    /// Returns the connection, or a new one to the first member that responds.
    pub(super) async fn session(&self) -> Result<Session, Failure> {
        let mut current = self.current.lock().await;
        let mut last = String::new();
        for _ in 0..self.endpoints.len() {
            if let Some(client) = &current.client {
                return Ok(Session { client: client.clone(), turn: current.turn });
            }
            let endpoint = &self.endpoints[current.endpoint];
            let failure = match timeout(FIRST_ANSWER, self.connect(endpoint)).await {
                Ok(Ok(client)) => {
                    current.client = Some(client.clone());
                    return Ok(Session { client, turn: current.turn });
                }
                Ok(Err(error)) => judge(&error),
                Err(_) => Failure::Lost(format!("no response within {FIRST_ANSWER:?}")),
            };
            let Failure::Lost(why) = failure else { return Err(failure) };
            last = format!("{endpoint}: {why}");
            current.endpoint = (current.endpoint + 1) % self.endpoints.len();
            current.turn += 1;
        }
        Err(Failure::Lost(last))
    }

    async fn connect(&self, endpoint: &str) -> Result<Client, Error> {
        let client = Client::connect([endpoint], Some(self.options.clone())).await?;
        let no_value = GetOptions::new().with_keys_only();
        // The first request opens the connection, and a read can be lost without harm. It is a
        // linearizable read: the cluster answers it, not one member.
        client.kv_client().get(self.first_key.as_str(), Some(no_value)).await?;
        Ok(client)
    }

    /// Gives up a failed connection: the next one is to another member.
    pub(super) async fn leave(&self, session: &Session) {
        let mut current = self.current.lock().await;
        if current.turn == session.turn {
            current.client = None;
            current.endpoint = (current.endpoint + 1) % self.endpoints.len();
            current.turn += 1;
        }
    }

    /// Sends a request that may be repeated: to every member in turn, until one responds.
    pub(super) async fn ask<T, F>(
        &self,
        limit: Duration,
        call: impl Fn(Client) -> F + Send + Sync,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let mut tries = self.endpoints.len();
        loop {
            match self.ask_once(limit, &call).await {
                Err(Failure::Lost(_)) if tries > 0 => tries -= 1,
                other => return other,
            }
        }
    }

    pub(super) async fn ask_once<T, F>(
        &self,
        limit: Duration,
        call: impl FnOnce(Client) -> F + Send,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let session = self.session().await?;
        let failure = match timeout(limit, call(session.client.clone())).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => judge(&error),
            Err(_) => Failure::Lost(format!("no response within {limit:?}")),
        };
        if matches!(failure, Failure::Lost(_)) {
            self.leave(&session).await;
        }
        Err(failure)
    }
}

/// Classifies an error of etcd's client.
pub(super) fn judge(error: &Error) -> Failure {
    let Error::GRpcStatus(status) = error else {
        return Failure::Lost(error.to_string());
    };
    let message = status.message().to_owned();
    // gRPC's numbers, as etcd uses them (api/v3rpc/rpctypes/error.go).
    match i32::from(status.code()) {
        11 if message.contains("compacted") => Failure::Compacted,
        8 if message.contains("space exceeded") => Failure::Refused {
            why: message,
            remedy: "compact and defragment etcd, then `etcdctl alarm disarm`",
        },
        // Invalid argument (a wrong password is one), permission denied, unauthenticated.
        3 | 7 | 16 => Failure::Refused {
            why: message,
            remedy: "give this manager's etcd user or certificate read and write access to its \
                prefix",
        },
        // Precondition, out of range.
        9 | 11 => Failure::Refused { why: message, remedy: "see etcd's log for details" },
        _ => {
            let mut why = message;
            let mut cause = status.source();
            while let Some(error) = cause {
                why = format!("{why}: {error}");
                cause = error.source();
            }
            Failure::Lost(why)
        }
    }
}
