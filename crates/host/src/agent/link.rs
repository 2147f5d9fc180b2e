//! The link of a NIC while its VM runs. It is in the VM's definition, so that it is the same after
//! a restart and at the destination of a move.

use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode, SetNicLink, VmInfo};
use godwit_qemu::VmName;

use crate::agent::plug::refuse_adopted;
use crate::agent::{Agent, Begun};
use crate::store::SavedVm;
use crate::vm::Operation;
use crate::whole::whole;

impl Agent {
    /// Sets the link of a NIC of a running VM, and records it.
    pub(crate) async fn set_link(
        self: &Arc<Self>,
        name: &VmName,
        request: SetNicLink,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let begun = agent.begin(&name, &Operation::Plug)?;
            let changed = agent.change_link(&begun, request).await;
            agent.end_plug(&begun).await;
            changed?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Sets the link in QEMU, then in the record. If the record cannot be saved, both stay as they
    /// were.
    async fn change_link(&self, begun: &Begun, request: SetNicLink) -> Result<(), ApiError> {
        let (index, link) = (usize::from(request.nic), request.link);
        let (Some(vm), mut spec) = (&begun.vm, (*begun.spec).clone()) else {
            let message = format!("VM \"{}\" has no process", begun.spec.name);
            return Err(ApiError::new(ErrorCode::WrongState, message, "start it first"));
        };
        let nics = spec.nics.len();
        let Some(nic) = spec.nics.get_mut(index) else {
            let message = format!("VM \"{}\" has no NIC {index}: it has {nics}", begun.spec.name);
            return Err(ApiError::new(ErrorCode::NotFound, message, "NICs are counted from 0"));
        };
        refuse_adopted(&begun.spec)?;
        let before = std::mem::replace(&mut nic.link, link);
        vm.set_link(index, link).await?;
        let saved = match self.read_record(&vm.name) {
            Ok(Some(record)) => self.save_record(&SavedVm { spec: spec.clone(), ..record }),
            Ok(None) => Err(self.no_vm(&vm.name)),
            Err(error) => Err(error),
        };
        if let Err(error) = saved {
            if let Err(error) = vm.set_link(index, before).await {
                tracing::error!(vm = vm.name.as_str(), %error, "cannot restore the link of a NIC");
            }
            return Err(error);
        }
        let spec = Arc::new(spec);
        vm.set_spec(spec.clone());
        self.set_spec(&vm.name, spec);
        tracing::info!(vm = vm.name.as_str(), nic = index, %link, "link of a NIC set");
        Ok(())
    }
}
