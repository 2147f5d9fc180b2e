//! VMs that renewals name: their protection is about to end, or has just ended.

use std::collections::BTreeMap;
use std::time::Duration;

use godwit_api::MOST_ENDING;
use godwit_qemu::Uuid;
use tokio::sync::oneshot;

/// Time for the manager to answer a renewal that names a VM.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(6);

/// A VM that a renewal names, and the change that it is named for.
pub(super) type Named = (Uuid, u64);

#[derive(Debug, Default)]
pub(super) struct Endings {
    next: u64,
    vms: BTreeMap<Uuid, Naming>,
}

#[derive(Debug)]
struct Naming {
    vm: String,
    number: u64,
    /// Taken by the first answer.
    confirm: Option<oneshot::Sender<()>>,
    /// When renewals stop naming it, once its protection has ended.
    until: Option<Duration>,
}

impl Endings {
    /// Returns what a renewal names at `now`.
    pub(super) fn named(&mut self, now: Duration) -> Vec<Named> {
        self.vms.retain(|_, naming| naming.until.is_none_or(|until| now < until));
        self.vms.iter().map(|(vm, naming)| (*vm, naming.number)).collect()
    }

    /// Returns the names of VMs whose protection has not ended yet.
    pub(super) fn in_progress(&self) -> Vec<String> {
        let waiting = self.vms.values().filter(|naming| naming.until.is_none());
        waiting.map(|naming| naming.vm.clone()).collect()
    }

    /// Takes the answer to a renewal that named these VMs.
    pub(super) fn confirmed(&mut self, named: &[Named]) {
        for (vm, number) in named {
            let naming = self.vms.get_mut(vm).filter(|naming| naming.number == *number);
            if let Some(confirm) = naming.and_then(|naming| naming.confirm.take()) {
                // The change may have been given up.
                let _ = confirm.send(());
            }
        }
    }

    /// Begins to name a VM; `None` if there are too many. Returns the number of the change, and
    /// what receives the confirmation.
    pub(super) fn begin(&mut self, vm: &str, uuid: Uuid) -> Option<(u64, oneshot::Receiver<()>)> {
        if self.vms.len() >= MOST_ENDING && !self.vms.contains_key(&uuid) {
            return None;
        }
        let (confirm, confirmed) = oneshot::channel();
        self.next += 1;
        let (vm, number) = (vm.to_owned(), self.next);
        self.vms.insert(uuid, Naming { vm, number, confirm: Some(confirm), until: None });
        Some((number, confirmed))
    }

    /// Names a VM until `until`: its protection has ended.
    pub(super) fn ended(&mut self, (vm, number): Named, until: Duration) {
        let naming = self.vms.get_mut(&vm);
        if let Some(naming) = naming.filter(|naming| naming.number == number) {
            naming.until = Some(until);
        }
    }

    /// Names a VM no longer, unless its protection has ended.
    pub(super) fn give_up(&mut self, (vm, number): Named) {
        let is_own = |naming: &Naming| naming.number == number && naming.until.is_none();
        if self.vms.get(&vm).is_some_and(is_own) {
            self.vms.remove(&vm);
        }
    }

    /// Names a VM no longer: it is to be protected again.
    pub(super) fn forget(&mut self, vm: Uuid) {
        self.vms.remove(&vm);
    }
}
