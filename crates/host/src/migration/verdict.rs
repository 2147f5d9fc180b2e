//! What the destination says of a hand-over when its source asks on the agents' API: after the lane broke, or by QEMU's own
//! engine after QEMU has let go of the guest.

use std::time::{Duration, Instant};

use godwit_api::{ApiError, Client, ClientError, ErrorCode, IncomingState, IncomingStatus};
use godwit_migration::Failure;
use godwit_migration::drive::page_in::Again;
use godwit_migration::handover::{
    KeptPagesFate, Known, OfDestination, fate_of_kept_pages, of_destination,
};
use godwit_migration::source::Verdict;
use godwit_qemu::Uuid;
use godwit_types::{FailureCode, Incarnation, Ownership};

/// For how long the destination is asked what became of a commit before doubt is reported.
const VERDICT_LIMIT: Duration = Duration::from_secs(20);
/// Between two such questions.
const VERDICT_INTERVAL: Duration = Duration::from_millis(200);

/// How long an answer from disk may take: across a link that is cut it never comes.
const KNOWN_LIMIT: Duration = Duration::from_secs(2);

/// How long the destination may take to remove its shadow.
const FORGET_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks at whether it has.
const FORGET_INTERVAL: Duration = Duration::from_millis(20);

/// Has the destination remove its shadow, so that the next attempt does not find it. Returns where it ended; none where it
/// can't be asked or takes too long.
pub(super) async fn forget(peer: &Client, id: &str, vm: &str) -> Option<IncomingState> {
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
            tracing::warn!(vm, %error, "shadow left to itself");
            None
        }
        Err(_) => {
            tracing::warn!(vm, "the shadow is not removed yet");
            None
        }
    }
}

/// A hand-over to ask for.
pub(super) struct HandOver<'a> {
    /// The destination's agent.
    pub(super) peer: &'a Client,
    /// Its name for the migration.
    pub(super) id: &'a str,
    pub(super) vm: &'a str,
    pub(super) uuid: Uuid,
    /// The ownership that the destination gets.
    pub(super) offered: Ownership,
}

#[derive(Debug)]
pub(super) enum Answer {
    /// It runs the guest; with the status, unless its agent has restarted since.
    Runs(Option<IncomingStatus>),
    /// It does not and will not.
    Refused(String),
    /// Nothing that would decide it.
    Open,
}

impl HandOver<'_> {
    /// The destination's status, unless it does not answer; `Runs` without one from an agent that has restarted since.
    pub(super) async fn answer(&self, status: Result<IncomingStatus, ClientError>) -> Answer {
        match status {
            // Of another life of the VM: nothing is said of this one.
            Ok(status) if status.incarnation != self.offered.incarnation => Answer::Open,
            Ok(status) => match status.state {
                IncomingState::Runs => Answer::Runs(Some(status)),
                IncomingState::Refused => Answer::Refused(
                    status
                        .failure
                        .map_or_else(|| "it does not say why".into(), |failure| failure.message),
                ),
                IncomingState::Receiving | IncomingState::Broken => Answer::Open,
            },
            Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => {
                self.after_restart().await
            }
            Err(_) => Answer::Open,
        }
    }

    /// An agent that was started anew since knows no migrations, but what it has written down of each VM.
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
                Answer::Refused("its agent has restarted, and has let go of the shadow".into())
            }
            OfDestination::Open => Answer::Open,
        }
    }

    async fn ask(&self) -> Answer {
        let status = self.peer.get(&format!("/v1/incoming/{}", self.id)).await;
        self.answer(status).await
    }

    /// Asks what became of a commit, for as long as doubt is bearable.
    pub(super) async fn verdict(&self) -> Verdict {
        let limit = Instant::now() + VERDICT_LIMIT;
        let mut every = tokio::time::interval(VERDICT_INTERVAL);
        while Instant::now() < limit {
            every.tick().await;
            match self.ask().await {
                Answer::Runs(_) => return Verdict::Runs,
                Answer::Refused(why) => {
                    let detail = format!(
                        "the lane broke, and the destination did not take the guest: {why}"
                    );
                    return Verdict::Refused(Failure::new(FailureCode::LaneLost, detail));
                }
                Answer::Open => {}
            }
        }
        Verdict::Unknown
    }
}

/// What becomes of the pages that are kept of a guest offered as `offered`, where the destination gives no session for them; none:
/// nobody knows yet. What it has written down decides, by the VM's uuid: its name may be another VM's since.
pub(super) async fn without_session(
    peer: &Client,
    vm: &str,
    uuid: Uuid,
    offered: Ownership,
) -> Option<Again> {
    let known = ask_known(peer, vm, uuid, offered.incarnation).await.ok()?;
    match fate_of_kept_pages(known, offered) {
        KeptPagesFate::AskAgain => None,
        KeptPagesFate::NotNeeded => Some(Again::Complete),
        KeptPagesFate::Refused => Some(Again::Refused(Failure::new(
            FailureCode::LaneLost,
            "the destination does not have the guest, and never ran it",
        ))),
    }
}

/// The part of a question that says which life of which VM is meant. An incarnation that is not recorded is left out, as
/// older releases do.
pub(crate) fn of_life(uuid: Uuid, incarnation: Incarnation) -> String {
    match incarnation.is_unrecorded() {
        true => format!("uuid={uuid}"),
        false => format!("uuid={uuid}&incarnation={incarnation}"),
    }
}

/// Asks another host what it has written down of a VM, in that life of it.
pub(crate) async fn ask_known(
    peer: &Client,
    vm: &str,
    uuid: Uuid,
    incarnation: Incarnation,
) -> Result<Known, ApiError> {
    let path = format!("/v1/hand-overs/{vm}?{}", of_life(uuid, incarnation));
    let unreachable = |why: String| {
        ApiError::new(ErrorCode::PeerUnreachable, why, "see that its agent runs and can be reached")
    };
    match tokio::time::timeout(KNOWN_LIMIT, peer.get(&path)).await {
        Ok(Ok(known)) => Ok(known),
        Ok(Err(ClientError::Refused(error))) => Err(error),
        Ok(Err(error)) => Err(unreachable(error.to_string())),
        Err(_) => Err(unreachable(format!("no answer within {} s", KNOWN_LIMIT.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::Endpoint;
    use godwit_migration::handover::{Role, Standing};

    use super::*;

    fn of_life(bits: u128, epoch: u64) -> Ownership {
        Ownership { incarnation: Incarnation::new(bits), epoch }
    }

    #[test]
    fn a_restarted_agent_that_does_not_know_has_not_said_that_the_guest_runs() {
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
