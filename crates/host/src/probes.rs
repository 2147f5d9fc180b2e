//! The probes of lanes that this host takes part in: one at a time.

use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode};
use godwit_migration::probe::{Cancel, ProbeSession};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Probes that this host takes part in.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    under_way: Arc<Mutex<Option<String>>>,
    /// Cancels the outgoing probe.
    pub(crate) outgoing: Mutex<Option<Arc<Cancel>>>,
    /// The incoming probe.
    pub(crate) incoming: Mutex<Option<Expected>>,
}

/// A probe by another host.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) id: String,
    pub(crate) session: Arc<ProbeSession>,
    /// Closed when the probe has ended and the next one may begin.
    pub(crate) over: watch::Receiver<()>,
}

/// Right to be this host's only probe; released when dropped.
#[derive(Debug)]
pub(crate) struct Turn(Arc<Mutex<Option<String>>>);

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

impl Probes {
    /// Takes the turn. `what` describes the probe in the error of a second one.
    pub(crate) fn take_turn(&self, what: String) -> Result<Turn, ApiError> {
        let mut under_way = self.under_way.lock();
        if let Some(other) = &*under_way {
            return Err(ApiError::new(
                ErrorCode::Busy,
                format!("cannot probe: {other}"),
                "wait until that probe ends, in a few seconds",
            ));
        }
        *under_way = Some(what);
        Ok(Turn(Arc::clone(&self.under_way)))
    }

    /// Whether an outgoing or incoming probe is running.
    pub(crate) fn runs(&self) -> bool {
        self.under_way.lock().is_some()
    }

    /// Ends a running probe because a migration begins, which does not wait: each would distort and
    /// slow the other.
    pub(crate) fn give_way(&self, vm: &str) {
        if let Some(cancel) = &*self.outgoing.lock() {
            cancel.ask(&format!("the probe gave way to a migration of VM \"{vm}\""));
        }
        if let Some(expected) = &*self.incoming.lock() {
            tracing::info!(vm, "incoming probe ended: a migration begins");
            expected.session.end();
        }
    }

    pub(crate) fn find(&self, id: &str) -> Result<Expected, ApiError> {
        self.incoming.lock().as_ref().filter(|known| known.id == id).cloned().ok_or_else(|| {
            let message = format!("no incoming probe {id} on this host");
            ApiError::new(ErrorCode::NotFound, message, "it timed out or was ended: probe again")
        })
    }
}
