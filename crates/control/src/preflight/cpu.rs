//! Checks of CPU and accelerator: what the guest uses, and what the target offers.

use godwit_api::HostCpuInfo;
use godwit_planner::words::some_features;
use godwit_qemu::Accelerator;

use super::Subject;
use super::found::Found;
use crate::cluster::inventory::SeenHost;

pub(super) fn accelerator(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (accel, name) = (subject.vm.info.accel.as_str(), to.name);
    if accel != Accelerator::Kvm.name() {
        return Found::pass(format!("it uses {accel}, which host {name} supports too"));
    }
    let Some(info) = to.info else { return unreported(name) };
    match info.kvm {
        Some(true) => Found::pass(format!("it uses kvm, which host {name} supports")),
        Some(false) => {
            let why = info.kvm_reason.as_deref().unwrap_or("it gives no reason");
            Found::fail(
                format!("it uses kvm, and host {name} cannot run 64-bit guests with it: {why}"),
                "choose a host with KVM",
            )
        }
        None => Found::unknown(
            format!("host {name} has not tested KVM yet"),
            "wait: it does so within a minute of its start",
        ),
    }
}

pub(super) fn cpu(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let model = &subject.model;
    let (Some(from), Some(there)) = (subject.from.info, to.info) else {
        return unreported(to.name);
    };
    let accel = subject.vm.info.accel.as_str();
    let of =
        |cpu: &'_ Option<HostCpuInfo>| cpu.as_ref().is_some_and(|cpu| cpu.accel.name() == accel);
    let (Some(has), Some(gives)) = (&from.cpu, &there.cpu) else {
        let silent = if there.cpu.is_none() { (to.name, there) } else { (subject.from.name, from) };
        let why = silent.1.cpu_problem.as_deref().unwrap_or("its QEMU has not been queried yet");
        return Found::unknown(
            format!("host {} does not report the CPU features of guests: {why}", silent.0),
            "this is checked again when the VM arrives, before anything is created",
        );
    };
    if !of(&from.cpu) || !of(&there.cpu) {
        return Found::unknown(
            format!("it uses {accel}, for which a host does not report CPU features"),
            "this is checked again when the VM arrives, before anything is created",
        );
    }
    match gives.takes_over(model, has) {
        Ok(()) if model.is_hosts_own() => Found::warn(
            format!(
                "{model} differs by host; host {} has all features of host {}",
                to.name, subject.from.name
            ),
            "at its next start, use a versioned model or the cluster's baseline",
        ),
        Ok(()) => {
            Found::pass(format!("guests on host {} can have all features of {model}", to.name))
        }
        Err(unfit) => Found::fail(format!("host {}: {unfit}", to.name), unfit.remedy()),
    }
}

pub(super) fn baseline(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let Some(baseline) = subject.inventory.baseline() else {
        return Found::pass("the cluster has no baseline");
    };
    let Some(info) = to.info else { return unreported(to.name) };
    let (Some(_), Some(lacking)) = (&info.cpu, subject.inventory.lacks_of_baseline(to.name)) else {
        let evidence = format!("host {} does not report the CPU features of guests", to.name);
        return Found::unknown(evidence, "see `godwit host show` on that host");
    };
    if lacking.is_empty() {
        return Found::pass(format!("host {} has all features of {}", to.name, baseline.cpu_model));
    }
    Found::fail(
        format!(
            "host {} falls short of the cluster's baseline {}: it lacks {}",
            to.name,
            baseline.cpu_model,
            some_features(&lacking)
        ),
        "choose another host, or lower the baseline",
    )
}

pub(super) fn unreported(host: &str) -> Found {
    Found::unknown(format!("host {host} has not reported yet"), "wait for its first report")
}
