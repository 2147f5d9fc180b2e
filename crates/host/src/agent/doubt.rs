//! VMs in doubt: this host does not know which host owns the guest. The agent queries the other
//! host of the hand-over until that host knows, or an operator decides.
//! [`godwit_migration::handover`] decides what follows from the answer.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode, Resolve, Resolved};
use godwit_migration::handover::{
    Known, OfDestination, OfSource, Role, Standing, of_destination, of_source,
};
use godwit_qemu::{Uuid, VmName};
use godwit_types::Incarnation;

use crate::agent::{Agent, Begun};
use crate::peer_record::{ask_known, of_life};
use crate::references::References;
use crate::state_stream::undo_hand_over;
use crate::store::{Desired, SavedVm};
use crate::vm::{Condition, Operation, Vm};
use crate::whole::whole;

/// First and longest interval between two queries. A host that is down may be down for hours.
const ASK_AGAIN: Duration = Duration::from_millis(300);
const ASK_AGAIN_MOST: Duration = Duration::from_secs(5);

/// Time limit for removing a shadow. It exceeds every limit for interrupted migrations, so no
/// shadow lives longer.
const FORGET_LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Time for a migration to end after its QEMU has been ended.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Result of an attempt to settle a doubt.
enum Settled {
    /// The VM is still in doubt.
    Open,
    /// The doubt is over.
    Over,
}

impl Agent {
    /// Returns this host's record of a VM's ownership, for another host that asks.
    ///
    /// # Errors
    /// [`ErrorCode::HostFailed`]: the disk cannot be read, so the owner is unknown.
    pub fn known(
        &self,
        name: &VmName,
        uuid: Uuid,
        incarnation: Incarnation,
    ) -> Result<Known, ApiError> {
        let known = tokio::task::block_in_place(|| self.store.known(name, uuid, incarnation))?;
        Ok(match known {
            Known::Never => self.known_of_adoption(uuid, incarnation).unwrap_or(Known::Never),
            known => known,
        })
    }

    /// Queries the other host of a VM in doubt until it knows, and carries out what follows. Runs
    /// in its own task, one for each VM; the task also ends when something else settles the doubt.
    pub(crate) fn settle_doubt(self: &Arc<Self>, name: &VmName) {
        let (agent, name) = (self.clone(), name.to_owned());
        let Some(identity) = self.table().get(&name).map(|slot| slot.identity.clone()) else {
            return;
        };
        tokio::spawn(async move {
            let mut wait = ASK_AGAIN;
            loop {
                let in_doubt = {
                    let table = agent.table();
                    table.get(&name).is_some_and(|slot| {
                        Arc::ptr_eq(&slot.identity, &identity) && slot.condition.is_in_doubt()
                    })
                };
                if !in_doubt {
                    return;
                }
                match agent.try_settle(&name).await {
                    Ok(Settled::Over) => return,
                    Ok(Settled::Open) => {}
                    Err(error) => {
                        tracing::warn!(vm = name.as_str(), %error, "cannot settle the doubt yet");
                    }
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(ASK_AGAIN_MOST);
            }
        });
    }

    /// Removes what a failed migration created at a destination that may not know of the failure.
    /// Runs in its own task until that host has answered, another migration has begun, or the
    /// shadow has certainly expired.
    pub(crate) fn forget_at(self: &Arc<Self>, vm: &Vm, to: String) {
        let (agent, name) = (self.clone(), vm.name.clone());
        let (uuid, incarnation) = (vm.spec().uuid, vm.incarnation);
        let asking = async move {
            let migrates = || {
                let table = agent.table();
                let condition = table.get(&name).map(|slot| &slot.condition);
                matches!(condition, Some(Condition::MigratingOut { .. }))
            };
            let mut wait = ASK_AGAIN;
            while agent.peer(&to).is_ok() && !migrates() {
                if agent.forget_once(&to, &name, uuid, incarnation).await {
                    return;
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(ASK_AGAIN_MOST);
            }
        };
        tokio::spawn(async move {
            let _ = tokio::time::timeout(FORGET_LIMIT, asking).await;
        });
    }

    /// Removes what a migration of an earlier agent created at `to`, for a VM that this host owns.
    /// Runs in its own task until that host has answered or another migration has begun.
    pub(super) fn undo_migration(self: &Arc<Self>, name: &VmName, to: String) {
        let (agent, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            let mut wait = ASK_AGAIN;
            loop {
                let record = agent.record(&name).filter(|record| record.role == Role::Owner);
                let is_free = matches!(
                    agent.table().get(&name).map(|slot| &slot.condition),
                    Some(
                        Condition::Running
                            | Condition::Paused
                            | Condition::Stopped
                            | Condition::Failed
                    )
                );
                let Some(record) = record.filter(|record| is_free && record.other.is_some()) else {
                    return;
                };
                if agent.peer(&to).is_err() {
                    return;
                }
                if agent.forget_once(&to, &name, record.spec.uuid, record.incarnation).await {
                    tracing::info!(
                        vm = name.as_str(),
                        to,
                        "undone: a migration that the previous agent had in progress"
                    );
                    let undone = SavedVm { other: None, ..record.clone() };
                    if let Err(error) = agent.save_over(Some(&record), &undone) {
                        tracing::warn!(vm = name.as_str(), %error, "cannot save the undo");
                    }
                    return;
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(ASK_AGAIN_MOST);
            }
        });
    }

    /// Asks the host `to` once to remove what it has of a guest that is not committed there.
    /// Returns whether it answered.
    pub(in crate::agent) async fn forget_once(
        &self,
        to: &str,
        name: &VmName,
        uuid: Uuid,
        incarnation: Incarnation,
    ) -> bool {
        let Ok(peer) = self.peer(to) else { return false };
        let which = of_life(uuid, incarnation);
        let path = format!("/v1/hand-overs/{name}?from={}&{which}", self.config.name);
        matches!(tokio::time::timeout(ASK_AGAIN_MOST, peer.delete(&path)).await, Ok(Ok(())))
    }

    async fn try_settle(self: &Arc<Self>, name: &VmName) -> Result<Settled, ApiError> {
        let Some(record) = self.read_record(name)? else { return Ok(Settled::Over) };
        let Some(other) = record.other.clone() else { return Ok(Settled::Over) };
        let peer = self.peer(&other.name)?;
        let known = ask_known(&peer, name, record.spec.uuid, record.incarnation).await?;
        tracing::debug!(
            vm = name.as_str(),
            host = other.name,
            ?known,
            "queried the other host of a hand-over"
        );
        match record.role {
            Role::HandingOver => match of_destination(known, record.ownership().offered()) {
                OfDestination::Took => return self.let_go(name, &record).await,
                OfDestination::Refused => self.take_back(name, record, true).await?,
                OfDestination::Open => {
                    // It may wait for a lane of an agent that has ended. A destination that may run
                    // the guest at any moment is left alone.
                    if matches!(known, Known::Has(Standing { role: Role::Shadow, .. })) {
                        self.forget_once(&other.name, name, record.spec.uuid, record.incarnation)
                            .await;
                    }
                    return Ok(Settled::Open);
                }
            },
            Role::TakingOver => match of_source(known, record.ownership()) {
                OfSource::TookBack => self.forget_shadow(name).await?,
                OfSource::LetGo => self.own_what_is_gone(name, record).await?,
                OfSource::Open => return Ok(Settled::Open),
            },
            Role::Owner | Role::Shadow | Role::Stranded => {}
        }
        Ok(Settled::Over)
    }

    /// Applies an operator's decision on a VM in doubt. The operator has verified it on the other
    /// host, or has fenced that host.
    pub async fn resolve_doubt(
        self: &Arc<Self>,
        name: &VmName,
        word: Resolve,
    ) -> Result<Resolved, ApiError> {
        let (agent, name) = (self.clone(), name.to_owned());
        whole(async move {
            let not_in_doubt = |agent: &Agent| match agent.vm_info(&name) {
                Err(unknown) => unknown,
                Ok(info) => {
                    let message = format!(
                        "cannot resolve VM \"{name}\": it is {}, and not in doubt",
                        info.state
                    );
                    ApiError::new(ErrorCode::WrongState, message, "nothing needs to be resolved")
                }
            };
            agent.end_page_in_of_the_gone(&name, &word).await;
            let open = matches!(
                agent.table().get(&name).map(|slot| &slot.condition),
                Some(Condition::InDoubt { .. } | Condition::KeepsPages { .. })
            );
            let record =
                agent.record(&name).filter(|_| open).ok_or_else(|| not_in_doubt(&agent))?;
            let here = agent.decide(&name, &record, &word)?;
            tracing::warn!(
                vm = name.as_str(),
                runs_on = word.runs_on,
                "an operator decided which host runs the guest"
            );
            match (record.role, here) {
                (Role::HandingOver, true) => {
                    agent.take_back(&name, record, word.keep_memory).await?;
                }
                (Role::HandingOver, false) => agent.give_up(&name).await?,
                (Role::TakingOver | Role::Stranded, true) => {
                    agent.own_what_is_gone(&name, record).await?;
                }
                (Role::TakingOver | Role::Stranded, false) => agent.forget_shadow(&name).await?,
                (Role::Owner | Role::Shadow, _) => return Err(not_in_doubt(&agent)),
            }
            Ok(Resolved { vm: agent.vm_info(&name).ok() })
        })
        .await
    }

    /// Ends a migration that would retain pages forever for a guest whose host is gone: ending its
    /// QEMU here ends it.
    async fn end_page_in_of_the_gone(&self, name: &VmName, word: &Resolve) {
        let kept = self.record(name).is_some_and(|record| record.pages_kept_for().is_some());
        if !kept || word.keep_memory || word.runs_on != self.config.name {
            return;
        }
        let migrates = || {
            let table = self.table();
            let slot = table.get(name)?;
            slot.vm.clone().filter(|_| matches!(slot.condition, Condition::MigratingOut { .. }))
        };
        let Some(vm) = migrates() else { return };
        vm.process.kill().await;
        let mut poll = tokio::time::interval(ASK_AGAIN);
        let ended = async {
            while migrates().is_some() {
                poll.tick().await;
            }
        };
        let _ = tokio::time::timeout(END_LIMIT, ended).await;
    }

    /// Whether an operator's decision names this host. It may also name the other host of the
    /// hand-over, but no third.
    fn decide(&self, name: &VmName, record: &SavedVm, word: &Resolve) -> Result<bool, ApiError> {
        let here = word.runs_on == self.config.name;
        let other = record.other.as_ref().map(|other| &*other.name);
        if here || other.is_none_or(|other| other == word.runs_on) {
            return Ok(here);
        }
        let other = other.unwrap_or_default();
        let message = format!(
            "cannot resolve VM \"{name}\" to host {}: it was being handed over between hosts {} \
             and {other}",
            word.runs_on, self.config.name
        );
        let remedy = "name one of these two hosts";
        Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
    }

    /// Whether this process retains pages for another host.
    pub(crate) fn keeps_pages(&self, vm: &Arc<Vm>) -> bool {
        self.table().get(&vm.name).is_some_and(|slot| {
            matches!(slot.condition, Condition::KeepsPages { .. })
                && slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm))
        })
    }

    /// Releases a guest that the destination has.
    async fn let_go(
        self: &Arc<Self>,
        name: &VmName,
        record: &SavedVm,
    ) -> Result<Settled, ApiError> {
        if record.pages_kept_for().is_some() {
            if self.vm(name)?.is_some() {
                // The task that serves the pages asks whether they are still needed.
                self.serve_what_is_kept(name);
                return Ok(Settled::Over);
            }
            if self.places.vm(name).living_process().is_some() {
                // The process holds the pages and has not answered this agent yet
                // ([`Agent::find_again`]).
                return Ok(Settled::Open);
            }
        }
        tracing::info!(vm = name.as_str(), "doubt settled: the destination has the guest");
        self.give_up(name).await.map(|()| Settled::Over)
    }

    /// Removes what is left of a guest that another host owns.
    async fn give_up(self: &Arc<Self>, name: &VmName) -> Result<(), ApiError> {
        match self.vm(name)? {
            Some(vm) => self.release(&vm, None).await,
            None => {
                let begun = self.begin(name, &Operation::Release)?;
                if let Err(error) = self.note_gone(&begun) {
                    self.settle(name, begun.before, begun.vm, begun.reason);
                    return Err(error);
                }
                self.remove_remains(name, begun).await
            }
        }
    }

    /// Removes a VM without a process from the table, or restores its entry on failure.
    async fn remove_remains(self: &Arc<Self>, name: &VmName, begun: Begun) -> Result<(), ApiError> {
        let gone = async {
            self.end_stray(name).await?;
            // swtpm writes beside the record.
            self.places.vm(name).end_tpm();
            Ok::<_, ApiError>(tokio::task::block_in_place(|| self.store.remove(name))?)
        };
        self.end_deletion(name, begun, gone.await)
    }

    /// Takes back a guest that the destination does not have: it continues here, in a new epoch.
    /// Without `keep_memory`, its process is ended first.
    async fn take_back(
        self: &Arc<Self>,
        name: &VmName,
        record: SavedVm,
        keep_memory: bool,
    ) -> Result<(), ApiError> {
        let mut begun = self.begin(name, &Operation::TakeBack)?;
        if !keep_memory && let Some(vm) = begun.vm.take() {
            vm.process.kill().await;
            vm.files.remove_runtime();
            References::withdraw(&vm);
        }
        let ownership = record.ownership().taken_back();
        let epoch = ownership.epoch;
        let runs = record.other.as_ref().is_none_or(|other| other.runs);
        let Some(vm) = begun.vm.clone() else {
            return self.take_back_ended(name, record, begun).await;
        };
        // The guest resumes first: a restarted agent that finds it running knows that this host
        // owns it.
        if let Err(error) = undo_hand_over(&vm, runs).await {
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        self.new_epoch(&vm, epoch);
        let mine = SavedVm::new(record.spec.clone(), Role::Owner, Desired::Running, ownership);
        let saved = self.save_over(Some(&record), &mine);
        tracing::info!(vm = name.as_str(), epoch, "doubt settled: the guest continues here");
        let condition = if runs { Condition::Running } else { Condition::Paused };
        self.settle(name, condition, Some(Arc::clone(&vm)), None);
        if let Err(error) = saved {
            tracing::error!(vm = name.as_str(), %error, "cannot save the take-back; retrying");
            tokio::spawn(self.clone().save_in_the_end(vm, Some(record)));
        }
        Ok(())
    }

    /// Takes back a guest whose process has ended meanwhile. The guest has ended with it and can be
    /// started again.
    async fn take_back_ended(
        self: &Arc<Self>,
        name: &VmName,
        record: SavedVm,
        begun: Begun,
    ) -> Result<(), ApiError> {
        let ownership = record.ownership().taken_back();
        let epoch = ownership.epoch;
        if let Some(silent) = self.silent_process(name, &begun) {
            self.settle(name, begun.before, None, begun.reason);
            return Err(silent);
        }
        if let Err(error) = self.save(&record.spec, Role::Owner, record.desired, ownership) {
            self.settle(name, begun.before, None, begun.reason);
            return Err(error);
        }
        if let Some(slot) = self.table().get_mut(name) {
            slot.ownership = ownership;
        }
        tracing::info!(
            vm = name.as_str(),
            epoch,
            "doubt settled: this host owns the guest, and its QEMU has ended"
        );
        let reason =
            "its QEMU ended during its hand-over, and no other host runs it: start it again";
        let (condition, reason) = match record.desired {
            Desired::Running => (Condition::Failed, Some(reason.to_owned())),
            // A suspended VM and a template have no hand-over.
            Desired::Stopped | Desired::Suspended | Desired::Template => (Condition::Stopped, None),
        };
        self.settle(name, condition, None, reason);
        Ok(())
    }

    /// Returns the error for a VM that cannot be decided on because its QEMU lives and does not
    /// answer.
    fn silent_process(&self, name: &VmName, begun: &Begun) -> Option<ApiError> {
        let (pid, _) = self.places.vm(name).living_process()?;
        let message = format!("QEMU of VM \"{name}\" (process {pid}) does not answer");
        Some(ApiError::new(ErrorCode::HypervisorFailed, message, begun.before.end_of_silent(pid)))
    }

    /// At the destination: removes a guest that the source has taken back, and whose process here
    /// has ended or is to end.
    async fn forget_shadow(self: &Arc<Self>, name: &VmName) -> Result<(), ApiError> {
        let begun = self.begin(name, &Operation::Delete { force: true })?;
        if let Some(vm) = &begun.vm {
            vm.process.kill().await;
        }
        self.remove_remains(name, begun).await?;
        tracing::info!(vm = name.as_str(), "doubt settled: the guest never ran here");
        Ok(())
    }

    /// At the destination: takes ownership of a guest that was handed over and has ended with its
    /// QEMU.
    pub(super) async fn own_what_is_gone(
        self: &Arc<Self>,
        name: &VmName,
        record: SavedVm,
    ) -> Result<(), ApiError> {
        let begun = self.begin(name, &Operation::TakeBack)?;
        if begun.vm.is_none()
            && let Some(silent) = self.silent_process(name, &begun)
        {
            self.settle(name, begun.before, None, begun.reason);
            return Err(silent);
        }
        let (spec, ownership) = (&record.spec, record.ownership());
        let saved = self
            .sync_arrived_tpm(spec)
            .and_then(|()| self.save(spec, Role::Owner, record.desired, ownership));
        if let Err(error) = saved {
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        tracing::info!(
            vm = name.as_str(),
            "doubt settled: the guest ran here and ended with its QEMU"
        );
        if let Some(vm) = &begun.vm {
            self.settle(name, Condition::Paused, Some(Arc::<Vm>::clone(vm)), begun.reason);
            return Ok(());
        }
        let reason = "its QEMU ended just after the hand-over to this host: start it again";
        self.settle(name, Condition::Failed, None, Some(reason.into()));
        Ok(())
    }
}
