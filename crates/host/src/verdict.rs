//! The destination's verdict on a hand-over, queried over the agents' API: after the lane broke, or
//! with QEMU's own engine after QEMU has released the guest.

use std::time::{Duration, Instant};

use godwit_api::{Client, ClientError, ErrorCode, IncomingState, IncomingStatus};
use godwit_migration::Failure;
use godwit_migration::handover::{Known, OfDestination, of_destination};
use godwit_migration::source::Verdict;
use godwit_qemu::Uuid;
use godwit_types::{FailureCode, Ownership};

use crate::peer_record::ask_known;

/// Time for which the destination is asked about a commit before the guest counts as in doubt.
const VERDICT_LIMIT: Duration = Duration::from_secs(20);
/// Interval between two such queries.
const VERDICT_INTERVAL: Duration = Duration::from_millis(200);

/// Time for the destination to remove its shadow.
const FORGET_LIMIT: Duration = Duration::from_secs(5);
/// Poll interval for that removal.
const FORGET_INTERVAL: Duration = Duration::from_millis(20);

/// Has the destination remove its shadow, so that the next attempt does not find it. Returns the
/// shadow's final state; `None` if the destination is unreachable or too slow.
pub(crate) async fn forget(peer: &Client, id: &str, vm: &str) -> Option<IncomingState> {
    let path = format!("/v1/incoming/{id}");
    let gone = async {
        peer.delete(&path).await?;
        let mut every = tokio::time::interval(FORGET_INTERVAL);
        loop {
            every.tick().await;
            let state = peer.get::<IncomingStatus>(&path).await?.state;
            if state != IncomingState::Receiving {
                return Ok::<_, ClientError>(state);
            }
        }
    };
    match tokio::time::timeout(FORGET_LIMIT, gone).await {
        Ok(Ok(state)) => Some(state),
        Ok(Err(error)) => {
            tracing::warn!(vm, %error, "cannot remove the shadow");
            None
        }
        Err(_) => {
            tracing::warn!(vm, "the shadow is not removed yet");
            None
        }
    }
}

/// A hand-over to query.
pub(crate) struct HandOver<'a> {
    /// Client of the destination's agent.
    pub(crate) peer: &'a Client,
    /// The destination's ID of the migration.
    pub(crate) id: &'a str,
    pub(crate) vm: &'a str,
    pub(crate) uuid: Uuid,
    /// The ownership that was offered to the destination.
    pub(crate) offered: Ownership,
}

#[derive(Debug)]
pub(crate) enum Answer {
    /// The destination runs the guest; with its status, unless its agent has restarted since.
    Runs(Option<IncomingStatus>),
    /// The destination does not run the guest and will not.
    Refused(String),
    /// Nothing that decides the matter.
    Open,
}

impl HandOver<'_> {
    /// Interprets the destination's status. Returns `Runs` without a status if the agent has
    /// restarted since.
    pub(crate) async fn answer(&self, status: Result<IncomingStatus, ClientError>) -> Answer {
        match status {
            // Another incarnation of the VM: its status says nothing about this one.
            Ok(status) if status.incarnation != self.offered.incarnation => Answer::Open,
            Ok(status) => match status.state {
                IncomingState::Runs => Answer::Runs(Some(status)),
                IncomingState::Refused => Answer::Refused(
                    status
                        .failure
                        .map_or_else(|| "no reason given".into(), |failure| failure.message),
                ),
                IncomingState::Receiving | IncomingState::Broken => Answer::Open,
            },
            Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => {
                self.after_restart().await
            }
            Err(_) => Answer::Open,
        }
    }

    /// Queries the record of an agent that has restarted: it knows no migrations, but the ownership
    /// of each VM.
    async fn after_restart(&self) -> Answer {
        match ask_known(self.peer, self.vm, self.uuid, self.offered.incarnation).await {
            Ok(known) => self.answer_of(known),
            Err(_) => Answer::Open,
        }
    }

    fn answer_of(&self, known: Known) -> Answer {
        match of_destination(known, self.offered) {
            OfDestination::Took => Answer::Runs(None),
            OfDestination::Refused => {
                Answer::Refused("its agent has restarted and has dropped the shadow".into())
            }
            OfDestination::Open => Answer::Open,
        }
    }

    async fn ask(&self) -> Answer {
        let status = self.peer.get(&format!("/v1/incoming/{}", self.id)).await;
        self.answer(status).await
    }

    /// Queries the outcome of a commit until the time limit.
    pub(crate) async fn verdict(&self) -> Verdict {
        let limit = Instant::now() + VERDICT_LIMIT;
        let mut every = tokio::time::interval(VERDICT_INTERVAL);
        while Instant::now() < limit {
            every.tick().await;
            match self.ask().await {
                Answer::Runs(_) => return Verdict::Runs,
                Answer::Refused(why) => {
                    let detail = format!(
                        "the lane broke, and the destination did not accept the guest: {why}"
                    );
                    return Verdict::Refused(Failure::new(FailureCode::LaneLost, detail));
                }
                Answer::Open => {}
            }
        }
        Verdict::Unknown
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::Endpoint;
    use godwit_migration::handover::{Role, Standing};
    use godwit_types::Incarnation;

    use super::*;

    fn of_life(bits: u128, epoch: u64) -> Ownership {
        Ownership { incarnation: Incarnation::new(bits), epoch }
    }

    #[test]
    fn an_undecided_restarted_agent_has_not_confirmed_that_the_guest_runs() {
        let peer = Client::new(Endpoint::Tcp("127.0.0.1:1".to_owned()));
        let hand_over =
            HandOver { peer: &peer, id: "1", vm: "web", uuid: Uuid::nil(), offered: of_life(7, 2) };
        let answer = |role, epoch| {
            hand_over.answer_of(Known::Has(Standing { role, ownership: of_life(7, epoch) }))
        };
        assert!(matches!(answer(Role::Owner, 2), Answer::Runs(None)));
        for role in [Role::Shadow, Role::TakingOver, Role::Stranded] {
            assert!(matches!(answer(role, 2), Answer::Open), "{role:?}");
        }
        assert!(matches!(answer(Role::Owner, 1), Answer::Refused(_)));
        assert!(matches!(hand_over.answer_of(Known::Never), Answer::Refused(_)));
        for other_life in [
            Known::Gone(of_life(8, 2)),
            Known::Has(Standing { role: Role::Owner, ownership: of_life(8, 5) }),
        ] {
            assert!(
                matches!(hand_over.answer_of(other_life), Answer::Refused(_)),
                "{other_life:?}"
            );
        }
    }
}
