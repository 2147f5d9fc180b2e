//! Leadership: which manager writes, and until when it may believe that it does.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::error::StoreError;
use super::transaction::Revision;

/// A manager that wants to lead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its name, for people.
    pub name: String,
    /// Where others reach it: what they send their writes to.
    pub address: String,
}

/// The manager that leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    pub candidate: Candidate,
    /// Its leadership's epoch.
    pub epoch: Revision,
}

/// How a leadership came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// It was given back.
    Resigned,
    /// The store could not be asked to renew it in time.
    RanOut,
    /// The store says that it has ended.
    Ended,
    /// The store can't be written any more.
    StoreFailed(String),
}

impl std::fmt::Display for Loss {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Loss::Resigned => out.write_str("it has resigned"),
            Loss::RanOut => out.write_str("the store did not renew its leadership in time"),
            Loss::Ended => {
                out.write_str("its leadership has ended in the store, and another manager may lead")
            }
            Loss::StoreFailed(why) => write!(out, "the store can't be written any more: {why}"),
        }
    }
}

/// That this manager leads. Transactions demand it. When it is dropped it is not renewed any more; [`Leadership::resign`] is faster.
pub struct Leadership {
    epoch: Revision,
    standing: Arc<Standing>,
    /// None: it is given back.
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

    /// The leadership's number: greater than those of all before it.
    #[must_use]
    pub fn epoch(&self) -> Revision {
        self.epoch
    }

    /// Whether this manager may believe that it leads. Where that ends by time, it ends here before it can have ended in the store.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.standing.loss().is_none()
    }

    /// Waits until it is lost.
    pub async fn lost(&self) -> Loss {
        self.standing.lost().await
    }

    /// Gives it back: another manager can lead at once.
    ///
    /// # Errors
    /// The store can't be told; the leadership then ends by time.
    pub async fn resign(&self) -> Result<(), StoreError> {
        self.standing.lose(Loss::Resigned);
        let tenure = self.tenure.lock().unwrap_or_else(PoisonError::into_inner).take();
        match tenure {
            Some(tenure) => tenure.resign().await,
            None => Ok(()),
        }
    }

    /// Refuses if it does not hold, before the store is asked.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        self.standing.loss().map_or(Ok(()), |why| Err(StoreError::LeadershipLost { why }))
    }

    /// What is told when the store says that it has ended.
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

/// What keeps a leadership in its store; it ends with its drop.
#[async_trait]
pub(crate) trait Tenure: Send + Sync {
    /// Ends it in the store.
    async fn resign(self: Box<Self>) -> Result<(), StoreError>;
}

/// Whether a leadership holds, as its manager sees it.
#[derive(Debug)]
pub(crate) struct Standing {
    loss: watch::Sender<Option<Loss>>,
    /// It may be over in the store from here on, if nothing is heard; none: it does not end by time. Monotonic.
    until: Mutex<Option<Instant>>,
}

impl Standing {
    pub(crate) fn new(until: Option<Instant>) -> Arc<Standing> {
        Arc::new(Standing { loss: watch::Sender::new(None), until: Mutex::new(until) })
    }

    /// It was renewed.
    #[cfg(feature = "etcd")]
    pub(crate) fn holds_until(&self, until: Instant) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
    }

    /// It is lost, for the first reason that is told.
    pub(crate) fn lose(&self, why: Loss) {
        self.loss.send_if_modified(|loss| {
            let first = loss.is_none();
            loss.get_or_insert(why);
            first
        });
    }

    /// Why it is lost; none: it holds.
    pub(crate) fn loss(&self) -> Option<Loss> {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever renews it may be late to say so.
        if until.is_some_and(|until| Instant::now() >= until) {
            self.lose(Loss::RanOut);
        }
        self.loss.borrow().clone()
    }

    /// Waits until it is lost.
    pub(crate) async fn lost(&self) -> Loss {
        let mut loss = self.loss.subscribe();
        match loss.wait_for(Option::is_some).await {
            Ok(loss) => loss.clone().unwrap_or(Loss::Ended),
            // The sender is part of self.
            Err(_) => Loss::Ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_has_run_out_is_lost_though_nobody_said_so() {
        let standing = Standing::new(Some(Instant::now() + Duration::from_secs(3600)));
        assert_eq!(standing.loss(), None);
        let past = Standing::new(Some(Instant::now()));
        assert_eq!(past.loss(), Some(Loss::RanOut));
    }

    #[tokio::test]
    async fn the_first_reason_is_the_one_that_is_told() {
        let standing = Standing::new(None);
        standing.lose(Loss::Ended);
        standing.lose(Loss::Resigned);
        assert_eq!(standing.lost().await, Loss::Ended);
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn what_is_lost_is_not_renewed() {
        let standing = Standing::new(Some(Instant::now()));
        assert_eq!(standing.loss(), Some(Loss::RanOut));
        standing.holds_until(Instant::now() + Duration::from_secs(3600));
        assert_eq!(standing.loss(), Some(Loss::RanOut));
    }
}
