//! Checks of the VM alone.

use godwit_api::VmState;
use godwit_api::control::CheckName;
use godwit_qemu::{kept_by_agents, unmovable_disks, untrackable_parts};
use godwit_types::{EngineKind, Fault};

use super::Subject;
use super::found::Found;

type OfVm = fn(&Subject<'_>) -> Found;

pub(super) const CHECKS: [(CheckName, OfVm); 4] = [
    (CheckName::VmState, state),
    (CheckName::Devices, devices),
    (CheckName::Tracking, tracking),
    (CheckName::PageIn, page_in),
];

fn state(subject: &Subject<'_>) -> Found {
    let (vm, info) = (&subject.vm, subject.vm.info);
    let host = subject.from.name;
    if vm.in_doubt {
        let remedy = format!(
            "find out which host runs it, then `godwit migration resolve {} --runs-on HOST`",
            info.name
        );
        return Found::fail("it is in doubt which host runs it", remedy);
    }
    if !vm.is_current {
        let remedy = "check that its agent runs and is reachable";
        return Found::unknown(
            format!("host {host} is unreachable; it last reported the VM as {}", info.state),
            remedy,
        );
    }
    if let Some(page_in) = &info.page_in {
        let missing = page_in.missing_pages;
        if page_in.connected {
            let evidence = format!("{missing} of its pages are still on the host that it left");
            return Found::fail(evidence, "wait until all pages have arrived");
        }
        let evidence = format!(
            "{missing} of its pages are still on the host that it left, which is not connected"
        );
        let remedy = "restore that host's agent or the link to it; \
            if that host is gone for good, the guest is lost";
        return Found::fail(evidence, remedy);
    }
    if info.snapshots > 0 {
        let evidence = format!("it has snapshots on host {host}: {}", info.snapshots);
        return Found::fail(evidence, "delete them first: `godwit vm snapshot list`");
    }
    match info.state {
        VmState::Running | VmState::Paused if info.spec.protect_by_agents => {
            let Fault { message, remedy, .. } = kept_by_agents(&info.name);
            Found::fail(message, remedy)
        }
        VmState::Running | VmState::Paused => match vm.planned_move {
            Some(planned) => Found::warn(
                format!("it already has move {planned}"),
                "wait for its end, or cancel it",
            ),
            None => Found::pass(format!("{} on host {host}", info.state)),
        },
        VmState::MigratingIn | VmState::MigratingOut => {
            Found::fail("a migration of it is in progress", "wait for its end, or cancel it")
        }
        VmState::Starting => Found::fail("it is starting", "try again in a moment"),
        state => {
            let evidence = format!("it does not run ({state}): there is nothing to move");
            let remedy = format!(
                "to move it, start it first: `godwit vm start {}`; otherwise it stays on its host",
                info.name
            );
            Found::fail(evidence, remedy)
        }
    }
}

fn devices(subject: &Subject<'_>) -> Found {
    let spec = &subject.vm.info.spec;
    let unmovable = unmovable_disks(spec.disks.iter().map(|disk| (disk.path.as_path(), disk.bus)));
    if let Some(Fault { message, remedy, .. }) = unmovable.into_iter().next() {
        return Found::fail(message, remedy);
    }
    let obstacles = untrackable_parts(&spec.memory, &spec.extra_devices);
    let Some(Fault { remedy, .. }) = obstacles.first() else {
        return Found::pass("all devices and memory can move");
    };
    let all: Vec<&str> = obstacles.iter().map(|obstacle| obstacle.message.as_str()).collect();
    match subject.engine {
        EngineKind::Godwit => Found::fail(all.join("; "), remedy.clone()),
        EngineKind::Qemu => {
            Found::warn(format!("left to QEMU's own engine: {}", all.join("; ")), "")
        }
    }
}

fn tracking(subject: &Subject<'_>) -> Found {
    let host = subject.from.name;
    if subject.engine == EngineKind::Qemu {
        return Found::pass("QEMU's own engine tracks memory itself");
    }
    match subject.from.info {
        None => {
            Found::unknown(format!("host {host} has not reported yet"), "wait for its first report")
        }
        Some(info) => match &info.tracking_problem {
            Some(problem) => Found::fail(
                format!("host {host} cannot track memory: {problem}"),
                "fix that, or use --engine qemu",
            ),
            None => Found::pass(format!("host {host}, kernel {}", info.kernel)),
        },
    }
}

fn page_in(subject: &Subject<'_>) -> Found {
    if subject.engine == EngineKind::Qemu {
        return Found::pass("QEMU's own engine decides");
    }
    match subject.vm.info.spec.refuses_page_in {
        true => Found::warn(
            "its specification refuses it: if the guest writes faster than the lanes carry, \
             the guest is slowed or the move fails",
            "request a prediction; move it when it writes less",
        ),
        false => Found::pass("its specification allows it; the request of the move decides"),
    }
}
