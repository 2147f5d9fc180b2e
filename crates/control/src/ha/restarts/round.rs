//! One round of the restarts: records follow the hosts' reports, ended terms release their VMs, and
//! waiting VMs get a host.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use godwit_api::control::{AlarmKind, Problem};
use godwit_planner::alarms::HaFacts;
use godwit_planner::failover::{ProtectedVm, Unplaced};
use tokio::time::Instant;

use super::following::followed;
use super::planning::{self, Waiting};
use super::record::{PROTECTED, RELEASES, ReleaseKey, SavedRestart, SavedVm};
use super::starting::Step;
use super::{Known, Restarts};
use crate::clock::now_unix_ms;
use crate::cluster::bounds::MOST_REASON_BYTES;
use crate::cluster::text::beginning;
use crate::ha::admission::shortfall_now;
use crate::ha::troubles::Source;
use crate::storage::keeper::Writes;

/// Time after which a VM without a place is placed again.
const UNPLACED_PAUSE: Duration = Duration::from_secs(5);
/// Most waiting VMs that are placed in one round.
const MOST_PLACED: usize = 64;
/// Age of a restart from which it is a trouble.
const LATE_MS: u64 = 60_000;

impl Restarts {
    /// Notes that a term of a host has ended, after that is recorded: its VMs start elsewhere. May
    /// be repeated.
    pub(crate) async fn released(&self, host: &str, term: u64) -> Result<(), Problem> {
        let _saving = self.saving.lock().await;
        for vm in self.of_ended_term(host) {
            let name = vm.spec.name.clone();
            tracing::warn!(vm = name, host, term, "a protected VM is to start elsewhere");
            let since_unix_ms = now_unix_ms();
            let restart = Some(SavedRestart { term, since_unix_ms, attempt: None });
            self.save(&name, Some(SavedVm { restart, ..vm }), Writes::default()).await?;
        }
        self.news.notify_one();
        Ok(())
    }

    /// Returns the VMs of a host that should run, as it last reported them.
    fn of_ended_term(&self, host: &str) -> Vec<SavedVm> {
        let inventory = self.means.state.inventory();
        let known = self.known();
        let recorded = known.vms.values().filter(|vm| vm.host == host);
        let recorded = recorded.map(|vm| vm.spec.name.as_str());
        let held = inventory.vms_of(host).map(|info| info.name.as_str());
        let names: BTreeSet<&str> =
            recorded.chain(held.filter(|name| inventory.holds(host, name))).collect();
        let current = |name: &str| {
            let record = known.vms.get(name);
            let is_elsewhere = record.is_some_and(|vm| vm.host != host || vm.restart.is_some());
            if is_elsewhere || known.releases.contains_key(&ReleaseKey::new(host, name)) {
                return None;
            }
            // Since an old report of a silent host, the VM may have lost its protection elsewhere.
            let is_current = !inventory.is_outdated(host, name);
            match inventory.vm_at(host, name).filter(|_| is_current) {
                Some(info) => followed(record, info, &inventory),
                None => record.cloned(),
            }
        };
        let vms = names.into_iter().filter_map(current).filter(|vm| vm.runs);
        // Its host may let it run on.
        vms.filter(|vm| !known.is_ending(host, vm)).collect()
    }

    /// Saves the protected VMs as their hosts report them.
    pub(super) async fn follow(&self) -> Result<(), Problem> {
        let _saving = self.saving.lock().await;
        for (name, next) in self.changed_records() {
            self.save(&name, next, Writes::default()).await?;
        }
        for key in self.stale_releases() {
            self.means.keeper.remove(RELEASES, &key.id()).await?;
            self.known().releases.remove(&key);
        }
        self.remove_stale_endings().await?;
        for (name, host) in self.misbound_names() {
            self.bind(&name, &host);
        }
        Ok(())
    }

    /// Returns the records that differ from the reports of the hosts that have the VMs; none: the
    /// VM is gone, or no longer protected.
    fn changed_records(&self) -> Vec<(String, Option<SavedVm>)> {
        let inventory = self.means.state.inventory();
        let known = self.known();
        let mut changed = Vec::new();
        for info in inventory.all_vms().filter(|info| inventory.is_up(&info.host)) {
            let record = known.vms.get(&info.name);
            if record.is_none() && info.spec.protect.is_none() {
                continue;
            }
            // A definition of a VM that was started elsewhere says nothing about it.
            let is_former = known.releases.contains_key(&ReleaseKey::new(&info.host, &info.name));
            if is_former || record.is_some_and(|vm| vm.restart.is_some()) {
                continue;
            }
            let next = followed(record, info, &inventory);
            if next.as_ref() != record {
                changed.push((info.name.clone(), next));
            }
        }
        for (name, vm) in &known.vms {
            // VMs of a host that left the cluster are its operator's.
            let has_left = inventory.host_plan(&vm.host).is_none();
            let attempt = vm.restart.as_ref().and_then(|restart| restart.attempt.as_ref());
            // Shortly after its start, its host does not report it yet.
            let is_busy = known.tries.get(name).is_some_and(|tries| tries.is_busy);
            let is_gone = inventory.is_up(&vm.host)
                && (vm.restart.is_none() && !is_busy)
                && inventory.vm_at(&vm.host, name).is_none()
                && inventory.holder(name).is_none();
            if is_gone || (has_left && attempt.is_none()) {
                changed.push((name.clone(), None));
            }
        }
        changed
    }

    /// Returns the releases of hosts that left the cluster.
    fn stale_releases(&self) -> Vec<ReleaseKey> {
        let inventory = self.means.state.inventory();
        let known = self.known();
        let has_left = |key: &&ReleaseKey| inventory.host_plan(&key.host).is_none();
        known.releases.keys().filter(has_left).cloned().collect()
    }

    /// Returns names that a former host holds, with the hosts that they should have.
    fn misbound_names(&self) -> Vec<(String, String)> {
        let inventory = self.means.state.inventory();
        let known = self.known();
        let is_misbound = |(name, vm): &(&String, &SavedVm)| {
            let holder = inventory.holder(name).filter(|holder| *holder != vm.host);
            let is_former = holder
                .is_some_and(|host| known.releases.contains_key(&ReleaseKey::new(host, name)));
            let reported = inventory.vm_at(&vm.host, name);
            is_former && reported.is_some_and(|info| info.incarnation == vm.incarnation)
        };
        let misbound = known.vms.iter().filter(is_misbound);
        misbound.map(|(name, vm)| (name.clone(), vm.host.clone())).collect()
    }

    /// Binds a VM's name to the host that runs it now, if that host reports it.
    pub(super) fn bind(&self, vm: &str, host: &str) {
        self.means.state.change(|inventory| inventory.restarted(vm, host).unwrap_or_default());
    }

    /// Saves the record of a VM together with other writes, then applies it. The caller holds
    /// `saving`.
    pub(super) async fn save(
        &self,
        name: &str,
        next: Option<SavedVm>,
        writes: Writes,
    ) -> Result<(), Problem> {
        let keeper = &self.means.keeper;
        match next {
            Some(vm) => {
                let writes = keeper.put(writes, PROTECTED, name, &vm).await?;
                keeper.write(writes).await?;
                self.means.admission.note_restart(name, vm.restart.is_some());
                self.known().vms.insert(name.to_owned(), vm);
            }
            None => {
                if keeper.has(PROTECTED, name) {
                    keeper.remove_with(writes, PROTECTED, name).await?;
                }
                self.means.admission.note_restart(name, false);
                let mut known = self.known();
                known.vms.remove(name);
                known.tries.remove(name);
            }
        }
        Ok(())
    }

    /// Returns the next steps of restarts, up to `most`.
    pub(super) fn due(&self, most: usize) -> Vec<Step> {
        let inventory = self.means.state.inventory();
        let mut known = self.known();
        let now = Instant::now();
        let mut steps = known.continued(now);
        let nothing = BTreeMap::new();
        let waiting = known.first_waiting(now, &nothing);
        if steps.len() < most && !waiting.is_empty() {
            let hosts = planning::hosts(&inventory, known.starting());
            let to_release = known.releases_of_hosts();
            let plan =
                planning::place(&waiting, &hosts, &self.means.terms, &to_release, &inventory);
            for unplaced in plan.unplaced {
                known.postpone(unplaced, now);
            }
            steps.extend(
                plan.restarts.into_iter().map(|to| Step { vm: to.vm.clone(), to: Some(to) }),
            );
        }
        steps.truncate(most);
        for step in &steps {
            let tries = known.tries.entry(step.vm.clone()).or_default();
            tries.is_busy = true;
            tries.target = step.to.as_ref().map(|to| to.host.clone());
        }
        steps
    }

    /// Determines which VMs could not restart elsewhere, and whether all fit after failures. With
    /// many VMs and hosts that takes seconds, in which the inventory is free.
    pub(super) fn find_problems(&self) {
        let vms: Vec<SavedVm> = self.known().vms.values().cloned().collect();
        if vms.is_empty() {
            let mut known = self.known();
            (known.problems, known.shortfall) = (BTreeMap::new(), None);
            return;
        }
        let (hosts, rules) = {
            let inventory = self.means.state.inventory();
            // Without the reports of all hosts nothing is certain.
            if inventory.awaited_host().is_some() {
                return;
            }
            (planning::hosts(&inventory, std::iter::empty()), inventory.rules())
        };
        let as_protected = |vm: &SavedVm| planning::protected_vm(vm, &self.means.state.inventory());
        let all: Vec<ProtectedVm> = vms.iter().map(as_protected).collect();
        let problems = planning::problems(&all, &hosts, &rules);
        let running: Vec<ProtectedVm> = vms
            .iter()
            .zip(&all)
            .filter(|(vm, _)| vm.runs && vm.restart.is_none())
            .map(|(_, protected)| protected.clone())
            .collect();
        let settings = self.means.admission.settings();
        let shortfall = shortfall_now(&rules, settings, &running, &hosts);
        let mut known = self.known();
        (known.problems, known.shortfall) = (problems, shortfall);
    }

    /// Reports what operators must know.
    pub(super) fn report_troubles(&self) {
        let known = self.known();
        let fact = |kind: AlarmKind, object: String, text: String| HaFacts {
            kind,
            object,
            text,
            remedy: None,
        };
        let unprotected = known.problems.iter().map(|(vm, why)| {
            let text = format!("protected VM {vm} cannot restart on another host: {why}");
            fact(AlarmKind::HaUnprotected, format!("vm:{vm}"), text)
        });
        let shortfall = known
            .shortfall
            .iter()
            .map(|found| fact(AlarmKind::HaShortfall, "cluster:ha".to_owned(), found.to_string()));
        let now_ms = now_unix_ms();
        let late = known.vms.iter().filter_map(|(name, vm)| {
            let restart = vm.restart.as_ref()?;
            let is_late = now_ms.saturating_sub(restart.since_unix_ms) >= LATE_MS;
            let text = format!(
                "VM {name} of host {} has not restarted yet; it {}",
                vm.host,
                known.restart_in_words(vm)
            );
            is_late.then(|| fact(AlarmKind::HaTrouble, format!("vm:{name}"), text))
        });
        let all = unprotected.chain(shortfall).chain(late).collect();
        self.means.troubles.set(Source::Restarts, all);
    }
}

impl Known {
    fn is_due(&self, vm: &SavedVm, now: Instant) -> bool {
        let tries = self.tries.get(&vm.spec.name);
        vm.restart.is_some()
            && tries.is_none_or(|tries| {
                !tries.is_busy && tries.not_before.is_none_or(|not_before| now >= not_before)
            })
    }

    /// Returns the steps of VMs whose start may have been requested.
    fn continued(&self, now: Instant) -> Vec<Step> {
        let has_attempt =
            |vm: &&SavedVm| vm.restart.as_ref().is_some_and(|restart| restart.attempt.is_some());
        let due = self.vms.values().filter(has_attempt).filter(|vm| self.is_due(vm, now));
        due.map(|vm| Step { vm: vm.spec.name.clone(), to: None }).collect()
    }

    /// Returns the VMs that need a host.
    fn waiting(&self, now: Instant) -> impl Iterator<Item = &SavedVm> {
        let has_none =
            |vm: &&SavedVm| vm.restart.as_ref().is_some_and(|restart| restart.attempt.is_none());
        self.vms.values().filter(has_none).filter(move |vm| self.is_due(vm, now))
    }

    /// Returns the first VMs that need a host, in the order of their restart. After the failure of
    /// many hosts the others have their turn later: placing all of them again and again would take
    /// too long.
    fn first_waiting<'a>(
        &'a self,
        now: Instant,
        nothing: &'a BTreeMap<String, String>,
    ) -> Vec<Waiting<'a>> {
        let as_waiting = |vm: &'a SavedVm| {
            let tries = self.tries.get(&vm.spec.name);
            Waiting { vm, refused: tries.map_or(nothing, |tries| &tries.refused) }
        };
        let mut waiting: Vec<Waiting<'a>> = self.waiting(now).map(as_waiting).collect();
        waiting.sort_by_key(|of| {
            let spec = &of.vm.spec;
            (spec.protect, Reverse(planning::memory_bytes(spec)), spec.name.as_str())
        });
        waiting.truncate(MOST_PLACED);
        waiting
    }

    /// Returns the VMs that are being started, with their hosts.
    fn starting(&self) -> impl Iterator<Item = (&str, &SavedVm)> {
        self.vms.values().filter_map(|vm| {
            let attempt = vm.restart.as_ref()?.attempt.as_ref();
            let tries = self.tries.get(&vm.spec.name).filter(|tries| tries.is_busy);
            let target = attempt.map(|attempt| attempt.host.as_str());
            Some((target.or_else(|| tries?.target.as_deref())?, vm))
        })
    }

    /// Lets a VM without a place wait. Hosts that refused it get another turn.
    fn postpone(&mut self, unplaced: Unplaced, now: Instant) {
        let tries = self.tries.entry(unplaced.vm).or_default();
        let hosts = unplaced.ruled_out.iter().map(|of| format!("{}: {}", of.host, of.text));
        let hosts = hosts.collect::<Vec<_>>().join("; ");
        let why = if hosts.is_empty() { "there is no other host".to_owned() } else { hosts };
        let why = beginning(&why, MOST_REASON_BYTES);
        tries.why = Some(format!("no host can take it: {why}"));
        tries.refused.clear();
        tries.not_before = Some(now + UNPLACED_PAUSE);
        tries.target = None;
    }
}
