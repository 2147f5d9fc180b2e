//! What follows from a look at a datastore: a term that is lost or not used is given up, its end
//! and the VM's record are written, and a former definition is deleted.

use std::path::PathBuf;
use std::sync::Arc;

use godwit_api::HaStanding;
use godwit_ha::Term;
use godwit_ha::own::End;
use godwit_qemu::{Uuid, VmName};

use super::place::spec_elsewhere;
use crate::agent::{Agent, Slot};
use crate::ha::boot_clock;
use crate::ha::own::{Me, OwnError, OwnGuard, OwnRecord, Place};
use crate::vm::Condition;

/// A VM of this host, as its table has it.
#[derive(Debug)]
pub(super) struct Here {
    pub(super) name: VmName,
    is_own: bool,
    has_process: bool,
    condition: Condition,
}

impl Here {
    /// Whether the VM shall not run, and does not.
    fn is_stopped(&self) -> bool {
        let is_stopped = matches!(
            self.condition,
            Condition::Stopped | Condition::Suspended | Condition::Template
        );
        is_stopped && !self.has_process
    }

    /// Whether the VM should run, and does not.
    pub(super) fn has_failed(&self) -> bool {
        self.condition == Condition::Failed && !self.has_process
    }
}

impl Agent {
    /// Looks at a datastore, and does what follows for each VM there. Looks at several datastores
    /// go on side by side; none changes a VM's term while another one does ([`OwnGuard::working`]).
    pub(super) async fn look_at_datastore(self: Arc<Self>, datastore: Uuid, directory: PathBuf) {
        self.own.scan(directory, datastore).await;
        let vms = self.own.watched_at(datastore);
        if vms.is_empty() {
            return;
        }
        let host = match tokio::task::block_in_place(|| self.own.host()) {
            Ok(host) => host,
            Err(error) => return tracing::error!(%error, "cannot read this host's identity"),
        };
        for vm in vms {
            self.follow_own_vm(datastore, vm, host).await;
        }
    }

    /// Gives up the terms of VMs that shall not run, or that are not protected by agents any more.
    pub(super) fn give_up_unused(&self) {
        for own in self.own.all() {
            let Ok(_working) = own.working.try_lock() else { continue };
            // No start begins while the table is locked, and no older list of processes is used.
            let _listing = own.listing.lock();
            let table = self.table();
            let slot = table.values().find(|slot| slot.spec.uuid == own.vm);
            let is_used = match slot {
                None => own.name().is_some_and(|name| self.store.record_of(&name).is_some()),
                Some(slot) => slot.spec.protect_by_agents && !here(slot).is_stopped(),
            };
            if !is_used && own.held().is_some() {
                // The process of a VM that is not protected any more goes on.
                own.list_none();
                own.lose();
            }
        }
    }

    pub(super) fn here(&self, vm: Uuid) -> Option<Here> {
        self.table().values().find(|slot| slot.spec.uuid == vm).map(here)
    }

    /// Does what follows from what was seen of a VM.
    async fn follow_own_vm(self: &Arc<Self>, datastore: Uuid, vm: Uuid, host: Uuid) {
        let own = self.own.known(vm);
        let here = self.here(vm);
        let me = Me { host, is_over: own.as_ref().is_none_or(|own| own.is_over()) };
        let seen = self.own.with_watched(datastore, vm, |watched| {
            let claims = watched.claim_after(boot_clock(), me);
            let (place, term, end) = (watched.place.clone(), watched.term, watched.end());
            let (is_of, of_other) = (watched.is_of(host), watched.is_of_other(host));
            let seen = (place, term, end, (is_of, of_other), claims, watched.record.clone());
            // One that hangs would be written to in vain.
            watched.answers.then_some(seen)
        });
        let Some((place, term, end, (is_of, of_other), claims, record)) = seen.flatten() else {
            return;
        };
        if of_other {
            let held = own.as_ref().and_then(|own| Some((own, own.held()?)));
            if let Some((own, held)) = held
                && held.datastore == datastore
                && held.term < term
            {
                own.lose();
            }
            if me.is_over && record.is_some() {
                self.delete_former(here.as_ref(), &place).await;
            }
        }
        if is_of && me.is_over {
            self.end_own_term(&place, (term, end), here.as_ref(), record.as_ref()).await;
        }
        if let Some(own) = own.filter(|own| is_of && own.held().is_some()) {
            self.keep_own_record(&own, &place, record.as_ref()).await;
        }
        let may = match &here {
            None => true,
            // One that a user has stopped stays so; a former definition is deleted first.
            Some(here) => is_of && here.is_own && here.has_failed(),
        };
        if let (Some(after), Some(record)) = (claims, record)
            && may
        {
            tokio::spawn(self.clone().restart_own(place, after, record, is_of));
        }
    }

    /// Deletes the stopped definition of a VM that this host has held and another one has claimed
    /// since. What a protection that ended has left behind, also on another datastore, deletes
    /// none.
    async fn delete_former(self: &Arc<Self>, here: Option<&Here>, place: &Place) {
        let Some(here) = here.filter(|here| here.is_own) else { return };
        if !here.is_stopped() && !here.has_failed() {
            return;
        }
        let vm = place.vm;
        let own = self.own.known(vm).filter(|own| own.guard.state().term > 0);
        let Some(own) = own.filter(|_| self.is_place_of(&here.name, place)) else { return };
        if self.places.vm(&here.name).living_process().is_some() {
            return;
        }
        let Ok(_working) = own.working.try_lock() else { return };
        if !self.is_still_over(&own) {
            return;
        }
        match self.delete(&here.name, true).await {
            Ok(()) => {
                tracing::warn!(vm = here.name.as_str(), "deleted: another host has claimed it");
                tokio::task::block_in_place(|| self.own.forget(vm));
            }
            Err(error) => {
                tracing::error!(vm = here.name.as_str(), %error, "cannot delete a VM that left");
            }
        }
    }

    /// Whether a VM's disks are on the datastore of a place.
    fn is_place_of(&self, name: &VmName, place: &Place) -> bool {
        let spec = self.table().get(name).map(|slot| slot.spec.to_vm_spec());
        let found = spec.map(|spec| tokio::task::block_in_place(|| self.own_place(&spec)));
        found.is_some_and(|found| found.is_ok_and(|found| found.datastore == place.datastore))
    }

    /// Writes how this host's term ended, and removes the folder of a VM that is not protected any
    /// more.
    async fn end_own_term(
        &self,
        place: &Place,
        (term, end): (Term, Option<End>),
        here: Option<&Here>,
        record: Option<&OwnRecord>,
    ) {
        let is_gone = || {
            let named = record.and_then(|record| VmName::new(record.spec.name.as_str()).ok());
            let known = self.own.known(place.vm).and_then(|own| own.name());
            let mut names = named.iter().chain(&known);
            names.all(|name| self.store.record_of(name).is_none())
        };
        let done = match (end, here) {
            (Some(End::None), Some(here)) if !here.is_own || here.is_stopped() => {
                self.own.end(place, term, End::Stopped).await
            }
            (Some(End::Stopped | End::Resting), Some(here)) if !here.is_own => {
                self.remove_own(place, term).await
            }
            // Its definition was deleted here.
            (Some(End::Stopped), None) if is_gone() => self.remove_own(place, term).await,
            _ => return,
        };
        if let Err(error) = done {
            tracing::warn!(vm = %place.vm, %error, "cannot write the end of a VM's term");
        }
    }

    async fn remove_own(&self, place: &Place, term: Term) -> Result<(), OwnError> {
        let Some(own) = self.own.known(place.vm) else {
            return self.own.remove(place, term).await;
        };
        let Ok(_working) = own.working.try_lock() else { return Ok(()) };
        if !self.is_still_over(&own) {
            return Ok(());
        }
        self.own.remove(place, term).await?;
        tokio::task::block_in_place(|| self.own.forget(place.vm));
        Ok(())
    }

    /// Whether this host holds no term of a VM, on any datastore. [`OwnGuard::working`] is held, so
    /// that this stays so; before that, a user or a look at another datastore may have changed it.
    pub(super) fn is_still_over(&self, own: &Arc<OwnGuard>) -> bool {
        own.guard.state().standing == HaStanding::Over && self.own.is_current(own)
    }

    /// Writes the record of a VM that runs here if it differs.
    async fn keep_own_record(&self, own: &OwnGuard, place: &Place, there: Option<&OwnRecord>) {
        let held = own.held().filter(|held| held.datastore == place.datastore);
        let Some(held) = held else { return };
        let now = {
            let table = self.table();
            let slot = table.values().find(|slot| slot.spec.uuid == own.vm);
            let Some(slot) = slot.filter(|slot| slot.spec.protect_by_agents) else { return };
            let spec = spec_elsewhere(slot.spec.to_vm_spec());
            let mut record = OwnRecord::new(spec, held.term.0, &self.config.name);
            record.incarnation = Some(slot.ownership.incarnation);
            record
        };
        if there == Some(&now) {
            return;
        }
        if let Err(error) = self.own.write_record(place, now).await {
            tracing::warn!(vm = %own.vm, %error, "cannot write the record of a VM");
        }
    }
}

fn here(slot: &Slot) -> Here {
    Here {
        name: slot.spec.name.clone(),
        is_own: slot.spec.protect_by_agents,
        has_process: slot.vm.is_some(),
        condition: slot.condition.clone(),
    }
}
