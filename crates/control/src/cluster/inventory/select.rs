//! Filtered lists of hosts and VMs, by name, in pages.

use godwit_api::VmState;
use godwit_api::control::{HostState, HostSummary, Page, VmSummary};

use super::shares::is_in_network;
use super::{Inventory, Vm};

/// Start of a page, after a name, and its size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Last name of the page before; none: the first page.
    pub behind: Option<String>,
    /// Most items of a page, at least one.
    pub limit: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFilter {
    pub state: Option<HostState>,
    /// Whether the hosts are in maintenance.
    pub maintenance: Option<bool>,
    /// Part of the hosts' names.
    pub search: Option<String>,
    /// Label of the hosts, and its value.
    pub label: Option<(String, String)>,
}

/// Filter for VMs. Each field that is set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmFilter {
    pub host: Option<String>,
    pub state: Option<VmState>,
    /// Part of the VMs' names.
    pub search: Option<String>,
    /// Label of the VMs, and its value.
    pub label: Option<(String, String)>,
    /// Tag of the VMs.
    pub tag: Option<String>,
    /// Network of one of the VM's interfaces.
    pub network: Option<String>,
    /// Datastore of one of the VM's disks, by ID or name, or its directory.
    pub datastore: Option<String>,
}

impl Inventory {
    #[must_use]
    pub fn hosts(&self, filter: &HostFilter, cursor: &Cursor) -> Page<HostSummary> {
        let found = self.hosts.iter().filter(|(name, host)| {
            filter.state.is_none_or(|state| host.state == state)
                && filter.maintenance.is_none_or(|wanted| host.plan.maintenance == wanted)
                && filter.search.as_ref().is_none_or(|part| name.contains(part))
                && filter
                    .label
                    .as_ref()
                    .is_none_or(|(key, value)| host.plan.labels.get(key) == Some(value))
        });
        page(found, cursor, |name, host| host.summary(name))
    }

    #[must_use]
    pub fn vms(&self, filter: &VmFilter, cursor: &Cursor) -> Page<VmSummary> {
        let datastore = filter.datastore.as_deref();
        let datastore = datastore.map(|named| (named, self.find_datastore(named).ok()));
        let lets_through = |name: &str, vm: &Vm| {
            let Some(info) = vm.main() else { return false };
            filter.host.as_ref().is_none_or(|host| info.host == *host)
                && filter.state.is_none_or(|state| info.state == state)
                && filter.search.as_ref().is_none_or(|part| name.contains(part))
                && filter.label.as_ref().is_none_or(|(key, value)| {
                    vm.plan.as_ref().and_then(|plan| plan.labels.get(key)) == Some(value)
                })
                && filter.tag.as_ref().is_none_or(|tag| info.spec.tags.contains(tag))
                && filter.network.as_ref().is_none_or(|network| is_in_network(info, network))
                && datastore.as_ref().is_none_or(|(named, found)| {
                    self.is_on_datastore(info, named, found.as_ref().map(|found| &*found.id))
                })
        };
        let found = self.vms.iter().filter(|(name, vm)| lets_through(name, vm));
        let page = page(found, cursor, |name, vm| self.vm_summary(name, vm));
        // Every VM that passes the filter has a report, so it has a summary.
        Page {
            items: page.items.into_iter().flatten().collect(),
            total: page.total,
            next: page.next,
        }
    }
}

/// Counts all entries, and returns those of the page.
pub(crate) fn page<'a, E: 'a, T>(
    found: impl Iterator<Item = (&'a String, &'a E)>,
    cursor: &Cursor,
    show: impl Fn(&str, &E) -> T,
) -> Page<T> {
    let (mut items, mut last, mut next, mut total) = (Vec::new(), None, None, 0);
    for (name, entry) in found {
        total += 1;
        if cursor.behind.as_ref().is_some_and(|behind| name <= behind) {
            continue;
        }
        if items.len() < cursor.limit {
            items.push(show(name, entry));
            last = Some(name);
        } else if next.is_none() {
            next = last.cloned();
        }
    }
    Page { items, total, next }
}
