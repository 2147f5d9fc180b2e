//! NICs of a VM that exists: attach and detach. A running VM gets them at once, in a slot that its
//! definition records, so that a later start or a migration builds the same machine.

use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode, NicChange, VmInfo};
use godwit_qemu::{MacAddress, Nic, ResolvedSpec, VmName, VmSpec, nic_number};

use crate::agent::plug::{Added, plug_failed, refuse_adopted};
use crate::agent::{Agent, Begun};
use crate::failure::spec_refused;
use crate::network::attach_tap;
use crate::vm::Operation;
use crate::whole::whole;

/// Most derived addresses that are tried for a new NIC.
const MOST_TRIED: usize = 100;

impl Agent {
    /// Attaches or detaches a NIC of a VM, running or not. If that fails, the VM stays as it was.
    pub async fn change_nic(
        self: &Arc<Self>,
        name: &VmName,
        request: NicChange,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        let begun = match self.begin(&name, &Operation::Plug) {
            Ok(begun) => begun,
            Err(error) => {
                let change = |spec: &mut VmSpec| self.change_nics(spec, &request);
                return self.change_stopped(&name, error, false, change).await;
            }
        };
        whole(async move {
            let changed = agent.plug_nic(&begun, &request).await;
            agent.end_plug(&begun).await;
            if changed.is_err()
                && let Some(vm) = &begun.vm
            {
                // The guest may have released it since.
                agent.forget_released(vm).await;
            }
            changed?;
            tracing::info!(vm = name.as_str(), "NICs changed");
            agent.vm_info(&name)
        })
        .await
    }

    async fn plug_nic(
        self: &Arc<Self>,
        begun: &Begun,
        request: &NicChange,
    ) -> Result<(), ApiError> {
        let Some(vm) = &begun.vm else { return Err(self.no_vm(&begun.spec.name)) };
        let old = begun.spec.as_ref();
        refuse_adopted(old)?;
        let mut wanted = old.to_vm_spec();
        self.change_nics(&mut wanted, request)?;
        let index = match request {
            NicChange::Attach { .. } => {
                let Some(nic) = wanted.nics.last_mut() else { return Ok(()) };
                nic.slot = match nic.slot {
                    Some(slot) => Some(slot),
                    None => Some(old.free_slot().ok_or_else(|| no_slot(old))?),
                };
                wanted.nics.len() - 1
            }
            NicChange::Detach { mac } => index_of(old, mac)?,
        };
        wanted.validate().map_err(|error| spec_refused(&error))?;
        let nics = wanted.resolved_nics().map_err(|error| spec_refused(&error))?;
        let new = ResolvedSpec { nics, ..old.clone() };
        let qmp = &vm.process.qmp;
        if matches!(request, NicChange::Detach { .. }) {
            if old.nics[index].slot.is_none() {
                return Err(refused(
                    old,
                    "it has this NIC from its start, and such a NIC stays while it runs",
                    "stop the VM first, or set the NIC's link down",
                ));
            }
            let detached = qmp.detach_nic(old, index).await;
            detached.map_err(|error| plug_failed("detach", "the NIC", &vm.name, &error))?;
            return self.save_plugged(vm, new);
        }
        let added = ResolvedSpec { nics: vec![new.nics[index].clone()], ..new.clone() };
        let Some(network) = self.check_networks(&added).await?.pop() else { return Ok(()) };
        let (host, number) = (&self.config().name, nic_number(&new.nics, index));
        let tap =
            attach_tap(host, &vm.name, number, &new.nics[index], &network, &self.filters).await?;
        let attached = new.clone();
        let attach = async || qmp.attach_nic(&attached, index, &tap).await;
        let added = Added { what: "the NIC", old, new, failed: old };
        self.add_plugged(vm, added, attach).await
    }

    /// Makes a change in a specification. A NIC without an address gets one that no other NIC of
    /// the VM has, and no other VM of this host in that network.
    fn change_nics(&self, spec: &mut VmSpec, change: &NicChange) -> Result<(), ApiError> {
        match change {
            NicChange::Attach { nic } => {
                let mac = match &nic.mac {
                    Some(mac) => mac.clone(),
                    None => self.free_mac(spec, nic)?.to_string(),
                };
                spec.nics.push(Nic { mac: Some(mac), ..nic.clone() });
            }
            NicChange::Detach { mac } => {
                let nics = spec.resolved_nics().map_err(|error| spec_refused(&error))?;
                let mac = parse(mac)?;
                let Some(at) = nics.iter().position(|nic| nic.mac == mac) else {
                    return Err(no_nic(&spec.name, mac));
                };
                let from_start = |nic: &&Nic| nic.slot.is_none();
                let place = spec.nics[..at].iter().filter(from_start).count();
                // The settings of the others stay theirs.
                if let Some(settings) = &mut spec.cloud_init
                    && spec.nics[at].slot.is_none()
                    && place < settings.network.len()
                {
                    settings.network.remove(place);
                }
                spec.nics.remove(at);
            }
        }
        Ok(())
    }

    fn free_mac(&self, spec: &VmSpec, nic: &Nic) -> Result<MacAddress, ApiError> {
        let own = spec.resolved_nics().map_err(|error| spec_refused(&error))?;
        let mut taken: Vec<MacAddress> = own.iter().map(|nic| nic.mac).collect();
        for slot in self.table().values() {
            let others = slot.spec.nics.iter().filter(|other| other.network == nic.network);
            taken.extend(others.map(|other| other.mac));
        }
        let mut derived = (0..MOST_TRIED).map(|index| MacAddress::derived(&spec.name, index));
        derived.find(|mac| !taken.contains(mac)).ok_or_else(|| {
            let message = format!("cannot choose a hardware address for VM \"{}\"", spec.name);
            ApiError::new(ErrorCode::InvalidRequest, message, "name one")
        })
    }
}

fn parse(mac: &str) -> Result<MacAddress, ApiError> {
    mac.parse().map_err(|error: godwit_qemu::MacError| {
        let remedy = "`godwit vm show` lists the NICs of a VM";
        ApiError::new(ErrorCode::InvalidRequest, error.to_string(), remedy)
    })
}

fn index_of(spec: &ResolvedSpec, mac: &str) -> Result<usize, ApiError> {
    let mac = parse(mac)?;
    let found = spec.nics.iter().position(|nic| nic.mac == mac);
    found.ok_or_else(|| no_nic(&spec.name, mac))
}

fn no_nic(vm: &str, mac: MacAddress) -> ApiError {
    let message = format!("VM \"{vm}\" has no NIC with the hardware address {mac}");
    ApiError::new(ErrorCode::NotFound, message, "`godwit vm show` lists its NICs")
}

fn no_slot(spec: &ResolvedSpec) -> ApiError {
    let why = format!("none of its {} slots is free", spec.hotplug_slots);
    refused(
        spec,
        &why,
        "stop it, then give it slots with `godwit vm set VM --hotplug-slots N`, up to 16",
    )
}

fn refused(spec: &ResolvedSpec, why: &str, remedy: &str) -> ApiError {
    let message = format!("cannot change the NICs of running VM \"{}\": {why}", spec.name);
    ApiError::new(ErrorCode::WrongState, message, remedy)
}
