//! CPU and accelerator: what a guest has, and what it would find.

use godwit_api::HostCpuInfo;
use godwit_planner::words::some_features;
use godwit_qemu::Accelerator;

use super::{Found, Subject};
use crate::cluster::inventory::SeenHost;

pub(super) fn accelerator(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let (accel, name) = (subject.vm.info.accel.as_str(), to.name);
    if accel != Accelerator::Kvm.name() {
        return Found::pass(format!("it runs by {accel}, as it would on host {name}"));
    }
    let Some(info) = to.info else { return untold(name) };
    match info.kvm {
        Some(true) => Found::pass(format!("it runs by kvm, which host {name} has")),
        Some(false) => {
            let why = info.kvm_reason.as_deref().unwrap_or("it does not say why");
            Found::fail(
                format!("it runs by kvm, and host {name} runs no 64-bit guest by it: {why}"),
                "take a host with KVM",
            )
        }
        None => Found::unknown(
            format!("host {name} has not tried KVM yet"),
            "it does within a minute of its start",
        ),
    }
}

pub(super) fn cpu(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let model = &subject.model;
    let (Some(from), Some(there)) = (subject.from.info, to.info) else { return untold(to.name) };
    let accel = subject.vm.info.accel.as_str();
    let of =
        |cpu: &'_ Option<HostCpuInfo>| cpu.as_ref().is_some_and(|cpu| cpu.accel.name() == accel);
    let (Some(has), Some(gives)) = (&from.cpu, &there.cpu) else {
        let silent = if there.cpu.is_none() { (to.name, there) } else { (subject.from.name, from) };
        let why = silent.1.cpu_problem.as_deref().unwrap_or("its QEMU has not been asked yet");
        return Found::unknown(
            format!("host {} does not say what CPU guests can have: {why}", silent.0),
            "it is checked again when the VM arrives, before anything is made",
        );
    };
    if !of(&from.cpu) || !of(&there.cpu) {
        return Found::unknown(
            format!("it runs by {accel}, and what CPU guests get by that is not told"),
            "it is checked again when the VM arrives, before anything is made",
        );
    }
    match gives.takes_over(model, has) {
        Ok(()) if model.is_hosts_own() => Found::warn(
            format!(
                "{model} is each host's own; host {} has all that host {} has",
                to.name, subject.from.name
            ),
            "give it a model in a fixed version, or the cluster's baseline, when it is started next",
        ),
        Ok(()) => Found::pass(format!("guests on host {} can have all of {model}", to.name)),
        Err(unfit) => Found::fail(format!("host {}: {unfit}", to.name), unfit.remedy()),
    }
}

pub(super) fn baseline(subject: &Subject<'_>, to: SeenHost<'_>) -> Found {
    let Some(baseline) = subject.inventory.baseline() else {
        return Found::pass("the cluster has none");
    };
    let Some(info) = to.info else { return untold(to.name) };
    let (Some(_), Some(lacking)) = (&info.cpu, subject.inventory.lacks_of_baseline(to.name)) else {
        let evidence = format!("host {} does not say what CPU guests can have", to.name);
        return Found::unknown(evidence, "see `godwit host show` there");
    };
    if lacking.is_empty() {
        return Found::pass(format!("host {} has all of {}", to.name, baseline.cpu_model));
    }
    Found::fail(
        format!(
            "host {} falls short of the cluster's baseline {}: it lacks {}",
            to.name,
            baseline.cpu_model,
            some_features(&lacking)
        ),
        "take another host, or lower the baseline",
    )
}

pub(super) fn untold(host: &str) -> Found {
    Found::unknown(format!("host {host} has told nothing of itself yet"), "wait until it is heard")
}
