//! State that exists only while this manager leads.

use std::sync::Arc;

use godwit_api::control::{Problem, ProblemCode};
use tokio::sync::watch;

/// A value that exists only while this manager leads, such as its keeper or its moves.
#[derive(Debug)]
pub(crate) struct Term<T>(watch::Sender<Option<Arc<T>>>);

impl<T> Default for Term<T> {
    fn default() -> Term<T> {
        Term(watch::Sender::new(None))
    }
}

impl<T> Term<T> {
    /// Sets the value.
    pub(crate) fn begin(&self, it: Arc<T>) {
        self.0.send_replace(Some(it));
    }

    /// Removes the value and returns it.
    pub(crate) fn end(&self) -> Option<Arc<T>> {
        self.0.send_replace(None)
    }

    /// Returns the value.
    ///
    /// # Errors
    /// [`ProblemCode::NoLeader`]: another manager leads, or none.
    pub(crate) fn get(&self) -> Result<Arc<T>, Problem> {
        self.0.borrow().clone().ok_or_else(|| {
            let remedy = "try again in a few seconds; `godwit control status` names the leader";
            Problem::new(ProblemCode::NoLeader, "this manager does not lead", remedy)
        })
    }

    /// Returns whether there is a value.
    pub(crate) fn is_on(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Waits until there is a value.
    pub(crate) async fn begins(&self) {
        // This cannot fail: the sender is part of self.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }
}
