//! The stage without a manager: the agents of the hosts that share the datastore protect the VM by
//! themselves, and are asked for everything.

use std::fs;

use anyhow::{Context, Result, ensure};
use godwit_api::{HaHost, OwnStanding, OwnVm};
use godwit_qemu::VmSpec;

use super::{HOSTS, READY_LIMIT, Stage, VM};
use crate::image::GuestImage;
use crate::trial::{GuestPlan, LIMIT, until};

impl Stage {
    /// Waits until the hosts that run the VM have the datastores, and a watchdog.
    pub(super) fn until_agents_share(&self) -> Result<()> {
        until("the hosts share the datastores", LIMIT, || {
            let mut identities = Vec::new();
            for host in HOSTS {
                let guard = self.guard(host)?;
                ensure!(guard.watchdog_process && guard.watchdog, "host {host}: {guard:?}");
                let reported = self.trial.ask(self.trial.agent(host).host())?.datastores;
                for store in &self.stores {
                    let known = reported.get(&store.seen).and_then(|one| one.identity.clone());
                    identities.push(known.with_context(|| format!("host {host}: {reported:?}"))?);
                }
            }
            let number = self.stores.len();
            let is_shared = identities.iter().take(number).eq(identities.iter().skip(number));
            ensure!(is_shared, "{identities:?}");
            Ok(Some(()))
        })
    }

    /// Creates and starts the VM. Its kernel is on the datastore too: each host must be able to
    /// start it.
    pub(super) fn create_without_manager(&self, host: &str, plan: &GuestPlan) -> Result<()> {
        let store = self.stores.first().context("no datastore")?;
        let GuestImage { kernel, initrd } = self.trial.image();
        for (from, name) in [(kernel, "kernel"), (initrd, "initrd")] {
            fs::copy(from, store.files.join(name))
                .with_context(|| format!("cannot copy {}", from.display()))?;
        }
        let (kernel, initrd) = (store.seen.join("kernel"), store.seen.join("initrd"));
        let image = GuestImage { kernel, initrd };
        let spec = VmSpec { protect_by_agents: true, ..plan.spec(&image) };
        self.trial.create(host, spec)?;
        Ok(())
    }

    /// Waits until one host holds the VM's term, and the others would restart it.
    pub(super) fn until_agents_are_ready(&self, holder: &str) -> Result<()> {
        until("the agents would restart the VM", READY_LIMIT, || {
            let mut terms = Vec::new();
            for host in HOSTS {
                let guard = self.guard(host)?;
                let own = own(&guard).with_context(|| format!("host {host}: {guard:?}"))?;
                let is_holder = host == holder;
                let wanted = if is_holder { OwnStanding::Held } else { OwnStanding::Watched };
                let is_ready = own.standing == wanted && own.problem.is_none() && guard.watchdog;
                ensure!(is_ready, "host {host}: {guard:?}");
                terms.push(own.term);
            }
            terms.dedup();
            ensure!(terms.len() == 1, "the hosts see the terms {terms:?}");
            Ok(Some(()))
        })
    }

    /// Says what the agents show.
    pub(super) fn agents_explain(&self) -> String {
        let shown = HOSTS.map(|host| match self.guard(host) {
            Ok(guard) => format!("host {host} shows {:?} {:?}", guard.own, guard.own_problems),
            Err(error) => format!("host {host} shows nothing: {error:#}"),
        });
        shown.join("; ")
    }

    fn guard(&self, host: &str) -> Result<HaHost> {
        Ok(self.trial.ask(self.trial.agent(host).ha())?)
    }
}

/// Returns what a host shows of the VM.
fn own(guard: &HaHost) -> Option<&OwnVm> {
    guard.own.iter().find(|own| own.vm == VM)
}
