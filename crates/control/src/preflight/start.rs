//! Checks of a VM without a process, and a host where it may start: a new VM, or one whose host has
//! failed.

use std::path::{Component, Path};

use godwit_api::HostInfo;
use godwit_api::control::{CheckName, Role};
use godwit_planner::placement::{Obstacle, Obstacles};
use godwit_planner::words::some_features;
use godwit_qemu::{Accel, CpuModel, VmSpec};

use super::travelling;
use crate::cluster::inventory::{Inventory, SeenHost};
use crate::cluster::nics::lacks_for_nics;

/// Returns what prevents a start of a VM on each host, except what placement checks itself.
pub(crate) fn obstacles_to_start(inventory: &Inventory, spec: &VmSpec, role: Role) -> Obstacles {
    let of = |host: SeenHost<'_>| {
        let found: Vec<Obstacle> =
            host.info.map(|info| in_the_way(host.name, info, inventory, spec, role))?;
        (!found.is_empty()).then(|| (host.name.to_owned(), found))
    };
    inventory.seen_hosts().filter_map(of).collect()
}

fn in_the_way(
    host: &str,
    info: &HostInfo,
    inventory: &Inventory,
    spec: &VmSpec,
    role: Role,
) -> Vec<Obstacle> {
    let checks = [
        (CheckName::Networks, networks(info, spec)),
        (CheckName::Disks, if role < Role::Admin { files(info, spec) } else { None }),
        (CheckName::Accelerator, accelerator(info, spec)),
        (CheckName::Firmware, firmware(info, spec)),
        (CheckName::QemuVersion, qemu(info, spec)),
        (CheckName::CpuBaseline, baseline(host, inventory)),
        (CheckName::Cpu, cpu(info, spec)),
    ];
    let named = |(name, found): (CheckName, Option<String>)| {
        Some(Obstacle { code: name.name().to_owned(), message: found? })
    };
    checks.into_iter().filter_map(named).collect()
}

fn networks(info: &HostInfo, spec: &VmSpec) -> Option<String> {
    let nics = spec.nics.iter().map(|nic| nic.network.as_str());
    let mut missing: Vec<&str> =
        nics.filter(|network| !info.networks.contains_key(*network)).collect();
    missing.sort_unstable();
    missing.dedup();
    let known: Vec<&str> = info.networks.keys().map(String::as_str).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    if !missing.is_empty() {
        return Some(format!("it has no network {} (it has {known})", missing.join(", ")));
    }
    lacks_for_nics(info, spec)
}

/// Checks for files outside the directories for VMs: with such a file, a VM could read anything on
/// the host. The host itself checks links.
fn files(info: &HostInfo, spec: &VmSpec) -> Option<String> {
    let boot = spec.kernel.iter().chain(&spec.initrd).map(std::path::PathBuf::as_path);
    let has_no_parents = |path: &Path| !path.components().any(|part| part == Component::ParentDir);
    let is_inside = |path: &Path| has_no_parents(path) && travelling::is_for_vms(info, path);
    let outside = spec.images().chain(boot).find(|path| !is_inside(path))?;
    Some(format!("{} is below none of its vm_dirs, which needs the role admin", outside.display()))
}

/// Checks for an image of the firmware, and for a TPM. An older agent reports neither.
fn firmware(info: &HostInfo, spec: &VmSpec) -> Option<String> {
    let lacks = !info.firmware.is_empty() && !info.firmware.contains(&spec.firmware);
    if lacks {
        return Some(format!("it has no image of firmware {}", spec.firmware));
    }
    (spec.tpm && info.tpm == Some(false)).then(|| "it has no swtpm for a TPM".to_owned())
}

fn accelerator(info: &HostInfo, spec: &VmSpec) -> Option<String> {
    (spec.accel == Accel::Kvm && info.kvm == Some(false)).then(|| {
        let why = info.kvm_reason.as_deref().unwrap_or("it gives no reason");
        format!("it cannot run 64-bit guests with KVM: {why}")
    })
}

fn qemu(info: &HostInfo, spec: &VmSpec) -> Option<String> {
    let problem = info.qemu_problem.as_ref().filter(|_| spec.qemu.is_none())?;
    Some(format!("it has no usable QEMU: {problem}"))
}

fn baseline(host: &str, inventory: &Inventory) -> Option<String> {
    let lacking = inventory.lacks_of_baseline(host)?;
    (!lacking.is_empty())
        .then(|| format!("it lacks {} of the cluster's baseline", some_features(&lacking)))
}

/// Checks features known to be missing. QEMU decides about models unknown here.
fn cpu(info: &HostInfo, spec: &VmSpec) -> Option<String> {
    let (cpu, model) = (info.cpu.as_ref()?, CpuModel::parse(spec.cpu_model.as_deref()?));
    let by_default = spec.accel == Accel::Auto || cpu.accel.name() == accel_name(spec.accel);
    if !by_default || model.takes_what_there_is() {
        return None;
    }
    let missing = cpu.to_host_cpu().missing_of(&model)?;
    (!missing.is_empty())
        .then(|| format!("it cannot give guests {} of {model}", some_features(&missing)))
}

fn accel_name(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "kvm",
        Accel::Tcg => "tcg",
        Accel::Auto => "",
    }
}
