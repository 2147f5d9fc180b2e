//! Numbers of hosts and VMs, for metrics and the overview.

use std::collections::HashMap;

use godwit_api::VmState;
use godwit_api::control::HostState;

use super::{Inventory, Vm};

/// Numbers of hosts, VMs and conflicts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub hosts: HashMap<HostState, u64>,
    /// Hosts that accept no VMs.
    pub hosts_in_maintenance: u64,
    /// Hosts whose reports were refused.
    pub hosts_faulty: u64,
    /// VMs of reachable hosts, by state.
    pub vms: HashMap<VmState, u64>,
    /// VMs whose hosts are unreachable.
    pub vms_unknown: u64,
    /// VMs for which it is unknown which host may run them.
    pub vms_in_doubt: u64,
    /// Names with claims that no migration explains.
    pub name_conflicts: u64,
}

impl Inventory {
    /// Counts hosts, VMs and conflicts.
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
            if self.is_up(&info.host) {
                *tally.vms.entry(info.state).or_default() += 1;
            } else {
                tally.vms_unknown += 1;
            }
            tally.vms_in_doubt += u64::from(vm.in_doubt());
        }
        tally
    }

    /// Returns the state of a host; none: unknown host.
    #[must_use]
    pub fn host_state(&self, name: &str) -> Option<HostState> {
        self.hosts.get(name).map(|host| host.state)
    }

    /// Returns the digest of the other hosts that a host's agent knows; none: it has not reported
    /// them.
    #[must_use]
    pub fn peers_digest(&self, name: &str) -> Option<u64> {
        self.hosts.get(name)?.peers_digest
    }
}
