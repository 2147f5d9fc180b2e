//! What a command goes through that waits for the end of something that the manager does: Ctrl-C, at any moment and also while a request is
//! under way, and a manager that is away for a moment, as when it is started again or another one takes over.

use std::time::Duration;

use godwit_api::control::{ManagerError, ProblemCode};
use godwit_types::Fault;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep};

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// How often the manager is asked how far something is.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a manager may be away: three times what another one needs to take over (docs/manager.md).
const LONGEST_AWAY: Duration = Duration::from_secs(15);

/// What came first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard<T> {
    Answer(T),
    /// Ctrl-C.
    Interrupted,
}

#[derive(Debug)]
pub(crate) struct Waiting {
    /// One for the whole command: what comes between two requests is not lost.
    interrupts: Signal,
    output: Output,
    look_interval: Duration,
    longest_away: Duration,
}

impl Waiting {
    /// From here on Ctrl-C is told by [`Heard`], and does not end the process: to be called before anything is begun.
    pub(crate) fn begin(output: Output) -> Result<Waiting, Failure> {
        let interrupts = signal(SignalKind::interrupt())?;
        Ok(Waiting { interrupts, output, look_interval: LOOK_INTERVAL, longest_away: LONGEST_AWAY })
    }

    /// One request.
    pub(crate) async fn ask<T, E>(
        &mut self,
        request: impl Future<Output = Result<T, E>>,
    ) -> Result<Heard<T>, E> {
        tokio::select! {
            answer = request => answer.map(Heard::Answer),
            _ = self.interrupts.recv() => Ok(Heard::Interrupted),
        }
    }

    /// Looks how far something is, some time from now; `what` goes on meanwhile and is looked at again by `command` when nobody answers.
    /// A manager that is away is asked again, and is given up after some seconds.
    pub(crate) async fn look<T, F: Future<Output = Result<T, ManagerError>>>(
        &mut self,
        request: impl Fn() -> F,
        what: &str,
        command: &str,
    ) -> Result<Heard<T>, Failure> {
        let mut away_since = None;
        loop {
            let interval = sleep(self.look_interval);
            tokio::select! {
                () = interval => {}
                _ = self.interrupts.recv() => return Ok(Heard::Interrupted),
            }
            let error = match self.ask(request()).await {
                Ok(heard) => return Ok(heard),
                Err(error) if is_away(&error) => error,
                Err(error) => return Err(error.into()),
            };
            if away_since.is_none() {
                self.output.note(&format!("note: {}; it is asked again", error.detail()));
            }
            let since = *away_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= self.longest_away {
                let fault = Failure::from(error).fault;
                let remedy =
                    format!("{what} goes on without this command: `{command}` tells how it ends");
                let fault = Fault { remedy, ..fault };
                return Err(Failure { exit: Exit::Unreachable, fault });
            }
        }
    }
}

/// Whether the manager, or the one that takes over, may answer in a moment.
fn is_away(error: &ManagerError) -> bool {
    use ProblemCode as P;
    match error {
        ManagerError::Unreachable { .. } => true,
        ManagerError::Refused(problem) => {
            matches!(problem.code, P::NoLeader | P::StoreAway | P::IssuerAway | P::TooManyRequests)
        }
        // The connection may have broken in the midst of an answer; what is no manager at all is none the next time either.
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
        Waiting { look_interval: Duration::ZERO, longest_away, ..waiting }
    }

    fn gone() -> ManagerError {
        ManagerError::Unreachable {
            endpoint: Endpoint::Unix("/none".into()),
            why: "no such file".into(),
        }
    }

    fn refused(code: ProblemCode) -> ManagerError {
        Problem::new(code, "no", "").into()
    }

    #[tokio::test]
    async fn a_manager_that_is_away_for_a_moment_is_asked_again() {
        let looks = Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            let answer = match looks.get() {
                1 => Err(gone()),
                2 => Err(refused(ProblemCode::NoLeader)),
                3 => Err(refused(ProblemCode::StoreAway)),
                looks => Ok(looks),
            };
            async { answer }
        };
        let heard = waiting(Duration::MAX).look(look, "it", "godwit").await;
        assert_eq!(heard.unwrap(), Heard::Answer(4));
    }

    #[tokio::test]
    async fn one_that_stays_away_is_told_with_how_to_go_on() {
        let look = || async { Err::<(), _>(gone()) };
        let failure =
            waiting(Duration::ZERO).look(look, "move v1", "godwit control move show v1").await;
        let failure = failure.unwrap_err();
        assert_eq!((failure.exit, failure.fault.code.as_str()), (Exit::Unreachable, "unreachable"));
        assert!(failure.fault.remedy.contains("`godwit control move show v1`"), "{failure}");
    }

    #[tokio::test]
    async fn a_refusal_is_told_at_once() {
        let look = || async { Err::<(), _>(refused(ProblemCode::NotFound)) };
        let failure = waiting(Duration::MAX).look(look, "it", "godwit").await.unwrap_err();
        assert_eq!(failure.exit, Exit::NotFound);
    }
}
