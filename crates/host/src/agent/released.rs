//! Devices that a guest releases late, after the command that detached them has given up: the VM's
//! definition follows.

use std::sync::Arc;

use godwit_api::ApiError;
use godwit_qemu::ResolvedSpec;

use crate::agent::Agent;
use crate::vm::{Operation, Vm};

impl Agent {
    /// Forgets what the guest of a running VM has released. If another operation has the VM, that
    /// one forgets it, or the next agent.
    pub(super) async fn forget_released(self: &Arc<Self>, vm: &Arc<Vm>) {
        let Ok(begun) = self.begin(&vm.name, &Operation::Plug) else { return };
        let is_its = begun.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm));
        if is_its && let Err(error) = self.forget_now(vm, &begun.spec).await {
            tracing::error!(vm = vm.name.as_str(), %error, "the definition names too much");
        }
        self.end_plug(&begun).await;
    }

    async fn forget_now(&self, vm: &Vm, old: &ResolvedSpec) -> Result<(), ApiError> {
        let real = vm.process.qmp.without_released(old).await;
        let real = real.map_err(|why| vm.hypervisor_failed("list its devices", &why))?;
        let Some(real) = real else { return Ok(()) };
        vm.process.qmp.remove_released(old, &real).await;
        self.save_plugged(vm, real)?;
        tracing::info!(vm = vm.name.as_str(), "the guest has released a device");
        Ok(())
    }
}
