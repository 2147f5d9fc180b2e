//! The managers of a trial's lab.

use anyhow::{Context, Result};
use godwit_api::Endpoint;
use godwit_api::control::ManagerClient;
use rustix::process::Signal;

use super::agents::end;
use crate::agents::url;
use crate::manager::Seat;
use crate::state::LabState;
use crate::trial::{LIMIT, Trial, until};

impl Trial {
    /// Returns a client of the first manager, with root's rights.
    #[must_use]
    pub fn manager(&self) -> ManagerClient {
        self.manager_of(Seat::First)
    }

    /// Returns a client of the second manager, with root's rights.
    #[must_use]
    pub fn second_manager(&self) -> ManagerClient {
        self.manager_of(Seat::Second)
    }

    fn manager_of(&self, seat: Seat) -> ManagerClient {
        ManagerClient::new(Endpoint::Unix(seat.paths(&self.paths).manager_socket()), None)
    }

    /// Returns the address at which managers reach a host's agent.
    ///
    /// # Errors
    /// The host is unknown.
    pub fn agent_address(&self, host: &str) -> Result<String> {
        let hosts = self.topology().hosts;
        let host = hosts.iter().find(|found| found.name == host).context("unknown host")?;
        url(host, &self.options).context("the lab has no migration network")
    }

    /// Ends the leading one of several managers as a crash would. [`Trial::start_missing`] starts
    /// it again.
    ///
    /// # Errors
    /// None leads, or it does not end.
    pub fn kill_leader(&self) -> Result<()> {
        let leads = |seat: &&Seat| {
            let cluster = self.ask(self.manager_of(**seat).cluster());
            cluster.is_ok_and(|cluster| cluster.leader.is_some_and(|leader| leader.is_self))
        };
        let seats = Seat::all(&self.options);
        let leader = until("a manager leads", LIMIT, || Ok(seats.iter().find(leads)))?;
        let state = LabState::load(&self.paths).context("the lab has no state")?;
        end(state.process(&leader.role()).context("the leader does not run")?, Signal::KILL)
    }
}
