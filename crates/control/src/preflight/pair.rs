//! Checks of a VM and a target.

use std::net::IpAddr;
use std::path::Path;

use godwit_api::HostInfo;
use godwit_api::control::{CheckName, HostState};
use godwit_planner::placement::{NEARLY_FULL_REMEDY, is_nearly_full};
use godwit_planner::words::Bytes;

use super::Subject;
use super::cpu::{accelerator, baseline, cpu, unreported};
use super::found::Found;
use super::travelling;
use crate::cluster::inventory::SeenHost;
use crate::cluster::nics::lacks_for_nics;

type OfPair = fn(&Subject<'_>, SeenHost<'_>) -> Found;

pub(super) const CHECKS: [(CheckName, OfPair); 14] = [
    (CheckName::Target, target),
    (CheckName::Cpu, cpu),
    (CheckName::CpuBaseline, baseline),
    (CheckName::Accelerator, accelerator),
    (CheckName::MachineType, machine_type),
    (CheckName::Firmware, firmware),
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
        return Found::fail(format!("it is already on host {name}"), "name another host");
    }
    match state {
        HostState::Up => {}
        HostState::Away => {
            return Found::fail(
                format!("host {name} is unreachable: its agent does not answer"),
                "check that its agent runs",
            );
        }
        HostState::Unknown => {
            let evidence = format!("host {name} has not reported since this manager started");
            return Found::unknown(evidence, "check that its agent runs and is reachable");
        }
    }
    if plan.maintenance {
        return Found::fail(
            format!("host {name} is in maintenance"),
            "choose another host, or end its maintenance",
        );
    }
    if subject.inventory.has_vm(name, &subject.vm.info.name) {
        let evidence = format!("host {name} already has a VM or an arrival with this name");
        return Found::fail(
            evidence,
            "if it is arriving there, wait; otherwise see `godwit vm list` on that host",
        );
    }
    Found::pass(format!("host {name} is reachable and accepts VMs"))
}

fn machine_type(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let Some(info) = to.info else { return unreported(to.name) };
    let (wanted, spec) = (&subject.vm.info.machine, &subject.vm.info.spec);
    if let Some(program) = &spec.qemu {
        let evidence = format!(
            "it has its own QEMU, {}: host {} reports only its default QEMU",
            program.display(),
            to.name
        );
        return Found::unknown(evidence, "request a prediction, which queries the host");
    }
    let version = info.qemu_version.as_deref().unwrap_or("of unknown version");
    if info.machines.is_empty() {
        let evidence = format!("host {} does not report the machine types of its QEMU", to.name);
        return Found::unknown(evidence, "upgrade its agent, or request a prediction");
    }
    if info.machines.contains(wanted) {
        return Found::pass(format!("QEMU {version} on host {} supports {wanted}", to.name));
    }
    Found::fail(
        format!("{wanted} is not supported by QEMU {version} on host {}", to.name),
        "upgrade QEMU on the target, or create the VM with a machine type that both support",
    )
}

fn firmware(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (wanted, needs_tpm) = (subject.vm.info.spec.firmware, subject.vm.info.spec.tpm);
    if wanted.is_bios() && !needs_tpm {
        return Found::pass("its BIOS is part of QEMU");
    }
    let Some(info) = to.info else { return unreported(to.name) };
    if needs_tpm && info.tpm != Some(true) {
        let remedy = "install swtpm there (`apt-get install swtpm`), or set swtpm in its \
                      configuration";
        return match info.tpm {
            Some(_) => Found::fail(format!("host {} has no swtpm for its TPM", to.name), remedy),
            None => Found::unknown(
                format!("host {} does not report whether it has swtpm", to.name),
                "upgrade its agent",
            ),
        };
    }
    if needs_tpm && let Some(older) = older_swtpm(subject, to.name, info) {
        return older;
    }
    if wanted.is_bios() {
        return Found::pass(format!("its BIOS is part of QEMU, and host {} has swtpm", to.name));
    }
    if info.firmware.is_empty() {
        let evidence = format!("host {} does not report its firmware", to.name);
        return Found::unknown(evidence, "upgrade its agent");
    }
    match info.firmware.contains(&wanted) {
        true => Found::pass(format!("host {} has an image of {wanted}", to.name)),
        false => Found::fail(
            format!("host {} has no image of firmware {wanted}", to.name),
            format!(
                "install it there (`apt-get install ovmf`), or set firmware.{wanted} in its \
                 configuration"
            ),
        ),
    }
}

/// Warns of a swtpm at the target that is older than the one at the source. Agents of older
/// versions report none.
fn older_swtpm(subject: &Subject<'_>, to: &str, there: &HostInfo) -> Option<Found> {
    let here = subject.from.info?.tpm_version.as_deref()?;
    let version = there.tpm_version.as_deref()?;
    // An older libtpms may not know the state that a newer one sends (its TPM 2 profiles).
    (release(version) < release(here)).then(|| {
        let from = subject.from.name;
        let evidence = format!(
            "swtpm {here} on host {from}, {version} on host {to}: an older one may not load the \
             state of the VM's TPM"
        );
        Found::warn(evidence, "upgrade swtpm and libtpms on the target first")
    })
}

fn qemu_version(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (Some(from), Some(there)) = (subject.from.info, to.info) else {
        return unreported(to.name);
    };
    if let Some(problem) = &there.qemu_problem {
        let evidence = format!("host {} has no usable QEMU: {problem}", to.name);
        return Found::fail(evidence, "fix that, or choose another host");
    }
    let (Some(here), Some(version)) = (&from.qemu_version, &there.qemu_version) else {
        return Found::unknown(
            "a host does not report the version of its QEMU",
            "see `godwit host show`",
        );
    };
    let evidence =
        format!("QEMU {here} on host {}, {version} on host {}", subject.from.name, to.name);
    match release(version) < release(here) {
        // docs/devel/migration of QEMU: an older version may not know what a newer one sends.
        true => Found::warn(
            format!("{evidence}: to an older QEMU"),
            "QEMU only guarantees migration to newer versions; upgrade the target first",
        ),
        false => Found::pass(evidence),
    }
}

/// Returns the major and minor number of a version.
fn release(version: &str) -> (u32, u32) {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

fn memory(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let Some(info) = to.info else { return unreported(to.name) };
    let (needed, left) = (subject.vm.info.memory_bytes, info.memory_available_bytes);
    let evidence = format!("it needs {}, host {} has {} left", Bytes(needed), to.name, Bytes(left));
    match left.checked_sub(needed) {
        Some(rest) if is_nearly_full(rest, info.memory_total_bytes) => {
            let total = Bytes(info.memory_total_bytes);
            let evidence = format!("{evidence} of {total}: it would be nearly full");
            Found::warn(evidence, NEARLY_FULL_REMEDY)
        }
        Some(_) => Found::pass(evidence),
        None => Found::fail(evidence, "choose another host, or move VMs off that one first"),
    }
}

fn huge_pages(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (Some(from), Some(there)) = (subject.from.info, to.info) else {
        return unreported(to.name);
    };
    match (from.huge_pages, there.huge_pages) {
        (true, false) => Found::warn(
            format!(
                "host {} backs guests with huge pages, host {} does not: it may be slower there",
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
    if let Some(wanted) = subject.disks.filter(|_| spec.disks.iter().any(|disk| !disk.readonly)) {
        return travelling::disks(subject, to, wanted);
    }
    let boot = spec.kernel.iter().chain(&spec.initrd).map(std::path::PathBuf::as_path);
    let paths: Vec<&Path> = spec.images().chain(boot).collect();
    if paths.is_empty() {
        return Found::pass("it has no disks");
    }
    let Some(info) = to.info else { return unreported(to.name) };
    let written = spec.disks.iter().filter(|disk| !disk.readonly).map(|disk| disk.path.as_path());
    let outside: Vec<String> = written
        .filter(|path| !travelling::is_for_vms(info, path))
        .map(|path| path.display().to_string())
        .collect();
    if !info.vm_dirs.is_empty() && !outside.is_empty() {
        return Found::warn(
            format!(
                "{} is below none of the vm_dirs that host {} opens for arriving guests",
                outside.join(", "),
                to.name
            ),
            "add its directory to vm_dirs in that host's configuration; \
             if a link leads there, request a prediction",
        );
    }
    let all: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let evidence =
        format!("only host {} can determine whether it sees {}", to.name, all.join(", "));
    Found::unknown(evidence, "request a prediction")
}

fn networks(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let nics = &subject.vm.info.spec.nics;
    if nics.is_empty() {
        return Found::pass("it has no network interface");
    }
    let Some(info) = to.info else { return unreported(to.name) };
    let mut wanted: Vec<&str> = nics.iter().map(|nic| nic.network.as_str()).collect();
    wanted.sort_unstable();
    wanted.dedup();
    let missing: Vec<&str> =
        wanted.iter().copied().filter(|name| !info.networks.contains_key(*name)).collect();
    if missing.is_empty() {
        return match lacks_for_nics(info, &subject.vm.info.spec) {
            Some(lack) => Found::fail(
                format!("host {}: {lack}", to.name),
                "change that there (docs/host.md, networks), or choose another host",
            ),
            None => Found::pass(format!("host {} has {}", to.name, wanted.join(", "))),
        };
    }
    Found::fail(
        format!("host {} has no network {}", to.name, missing.join(", ")),
        "add it to networks in that host's configuration, or choose another host",
    )
}

fn lanes(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (Some(from), Some(there)) = (subject.from.info, to.info) else {
        return unreported(to.name);
    };
    let addresses = &there.migration_addresses;
    if addresses.is_empty() {
        let evidence = format!("host {} has no address for migrations", to.name);
        return Found::fail(evidence, "set migration_addresses in its configuration");
    }
    let shown: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    let evidence = format!("host {} accepts migrations at {}", to.name, shown.join(", "));
    let shares = |address: &IpAddr| {
        from.migration_addresses.iter().any(|own| own.is_ipv4() == address.is_ipv4())
    };
    if !from.migration_addresses.is_empty() && !addresses.iter().any(shares) {
        let evidence = format!(
            "{evidence}; host {} has no address of the same family (IPv4, IPv6)",
            subject.from.name
        );
        return Found::warn(evidence, "configure addresses of the same family on both hosts");
    }
    Found::pass(evidence)
}

fn protocol(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (Some(from), Some(there)) = (subject.from.info, to.info) else {
        return unreported(to.name);
    };
    if from.version == there.version {
        return Found::pass(format!("both agents have version {}", there.version));
    }
    let evidence = format!(
        "agent {} on host {}, {} on host {}: they use the newest protocol that both support",
        from.version, subject.from.name, there.version, to.name
    );
    Found::warn(evidence, "request a prediction; upgrade the older agent")
}

fn limits(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (out, _) = subject.inventory.host_limits(subject.from.name);
    let (_, into) = subject.inventory.host_limits(to.name);
    let (out, into) = (u64::from(out), u64::from(into));
    let evidence = format!(
        "{} of {out} moves are leaving host {}, {} of {into} are arriving at host {}",
        subject.from.moves_out, subject.from.name, to.moves_in, to.name
    );
    match subject.from.moves_out < out && to.moves_in < into {
        true => Found::pass(evidence),
        false => Found::warn(format!("{evidence}: it would wait for its turn"), ""),
    }
}
