//! State of hosts and VMs as the journal has it, and the entries about its changes. Pure.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::VmState;
use godwit_api::control::{Change, HostState, HostSummary, JournalKind, VmSummary};

use crate::journal::entries::NewEntry;

/// Hosts, VMs and conflicts, reduced to what entries are about.
#[derive(Debug, Default)]
pub(super) struct Known {
    hosts: BTreeMap<String, Host>,
    vms: BTreeMap<String, Vm>,
    /// Names of VMs that several hosts claim, and the host whose claim was noted.
    conflicts: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Host {
    reach: Reach,
    is_faulty: bool,
}

/// Whether a host is reachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// It has not reported yet, and no connection to it has failed.
    Awaited,
    Up,
    Away,
}

impl Reach {
    fn of(host: &HostSummary) -> Reach {
        match host.state {
            HostState::Up => Reach::Up,
            HostState::Away => Reach::Away,
            HostState::Unknown if host.reason.is_some() => Reach::Away,
            HostState::Unknown => Reach::Awaited,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Vm {
    host: String,
    /// Last definite state.
    power: Option<Power>,
    in_doubt: bool,
}

/// State of a VM between its transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Power {
    Running,
    Paused,
    Suspended,
    Stopped,
    Failed,
}

impl Power {
    /// Returns `None` for a transition: the next report shows its result.
    fn of(vm: &VmSummary) -> Option<Power> {
        match vm.state {
            VmState::Running | VmState::MigratingOut => Some(Power::Running),
            // A source that hands a guest over reports it as paused.
            VmState::Paused if vm.in_doubt || vm.r#move.is_some() => None,
            VmState::Paused => Some(Power::Paused),
            VmState::Suspended => Some(Power::Suspended),
            VmState::Stopped | VmState::Template => Some(Power::Stopped),
            VmState::Failed => Some(Power::Failed),
            VmState::Starting | VmState::Stopping | VmState::MigratingIn => None,
        }
    }
}

impl Known {
    /// Takes in a change without an entry.
    pub(super) fn note(&mut self, change: &Change) {
        drop(self.entries(change));
    }

    /// Takes in a change. Returns the entries about it.
    pub(super) fn entries(&mut self, change: &Change) -> Vec<NewEntry> {
        match change {
            Change::Host(host) => self.host(host),
            Change::HostGone(host) => {
                self.hosts.remove(host);
                Vec::new()
            }
            Change::Vm(vm) => self.vm(vm),
            Change::VmGone(vm) => self.vm_gone(vm).into_iter().collect(),
            Change::NameConflict(conflict) => {
                let claims: Vec<&str> =
                    conflict.claims.iter().map(|claim| claim.host.as_str()).collect();
                let liar = claims.first().copied().unwrap_or(&conflict.holder.host);
                let known = self.conflicts.insert(conflict.vm.clone(), liar.to_owned());
                let text = format!(
                    "{} claim the name of VM {}, which {} holds",
                    claims.join(", "),
                    conflict.vm,
                    conflict.holder.host
                );
                let entry = NewEntry::warning(JournalKind::NameConflict, text)
                    .about("vm", &conflict.vm)
                    .about("host", &conflict.holder.host);
                let entry = claims.iter().fold(entry, |entry, host| entry.about("host", host));
                known.is_none().then(|| entry.reported_by(liar)).into_iter().collect()
            }
            Change::NameConflictGone(vm) => {
                let text = format!("no other host claims the name of VM {vm} any more");
                let entry = |liar: String| {
                    // A host that claims a name again and again causes this entry, too.
                    NewEntry::info(JournalKind::NameConflict, text)
                        .about("vm", vm)
                        .reported_by(&liar)
                };
                self.conflicts.remove(vm).map(entry).into_iter().collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns as changes what is known and not among these changes.
    pub(super) fn gone(&self, now: &[Change]) -> Vec<Change> {
        let hosts: BTreeSet<&str> = now
            .iter()
            .filter_map(|change| match change {
                Change::Host(host) => Some(host.name.as_str()),
                _ => None,
            })
            .collect();
        let vms: BTreeSet<&str> = now
            .iter()
            .filter_map(|change| match change {
                Change::Vm(vm) => Some(vm.name.as_str()),
                _ => None,
            })
            .collect();
        let hosts = self.hosts.keys().filter(|name| !hosts.contains(name.as_str()));
        let vms = self.vms.keys().filter(|name| !vms.contains(name.as_str()));
        vms.cloned().map(Change::VmGone).chain(hosts.cloned().map(Change::HostGone)).collect()
    }

    fn host(&mut self, host: &HostSummary) -> Vec<NewEntry> {
        let name = &host.name;
        let now = Host { reach: Reach::of(host), is_faulty: host.fault.is_some() };
        let Some(before) = self.hosts.insert(name.clone(), now.clone()) else { return Vec::new() };
        let mut entries = Vec::new();
        if before.reach != now.reach {
            entries.extend(reach_changed(host, before.reach, now.reach));
        }
        if before.is_faulty != now.is_faulty {
            let text =
                if now.is_faulty { "reports invalid data" } else { "reports valid data again" };
            let text = format!("host {name} {text}");
            let kind = JournalKind::HostFaulty;
            let entry = match &host.fault {
                Some(fault) => NewEntry::error(kind, text).because(Some(fault)),
                None => NewEntry::info(kind, text),
            };
            entries.push(entry);
        }
        entries.into_iter().map(|entry| entry.about("host", name).reported_by(name)).collect()
    }

    fn vm(&mut self, vm: &VmSummary) -> Vec<NewEntry> {
        let before = self.vms.get(&vm.name).cloned();
        let power = Power::of(vm).or(before.as_ref().and_then(|before| before.power));
        let now = Vm { host: vm.host.clone(), power, in_doubt: vm.in_doubt };
        self.vms.insert(vm.name.clone(), now.clone());
        let mut entries = Vec::new();
        match &before {
            // A VM that a host reports while it is connected, and not at the connection, is new.
            None if self.is_up(&vm.host) && vm.is_current => {
                let text = format!("VM {} is new on host {}", vm.name, vm.host);
                entries.push(NewEntry::info(JournalKind::VmCreated, text));
            }
            None => {}
            Some(before) => {
                if let (Some(was), Some(is)) = (before.power, now.power)
                    && was != is
                {
                    entries.push(power_changed(vm, was, is));
                }
                if before.in_doubt != now.in_doubt {
                    entries.push(doubt_changed(vm));
                }
            }
        }
        let about = |entry: NewEntry| entry.about("vm", &vm.name).about("host", &vm.host);
        entries.into_iter().map(|entry| about(entry).reported_by(&vm.host)).collect()
    }

    fn vm_gone(&mut self, vm: &str) -> Option<NewEntry> {
        let before = self.vms.remove(vm)?;
        let text = format!("VM {vm} no longer exists on host {}", before.host);
        let entry = NewEntry::info(JournalKind::VmDeleted, text);
        Some(entry.about("vm", vm).about("host", &before.host).reported_by(&before.host))
    }

    fn is_up(&self, host: &str) -> bool {
        self.hosts.get(host).is_some_and(|host| host.reach == Reach::Up)
    }
}

fn reach_changed(host: &HostSummary, was: Reach, is: Reach) -> Option<NewEntry> {
    let name = &host.name;
    match (was, is) {
        (_, Reach::Away) => {
            let text = format!("host {name} is away: its {} VMs are in an unknown state", host.vms);
            Some(NewEntry::warning(JournalKind::HostAway, text).because(host.reason.as_ref()))
        }
        (Reach::Away, Reach::Up) => {
            let text = format!("host {name} is reachable again with {} VMs", host.vms);
            Some(NewEntry::info(JournalKind::HostUp, text))
        }
        // Every host reports after the manager's start.
        _ => None,
    }
}

fn power_changed(vm: &VmSummary, was: Power, is: Power) -> NewEntry {
    let VmSummary { name, host, .. } = vm;
    let entry = match is {
        Power::Running if was == Power::Paused => {
            NewEntry::info(JournalKind::VmPaused, format!("VM {name} was resumed on host {host}"))
        }
        Power::Running => {
            NewEntry::info(JournalKind::VmStarted, format!("VM {name} started on host {host}"))
        }
        Power::Paused => {
            NewEntry::info(JournalKind::VmPaused, format!("VM {name} is paused on host {host}"))
        }
        Power::Suspended => {
            NewEntry::info(JournalKind::VmPaused, format!("VM {name} is suspended on host {host}"))
        }
        Power::Stopped => {
            NewEntry::info(JournalKind::VmStopped, format!("VM {name} stopped on host {host}"))
        }
        Power::Failed => {
            NewEntry::error(JournalKind::VmCrashed, format!("VM {name} failed on host {host}"))
        }
    };
    entry.because(vm.reason.as_ref())
}

fn doubt_changed(vm: &VmSummary) -> NewEntry {
    let name = &vm.name;
    if vm.in_doubt {
        let text = format!("it is unknown which host may run VM {name}");
        NewEntry::error(JournalKind::VmInDoubt, text).because(vm.reason.as_ref())
    } else {
        let text = format!("host {} may run VM {name}: the doubt is resolved", vm.host);
        NewEntry::info(JournalKind::VmInDoubt, text)
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::control::NameConflict;
    use godwit_api::{HostEvent, VmInfo};

    use super::*;
    use crate::cluster::inventory::Inventory;
    use crate::rig;

    /// Applies a change to the inventory, and returns the texts of the entries about it.
    fn texts(known: &mut Known, changes: &[Change]) -> Vec<String> {
        let entries = changes.iter().flat_map(|change| known.entries(change));
        entries.map(|entry| entry.text().to_owned()).collect()
    }

    fn begun() -> (Inventory, Known) {
        let mut inventory = Inventory::default();
        let vms = vec![rig::vm("web", "a", None)];
        rig::put_host(&mut inventory, rig::host("a", None), &[], vms);
        let mut known = Known::default();
        for change in super::super::all(&inventory) {
            known.note(&change);
        }
        (inventory, known)
    }

    fn reported(state: VmState, reason: Option<&str>) -> HostEvent {
        let vm = rig::vm("web", "a", None);
        HostEvent::Vm(Box::new(VmInfo { state, reason: reason.map(str::to_owned), ..vm }))
    }

    #[test]
    fn each_change_of_a_vm_is_an_entry_and_transitions_are_none() {
        let (mut inventory, mut known) = begun();
        let steps: [(VmState, Option<&str>, &[&str]); 8] = [
            (VmState::MigratingOut, None, &[]),
            (VmState::Running, None, &[]),
            (VmState::Stopping, None, &[]),
            (VmState::Stopped, None, &["VM web stopped on host a"]),
            (VmState::Starting, None, &[]),
            (VmState::Running, None, &["VM web started on host a"]),
            (VmState::Paused, None, &["VM web is paused on host a"]),
            (VmState::Failed, Some("QEMU died"), &["VM web failed on host a"]),
        ];
        for (state, reason, expected) in steps {
            let changes = inventory.apply("a", reported(state, reason), 2);
            assert_eq!(texts(&mut known, &changes), expected, "{state:?}");
        }
        let changes = inventory.apply("a", HostEvent::VmGone("web".into()), 3);
        assert_eq!(texts(&mut known, &changes), ["VM web no longer exists on host a"]);
    }

    #[test]
    fn a_vm_is_new_only_while_its_host_is_connected() {
        let (mut inventory, mut known) = begun();
        let new = HostEvent::Vm(Box::new(rig::vm("new", "a", None)));
        let changes = inventory.apply("a", new, 2);
        assert_eq!(texts(&mut known, &changes), ["VM new is new on host a"]);
        // A host's first report lists what it had before.
        inventory.plan_host("b", crate::cluster::inventory::HostPlan::default());
        inventory.reached("b");
        let old = HostEvent::Vm(Box::new(rig::vm("old", "b", None)));
        let mut changes = inventory.apply("b", old, 2);
        changes.extend(inventory.apply("b", HostEvent::Known, 2));
        assert_eq!(texts(&mut known, &changes), [""; 0]);
    }

    #[test]
    fn a_host_goes_and_comes_with_its_reason() {
        let (mut inventory, mut known) = begun();
        let changes: Vec<Change> = inventory.lost("a", "no route to host").into_iter().collect();
        let entries: Vec<NewEntry> =
            changes.iter().flat_map(|change| known.entries(change)).collect();
        let [away] = &entries[..] else { panic!("{entries:?}") };
        let away = away.clone().with_id(String::new());
        assert_eq!(away.text, "host a is away: its 1 VMs are in an unknown state");
        assert_eq!(away.why.as_deref(), Some("no route to host"));
        // Another reason is no news.
        let changes: Vec<Change> = inventory.lost("a", "it is silent").into_iter().collect();
        assert_eq!(texts(&mut known, &changes), [""; 0]);
        inventory.reached("a");
        let mut changes = inventory.apply("a", reported(VmState::Running, None), 2);
        changes.extend(inventory.apply("a", HostEvent::Known, 2));
        assert_eq!(texts(&mut known, &changes), ["host a is reachable again with 1 VMs"]);
    }

    #[test]
    fn both_entries_of_a_name_conflict_count_for_the_host_that_claims() {
        let conflict: NameConflict = serde_json::from_value(serde_json::json!({
            "vm": "web", "holder": { "host": "a" }, "claims": [{ "host": "liar" }]
        }))
        .unwrap();
        let mut known = Known::default();
        for change in
            [Change::NameConflict(Box::new(conflict)), Change::NameConflictGone("web".into())]
        {
            let entries = known.entries(&change);
            assert_eq!(entries.len(), 1);
            assert_eq!(entries[0].source(), Some("liar"));
        }
    }

    #[test]
    fn what_was_missed_is_found_by_comparison() {
        let (_, mut known) = begun();
        let gone = known.gone(&[]);
        assert_eq!(gone, [Change::VmGone("web".into()), Change::HostGone("a".into())]);
        assert_eq!(texts(&mut known, &gone), ["VM web no longer exists on host a"]);
        assert_eq!(known.gone(&[]), []);
    }
}
