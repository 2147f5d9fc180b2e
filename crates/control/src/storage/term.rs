//! What exists only while this manager leads.

use std::sync::Arc;

use godwit_api::control::{Problem, ProblemCode};
use tokio::sync::watch;

/// Something that exists only while this manager leads: its keeper, its moves.
#[derive(Debug)]
pub(crate) struct Term<T>(watch::Sender<Option<Arc<T>>>);

impl<T> Default for Term<T> {
    fn default() -> Term<T> {
        Term(watch::Sender::new(None))
    }
}

impl<T> Term<T> {
    /// Has this from now on.
    pub(crate) fn begin(&self, it: Arc<T>) {
        self.0.send_replace(Some(it));
    }

    /// Has nothing any more; returns what it had.
    pub(crate) fn end(&self) -> Option<Arc<T>> {
        self.0.send_replace(None)
    }

    /// Returns what it has.
    ///
    /// # Errors
    /// [`ProblemCode::NoLeader`]: another manager leads, or none.
    pub(crate) fn get(&self) -> Result<Arc<T>, Problem> {
        self.0.borrow().clone().ok_or_else(|| {
            let remedy =
                "ask again in some seconds; `godwit control status` names the one that leads";
            Problem::new(ProblemCode::NoLeader, "this manager does not lead", remedy)
        })
    }

    /// Whether it has something.
    pub(crate) fn is_on(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Waits until it has something.
    pub(crate) async fn begins(&self) {
        // It can't fail: the sender is part of self.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }
}
