//! What the destination says of a hand-over when its source asks on the agents' API: after the lane broke, or by QEMU's own
//! engine after QEMU has let go of the guest.

use std::time::{Duration, Instant};

use godwit_api::{Client, ClientError, ErrorCode, IncomingState, IncomingStatus, VmInfo, VmState};
use godwit_migration::source::Verdict;
use godwit_migration::{Failure, FailureCode};

/// For how long the destination is asked what became of a commit before doubt is reported.
const VERDICT_LIMIT: Duration = Duration::from_secs(20);
/// Between two such questions.
const VERDICT_INTERVAL: Duration = Duration::from_millis(200);

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
    /// The generation of ownership that the destination gets.
    pub(super) epoch: u64,
}

/// One answer.
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
            Ok(status) => match status.state {
                IncomingState::Runs => Answer::Runs(Some(status)),
                IncomingState::Refused => Answer::Refused(
                    status.failure.map_or_else(|| "it does not say why".into(), |failure| failure.message),
                ),
                IncomingState::Receiving | IncomingState::Broken => Answer::Open,
            },
            Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => {
                self.after_restart().await
            }
            Err(_) => Answer::Open,
        }
    }

    /// An agent that restarts keeps the guest that runs there, and removes the shadow that does not. What it is in doubt about itself
    /// decides nothing.
    async fn after_restart(&self) -> Answer {
        self.answer_of_vm(self.peer.get(&format!("/v1/vms/{}", self.vm)).await)
    }

    fn answer_of_vm(&self, vm: Result<VmInfo, ClientError>) -> Answer {
        match vm {
            Ok(info) if info.epoch != self.epoch || info.in_doubt => Answer::Open,
            Ok(info) if matches!(info.state, VmState::Running | VmState::Paused) => Answer::Runs(None),
            Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => {
                Answer::Refused("its agent has restarted, and it has no such VM".into())
            }
            _ => Answer::Open,
        }
    }

    async fn ask(&self) -> Answer {
        let status = self.peer.get(&format!("/v1/incoming/{}", self.id)).await;
        self.answer(status).await
    }

    /// Why the destination needs no pages of the guest, where it says so now: it was refused, or ran there and is gone.
    pub(super) async fn refused(&self) -> Option<Failure> {
        match self.ask().await {
            Answer::Refused(why) => {
                let detail = format!("the destination does not have the guest: {why}");
                Some(Failure::new(FailureCode::LaneLost, detail))
            }
            Answer::Runs(_) => {
                let vm = self.peer.get::<VmInfo>(&format!("/v1/vms/{}", self.vm)).await;
                let is_gone =
                    matches!(vm, Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound);
                is_gone.then(|| {
                    Failure::new(
                        FailureCode::InDoubt,
                        "the destination ran the guest, and has no such VM any more",
                    )
                })
            }
            Answer::Open => None,
        }
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
                    let detail = format!("the lane broke, and the destination did not take the guest: {why}");
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
    use godwit_api::{ApiError, Endpoint};

    use super::*;

    fn vm(state: &str, in_doubt: bool, epoch: u64) -> VmInfo {
        serde_json::from_value(serde_json::json!({
            "name": "web", "host": "b", "state": state, "reason": null, "in_doubt": in_doubt, "epoch": epoch,
            "pid": 42, "memory_bytes": 1 << 26, "vcpus": 1, "accel": "tcg", "machine": "pc-q35-7.2",
            "migration": null, "addresses": [], "spec": { "name": "web", "kernel": "/boot/vmlinuz" },
        }))
        .unwrap()
    }

    #[test]
    fn a_restarted_agent_in_doubt_has_not_said_that_the_guest_runs() {
        let peer = Client::new(Endpoint::Tcp("127.0.0.1:1".to_owned()));
        let hand_over = HandOver { peer: &peer, id: "1", vm: "web", epoch: 2 };
        let answer = |vm| hand_over.answer_of_vm(vm);
        for state in ["running", "paused"] {
            assert!(matches!(answer(Ok(vm(state, false, 2))), Answer::Runs(None)), "{state}");
        }
        // A shadow's QEMU may still say that its guest runs.
        let shadow = vm("migrating-in", false, 2);
        for open in [vm("paused", true, 2), vm("running", false, 1), vm("failed", false, 2), shadow] {
            assert!(matches!(answer(Ok(open.clone())), Answer::Open), "{open:?}");
        }
        let unknown = ApiError::new(ErrorCode::NotFound, "no such VM", "");
        assert!(matches!(answer(Err(ClientError::Refused(unknown))), Answer::Refused(_)));
    }
}
