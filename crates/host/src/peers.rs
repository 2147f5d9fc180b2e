//! The hosts that VMs can be moved to: those of the configuration, and those that a manager names.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use godwit_api::{ApiError, Endpoint, ErrorCode, SetPeers};

use crate::config::Config;
use crate::store::Store;

/// The most hosts that may be named: a cluster's.
const MOST_PEERS: usize = 10_000;

/// Addresses of other hosts' agents, by name. What the configuration says of a name holds.
#[derive(Debug)]
pub(crate) struct Peers {
    configured: BTreeMap<String, String>,
    /// By a manager; they outlive the agent.
    named: RwLock<BTreeMap<String, String>>,
}

impl Peers {
    pub(crate) fn open(config: &Config, store: &Store) -> Result<Peers, ApiError> {
        let named = RwLock::new(store.load_peers()?);
        Ok(Peers { configured: config.peers.clone(), named })
    }

    /// All of them.
    pub(crate) fn all(&self) -> BTreeMap<String, String> {
        let mut all = self.named.read().unwrap_or_else(PoisonError::into_inner).clone();
        all.extend(self.configured.clone());
        all
    }

    /// The address of one.
    pub(crate) fn find(&self, name: &str) -> Option<String> {
        let configured = self.configured.get(name).cloned();
        configured.or_else(|| {
            self.named.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
        })
    }

    /// Takes those that a manager names, in the place of those that it named before. They are on disk when this returns.
    pub(crate) fn set(
        &self,
        config: &Config,
        store: &Store,
        peers: SetPeers,
    ) -> Result<(), ApiError> {
        let SetPeers { mut peers } = peers;
        // One list is for all hosts.
        peers.remove(&config.name);
        check(&peers, config)?;
        let mut named = self.named.write().unwrap_or_else(PoisonError::into_inner);
        if *named != peers {
            store.save_peers(&peers)?;
            tracing::info!(peers = peers.len(), "other hosts are named");
            *named = peers;
        }
        Ok(())
    }
}

fn check(peers: &BTreeMap<String, String>, config: &Config) -> Result<(), ApiError> {
    let wrong = |message: String, remedy: &str| {
        Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
    };
    if peers.len() > MOST_PEERS {
        return wrong(format!("{} hosts are too many", peers.len()), "name 10,000 at most");
    }
    for (name, url) in peers {
        match url.parse::<Endpoint>()? {
            Endpoint::Tls(_) if config.insecure => {
                return wrong(
                    format!("host {name} is protected, and this host is not"),
                    "give this host [tls]",
                );
            }
            Endpoint::Tcp(_) if !config.insecure => {
                return wrong(format!("host {name} is named by http://"), "write https://");
            }
            Endpoint::Unix(_) => {
                return wrong(
                    format!("host {name} is named by a socket"),
                    "write https://address:port",
                );
            }
            Endpoint::Tls(_) | Endpoint::Tcp(_) => {}
        }
    }
    Ok(())
}
