//! Bindings of names to guests and hosts.
//!
//! A name is a label: any host can report a VM with any name. Operations on a name therefore use
//! its **binding**: the guest (UUID and incarnation) and the host that holds it. The first host
//! that reports a name gets it. A binding moves only in these cases:
//!
//! - The holder reports a migration of the VM to another host, or the manager started one, and that
//!   host reports the same guest in a later epoch.
//! - The holder is reachable and no longer has the VM.
//! - The holder is unreachable, and its agents restart the VM without a manager
//!   (`protect_by_agents`): a reachable host reports that VM, by UUID, as running.
//! - The holder is forgotten.
//! - An operator binds the name.
//!
//! Every other claim is a **conflict**: it is shown, and has no effect. The store keeps bindings,
//! so that a new leader trusts no claim that the previous leader did not.

use std::collections::BTreeMap;
use std::sync::Arc;

use godwit_api::control::{Change, HostState, NameClaim, NameConflict, Page};
use godwit_api::{MigrationStatus, VmInfo, VmState};
use godwit_qemu::Uuid;
use godwit_types::{Incarnation, Outcome};

use super::select::{Cursor, page};
use super::{Host, Inventory, Vm, standing};

/// Guest that has a name, and host that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// UUID of the guest; none: the host reports none.
    pub uuid: Option<Uuid>,
    pub incarnation: Incarnation,
    /// Host that holds the name.
    pub host: String,
    /// Whether agents restart the guest among themselves.
    pub by_agents: bool,
}

impl Binding {
    fn of(info: &VmInfo) -> Binding {
        Binding {
            uuid: info.spec.uuid,
            incarnation: info.incarnation,
            host: info.host.clone(),
            by_agents: info.spec.protect_by_agents,
        }
    }

    /// Returns whether a report is of the same guest. Agents of older versions report no
    /// incarnation.
    fn is_of(&self, info: &VmInfo) -> bool {
        let same_uuid =
            self.uuid.is_none() || info.spec.uuid.is_none() || self.uuid == info.spec.uuid;
        let unrecorded = self.incarnation.is_unrecorded() || info.incarnation.is_unrecorded();
        same_uuid && (unrecorded || self.incarnation == info.incarnation)
    }
}

/// Binding of a name, and the facts that can change it.
#[derive(Debug, Default)]
pub(crate) struct Bound {
    binding: Option<Binding>,
    /// Whether the guest was handed to the holder, which reports it as arriving.
    arrives: bool,
    /// Epoch in which the holder has the guest; none: the holder has not reported it yet.
    epoch: Option<u64>,
    /// Guest that a holder has last reported, and the latest epoch in which one had it.
    latest: Option<(Binding, u64)>,
    /// Migration that the holder reports, and its destination.
    handed: Option<(String, String)>,
    /// Host that last handed the guest over.
    handed_from: Option<String>,
    /// Previous binding while no host holds the name, and the host that the guest was handed to.
    before: Option<(Binding, Option<String>)>,
    /// Host on which the manager is creating a VM with this name: no other host gets the name
    /// meanwhile.
    expected: Option<String>,
}

impl Bound {
    pub(crate) fn holder(&self) -> Option<&str> {
        self.binding.as_ref().map(|binding| binding.host.as_str())
    }

    /// Returns whether the name must be kept although no host reports it.
    pub(crate) fn is_kept(&self) -> bool {
        self.binding.is_some() || self.expected.is_some()
    }

    fn bind(&mut self, info: &VmInfo) {
        self.binding = Some(Binding::of(info));
        self.arrives = info.state == VmState::MigratingIn;
        self.epoch = (!self.arrives).then_some(info.epoch);
        (self.handed, self.before) = (None, None);
        // A guest that arrives may still return to its source, in the epoch that it had there.
        if !self.arrives {
            self.note_epoch(info);
        }
    }

    fn note_epoch(&mut self, info: &VmInfo) {
        let of_it = self.latest.take().filter(|(guest, _)| guest.is_of(info));
        let before = of_it.map_or(0, |(_, epoch)| epoch);
        self.latest = Some((Binding::of(info), info.epoch.max(before)));
    }

    fn release(&mut self) {
        let handed_to = self.handed.take().map(|(_, to)| to);
        self.before = self.binding.take().map(|binding| (binding, handed_to));
        (self.arrives, self.epoch, self.handed_from) = (false, None, None);
    }

    /// Updates the binding from the hosts' reports.
    fn settle(&mut self, claims: &Claims<'_>) {
        if let Some(binding) = &mut self.binding {
            match claims.at.get(&binding.host) {
                Some(info) if info.state == VmState::MigratingIn && self.arrives => {}
                // The holder itself reports that another host has the guest.
                Some(info) if info.state == VmState::MigratingIn => self.release(),
                Some(info) => {
                    *binding = Binding::of(info);
                    (self.arrives, self.epoch) = (false, Some(info.epoch));
                    self.note_epoch(info);
                    if info.migration.is_none() && !lets_go(info.state) {
                        self.handed = None;
                    }
                }
                None if claims.is_up(&binding.host) => self.release(),
                None => {}
            }
        }
        if let Some(info) = self.successor(claims).or_else(|| self.restarted_by_agents(claims)) {
            let from = self.binding.take().map(|binding| binding.host);
            self.bind(info);
            self.handed_from = from;
        }
        if self.binding.is_none()
            && let Some(info) = self.first_claim(claims)
        {
            self.bind(info);
        }
    }

    /// Returns the report of the host to which the holder has handed the guest over.
    fn successor<'a>(&self, claims: &Claims<'a>) -> Option<&'a Arc<VmInfo>> {
        let binding = self.binding.as_ref()?;
        let of_holder = claims.at.get(&binding.host);
        // A source that keeps pages no longer reports a migration.
        let is_current = |migration: &String| {
            of_holder.is_none_or(|info| info.migration.as_ref().is_none_or(|now| now == migration))
        };
        let handed = self.handed.as_ref().filter(|(migration, _)| is_current(migration));
        let keeps =
            of_holder.is_some_and(|info| !lets_go(info.state)) && claims.is_up(&binding.host);
        let targets = handed.map(|(_, to)| to.as_str()).into_iter().chain(claims.move_target);
        let mut taken = targets.filter(|to| *to != binding.host).filter_map(|to| claims.at.get(to));
        taken.find(|info| {
            !keeps
                && info.state != VmState::MigratingIn
                && binding.is_of(info)
                && self.epoch.is_none_or(|epoch| info.epoch > epoch)
        })
    }

    /// Returns the report of a host whose agent has restarted the guest without a manager.
    fn restarted_by_agents<'a>(&self, claims: &Claims<'a>) -> Option<&'a Arc<VmInfo>> {
        let binding = self.binding.as_ref()?;
        if !binding.by_agents || binding.uuid.is_none() || claims.is_up(&binding.host) {
            return None;
        }
        let is_restarted = |info: &&Arc<VmInfo>| {
            info.host != binding.host
                && claims.is_up(&info.host)
                && info.state == VmState::Running
                && info.spec.protect_by_agents
                && info.spec.uuid == binding.uuid
        };
        claims.at.values().find(is_restarted)
    }

    /// Returns the report that gets a name without holder.
    fn first_claim<'a>(&self, claims: &Claims<'a>) -> Option<&'a Arc<VmInfo>> {
        if let Some(expected) = &self.expected {
            return claims.at.get(expected);
        }
        let (before, handed_to) = match &self.before {
            Some((before, to)) => (Some(before), to.as_deref().or(claims.move_target)),
            None => (None, None),
        };
        let is_same = |info: &&Arc<VmInfo>| before.is_none_or(|before| before.is_of(info));
        // The destination may not report the guest as running yet.
        let promised = handed_to.and_then(|to| claims.at.get(to)).filter(is_same);
        let others = || {
            let has_it = claims.at.values().filter(|info| info.state != VmState::MigratingIn);
            has_it.max_by_key(|info| (before.is_some() && is_same(info), standing(info)))
        };
        promised.or_else(others)
    }

    /// Returns whether a current or past hand-over explains a report by a host other than the
    /// holder.
    fn explains(&self, info: &VmInfo, claims: &Claims<'_>) -> bool {
        let Some(binding) = &self.binding else { return true };
        if info.state == VmState::MigratingIn || self.expected.as_ref() == Some(&info.host) {
            return true;
        }
        let of_holder = claims.at.get(&binding.host);
        // The last report of an unreachable host that has handed the guest over since.
        let is_past = self.handed_from.as_ref() == Some(&info.host) && !claims.is_up(&info.host);
        if !binding.is_of(info) {
            return is_past && binding.by_agents && binding.uuid == info.spec.uuid;
        }
        let is_left_over =
            lets_go(info.state) && self.epoch.is_some_and(|epoch| info.epoch < epoch);
        let arrives = of_holder.is_some_and(|holder| {
            holder.state == VmState::MigratingOut || (holder.in_doubt && info.in_doubt)
        });
        is_left_over || arrives || is_past
    }

    /// Returns whether a host takes part in the holder's hand-over. If such a host is in doubt, so
    /// is the VM.
    fn takes_part(&self, host: &str, move_target: Option<&str>) -> bool {
        let handed_to = self.handed.as_ref().map(|(_, to)| to.as_str());
        [self.holder(), handed_to, self.handed_from.as_deref(), move_target].contains(&Some(host))
    }
}

/// Returns whether a host that reports this state may have handed the guest over, or is about to.
fn lets_go(state: VmState) -> bool {
    matches!(state, VmState::MigratingOut | VmState::Paused | VmState::Stopping)
}

/// Reports of one name.
struct Claims<'a> {
    at: &'a BTreeMap<String, Arc<VmInfo>>,
    move_target: Option<&'a str>,
    hosts: &'a BTreeMap<String, Host>,
}

impl Claims<'_> {
    fn is_up(&self, host: &str) -> bool {
        self.hosts.get(host).is_some_and(|host| host.state == HostState::Up)
    }
}

impl Vm {
    /// Returns the holder's report. If no host holds the name, returns that of a host where the
    /// guest arrives.
    pub(crate) fn main(&self) -> Option<&Arc<VmInfo>> {
        match self.bound.holder() {
            Some(host) => self.at.get(host),
            None => self.at.values().max_by_key(|info| (standing(info), info.epoch)),
        }
    }

    /// Returns whether it is unknown which host may run the VM.
    pub(crate) fn in_doubt(&self) -> bool {
        let target = self.move_target.as_deref();
        let counts =
            |host: &str| self.bound.binding.is_none() || self.bound.takes_part(host, target);
        self.at.iter().any(|(host, info)| info.in_doubt && counts(host))
    }

    fn claims<'a>(&'a self, hosts: &'a BTreeMap<String, Host>) -> Claims<'a> {
        Claims { at: &self.at, move_target: self.move_target.as_deref(), hosts }
    }

    /// Returns the reports of other hosts that no hand-over explains, by host.
    pub(crate) fn conflicting<'a>(
        &'a self,
        hosts: &'a BTreeMap<String, Host>,
    ) -> impl Iterator<Item = (&'a String, &'a Arc<VmInfo>)> {
        let claims = self.claims(hosts);
        self.at.iter().filter(move |(host, info)| {
            self.bound.holder() != Some(host.as_str()) && !self.bound.explains(info, &claims)
        })
    }
}

fn claim(host: &str, info: Option<&Arc<VmInfo>>, binding: Option<&Binding>) -> NameClaim {
    let uuid = info.map_or_else(|| binding.and_then(|binding| binding.uuid), |info| info.spec.uuid);
    let incarnation =
        info.map(|info| info.incarnation).or(binding.map(|binding| binding.incarnation));
    NameClaim {
        host: host.to_owned(),
        uuid: uuid.map(|uuid| uuid.to_string()),
        incarnation: incarnation.unwrap_or_default(),
        epoch: info.map(|info| info.epoch),
        state: info.map(|info| info.state),
    }
}

impl Inventory {
    /// Updates a name's binding. Returns a change if its conflicts differ from those last
    /// published.
    pub(crate) fn settle(&mut self, name: &str) -> Option<Change> {
        let vm = self.vms.get_mut(name)?;
        let claims =
            Claims { at: &vm.at, move_target: vm.move_target.as_deref(), hosts: &self.hosts };
        vm.bound.settle(&claims);
        self.note_unstored(name);
        let vm = self.vms.get_mut(name)?;
        let hosts: Vec<String> =
            vm.conflicting(&self.hosts).map(|(host, _)| host.clone()).collect();
        if hosts == vm.shown_conflicts {
            return None;
        }
        vm.shown_conflicts = hosts;
        let change = match self.name_conflict(name) {
            Some(conflict) => Change::NameConflict(Box::new(conflict)),
            None => Change::NameConflictGone(name.to_owned()),
        };
        Some(change)
    }

    /// Notes a reported migration: the destination of a VM whose name the reporting host holds.
    pub(crate) fn note_handing(&mut self, host: &str, status: &MigrationStatus) -> Vec<Change> {
        let Some(vm) = self.vms.get_mut(&status.vm) else { return Vec::new() };
        let handed = Some((status.id.clone(), status.to.clone()));
        let failed =
            status.report.as_ref().is_some_and(|report| report.outcome != Outcome::Completed);
        if failed
            || vm.bound.holder() != Some(host)
            || vm.bound.handed == handed
            || !self.hosts.contains_key(&status.to)
        {
            return Vec::new();
        }
        vm.bound.handed = handed;
        self.vm_changed(&status.vm)
    }

    /// Releases a name if this host holds it: the host no longer has the VM, or is forgotten.
    pub(crate) fn release(&mut self, host: &str, vm: &str) {
        if let Some(vm) = self.vms.get_mut(vm).filter(|vm| vm.bound.holder() == Some(host)) {
            vm.bound.release();
        }
    }

    /// Returns the names that a host holds although it does not report them.
    pub(crate) fn held_unreported(&self, host: &str) -> Vec<String> {
        let is_so = |vm: &Vm| vm.bound.holder() == Some(host) && !vm.at.contains_key(host);
        self.vms.iter().filter(|(_, vm)| is_so(vm)).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the names that a host reports although it does not hold them.
    pub(crate) fn reported_unheld(&self, host: &str) -> Vec<String> {
        let Some(known) = self.hosts.get(host) else { return Vec::new() };
        let is_so = |vm: &&String| !self.holds(host, vm);
        known.vms.keys().filter(is_so).cloned().collect()
    }

    /// Returns the host that holds a name, if one does.
    #[must_use]
    pub fn holder(&self, vm: &str) -> Option<&str> {
        self.vms.get(vm)?.bound.holder()
    }

    /// Returns whether a host holds a VM's name.
    #[must_use]
    pub fn holds(&self, host: &str, vm: &str) -> bool {
        self.holder(vm) == Some(host)
    }

    /// Returns whether a host's report of a VM is older than a hand-over: another host has had the
    /// same guest in a later epoch, as the holder of its name.
    pub(crate) fn is_outdated(&self, host: &str, vm: &str) -> bool {
        self.vms.get(vm).is_some_and(|vm| {
            let latest = vm.bound.latest.as_ref().zip(vm.at.get(host));
            latest.is_some_and(|((guest, epoch), info)| guest.is_of(info) && info.epoch < *epoch)
        })
    }

    /// Returns whether a host claims a VM's name and no hand-over explains it.
    #[must_use]
    pub fn is_conflict(&self, host: &str, vm: &str) -> bool {
        self.vms
            .get(vm)
            .is_some_and(|vm| vm.conflicting(&self.hosts).any(|(other, _)| other == host))
    }

    /// Reserves a name for the host on which the manager is creating a VM; none: ends the
    /// reservation.
    pub fn expect_vm(&mut self, vm: &str, host: Option<&str>) -> Vec<Change> {
        self.vms.entry(vm.to_owned()).or_default().bound.expected = host.map(str::to_owned);
        self.vm_changed(vm)
    }

    /// Binds a name to the guest that a host reports, as an operator's request.
    ///
    /// # Errors
    /// [`NoClaim`].
    pub fn bind(&mut self, vm: &str, host: &str) -> Result<Vec<Change>, NoClaim> {
        self.claim_of(vm, host)?;
        if let Some(entry) = self.vms.get_mut(vm)
            && let Some(info) = entry.at.get(host).cloned()
        {
            entry.bound.handed_from = None;
            entry.bound.bind(&info);
        }
        Ok(self.vm_changed(vm))
    }

    /// Binds a name to the VM that was restarted on a host, because its former host has failed.
    /// Reports of that VM by unreachable hosts are forgotten.
    ///
    /// # Errors
    /// [`NoClaim`].
    pub(crate) fn restarted(&mut self, vm: &str, host: &str) -> Result<Vec<Change>, NoClaim> {
        let mut changes = self.bind(vm, host)?;
        let others = self.others_with(vm, host);
        for other in others.iter().filter(|other| !self.is_up(other)).cloned().collect::<Vec<_>>() {
            if let Some(entry) = self.hosts.get_mut(&other) {
                entry.remove_vm(vm);
            }
            changes.extend(self.vm_gone(&other, vm));
        }
        Ok(changes)
    }

    /// Returns the binding that would follow from a host's report of a VM.
    ///
    /// # Errors
    /// [`NoClaim`].
    pub fn claim_of(&self, vm: &str, host: &str) -> Result<Binding, NoClaim> {
        let found = self.vms.get(vm).and_then(|vm| vm.at.get(host));
        found
            .filter(|info| info.state != VmState::MigratingIn)
            .map(|info| Binding::of(info))
            .ok_or(NoClaim)
    }

    /// Adopts a binding from the store; none: the store no longer has one.
    pub fn know_binding(&mut self, vm: &str, stored: Option<Binding>) -> Vec<Change> {
        self.binding_stored(vm, stored.clone());
        let Some(binding) = stored else { return Vec::new() };
        let bound = &mut self.vms.entry(vm.to_owned()).or_default().bound;
        if bound.holder() != Some(&binding.host) {
            *bound = Bound {
                binding: Some(binding),
                expected: bound.expected.take(),
                latest: bound.latest.take(),
                ..Bound::default()
            };
        }
        self.vm_changed(vm)
    }

    /// Notes the binding that the store has, if any.
    pub fn binding_stored(&mut self, vm: &str, stored: Option<Binding>) {
        match stored {
            Some(binding) => drop(self.stored.insert(vm.to_owned(), binding)),
            None => drop(self.stored.remove(vm)),
        }
        self.note_unstored(vm);
    }

    fn note_unstored(&mut self, name: &str) {
        let binding = self.vms.get(name).and_then(|vm| vm.bound.binding.as_ref());
        if self.stored.get(name) == binding {
            self.unstored.remove(name);
        } else if !self.unstored.contains(name) {
            self.unstored.insert(name.to_owned());
        }
    }

    /// Releases names whose holders are no longer known.
    pub fn release_forgotten(&mut self) -> Vec<Change> {
        let is_lost =
            |vm: &Vm| vm.bound.holder().is_some_and(|host| !self.hosts.contains_key(host));
        let lost: Vec<String> =
            self.vms.iter().filter(|(_, vm)| is_lost(vm)).map(|(name, _)| name.clone()).collect();
        let release = |name: &String| {
            if let Some(vm) = self.vms.get_mut(name) {
                vm.bound.release();
            }
            self.vm_changed(name)
        };
        lost.iter().flat_map(release).collect()
    }

    /// Returns the names that have a binding in the store.
    pub fn stored_bindings(&self) -> impl Iterator<Item = &str> {
        self.stored.keys().map(String::as_str)
    }

    /// Returns the bindings that differ from the store's, by name; none: the store must delete it.
    #[must_use]
    pub fn unstored_bindings(&self) -> BTreeMap<String, Option<Binding>> {
        let binding = |name: &String| self.vms.get(name).and_then(|vm| vm.bound.binding.clone());
        self.unstored.iter().map(|name| (name.clone(), binding(name))).collect()
    }

    fn name_conflict(&self, name: &str) -> Option<NameConflict> {
        let vm = self.vms.get(name)?;
        let claims: Vec<NameClaim> =
            vm.conflicting(&self.hosts).map(|(host, info)| claim(host, Some(info), None)).collect();
        let binding = vm.bound.binding.as_ref()?;
        let holder = claim(&binding.host, vm.at.get(&binding.host), Some(binding));
        (!claims.is_empty()).then(|| NameConflict { vm: name.to_owned(), holder, claims })
    }

    /// Returns a page of the names in conflict, by name.
    #[must_use]
    pub fn name_conflicts(&self, cursor: &Cursor) -> Page<NameConflict> {
        let found = self.vms.iter().filter(|(_, vm)| !vm.shown_conflicts.is_empty());
        let page = page(found, cursor, |name, _| self.name_conflict(name));
        Page {
            items: page.items.into_iter().flatten().collect(),
            total: page.total,
            next: page.next,
        }
    }

    /// Returns the number of names in conflict.
    #[must_use]
    pub fn conflict_count(&self) -> u64 {
        self.vms.values().filter(|vm| !vm.shown_conflicts.is_empty()).count() as u64
    }
}

/// The host does not report a VM with that name, or only one that is arriving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the host does not report that it has a VM with that name")]
pub struct NoClaim;
