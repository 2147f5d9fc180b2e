//! The orders of the guards of own VMs, carried out: a VM ends when its term is lost.

use futures::future::join_all;
use godwit_api::HaStanding;
use godwit_ha::Order;
use godwit_qemu::{Uuid, VmName};

use crate::agent::Agent;
use crate::ha::own::OwnGuard;
use crate::ha::{HaGuard, Protected};

impl Agent {
    /// Carries out the orders of the guards of own VMs.
    pub(super) async fn look_at_own(&self) {
        let all = self.own.all();
        let mut looks = Vec::with_capacity(all.len());
        for own in &all {
            looks.push(self.look_at_own_guard(own));
        }
        join_all(looks).await;
    }

    pub(super) async fn look_at_own_guard(&self, own: &OwnGuard) {
        let guard = &own.guard;
        let (order, processes) = tokio::task::block_in_place(|| self.list_own(own));
        if order != Order::Run {
            end_own(guard, &processes).await;
            tokio::task::block_in_place(|| {
                if order == Order::Stop && self.own_processes(own).is_empty() {
                    guard.vms_ended();
                }
            });
        }
        tokio::task::block_in_place(|| guard.save_lease());
    }

    /// Lists the QEMU of a VM for its guard; returns it with the guard's order. Blocks.
    pub(super) fn list_own(&self, own: &OwnGuard) -> (Order, Vec<Protected>) {
        let _listing = own.listing.lock();
        let contained = own.guard.begin_list();
        let processes = self.own_processes(own);
        (own.guard.order(contained, processes.clone()), processes)
    }

    /// Returns the QEMU of a VM that agents restart, if it has one here. A VM whose record cannot
    /// be read counts. Blocks.
    fn own_processes(&self, own: &OwnGuard) -> Vec<Protected> {
        let known = {
            let table = self.table();
            let slot = table.values().find(|slot| slot.spec.uuid == own.vm);
            slot.map(|slot| {
                let process = slot.vm.as_ref().map(|vm| (vm.process.pid, vm.process.start_time));
                let name = slot.spec.protect_by_agents.then(|| slot.spec.name.clone());
                name.map(|name| (name, process))
            })
        };
        let is_in_table = known.is_some();
        let found = match known {
            Some(found) => found,
            None => own.name().filter(|name| self.may_be_own(name, own.vm)).map(|it| (it, None)),
        };
        let is_alive = |&(pid, start_time): &(i32, u64)| godwit_qemu::is_alive(pid, start_time);
        let Some((name, process)) = found else {
            if is_in_table {
                return Vec::new();
            }
            // Nothing is left of a VM whose start has failed, but its QEMU may not have ended.
            let mut left = own.guard.processes();
            left.retain(|one| is_alive(&(one.pid, one.start_time)));
            return left;
        };
        let files = self.places.vm(&name);
        // A search among all processes takes long. Before the term is over, it must be made.
        let is_lost = own.guard.state().standing == HaStanding::Stopping;
        let found = process.filter(is_alive).or_else(|| match is_lost {
            true => files.living_process(),
            false => files.read_pid().filter(is_alive),
        });
        let protected = |(pid, start_time)| Protected { vm: name.to_string(), pid, start_time };
        found.map(protected).into_iter().collect()
    }

    /// Whether a VM that is not in the table may be this one.
    fn may_be_own(&self, name: &VmName, vm: Uuid) -> bool {
        match self.store.read(name) {
            Ok(record) => record.is_some_and(|it| it.spec.uuid == vm && it.spec.protect_by_agents),
            Err(_) => true,
        }
    }
}

/// Ends the QEMU of a VM whose term is lost.
async fn end_own(guard: &HaGuard, processes: &[Protected]) {
    for one in processes.iter().filter(|one| guard.note_ended(one.pid, one.start_time)) {
        let (vm, pid) = (&one.vm, one.pid);
        let say = guard.should_say(pid, one.start_time);
        if say {
            tracing::error!(vm, pid, "ending a VM: this host does not hold its term");
        }
        if let Err(error) = godwit_qemu::end_process(pid, one.start_time).await {
            if say {
                tracing::error!(vm, pid, %error, "cannot end a VM; retrying");
            }
            let hangs = error.kind() == std::io::ErrorKind::TimedOut;
            guard.try_again(pid, one.start_time, hangs);
        }
    }
}
