//! Connections from the manager to the hosts' agents.

pub(crate) mod fleet;
pub(crate) mod following;
pub(crate) mod images;
pub(crate) mod peers;
pub(crate) mod record;
mod revocations;

use std::net::Ipv6Addr;
use std::sync::Arc;

use godwit_api::control::{Problem, ProblemCode};
use godwit_api::{Client, Endpoint};
use godwit_pki::{Identity, Revocations};

use self::revocations::GivenLists;
use crate::agents::peers::Named;
use crate::cluster::bounds::MOST_ANSWER_BYTES;
use crate::cluster::state::State;
use crate::problems::{host_away, no_host};

/// Clients of the hosts' agents, and the lists that agents have received.
pub(crate) struct AgentClients {
    pub(crate) state: Arc<State>,
    pub(crate) named: Named,
    /// Revoked certificates.
    pub(crate) revocations: Revocations,
    pub(crate) given_lists: GivenLists,
    /// This manager's certificate; none: connections are unencrypted.
    identity: Option<Identity>,
}

impl AgentClients {
    pub(crate) fn new(state: Arc<State>, identity: Option<Identity>) -> AgentClients {
        let revocations =
            identity.as_ref().map(|own| own.revocations().clone()).unwrap_or_default();
        AgentClients {
            state,
            named: Named::default(),
            revocations,
            given_lists: GivenLists::default(),
            identity,
        }
    }

    /// Returns whether the manager has a certificate.
    pub(crate) fn are_secure(&self) -> bool {
        self.identity.is_some()
    }

    /// Returns a client of a known host's agent.
    pub(crate) fn client_of(&self, host: &str) -> Result<Client, Problem> {
        let address = self.state.inventory().host_plan(host).map(|plan| plan.address.clone());
        self.client(host, &address.ok_or_else(|| no_host(host))?)
    }

    /// Returns a client of a known host's agent, for a request that must not wait for a host that
    /// is away.
    ///
    /// # Errors
    /// [`ProblemCode::HostAway`]: the host is away, as far as this manager knows.
    pub(crate) fn reachable(&self, host: &str) -> Result<Client, Problem> {
        self.check_reachable(host)?;
        self.client_of(host)
    }

    /// Refuses a host that is away, as far as this manager knows.
    pub(crate) fn check_reachable(&self, host: &str) -> Result<(), Problem> {
        match self.state.inventory().why_away(host) {
            Some(why) => Err(host_away(host, why)),
            None => Ok(()),
        }
    }

    /// Returns a client of a host's agent at this address.
    pub(crate) fn client(&self, host: &str, address: &str) -> Result<Client, Problem> {
        self.reach(address, |endpoint, identity| Client::secure(endpoint, identity, host))
    }

    /// Returns a client of another manager, which must present a manager's certificate.
    pub(crate) fn manager_client(&self, manager: &str, address: &str) -> Result<Client, Problem> {
        self.reach(address, |endpoint, identity| Client::to_manager(endpoint, identity, manager))
    }

    /// Returns this manager's certificate; none: connections to agents and managers are
    /// unencrypted.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    fn reach(
        &self,
        address: &str,
        secure: impl FnOnce(Endpoint, &Identity) -> Client,
    ) -> Result<Client, Problem> {
        let wrong = |detail: String, remedy: &str| {
            Problem::new(ProblemCode::InvalidRequest, detail, remedy)
        };
        let endpoint = address.parse::<Endpoint>()?;
        if !is_plain(address) {
            let detail = format!("address {address:?} is not a name or an IP address and a port");
            return Err(wrong(detail, "write https://NAME:PORT, 255 characters at most"));
        }
        match (&self.identity, &endpoint) {
            (Some(identity), Endpoint::Tls(_)) => Ok(bounded(secure(endpoint, identity))),
            (None, Endpoint::Tcp(_)) => Ok(bounded(Client::new(endpoint))),
            (Some(_), _) => Err(wrong(
                format!("cannot connect to {address} unencrypted: this manager uses TLS"),
                "write https://",
            )),
            (None, _) => {
                let detail = format!(
                    "cannot connect to {address} with TLS: this manager has no certificate"
                );
                let remedy = "set [tls] in the manager's configuration";
                Err(Problem::new(ProblemCode::WrongState, detail, remedy))
            }
        }
    }
}

/// Limits the size of the answers that a client reads.
fn bounded(client: Client) -> Client {
    client.with_answers_of_at_most(MOST_ANSWER_BYTES)
}

/// Returns whether an address is a scheme, a name or IP address, and a port, without path or user.
fn is_plain(address: &str) -> bool {
    let Some((_, authority)) = address.split_once("://") else { return false };
    let Some((name, port)) = authority.rsplit_once(':') else { return false };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_host = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(inner) => inner.parse::<Ipv6Addr>().is_ok(),
        None => !name.is_empty() && name.bytes().all(is_name),
    };
    // Port 0 and leading zeros are invalid.
    address.len() <= 255
        && is_host
        && !port.starts_with('0')
        && port.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_only_a_name_and_a_port() {
        for good in [
            "https://a:7700",
            "http://10.0.0.1:1",
            "https://[fd00::1]:65535",
            "https://rack_1.host-a:80",
        ] {
            assert!(is_plain(good), "{good}");
        }
        for bad in [
            "https://a:7700/v1",
            "https://root@a:7700",
            "unix:/run/a.sock",
            "https://a:0",
            "https://a:080",
            "https://:1",
            "https://[]:1",
            "https://[ee4]:1",
            "https://[1::2::3]:1",
        ] {
            assert!(!is_plain(bad), "{bad}");
        }
        assert!(!is_plain(&format!("https://{}:1", "a".repeat(255))));
    }
}
