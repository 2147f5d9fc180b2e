//! Starts of VMs whose last term is over: the next one is claimed here first.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, CreateVm, ErrorCode, HaStanding};
use godwit_ha::Term;
use godwit_ha::own::End;
use godwit_qemu::{VmName, VmSpec};

use super::following::Here;
use super::place::refused;
use crate::agent::Agent;
use crate::agent::vm_files::FileRule;
use crate::failure::{host_failed, spec_refused};
use crate::ha::boot_clock;
use crate::ha::own::{Me, OwnError, OwnGuard, OwnRecord, Place, check_images};

/// Shortest time between two attempts of this host to start a VM.
const TRY_AGAIN: Duration = Duration::from_secs(30);

impl Agent {
    /// Claims the next term of a VM and starts it here. If that fails, the term is over.
    pub(super) async fn restart_own(
        self: Arc<Self>,
        place: Place,
        after: Term,
        record: OwnRecord,
        is_of: bool,
    ) {
        let vm = record.spec.name.clone();
        let restarted = self.try_restart_own(&place, after, record, is_of).await;
        if let Err(error) = restarted {
            tracing::error!(vm, error = error.message, "cannot restart a VM of a silent host");
            self.own.with_watched(place.datastore, place.vm, |watched| {
                let why = format!("this host cannot start it: {}", error.message);
                watched.refuse(why, boot_clock().saturating_add(TRY_AGAIN));
            });
        }
    }

    async fn try_restart_own(
        self: &Arc<Self>,
        place: &Place,
        after: Term,
        record: OwnRecord,
        is_of: bool,
    ) -> Result<(), ApiError> {
        let spec = record.spec;
        let name = VmName::new(spec.name.as_str()).map_err(|error| spec_refused(&error))?;
        // The name is noted when the VM has it: another one of that name is not touched.
        let opened = tokio::task::block_in_place(|| self.own.guard_of(place.vm, None));
        let own = opened.map_err(|error| host_failed("cannot open the guard of a VM", &error))?;
        // A new guard holds nothing before it is known that nothing runs.
        let Ok(_working) = own.working.clone().try_lock_owned() else { return Ok(()) };
        if !self.is_still_over(&own) {
            return Ok(());
        }
        let here = self.here(place.vm);
        let may = here.as_ref().is_none_or(Here::has_failed);
        // A user may have stopped or deleted it since the last look.
        if !may || !self.is_still_free(place, &name, after).await? {
            return Ok(());
        }
        self.check_could_start(place, &spec, here.as_ref().map(|here| (here, is_of))).await?;
        let watchdog = self.ha().watchdog().kernel_of_own();
        let term = match self.own.claim(&own, place, (after, false), watchdog).await {
            Ok(term) => term,
            // Another host was faster.
            Err(OwnError::Claimed(_)) => return Ok(()),
            Err(error) => return Err(refused("claim", &name, &error)),
        };
        tracing::warn!(vm = name.as_str(), %term, "starting a VM whose last term is over");
        let claimed = OwnRecord::new(spec.clone(), term.0, &self.config.name);
        let started = async {
            let written = self.own.write_record(place, claimed.clone()).await;
            written.map_err(|error| refused("start", &name, &error))?;
            match here {
                Some(here) => self.start(&here.name).await,
                None => {
                    let request = CreateVm { vm_dirs_only: true, ..CreateVm::new(spec, true) };
                    self.create(request).await
                }
            }
        };
        let Err(error) = started.await else { return Ok(()) };
        let failed = claimed.failed(&format!("host {}: {}", self.config.name, error.message));
        self.give_up_own(&own, place, (term, End::Failed)).await;
        if let Err(error) = self.own.write_record(place, failed).await {
            tracing::warn!(vm = name.as_str(), %error, "cannot write why a VM did not start");
        }
        Err(error)
    }

    /// Looks again whether this host should start a VM of which nothing runs here.
    async fn is_still_free(
        &self,
        place: &Place,
        name: &VmName,
        after: Term,
    ) -> Result<bool, ApiError> {
        let host = tokio::task::block_in_place(|| self.own.host());
        let host = host.map_err(|error| host_failed("cannot read this host's identity", &error))?;
        let looked = self.own.look(place).await;
        looked.map_err(|error| refused("start", name, &error))?;
        let me = Me { host, is_over: true };
        let claims = self.own.with_watched(place.datastore, place.vm, |watched| {
            watched.claim_after(boot_clock(), me)
        });
        Ok(claims.flatten() == Some(after))
    }

    /// Ends a term in which nothing runs.
    pub(super) async fn give_up_own(
        &self,
        own: &OwnGuard,
        place: &Place,
        (term, end): (Term, End),
    ) {
        tokio::task::block_in_place(|| own.lose());
        self.look_at_own_guard(own).await;
        if own.guard.state().standing != HaStanding::Over {
            return;
        }
        if let Err(error) = self.own.end(place, term, end).await {
            tracing::warn!(vm = %own.vm, %error, "cannot write the end of a VM's term");
        }
    }

    /// Checks that a VM could start here, before its term is claimed.
    async fn check_could_start(
        self: &Arc<Self>,
        place: &Place,
        spec: &VmSpec,
        here: Option<(&Here, bool)>,
    ) -> Result<(), ApiError> {
        let outside = |why: String| {
            let message = format!("cannot start VM \"{}\": {why}", spec.name);
            ApiError::new(ErrorCode::Preflight, message, "see docs/ha.md for what it may use")
        };
        check_images(spec, &place.directory).map_err(outside)?;
        let resolved = match here {
            Some((_, false)) => {
                return Err(outside("its former definition is still on this host".to_owned()));
            }
            Some((here, true)) => {
                let resolved = self.table().get(&here.name).map(|slot| slot.spec.clone());
                resolved.ok_or_else(|| self.no_vm(&here.name))?.as_ref().clone()
            }
            None => self.resolve(spec.clone()).await?,
        };
        self.check_fits(&resolved, FileRule::VmDirs).await.map(drop)
    }
}
