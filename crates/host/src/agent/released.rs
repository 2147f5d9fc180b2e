//! Devices that a guest releases late, after the command that detached them has given up: the VM's
//! definition follows.

use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_api::ApiError;
use godwit_qemu::ResolvedSpec;

use crate::agent::Agent;
use crate::vm::{Operation, Vm};

/// Interval between two attempts to forget what was released during another operation.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

impl Agent {
    /// Forgets what the guest of a running VM has released. If another operation has the VM, this
    /// happens after it.
    pub(super) async fn forget_released(self: &Arc<Self>, vm: &Arc<Vm>) {
        if !self.try_forget(vm).await {
            tokio::spawn(Agent::forget_later(Arc::downgrade(self), Arc::downgrade(vm)));
        }
    }

    async fn forget_later(agent: Weak<Agent>, vm: Weak<Vm>) {
        loop {
            tokio::time::sleep(RETRY_INTERVAL).await;
            let (Some(agent), Some(vm)) = (agent.upgrade(), vm.upgrade()) else { return };
            if agent.try_forget(&vm).await {
                return;
            }
        }
    }

    /// Returns false if another operation has the VM.
    async fn try_forget(self: &Arc<Self>, vm: &Arc<Vm>) -> bool {
        let Ok(begun) = self.begin(&vm.name, &Operation::Plug) else { return false };
        let is_its = begun.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm));
        if is_its && let Err(error) = self.forget_now(vm, &begun.spec).await {
            tracing::error!(vm = vm.name.as_str(), %error, "released devices remain defined");
        }
        self.end_plug(&begun).await;
        true
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
