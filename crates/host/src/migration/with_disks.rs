//! A migration whose disks travel with the VM: first the disks, then the memory, and both together
//! at the hand-over. The disks are in [`super::disks`], the memory in [`super::outgoing`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::ClientError;
use godwit_qemu::{Cdrom, DiskBus, ResolvedSpec, is_rbd};
use godwit_types::{Fault, Report};

use super::disks::departure::Departure;
use super::disks::making::{Making, refused_disks};
use super::disks::patience::{self, NoAnswer, over, shows};
use super::disks::plan::plan;
use super::disks::source::{DiskTravel, cancelled};
use super::outgoing::{Outgoing, report_of_client};
use crate::block_devices::names_of;
use crate::migrations::MigrationControl;

impl Outgoing {
    /// Migrates the VM with the disks that it writes.
    pub(super) async fn run_with_disks(&self, control: &MigrationControl) -> Report {
        let travel = match self.begin_disks(control).await {
            Ok(Some(travel)) => travel,
            Ok(None) => return self.run_memory(control).await,
            Err(fault) => return self.failed(fault),
        };
        let with_disks = self.with_disks(&travel);
        let report = match travel.until_ready(control).await {
            Ok(()) => with_disks.run_memory(control).await,
            Err(fault) => self.failed(fault),
        };
        travel.end(report).await
    }

    /// Returns the destination's answer to a request that can be repeated. Once disks travel, a cut
    /// of the link is waited for. `control`: of a migration that has begun.
    ///
    /// # Errors
    /// The destination refuses the request, or does not answer in time; the migration has ended.
    pub(super) async fn answer<T, A>(
        &self,
        control: Option<&MigrationControl>,
        mut ask: impl FnMut() -> A,
    ) -> Result<T, Fault>
    where
        A: Future<Output = Result<T, ClientError>>,
    {
        let refused = |error| report_of_client(&self.request.to, error);
        let Some(control) = control.filter(|_| self.disks.is_some()) else {
            return ask().await.map_err(refused);
        };
        let ended = async {
            tokio::select! {
                failure = self.disks_failed() => failure,
                failure = over(&self.vm, control) => failure,
            }
        };
        let limit = Duration::from_millis(self.request.cut_limit_ms);
        let waits = |error: &ClientError| shows(&self.vm, control, self.begun, error);
        patience::answer(limit, ask, ended, waits).await.map_err(|why| match why {
            NoAnswer::Error(error) => refused(error),
            NoAnswer::Ended(failure) => failure.to_fault(),
        })
    }

    fn with_disks(&self, travel: &Arc<DiskTravel>) -> Outgoing {
        Outgoing { disks: Some(Arc::clone(travel)), ..self.clone() }
    }

    fn departure(&self) -> Departure {
        Departure {
            agent: Arc::clone(&self.agent),
            vm: Arc::clone(&self.vm),
            request: self.request.clone(),
            peer: self.peer.clone(),
            begun: self.begun,
        }
    }

    /// Begins to move the disks that the VM writes. `None`: there are none.
    ///
    /// # Errors
    /// They cannot travel. Nothing remains, except what an earlier attempt has left and a later one
    /// can use.
    async fn begin_disks(
        &self,
        control: &MigrationControl,
    ) -> Result<Option<Arc<DiskTravel>>, Fault> {
        let Some(how) = &self.request.disks else { return Ok(None) };
        let qemu = self.agent.qemu(self.vm.spec().qemu.as_deref()).await.map_err(Fault::from)?;
        self.check(&qemu)?;
        let departure = self.departure();
        let plan = tokio::select! {
            plan = plan(&departure, how) => plan?,
            () = control.cancelled() => return Err(cancelled().to_fault()),
        };
        let Some(plan) = plan else { return Ok(None) };
        let mut making = Making::new(&departure, plan);
        let made = tokio::select! {
            made = making.make(control) => made,
            () = control.cancelled() => Err(cancelled().to_fault()),
        };
        let travel = match made {
            Ok(travel) => travel,
            Err(fault) => {
                making.undo().await;
                return Err(fault);
            }
        };
        // A refusal of the VM must not come after hours.
        match self.with_disks(&travel).check_at_destination(&qemu, Some(control)).await {
            Ok(_) => Ok(Some(travel)),
            Err(fault) => {
                travel.give_up(making.continues()).await;
                Err(fault)
            }
        }
    }

    /// Returns the bytes of the disks that would travel, after the destination has checked whether
    /// they could; `None`: none would. Makes nothing.
    pub(super) async fn foresee_disks(&self) -> Result<Option<u64>, Fault> {
        let Some(how) = &self.request.disks else { return Ok(None) };
        let Some(plan) = plan(&self.departure(), how).await? else { return Ok(None) };
        let checked = self.peer.could_receive_disks(&plan.request).await;
        checked.map_err(|error| refused_disks(&self.request.to, error))?;
        Ok(Some(plan.used_bytes()))
    }

    /// Returns the VM for the destination.
    pub(super) fn spec_there(&self) -> ResolvedSpec {
        match (&self.disks, &self.request.disks) {
            (Some(travel), _) => travel.spec_there().clone(),
            (None, Some(_)) => without_travelling(&self.vm.spec()),
            (None, None) => self.vm.spec().with_fresh_node_names(),
        }
    }

    /// Returns the names of the block devices that the destination needs under the same paths.
    pub(super) fn devices_that_stay(&self) -> BTreeMap<PathBuf, String> {
        let spec = self.vm.spec();
        match self.request.disks {
            Some(_) => names_of(without_travelling(&spec).images()),
            None => names_of(spec.images()),
        }
    }
}

/// Returns a VM without the disks that travel, whose images do not exist yet: for checks of all
/// else.
fn without_travelling(spec: &ResolvedSpec) -> ResolvedSpec {
    let mut spec = spec.with_fresh_node_names();
    let all = spec.disks.len();
    spec.disks.retain(|disk| disk.readonly || is_rbd(&disk.path));
    if spec.disks.len() < all && spec.disks.is_empty() && spec.cdroms.is_empty() {
        // A VM must have something to boot from. An empty drive needs nothing of a host.
        spec.cdroms.push(Cdrom { bus: DiskBus::Scsi, unit: Some(0), ..Cdrom::default() });
    }
    spec
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_vm_without_its_disks_is_valid() {
        let spec = |readonly: bool| -> ResolvedSpec {
            serde_json::from_value(json!({
                "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1,
                "cpu_model": "Westmere-v1", "machine": "pc-q35-7.2", "accel": "tcg",
                "disks": [
                    {"path": "/srv/a.raw", "format": "raw"},
                    {"path": "/srv/b.raw", "format": "raw", "readonly": readonly},
                ],
            }))
            .unwrap()
        };
        let stays = without_travelling(&spec(true));
        assert_eq!((stays.disks.len(), stays.cdroms.len()), (1, 0));
        stays.validate().unwrap();
        let bare = without_travelling(&spec(false));
        assert_eq!((bare.disks.len(), bare.cdroms.len()), (0, 1));
        bare.validate().unwrap();
    }
}
