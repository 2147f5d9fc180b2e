//! Lists of hosts and VMs: what a filter lets through, by name, a page at a time.

use godwit_api::VmState;
use godwit_api::control::{HostState, HostSummary, Page, VmSummary};

use super::shares::{is_in_network, is_on_datastore};
use super::{Inventory, Vm};

/// Where a page begins: behind a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The last name of the page before; none: the first page.
    pub behind: Option<String>,
    /// Items of a page, at least one.
    pub limit: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFilter {
    pub state: Option<HostState>,
    /// In maintenance, or not.
    pub maintenance: Option<bool>,
    /// Part of their name.
    pub search: Option<String>,
    /// A label that they have, and its value.
    pub label: Option<(String, String)>,
}

/// Which VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmFilter {
    pub host: Option<String>,
    pub state: Option<VmState>,
    /// Part of their name.
    pub search: Option<String>,
    /// A label that they have, and its value.
    pub label: Option<(String, String)>,
    /// A network that they have an interface in.
    pub network: Option<String>,
    /// A directory that they have a disk in.
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
        let lets_through = |name: &str, vm: &Vm| {
            let Some(info) = vm.main() else { return false };
            filter.host.as_ref().is_none_or(|host| info.host == *host)
                && filter.state.is_none_or(|state| info.state == state)
                && filter.search.as_ref().is_none_or(|part| name.contains(part))
                && filter.label.as_ref().is_none_or(|(key, value)| {
                    vm.plan.as_ref().and_then(|plan| plan.labels.get(key)) == Some(value)
                })
                && filter.network.as_ref().is_none_or(|network| is_in_network(info, network))
                && filter
                    .datastore
                    .as_ref()
                    .is_none_or(|datastore| is_on_datastore(info, datastore))
        };
        let found = self.vms.iter().filter(|(name, vm)| lets_through(name, vm));
        let page = page(found, cursor, |name, vm| self.vm_summary(name, vm));
        // Each VM that passed the filter has a host.
        Page {
            items: page.items.into_iter().flatten().collect(),
            total: page.total,
            next: page.next,
        }
    }
}

/// All are counted, those of the page are shown.
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
