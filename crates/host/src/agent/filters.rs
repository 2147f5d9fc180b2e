//! Filters of the NICs of running VMs, which someone else may remove.

use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_qemu::nic_number;

use crate::agent::Agent;
use crate::network::tap_name;
use crate::vm::Vm;

/// Interval between two looks at the filters of running guests.
const FILTERS_INTERVAL: Duration = Duration::from_secs(10);

impl Agent {
    /// Sets the filters of a VM's taps again: someone may have flushed nftables' rules.
    pub(super) async fn renew_filters(&self, vm: &Vm) {
        let spec = vm.spec();
        for (index, nic) in spec.nics.iter().enumerate() {
            let tap = tap_name(&self.config.name, &vm.name, nic_number(&spec.nics, index));
            if let Err(error) = self.filters.renew(&tap, nic).await {
                tracing::error!(vm = vm.name.as_str(), %error, "a guest's filter may be missing");
            }
        }
    }

    /// Sets the filters of running guests again that someone has removed, for as long as the agent
    /// exists: a reload of nftables flushes all tables.
    pub(super) async fn keep_filters(agent: Weak<Agent>) {
        loop {
            tokio::time::sleep(FILTERS_INTERVAL).await;
            let Some(agent) = agent.upgrade() else { return };
            agent.restore_filters().await;
            // A tap of a process that ended with the last agent may outlive the first sweep.
            if agent.filters.may_exist() {
                agent.filters.sweep().await;
            }
        }
    }

    async fn restore_filters(&self) {
        let running: Vec<Arc<Vm>> =
            self.table().values().filter_map(|slot| slot.vm.clone()).collect();
        let mut wanted = Vec::new();
        for vm in &running {
            let (spec, host) = (vm.spec(), &self.config.name);
            for (index, nic) in spec.nics.iter().enumerate().filter(|(_, nic)| nic.filter.is_some())
            {
                let tap = tap_name(host, &vm.name, nic_number(&spec.nics, index));
                wanted.push((vm, (tap, nic.clone())));
            }
        }
        if wanted.is_empty() {
            return;
        }
        let taps: Vec<_> = wanted.iter().map(|(_, tap)| tap.clone()).collect();
        let missed = self.filters.restore(&taps).await;
        for vm in &running {
            let mut lost = None;
            for (tap, outcome) in &missed {
                if !wanted.iter().any(|(of, (name, _))| Arc::ptr_eq(of, vm) && name == tap) {
                    continue;
                }
                let name = vm.name.as_str();
                match outcome {
                    Ok(()) => {
                        tracing::error!(vm = name, tap, "a guest's filter was removed; set again");
                    }
                    Err(error) => {
                        tracing::error!(vm = name, tap, %error, "a guest has no filter");
                        lost = Some(format!("a filter of its NICs is missing: {error}"));
                    }
                }
            }
            vm.note_filter_lost(lost);
        }
    }
}
