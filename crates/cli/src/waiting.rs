//! Waits for the end of an operation of the manager. Handles Ctrl-C at any time, even during a
//! request, and a manager that is briefly unavailable because it restarts or another one takes
//! over.

use std::time::Duration;

use godwit_api::control::{ManagerError, ProblemCode};
use godwit_types::Fault;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep};

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Poll interval for the progress of an operation.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Longest time a manager may be unavailable: three times what a failover needs (docs/manager.md).
const LONGEST_AWAY: Duration = Duration::from_secs(15);

/// First of two events: an answer or an interrupt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reply<T> {
    Answer(T),
    /// Ctrl-C.
    Interrupted,
}

#[derive(Debug)]
pub(crate) struct Waiting {
    /// One listener for the whole command, so that an interrupt between two requests is not lost.
    interrupts: Signal,
    output: Output,
    poll_interval: Duration,
    longest_away: Duration,
}

impl Waiting {
    /// From here on, Ctrl-C is reported as [`Reply::Interrupted`] and does not end the process.
    /// Call this before an operation starts.
    pub(crate) fn begin(output: Output) -> Result<Waiting, Failure> {
        let interrupts = signal(SignalKind::interrupt())?;
        Ok(Waiting { interrupts, output, poll_interval: POLL_INTERVAL, longest_away: LONGEST_AWAY })
    }

    /// Sends a request, and waits for its answer or an interrupt.
    pub(crate) async fn ask<T, E>(
        &mut self,
        request: impl Future<Output = Result<T, E>>,
    ) -> Result<Reply<T>, E> {
        tokio::select! {
            answer = request => answer.map(Reply::Answer),
            _ = self.interrupts.recv() => Ok(Reply::Interrupted),
        }
    }

    /// Polls an operation after an interval. If the manager is unavailable, retries for several
    /// seconds. The final error says that `what` continues and that `command` shows its result.
    pub(crate) async fn poll<T, F: Future<Output = Result<T, ManagerError>>>(
        &mut self,
        request: impl Fn() -> F,
        what: &str,
        command: &str,
    ) -> Result<Reply<T>, Failure> {
        let mut away_since = None;
        loop {
            let interval = sleep(self.poll_interval);
            tokio::select! {
                () = interval => {}
                _ = self.interrupts.recv() => return Ok(Reply::Interrupted),
            }
            let error = match self.ask(request()).await {
                Ok(reply) => return Ok(reply),
                Err(error) if is_away(&error) => error,
                Err(error) => return Err(error.into()),
            };
            if away_since.is_none() {
                self.output.note(&format!("note: {}; retrying", error.detail()));
            }
            let since = *away_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= self.longest_away {
                let fault = Failure::from(error).fault;
                let remedy =
                    format!("{what} continues without this command: `{command}` shows its state");
                let fault = Fault { remedy, ..fault };
                return Err(Failure { exit: Exit::Unreachable, fault });
            }
        }
    }
}

/// Returns whether the manager, or its successor, may answer soon.
fn is_away(error: &ManagerError) -> bool {
    use ProblemCode as P;
    match error {
        ManagerError::Unreachable { .. } => true,
        ManagerError::Refused(problem) => {
            matches!(problem.code, P::NoLeader | P::StoreAway | P::IssuerAway | P::TooManyRequests)
        }
        // The connection may have been lost in the middle of an answer. A server that is not a
        // manager fails again the next time.
        ManagerError::Protocol { .. } => true,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use godwit_api::Endpoint;
    use godwit_api::control::Problem;

    use super::*;

    fn waiting(longest_away: Duration) -> Waiting {
        let waiting = Waiting::begin(Output::new(true)).unwrap();
        Waiting { poll_interval: Duration::ZERO, longest_away, ..waiting }
    }

    fn gone() -> ManagerError {
        ManagerError::Unreachable {
            endpoint: Endpoint::Unix("/none".into()),
            why: "no such file".into(),
            is_untrusted: false,
        }
    }

    fn refused(code: ProblemCode) -> ManagerError {
        Problem::new(code, "no", "").into()
    }

    #[tokio::test]
    async fn a_manager_that_is_away_for_a_moment_is_asked_again() {
        let polls = Cell::new(0);
        let poll = || {
            polls.set(polls.get() + 1);
            let answer = match polls.get() {
                1 => Err(gone()),
                2 => Err(refused(ProblemCode::NoLeader)),
                3 => Err(refused(ProblemCode::StoreAway)),
                polls => Ok(polls),
            };
            async { answer }
        };
        let reply = waiting(Duration::MAX).poll(poll, "it", "godwit").await;
        assert_eq!(reply.unwrap(), Reply::Answer(4));
    }

    #[tokio::test]
    async fn the_error_about_one_that_stays_away_names_the_command() {
        let poll = || async { Err::<(), _>(gone()) };
        let failure =
            waiting(Duration::ZERO).poll(poll, "move v1", "godwit control move show v1").await;
        let failure = failure.unwrap_err();
        assert_eq!((failure.exit, failure.fault.code.as_str()), (Exit::Unreachable, "unreachable"));
        assert!(failure.fault.remedy.contains("`godwit control move show v1`"), "{failure}");
    }

    #[tokio::test]
    async fn a_refusal_is_returned_at_once() {
        let poll = || async { Err::<(), _>(refused(ProblemCode::NotFound)) };
        let failure = waiting(Duration::MAX).poll(poll, "it", "godwit").await.unwrap_err();
        assert_eq!(failure.exit, Exit::NotFound);
    }
}
