//! VMs whose protection is about to end, as renewals of their hosts name them.
//!
//! A host changes such a VM only after the answer to a renewal that named it, and no longer ends it
//! with its term from then on. So the mark is saved before that answer, and a marked VM of an ended
//! term starts nowhere else, whatever this manager has heard of the change. A mark is removed when
//! nothing that could start the VM elsewhere is known any more, or when its host itself answers,
//! after a renewal without the VM, that the VM is protected: then the host has not changed it.

use std::time::Duration;

use godwit_api::MOST_ENDING;
use godwit_api::control::{Problem, ProblemCode};
use godwit_qemu::Uuid;
use tokio::time::{Instant, timeout_at};

use super::Restarts;
use super::record::{ENDINGS, EndingKey, SavedEnding};
use crate::clock::now_unix_ms;
use crate::storage::keeper::Writes;

/// Most marks of one host: those of several renewals.
const MOST_MARKS: usize = 4 * MOST_ENDING;

impl Restarts {
    /// Saves that the protection of VMs is about to end, before a renewal that names them has its
    /// answer. A renewal that a peer forwards counts, too: the host does not know whose answer it
    /// has, and a peer that is wrong only keeps VMs from a start elsewhere.
    ///
    /// # Errors
    /// The renewal names too many VMs, or they cannot be saved. It must have no answer then.
    pub(crate) async fn note_endings(&self, host: &str, vms: &[Uuid]) -> Result<(), Problem> {
        let _saving = self.saving.lock().await;
        let marks = self.endings_of(host);
        let new: Vec<&Uuid> = vms.iter().filter(|vm| !marks.contains(vm)).collect();
        if vms.len() > MOST_ENDING || marks.len() + new.len() > MOST_MARKS {
            let detail = format!("host {host} ends the protection of too many VMs at once");
            let remedy = "wait some seconds between these changes";
            return Err(Problem::new(ProblemCode::WrongState, detail, remedy));
        }
        for vm in new {
            let key = EndingKey::new(host, *vm);
            let ending = SavedEnding { since_unix_ms: now_unix_ms() };
            let keeper = &self.means.keeper;
            let writes = keeper.put(Writes::default(), ENDINGS, &key.id(), &ending).await?;
            keeper.write(writes).await?;
            tracing::info!(host, %vm, "the protection of a VM is about to end");
            self.known().endings.insert(key);
        }
        Ok(())
    }

    /// Removes the marks of VMs that a host's renewal no longer names, as far as that is safe. The
    /// host's next renewal must not be answered meanwhile, so all questions together may take no
    /// longer than `limit`: its lease runs on.
    ///
    /// # Errors
    /// A removal cannot be saved.
    pub(crate) async fn settle_endings(
        &self,
        host: &str,
        named: &[Uuid],
        limit: Duration,
    ) -> Result<(), Problem> {
        let until = Instant::now() + limit;
        let marked = self.endings_of(host).into_iter().filter(|vm| !named.contains(vm));
        for vm in marked.collect::<Vec<_>>() {
            if Instant::now() >= until {
                return Ok(());
            }
            if self.needs_no_mark(host, vm, until).await {
                let _saving = self.saving.lock().await;
                self.remove_ending(&EndingKey::new(host, vm)).await?;
            }
        }
        Ok(())
    }

    pub(super) fn endings_of(&self, host: &str) -> Vec<Uuid> {
        let known = self.known();
        let of_host = known.endings.iter().filter(|key| key.host == host);
        of_host.map(|key| key.vm).collect()
    }

    async fn needs_no_mark(&self, host: &str, vm: Uuid, until: Instant) -> bool {
        let (at, name) = {
            let inventory = self.means.state.inventory();
            if !inventory.is_up(host) {
                return false;
            }
            let is_it = |uuid: Option<Uuid>| uuid == Some(vm);
            let known = self.known();
            let recorded = known.vms.values().find(|vm| is_it(vm.spec.uuid));
            let reported = inventory.vms_of(host).find(|info| is_it(info.spec.uuid));
            match (recorded, reported) {
                // It may have moved on from here, and run there without protection.
                (Some(vm), _) if vm.restart.is_some() || !inventory.is_up(&vm.host) => {
                    return false;
                }
                (Some(vm), _) => (vm.host.clone(), vm.spec.name.clone()),
                (None, Some(info)) if info.spec.protect.is_some() => {
                    (host.to_owned(), info.name.clone())
                }
                (None, _) => return true,
            }
        };
        // It counts as protected: only the host that has it knows whether it still is.
        match timeout_at(until, self.means.agents.vm(&at, &name)).await {
            Ok(Ok(Some(info))) => info.spec.uuid == Some(vm) && info.spec.protect.is_some(),
            _ => false,
        }
    }

    /// Removes the marks of hosts that left the cluster. The caller holds `saving`.
    pub(super) async fn remove_stale_endings(&self) -> Result<(), Problem> {
        let stale: Vec<EndingKey> = {
            let inventory = self.means.state.inventory();
            let known = self.known();
            let has_left = |key: &&EndingKey| inventory.host_plan(&key.host).is_none();
            known.endings.iter().filter(has_left).cloned().collect()
        };
        for key in stale {
            self.remove_ending(&key).await?;
        }
        Ok(())
    }

    /// Removes a mark. The caller holds `saving`.
    async fn remove_ending(&self, key: &EndingKey) -> Result<(), Problem> {
        if self.means.keeper.has(ENDINGS, &key.id()) {
            self.means.keeper.remove(ENDINGS, &key.id()).await?;
        }
        self.known().endings.remove(key);
        Ok(())
    }
}
