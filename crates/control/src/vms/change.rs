//! Changes of a VM that exists: its specification and labels, a restart, a reset, a suspension.

use std::collections::BTreeMap;

use godwit_api::control::{
    ChangeManagedVm, ChangedVm, PlannedPower, Problem, ProblemCode, Role, StopManagedVm,
};
use godwit_api::{
    ChangeDrive, ChangeVm, ClientError, DriveChange, NicChange, RenameVm, StopVm, VmInfo, VmState,
};
use godwit_qemu::{ClaimedNic, MacAddress, Nic, SpecPatch, VmName, VmSpec};
use serde_json::json;

use crate::access::Caller;
use crate::cluster::inventory::VmPlan;
use crate::cluster::names::check_labels;
use crate::problems::no_vm;
use crate::storage::planning::whole;
use crate::vms::baseline::hold_to_baseline;
use crate::vms::place::{check_addresses, check_reach};
use crate::vms::{Located, Reservation, Room, Vms, check_grace, invalid_spec};

/// Most derived hardware addresses that are tried for a new NIC.
const MOST_DERIVED: usize = 100;

/// A change of a VM's specification that has been checked.
struct Change {
    /// The change, with the baseline as the model of a VM that gets the default one.
    patch: SpecPatch,
    /// The specification after it.
    spec: VmSpec,
    /// New addresses, until the VM has them.
    _nics: Option<Reservation>,
}

impl Vms {
    /// Changes the specification of a VM, and its labels. If the specification is refused, nothing
    /// changes.
    pub(crate) async fn change_vm(
        &self,
        vm: &str,
        request: ChangeManagedVm,
        caller: &Caller,
    ) -> Result<ChangedVm, Problem> {
        let (vms, vm, caller) = (self.clone(), vm.to_owned(), caller.clone());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let located = vms.locate(&vm)?;
            let plan = vms.plan_with_labels(&located.info, &request.labels)?;
            let warning = match request.replace || !request.spec.is_empty() {
                true => vms.change_spec(&located, &request, caller.role).await?,
                false => None,
            };
            if let Some(plan) = plan {
                vms.plan_vm(&vm, Some(plan)).await?;
            }
            let vm = vms.state.inventory().vm(&vm).ok_or_else(|| no_vm(&vm))?;
            Ok(ChangedVm { vm, warning })
        })
        .await
    }

    /// Stops a running VM as [`Vms::stop_vm`] does, and starts it again.
    pub(crate) async fn restart_vm(
        &self,
        vm: &str,
        request: StopManagedVm,
    ) -> Result<VmInfo, Problem> {
        let StopManagedVm { force, grace_ms } = check_grace(request)?;
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_to_start(&vm)?;
            let Located { client, info } = vms.locate(&vm)?;
            vms.refuse_under_way(&info, "restarted", false)?;
            let restart = client.restart_vm(&vm, StopVm { force, grace_ms });
            vms.with_power(&info, PlannedPower::On, restart).await
        })
        .await
    }

    /// Resets a running VM. The guest is not asked.
    pub(crate) async fn reset_vm(&self, vm: &str) -> Result<VmInfo, Problem> {
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let Located { client, info } = vms.locate(&vm)?;
            vms.refuse_under_way(&info, "reset", false)?;
            Ok(client.reset_vm(&vm).await?)
        })
        .await
    }

    /// Suspends a running VM. Returns when its memory is on its host's disk.
    pub(crate) async fn suspend_vm(&self, vm: &str) -> Result<VmInfo, Problem> {
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let Located { client, info } = vms.locate(&vm)?;
            vms.refuse_under_way(&info, "suspended", false)?;
            vms.with_power(&info, PlannedPower::Off, client.suspend_vm(&vm)).await
        })
        .await
    }

    /// Changes a disk or a CD of a VM, running or stopped.
    pub(crate) async fn change_drive(
        &self,
        vm: &str,
        change: DriveChange,
        role: Role,
    ) -> Result<VmInfo, Problem> {
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let Located { client, info } = vms.locate(&vm)?;
            vms.refuse_under_way(&info, "changed", false)?;
            // Only the host sees links and the headers of images.
            let request = ChangeDrive { change, vm_dirs_only: role < Role::Admin };
            let now = client.change_drive(&vm, &request).await?;
            vms.until_seen(&vm, &info.host, |seen| seen.is_some_and(|seen| seen.spec == now.spec))
                .await;
            Ok(now)
        })
        .await
    }

    /// Attaches or detaches a NIC of a VM, running or stopped. A new one gets a hardware address
    /// that no other NIC of the cluster has in its network.
    pub(crate) async fn change_nic(&self, vm: &str, change: NicChange) -> Result<VmInfo, Problem> {
        let (vms, vm) = (self.clone(), vm.to_owned());
        whole(async move {
            let _turn = vms.turn_of_vm(&vm)?;
            let Located { client, info } = vms.locate(&vm)?;
            vms.refuse_under_way(&info, "changed", false)?;
            let (change, _nic) = vms.check_nic(&info, change)?;
            let now = client.change_nic(&vm, &change).await?;
            vms.until_seen(&vm, &info.host, |seen| seen.is_some_and(|seen| seen.spec == now.spec))
                .await;
            Ok(now)
        })
        .await
    }

    /// Checks the addresses of a NIC, and reserves them until the VM has it.
    fn check_nic(
        &self,
        info: &VmInfo,
        change: NicChange,
    ) -> Result<(NicChange, Option<Reservation>), Problem> {
        let NicChange::Attach { nic } = change else { return Ok((change, None)) };
        let mut rooms = self.pending.rooms();
        let inventory = self.state.inventory();
        let known = info.spec.nics.len();
        let derived = (0..MOST_DERIVED).map(|index| MacAddress::derived(&info.name, index));
        let macs: Vec<String> = match &nic.mac {
            Some(mac) => vec![mac.clone()],
            None => derived.map(|mac| mac.to_string()).collect(),
        };
        let mut refused = None;
        for mac in macs {
            let nic = Nic { mac: Some(mac), ..nic.clone() };
            let mut spec = info.spec.clone();
            spec.nics.push(nic.clone());
            let nics = match spec.validate().and_then(|()| spec.claimed_nics()) {
                Ok(nics) => nics,
                Err(error) => {
                    refused = Some(invalid_spec(&error));
                    continue;
                }
            };
            let others = rooms.iter().map(|(name, room)| (name.as_str(), room.nics.as_slice()));
            if let Err(problem) = check_addresses(&info.name, &nics[known..], &inventory, others) {
                refused = Some(problem);
                continue;
            }
            let room = Room { host: info.host.clone(), memory_bytes: 0, vcpus: 0, nics };
            rooms.insert(info.name.clone(), room);
            let (all, name) = (self.pending.clone(), info.name.clone());
            return Ok((NicChange::Attach { nic }, Some(Reservation { all, name })));
        }
        Err(refused.unwrap_or_else(|| no_vm(&info.name)))
    }

    /// Gives a stopped VM another name.
    pub(crate) async fn rename_vm(&self, vm: &str, request: &RenameVm) -> Result<VmInfo, Problem> {
        let (vms, vm, request) = (self.clone(), vm.to_owned(), request.clone());
        whole(async move {
            let new = VmName::new(request.name.as_str()).map_err(|error| invalid_spec(&error))?;
            let (_turn, _other) = (vms.turn_of_vm(&vm)?, vms.turn_of_vm(&new)?);
            let Located { client, info } = vms.locate(&vm)?;
            vms.refuse_under_way(&info, "renamed", true)?;
            vms.refuse_ruled(&vm)?;
            vms.check_free(&new)?;
            let plan = vms.state.inventory().vm_plan(&vm).cloned();
            if plan.is_some() {
                vms.plan_vm(&new, plan).await?;
            }
            let _name = vms.expect_vm(&new, &info.host);
            match client.rename_vm(&vm, &request).await {
                Ok(now) => {
                    vms.until_known(&new, &info.host, Some(now.state)).await;
                    vms.until_known(&vm, &info.host, None).await;
                    vms.plan_vm(&vm, None).await?;
                    Ok(now)
                }
                Err(error) => {
                    // Without an answer it may have the new name: both plans stay.
                    if matches!(error, ClientError::Refused(_)) {
                        vms.plan_vm(&new, None).await?;
                    }
                    Err(error.into())
                }
            }
        })
        .await
    }

    /// Refuses to rename a VM that a rule names.
    fn refuse_ruled(&self, vm: &str) -> Result<(), Problem> {
        let inventory = self.state.inventory();
        let rules = inventory.rules();
        let Some(rule) = rules.iter().find(|rule| rule.vms.iter().any(|named| named == vm)) else {
            return Ok(());
        };
        let detail = format!("cannot rename VM \"{vm}\": rule \"{}\" names it", rule.name);
        let remedy = "delete the rule, rename the VM, then create the rule with the new name";
        Err(Problem::new(ProblemCode::WrongState, detail, remedy))
    }

    /// Changes the specification of a VM. Returns a warning of the admission control.
    async fn change_spec(
        &self,
        Located { client, info }: &Located,
        request: &ChangeManagedVm,
        role: Role,
    ) -> Result<Option<String>, Problem> {
        self.refuse_under_way(info, "changed", true)?;
        let Change { patch, spec, _nics } = self.check_change(info, request, role)?;
        let is_new = spec.protect.is_some() && info.spec.protect.is_none();
        let warning = match is_new && !info.state.is_off() {
            true => self.admit(&spec, &info.host).await?,
            false => None,
        };
        let change = ChangeVm {
            spec: patch,
            replace: request.replace,
            expected: Some(Box::new(info.spec.clone())),
            // Only the host sees links and the headers of images.
            vm_dirs_only: role < Role::Admin,
        };
        let now = client.change_vm(&info.name, &change).await?;
        self.until_seen(&info.name, &info.host, |seen| {
            seen.is_some_and(|seen| seen.spec == now.spec)
        })
        .await;
        Ok(warning)
    }

    /// Checks the changed specification as far as the manager can, except for the admission
    /// control. Reserves new addresses.
    fn check_change(
        &self,
        info: &VmInfo,
        request: &ChangeManagedVm,
        role: Role,
    ) -> Result<Change, Problem> {
        let changed = request.spec.apply_or_replace(&info.spec, request.replace);
        let mut spec = changed.map_err(|why| {
            let detail = format!("cannot change VM \"{}\": {why}", info.name);
            Problem::new(ProblemCode::InvalidRequest, detail, "see the VM's spec, and docs/cli.md")
        })?;
        spec.validate().map_err(|error| invalid_spec(&error))?;
        let nics = spec.claimed_nics().map_err(|error| invalid_spec(&error))?;
        check_new_reach(info, &spec, role)?;
        let inventory = self.state.inventory();
        let mut patch = request.spec.clone();
        if spec.cpu_model != info.spec.cpu_model {
            hold_to_baseline(&inventory, &mut spec, Some(&info.host))?;
            patch.set("cpu_model", json!(spec.cpu_model));
        }
        drop(inventory);
        Ok(Change { patch, spec, _nics: self.reserve_addresses(info, nics)? })
    }

    /// Checks what a VM gets by a revert as strictly as what it gets by a change, and reserves new
    /// addresses.
    pub(super) fn check_revert(
        &self,
        info: &VmInfo,
        spec: &VmSpec,
        role: Role,
    ) -> Result<Option<Reservation>, Problem> {
        spec.validate().map_err(|error| invalid_spec(&error))?;
        check_new_reach(info, spec, role)?;
        for disk in &spec.disks {
            self.agents.check_not_written(&info.host, &disk.path)?;
        }
        let nics = spec.claimed_nics().map_err(|error| invalid_spec(&error))?;
        self.reserve_addresses(info, nics)
    }

    /// Checks the addresses that a VM gets, and reserves them, if they are not those that it has.
    fn reserve_addresses(
        &self,
        info: &VmInfo,
        nics: Vec<ClaimedNic>,
    ) -> Result<Option<Reservation>, Problem> {
        if info.spec.claimed_nics().is_ok_and(|known| known == nics) {
            return Ok(None);
        }
        let mut rooms = self.pending.rooms();
        let others = rooms.iter().map(|(name, room)| (name.as_str(), room.nics.as_slice()));
        check_addresses(&info.name, &nics, &self.state.inventory(), others)?;
        // The VM's memory and vCPUs count already.
        let room = Room { host: info.host.clone(), memory_bytes: 0, vcpus: 0, nics };
        rooms.insert(info.name.clone(), room);
        let (all, name) = (self.pending.clone(), info.name.clone());
        Ok(Some(Reservation { all, name }))
    }

    /// Returns the plan of a VM with changed labels; `None` if no label changes. A VM that was
    /// discovered on its host gets a plan with the power state that it has.
    fn plan_with_labels(
        &self,
        info: &VmInfo,
        changes: &BTreeMap<String, Option<String>>,
    ) -> Result<Option<VmPlan>, Problem> {
        let known = self.state.inventory().vm_plan(&info.name).cloned();
        let mut plan = known.clone().unwrap_or_else(|| VmPlan {
            power: match info.state {
                VmState::Stopping => PlannedPower::Off,
                state if state.is_off() => PlannedPower::Off,
                _ => PlannedPower::On,
            },
            labels: BTreeMap::new(),
        });
        for (key, value) in changes {
            match value {
                Some(value) => drop(plan.labels.insert(key.clone(), value.clone())),
                None => drop(plan.labels.remove(key)),
            }
        }
        check_labels(&plan.labels)?;
        Ok((!changes.is_empty() && known.as_ref() != Some(&plan)).then_some(plan))
    }
}

/// Only admins may give a VM programs and devices of its host that it does not have.
fn check_new_reach(info: &VmInfo, spec: &VmSpec, role: Role) -> Result<(), Problem> {
    let keeps = (&spec.qemu, &spec.extra_devices) == (&info.spec.qemu, &info.spec.extra_devices)
        && (spec.topology.is_none() || spec.topology == info.spec.topology);
    match role < Role::Admin && !keeps {
        true => check_reach(spec),
        false => Ok(()),
    }
}
