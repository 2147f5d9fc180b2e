//! Changes of what is planned: one after the other, each to its end.

use std::sync::Arc;

use godwit_api::control::{Problem, ProblemCode};

use super::keeper::Keeper;
use super::term::Term;
use crate::cluster::state::State;

/// Changes what is planned, while this manager leads.
#[derive(Clone, Debug)]
pub(crate) struct Planning {
    state: Arc<State>,
    keeper: Arc<Term<Keeper>>,
}

impl Planning {
    pub(crate) fn new(state: Arc<State>, keeper: Arc<Term<Keeper>>) -> Planning {
        Planning { state, keeper }
    }

    /// Carries out one change after the other, and each to its end, also where who asked has gone. So what the store has and what is
    /// known never differ.
    ///
    /// # Errors
    /// The change's own, and [`ProblemCode::NoLeader`]: this manager does not lead.
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

/// Carries something out to its end, also where who asked has gone.
pub(crate) async fn whole<T: Send + 'static>(
    operation: impl Future<Output = Result<T, Problem>> + Send + 'static,
) -> Result<T, Problem> {
    let failed =
        |_| Problem::new(ProblemCode::ManagerFailed, "the request was not carried to its end", "");
    tokio::spawn(operation).await.map_err(failed)?
}
