//! VMs that a host must give up before it holds a term again, because they were started elsewhere.

use std::collections::BTreeMap;
use std::iter;
use std::time::Duration;

use godwit_api::ReleasedVm;
use godwit_api::control::{Problem, ProblemCode};
use godwit_types::Incarnation;
use tokio::time::{Instant, timeout_at};

use super::record::{RELEASES, ReleaseKey, SavedAttempt, SavedRelease, SavedVm};
use super::{RETURN_INTERVAL, Restarts};
use crate::storage::keeper::Writes;

/// Longest wait for what a host answers about the VMs that it must give up: the lease of one that
/// holds a term runs on.
const ASK_LIMIT: Duration = Duration::from_secs(1);

/// What hosts must give up.
pub(super) type Releases = BTreeMap<ReleaseKey, SavedRelease>;

/// Returns what other hosts must give up when a VM that was started anew runs on a host. `answered`
/// are the hosts that have just answered that they have it, without a process.
pub(super) fn releases(
    vm: &SavedVm,
    attempt: &SavedAttempt,
    answered: Vec<(String, Incarnation)>,
    host: &str,
) -> Releases {
    let known = Some(vm.incarnation).filter(|incarnation| !incarnation.is_unrecorded());
    let recorded = (vm.host.clone(), known);
    let saved = attempt.left_at.iter().map(|left| (left.host.clone(), left.incarnation));
    let now = answered.into_iter().map(|(at, incarnation)| (at, Some(incarnation)));
    // Of two for a host, what it has answered last counts.
    let all = iter::once(recorded).chain(saved).chain(now).filter(|(at, _)| at != host);
    all.map(|(at, incarnation)| release(vm, &at, incarnation, host)).collect()
}

/// Returns what one host must give up; no incarnation: what it has made without an answer.
pub(super) fn release(
    vm: &SavedVm,
    at: &str,
    incarnation: Option<Incarnation>,
    to: &str,
) -> (ReleaseKey, SavedRelease) {
    let release = SavedRelease { uuid: vm.spec.uuid, incarnation, to: to.to_owned() };
    (ReleaseKey::new(at, &vm.spec.name), release)
}

impl Restarts {
    /// Returns whether a host must give up VMs.
    pub(crate) fn has_releases(&self, host: &str) -> bool {
        self.known().releases.keys().any(|key| key.host == host)
    }

    /// Returns the VMs that a host must give up. They stay listed until [`Restarts::delivered`].
    ///
    /// # Errors
    /// The host gets no term yet: one of its VMs may be starting elsewhere, or it must be asked
    /// which VM it has, and does not answer.
    pub(crate) async fn take_releases(&self, host: &str) -> Result<Vec<ReleasedVm>, Problem> {
        self.let_return(host)?;
        let until = Instant::now() + ASK_LIMIT;
        let (mut released, mut gone) = (Vec::new(), Vec::new());
        for (key, release) in self.releases_of(host) {
            let incarnation = match release.incarnation {
                Some(incarnation) => Some(incarnation),
                None => self.incarnation_at(&key, &release, until).await?,
            };
            match incarnation {
                Some(_) if self.is_at_home(&key, incarnation) => gone.push(key),
                Some(incarnation) => {
                    released.push(ReleasedVm { name: key.vm, incarnation, to: release.to });
                }
                None => gone.push(key),
            }
        }
        if !gone.is_empty() {
            self.remove_releases(&gone).await?;
        }
        Ok(released)
    }

    /// Lets the VMs of a host that is about to hold a term wait for it: somebody may start them
    /// there. Refuses that while one of them may be starting elsewhere.
    fn let_return(&self, host: &str) -> Result<(), Problem> {
        let mut known = self.known();
        for vm in known.vms.values() {
            let attempt = vm.restart.as_ref().and_then(|restart| restart.attempt.as_ref());
            let has_it = |attempt: &SavedAttempt| {
                // What is to be released is deleted before the term.
                let key = ReleaseKey::new(host, &vm.spec.name);
                vm.host == host
                    || (attempt.left_at.iter().any(|left| left.host == host)
                        && !known.releases.contains_key(&key))
            };
            if let Some(attempt) = attempt.filter(|it| it.host != host && has_it(it)) {
                let (name, target) = (&vm.spec.name, &attempt.host);
                let detail =
                    format!("host {host} holds no term yet: host {target} may start VM \"{name}\"");
                let remedy = format!("wait until host {target} has started it, or is off");
                return Err(Problem::new(ProblemCode::WrongState, detail, remedy));
            }
        }
        // A host that asks again and again, and gets no term, holds its VMs up for a part of the
        // time only.
        let since = known.returning.entry(host.to_owned()).or_insert_with(Instant::now);
        if since.elapsed() >= RETURN_INTERVAL {
            *since = Instant::now();
        }
        Ok(())
    }

    /// Notes that a host has given up these VMs.
    pub(crate) async fn delivered(&self, host: &str, vms: &[ReleasedVm]) -> Result<(), Problem> {
        let keys: Vec<ReleaseKey> = vms.iter().map(|vm| ReleaseKey::new(host, &vm.name)).collect();
        self.remove_releases(&keys).await
    }

    pub(super) fn releases_of(&self, host: &str) -> Vec<(ReleaseKey, SavedRelease)> {
        let known = self.known();
        let of_host = known.releases.iter().filter(|(key, _)| key.host == host);
        of_host.map(|(key, release)| (key.clone(), release.clone())).collect()
    }

    /// Returns whether the VM that a host would give up is the one that runs there.
    fn is_at_home(&self, key: &ReleaseKey, incarnation: Option<Incarnation>) -> bool {
        let known = self.known();
        let is_it = |vm: &SavedVm| vm.host == key.host && Some(vm.incarnation) == incarnation;
        known.vms.get(&key.vm).is_some_and(is_it)
    }

    /// Asks a host for the VM that it may have created without an answer.
    async fn incarnation_at(
        &self,
        key: &ReleaseKey,
        release: &SavedRelease,
        until: Instant,
    ) -> Result<Option<Incarnation>, Problem> {
        let asked = timeout_at(until, self.means.agents.vm(&key.host, &key.vm)).await;
        let asked = asked.unwrap_or_else(|_| Err("it does not answer in time".to_owned()));
        let found = asked.map_err(|why| {
            let detail = format!("cannot ask host {} for its VM \"{}\": {why}", key.host, key.vm);
            Problem::new(ProblemCode::HostAway, detail, "wait until its agent answers")
        })?;
        let found = found.filter(|info| info.spec.uuid == release.uuid);
        Ok(found.map(|info| info.incarnation))
    }

    async fn remove_releases(&self, keys: &[ReleaseKey]) -> Result<(), Problem> {
        let _saving = self.saving.lock().await;
        for key in keys {
            if self.means.keeper.has(RELEASES, &key.id()) {
                self.means.keeper.remove(RELEASES, &key.id()).await?;
            }
            self.known().releases.remove(key);
        }
        Ok(())
    }

    /// Adds releases to the writes of the start that causes them. The caller holds `saving`.
    pub(super) async fn put_releases(
        &self,
        mut writes: Writes,
        releases: &Releases,
    ) -> Result<Writes, Problem> {
        for (key, release) in releases {
            writes = self.means.keeper.put(writes, RELEASES, &key.id(), release).await?;
        }
        Ok(writes)
    }

    /// Applies releases that are saved.
    pub(super) fn know_releases(&self, releases: Releases) {
        self.known().releases.extend(releases);
    }
}
