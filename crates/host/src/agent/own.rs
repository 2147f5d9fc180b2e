//! VMs that agents restart among themselves ([`crate::ha::own`]), carried out on this host: its own
//! VMs end when their term is lost, and those of silent hosts start here.

mod changes;
mod following;
mod looks;
mod orders;
mod place;
mod restarts;

use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode, HaHost};
use godwit_ha::Term;
use godwit_qemu::{ResolvedSpec, VmName};
use tokio::time::MissedTickBehavior;

use looks::Looks;

use crate::agent::Agent;
use crate::failure::host_failed;
use crate::ha::HaGuard;
use crate::ha::own::OwnGuard;

/// Interval between two looks at the leases.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Looks at the leases per heartbeat.
const LOOKS_PER_BEAT: u32 = 5;
/// Shortest interval between two looks at a datastore.
const SCAN_AGAIN: Duration = Duration::from_secs(1);
/// Time for which the agent's start waits for the QEMUs of lost terms.
const LOST_VMS_END: Duration = Duration::from_secs(2);

impl Agent {
    /// Follows the terms of this host's own VMs until the agent ends. Blocks.
    ///
    /// # Errors
    /// A VM cannot be guarded: it may run without a term.
    pub(super) fn begin_own(self: &Arc<Self>) -> Result<(), ApiError> {
        let names = self.store.names()?;
        for name in names.iter().filter_map(|name| VmName::new(name.as_str()).ok()) {
            // One whose record cannot be read is known by its guard's files.
            if let Ok(Some(record)) = self.store.read(&name)
                && record.spec.protect_by_agents
            {
                self.own_guard(&record.spec)?;
            }
        }
        // The watchdog's first message names the QEMUs that this finds.
        self.own.all().iter().for_each(|own| drop(self.list_own(own)));
        self.own.publish();
        tokio::spawn(Agent::follow_own(Arc::downgrade(self)));
        Ok(())
    }

    /// Waits for a short time until the QEMUs of lost terms have ended.
    pub(super) async fn until_lost_own_ended(&self) {
        if tokio::time::timeout(LOST_VMS_END, self.look_at_own()).await.is_err() {
            tracing::error!("VMs of lost terms of agents have not ended yet");
        }
    }

    /// Looks at the datastores for VMs that agents restart, until the agent ends.
    pub(super) async fn watch_own(agent: Weak<Agent>) {
        let mut every = tokio::time::interval(SCAN_AGAIN);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks = Looks::default();
        loop {
            every.tick().await;
            let Some(agent) = agent.upgrade() else { return };
            let directories = tokio::task::block_in_place(|| {
                agent.give_up_unused();
                agent.datastore_directories()
            });
            agent.own.keep_datastores(&directories);
            looks.begin(directories, |datastore, directory| {
                agent.clone().look_at_datastore(datastore, directory)
            });
        }
    }

    async fn follow_own(agent: Weak<Agent>) {
        let mut every = tokio::time::interval(LOOK_AGAIN);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks = 0_u32;
        loop {
            every.tick().await;
            let Some(agent) = agent.upgrade() else { return };
            if looks.is_multiple_of(LOOKS_PER_BEAT) {
                tokio::task::block_in_place(|| agent.beat_own());
            }
            looks = looks.wrapping_add(1);
            // A QEMU that does not end holds up no heartbeat.
            let _ = tokio::time::timeout(LOOK_AGAIN, agent.look_at_own()).await;
        }
    }

    /// Begins to write the next block of each term that is held.
    fn beat_own(&self) {
        let held = self.own.all().into_iter().filter_map(|own| {
            let held = own.held()?;
            Some((own, held))
        });
        let held: Vec<_> = held.collect();
        if held.is_empty() {
            return;
        }
        let directories = self.datastore_directories();
        let watchdog = self.ha().watchdog().kernel_of_own();
        for (own, held) in held {
            self.own.beat(&own, held, directories.get(&held.datastore), watchdog);
        }
    }

    /// Returns the guard that decides whether a VM may run here; `None`: none does. Blocks.
    ///
    /// # Errors
    /// The guard of a VM that agents restart cannot be opened.
    pub(super) fn guard_of(&self, spec: &ResolvedSpec) -> Result<Option<Arc<HaGuard>>, ApiError> {
        if spec.protect.is_some() {
            return Ok(Some(Arc::clone(self.ha())));
        }
        match spec.protect_by_agents {
            true => Ok(Some(Arc::clone(&self.own_guard(spec)?.guard))),
            false => Ok(None),
        }
    }

    /// Returns the guard of a VM that agents restart. Blocks.
    fn own_guard(&self, spec: &ResolvedSpec) -> Result<Arc<OwnGuard>, ApiError> {
        let opened = self.own.guard_of(spec.uuid, Some(&spec.name));
        opened.map_err(|error| host_failed("cannot open the guard of a VM", &error))
    }

    /// Shows this host's guard, with the VMs that agents restart.
    pub(crate) fn shown_ha(&self) -> HaHost {
        let (own, own_problems) = self.own.shown();
        HaHost { own, own_problems, ..self.ha().state() }
    }

    /// Takes an operator's confirmation that the host of a VM's term is off.
    ///
    /// # Errors
    /// This host does not know the VM, or does not wait for that confirmation.
    pub(crate) fn confirm_own_off(&self, vm: &str, term: u64) -> Result<HaHost, ApiError> {
        let known = self.own.shown().0.into_iter().filter(|own| own.vm == vm);
        let known: Vec<_> = known.collect();
        if known.is_empty() {
            let message = format!("cannot confirm that the host of VM \"{vm}\" is off: no such VM");
            let remedy = "see `godwit host ha` for the VMs that agents restart";
            return Err(ApiError::new(ErrorCode::NotFound, message, remedy));
        }
        let took = known.iter().any(|own| {
            let took = self
                .own
                .with_watched(own.datastore, own.uuid, |watched| watched.confirm_off(Term(term)));
            took == Some(true)
        });
        if !took {
            let message = format!(
                "cannot confirm that the host of VM \"{vm}\" is off: term {term} does not wait \
                 for that"
            );
            let remedy = "see `godwit host ha` for its newest term, and how it stands";
            return Err(ApiError::new(ErrorCode::WrongState, message, remedy));
        }
        tracing::warn!(vm, term, "an operator has confirmed that the VM's host is off");
        Ok(self.shown_ha())
    }
}
