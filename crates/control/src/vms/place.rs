//! Placement of a new VM: as for moves, with what prevents a VM that does not exist yet on each
//! host.

use std::collections::BTreeSet;

use godwit_api::NewDisk;
use godwit_api::control::{Problem, ProblemCode, Role};
use godwit_planner::placement::{self, Ranking, rank};
use godwit_qemu::{ByteSize, ClaimedNic, VmSpec, address_conflict};

use super::{Reservation, Room, Vms, invalid_spec, memory_bytes};
use crate::cluster::inventory::Inventory;
use crate::cluster::inventory::disk_places::DiskPlace;
use crate::cluster::planner_input::{placement_hosts, reference_group_of};
use crate::preflight::obstacles_to_start;
use crate::problems::no_host;

/// Most hosts that a message names with their obstacles.
const NAMED_HOSTS: usize = 3;

/// Host of a new VM.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) host: String,
    /// Reason for the choice, or a warning about a host that the request named.
    pub(super) why: Option<String>,
}

impl Vms {
    /// Returns the named host if it can take the VM, or else the best host. Its room is reserved
    /// until the VM is created.
    pub(super) fn place_vm(
        &self,
        spec: &VmSpec,
        host: Option<&str>,
        role: Role,
    ) -> Result<(Chosen, Reservation), Problem> {
        if role < Role::Admin {
            check_reach(spec)?;
        }
        let arriving = self.requests.arriving();
        // Locked until the reservation is made, so that the next placement counts it.
        let mut made = self.pending.rooms();
        let inventory = self.state.inventory();
        let nics = spec.claimed_nics().map_err(|error| invalid_spec(&error))?;
        let pending = made.iter().map(|(vm, room)| (vm.as_str(), room.nics.as_slice()));
        check_addresses(&spec.name, &nics, &inventory, pending)?;
        check_networks(spec, &inventory)?;
        let mut hosts = placement_hosts(&arriving, &inventory.limits(), &inventory);
        for (name, room) in &*made {
            let of_room = hosts.iter_mut().find(|host| host.facts.name == room.host);
            // VMs that the host reports are already counted.
            if let Some(host) = of_room.filter(|host| !host.vms.contains(name)) {
                host.facts.memory_promised_bytes += room.memory_bytes;
                host.vcpus_placed += room.vcpus;
                host.vms.push(name.clone());
            }
        }
        let vm = placement::Vm {
            name: spec.name.clone(),
            memory_bytes: memory_bytes(spec),
            vcpus: spec.vcpus,
            busy_cores: None,
            reference_group: reference_group_of(spec),
        };
        let obstacles = obstacles_to_start(&inventory, spec, role);
        let ranking = rank(&hosts, &inventory.rules(), &vm, &obstacles);
        let chosen = match host {
            Some(host) => named(host, &spec.name, &ranking, &inventory)?,
            None => best(&spec.name, ranking)?,
        };
        let room = Room {
            host: chosen.host.clone(),
            memory_bytes: vm.memory_bytes,
            vcpus: vm.vcpus,
            nics,
        };
        made.insert(spec.name.clone(), room);
        Ok((chosen, Reservation { all: self.pending.clone(), name: spec.name.clone() }))
    }
}

impl Vms {
    /// Names the datastore of each new disk at a host, unless its agent chooses itself. Returns the
    /// reasons of those that the request did not name.
    pub(super) fn place_disks(
        &self,
        host: &str,
        disks: &mut [NewDisk],
    ) -> Result<Vec<String>, Problem> {
        let inventory = self.state.inventory();
        let mut reasons = Vec::new();
        for disk in disks {
            let bytes = disk.size.map_or(0, ByteSize::bytes);
            let place = inventory.place_disk(host, disk.datastore.as_deref(), bytes)?;
            if let Some(DiskPlace { dir, why }) = place {
                disk.datastore = Some(dir.display().to_string());
                reasons.extend(why);
            }
        }
        Ok(reasons)
    }
}

fn named(
    host: &str,
    vm: &str,
    ranking: &Ranking,
    inventory: &Inventory,
) -> Result<Chosen, Problem> {
    inventory.host_plan(host).ok_or_else(|| no_host(host))?;
    match ranking.ruled_out.iter().find(|out| out.host == host) {
        None => {
            let ranked = ranking.fits.iter().find(|ranked| ranked.host == host);
            let warning = ranked.and_then(|ranked| ranked.warning.as_ref());
            let why = warning.map(|warning| format!("{}; {}", warning.text, warning.remedy));
            Ok(Chosen { host: host.to_owned(), why })
        }
        Some(out) => {
            let code =
                if inventory.is_up(host) { ProblemCode::NoHost } else { ProblemCode::HostAway };
            let detail = format!("host {host} cannot take VM \"{vm}\": {}", out.text);
            Err(Problem::new(
                code,
                detail,
                "name another host, or omit it to let the manager choose",
            ))
        }
    }
}

fn best(vm: &str, ranking: Ranking) -> Result<Chosen, Problem> {
    let Ranking { fits, ruled_out } = ranking;
    if let Some(best) = fits.into_iter().next() {
        let why = match best.warning {
            Some(warning) => format!("{}; {}", best.why, warning.remedy),
            None => best.why,
        };
        return Ok(Chosen { host: best.host, why: Some(why) });
    }
    let mut named: Vec<String> = ruled_out
        .iter()
        .take(NAMED_HOSTS)
        .map(|out| format!("{}: {}", out.host, out.text))
        .collect();
    match ruled_out.len().saturating_sub(NAMED_HOSTS) {
        0 => {}
        more => named.push(format!("and {more} more")),
    }
    let why = if named.is_empty() { "there are no hosts".to_owned() } else { named.join("; ") };
    let detail = format!("no host can take VM \"{vm}\": {why}");
    Err(Problem::new(ProblemCode::NoHost, detail, "add a host, or free capacity on one"))
}

/// Checks that no other VM of the cluster has an address of this one: a network of one name is
/// the same network on every host.
pub(super) fn check_addresses<'a>(
    vm: &str,
    nics: &[ClaimedNic],
    inventory: &Inventory,
    mut pending: impl Iterator<Item = (&'a str, &'a [ClaimedNic])>,
) -> Result<(), Problem> {
    let refuse = |other: &str, others: &[ClaimedNic]| match address_conflict(nics, others) {
        None => Ok(()),
        Some(conflict) => {
            let detail = format!("cannot define VM \"{vm}\": {}", conflict.message(other));
            Err(Problem::new(ProblemCode::AlreadyExists, detail, conflict.remedy()))
        }
    };
    if nics.is_empty() {
        return Ok(());
    }
    pending.try_for_each(|(other, others)| refuse(other, others))?;
    inventory.all_vms().filter(|info| info.name != vm).try_for_each(|info| {
        // A host may report invalid addresses.
        refuse(&info.name, &info.spec.claimed_nics().unwrap_or_default())
    })
}

/// Checks that each network of the VM exists on some host.
fn check_networks(spec: &VmSpec, inventory: &Inventory) -> Result<(), Problem> {
    let known: BTreeSet<&str> = inventory
        .seen_hosts()
        .filter_map(|host| host.info)
        .flat_map(|info| info.networks.keys().map(String::as_str))
        .collect();
    let mut wanted = spec.nics.iter().map(|nic| nic.network.as_str());
    let Some(missing) = wanted.find(|network| !known.contains(network)) else { return Ok(()) };
    let known: Vec<&str> = known.into_iter().collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    let detail = format!("cannot place VM \"{}\": no host has network \"{missing}\"", spec.name);
    let remedy = format!(
        "use a network that there is ({known}), or add it to [networks] in the configuration of \
         hosts"
    );
    Err(Problem::new(ProblemCode::NoHost, detail, remedy))
}

/// Only admins may use programs and devices of a host.
pub(super) fn check_reach(spec: &VmSpec) -> Result<(), Problem> {
    let named = match (&spec.qemu, spec.extra_devices.first()) {
        (Some(program), _) => format!("its own QEMU ({})", program.display()),
        (None, Some(device)) => format!("its own device ({device})"),
        (None, None) if spec.topology.is_some() => "devices of its own (topology)".to_owned(),
        (None, None) => return Ok(()),
    };
    let detail = format!("VM \"{}\" names {named}, which needs the role admin", spec.name);
    Err(Problem::new(ProblemCode::Forbidden, detail, "omit it, or have an admin create the VM"))
}
