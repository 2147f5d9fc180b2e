//! Terms of a VM that this host claims, keeps with heartbeats, and ends; and the VM's record.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{HaAnswer, HaStanding, HaVerdict, TermHolder};
use godwit_ha::Term;
use godwit_ha::own::End;
use godwit_qemu::Uuid;

use super::OwnVms;
use super::folder::{self, LastBlock, OwnError, Place};
use super::guard::{HeldTerm, OwnGuard};
use super::record::OwnRecord;
use crate::ha::boot_clock;
use crate::ha::heartbeats::turns::Work;
use crate::ha::heartbeats::{HeartbeatError, in_thread};

impl OwnVms {
    /// Claims the term after `after` and has the VM's guard hold it. [`OwnGuard::working`] must be
    /// held. `is_first`: the VM may have no folder yet.
    ///
    /// # Errors
    /// Another host has claimed it, something of the VM may still run here, or the claim took too
    /// long. Then nothing is held.
    pub(crate) async fn claim(
        &self,
        own: &OwnGuard,
        place: &Place,
        (after, is_first): (Term, bool),
        watchdog: bool,
    ) -> Result<Term, OwnError> {
        let host = tokio::task::block_in_place(|| self.host())?;
        if own.guard.state().standing != HaStanding::Over {
            return Err(io::Error::other("this host's last term is not over").into());
        }
        // The lease counts from before the claim.
        let renewal = own.guard.renewal();
        let of = place.clone();
        let work = move || folder::claim(&of, host, (after, is_first), watchdog);
        let term = self.at(own.vm, Work::Write, work).await?;
        // A cluster of its own for each claim: numbers begin anew with a folder.
        let holder = TermHolder { cluster: Uuid::new_v4(), host };
        let verdict = HaVerdict::Granted { term: term.0, datastores: vec![place.datastore] };
        let answer = HaAnswer { nonce: renewal.nonce, holder, verdict };
        let taken = tokio::task::block_in_place(|| own.guard.answer(&answer));
        taken.map_err(|error| io::Error::other(error.message))?;
        match own.held() {
            Some(held) if held == (HeldTerm { term, datastore: place.datastore }) => Ok(term),
            _ => Err(HeartbeatError::Late.into()),
        }
    }

    /// Begins to write the next block of a held term. `directory`: the datastore's, if this host
    /// has it.
    pub(crate) fn beat(
        &self,
        own: &Arc<OwnGuard>,
        held: HeldTerm,
        directory: Option<&PathBuf>,
        watchdog: bool,
    ) {
        let HeldTerm { term, datastore } = held;
        let Some(directory) = directory.cloned() else {
            let why = HeartbeatError::NoDatastore.to_string();
            return own.guard.write_failed(term, 0, why);
        };
        let Some(turn) = self.turns.begin(own.vm, Work::Write) else {
            return own.guard.write_failed(term, 0, HeartbeatError::Busy.to_string());
        };
        let host = match self.host() {
            Ok(host) => host,
            Err(error) => return own.guard.write_failed(term, 0, error.to_string()),
        };
        let own = Arc::clone(own);
        let work = move || {
            let place = Place { directory, datastore, vm: own.vm };
            let (started_at, least) = numbered();
            if own.held() != Some(held) {
                *own.last.lock() = None;
            }
            match folder::beat(&place, host, (term, least), (watchdog, End::None), &own.last) {
                Ok(()) => own.guard.confirm_written(term, 0, started_at),
                Err(error) => {
                    own.guard.write_failed(term, 0, error.to_string());
                    let is_lost = matches!(error, OwnError::Claimed(newer) if newer > term);
                    if is_lost && own.held() == Some(held) {
                        tracing::error!(vm = %own.vm, %term, "another host has claimed the VM");
                        own.lose();
                    }
                }
            }
            drop(turn);
        };
        if let Err(error) = in_thread(work) {
            tracing::error!(%error, "cannot start a thread that writes a heartbeat");
        }
    }

    /// Writes how a term of this host has ended. Nothing of the VM may run in it any more.
    ///
    /// # Errors
    /// It is not this host's, has ended already, or cannot be written in time.
    pub(crate) async fn end(&self, place: &Place, term: Term, end: End) -> Result<(), OwnError> {
        let host = tokio::task::block_in_place(|| self.host())?;
        let (of, (_, least)) = (place.clone(), numbered());
        let own = self.known(place.vm);
        let work = move || {
            let none = LastBlock::default();
            let last = own.as_ref().map_or(&none, |own| &own.last);
            folder::beat(&of, host, (term, least), (false, end), last)
        };
        self.at(place.vm, Work::Write, work).await
    }

    /// Writes the record of a VM for the holder of its newest term.
    ///
    /// # Errors
    /// A later term is claimed, or it cannot be written in time.
    pub(crate) async fn write_record(
        &self,
        place: &Place,
        record: OwnRecord,
    ) -> Result<(), OwnError> {
        let of = place.clone();
        self.at(place.vm, Work::Write, move || folder::write_record(&of, &record)).await
    }

    /// Removes a VM's record: no other host starts the VM from then on.
    ///
    /// # Errors
    /// It cannot be removed in time.
    pub(crate) async fn remove_record(&self, place: &Place) -> Result<(), OwnError> {
        let of = place.clone();
        self.at(place.vm, Work::Write, move || folder::remove_record(&of)).await
    }

    /// Removes the folder of a VM, whose newest term this host has ended.
    ///
    /// # Errors
    /// A later term is claimed, or it cannot be removed in time.
    pub(crate) async fn remove(&self, place: &Place, term: Term) -> Result<(), OwnError> {
        let of = place.clone();
        self.at(place.vm, Work::Write, move || folder::remove(&of, term)).await
    }
}

/// Returns the boot clock's time, and the number that a block is larger than.
fn numbered() -> (Duration, u64) {
    let now = boot_clock();
    (now, u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}
