//! Which operation may begin in which condition of a VM, and what becomes of it. Pure: one table, no I/O, so that
//! tests can try every order of start, stop, migrate and delete.
//!
//! An operation that can't begin is refused at once with the reason; nothing queues. What is under way is a
//! condition of its own (`Starting`, `Stopping`, …), so two operations never work on one VM.

use godwit_api::{ApiError, ErrorCode, VmState};

/// What a VM is doing, in full; [`VmState`] is what users see of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Defined, no process.
    Stopped,
    /// A start is under way.
    Starting,
    /// The guest runs.
    Running,
    /// The vCPUs stand still, by nobody's operation.
    Paused,
    /// The vCPUs stand still because it is not known whether another host runs the guest.
    InDoubt {
        /// The host that lacks pages of it which are here, as far as is known.
        keeps_pages_for: Option<String>,
    },
    /// Another host runs the guest, or may, and fetches pages of it from here: without them the guest is lost.
    KeepsPages {
        /// That host.
        to: String,
    },
    /// Pages of its memory are missing, which are at another host, and can't be fetched: it must not run.
    LacksPages {
        /// That host.
        from: String,
    },
    /// An agent that was started anew has not heard from its QEMU yet, while pages of its memory are missing.
    Adopting,
    /// A stop is under way, or the source lets go after a move.
    Stopping,
    /// A deletion is under way, or a shadow is being removed.
    Deleting,
    /// A migration to another host has it.
    MigratingOut { migration: String },
    /// It is a shadow; its guest runs on another host.
    MigratingIn {
        /// That host.
        from: String,
    },
    /// The process is gone and nobody asked for it.
    Failed,
    /// The process is gone, and that is being saved: until it is, the VM is shown as it was.
    Ending(Box<Condition>),
}

/// What somebody wants to do with a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Run it.
    Start,
    /// End it; `force`: at once, also where its QEMU says nothing.
    Stop {
        /// Nobody is asked.
        force: bool,
    },
    /// Forget it; `force`: also in doubt, where what is here may be the only copy of its guest.
    Delete {
        /// What is here is given up.
        force: bool,
    },
    /// Move it to another host.
    MigrateOut { migration: String },
    /// The migration is over and the guest stays.
    EndMigration,
    /// The migration broke off where nobody knows who may run the guest.
    HoldInDoubt,
    /// The guest that was handed over goes on here: no other host runs it.
    TakeBack,
    /// The guest runs at the destination now.
    Release,
    /// The guest runs here now.
    Promote,
    /// The shadow is not needed.
    Discard,
    /// Its process has ended by itself, and that is to be saved.
    NoteEnd {
        /// The migration that had it is over, and the guest was its source's.
        of_migration: bool,
    },
}

impl Operation {
    fn verb(&self) -> &'static str {
        match self {
            Operation::Start => "started",
            Operation::Stop { .. } => "stopped",
            Operation::Delete { .. } => "deleted",
            Operation::MigrateOut { .. } => "migrated",
            Operation::EndMigration | Operation::HoldInDoubt | Operation::Release => {
                "let go by a migration"
            }
            Operation::TakeBack => "taken back",
            Operation::Promote => "taken over",
            Operation::Discard => "discarded",
            Operation::NoteEnd { .. } => "noted as ended",
        }
    }

    /// What else an operator can do who means this operation all the same.
    fn beyond_a_doubt(&self) -> &'static str {
        match self {
            Operation::Stop { .. } => {
                "; `--force` ends what is here, which may be all that there is of its guest, and the doubt stays"
            }
            Operation::Delete { .. } => {
                "; `--force` gives up what is here, which may be all that there is of it"
            }
            _ => "",
        }
    }
}

impl Condition {
    /// The condition in which `operation` is under way, or why it can't begin.
    pub(crate) fn admit(&self, vm: &str, operation: &Operation) -> Result<Condition, ApiError> {
        use Condition as C;
        use Operation as O;
        Ok(match (self, operation) {
            (C::Stopped | C::Failed | C::Paused, O::Start)
            | (C::InDoubt { .. } | C::KeepsPages { .. }, O::TakeBack) => C::Starting,
            (C::Running | C::Paused | C::Failed | C::LacksPages { .. }, O::Stop { .. })
            | (C::Adopting | C::InDoubt { keeps_pages_for: None }, O::Stop { force: true }) => {
                C::Stopping
            }
            (C::Stopped | C::Failed, O::Delete { .. })
            | (C::InDoubt { .. }, O::Delete { force: true })
            | (C::MigratingIn { .. }, O::Discard) => C::Deleting,
            (C::Running | C::Paused, O::MigrateOut { migration }) => {
                C::MigratingOut { migration: migration.clone() }
            }
            (C::MigratingOut { .. }, O::EndMigration) | (C::MigratingIn { .. }, O::Promote) => {
                C::Running
            }
            (
                C::MigratingOut { .. } | C::MigratingIn { .. } | C::KeepsPages { .. },
                O::HoldInDoubt,
            ) => C::InDoubt { keeps_pages_for: None },
            (
                C::MigratingOut { .. } | C::KeepsPages { .. } | C::InDoubt { .. } | C::Failed,
                O::Release,
            ) => C::Stopping,
            (
                C::Running | C::Paused | C::LacksPages { .. } | C::Adopting | C::Failed,
                O::NoteEnd { of_migration: false },
            )
            | (C::MigratingOut { .. }, O::NoteEnd { of_migration: true }) => {
                C::Ending(Box::new(self.clone()))
            }
            _ => return Err(self.refusal(vm, operation)),
        })
    }

    fn refusal(&self, vm: &str, operation: &Operation) -> ApiError {
        let verb = operation.verb();
        let (code, why, remedy) = self.obstacle(vm, operation);
        ApiError::new(code, format!("VM \"{vm}\" can't be {verb}: {why}"), remedy)
    }

    /// What keeps an operation from beginning, and what to do about it.
    fn obstacle(&self, vm: &str, operation: &Operation) -> (ErrorCode, String, String) {
        let busy = |why: &str, remedy: &str| (ErrorCode::Busy, why.to_owned(), remedy.to_owned());
        let wrong = |remedy: &str| {
            (ErrorCode::WrongState, format!("it is {}", self.state()), remedy.to_owned())
        };
        match self {
            Condition::MigratingOut { migration } => busy(
                &format!("migration {migration} has it"),
                &format!(
                    "wait for its end, or cancel it with `godwit migration cancel {migration}`"
                ),
            ),
            Condition::MigratingIn { from } => busy(
                &format!("it is arriving from host {from}, which runs it"),
                "wait for the migration's end; until then act on that host",
            ),
            Condition::KeepsPages { .. }
            | Condition::LacksPages { .. }
            | Condition::Adopting
            | Condition::InDoubt { .. } => self.obstacle_elsewhere(vm, operation),
            Condition::Starting => busy("a start is under way", "wait for it"),
            Condition::Stopping => busy("a stop is under way", "wait for it"),
            Condition::Deleting => busy("a deletion is under way", ""),
            Condition::Ending(_) => {
                busy("it has just ended by itself", "see `godwit vm show`, then try again")
            }
            Condition::Running | Condition::Paused
                if matches!(operation, Operation::Delete { .. }) =>
            {
                wrong("stop it first")
            }
            Condition::Stopped if matches!(operation, Operation::MigrateOut { .. }) => {
                wrong("start it first; a stopped VM is created on the other host instead")
            }
            Condition::Running | Condition::Paused | Condition::Stopped => wrong("nothing to do"),
            Condition::Failed => wrong(
                "see `godwit vm show` for what happened; start it again, or stop or delete it",
            ),
        }
    }

    /// The obstacle where the guest, or some of its memory, is or may be at another host.
    fn obstacle_elsewhere(&self, vm: &str, operation: &Operation) -> (ErrorCode, String, String) {
        match self {
            Condition::KeepsPages { to } => (
                ErrorCode::Busy,
                format!("host {to} runs it, or may, and fetches pages of it from here"),
                format!(
                    "wait until host {to} has them; if that host is gone for good and powered off, so is the guest as it ran there: `godwit migration resolve {vm} --runs-on HOST`, with this host's name, gives it up, and a start boots it from its disks"
                ),
            ),
            Condition::LacksPages { from } => (
                ErrorCode::WrongState,
                format!(
                    "pages of its memory are still at host {from} and can't be fetched (`godwit vm show` says why): it would run on with zeros in their place"
                ),
                format!(
                    "remedy that and restart this host's agent, which fetches them from host {from} and keeps the VM paused; `godwit vm stop --force` gives the guest up"
                ),
            ),
            Condition::InDoubt { keeps_pages_for: Some(to) } => (
                ErrorCode::InDoubt,
                format!(
                    "it was handed over to host {to}, and pages that the guest lacks there are here alone"
                ),
                format!(
                    "host {to} is asked until it answers: repair it or the link; if it is gone for good, power it off, then `godwit migration resolve {vm} --runs-on HOST` with this host's name{}",
                    operation.beyond_a_doubt()
                ),
            ),
            Condition::InDoubt { keeps_pages_for: None } => (
                ErrorCode::InDoubt,
                "the link or an agent was lost at its hand-over, and another host may run it".to_owned(),
                format!(
                    "the other host is asked until it answers: repair it or the link; if it is gone for good, power it off, then `godwit migration resolve {vm} --runs-on HOST` with this host's name{}",
                    operation.beyond_a_doubt()
                ),
            ),
            _ => (
                ErrorCode::Busy,
                "its QEMU has not answered since the agent's start: it may wait for a page that is missing"
                    .to_owned(),
                "wait until its pages come, see `godwit vm show`; `godwit vm stop --force` ends it"
                    .to_owned(),
            ),
        }
    }

    /// Why nobody speaks with the guest of a VM that has no process in the table.
    pub(crate) fn without_console(&self, vm: &str) -> ApiError {
        let (why, remedy) = match self.is_being_adopted() {
            true => (
                "its QEMU has not answered since the agent's start".to_owned(),
                "wait until its pages come, see `godwit vm show`",
            ),
            false => (format!("it is {}", self.state()), "start it first"),
        };
        ApiError::new(ErrorCode::WrongState, format!("VM \"{vm}\" has no console: {why}"), remedy)
    }

    /// How a QEMU is ended that says nothing to this agent.
    pub(crate) fn end_of_silent(&self, pid: i32) -> String {
        match self {
            // A stop in passing is refused: pages would go with it.
            Condition::InDoubt { keeps_pages_for: Some(_) } => format!(
                "end it with `kill -9 {pid}`, then start the VM as before; `godwit vm delete --force` ends it too, and forgets the VM"
            ),
            _ => format!(
                "its guest may run all the same: see whether it answers its users, and whether the agent sees process {pid}'s files (another mount namespace hides them), and restart the agent; if the guest hangs, end it with `godwit vm stop --force`, then start the VM"
            ),
        }
    }

    /// What to do for a VM whose name this one has.
    pub(crate) fn mend_of_name(&self) -> &'static str {
        match self {
            Condition::Adopting | Condition::LacksPages { .. } | Condition::KeepsPages { .. } => {
                "take another name: that VM waits for pages, or keeps them, and is not deleted meanwhile"
            }
            _ => "take another name, or delete that VM first",
        }
    }

    /// What users see.
    #[must_use]
    pub(crate) fn state(&self) -> VmState {
        match self {
            Condition::Stopped => VmState::Stopped,
            Condition::Starting => VmState::Starting,
            // It was handed over, and nobody has stopped it.
            Condition::Running | Condition::Adopting => VmState::Running,
            Condition::Paused
            | Condition::InDoubt { .. }
            | Condition::KeepsPages { .. }
            | Condition::LacksPages { .. } => VmState::Paused,
            Condition::Stopping | Condition::Deleting => VmState::Stopping,
            Condition::MigratingOut { .. } => VmState::MigratingOut,
            Condition::MigratingIn { .. } => VmState::MigratingIn,
            Condition::Failed => VmState::Failed,
            Condition::Ending(before) => before.state(),
        }
    }

    /// The condition that users see.
    pub(crate) fn shown(&self) -> &Condition {
        match self {
            Condition::Ending(before) => before.shown(),
            condition => condition,
        }
    }

    /// Whether nobody here knows who may run it.
    #[must_use]
    pub(crate) fn is_in_doubt(&self) -> bool {
        matches!(self, Condition::InDoubt { .. })
    }

    /// Whether an agent's start may still learn from its QEMU what it is. No migration arrives before that.
    #[must_use]
    pub(crate) fn is_being_adopted(&self) -> bool {
        matches!(
            self,
            Condition::Adopting | Condition::LacksPages { .. } | Condition::MigratingIn { .. }
        )
    }

    /// Whether memory is set aside for it.
    #[must_use]
    pub(crate) fn holds_memory(&self) -> bool {
        !matches!(self, Condition::Stopped | Condition::Failed)
    }

    /// Whether an operation is under way that ends the process, or has not made it yet: its end is no news then.
    #[must_use]
    pub(crate) fn expects_exit(&self) -> bool {
        matches!(
            self,
            Condition::Starting
                | Condition::Stopping
                | Condition::Deleting
                | Condition::Stopped
                | Condition::Ending(_)
        )
    }
}

#[cfg(test)]
mod tests {
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
        ]
    }

    /// What a VM may be found as, beside a stopped one: each has a process.
    fn found() -> impl Strategy<Value = Condition> {
        prop_oneof![
            Just(Condition::Adopting),
            Just(Condition::LacksPages { from: "a".into() }),
            Just(Condition::KeepsPages { to: "b".into() }),
            Just(Condition::InDoubt { keeps_pages_for: Some("b".into()) }),
        ]
    }

    /// Whether nothing is lost by it that is in one place alone, but by the operator's word.
    fn is_harmless(before: &Condition, operation: &Operation) -> bool {
        use Operation as O;
        match before {
            Condition::Adopting => matches!(operation, O::Stop { force: true }),
            Condition::LacksPages { .. } => matches!(operation, O::Stop { .. }),
            Condition::KeepsPages { .. } => matches!(operation, O::HoldInDoubt | O::Release),
            Condition::InDoubt { keeps_pages_for: Some(_) } => {
                matches!(operation, O::Delete { force: true } | O::Release)
            }
            _ => true,
        }
    }

    /// What one host knows of a VM, with the process that the operations would make and end.
    struct Model {
        condition: Condition,
        process: bool,
        runs: bool,
    }

    impl Model {
        /// Ends what is under way.
        fn settle(&mut self, works: bool) {
            match self.condition {
                Condition::Starting if works => {
                    (self.condition, self.process, self.runs) = (Condition::Running, true, true);
                }
                Condition::Starting if self.process => self.condition = Condition::Paused,
                Condition::Starting => self.condition = Condition::Stopped,
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
                let under_way = matches!(
                    vm.condition,
                    Condition::Starting | Condition::Stopping | Condition::Deleting
                );
                match vm.condition.admit("web", &operation) {
                    Ok(next) => {
                        prop_assert!(!under_way, "two operations at once");
                        prop_assert!(is_harmless(&before, &operation), "{before:?} {operation:?}");
                        if let Operation::Delete { .. } = operation {
                            prop_assert!(!vm.process || before.is_in_doubt(), "deleted a guest that runs");
                        }
                        if let Operation::MigrateOut { .. } = operation { prop_assert!(vm.process) }
                        if let Operation::Start = operation {
                            prop_assert!(!vm.condition.is_in_doubt(), "ran a guest that another host may run");
                        }
                        if next.is_in_doubt() { vm.runs = false }
                        vm.condition = next;
                    }
                    Err(error) => prop_assert!(error.message.contains("web")),
                }
                if settle { vm.settle(works) }
                if vm.condition == Condition::Running { prop_assert!(vm.process) }
                if vm.condition == Condition::Stopped { prop_assert!(!vm.process) }
            }
        }
    }

    #[test]
    fn a_refusal_tells_the_reason_and_the_mend() {
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
    fn what_keeps_pages_for_another_host_is_not_thrown_away_in_passing() {
        let doubt = Condition::InDoubt { keeps_pages_for: Some("b".to_owned()) };
        for operation in [Operation::Start, Operation::Stop { force: true }] {
            let error = doubt.admit("web", &operation).unwrap_err();
            assert_eq!(error.code, ErrorCode::InDoubt);
            assert!(!error.remedy.contains("if it runs there, `godwit vm delete`"), "{error}");
            assert!(
                error.message.contains("host b") && error.remedy.contains("resolve"),
                "{error}"
            );
        }
        let error = doubt.admit("web", &Operation::Delete { force: false }).unwrap_err();
        assert!(error.code == ErrorCode::InDoubt && error.remedy.contains("--force"), "{error}");
        doubt.admit("web", &Operation::Delete { force: true }).unwrap();
    }

    #[test]
    fn what_may_be_the_only_copy_is_not_ended_in_passing() {
        let doubt = Condition::InDoubt { keeps_pages_for: None };
        for operation in [Operation::Stop { force: false }, Operation::Delete { force: false }] {
            let error = doubt.admit("web", &operation).unwrap_err();
            assert!(
                error.code == ErrorCode::InDoubt && error.remedy.contains("--force"),
                "{error}"
            );
        }
        assert_eq!(
            doubt.admit("web", &Operation::Stop { force: true }).unwrap(),
            Condition::Stopping
        );
        assert_eq!(
            doubt.admit("web", &Operation::Delete { force: true }).unwrap(),
            Condition::Deleting
        );
    }

    #[test]
    fn what_a_refusal_proposes_is_admitted() {
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
            assert!(!waits.mend_of_name().contains("delete that"), "{waits:?}");
            waits.admit("web", &Operation::Start).unwrap_err();
            assert!(!waits.without_console("web").remedy.contains("start"), "{waits:?}");
        }
        assert!(Condition::Stopped.without_console("web").remedy.contains("start"));
    }

    #[test]
    fn a_guest_that_lacks_pages_is_ended_and_nothing_else() {
        let lacks = Condition::LacksPages { from: "a".to_owned() };
        for operation in [
            Operation::Start,
            Operation::Delete { force: true },
            Operation::MigrateOut { migration: "m1".to_owned() },
        ] {
            let error = lacks.admit("web", &operation).unwrap_err();
            assert!(
                error.message.contains("host a") && error.remedy.contains("restart"),
                "{error}"
            );
            Condition::Adopting.admit("web", &operation).unwrap_err();
        }
        assert_eq!(
            lacks.admit("web", &Operation::Stop { force: false }).unwrap(),
            Condition::Stopping
        );
    }

    #[test]
    fn a_guest_that_runs_is_not_killed_in_passing_because_its_qemu_says_nothing() {
        let stop = |force| Condition::Adopting.admit("web", &Operation::Stop { force });
        let error = stop(false).unwrap_err();
        assert!(error.code == ErrorCode::Busy && error.remedy.contains("stop --force"), "{error}");
        assert_eq!(stop(true).unwrap(), Condition::Stopping);
    }
}
