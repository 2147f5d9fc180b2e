//! One task for each process: notices when the vCPUs stop or resume on their own, and when QEMU
//! ends. [`super::ended`] decides what that end means for the VM.

use std::sync::Arc;

use godwit_qemu::{WATCHDOG, is_detachable_device};
use tokio::sync::broadcast::error::RecvError;

use crate::agent::Agent;
use crate::vm::{Condition, Vm};

impl Agent {
    /// Watches a VM's process until it ends.
    pub(super) fn watch(self: &Arc<Self>, vm: &Arc<Vm>) {
        let (agent, vm) = (self.clone(), vm.clone());
        let mut events = vm.process.qmp.events();
        Agent::watch_tpm(&vm);
        if vm.guest.frozen_until_ms().is_some() {
            // An earlier agent froze it.
            agent.thaw_in_time(&vm);
        }
        tokio::spawn(async move {
            let mut listening = true;
            let mut end = std::pin::pin!(vm.process.ended());
            let ended = loop {
                tokio::select! {
                    ended = &mut end => break ended,
                    event = events.recv(), if listening => match event {
                        Ok(event) if matches!(event.name.as_str(), "STOP" | "RESUME") => {
                            agent.vcpus_changed(&vm, event.name == "RESUME");
                        }
                        Ok(event)
                            if event.name == "DEVICE_DELETED"
                                && event.data["device"].as_str().is_some_and(|device| {
                                    is_detachable_device(&vm.spec(), device)
                                }) =>
                        {
                            let (agent, vm) = (agent.clone(), vm.clone());
                            tokio::spawn(async move { agent.forget_released(&vm).await });
                        }
                        // The end that an action may be is noted when it has come.
                        Ok(event)
                            if event.name == WATCHDOG && event.data["action"] != "poweroff" =>
                        {
                            agent.watchdog_ran_out(&vm);
                        }
                        Ok(_) => {}
                        Err(RecvError::Lagged(_)) => {
                            if let Some(running) = vm.is_running().await {
                                agent.vcpus_changed(&vm, running);
                            }
                        }
                        Err(RecvError::Closed) => listening = false,
                    },
                }
            };
            agent.process_ended(&vm, ended).await;
            if agent.filters.may_exist() {
                agent.filters.sweep().await;
            }
        });
    }

    /// Notices what a VM's process did while an operation had the VM.
    pub(super) async fn notice_process(self: &Arc<Self>, vm: &Arc<Vm>) {
        if vm.process.exit().is_some() {
            self.process_ended(vm, vm.process.ended().await).await;
        } else if let Some(running) = vm.is_running().await {
            self.vcpus_changed(vm, running);
        }
    }

    /// Shows a VM as paused or running after its vCPUs stopped or resumed on their own.
    pub(super) fn vcpus_changed(&self, vm: &Arc<Vm>, running: bool) {
        let mut table = self.table();
        let Some(slot) = table.get_mut(&vm.name) else {
            return;
        };
        let ours = slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm));
        match (&slot.condition, running) {
            (Condition::Running, false) if ours => {
                slot.condition = Condition::Paused;
                slot.reason = Some("its vCPUs were stopped (see `godwit vm logs --qemu`)".into());
            }
            (Condition::Paused, true) if ours => {
                slot.condition = Condition::Running;
                slot.reason = None;
            }
            // Another operation has the VM, and sets its condition.
            _ => {}
        }
    }
}
