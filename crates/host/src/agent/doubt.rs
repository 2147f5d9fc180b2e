//! VMs of which nobody here knows whose guest it is: the other host of the hand-over is asked until it knows, or an operator decides.
//! What follows from its word is [`godwit_migration::handover`]'s.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode, Resolve, Resolved};
use godwit_migration::handover::{
    Known, OfDestination, OfSource, Role, Standing, of_destination, of_source,
};
use godwit_qemu::{Uuid, VmName};
use godwit_types::Incarnation;

use crate::agent::lifecycle::whole;
use crate::agent::{Agent, Begun};
use crate::migration::{ask_known, of_life};
use crate::references::References;
use crate::store::{Desired, SavedVm};
use crate::vm::{Condition, Operation, Vm};

/// Between two questions, at first and at most: a host that is down may be down for hours.
const ASK_AGAIN: Duration = Duration::from_millis(300);
const ASK_AGAIN_MOST: Duration = Duration::from_secs(5);

/// After that no shadow is kept by any limit for cuts.
const FORGET_LIMIT: Duration = Duration::from_secs(2 * 3600);
/// How long a migration may take to end whose QEMU has been ended.
const END_LIMIT: Duration = Duration::from_secs(10);

/// What a VM in doubt comes to.
enum Settled {
    /// It is, for now.
    Open,
    /// There is no doubt any more.
    Over,
}

impl Agent {
    /// What this host has written down of a VM's ownership, for another host that asks.
    ///
    /// # Errors
    /// [`ErrorCode::HostFailed`]: the disk can't be read, so nobody knows.
    pub fn known(
        &self,
        name: &VmName,
        uuid: Uuid,
        incarnation: Incarnation,
    ) -> Result<Known, ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.known(name, uuid, incarnation))?)
    }

    /// Asks the other host of a VM in doubt until it knows, and does what follows. In a task of its own, one a VM; it ends as well when
    /// somebody else settles it.
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
                        tracing::warn!(vm = name.as_str(), %error, "the doubt is not settled yet")
                    }
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(ASK_AGAIN_MOST);
            }
        });
    }

    /// A migration ended whose destination may not know: what had been made of it there goes. In a task of its own, until that host has
    /// answered, another migration has begun, or the shadow is gone by itself for sure.
    pub(super) fn forget_at(self: &Arc<Self>, vm: &Vm, to: String) {
        let (agent, name) = (self.clone(), vm.name.clone());
        let (uuid, incarnation) = (vm.spec.uuid, vm.incarnation);
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

    /// A migration of a VM of this host ended with the agent that carried it out: what had been made of it at `to` goes. In a task of its
    /// own, until that host has answered, or another migration has begun.
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
                        "a migration that the last agent had under way is undone"
                    );
                    let undone = SavedVm { other: None, ..record.clone() };
                    if let Err(error) = agent.save_over(Some(&record), &undone).await {
                        tracing::warn!(vm = name.as_str(), %error, "that could not be saved");
                    }
                    return;
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(ASK_AGAIN_MOST);
            }
        });
    }

    /// Asks the host `to` once to let go of what has been made there of a guest that is not committed there: whether it has answered.
    async fn forget_once(
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
            "the other host of a hand-over was asked"
        );
        match record.role {
            Role::HandingOver => match of_destination(known, record.ownership().offered()) {
                OfDestination::Took => return self.let_go(name, &record).await,
                OfDestination::Refused => self.take_back(name, record, true).await?,
                OfDestination::Open => {
                    // It may wait for a lane of an agent that is no more. One that may run at any moment is left alone.
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

    /// An operator's word on a VM in doubt, who has made sure of it: by a look at the other host, or by fencing it.
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
                    let message = format!("VM \"{name}\" is {}, and not in doubt", info.state);
                    ApiError::new(ErrorCode::WrongState, message, "nothing is to be resolved")
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
                "an operator has decided which host runs the guest"
            );
            match (record.role, here) {
                (Role::HandingOver, true) => {
                    agent.take_back(&name, record, word.keep_memory).await?
                }
                (Role::HandingOver, false) => agent.give_up(&name).await?,
                (Role::TakingOver | Role::Stranded, true) => {
                    agent.own_what_is_gone(&name, record).await?
                }
                (Role::TakingOver | Role::Stranded, false) => agent.forget_shadow(&name).await?,
                (Role::Owner | Role::Shadow, _) => return Err(not_in_doubt(&agent)),
            }
            Ok(Resolved { vm: agent.vm_info(&name).ok() })
        })
        .await
    }

    /// A migration may still keep pages for a guest whose host is gone, and will for ever: with its QEMU here it ends.
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
        let mut look = tokio::time::interval(ASK_AGAIN);
        let ended = async {
            while migrates().is_some() {
                look.tick().await;
            }
        };
        let _ = tokio::time::timeout(END_LIMIT, ended).await;
    }

    /// Whether an operator's word means this host; it may mean the other one of the hand-over as well, and no third.
    fn decide(&self, name: &VmName, record: &SavedVm, word: &Resolve) -> Result<bool, ApiError> {
        let here = word.runs_on == self.config.name;
        let other = record.other.as_ref().map(|other| &*other.name);
        if here || other.is_none_or(|other| other == word.runs_on) {
            return Ok(here);
        }
        let other = other.unwrap_or_default();
        let message = format!(
            "VM \"{name}\" was being handed over between hosts {} and {other}",
            self.config.name
        );
        let remedy = format!("name one of them: host {} has nothing to do with it", word.runs_on);
        Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
    }

    /// Whether this process's pages are kept for another host.
    pub(crate) fn keeps_pages(&self, vm: &Arc<Vm>) -> bool {
        self.table().get(&vm.name).is_some_and(|slot| {
            matches!(slot.condition, Condition::KeepsPages { .. })
                && slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm))
        })
    }

    /// The destination has the guest.
    async fn let_go(
        self: &Arc<Self>,
        name: &VmName,
        record: &SavedVm,
    ) -> Result<Settled, ApiError> {
        if record.pages_kept_for().is_some() {
            if self.vm(name)?.is_some() {
                // Whether they are needed is asked by who serves them.
                self.serve_what_is_kept(name);
                return Ok(Settled::Over);
            }
            if self.places.vm(name).living_process().is_some() {
                // It holds them, and has not answered this agent yet ([`Agent::find_again`]).
                return Ok(Settled::Open);
            }
        }
        tracing::info!(vm = name.as_str(), "the doubt is settled: the destination has the guest");
        self.give_up(name).await.map(|()| Settled::Over)
    }

    /// Removes what is left of a guest that is another host's.
    async fn give_up(self: &Arc<Self>, name: &VmName) -> Result<(), ApiError> {
        match self.vm(name)? {
            Some(vm) => self.release(&vm, false).await,
            None => {
                let begun = self.begin(name, &Operation::Release)?;
                if let Err(error) = self.note_gone(&begun).await {
                    self.settle(name, begun.before, begun.vm, begun.reason);
                    return Err(error);
                }
                self.remove_remains(name, begun).await
            }
        }
    }

    /// Removes a VM without a process in the table, or puts it back as it was.
    async fn remove_remains(
        self: &Arc<Self>,
        name: &VmName,
        mut begun: Begun,
    ) -> Result<(), ApiError> {
        let gone = async {
            self.end_stray(name).await?;
            Ok::<_, ApiError>(tokio::task::block_in_place(|| self.store.remove(name))?)
        };
        if let Err(error) = gone.await {
            begun.lose_what_ended();
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        self.places.vm(name).remove_all();
        self.references().drop_bases_of(name);
        self.table().remove(name);
        Ok(())
    }

    /// The destination does not have the guest: it goes on here, in a new epoch. Unless its memory is worth keeping, it is ended first.
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
        // Let go on first: a restarted agent that finds it running knows that it is this host's.
        if let Err(error) = crate::migration::undo_hand_over(&vm, runs).await {
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        self.new_epoch(&vm, epoch);
        let mine = SavedVm::new(record.spec.clone(), Role::Owner, Desired::Running, ownership);
        let saved = self.save_over(Some(&record), &mine).await;
        tracing::info!(vm = name.as_str(), epoch, "the doubt is settled: the guest goes on here");
        let condition = if runs { Condition::Running } else { Condition::Paused };
        self.settle(name, condition, Some(Arc::clone(&vm)), None);
        if let Err(error) = saved {
            tracing::error!(vm = name.as_str(), %error, "that could not be saved; it is tried again");
            tokio::spawn(self.clone().save_in_the_end(vm, Some(record)));
        }
        Ok(())
    }

    /// The same, where its process has ended meanwhile: the guest has come to its end by that, and can be started anew.
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
        if let Err(error) = self.save(&record.spec, Role::Owner, record.desired, ownership).await {
            self.settle(name, begun.before, None, begun.reason);
            return Err(error);
        }
        if let Some(slot) = self.table().get_mut(name) {
            slot.ownership = ownership;
        }
        tracing::info!(
            vm = name.as_str(),
            epoch,
            "the doubt is settled: the guest is this host's, and its QEMU has ended"
        );
        let reason =
            "its QEMU was ended at its hand-over, and no other host runs it: start it again";
        let (condition, reason) = match record.desired {
            Desired::Running => (Condition::Failed, Some(reason.to_owned())),
            Desired::Stopped => (Condition::Stopped, None),
        };
        self.settle(name, condition, None, reason);
        Ok(())
    }

    /// What keeps a VM from being decided on whose QEMU lives and says nothing.
    fn silent_process(&self, name: &VmName, begun: &Begun) -> Option<ApiError> {
        let (pid, _) = self.places.vm(name).living_process()?;
        let message = format!("QEMU of VM \"{name}\" (process {pid}) does not answer");
        Some(ApiError::new(ErrorCode::HypervisorFailed, message, begun.before.end_of_silent(pid)))
    }

    /// At the destination: the source has taken back what may have run here and is gone.
    async fn forget_shadow(self: &Arc<Self>, name: &VmName) -> Result<(), ApiError> {
        let begun = self.begin(name, &Operation::Delete { force: true })?;
        if let Some(vm) = &begun.vm {
            vm.process.kill().await;
        }
        self.remove_remains(name, begun).await?;
        tracing::info!(vm = name.as_str(), "the doubt is settled: the guest never ran here");
        Ok(())
    }

    /// At the destination: the guest was handed over, and has ended with its QEMU.
    async fn own_what_is_gone(
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
        if let Err(error) =
            self.save(&record.spec, Role::Owner, record.desired, record.ownership()).await
        {
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(error);
        }
        tracing::info!(
            vm = name.as_str(),
            "the doubt is settled: the guest ran here, and ended with its QEMU"
        );
        if let Some(vm) = &begun.vm {
            self.settle(name, Condition::Paused, Some(Arc::<Vm>::clone(vm)), begun.reason);
            return Ok(());
        }
        let reason =
            "it had just been handed over to this host when its QEMU ended: start it again";
        self.settle(name, Condition::Failed, None, Some(reason.into()));
        Ok(())
    }
}
