//! Changes of settings: one after the other, each to its end.

use std::sync::Arc;

use godwit_api::control::{Problem, ProblemCode};

use super::keeper::Keeper;
use super::term::Term;
use crate::cluster::state::State;
use crate::journal::requester;

/// Serialises changes of settings while this manager leads.
#[derive(Clone, Debug)]
pub(crate) struct Planning {
    state: Arc<State>,
    keeper: Arc<Term<Keeper>>,
}

impl Planning {
    pub(crate) fn new(state: Arc<State>, keeper: Arc<Term<Keeper>>) -> Planning {
        Planning { state, keeper }
    }

    /// Carries out one change after the other, each to its end even if the caller disconnects. So
    /// the store and the state in memory never differ.
    ///
    /// # Errors
    /// The errors of the change, and [`ProblemCode::NoLeader`]: this manager does not lead.
    pub(crate) async fn change<T, F>(
        &self,
        change: impl FnOnce(Arc<Keeper>) -> F + Send + 'static,
    ) -> Result<T, Problem>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Problem>> + Send,
    {
        let Planning { state, keeper } = self.clone();
        whole(async move {
            let _turn = state.planning().await;
            change(keeper.get()?).await
        })
        .await
    }
}

/// Carries out an operation to its end even if the caller disconnects.
pub(crate) async fn whole<T: Send + 'static>(
    operation: impl Future<Output = Result<T, Problem>> + Send + 'static,
) -> Result<T, Problem> {
    let failed = |_| {
        let detail = "cannot complete the request: it stopped on an internal error";
        Problem::new(ProblemCode::ManagerFailed, detail, "")
    };
    tokio::spawn(requester::kept(operation)).await.map_err(failed)?
}
