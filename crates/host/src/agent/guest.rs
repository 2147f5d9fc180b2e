//! What the agent asks of the agent in a guest: addresses and names, the freeze of file systems,
//! and the time after a move.
//!
//! A frozen guest is never forgotten. The freeze is noted before the guest is asked for it, and a
//! task thaws the guest at the noted time, or as soon as the guest answers again. An agent that
//! starts takes over the notes of the one before. A move thaws the guest first, and its destination
//! thaws what is still frozen.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use godwit_api::{
    ApiError, DEFAULT_FREEZE_MS, ErrorCode, FreezeVm, GuestInfo, GuestNic, MOST_FREEZE_MS, VmInfo,
};
use godwit_qemu::{GuestAgent, GuestAgentError, GuestFacts, VmName};

use crate::agent::Agent;
use crate::failure::host_failed;
use crate::vm::{Condition, Operation, Vm};
use crate::whole::whole;

/// Interval at which a guest that does not answer is asked again to thaw.
const THAW_AGAIN: Duration = Duration::from_secs(5);
/// Longest delay of a migration by the thaw of its guest.
const THAW_BEFORE_MOVE_LIMIT: Duration = Duration::from_secs(10);

impl Agent {
    /// Asks the guest's agent for addresses and names. A guest that does not answer is a result,
    /// too.
    pub(crate) async fn guest_info(&self, name: &str) -> Result<GuestInfo, ApiError> {
        let without =
            |problem: String| GuestInfo { problem: Some(problem), ..GuestInfo::default() };
        let vm = {
            let table = self.table();
            let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
            // The port of a shadow is left alone.
            slot.vm.clone().filter(|_| !matches!(slot.condition, Condition::MigratingIn { .. }))
        };
        let Some(vm) = vm else { return Ok(without("the VM does not run here".to_owned())) };
        let Some(agent) = &vm.guest.agent else {
            return Ok(without("the VM has no port for a guest agent (guest_agent)".to_owned()));
        };
        match agent.facts().await {
            Ok(facts) => Ok(described(facts)),
            Err(error) => Ok(without(format!("the guest agent cannot be asked: {error}"))),
        }
    }

    /// Freezes the guest's file systems until [`Agent::thaw`], or for the time of the request.
    pub(crate) async fn freeze(
        self: &Arc<Self>,
        name: &VmName,
        request: FreezeVm,
    ) -> Result<VmInfo, ApiError> {
        let for_ms = request.for_ms.unwrap_or(DEFAULT_FREEZE_MS);
        if !(1..=MOST_FREEZE_MS).contains(&for_ms) {
            return Err(ApiError::new(
                ErrorCode::InvalidRequest,
                format!("cannot freeze a guest for {for_ms} ms"),
                "give 1 ms to 10 minutes",
            ));
        }
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let (vm, guest) = agent.guest_of(&name, &Operation::Freeze)?;
            // The guest is frozen no longer than asked for, however long the freeze itself takes.
            let until_ms = now_ms().saturating_add(for_ms);
            let note = || {
                let noted = vm.guest.note_freeze(until_ms);
                noted.map_err(|error| host_failed("cannot record the freeze of a guest", &error))
            };
            if !note()? {
                let message = format!("cannot freeze VM \"{name}\": it is frozen");
                let remedy = format!("thaw it first: `godwit vm thaw {name}`");
                return Err(ApiError::new(ErrorCode::WrongState, message, remedy));
            }
            match guest.freeze().await {
                Ok(_) => {
                    // A migration may have thawed the guest just before, and removed the note.
                    note()?;
                    agent.thaw_in_time(&vm);
                }
                Err(error) => {
                    agent.undo_freeze(&vm, &guest, error).await;
                    return Err(not_done("freeze", &name, error));
                }
            }
            tracing::info!(vm = name.as_str(), for_ms, "file systems of the guest frozen");
            agent.vm_info(&name)
        })
        .await
    }

    /// Ends a freeze that failed, at once or as soon as the guest answers.
    async fn undo_freeze(
        self: &Arc<Self>,
        vm: &Arc<Vm>,
        guest: &GuestAgent,
        error: GuestAgentError,
    ) {
        if error.is_unsent() || guest.thaw().await.is_ok() {
            vm.guest.note_thaw();
        } else {
            self.thaw_in_time(vm);
        }
    }

    /// Thaws the guest's file systems. Has no effect on a guest that is not frozen.
    pub(crate) async fn thaw(self: &Arc<Self>, name: &VmName) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let (vm, guest) = agent.guest_of(&name, &Operation::Thaw)?;
            guest.thaw().await.map_err(|error| not_done("thaw", &name, error))?;
            vm.guest.note_thaw();
            tracing::info!(vm = name.as_str(), "file systems of the guest thawed");
            agent.vm_info(&name)
        })
        .await
    }

    /// Returns a running VM and its guest's agent.
    fn guest_of(
        &self,
        name: &VmName,
        operation: &Operation,
    ) -> Result<(Arc<Vm>, GuestAgent), ApiError> {
        let vm = self.begin(name, operation)?.vm;
        let found = vm.and_then(|vm| vm.guest.agent.clone().map(|guest| (vm, guest)));
        found.ok_or_else(|| {
            ApiError::new(
                ErrorCode::WrongState,
                format!("VM \"{name}\" has no guest agent"),
                format!(
                    "stop it, `godwit vm set {name} --guest-agent`, start it, and install \
                     qemu-guest-agent in the guest"
                ),
            )
        })
    }

    /// Thaws a guest that is noted as frozen when its time is over. Ends when it is thawed, or with
    /// its process.
    pub(super) fn thaw_in_time(self: &Arc<Self>, vm: &Arc<Vm>) {
        let Some(guest) = vm.guest.agent.clone() else { return vm.guest.note_thaw() };
        let vm = vm.clone();
        tokio::spawn(async move {
            let ended = vm.process.exited();
            let thawing = async {
                while let Some(until_ms) = vm.guest.frozen_until_ms() {
                    let left_ms = until_ms.saturating_sub(now_ms()).min(MOST_FREEZE_MS);
                    if left_ms > 0 {
                        tokio::time::sleep(Duration::from_millis(left_ms)).await;
                        continue;
                    }
                    match guest.thaw().await {
                        Ok(()) => {
                            vm.guest.note_thaw();
                            tracing::warn!(
                                vm = vm.name.as_str(),
                                "guest thawed: its freeze took too long"
                            );
                        }
                        Err(error) => {
                            let vm = vm.name.as_str();
                            tracing::warn!(vm, %error, "cannot thaw a frozen guest; retrying");
                            tokio::time::sleep(THAW_AGAIN).await;
                        }
                    }
                }
            };
            tokio::select! {
                () = thawing => {}
                _ = ended => {}
            }
        });
    }

    /// Before a migration: thaws a guest that is noted as frozen.
    pub(crate) async fn thaw_before_move(&self, vm: &Vm) {
        let (Some(guest), Some(_)) = (&vm.guest.agent, vm.guest.frozen_until_ms()) else { return };
        match tokio::time::timeout(THAW_BEFORE_MOVE_LIMIT, guest.thaw()).await {
            Ok(Ok(())) => vm.guest.note_thaw(),
            // It is thawed at the destination, or here at the noted time.
            _ => tracing::warn!(vm = vm.name.as_str(), "cannot thaw a guest before its migration"),
        }
    }

    /// At the destination, once the guest runs here: corrects its clock, and thaws it if it was
    /// frozen. The migration does not wait for this.
    pub(super) fn greet_arrived_guest(vm: &Arc<Vm>) {
        let Some(guest) = vm.guest.agent.clone() else { return };
        let vm = vm.clone();
        tokio::spawn(async move {
            let name = vm.name.as_str();
            match guest.is_frozen().await {
                Ok(true) => match guest.thaw().await {
                    Ok(()) => tracing::warn!(vm = name, "guest thawed: it arrived frozen"),
                    Err(error) => tracing::warn!(vm = name, %error, "cannot thaw a guest"),
                },
                Ok(false) | Err(GuestAgentError::Refused { .. }) => {}
                Err(error) => {
                    return tracing::info!(vm = name, %error, "guest agent cannot be asked");
                }
            }
            match guest.correct_clock().await {
                Ok(true) => tracing::info!(vm = name, "clock of the arrived guest set"),
                Ok(false) => {}
                Err(error) => tracing::info!(vm = name, %error, "clock of a guest not checked"),
            }
        });
    }
}

fn now_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

fn described(facts: GuestFacts) -> GuestInfo {
    let nic = |interface: godwit_qemu::GuestInterface| GuestNic {
        name: interface.name,
        mac: interface.mac,
        addresses: interface
            .addresses
            .into_iter()
            .map(|(address, prefix)| format!("{address}/{prefix}"))
            .collect(),
    };
    GuestInfo {
        answers: true,
        problem: None,
        agent_version: facts.agent_version,
        host_name: facts.host_name,
        os: facts.os,
        kernel: facts.kernel,
        interfaces: facts.interfaces.into_iter().map(nic).collect(),
    }
}

fn not_done(what: &str, name: &VmName, error: GuestAgentError) -> ApiError {
    ApiError::new(
        ErrorCode::HypervisorFailed,
        format!("cannot {what} VM \"{name}\": its guest agent: {error}"),
        "check that qemu-guest-agent runs in the guest",
    )
}
