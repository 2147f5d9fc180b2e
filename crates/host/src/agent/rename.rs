//! A new name for a stopped VM.

use std::sync::Arc;

use godwit_api::{ApiError, RenameVm, VmInfo};
use godwit_qemu::{ResolvedSpec, VmName};

use crate::agent::{Agent, Begun, Slot};
use crate::failure::spec_refused;
use crate::vm::{Condition, Operation};
use crate::whole::whole;

impl Agent {
    /// Gives a stopped VM another name. If it is refused, the VM stays as it was. Hardware
    /// addresses and the UUID do not change.
    pub async fn rename(
        self: &Arc<Self>,
        name: &VmName,
        request: RenameVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let new = VmName::new(request.name).map_err(|error| spec_refused(&error))?;
            if new == name {
                return agent.vm_info(&name);
            }
            let begun = agent.begin(&name, &Operation::Change)?;
            if let Err(error) = agent.take_name(&begun, &new) {
                agent.settle(&name, begun.before, begun.vm, begun.reason);
                return Err(error);
            }
            tracing::info!(vm = new.as_str(), before = name.as_str(), "renamed");
            agent.continue_restart(&new);
            agent.vm_info(&new)
        })
        .await
    }

    /// Moves the VM's record and its entry in the table to the new name.
    fn take_name(&self, begun: &Begun, new: &VmName) -> Result<(), ApiError> {
        let old = &begun.spec.name;
        self.refuse_second_process(old, &begun.before)?;
        self.check_name(new)?;
        let spec = ResolvedSpec { name: new.clone(), ..(*begun.spec).clone() };
        self.check_order_of_start(&spec)?;
        // No VM of that name can be created meanwhile.
        let snapshots = self.known_snapshots(old)?;
        let crashes = self.table().get(old).and_then(|slot| slot.crashes.clone());
        let renamed = Slot::new(spec, begun.ownership, Condition::Changing);
        self.insert(Slot { snapshots, crashes, ..renamed })?;
        let renamed = tokio::task::block_in_place(|| self.store.rename(old, new));
        if let Err(error) = renamed {
            self.table().remove(new);
            return Err(error.into());
        }
        self.places.vm(old).rename(&self.places.vm(new));
        self.references.drop_bases_of(old);
        self.table().remove(old);
        self.settle(new, begun.before.clone(), None, begun.reason.clone());
        Ok(())
    }
}
