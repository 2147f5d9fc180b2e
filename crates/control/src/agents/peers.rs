//! Distribution of the hosts' addresses to the agents. A background task sends the list to agents
//! that lack it; before a move, its two agents get it. Agents that already have the right list,
//! from this manager or an earlier one, get none.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::{StreamExt, stream};
use godwit_api::SetPeers;
use godwit_api::control::HostState;
use parking_lot::Mutex;
use tokio::time::{MissedTickBehavior, interval};

use crate::agents::AgentClients;
use crate::cluster::inventory::Inventory;
use crate::cluster::peers_digest::digest;

/// Interval at which agents without the list are searched.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Agents that get the list concurrently.
const AT_A_TIME: usize = 8;

/// Digest of the list that each agent last received.
#[derive(Debug, Default)]
pub(crate) struct Named(Mutex<BTreeMap<String, u64>>);

impl Named {
    fn has(&self, host: &str, wanted: u64) -> bool {
        self.0.lock().get(host) == Some(&wanted)
    }

    fn set(&self, host: &str, sent: Option<u64>) {
        let mut all = self.0.lock();
        match sent {
            Some(digest) => all.insert(host.to_owned(), digest),
            None => all.remove(host),
        };
    }
}

fn addresses(inventory: &Inventory) -> impl Iterator<Item = (&str, &str)> {
    inventory.plans().map(|(name, plan)| (name, plan.address.as_str()))
}

impl AgentClients {
    /// Sends a host the other hosts' addresses, unless it has them. A failure is only logged: a
    /// later move reports its reason.
    pub(crate) async fn name_peers(&self, host: &str) {
        let (wanted, peers) = {
            let inventory = self.state.inventory();
            let Some(plan) = inventory.host_plan(host) else { return };
            let all = digest(addresses(&inventory));
            let wanted = all.wrapping_sub(digest([(host, plan.address.as_str())]));
            if self.named.has(host, wanted) || inventory.peers_digest(host) == Some(wanted) {
                return;
            }
            let peers =
                addresses(&inventory).map(|(name, address)| (name.to_owned(), address.to_owned()));
            (wanted, SetPeers { peers: peers.collect() })
        };
        let Ok(client) = self.client_of(host) else { return };
        match client.set_peers(&peers).await {
            Ok(_) => self.named.set(host, Some(wanted)),
            Err(error) => {
                tracing::warn!(host, %error, "cannot send a host the addresses of the others");
            }
        }
    }

    /// Returns the reachable hosts that lack the list.
    fn unnamed(&self) -> Vec<String> {
        let inventory = self.state.inventory();
        let all = digest(addresses(&inventory));
        let mut unnamed = Vec::new();
        for (name, address) in addresses(&inventory) {
            let wanted = all.wrapping_sub(digest([(name, address)]));
            if inventory.host_state(name) != Some(HostState::Up) {
                // It may have lost the list when it is reachable again.
                self.named.set(name, None);
            } else if !self.named.has(name, wanted) && inventory.peers_digest(name) != Some(wanted)
            {
                unnamed.push(name.to_owned());
            }
        }
        unnamed
    }
}

/// Sends the list to all agents that lack it, until the manager is dropped.
pub(crate) async fn name_all(agents: Weak<AgentClients>) {
    let mut look = interval(LOOK_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let Some(agents) = agents.upgrade() else { return };
        let unnamed = agents.unnamed();
        let agents: &Arc<AgentClients> = &agents;
        let naming =
            stream::iter(&unnamed).for_each_concurrent(AT_A_TIME, |host| agents.name_peers(host));
        naming.await;
    }
}
