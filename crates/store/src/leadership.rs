//! Leadership: which manager writes, and until when it may rely on that.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::error::StoreError;
use super::loss::Loss;
use super::revision::Revision;

/// A manager that wants to lead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Display name.
    pub name: String,
    /// Address to which other managers forward writes.
    pub address: String,
}

/// The manager that leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    pub candidate: Candidate,
    /// Epoch of its leadership.
    pub epoch: Revision,
}

/// Proof that this manager leads, required by transactions. Dropping it stops the renewal;
/// [`Leadership::resign`] frees the leadership faster.
pub struct Leadership {
    epoch: Revision,
    standing: Arc<Standing>,
    /// `None` after a resignation.
    tenure: Mutex<Option<Box<dyn Tenure>>>,
}

impl Leadership {
    pub(crate) fn new(
        epoch: Revision,
        standing: Arc<Standing>,
        tenure: Box<dyn Tenure>,
    ) -> Leadership {
        Leadership { epoch, standing, tenure: Mutex::new(Some(tenure)) }
    }

    /// Number of the leadership, greater than those of all earlier ones.
    #[must_use]
    pub fn epoch(&self) -> Revision {
        self.epoch
    }

    /// Whether this manager may rely on leading. A leadership limited by time ends here before it
    /// can end in the store.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.standing.loss().is_none()
    }

    /// Waits until the leadership is lost.
    pub async fn lost(&self) -> Loss {
        self.standing.lost().await
    }

    /// Resigns: another manager can lead at once.
    ///
    /// # Errors
    /// The store cannot be reached; the leadership then ends by time.
    pub async fn resign(&self) -> Result<(), StoreError> {
        self.standing.lose(Loss::Resigned);
        let tenure = self.tenure.lock().take();
        match tenure {
            Some(tenure) => tenure.resign().await,
            None => Ok(()),
        }
    }

    /// Fails if the leadership no longer holds, before the store is asked.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        self.standing.loss().map_or(Ok(()), |why| Err(StoreError::LeadershipLost { why }))
    }

    /// Returns the error for a leadership that has ended in the store.
    pub(crate) fn ended(&self) -> StoreError {
        self.standing.lose(Loss::Ended);
        StoreError::LeadershipLost { why: Loss::Ended }
    }
}

impl std::fmt::Debug for Leadership {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Leadership")
            .field("epoch", &self.epoch)
            .field("loss", &self.standing.loss())
            .finish_non_exhaustive()
    }
}

/// Keeps a leadership alive in its store until it is dropped.
#[async_trait]
pub(crate) trait Tenure: Send + Sync {
    /// Ends the leadership in the store.
    async fn resign(self: Box<Self>) -> Result<(), StoreError>;
}

/// Whether a leadership holds, as its manager sees it.
#[derive(Debug)]
pub(crate) struct Standing {
    loss: watch::Sender<Option<Loss>>,
    /// Monotonic time from which the leadership may be over in the store unless it is renewed;
    /// `None` if it is not limited by time.
    until: Mutex<Option<Instant>>,
}

impl Standing {
    pub(crate) fn new(until: Option<Instant>) -> Arc<Standing> {
        Arc::new(Standing { loss: watch::Sender::new(None), until: Mutex::new(until) })
    }

    /// Records a renewal.
    #[cfg(feature = "etcd")]
    pub(crate) fn holds_until(&self, until: Instant) {
        *self.until.lock() = Some(until);
    }

    /// Records a loss. Only the first reason is kept.
    pub(crate) fn lose(&self, why: Loss) {
        self.loss.send_if_modified(|loss| {
            let first = loss.is_none();
            loss.get_or_insert(why);
            first
        });
    }

    /// Returns why the leadership is lost; `None` while it holds.
    pub(crate) fn loss(&self) -> Option<Loss> {
        let until = *self.until.lock();
        // The renewing task may report it late.
        if until.is_some_and(|until| Instant::now() >= until) {
            self.lose(Loss::RanOut);
        }
        self.loss.borrow().clone()
    }

    /// Waits until the leadership is lost.
    pub(crate) async fn lost(&self) -> Loss {
        let mut loss = self.loss.subscribe();
        match loss.wait_for(Option::is_some).await {
            Ok(loss) => loss.clone().unwrap_or(Loss::Ended),
            // `self` owns the sender.
            Err(_) => Loss::Ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn an_expired_leadership_is_lost_without_a_notice() {
        let standing = Standing::new(Some(Instant::now() + Duration::from_secs(3600)));
        assert_eq!(standing.loss(), None);
        let past = Standing::new(Some(Instant::now()));
        assert_eq!(past.loss(), Some(Loss::RanOut));
    }

    #[tokio::test]
    async fn the_first_reason_of_a_loss_is_kept() {
        let standing = Standing::new(None);
        standing.lose(Loss::Ended);
        standing.lose(Loss::Resigned);
        assert_eq!(standing.lost().await, Loss::Ended);
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn a_lost_leadership_is_not_renewed() {
        let standing = Standing::new(Some(Instant::now()));
        assert_eq!(standing.loss(), Some(Loss::RanOut));
        standing.holds_until(Instant::now() + Duration::from_secs(3600));
        assert_eq!(standing.loss(), Some(Loss::RanOut));
    }
}
