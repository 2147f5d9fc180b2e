//! VMs that a request names and no report contains. A VM that was created at an agent directly is
//! reported milliseconds later: before the manager says that no host has it, it asks the agents
//! once.

use std::time::Duration;

use futures::{StreamExt, stream};
use godwit_qemu::VmName;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::vms::Vms;

/// Requests whose VM is asked for at once. Others are answered from the list.
static ASKING: Semaphore = Semaphore::const_new(4);
/// Most agents that are asked at once.
const MOST_ASKED: usize = 32;
/// Longest time for all of them.
const ASK_LIMIT: Duration = Duration::from_secs(1);

impl Vms {
    /// Waits until the list shows a VM that an agent has and that no report contains yet.
    pub(crate) async fn meet(&self, vm: &VmName) {
        let hosts: Vec<String> = {
            let inventory = self.state.inventory();
            if inventory.seen_vm(vm).is_some() || inventory.holder(vm).is_some() {
                return;
            }
            let up = inventory.plans().filter(|(host, _)| inventory.is_up(host));
            up.map(|(host, _)| host.to_owned()).collect()
        };
        let Ok(_turn) = ASKING.try_acquire() else { return };
        let asked = hosts.into_iter().map(|host| async move {
            let client = self.agents.client_of(&host).ok()?;
            client.vm(vm).await.ok().map(|_| host)
        });
        let mut answers = std::pin::pin!(
            stream::iter(asked).buffer_unordered(MOST_ASKED).filter_map(std::future::ready)
        );
        if let Ok(Some(host)) = timeout(ASK_LIMIT, answers.next()).await {
            self.until_seen(vm, &host, |seen| seen.is_some()).await;
        }
    }
}
