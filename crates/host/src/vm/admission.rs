//! Admission of operations: which operation may begin in which condition of a VM, and the condition
//! that follows. Pure: one table without I/O, so that tests can try every order of start, stop,
//! migrate and delete.
//!
//! An operation that cannot begin is refused at once with the reason; nothing queues. An operation
//! in progress is a condition of its own (`Starting`, `Stopping` and others), so two operations
//! never work on one VM.

use godwit_api::{ApiError, ErrorCode, VmState};

/// Condition of a VM in full detail; users see the [`VmState`] derived from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Defined, without a process.
    Stopped,
    /// A start is in progress.
    Starting,
    /// The guest runs.
    Running,
    /// The vCPUs are paused, but not by an operation.
    Paused,
    /// The vCPUs are paused because another host may run the guest.
    InDoubt {
        /// Host that is known to lack pages which only this host has.
        keeps_pages_for: Option<String>,
    },
    /// Another host may run the guest and fetches its pages from here; without them the guest is
    /// lost.
    KeepsPages {
        /// The host that fetches the pages.
        to: String,
    },
    /// Pages of the VM's memory are on another host and cannot be fetched, so it must not run.
    LacksPages {
        /// The host that has the pages.
        from: String,
    },
    /// A restarted agent has had no answer from the VM's QEMU yet, while pages of its memory are
    /// missing.
    Adopting,
    /// A stop is in progress, or the source releases the VM after a migration.
    Stopping,
    /// A deletion, or the removal of a shadow, is in progress.
    Deleting,
    /// A change of the specification is in progress.
    Changing,
    /// The guest is being saved to a file, or sent to another program.
    Suspending,
    /// Without a process; its memory and device state are in a file.
    Suspended,
    /// Never started: its images are bases of other disks, or will be.
    Template,
    /// Its images are being copied, frozen or merged; it is shown in its old condition.
    Copying(Box<Condition>),
    /// A change or a reset of a running VM is in progress; it is shown in its old condition.
    Plugging(Box<Condition>),
    /// A migration to another host is in progress.
    MigratingOut { migration: String },
    /// The VM is a shadow; its guest runs on another host.
    MigratingIn {
        /// The host that runs the guest.
        from: String,
    },
    /// The process has ended without a request.
    Failed,
    /// The process has ended, and this is being saved; until then, the VM is shown in its old
    /// condition.
    Ending(Box<Condition>),
}

/// Operation on a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Run the VM.
    Start,
    /// Run a VM again whose process has ended without a request, as its policy for crashes says.
    RestartCrashed,
    /// End the VM.
    Stop {
        /// End QEMU at once, even if it does not respond.
        force: bool,
    },
    /// Delete the VM.
    Delete {
        /// Also in doubt, when this host may have the only copy of the guest.
        force: bool,
    },
    /// Reset the guest, which returns to its condition.
    Reset,
    /// Freeze the guest's file systems.
    Freeze,
    /// Thaw the guest's file systems.
    Thaw,
    /// Stop the guest and start it again. Admission changes nothing; a stop and a start follow.
    Restart,
    /// Change the specification.
    Change,
    /// Change the settings of a suspended VM or a template: those that are no part of its machine.
    Settings,
    /// Make a stopped VM a template.
    MakeTemplate,
    /// Make a template an ordinary VM again.
    EndTemplate,
    /// Create a disk on top of a template's images. Admission changes nothing.
    Layer,
    /// Copy the images of a VM without a process.
    Copy,
    /// Take a snapshot of a VM without a process, revert it, or delete one.
    Snapshot,
    /// Save the guest to a file and end its process.
    Suspend,
    /// Give the running guest to another program, and end its process.
    LiveExport,
    /// Change the VM while it runs.
    Plug,
    /// Migrate the VM to another host.
    MigrateOut { migration: String },
    /// End a migration whose guest stays here.
    EndMigration,
    /// Hold the VM in doubt: the migration failed, and the guest's owner is unknown.
    HoldInDoubt,
    /// Continue here a guest that was handed over: no other host runs it.
    TakeBack,
    /// Release the guest, which now runs at the destination.
    Release,
    /// Promote a shadow whose guest now runs here.
    Promote,
    /// Discard a shadow that is not needed.
    Discard,
    /// Save that the process has ended without a request.
    NoteEnd {
        /// The migration that owned the VM is over, and the guest belonged to its source.
        of_migration: bool,
    },
}

impl Operation {
    fn verb(&self) -> &'static str {
        match self {
            Operation::Start => "started",
            Operation::Stop { .. } => "stopped",
            Operation::Delete { .. } => "deleted",
            Operation::Reset => "reset",
            Operation::Freeze => "frozen",
            Operation::Thaw => "thawed",
            Operation::Restart | Operation::RestartCrashed => "restarted",
            Operation::Change | Operation::Settings | Operation::Plug => "changed",
            Operation::MakeTemplate => "made a template",
            Operation::EndTemplate => "made an ordinary VM",
            Operation::Layer => "the base of a linked clone",
            Operation::Copy => "copied",
            Operation::Snapshot => "snapshotted or reverted",
            Operation::Suspend => "suspended",
            Operation::LiveExport => "exported while it runs",
            Operation::MigrateOut { .. } => "migrated",
            Operation::EndMigration | Operation::HoldInDoubt | Operation::Release => {
                "released by a migration"
            }
            Operation::TakeBack => "taken back",
            Operation::Promote => "promoted",
            Operation::Discard => "discarded",
            Operation::NoteEnd { .. } => "recorded as ended",
        }
    }

    /// Returns how an operator can carry out the operation in spite of the doubt.
    fn beyond_a_doubt(&self) -> &'static str {
        match self {
            Operation::Stop { .. } => {
                "; `--force` ends this host's copy, which may be the only one of its guest, and \
                 leaves the VM in doubt"
            }
            Operation::Delete { .. } => {
                "; `--force` gives up this host's copy, which may be the only one"
            }
            _ => "",
        }
    }
}

impl Condition {
    /// Returns the condition in which `operation` is in progress, or why it cannot begin.
    pub(crate) fn admit(&self, vm: &str, operation: &Operation) -> Result<Condition, ApiError> {
        use Condition as C;
        use Operation as O;
        Ok(match (self, operation) {
            (C::Stopped | C::Failed | C::Paused | C::Suspended, O::Start)
            // Never where an operator, a migration or a doubt has the VM.
            | (C::Failed, O::RestartCrashed)
            | (C::InDoubt { .. } | C::KeepsPages { .. }, O::TakeBack) => C::Starting,
            (C::Running | C::Paused | C::Failed | C::LacksPages { .. }, O::Stop { .. })
            | (
                C::Adopting | C::InDoubt { keeps_pages_for: None } | C::Suspended,
                O::Stop { force: true },
            ) => C::Stopping,
            (C::Stopped | C::Failed | C::Template, O::Delete { .. })
            | (C::InDoubt { .. } | C::Suspended, O::Delete { force: true })
            | (C::MigratingIn { .. }, O::Discard) => C::Deleting,
            (C::Running | C::Paused, O::Restart) => self.clone(),
            (C::Running, O::Freeze | O::Thaw) => self.clone(),
            (C::Stopped | C::Failed, O::Change | O::MakeTemplate)
            | (C::Template, O::EndTemplate) => C::Changing,
            (C::Template | C::Copying(_), O::Layer) if self.is_template() => self.clone(),
            (C::Suspended | C::Template, O::Settings)
            | (C::Stopped | C::Failed | C::Template, O::Copy)
            | (C::Stopped | C::Failed | C::Suspended, O::Snapshot) => {
                C::Copying(Box::new(self.clone()))
            }
            (C::Running, O::Suspend | O::LiveExport) => C::Suspending,
            // No migration begins meanwhile: a reset would stop or fail it halfway.
            (C::Running | C::Paused, O::Plug | O::Reset) => C::Plugging(Box::new(self.clone())),
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
                C::Running
                | C::Paused
                | C::Plugging(_)
                | C::LacksPages { .. }
                | C::Adopting
                | C::Failed,
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
        ApiError::new(code, format!("VM \"{vm}\" cannot be {verb}: {why}"), remedy)
    }

    /// Returns what prevents an operation, and the remedy.
    fn obstacle(&self, vm: &str, operation: &Operation) -> (ErrorCode, String, String) {
        let busy = |why: &str, remedy: &str| (ErrorCode::Busy, why.to_owned(), remedy.to_owned());
        let wrong = |remedy: &str| {
            (ErrorCode::WrongState, format!("it is {}", self.state()), remedy.to_owned())
        };
        match self {
            Condition::MigratingOut { migration: id } => busy(
                &format!("migration {id} is in progress"),
                &format!("wait until it ends, or cancel it with `godwit migration cancel {id}`"),
            ),
            Condition::MigratingIn { .. }
            | Condition::KeepsPages { .. }
            | Condition::LacksPages { .. }
            | Condition::Adopting
            | Condition::InDoubt { .. } => self.obstacle_elsewhere(vm, operation),
            Condition::Starting
            | Condition::Stopping
            | Condition::Deleting
            | Condition::Changing
            | Condition::Plugging(_)
            | Condition::Copying(_)
            | Condition::Suspending
            | Condition::Ending(_) => {
                let (why, remedy) = self.in_progress();
                busy(why, remedy)
            }
            Condition::Template if matches!(operation, Operation::MakeTemplate) => {
                wrong("nothing to do")
            }
            Condition::Template => (
                ErrorCode::WrongState,
                "it is a template".to_owned(),
                "clone it with `godwit vm clone`, or make it an ordinary VM with `godwit vm \
                 template --off`"
                    .to_owned(),
            ),
            Condition::Suspended => wrong(
                "resume it with `godwit vm resume`, or give its memory up with `godwit vm \
                     stop --force`",
            ),
            Condition::Running | Condition::Paused
                if matches!(
                    operation,
                    Operation::Delete { .. }
                        | Operation::Change
                        | Operation::MakeTemplate
                        | Operation::Copy
                        | Operation::Snapshot
                ) =>
            {
                wrong("stop it first")
            }
            Condition::Running | Condition::Paused | Condition::Stopped | Condition::Failed
                if matches!(operation, Operation::Layer) =>
            {
                no_template(vm)
            }
            Condition::Stopped | Condition::Paused
                if matches!(
                    operation,
                    Operation::Reset
                        | Operation::Restart
                        | Operation::Suspend
                        | Operation::LiveExport
                        | Operation::Freeze
                        | Operation::Thaw
                ) =>
            {
                wrong("start it")
            }
            Condition::Stopped if matches!(operation, Operation::Plug) => {
                wrong("change it with `godwit vm set`")
            }
            Condition::Stopped if matches!(operation, Operation::MigrateOut { .. }) => {
                wrong("start it first, or create it on the other host instead")
            }
            Condition::Running | Condition::Paused | Condition::Stopped => wrong("nothing to do"),
            Condition::Failed => {
                wrong("see `godwit vm show` for the reason; start it again, or stop or delete it")
            }
        }
    }

    /// Returns the operation that the agent itself makes of the VM, and the remedy.
    fn in_progress(&self) -> (&'static str, &'static str) {
        match self {
            Condition::Starting => ("a start is in progress", "wait until it ends"),
            Condition::Stopping => ("a stop is in progress", "wait until it ends"),
            Condition::Deleting => ("a deletion is in progress", ""),
            Condition::Copying(_) => ("its disks are being worked on", "wait until that ends"),
            Condition::Suspending => {
                ("its guest is being saved or sent away", "wait until that ends")
            }
            Condition::Ending(_) => ("its QEMU has just ended", "see `godwit vm show`, then retry"),
            Condition::Plugging(_) => (
                "a change is in progress, such as the move of a disk",
                "wait until it ends, or cancel the move",
            ),
            _ => ("a change is in progress", "wait until it ends"),
        }
    }

    /// Returns the obstacle of a VM whose guest, or part of its memory, is or may be on another
    /// host.
    fn obstacle_elsewhere(&self, vm: &str, operation: &Operation) -> (ErrorCode, String, String) {
        match self {
            Condition::MigratingIn { from } => (
                ErrorCode::Busy,
                format!("it is arriving from host {from}, where it still runs"),
                "wait until the migration ends; until then, use that host".to_owned(),
            ),
            Condition::KeepsPages { to } => (
                ErrorCode::Busy,
                format!("host {to} may run it and fetches its pages from here"),
                format!(
                    "wait until host {to} has them; if that host is permanently lost and powered \
                     off, the guest as it ran there is lost too: give it up with `godwit migration \
                     resolve {vm} --runs-on HOST`, with this host's name; a start then boots it \
                     from its disks"
                ),
            ),
            Condition::LacksPages { from } => (
                ErrorCode::WrongState,
                format!(
                    "pages of its memory are still on host {from} and cannot be fetched (`godwit \
                     vm show` shows why): it would run with zeros in their place"
                ),
                format!(
                    "fix that and restart this host's agent, which fetches them from host {from} \
                     and keeps the VM paused; `godwit vm stop --force` gives the guest up"
                ),
            ),
            Condition::InDoubt { keeps_pages_for: Some(to) } => (
                ErrorCode::InDoubt,
                format!(
                    "it was handed over to host {to}, and only this host has pages that it lacks \
                     there"
                ),
                format!(
                    "the agent queries host {to} until it answers: repair it or the link; if it is \
                     permanently lost, power it off, then run `godwit migration resolve {vm} \
                     --runs-on HOST` with this host's name{}",
                    operation.beyond_a_doubt()
                ),
            ),
            Condition::InDoubt { keeps_pages_for: None } => (
                ErrorCode::InDoubt,
                "the link or an agent was lost at its hand-over, and another host may run it"
                    .to_owned(),
                format!(
                    "the agent queries the other host until it answers: repair it or the link; if \
                     it is permanently lost, power it off, then run `godwit migration resolve {vm} \
                     --runs-on HOST` with this host's name{}",
                    operation.beyond_a_doubt()
                ),
            ),
            _ => (
                ErrorCode::Busy,
                "its QEMU has not responded since the agent's start: it may wait for a missing page"
                    .to_owned(),
                "wait for its pages, see `godwit vm show`; `godwit vm stop --force` ends it"
                    .to_owned(),
            ),
        }
    }

    /// Returns why the console or screen of a VM without a process in the table is unavailable.
    pub(crate) fn without(&self, what: &str, vm: &str) -> ApiError {
        let (why, remedy) = match self.is_being_adopted() {
            true => (
                "its QEMU has not responded since the agent's start".to_owned(),
                "wait until its pages arrive, see `godwit vm show`",
            ),
            false => (format!("it is {}", self.state()), "start it first"),
        };
        ApiError::new(ErrorCode::WrongState, format!("VM \"{vm}\" has no {what}: {why}"), remedy)
    }

    /// Returns how to end a QEMU that does not respond to this agent.
    pub(crate) fn end_of_silent(&self, pid: i32) -> String {
        match self {
            // An ordinary stop is refused: the retained pages would be lost.
            Condition::InDoubt { keeps_pages_for: Some(_) } => format!(
                "end it with `kill -9 {pid}`, then start the VM as before; `godwit vm delete \
                 --force` also ends it, and deletes the VM"
            ),
            _ => format!(
                "its guest may still run: check whether it serves its users, and whether the agent \
                 can see the files of process {pid} (another mount namespace hides them), and \
                 restart the agent; if the guest hangs, end it with `godwit vm stop --force`, then \
                 start the VM"
            ),
        }
    }

    /// Returns the remedy for a new VM whose name this VM already has.
    pub(crate) fn remedy_for_name(&self) -> &'static str {
        match self {
            Condition::Adopting | Condition::LacksPages { .. } | Condition::KeepsPages { .. } => {
                "use another name: that VM waits for pages, or retains them, and cannot be deleted \
                 meanwhile"
            }
            _ => "use another name, or delete that VM first",
        }
    }

    /// Returns the state that users see.
    #[must_use]
    pub(crate) fn state(&self) -> VmState {
        match self {
            Condition::Stopped | Condition::Changing => VmState::Stopped,
            Condition::Starting => VmState::Starting,
            // An adopted VM was handed over to this host, and nothing has stopped it.
            Condition::Running | Condition::Adopting => VmState::Running,
            Condition::Paused
            | Condition::InDoubt { .. }
            | Condition::KeepsPages { .. }
            | Condition::LacksPages { .. } => VmState::Paused,
            Condition::Stopping | Condition::Deleting | Condition::Suspending => VmState::Stopping,
            Condition::MigratingOut { .. } => VmState::MigratingOut,
            Condition::MigratingIn { .. } => VmState::MigratingIn,
            Condition::Failed => VmState::Failed,
            Condition::Suspended => VmState::Suspended,
            Condition::Template => VmState::Template,
            Condition::Ending(before)
            | Condition::Plugging(before)
            | Condition::Copying(before) => before.state(),
        }
    }

    /// Returns the condition behind the state that users see.
    pub(crate) fn shown(&self) -> &Condition {
        match self {
            Condition::Ending(before)
            | Condition::Plugging(before)
            | Condition::Copying(before) => before.shown(),
            condition => condition,
        }
    }

    /// Whether this host does not know which host may run the guest.
    #[must_use]
    pub(crate) fn is_in_doubt(&self) -> bool {
        matches!(self, Condition::InDoubt { .. })
    }

    /// Whether nobody may write the VM's images.
    #[must_use]
    pub(crate) fn is_template(&self) -> bool {
        *self.shown() == Condition::Template
    }

    /// Whether a starting agent may still learn the condition from QEMU. No migration arrives
    /// before that.
    #[must_use]
    pub(crate) fn is_being_adopted(&self) -> bool {
        matches!(
            self,
            Condition::Adopting | Condition::LacksPages { .. } | Condition::MigratingIn { .. }
        )
    }

    /// Whether memory is reserved for the VM.
    #[must_use]
    pub(crate) fn holds_memory(&self) -> bool {
        !matches!(
            self,
            Condition::Stopped
                | Condition::Changing
                | Condition::Failed
                | Condition::Suspended
                | Condition::Template
                | Condition::Copying(_)
        )
    }

    /// Whether an operation in progress ends the process or has not created it yet, so that its end
    /// is expected.
    #[must_use]
    pub(crate) fn expects_exit(&self) -> bool {
        matches!(
            self,
            Condition::Starting
                | Condition::Stopping
                | Condition::Deleting
                | Condition::Changing
                | Condition::Suspending
                | Condition::Suspended
                | Condition::Stopped
                | Condition::Template
                | Condition::Copying(_)
                | Condition::Ending(_)
        )
    }
}

/// Describes why no disk is layered on a VM's images: a base may never be written again.
fn no_template(vm: &str) -> (ErrorCode, String, String) {
    let why = "only a template's images are never written again".to_owned();
    let remedy = format!(
        "stop it and make it a template with `godwit vm template {vm}`, or make a full clone \
         (`--full`)"
    );
    (ErrorCode::WrongState, why, remedy)
}

#[cfg(test)]
mod tests;
