//! What users do with VMs that agents restart: they start one, and begin and end that protection.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode, HaStanding};
use godwit_ha::Term;
use godwit_ha::own::End;
use godwit_qemu::{ResolvedSpec, Uuid, VmName, VmSpec};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use super::place::{refused, spec_elsewhere};
use crate::agent::Agent;
use crate::agent::vm_files::FileRule;
use crate::failure::spec_refused;
use crate::ha::Starting;
use crate::ha::own::{Me, OwnGuard, OwnRecord, Place};
use crate::vm::Vm;

/// Time to wait for another change of a VM's term.
const WORK_LIMIT: Duration = Duration::from_secs(6);
/// Longest time for which [`OwnGuard::working`] is held to look at a VM's term.
const MOMENT: Duration = Duration::from_secs(1);

/// A change of the protection by agents. It must live until the change is in the table.
#[derive(Debug)]
pub(in crate::agent) struct OwnChange {
    _working: OwnedMutexGuard<()>,
    _starting: Option<Starting>,
}

/// Whose the newest term of a VM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    /// It was this host's, and is over: no host starts the VM by itself.
    Ended,
    /// Another host has claimed it.
    OfOther,
}

impl Agent {
    /// Lets a start of a VM begin. A VM that agents restart needs a term, which is claimed unless
    /// this host has it.
    ///
    /// # Errors
    /// The VM is protected, and this host holds no term and can claim none.
    pub(in crate::agent) async fn ready_to_start(
        &self,
        spec: &ResolvedSpec,
    ) -> Result<(), ApiError> {
        if !spec.protect_by_agents {
            return self.check_term("start", spec);
        }
        let own = tokio::task::block_in_place(|| self.own_guard(spec))?;
        if own.held().is_some() {
            return Ok(());
        }
        let name = spec.name.as_str();
        let vm_spec = spec.to_vm_spec();
        let place = tokio::task::block_in_place(|| self.own_place(&vm_spec))?;
        let _working = self.working("start", name, &own).await?;
        if own.held().is_some() {
            return Ok(());
        }
        // Nothing of it runs here: then its last term is over.
        self.look_at_own_guard(&own).await;
        let after = self.free_term("start", name, &place).await?;
        let term = self.claim_own("start", name, (&*own, &place), after).await?;
        let record = OwnRecord::new(spec_elsewhere(vm_spec), term.0, &self.config.name);
        if let Err(error) = self.own.write_record(&place, record).await {
            self.give_up_own(&own, &place, (term, End::Stopped)).await;
            return Err(refused("start", name, &error));
        }
        tracing::info!(vm = name, %term, "this host has claimed a term of a VM");
        Ok(())
    }

    /// Lets a running VM become one that agents restart, or end to be one, if a change does that.
    ///
    /// # Errors
    /// Its term cannot be claimed or ended. Nothing has changed then.
    pub(in crate::agent) async fn admit_own(
        &self,
        vm: &Vm,
        old: &ResolvedSpec,
        wanted: &VmSpec,
    ) -> Result<Option<OwnChange>, ApiError> {
        match (old.protect_by_agents, wanted.protect_by_agents) {
            (false, true) => self.begin_own_term(vm, old, wanted).await.map(Some),
            (true, false) => {
                wanted.validate().map_err(|error| spec_refused(&error))?;
                // It must not fail after that.
                if !wanted.differs_in_settings_alone(&old.to_vm_spec()) {
                    let why = "the same change has more than settings";
                    return Err(refused("end the protection of", &old.name, &why));
                }
                self.could_save_settings(old, wanted)?;
                self.end_protection_by_agents(old).await.map(Some)
            }
            (false, false) => Ok(None),
            (true, true) => self.check_stays(old, wanted).map(|()| None),
        }
    }

    async fn begin_own_term(
        &self,
        vm: &Vm,
        old: &ResolvedSpec,
        wanted: &VmSpec,
    ) -> Result<OwnChange, ApiError> {
        wanted.validate().map_err(|error| spec_refused(&error))?;
        let name = old.name.as_str();
        let (place, own) = tokio::task::block_in_place(|| {
            drop(self.open_files_of_running(old, FileRule::VmDirs)?);
            Ok::<_, ApiError>((self.own_place(wanted)?, self.own_guard(old)?))
        })?;
        let working = self.working("protect", name, &own).await?;
        // What runs does not belong to the guard yet.
        tokio::task::block_in_place(|| own.settle());
        let (after, is_first) = self.free_term("protect", name, &place).await?;
        if !is_first {
            // Before the change is saved here, no other host may start the VM.
            let removed = self.own.remove_record(&place).await;
            removed.map_err(|error| refused("protect", name, &error))?;
        }
        let term = self.claim_own("protect", name, (&*own, &place), (after, is_first)).await?;
        let started = own.guard.starting(name, old.uuid).and_then(|starting| {
            starting.process(vm.process.pid, vm.process.start_time).map(|()| starting)
        });
        match started {
            Ok(starting) => Ok(OwnChange { _working: working, _starting: Some(starting) }),
            Err(error) => {
                tokio::task::block_in_place(|| {
                    own.lose();
                    own.settle();
                });
                if let Err(error) = self.own.end(&place, term, End::Stopped).await {
                    tracing::warn!(vm = name, %error, "cannot write the end of a VM's term");
                }
                Err(error)
            }
        }
    }

    /// Ends the protection of a VM that goes on without it: first no other host may start it.
    async fn end_protection_by_agents(&self, old: &ResolvedSpec) -> Result<OwnChange, ApiError> {
        let name = old.name.as_str();
        let own = tokio::task::block_in_place(|| self.own_guard(old))?;
        let working = self.working("end the protection of", name, &own).await?;
        let Some(held) = own.held() else {
            return Err(refused(
                "end the protection of",
                name,
                &"this host does not hold its term",
            ));
        };
        let directory = self.datastore_directories().remove(&held.datastore);
        let Some(directory) = directory else {
            return Err(refused("end the protection of", name, &"its datastore is not here"));
        };
        let place = Place { directory, datastore: held.datastore, vm: old.uuid };
        let ended = self.own.end(&place, held.term, End::Resting).await;
        // If that is unknown, the lease runs out: no later heartbeat is written over that end.
        ended.map_err(|error| refused("end the protection of", name, &error))?;
        // After a pause of this agent, another host may have claimed the VM: it ends here.
        if own.held() != Some(held) {
            return Err(refused(
                "end the protection of",
                name,
                &"this host has lost its term meanwhile",
            ));
        }
        Ok(OwnChange { _working: working, _starting: None })
    }

    /// Ends the last term of a VM that is about to be deleted, so that no host starts it again.
    /// `force`: the VM is deleted also if that is impossible.
    ///
    /// # Errors
    /// The end of the term cannot be written.
    pub(in crate::agent) async fn end_own_before_deletion(
        &self,
        spec: &ResolvedSpec,
        force: bool,
    ) -> Result<(), ApiError> {
        if !spec.protect_by_agents {
            return Ok(());
        }
        match self.end_last_term("delete", spec).await {
            Ok(Last::Ended | Last::OfOther) => Ok(()),
            Err(error) if force => {
                let (vm, error) = (spec.name.as_str(), error.message);
                tracing::warn!(vm, error, "deleted, although agents may start it again");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Ends the term of a VM whose creation failed, so that no host starts it. A restart by
    /// agents, which holds [`OwnGuard::working`] until it is done, itself writes how its term has
    /// ended.
    pub(in crate::agent) async fn end_own_of_failed_creation(&self, spec: &ResolvedSpec) {
        if !spec.protect_by_agents {
            return;
        }
        let is_restart = match self.own.known(spec.uuid) {
            Some(own) => timeout(MOMENT, own.working.lock()).await.is_err(),
            None => false,
        };
        if is_restart {
            return;
        }
        if let Err(error) = self.end_last_term("remove", spec).await {
            let (vm, error) = (spec.name.as_str(), error.message);
            tracing::error!(vm, error, "agents may start a VM whose creation failed");
        }
    }

    /// Ends the last term of a VM without a process if a change ends its protection: no other host
    /// may start it then, or have started it.
    ///
    /// # Errors
    /// Another host has claimed it, or the end of the term cannot be written.
    pub(in crate::agent) async fn admit_own_end(
        &self,
        old: &ResolvedSpec,
        wanted: &VmSpec,
    ) -> Result<(), ApiError> {
        const VERB: &str = "end the protection of";
        if !old.protect_by_agents || wanted.protect_by_agents {
            return Ok(());
        }
        match self.end_last_term(VERB, old).await? {
            Last::Ended => Ok(()),
            Last::OfOther => Err(refused(VERB, &old.name, &"another host has claimed it")),
        }
    }

    /// Ends the last term of a VM without a process.
    async fn end_last_term(&self, verb: &str, spec: &ResolvedSpec) -> Result<Last, ApiError> {
        let name = spec.name.as_str();
        let own = tokio::task::block_in_place(|| self.own_guard(spec))?;
        if own.guard.state().term == 0 {
            // This host has never claimed one.
            return Ok(Last::Ended);
        }
        let place = tokio::task::block_in_place(|| self.own_place(&spec.to_vm_spec()))?;
        let host = tokio::task::block_in_place(|| self.own.host());
        let host = host.map_err(|error| refused(verb, name, &error))?;
        let (datastore, vm) = (place.datastore, place.vm);
        // A term that is held may have been claimed after the last look.
        let is_of_other = self.own.with_watched(datastore, vm, |seen| seen.is_of_other(host));
        if own.held().is_none() && is_of_other == Some(true) {
            return Ok(Last::OfOther);
        }
        let _working = self.working(verb, name, &own).await?;
        self.end_here(verb, name, &own).await?;
        self.write_stopped((verb, name), &own, &place, host).await
    }

    /// Writes to the datastore that no host may start a VM. This host's own term is over, and
    /// [`OwnGuard::working`] is held.
    async fn write_stopped(
        &self,
        (verb, name): (&str, &str),
        own: &OwnGuard,
        place: &Place,
        host: Uuid,
    ) -> Result<Last, ApiError> {
        let looked = self.own.look(place).await;
        if looked.map_err(|error| refused(verb, name, &error))?.is_none() {
            return Ok(Last::Ended);
        }
        let seen = self.own.with_watched(place.datastore, place.vm, |seen| {
            (seen.is_of_other(host), seen.term, seen.end())
        });
        let term = match seen {
            Some((true, ..)) => return Ok(Last::OfOther),
            Some((_, term, Some(End::None))) => term,
            // Others try to start it.
            Some((_, failed, Some(End::Failed))) => {
                let term = self.claim_own(verb, name, (own, place), (failed, false)).await?;
                self.end_here(verb, name, own).await?;
                term
            }
            Some((_, term, None)) if term > Term(0) => {
                return Err(refused(verb, name, &"its newest term cannot be read"));
            }
            Some(_) | None => return Ok(Last::Ended),
        };
        let ended = self.own.end(place, term, End::Stopped).await;
        ended.map_err(|error| refused(verb, name, &error))?;
        Ok(Last::Ended)
    }

    /// Writes at once that a user has stopped a VM, before its host can fail or be switched off.
    /// What cannot be written now is written after a later look at the datastore.
    pub(in crate::agent) async fn note_own_stopped(&self, name: &VmName) {
        let spec = self.table().get(name).map(|slot| slot.spec.clone());
        let Some(spec) = spec.filter(|spec| spec.protect_by_agents) else { return };
        // It checks that no start has begun.
        tokio::task::block_in_place(|| self.give_up_unused());
        let Some(own) = self.own.known(spec.uuid) else { return };
        let Ok(_working) = own.working.try_lock() else { return };
        self.look_at_own_guard(&own).await;
        let place = tokio::task::block_in_place(|| self.own_place(&spec.to_vm_spec()));
        let host = tokio::task::block_in_place(|| self.own.host());
        let (Ok(place), Ok(host)) = (place, host) else { return };
        if own.guard.state().standing != HaStanding::Over {
            return;
        }
        let noted = self.write_stopped(("stop", name.as_str()), &own, &place, host).await;
        if let Err(error) = noted {
            let (vm, error) = (name.as_str(), error.message);
            tracing::warn!(vm, error, "it is not written yet that a VM was stopped");
        }
    }

    /// Gives up the term of a VM without a process.
    async fn end_here(&self, verb: &str, name: &str, own: &OwnGuard) -> Result<(), ApiError> {
        tokio::task::block_in_place(|| own.lose());
        self.look_at_own_guard(own).await;
        match own.guard.state().standing {
            HaStanding::Over => Ok(()),
            HaStanding::Held | HaStanding::Stopping => {
                Err(refused(verb, name, &"its QEMU has not ended"))
            }
        }
    }

    /// Waits until nothing else claims or gives up a term of a VM.
    ///
    /// # Errors
    /// That takes too long, or the VM's protection has just ended.
    async fn working(
        &self,
        verb: &str,
        name: &str,
        own: &Arc<OwnGuard>,
    ) -> Result<OwnedMutexGuard<()>, ApiError> {
        let waited = timeout(WORK_LIMIT, own.working.clone().lock_owned()).await;
        waited.ok().filter(|_| self.own.is_current(own)).ok_or_else(|| {
            let message = format!("cannot {verb} VM \"{name}\": its term is just being changed");
            ApiError::new(ErrorCode::Busy, message, "retry in some seconds")
        })
    }

    /// Returns the newest term of a VM if the next one can be claimed, and whether it is the first.
    async fn free_term(
        &self,
        verb: &str,
        name: &str,
        place: &Place,
    ) -> Result<(Term, bool), ApiError> {
        let looked = self.own.look(place).await;
        if looked.map_err(|error| refused(verb, name, &error))?.is_none() {
            return Ok((Term(0), true));
        }
        let host = tokio::task::block_in_place(|| self.own.host());
        let host = host.map_err(|error| refused(verb, name, &error))?;
        let me = Me { host, is_over: true };
        let found = self.own.with_watched(place.datastore, place.vm, |watched| {
            let rests = watched.end() == Some(End::Resting);
            // Without a record, nobody else starts it.
            let is_left = rests && (watched.is_of(host) || watched.record.is_none());
            let host = watched.record.as_ref().map(|record| record.host.clone());
            (watched.term, is_left || watched.is_free(me), host)
        });
        let Some((term, is_free, host)) = found else { return Ok((Term(0), true)) };
        if is_free {
            // The folder may be empty.
            return Ok((term, term == Term(0)));
        }
        let host = host.unwrap_or_else(|| "another host".to_owned());
        Err(ApiError::new(
            ErrorCode::WrongState,
            format!("cannot {verb} VM \"{name}\": {term} of it is not over, and {host} may run it"),
            "see `godwit host ha` for how it stands; it is free after its host has been silent, or \
             when an operator confirms that the host is off",
        ))
    }

    async fn claim_own(
        &self,
        verb: &str,
        name: &str,
        (own, place): (&OwnGuard, &Place),
        after: (Term, bool),
    ) -> Result<Term, ApiError> {
        let watchdog = self.ha().watchdog().kernel_of_own();
        let claimed = self.own.claim(own, place, after, watchdog).await;
        claimed.map_err(|error| refused(verb, name, &error))
    }
}
