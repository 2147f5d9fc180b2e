//! Whether a VM of an ended term may start, from what all hosts answer. Pure.
//!
//! A VM starts only if no host can have it: each host answers that it does not run it, its term has
//! ended, or its renewals rule it out. A host with none of this may have it by a move that the
//! manager has not heard of.

use godwit_api::{VmInfo, VmState};
use godwit_types::Incarnation;

use super::record::SavedVm;

/// Answer of a host to the question whether it has a VM.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Has(Box<VmInfo>),
    HasNot,
    /// The reason why there is none.
    Silent(String),
}

/// A host that was asked.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) host: String,
    pub(super) answer: Answer,
    /// Whether its term has ended, and none was opened since: no protected VM runs there.
    pub(super) is_over: bool,
    /// Whether it cannot have the VM, by all that its renewals have named (docs/ha-terms.md).
    pub(super) is_ruled_out: bool,
}

/// Where a VM is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Whereabouts {
    /// No host runs it, and none can. Some hosts have it without a process.
    Nowhere { left_at: Vec<(String, Incarnation)> },
    /// A host runs it, or is starting it.
    Runs { host: String, incarnation: Incarnation },
    /// Somebody stopped or suspended it on a host that it had moved to.
    Off { host: String, incarnation: Incarnation },
    /// It is unknown whether it runs.
    Unknown { why: String },
}

/// Decides where a VM is.
pub(super) fn whereabouts(vm: &SavedVm, asked: &[Asked]) -> Whereabouts {
    let (mut runs, mut off, mut left_at) = (Vec::new(), None, Vec::new());
    let mut unknown = None;
    let mut doubt = |why: String| {
        unknown.get_or_insert(why);
    };
    for Asked { host, answer, is_over, is_ruled_out } in asked {
        let info = match answer {
            Answer::HasNot => continue,
            Answer::Silent(_) if *is_over || *is_ruled_out => continue,
            Answer::Silent(why) => {
                doubt(format!("host {host} does not respond, and may run the VM: {why}"));
                continue;
            }
            Answer::Has(info) => info,
        };
        // An operator may have created the VM again, without its uuid.
        if vm.spec.uuid.is_some() && info.spec.uuid.is_some() && vm.spec.uuid != info.spec.uuid {
            if !info.state.is_off() {
                doubt(format!("host {host} runs another VM of that name"));
            }
            continue;
        }
        if info.in_doubt {
            doubt(format!("it is in doubt whether host {host} runs the VM"));
            continue;
        }
        let found = (host.clone(), info.incarnation);
        match info.state {
            VmState::MigratingIn => doubt(format!("the VM was arriving at host {host}")),
            VmState::Suspended | VmState::Template if is_same(vm, info) => off = Some(found),
            VmState::Stopped if *host != vm.host && is_same(vm, info) => off = Some(found),
            state if state.is_off() => left_at.push(found),
            _ => runs.push(found),
        }
    }
    if runs.len() > 1 {
        let hosts: Vec<&str> = runs.iter().map(|(host, _)| host.as_str()).collect();
        let why = format!("several hosts run the VM: {}", hosts.join(", "));
        return Whereabouts::Unknown { why };
    }
    match (runs.pop(), unknown, off) {
        (Some((host, incarnation)), ..) => Whereabouts::Runs { host, incarnation },
        (None, Some(why), _) => Whereabouts::Unknown { why },
        (None, None, Some((host, incarnation))) => Whereabouts::Off { host, incarnation },
        (None, None, None) => Whereabouts::Nowhere { left_at },
    }
}

/// Returns whether a report is of the life of the VM that is recorded.
fn is_same(vm: &SavedVm, info: &VmInfo) -> bool {
    let unrecorded = vm.incarnation.is_unrecorded() || info.incarnation.is_unrecorded();
    unrecorded || vm.incarnation == info.incarnation
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use godwit_qemu::{Uuid, VmSpec};
    use proptest::prelude::*;

    use super::*;
    use crate::rig;

    fn of_life(incarnation: u128, state: VmState, in_doubt: bool) -> Answer {
        let mut info = VmInfo {
            state,
            in_doubt,
            incarnation: Incarnation::new(incarnation),
            ..rig::vm("web", "a", None)
        };
        info.spec.uuid = Some(Uuid::from_u128(7));
        Answer::Has(Box::new(info))
    }

    fn answer() -> impl Strategy<Value = Answer> {
        let states = [
            VmState::Stopped,
            VmState::Starting,
            VmState::Running,
            VmState::Paused,
            VmState::Stopping,
            VmState::MigratingOut,
            VmState::MigratingIn,
            VmState::Failed,
            VmState::Suspended,
        ];
        let has = (1..3_u128, prop::sample::select(states.to_vec()), prop::bool::weighted(0.2))
            .prop_map(|(incarnation, state, in_doubt)| of_life(incarnation, state, in_doubt));
        prop_oneof![
            4 => Just(Answer::HasNot),
            2 => Just(Answer::Silent("no route to host".to_owned())),
            3 => has,
        ]
    }

    fn is_alive(asked: &Asked) -> bool {
        match &asked.answer {
            Answer::Has(info) => !info.state.is_off() || info.in_doubt,
            Answer::HasNot => false,
            Answer::Silent(_) => !asked.is_over && !asked.is_ruled_out,
        }
    }

    proptest! {
        #[test]
        fn a_vm_is_nowhere_only_if_no_host_can_run_it(
            answers in prop::collection::vec((answer(), any::<bool>(), any::<bool>()), 0..6),
        ) {
            let vm = SavedVm {
                spec: VmSpec { uuid: Some(Uuid::from_u128(7)), ..VmSpec::new("web") },
                incarnation: Incarnation::new(1),
                host: "h0".to_owned(),
                runs: true,
                datastores: BTreeMap::new(),
                restart: None,
            };
            let asked: Vec<Asked> = answers
                .into_iter()
                .enumerate()
                .map(|(n, (answer, is_over, is_ruled_out))| {
                    Asked { host: format!("h{n}"), answer, is_over, is_ruled_out }
                })
                .collect();
            let can_run = asked.iter().filter(|asked| is_alive(asked)).count();
            match whereabouts(&vm, &asked) {
                Whereabouts::Nowhere { left_at } => {
                    prop_assert_eq!(can_run, 0);
                    prop_assert!(left_at.iter().all(|(at, _)| at.starts_with('h')));
                }
                Whereabouts::Off { .. } => prop_assert_eq!(can_run, 0),
                Whereabouts::Runs { .. } | Whereabouts::Unknown { .. } => {
                    prop_assert!(can_run > 0);
                }
            }
        }
    }
}
