//! One task a process: notices when the vCPUs stop or go on by themselves, and when QEMU ends.

use std::sync::Arc;

use godwit_qemu::Exit;
use tokio::sync::broadcast::error::RecvError;

use crate::agent::Agent;
use crate::references::References;
use crate::store::{Desired, Role};
use crate::vm::{Condition, Vm};

impl Agent {
    /// Watches a VM's process until it ends.
    pub(super) fn watch(self: &Arc<Self>, vm: &Arc<Vm>) {
        let (agent, vm) = (self.clone(), vm.clone());
        let mut events = vm.process.qmp.events();
        tokio::spawn(async move {
            let mut guest_shut_down = false;
            let mut listening = true;
            let exit = loop {
                tokio::select! {
                    exit = vm.process.exited() => break exit,
                    event = events.recv(), if listening => match event {
                        Ok(event) => match event.name.as_str() {
                            "SHUTDOWN" => guest_shut_down = event.data["guest"] == true,
                            "STOP" | "RESUME" => agent.vcpus_changed(&vm, event.name == "RESUME"),
                            _ => {}
                        },
                        Err(RecvError::Lagged(_)) => {
                            if let Some(running) = vm.is_running().await {
                                agent.vcpus_changed(&vm, running);
                            }
                        }
                        Err(RecvError::Closed) => listening = false,
                    },
                }
            };
            // What was said before the end may still wait to be read.
            while let Ok(event) = events.try_recv() {
                guest_shut_down |= event.name == "SHUTDOWN" && event.data["guest"] == true;
            }
            agent.process_ended(&vm, exit, guest_shut_down).await;
        });
    }

    /// Shows a VM as paused or running where its vCPUs stopped or went on by themselves.
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
            // Under way, or held: whoever does that knows.
            _ => {}
        }
    }

    /// A process ended. Where no operation has ended it, this is what happened to the VM.
    pub(super) async fn process_ended(&self, vm: &Arc<Vm>, exit: Exit, guest_shut_down: bool) {
        let (condition, desired) = if guest_shut_down {
            (Condition::Stopped, Desired::Stopped)
        } else {
            (Condition::Failed, Desired::Running)
        };
        let reason = if guest_shut_down {
            "the guest shut itself down".to_owned()
        } else {
            let words = vm.files.last_words().unwrap_or_else(|| "it left no word in its log".to_owned());
            format!("QEMU (process {}) ended by itself with {exit}: {words}", vm.process.pid)
        };
        {
            let mut table = self.table();
            let Some(slot) = table.get_mut(&vm.name) else {
                return;
            };
            let ours = slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm));
            if !ours || slot.condition.expects_exit() {
                return;
            }
            if let Condition::MigratingIn { .. } = slot.condition {
                // The migration learns of it from QMP and discards the shadow.
                tracing::warn!(vm = vm.name.as_str(), reason, "a shadow's QEMU ended");
                return;
            }
            if let Condition::MigratingOut { .. } = slot.condition {
                // The destination may own the guest already: only the migration knows, and settles it at its end.
                tracing::error!(vm = vm.name.as_str(), reason, "QEMU ended during a migration");
                return;
            }
            tracing::error!(vm = vm.name.as_str(), reason, "QEMU ended");
            slot.vm = None;
            if matches!(slot.condition, Condition::InDoubt { .. } | Condition::KeepsPages { .. }) {
                // Nothing is kept here any more.
                slot.condition = Condition::InDoubt { keeps_pages_for: None };
                // Its process is gone, the doubt is not: the record stays as it is.
                slot.reason = Some(format!("another host may run it; here {reason}"));
                return;
            }
            slot.condition = condition;
            slot.reason = Some(reason);
        }
        vm.files.remove_runtime();
        References::withdraw(vm);
        if let Err(error) = self.save(&vm.spec, Role::Owner, desired, vm.ownership()).await {
            tracing::error!(vm = vm.name.as_str(), %error, "its end could not be saved");
        }
    }
}
