use proptest::prelude::*;

use super::*;

fn operations() -> impl Strategy<Value = Operation> {
    prop_oneof![
        Just(Operation::Start),
        any::<bool>().prop_map(|force| Operation::Stop { force }),
        any::<bool>().prop_map(|force| Operation::Delete { force }),
        Just(Operation::MigrateOut { migration: "m1".into() }),
        Just(Operation::EndMigration),
        Just(Operation::HoldInDoubt),
        Just(Operation::Release),
        Just(Operation::Change),
        Just(Operation::Settings),
        Just(Operation::Suspend),
        Just(Operation::LiveExport),
        Just(Operation::MakeTemplate),
        Just(Operation::EndTemplate),
        Just(Operation::Layer),
        Just(Operation::Copy),
        Just(Operation::Snapshot),
        Just(Operation::Reset),
        Just(Operation::Freeze),
        Just(Operation::Thaw),
        Just(Operation::Plug),
        Just(Operation::Restart),
        Just(Operation::RestartCrashed),
        Just(Operation::NoteEnd { of_migration: false }),
    ]
}

/// Conditions in which an agent may find a VM, beside stopped: each has a process.
fn found() -> impl Strategy<Value = Condition> {
    prop_oneof![
        Just(Condition::Adopting),
        Just(Condition::LacksPages { from: "a".into() }),
        Just(Condition::KeepsPages { to: "b".into() }),
        Just(Condition::InDoubt { keeps_pages_for: Some("b".into()) }),
    ]
}

/// Whether the operation loses nothing that exists in one place only, unless the operator
/// requests it.
fn is_harmless(before: &Condition, operation: &Operation) -> bool {
    use Operation as O;
    match before {
        // The process has ended, and with it what it had.
        _ if matches!(operation, O::NoteEnd { .. }) => true,
        Condition::Adopting => matches!(operation, O::Stop { force: true }),
        Condition::LacksPages { .. } => matches!(operation, O::Stop { .. }),
        Condition::KeepsPages { .. } => matches!(operation, O::HoldInDoubt | O::Release),
        Condition::InDoubt { keeps_pages_for: Some(_) } => {
            matches!(operation, O::Delete { force: true } | O::Release)
        }
        Condition::Suspended => {
            !matches!(operation, O::Stop { force: false } | O::Delete { force: false })
        }
        _ => true,
    }
}

/// Model of one host's knowledge of a VM, and the process that the operations create and end.
struct Model {
    condition: Condition,
    process: bool,
    runs: bool,
}

impl Model {
    /// Ends the operation in progress.
    fn settle(&mut self, works: bool) {
        if let Condition::Plugging(before) = &self.condition {
            self.condition = before.as_ref().clone();
            return;
        }
        match self.condition {
            Condition::Starting if works => {
                (self.condition, self.process, self.runs) = (Condition::Running, true, true);
            }
            Condition::Starting if self.process => self.condition = Condition::Paused,
            Condition::Starting | Condition::Changing => self.condition = Condition::Stopped,
            Condition::Copying(ref before) => self.condition = (**before).clone(),
            Condition::Suspending if works => {
                (self.condition, self.process, self.runs) = (Condition::Suspended, false, false);
            }
            Condition::Suspending => self.condition = Condition::Paused,
            Condition::Ending(_) => {
                (self.condition, self.process, self.runs) = (Condition::Failed, false, false);
            }
            Condition::Stopping | Condition::Deleting => {
                (self.condition, self.process, self.runs) = (Condition::Stopped, false, false);
            }
            _ => {}
        }
    }
}

proptest! {
    #[test]
    fn no_order_of_operations_runs_two_or_none(
        found in prop::option::of(found()),
        steps in prop::collection::vec((operations(), any::<bool>(), any::<bool>()), 1..60)
    ) {
        let (process, runs) = (found.is_some(), found == Some(Condition::Adopting));
        let mut vm = Model { condition: found.unwrap_or(Condition::Stopped), process, runs };
        for (operation, settle, works) in steps {
            let before = vm.condition.clone();
            let in_progress = matches!(
                vm.condition,
                Condition::Starting
                    | Condition::Stopping
                    | Condition::Deleting
                    | Condition::Changing
                    | Condition::Copying(_)
                    | Condition::Suspending
                    | Condition::Ending(_)
            );
            match vm.condition.admit("web", &operation) {
                Ok(next) => {
                    prop_assert!(!in_progress, "two operations at once");
                    prop_assert!(is_harmless(&before, &operation), "{before:?} {operation:?}");
                    if let Operation::Delete { .. } = operation {
                        prop_assert!(
                            !vm.process || before.is_in_doubt(),
                            "deleted a running guest"
                        );
                    }
                    if let Operation::MigrateOut { .. } = operation { prop_assert!(vm.process) }
                    if let Operation::Start = operation {
                        prop_assert!(
                            !vm.condition.is_in_doubt(),
                            "ran a guest that another host may run"
                        );
                    }
                    if let Operation::RestartCrashed = operation {
                        prop_assert!(before == Condition::Failed, "{before:?}");
                        prop_assert!(!vm.process && !vm.runs, "a second process");
                    }
                    if next.is_in_doubt() { vm.runs = false }
                    vm.condition = next;
                }
                Err(error) => prop_assert!(error.message.contains("web")),
            }
            if settle { vm.settle(works) }
            if vm.condition == Condition::Running { prop_assert!(vm.process) }
            if matches!(
                vm.condition,
                Condition::Stopped | Condition::Suspended | Condition::Failed
            ) {
                prop_assert!(!vm.process);
            }
        }
    }
}

#[test]
fn a_refusal_states_the_reason_and_the_remedy() {
    let migrating = Condition::MigratingOut { migration: "m7".into() };
    let error = migrating.admit("web", &Operation::Stop { force: true }).unwrap_err();
    assert_eq!(error.code, ErrorCode::Busy);
    assert!(
        error.to_string().contains("m7") && error.to_string().contains("migration cancel"),
        "{error}"
    );
    let error = Condition::Running.admit("web", &Operation::Start).unwrap_err();
    assert_eq!(error.code, ErrorCode::WrongState);
    let doubt = Condition::InDoubt { keeps_pages_for: None };
    let error = doubt.admit("web", &Operation::Start).unwrap_err();
    assert_eq!(error.code, ErrorCode::InDoubt);
    assert!(error.remedy.contains("`godwit migration resolve web --runs-on HOST`"), "{error}");
}

#[test]
fn pages_retained_for_another_host_are_not_lost_by_an_ordinary_operation() {
    let doubt = Condition::InDoubt { keeps_pages_for: Some("b".to_owned()) };
    for operation in [Operation::Start, Operation::Stop { force: true }] {
        let error = doubt.admit("web", &operation).unwrap_err();
        assert_eq!(error.code, ErrorCode::InDoubt);
        assert!(!error.remedy.contains("if it runs there, `godwit vm delete`"), "{error}");
        assert!(error.message.contains("host b") && error.remedy.contains("resolve"), "{error}");
    }
    let error = doubt.admit("web", &Operation::Delete { force: false }).unwrap_err();
    assert!(error.code == ErrorCode::InDoubt && error.remedy.contains("--force"), "{error}");
    doubt.admit("web", &Operation::Delete { force: true }).unwrap();
}

#[test]
fn a_possibly_only_copy_is_ended_only_with_force() {
    let doubt = Condition::InDoubt { keeps_pages_for: None };
    for operation in [Operation::Stop { force: false }, Operation::Delete { force: false }] {
        let error = doubt.admit("web", &operation).unwrap_err();
        assert!(error.code == ErrorCode::InDoubt && error.remedy.contains("--force"), "{error}");
    }
    assert_eq!(doubt.admit("web", &Operation::Stop { force: true }).unwrap(), Condition::Stopping);
    assert_eq!(
        doubt.admit("web", &Operation::Delete { force: true }).unwrap(),
        Condition::Deleting
    );
}

#[test]
fn a_proposed_remedy_is_admitted() {
    let doubt = |keeps_pages_for| Condition::InDoubt { keeps_pages_for };
    for (silent, stops) in
        [(doubt(Some("b".to_owned())), false), (doubt(None), true), (Condition::Failed, true)]
    {
        let remedy = silent.end_of_silent(42);
        assert_eq!(remedy.contains("vm stop --force"), stops, "{remedy}");
        assert_eq!(silent.admit("web", &Operation::Stop { force: true }).is_ok(), stops);
        assert_eq!(remedy.contains("kill -9 42"), !stops, "{remedy}");
    }
    for waits in [Condition::Adopting, Condition::LacksPages { from: "a".to_owned() }] {
        waits.admit("web", &Operation::Delete { force: true }).unwrap_err();
        assert!(!waits.remedy_for_name().contains("delete that"), "{waits:?}");
        waits.admit("web", &Operation::Start).unwrap_err();
        assert!(!waits.without("console", "web").remedy.contains("start"), "{waits:?}");
    }
    assert!(Condition::Stopped.without("console", "web").remedy.contains("start"));
}

#[test]
fn a_template_is_cloned_and_never_started_or_changed() {
    let template = Condition::Stopped.admit("gold", &Operation::MakeTemplate).unwrap();
    assert_eq!(template, Condition::Changing);
    let copying = Condition::Copying(Box::new(Condition::Template));
    assert!(copying.is_template() && copying.state() == VmState::Template);
    for operation in [
        Operation::Start,
        Operation::Change,
        Operation::Plug,
        Operation::Suspend,
        Operation::MigrateOut { migration: "m1".to_owned() },
    ] {
        let error = Condition::Template.admit("gold", &operation).unwrap_err();
        assert!(error.remedy.contains("--off"), "{error}");
        copying.admit("gold", &operation).unwrap_err();
    }
    let settings = Condition::Template.admit("gold", &Operation::Settings).unwrap();
    assert_eq!(settings.state(), VmState::Template);
    Condition::Suspended.admit("web", &Operation::Settings).unwrap();
    copying.admit("gold", &Operation::Settings).unwrap_err();
    let layer = Condition::Template.admit("gold", &Operation::Layer).unwrap();
    assert_eq!(layer, Condition::Template);
    for written in [Condition::Running, Condition::Stopped, Condition::Failed] {
        let error = written.admit("gold", &Operation::Layer).unwrap_err();
        assert!(error.remedy.contains("`godwit vm template gold`"), "{error}");
    }
}

#[test]
fn a_guest_that_lacks_pages_can_only_be_stopped() {
    let lacks = Condition::LacksPages { from: "a".to_owned() };
    for operation in [
        Operation::Start,
        Operation::Delete { force: true },
        Operation::MigrateOut { migration: "m1".to_owned() },
    ] {
        let error = lacks.admit("web", &operation).unwrap_err();
        assert!(error.message.contains("host a") && error.remedy.contains("restart"), "{error}");
        Condition::Adopting.admit("web", &operation).unwrap_err();
    }
    assert_eq!(lacks.admit("web", &Operation::Stop { force: false }).unwrap(), Condition::Stopping);
}

#[test]
fn a_reset_and_a_migration_do_not_begin_during_each_other() {
    let migrate = Operation::MigrateOut { migration: "m1".to_owned() };
    for running in [Condition::Running, Condition::Paused] {
        let resetting = running.admit("web", &Operation::Reset).unwrap();
        let error = resetting.admit("web", &migrate).unwrap_err();
        assert_eq!(error.code, ErrorCode::Busy);
        assert_eq!(resetting.shown(), &running);
        let leaving = running.admit("web", &migrate).unwrap();
        assert_eq!(leaving.admit("web", &Operation::Reset).unwrap_err().code, ErrorCode::Busy);
    }
}

#[test]
fn a_running_guest_with_a_silent_qemu_is_stopped_only_with_force() {
    let stop = |force| Condition::Adopting.admit("web", &Operation::Stop { force });
    let error = stop(false).unwrap_err();
    assert!(error.code == ErrorCode::Busy && error.remedy.contains("stop --force"), "{error}");
    assert_eq!(stop(true).unwrap(), Condition::Stopping);
}

#[test]
fn only_a_crash_is_followed_by_a_restart_of_the_policy() {
    let name = || "b".to_owned();
    assert_eq!(
        Condition::Failed.admit("web", &Operation::RestartCrashed).unwrap(),
        Condition::Starting
    );
    for other in [
        Condition::Stopped,
        Condition::Starting,
        Condition::Running,
        Condition::Paused,
        Condition::InDoubt { keeps_pages_for: None },
        Condition::InDoubt { keeps_pages_for: Some(name()) },
        Condition::KeepsPages { to: name() },
        Condition::LacksPages { from: name() },
        Condition::Adopting,
        Condition::Stopping,
        Condition::Deleting,
        Condition::Changing,
        Condition::Suspending,
        Condition::Suspended,
        Condition::Template,
        Condition::Copying(Box::new(Condition::Failed)),
        Condition::Plugging(Box::new(Condition::Running)),
        Condition::MigratingOut { migration: name() },
        Condition::MigratingIn { from: name() },
        Condition::Ending(Box::new(Condition::Running)),
    ] {
        let error = other.admit("web", &Operation::RestartCrashed).unwrap_err();
        assert!(error.message.contains("restarted"), "{other:?}: {error}");
    }
}
