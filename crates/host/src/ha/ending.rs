//! Protection that ends. Renewals name the VM, and its protection ends once the manager has
//! answered such a renewal: from then on it starts the VM on no other host. Until then the VM ends
//! with the term.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode, MOST_ENDING};
use godwit_ha::Standing;
use godwit_qemu::Uuid;
use tokio::sync::oneshot;

use super::guarding::HaGuard;
use super::named::{ANSWER_LIMIT, Named};

/// Time for which renewals name a VM whose protection has ended: the manager learns from the host's
/// list of VMs that it has.
const NAMED_AFTER: Duration = Duration::from_secs(10);

/// A VM whose protection is about to end. If this is dropped, it does not.
#[derive(Debug)]
pub(crate) struct Ending {
    guard: Arc<HaGuard>,
    vm: String,
    named: Named,
    pub(super) answered: oneshot::Receiver<()>,
}

impl Ending {
    /// Waits until the manager has confirmed the end of the protection.
    ///
    /// # Errors
    /// It does not in time.
    pub(crate) async fn confirmed(&mut self) -> Result<(), ApiError> {
        match tokio::time::timeout(ANSWER_LIMIT, &mut self.answered).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(unconfirmed(&self.vm)),
        }
    }

    /// Notes that the VM is not protected any more.
    pub(crate) fn ended(self) {
        let until = self.guard.now().saturating_add(NAMED_AFTER);
        self.guard.state.lock().endings.ended(self.named, until);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.guard.state.lock().endings.give_up(self.named);
    }
}

impl HaGuard {
    /// Begins to end the protection of a VM; `None` if this host never had a term. `is_stopped`:
    /// whether the VM was stopped, and so does not run elsewhere.
    ///
    /// # Errors
    /// This host holds no term, and the manager may start the VM elsewhere; or the protection of
    /// too many VMs ends at the same time.
    pub(crate) fn end_protection(
        self: &Arc<Self>,
        vm: &str,
        uuid: Uuid,
        is_stopped: bool,
    ) -> Result<Option<Ending>, ApiError> {
        let mut state = self.state.lock();
        if state.holder.is_none() {
            return Ok(None);
        }
        let holds = self.holds(&mut state);
        let may_end = holds || is_stopped && *state.guard.standing() == Standing::Over;
        if !may_end {
            return Err(unconfirmed(vm));
        }
        let Some((number, answered)) = state.endings.begin(vm, uuid) else {
            let message = format!(
                "cannot end the protection of VM \"{vm}\": that of {MOST_ENDING} others is ending"
            );
            return Err(ApiError::new(ErrorCode::Busy, message, "try again after some seconds"));
        };
        let (guard, vm) = (Arc::clone(self), vm.to_owned());
        Ok(Some(Ending { guard, vm, named: (uuid, number), answered }))
    }

    /// Notes that a VM is to be protected again.
    pub(crate) fn keep_protection(&self, uuid: Uuid) {
        self.state.lock().endings.forget(uuid);
    }
}

fn unconfirmed(vm: &str) -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        format!("cannot end the protection of VM \"{vm}\": the manager has not confirmed it"),
        "retry while `godwit control ha show` shows a term of this host; if there is no manager \
         any more, see docs/recover.md",
    )
}
