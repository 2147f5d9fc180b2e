//! Adoption of VMs that lack pages: page-in is resumed before their QEMU is asked anything, and
//! goes on in the background.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::ApiError;
use godwit_migration::Failure;

use super::{ASK_AGAIN, Adoption, Found};
use crate::agent::{Agent, Slot};
use crate::store::{Role, SavedVm};
use crate::vm::{Condition, UnaskedVm, Vm};

/// Time for a shadow's QEMU to report whether its guest has run, before pages are fetched for it. A
/// guest that has not run belongs to the source, which learns this from the shadow's end.
const SHADOW_LIMIT: Duration = Duration::from_secs(5);
impl Agent {
    /// Returns the process of a VM that lacks pages; `None` if its memory is complete or cannot be
    /// opened.
    pub(super) fn lacking(&self, record: &SavedVm) -> Option<UnaskedVm> {
        let files = self.places.vm(&record.spec.name);
        if !files.missing().exists() {
            return None;
        }
        let name = &record.spec.name;
        let process = UnaskedVm::find(files, &record.spec);
        process
            .inspect_err(
                |error| tracing::error!(vm = name.as_str(), %error, "cannot open the VM's memory"),
            )
            .ok()?
    }

    /// Resumes page-in before the first query to QEMU. QEMU's main loop may itself wait for a
    /// missing page and respond only after that page arrives. A separate task contacts QEMU
    /// meanwhile.
    pub(super) async fn resume_lacking(
        self: &Arc<Self>,
        record: SavedVm,
        process: UnaskedVm,
    ) -> Result<(), ApiError> {
        let is_shadow = matches!(record.role, Role::Shadow | Role::TakingOver);
        let condition = match is_shadow {
            true => {
                Condition::MigratingIn { from: process.files.host_of_missing().unwrap_or_default() }
            }
            false => Condition::Adopting,
        };
        let mut slot = Slot::new(record.spec.clone(), record.ownership(), condition);
        slot.reason = Some(format!(
            "its QEMU (process {}) has not responded to this agent yet; pages of it are missing",
            process.pid
        ));
        let place = Some(Arc::clone(&slot.identity));
        self.insert(slot)?;
        let taken_up =
            if is_shadow { None } else { Some(self.page_ins.take_up(&process, true).await) };
        if let Some(Err(failure)) = &taken_up {
            // Set at once: QEMU may never respond while nothing fetches the pages that it waits
            // for.
            let from = process.files.host_of_missing().unwrap_or_default();
            tracing::error!(vm = process.name.as_str(), %failure, "cannot resume page-in");
            self.settle(
                &process.name,
                Condition::LacksPages { from },
                None,
                Some(cannot_fetch(failure)),
            );
        }
        tokio::spawn(self.clone().adopt_lacking(Adoption { record, taken_up, place }, process));
        Ok(())
    }

    async fn adopt_lacking(self: Arc<Self>, mut adoption: Adoption, process: UnaskedVm) {
        let name = adoption.record.spec.name.clone();
        let asked_of = adoption.clone();
        let mut finding = std::pin::pin!(self.find_patiently(&asked_of, &process));
        let soon = match adoption.taken_up {
            Some(_) => None,
            None => tokio::time::timeout(SHADOW_LIMIT, &mut finding).await.ok(),
        };
        let found = match soon {
            Some(found) => found,
            None => {
                if adoption.taken_up.is_none() {
                    // The source keeps its copy until it is known that the guest runs here.
                    adoption.taken_up = Some(self.page_ins.take_up(&process, false).await);
                }
                finding.await
            }
        };
        self.adopt_with_retries(&name, adoption, found).await;
    }

    /// Retries [`Agent::find`] while pages arrive that QEMU may be waiting for.
    async fn find_patiently(&self, adoption: &Adoption, process: &UnaskedVm) -> Found {
        let name = &process.name;
        let mut every = tokio::time::interval(ASK_AGAIN);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let lacked = self.page_ins.state(name).is_some();
            match self.find(&adoption.record, Some((process.pid, process.start_time))).await {
                // Also if pages began to arrive during the query, as for a shadow.
                Found::Silent(why)
                    if (lacked || self.page_ins.state(name).is_some())
                        && self.has_place(adoption) =>
                {
                    tracing::warn!(
                        vm = name.as_str(),
                        why,
                        "QEMU does not respond while pages are missing"
                    );
                }
                found => return found,
            }
        }
    }

    /// Resumes page-in for a guest that lacks pages. If that fails, pauses the guest, since nothing
    /// else keeps it from missing pages.
    pub(super) async fn page_in_further(
        self: &Arc<Self>,
        vm: &Arc<Vm>,
        taken_up: Option<Result<(), Failure>>,
    ) {
        let taken_up = match taken_up {
            Some(taken_up) => taken_up,
            None => self.page_ins.take_up(&vm.unasked(), true).await,
        };
        let Err(failure) = taken_up else { return };
        tracing::error!(
            vm = vm.name.as_str(),
            %failure,
            "cannot fetch missing pages: pausing the guest"
        );
        let reason = cannot_fetch(&failure);
        let from = vm.files.host_of_missing().unwrap_or_default();
        let lacks = |slot: &mut Slot| {
            let ours = slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm));
            let free = ours
                && matches!(
                    slot.condition,
                    Condition::Running | Condition::Paused | Condition::LacksPages { .. }
                );
            if free {
                (slot.condition, slot.reason) = (Condition::LacksPages { from }, Some(reason));
            }
            free
        };
        // An operation that has begun to end the VM meanwhile continues.
        if !self.table().get_mut(&vm.name).is_some_and(lacks) {
            return;
        }
        // A vCPU that waits for a page stops only once it has it; nothing else waits for that.
        if let Err(error) = vm.process.qmp.stop().await {
            tracing::error!(vm = vm.name.as_str(), %error, "cannot pause the guest");
        }
    }
}

/// Reason of a VM whose missing pages cannot be fetched.
pub(super) fn cannot_fetch(failure: &Failure) -> String {
    format!("pages of its memory are missing and cannot be fetched: {failure}")
}
