//! Distribution of the list of revoked certificates to the agents.

use std::collections::BTreeMap;

use futures::{StreamExt, stream};
use godwit_api::control::HostState;
use godwit_api::{ClientError, SetRevocations};
use godwit_pki::RevocationList;
use parking_lot::Mutex;

use super::AgentClients;

/// Agents that get the list concurrently.
const AT_A_TIME: usize = 8;

/// Number of the list that each agent has.
#[derive(Debug, Default)]
pub(crate) struct GivenLists(Mutex<BTreeMap<String, u64>>);

impl GivenLists {
    fn set(&self, host: &str, number: Option<u64>) {
        let mut all = self.0.lock();
        match number {
            Some(number) => all.insert(host.to_owned(), number),
            None => all.remove(host),
        };
    }

    fn has(&self, host: &str, number: u64) -> bool {
        self.0.lock().get(host) == Some(&number)
    }
}

impl AgentClients {
    /// Sends the list to every agent that lacks it.
    pub(crate) async fn give_revocations(&self, list: &RevocationList) {
        let lacking = self.lacking(list.number());
        stream::iter(&lacking).for_each_concurrent(AT_A_TIME, |host| self.give(host, list)).await;
    }

    /// Returns the reachable hosts that lack this list.
    fn lacking(&self, number: u64) -> Vec<String> {
        let inventory = self.state.inventory();
        let (up, away): (Vec<&str>, Vec<&str>) = inventory
            .plans()
            .map(|(name, _)| name)
            .partition(|name| inventory.host_state(name) == Some(HostState::Up));
        // An agent that returns may have lost the list.
        away.into_iter().for_each(|name| self.given_lists.set(name, None));
        up.into_iter()
            .filter(|name| !self.given_lists.has(name, number))
            .map(str::to_owned)
            .collect()
    }

    /// Sends an agent the list. An agent that refuses it gets no further attempt until there is a
    /// new list or the agent was away.
    async fn give(&self, host: &str, list: &RevocationList) {
        let Ok(client) = self.client_of(host) else { return };
        let sent = SetRevocations { list: list.pem().to_owned() };
        match client.set_revocations(&sent).await {
            Ok(_) => self.given_lists.set(host, Some(list.number())),
            Err(error) => {
                tracing::warn!(
                    host,
                    %error,
                    "cannot send a host the list of revoked certificates"
                );
                if matches!(error, ClientError::Refused(_) | ClientError::Protocol { .. }) {
                    self.given_lists.set(host, Some(list.number()));
                }
            }
        }
    }
}
