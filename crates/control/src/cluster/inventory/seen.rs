//! Hosts and VMs as they are known, without copies: for questions about very many of them.

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
    /// What its agent told last.
    pub(crate) info: Option<&'a HostInfo>,
    /// When it was heard last, milliseconds since 1970; none: never.
    pub(crate) heard_unix_ms: Option<u64>,
    /// It has not been heard since this manager began, and nothing says that it is away.
    pub(crate) is_awaited: bool,
    pub(crate) moves_out: u64,
    pub(crate) moves_in: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenVm<'a> {
    /// As the host tells it that holds its name.
    pub(crate) info: &'a Arc<VmInfo>,
    /// Whether it is not known which host may run it.
    pub(crate) in_doubt: bool,
    /// Whether its host is heard.
    pub(crate) is_current: bool,
    /// The move that has it, or waits.
    pub(crate) planned_move: Option<&'a str>,
}

impl Inventory {
    /// A host; none: it is not known.
    pub(crate) fn seen_host(&self, name: &str) -> Option<SeenHost<'_>> {
        self.hosts.get_key_value(name).map(seen)
    }

    /// Every host, by name.
    pub(crate) fn seen_hosts(&self) -> impl Iterator<Item = SeenHost<'_>> {
        self.hosts.iter().map(seen)
    }

    /// A VM; none: no host tells of it.
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

    /// Every VM that is known, by name, as each host tells it that has something of it.
    pub(crate) fn told_vms(&self) -> impl Iterator<Item = (&str, &BTreeMap<String, Arc<VmInfo>>)> {
        self.vms.iter().map(|(name, vm)| (name.as_str(), &vm.at))
    }

    /// A VM as this host tells it, be it as a shadow; none: it tells nothing of it.
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
