//! Planned hosts, and the connections that follow their agents.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::AgentClients;
use super::following::{Following, NewsFeed};
use crate::cluster::inventory::HostPlan;
use crate::cluster::state::State;

/// Planned hosts, and the connections that follow their agents.
pub(crate) struct Fleet {
    state: Arc<State>,
    agents: Arc<AgentClients>,
    following: Following,
}

impl Fleet {
    /// Returns a fleet without hosts. News of migrations go to `feed`.
    pub(crate) fn new(
        state: Arc<State>,
        agents: Arc<AgentClients>,
        feed: Arc<NewsFeed>,
    ) -> Arc<Fleet> {
        let following = Following::new(Arc::clone(&state), feed);
        Arc::new(Fleet { state, agents, following })
    }

    /// Returns the names of all hosts.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.state.inventory().plans().map(|(name, _)| name.to_owned()).collect()
    }

    /// Adds a host or replaces its plan, and follows its agent.
    pub(crate) fn plan_host(&self, name: &str, plan: HostPlan) {
        let before = self.state.inventory().host_plan(name).cloned();
        if before.as_ref() == Some(&plan) {
            return;
        }
        let address = plan.address.clone();
        self.state.change(|inventory| Some(inventory.plan_host(name, plan)));
        if before.is_some_and(|before| before.address == address) {
            return;
        }
        match self.agents.client(name, &address) {
            Ok(client) => self.following.follow(name, client),
            Err(problem) => self.state.lost(name, &problem.to_string()),
        }
    }

    /// Reconnects to a host's agent.
    pub(crate) fn follow_anew(&self, name: &str) {
        if let Ok(client) = self.agents.client_of(name) {
            self.following.follow(name, client);
        }
    }

    /// Removes a host and ends the connection to its agent.
    pub(crate) fn leave_host(&self, name: &str) {
        self.following.leave(name);
        self.state.change(|inventory| inventory.forget_host(name));
    }
}
