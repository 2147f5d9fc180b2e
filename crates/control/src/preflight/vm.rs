//! What keeps a VM from going anywhere.

use godwit_api::VmState;
use godwit_api::control::CheckName;
use godwit_qemu::untrackable_parts;
use godwit_types::{EngineKind, Fault};

use super::{Found, Subject};

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
            "make sure of it, then `godwit migration resolve {} --runs-on HOST`",
            info.name
        );
        return Found::fail("it is in doubt which host may run it", remedy);
    }
    if !vm.is_current {
        let remedy = "see that its agent runs and can be reached";
        return Found::unknown(
            format!("host {host} is not heard; it told last that it is {}", info.state),
            remedy,
        );
    }
    if let Some(page_in) = &info.page_in {
        let missing = page_in.missing_pages;
        if page_in.connected {
            let evidence = format!("{missing} pages of it are still at the host that it came from");
            return Found::fail(evidence, "wait until it has them all");
        }
        let evidence = format!(
            "{missing} pages of it are still at the host that it came from, and it has no connection to that one"
        );
        let remedy = "bring that host's agent back, or the link to it; where that host is gone for good the guest is lost";
        return Found::fail(evidence, remedy);
    }
    match info.state {
        VmState::Running | VmState::Paused => match vm.planned_move {
            Some(planned) => Found::warn(
                format!("move {planned} has it already"),
                "wait for its end, or cancel it",
            ),
            None => Found::pass(format!("{} on host {host}", info.state)),
        },
        VmState::MigratingIn | VmState::MigratingOut => {
            Found::fail("a migration has it", "wait for its end, or cancel it")
        }
        VmState::Starting => Found::fail("it starts at the moment", "ask again in a moment"),
        state => {
            let evidence = format!("it does not run ({state}): there is nothing to move");
            let remedy = format!(
                "it stays with its host; to take it along start it: `godwit vm start {}`",
                info.name
            );
            Found::fail(evidence, remedy)
        }
    }
}

fn devices(subject: &Subject<'_>) -> Found {
    let spec = &subject.vm.info.spec;
    let obstacles = untrackable_parts(&spec.memory, &spec.extra_devices);
    let Some(Fault { remedy, .. }) = obstacles.first() else {
        return Found::pass("no device and no memory that can't move");
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
        return Found::pass("QEMU's own engine tracks by itself");
    }
    match subject.from.info {
        None => Found::unknown(
            format!("host {host} has told nothing of itself yet"),
            "wait until it is heard",
        ),
        Some(info) => match &info.tracking_problem {
            Some(problem) => Found::fail(
                format!("host {host} can't track memory: {problem}"),
                "remedy that, or use --engine qemu",
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
            "its specification refuses it: where the guest writes faster than the lanes carry, it is slowed, or the move fails",
            "ask for a prediction; move it when it writes less",
        ),
        false => Found::pass("its specification allows it; the move's own request decides"),
    }
}
