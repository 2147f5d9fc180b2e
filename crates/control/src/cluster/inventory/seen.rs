//! Borrowed views of hosts and VMs, for queries about very many of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use godwit_api::control::HostState;
use godwit_api::{HostInfo, VmInfo};

use super::{Host, HostPlan, Inventory};

#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenHost<'a> {
    pub(crate) name: &'a str,
    pub(crate) state: HostState,
    pub(crate) plan: &'a HostPlan,
    /// Last report of its agent.
    pub(crate) info: Option<&'a HostInfo>,
    /// Time of its last report, milliseconds since 1970; none: it has never reported.
    pub(crate) heard_unix_ms: Option<u64>,
    /// Whether it has not reported since this manager started, and no connection to it has failed.
    pub(crate) is_awaited: bool,
    pub(crate) moves_out: u64,
    pub(crate) moves_in: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenVm<'a> {
    /// Report of the host that holds its name.
    pub(crate) info: &'a Arc<VmInfo>,
    /// Whether it is unknown which host may run it.
    pub(crate) in_doubt: bool,
    /// Whether its host is reachable.
    pub(crate) is_current: bool,
    /// Running or waiting move.
    pub(crate) planned_move: Option<&'a str>,
}

impl Inventory {
    /// Returns a host; none: unknown host.
    pub(crate) fn seen_host(&self, name: &str) -> Option<SeenHost<'_>> {
        self.hosts.get_key_value(name).map(seen)
    }

    /// Returns all hosts, by name.
    pub(crate) fn seen_hosts(&self) -> impl Iterator<Item = SeenHost<'_>> {
        self.hosts.iter().map(seen)
    }

    /// Returns a VM; none: no host reports it.
    pub(crate) fn seen_vm(&self, name: &str) -> Option<SeenVm<'_>> {
        let vm = self.vms.get(name)?;
        let info = vm.main()?;
        Some(SeenVm {
            info,
            in_doubt: vm.in_doubt(),
            is_current: self.hosts.get(&info.host).is_some_and(|host| host.state == HostState::Up),
            planned_move: vm.planned_move.as_deref(),
        })
    }

    /// Returns all VMs, by name, with the report of each host that has the VM or a shadow of it.
    pub(crate) fn reports(&self) -> impl Iterator<Item = (&str, &BTreeMap<String, Arc<VmInfo>>)> {
        self.vms.iter().map(|(name, vm)| (name.as_str(), &vm.at))
    }

    /// Returns this host's report of a VM or of a shadow of it.
    pub(crate) fn vm_at(&self, host: &str, vm: &str) -> Option<&Arc<VmInfo>> {
        self.vms.get(vm)?.at.get(host)
    }
}

fn seen<'a>((name, host): (&'a String, &'a Host)) -> SeenHost<'a> {
    SeenHost {
        name,
        state: host.state,
        plan: &host.plan,
        info: host.info.as_deref(),
        heard_unix_ms: host.heard_unix_ms,
        is_awaited: host.is_awaited(),
        moves_out: host.moves_out,
        moves_in: host.moves_in,
    }
}
