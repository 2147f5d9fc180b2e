//! How many there are of what.

use std::collections::HashMap;

use godwit_api::VmState;
use godwit_api::control::HostState;

use super::{Inventory, Vm};

/// How many there are of what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub hosts: HashMap<HostState, u64>,
    /// Hosts that take no VMs.
    pub hosts_in_maintenance: u64,
    /// Hosts that report what no agent reports.
    pub hosts_faulty: u64,
    pub vms: HashMap<VmState, u64>,
    /// VMs of which it is not known which host may run them.
    pub vms_in_doubt: u64,
    /// Names that hosts claim and nothing explains.
    pub name_conflicts: u64,
}

impl Inventory {
    /// Counts everything.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let mut tally = Tally {
            name_conflicts: self.conflict_count(),
            hosts_faulty: self.faulty_hosts(),
            ..Tally::default()
        };
        for host in self.hosts.values() {
            *tally.hosts.entry(host.state).or_default() += 1;
            tally.hosts_in_maintenance += u64::from(host.plan.maintenance);
        }
        for (vm, info) in self.vms.values().filter_map(|vm| Some((vm, Vm::main(vm)?))) {
            *tally.vms.entry(info.state).or_default() += 1;
            tally.vms_in_doubt += u64::from(vm.in_doubt());
        }
        tally
    }

    /// Whether a host's agent is heard; none: it is not known.
    #[must_use]
    pub fn host_state(&self, name: &str) -> Option<HostState> {
        self.hosts.get(name).map(|host| host.state)
    }

    /// The digest of the other hosts that a host's agent knows; none: it has not told.
    #[must_use]
    pub fn peers_digest(&self, name: &str) -> Option<u64> {
        self.hosts.get(name)?.peers_digest
    }
}
