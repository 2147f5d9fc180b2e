//! Start of VMs with their host, once for each boot: by order, with a delay after each. A restart
//! of the agent starts nothing.
//!
//! `STATE_DIR/autostart.json` has the boot of the last agent and the VMs that it had still to
//! start, so that an agent that was ended in between continues.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use godwit_qemu::{Autostart, VmName};
use serde::{Deserialize, Serialize};

use crate::agent::Agent;
use crate::vm::Condition;
use crate::whole::whole;

/// Identity of the host's boot (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Time for other hosts to tell whether they run a VM. A host that is away does not delay a start.
const PEERS_LIMIT: Duration = Duration::from_secs(5);
/// Hosts asked at once.
const PEERS_AT_ONCE: usize = 32;

/// Saved progress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Progress {
    boot_id: String,
    /// VMs to start, in order.
    waiting: Vec<VmName>,
}

impl Agent {
    /// Starts the VMs that start with the host, if this is the first agent since its boot, in the
    /// background. All VMs are in the table.
    pub(super) fn start_with_host(self: &Arc<Self>) {
        let boot_id = match std::fs::read_to_string(BOOT_ID) {
            Ok(text) => text.trim().to_owned(),
            Err(error) => {
                return tracing::error!(%error, "boot of the host unknown: no VM starts with it");
            }
        };
        let known = self.read_progress().filter(|known| known.boot_id == boot_id);
        let progress = match known {
            Some(known) => known,
            None => {
                let waiting = in_order(self.starting_with_host());
                let new = Progress { boot_id, waiting };
                // Saved first: an agent that fails on one of these VMs does not start all of them
                // again.
                if let Err(error) = self.save_progress(&new) {
                    return tracing::error!(%error, "not saved: no VM starts with the host");
                }
                new
            }
        };
        if !progress.waiting.is_empty() {
            tokio::spawn(self.clone().start_waiting(progress));
        }
    }

    async fn start_waiting(self: Arc<Self>, mut progress: Progress) {
        while !progress.waiting.is_empty() {
            let name = progress.waiting.remove(0);
            let started = self.start_one_with_host(&name).await;
            if let Err(error) = self.save_progress(&progress) {
                tracing::error!(%error, "cannot save which VMs have started with the host");
            }
            if let Some(autostart) = started.filter(|_| !progress.waiting.is_empty()) {
                tokio::time::sleep(autostart.delay()).await;
            }
        }
        tracing::info!("all VMs that start with the host have been started");
    }

    /// Starts a VM with the host. Returns its setting if it was started.
    async fn start_one_with_host(self: &Arc<Self>, name: &VmName) -> Option<Autostart> {
        let autostart = self.may_start_with_host(name)?;
        if let Some(host) = self.host_that_runs(name).await {
            self.note_not_started(name, &format!("host {host} runs a VM of that name"));
            return None;
        }
        let (agent, vm) = (self.clone(), name.clone());
        match whole(async move { agent.start_now(&vm).await }).await {
            Ok(()) => {
                tracing::info!(vm = name.as_str(), "started with the host");
                Some(autostart)
            }
            Err(error) => {
                self.note_not_started(name, &error.to_string());
                None
            }
        }
    }

    /// Shows why a VM was not started.
    fn note_not_started(&self, name: &VmName, why: &str) {
        tracing::error!(vm = name.as_str(), why, "cannot start a VM with the host");
        if let Some(slot) = self.table().get_mut(name)
            && is_off(&slot.condition)
        {
            slot.reason = Some(format!("it did not start with the host: {why}"));
        }
    }

    /// Returns another host that has a VM of that name with a process: the VM may have been created
    /// anew there while this host was away.
    async fn host_that_runs(&self, name: &VmName) -> Option<String> {
        let ask = async |host: String| {
            let vm = self.peer(&host).ok()?.vm(name).await.ok()?;
            (vm.in_doubt || !vm.state.is_off()).then_some(host)
        };
        let asked = futures::stream::iter(self.peer_names()).map(ask);
        let mut answers = std::pin::pin!(
            asked.buffer_unordered(PEERS_AT_ONCE).filter_map(|running| async move { running })
        );
        tokio::time::timeout(PEERS_LIMIT, answers.next()).await.ok().flatten()
    }

    /// Returns the setting of a VM that starts with the host and may: it is this host's and does
    /// not run.
    fn may_start_with_host(&self, name: &VmName) -> Option<Autostart> {
        let table = self.table();
        let slot = table.get(name)?;
        let autostart = slot.spec.autostart?;
        if is_off(&slot.condition) {
            return Some(autostart);
        }
        let state = slot.condition.state();
        let in_doubt = slot.condition.is_in_doubt();
        tracing::info!(vm = name.as_str(), %state, in_doubt, "not started with the host");
        None
    }

    fn starting_with_host(&self) -> Vec<(VmName, Autostart)> {
        let table = self.table();
        let all = table.iter();
        all.filter_map(|(name, slot)| Some((name.clone(), slot.spec.autostart?))).collect()
    }

    fn progress_path(&self) -> PathBuf {
        self.config.state_dir.join("autostart.json")
    }

    fn read_progress(&self) -> Option<Progress> {
        let text = std::fs::read_to_string(self.progress_path()).ok()?;
        let read = serde_json::from_str(&text);
        read.inspect_err(|error| tracing::warn!(%error, "unreadable autostart.json")).ok()
    }

    fn save_progress(&self, progress: &Progress) -> std::io::Result<()> {
        let content = serde_json::to_vec(progress)?;
        tokio::task::block_in_place(|| self.store.disk.replace(&self.progress_path(), &content))
    }
}

/// Whether a VM of this host has no process and no operation in progress. One in doubt, or one that
/// arrives or leaves, is in another condition.
fn is_off(condition: &Condition) -> bool {
    matches!(condition, Condition::Stopped | Condition::Failed | Condition::Suspended)
}

fn in_order(mut vms: Vec<(VmName, Autostart)>) -> Vec<VmName> {
    vms.sort_by(|(a, one), (b, other)| (one.place(), a).cmp(&(other.place(), b)));
    vms.into_iter().map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_start_by_order_then_by_name() {
        let vm = |name: &str, order| {
            (VmName::new(name).unwrap(), Autostart { order, ..Autostart::default() })
        };
        let vms = vec![vm("zoo", None), vm("app", Some(2)), vm("api", Some(2)), vm("db", Some(1))];
        let order: Vec<String> = in_order(vms).iter().map(ToString::to_string).collect();
        assert_eq!(order, ["db", "api", "app", "zoo"]);
    }

    #[test]
    fn only_a_vm_that_is_certainly_this_hosts_starts() {
        for condition in [Condition::Stopped, Condition::Failed, Condition::Suspended] {
            assert!(is_off(&condition));
        }
        for condition in [
            Condition::InDoubt { keeps_pages_for: None },
            Condition::KeepsPages { to: "b".into() },
            Condition::LacksPages { from: "b".into() },
            Condition::MigratingIn { from: "b".into() },
            Condition::MigratingOut { migration: "m1".into() },
            Condition::Adopting,
            Condition::Paused,
            Condition::Running,
            Condition::Starting,
        ] {
            assert!(!is_off(&condition), "{condition:?}");
        }
    }
}
