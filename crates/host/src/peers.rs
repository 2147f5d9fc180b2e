//! Hosts that VMs can move to: those of the configuration, and those that a manager sets.

use std::collections::BTreeMap;

use godwit_api::{ApiError, Endpoint, ErrorCode, SetPeers};
use parking_lot::RwLock;

use crate::config::Config;
use crate::store::Store;

/// Limit on the number of peers: the size of a cluster.
const MOST_PEERS: usize = 10_000;

/// URLs of the agents of other hosts, by host name. The configuration takes precedence.
#[derive(Debug)]
pub(crate) struct Peers {
    configured: BTreeMap<String, String>,
    /// Set by a manager; they outlive the agent.
    named: RwLock<BTreeMap<String, String>>,
}

impl Peers {
    pub(crate) fn open(config: &Config, store: &Store) -> Result<Peers, ApiError> {
        let named = RwLock::new(store.load_peers()?);
        Ok(Peers { configured: config.peers.clone(), named })
    }

    /// Returns all peers.
    pub(crate) fn all(&self) -> BTreeMap<String, String> {
        let mut all = self.named.read().clone();
        all.extend(self.configured.clone());
        all
    }

    /// Returns the URL of one peer.
    pub(crate) fn find(&self, name: &str) -> Option<String> {
        let configured = self.configured.get(name).cloned();
        configured.or_else(|| self.named.read().get(name).cloned())
    }

    /// Replaces the peers that a manager set. The new ones are on disk when this returns.
    pub(crate) fn set(
        &self,
        config: &Config,
        store: &Store,
        peers: SetPeers,
    ) -> Result<(), ApiError> {
        let SetPeers { mut peers } = peers;
        // A manager sends the same list to all hosts, so this host is in it.
        peers.remove(&config.name);
        check(&peers, config)?;
        let mut named = self.named.write();
        if *named != peers {
            store.save_peers(&peers)?;
            tracing::info!(peers = peers.len(), "peers set");
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
        return wrong(format!("{} hosts are too many", peers.len()), "use at most 10,000");
    }
    for (name, url) in peers {
        match url.parse::<Endpoint>()? {
            Endpoint::Tls(_) if config.insecure => {
                return wrong(
                    format!("cannot use https:// for host {name}: this host is insecure"),
                    "set [tls] on this host",
                );
            }
            Endpoint::Tcp(_) if !config.insecure => {
                return wrong(format!("cannot use http:// for host {name}"), "write https://");
            }
            Endpoint::Unix(_) => {
                return wrong(
                    format!("cannot use a unix socket for host {name}"),
                    "write https://address:port",
                );
            }
            Endpoint::Tls(_) | Endpoint::Tcp(_) => {}
        }
    }
    Ok(())
}
