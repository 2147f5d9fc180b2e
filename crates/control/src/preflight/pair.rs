//! What keeps a VM from going to a host, and what is to be known of it.

use std::net::IpAddr;
use std::path::Path;

use godwit_api::control::{CheckName, HostState};
use godwit_planner::words::Bytes;

use super::cpu::{accelerator, baseline, cpu, untold};
use super::{Found, Subject};
use crate::cluster::inventory::SeenHost;

type OfPair = fn(&Subject<'_>, SeenHost<'_>) -> Found;

pub(super) const CHECKS: [(CheckName, OfPair); 13] = [
    (CheckName::Target, target),
    (CheckName::Cpu, cpu),
    (CheckName::CpuBaseline, baseline),
    (CheckName::Accelerator, accelerator),
    (CheckName::MachineType, machine_type),
    (CheckName::QemuVersion, qemu_version),
    (CheckName::Memory, memory),
    (CheckName::HugePages, huge_pages),
    (CheckName::Disks, disks),
    (CheckName::Networks, networks),
    (CheckName::Lanes, lanes),
    (CheckName::Protocol, protocol),
    (CheckName::Limits, limits),
];

fn target(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let SeenHost { name, state, plan, .. } = to;
    if name == subject.from.name {
        return Found::fail(format!("it is on host {name} already"), "name another host");
    }
    match state {
        HostState::Up => {}
        HostState::Away => {
            return Found::fail(
                format!("host {name} is away: its agent does not answer"),
                "see that its agent runs",
            );
        }
        HostState::Unknown => {
            let evidence = format!("host {name} has not been heard since this manager began");
            return Found::unknown(evidence, "see that its agent runs and can be reached");
        }
    }
    if plan.maintenance {
        return Found::fail(
            format!("host {name} is in maintenance"),
            "take another host, or end its maintenance",
        );
    }
    if subject.inventory.has_vm(name, &subject.vm.info.name) {
        let evidence = format!("host {name} has something by this name already");
        return Found::fail(
            evidence,
            "wait where it arrives there; else see `godwit vm list` on that host",
        );
    }
    Found::pass(format!("host {name} is heard and takes VMs"))
}

fn machine_type(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let Some(info) = to.info else { return untold(to.name) };
    let (wanted, spec) = (&subject.vm.info.machine, &subject.vm.info.spec);
    if let Some(program) = &spec.qemu {
        let evidence = format!(
            "it has a QEMU of its own, {}: host {} tells of its own alone",
            program.display(),
            to.name
        );
        return Found::unknown(evidence, "ask for a prediction: the host is asked then");
    }
    let version = info.qemu_version.as_deref().unwrap_or("of unknown version");
    if info.machines.is_empty() {
        let evidence = format!("host {} does not tell the machine types of its QEMU", to.name);
        return Found::unknown(evidence, "upgrade its agent, or ask for a prediction");
    }
    if info.machines.contains(wanted) {
        return Found::pass(format!("{wanted} is known to QEMU {version} on host {}", to.name));
    }
    Found::fail(
        format!("{wanted} is not known to QEMU {version} on host {}", to.name),
        "upgrade QEMU on the target, or create the VM with a machine type that both know",
    )
}

fn qemu_version(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (Some(from), Some(there)) = (subject.from.info, to.info) else { return untold(to.name) };
    if let Some(problem) = &there.qemu_problem {
        let evidence = format!("host {} has no QEMU that can be used: {problem}", to.name);
        return Found::fail(evidence, "remedy that, or take another host");
    }
    let (Some(here), Some(version)) = (&from.qemu_version, &there.qemu_version) else {
        return Found::unknown(
            "a host does not tell the version of its QEMU",
            "see `godwit host show`",
        );
    };
    let evidence =
        format!("QEMU {here} on host {}, {version} on host {}", subject.from.name, to.name);
    match release(version) < release(here) {
        // docs/devel/migration of QEMU: what a newer one sends an older one may not know.
        true => Found::warn(
            format!("{evidence}: to an older QEMU"),
            "QEMU promises the way to a newer one alone; upgrade the target first",
        ),
        false => Found::pass(evidence),
    }
}

/// Major and minor of a version.
fn release(version: &str) -> (u32, u32) {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

fn memory(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let Some(info) = to.info else { return untold(to.name) };
    let (needed, left) = (subject.vm.info.memory_bytes, info.memory_available_bytes);
    let evidence = format!("it needs {}, host {} has {} left", Bytes(needed), to.name, Bytes(left));
    match needed <= left {
        true => Found::pass(evidence),
        false => Found::fail(evidence, "take another host, or move VMs off that one first"),
    }
}

fn huge_pages(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (Some(from), Some(there)) = (subject.from.info, to.info) else { return untold(to.name) };
    match (from.huge_pages, there.huge_pages) {
        (true, false) => Found::warn(
            format!(
                "host {} backs guests with huge pages, host {} does not: it would be slower there",
                subject.from.name, to.name
            ),
            "mount the RAM directory of that host with huge=always",
        ),
        (_, true) => Found::pass(format!("host {} backs guests with huge pages", to.name)),
        (false, false) => Found::pass("neither host backs guests with huge pages"),
    }
}

fn disks(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let spec = &subject.vm.info.spec;
    let boot = spec.kernel.iter().chain(&spec.initrd).map(std::path::PathBuf::as_path);
    let paths: Vec<&Path> = spec.disks.iter().map(|disk| disk.path.as_path()).chain(boot).collect();
    if paths.is_empty() {
        return Found::pass("it has none");
    }
    let Some(info) = to.info else { return untold(to.name) };
    let written = spec.disks.iter().filter(|disk| !disk.readonly).map(|disk| disk.path.as_path());
    let outside: Vec<String> = written
        .filter(|path| !info.vm_dirs.iter().any(|dir| path.starts_with(dir)))
        .map(|path| path.display().to_string())
        .collect();
    if !info.vm_dirs.is_empty() && !outside.is_empty() {
        return Found::warn(
            format!(
                "{} is below none of the directories that host {} opens for arriving guests",
                outside.join(", "),
                to.name
            ),
            "add its directory to vm_dirs of that host's configuration; a link may lead there: ask for a prediction",
        );
    }
    let all: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let evidence =
        format!("whether host {} sees {} it says itself when it is asked", to.name, all.join(", "));
    Found::unknown(evidence, "ask for a prediction")
}

fn networks(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let nics = &subject.vm.info.spec.nics;
    if nics.is_empty() {
        return Found::pass("it has no network interface");
    }
    let Some(info) = to.info else { return untold(to.name) };
    let mut wanted: Vec<&str> = nics.iter().map(|nic| nic.network.as_str()).collect();
    wanted.sort_unstable();
    wanted.dedup();
    let missing: Vec<&str> =
        wanted.iter().copied().filter(|name| !info.networks.contains_key(*name)).collect();
    if missing.is_empty() {
        return Found::pass(format!("host {} has {}", to.name, wanted.join(", ")));
    }
    Found::fail(
        format!("host {} has no network {}", to.name, missing.join(", ")),
        "add it to networks of that host's configuration, or take another host",
    )
}

fn lanes(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (Some(from), Some(there)) = (subject.from.info, to.info) else { return untold(to.name) };
    let addresses = &there.migration_addresses;
    if addresses.is_empty() {
        let evidence = format!("host {} has no address for migrations", to.name);
        return Found::fail(evidence, "set migration_addresses in its configuration");
    }
    let told: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    let evidence = format!("host {} takes migrations at {}", to.name, told.join(", "));
    let shares = |address: &IpAddr| {
        from.migration_addresses.iter().any(|own| own.is_ipv4() == address.is_ipv4())
    };
    if !from.migration_addresses.is_empty() && !addresses.iter().any(shares) {
        let evidence = format!(
            "{evidence}; host {} has no address of that kind (IPv4, IPv6)",
            subject.from.name
        );
        return Found::warn(evidence, "give both an address of the same kind");
    }
    Found::pass(evidence)
}

fn protocol(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (Some(from), Some(there)) = (subject.from.info, to.info) else { return untold(to.name) };
    if from.version == there.version {
        return Found::pass(format!("both agents are of version {}", there.version));
    }
    let evidence = format!(
        "agent {} on host {}, {} on host {}: they agree on the newest protocol that both know",
        from.version, subject.from.name, there.version, to.name
    );
    Found::warn(evidence, "ask for a prediction; upgrade the older one")
}

fn limits(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (out, _) = subject.inventory.moves_at_once(subject.from.name);
    let (_, into) = subject.inventory.moves_at_once(to.name);
    let (out, into) = (u64::from(out), u64::from(into));
    let evidence = format!(
        "{} of {out} moves leave host {}, {} of {into} arrive at host {}",
        subject.from.moves_out, subject.from.name, to.moves_in, to.name
    );
    match subject.from.moves_out < out && to.moves_in < into {
        true => Found::pass(evidence),
        false => Found::warn(format!("{evidence}: it would wait for its turn"), ""),
    }
}
