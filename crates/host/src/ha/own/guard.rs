//! Guard of a VM that agents restart among themselves, with the term that it holds.

use std::sync::Arc;

use godwit_api::{HaAnswer, HaStanding, HaVerdict};
use godwit_ha::Term;
use godwit_qemu::{Uuid, VmName};
use parking_lot::Mutex;

use super::folder::LastBlock;
use crate::ha::HaGuard;

/// A VM of this host, or one that it is starting.
#[derive(Debug)]
pub(crate) struct OwnGuard {
    pub(crate) vm: Uuid,
    pub(crate) guard: Arc<HaGuard>,
    /// Held while a term is claimed or given up, and while the VM is created in it.
    pub(crate) working: Arc<tokio::sync::Mutex<()>>,
    /// Held while the VM's processes are listed for the guard. Taken before the agent's table.
    pub(crate) listing: Mutex<()>,
    /// Name of the VM, for one whose record cannot be read.
    pub(super) name: Mutex<Option<VmName>>,
    pub(super) last: LastBlock,
}

/// A term that a guard holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldTerm {
    pub(crate) term: Term,
    pub(crate) datastore: Uuid,
}

impl OwnGuard {
    /// Returns the term that is held.
    pub(crate) fn held(&self) -> Option<HeldTerm> {
        let state = self.guard.state();
        let datastore = state.datastores.first()?.datastore;
        let is_held = state.standing == HaStanding::Held;
        is_held.then_some(HeldTerm { term: Term(state.term), datastore })
    }

    /// Whether nothing of the VM runs here, and nothing will before the next claim.
    pub(crate) fn is_over(&self) -> bool {
        self.guard.state().standing == HaStanding::Over && self.working.try_lock().is_ok()
    }

    /// Gives up the term: what runs in it ends.
    pub(crate) fn lose(&self) {
        let renewal = self.guard.renewal();
        let Some(holder) = renewal.holder else { return };
        let verdict = HaVerdict::Ended { term: renewal.term };
        let answer = HaAnswer { nonce: renewal.nonce, holder, verdict };
        if let Err(error) = self.guard.answer(&answer) {
            tracing::error!(vm = %self.vm, %error, "cannot give up a term of a VM");
        }
    }

    /// Has the guard know of no process: it ends none from then on.
    pub(crate) fn list_none(&self) {
        let contained = self.guard.begin_list();
        self.guard.order(contained, Vec::new());
    }

    /// Has the guard note that nothing of the VM runs under it. Blocks.
    pub(crate) fn settle(&self) {
        self.list_none();
        self.guard.vms_ended();
        self.guard.save_lease();
    }

    pub(crate) fn name(&self) -> Option<VmName> {
        self.name.lock().clone()
    }
}
