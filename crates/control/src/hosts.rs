//! The agents of the hosts, as the manager speaks to them.

use std::sync::Arc;

use godwit_api::control::{Problem, ProblemCode};
use godwit_api::{Client, Endpoint};
use godwit_pki::Identity;

use crate::naming::Named;
use crate::state::State;

/// How agents are reached.
pub(crate) struct Hosts {
    pub(crate) state: Arc<State>,
    pub(crate) named: Named,
    /// None: agents are spoken to in the clear.
    identity: Option<Identity>,
}

impl Hosts {
    pub(crate) fn new(state: Arc<State>, identity: Option<Identity>) -> Hosts {
        Hosts { state, named: Named::default(), identity }
    }

    /// Whether the manager shows a certificate.
    pub(crate) fn are_secure(&self) -> bool {
        self.identity.is_some()
    }

    /// A client of the agent of a host that is known.
    pub(crate) fn client_of(&self, host: &str) -> Result<Client, Problem> {
        let address = self.state.inventory().host_plan(host).map(|plan| plan.address.clone());
        self.client(host, &address.ok_or_else(|| no_host(host))?)
    }

    /// A client of a host's agent at this address.
    pub(crate) fn client(&self, host: &str, address: &str) -> Result<Client, Problem> {
        let wrong = |detail: String, mend: &str| Problem::new(ProblemCode::InvalidRequest, detail, mend);
        let endpoint: Endpoint = address.parse().map_err(Problem::of_agent)?;
        match (&self.identity, &endpoint) {
            (Some(identity), Endpoint::Tls(_)) => Ok(Client::secure(endpoint, identity, host)),
            (None, Endpoint::Tcp(_)) => Ok(Client::new(endpoint)),
            (Some(_), _) => {
                Err(wrong(format!("{address} is unprotected, and this manager is not"), "write https://"))
            }
            (None, _) => Err(wrong(
                format!("{address} needs a certificate, and this manager has none"),
                "give the manager [tls]",
            )),
        }
    }
}

pub(crate) fn no_host(name: &str) -> Problem {
    Problem::new(
        ProblemCode::NotFound,
        format!("no host \"{name}\" is known"),
        "see `godwit control host list`",
    )
}
