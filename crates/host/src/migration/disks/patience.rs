//! Requests of a source whose disks travel: they wait out a cut of the link, as the streams of the
//! disks do. A request is repeated until it is answered, the limit for cuts has passed, or the
//! migration ends otherwise. So each must be one that can be repeated: one that changes nothing, or
//! that has an ID by which the destination knows it again.
//!
//! A link may drop packets without an error. So once it is known to be cut, each attempt has a
//! time limit of its own, and none lasts longer than the cut may. What is no answer of an agent
//! may be one that was cut short: the request is repeated a few times.

use std::time::{Duration, Instant};

use godwit_api::{ClientError, ErrorCode};
use godwit_migration::{Failure, millis};
use godwit_types::FailureCode;

use crate::agent::ended::shut_down;
use crate::migrations::MigrationControl;
use crate::vm::Vm;

/// Interval between two attempts.
const AGAIN_INTERVAL: Duration = Duration::from_millis(300);
/// Longest time for the answer to an attempt while the link is cut. The destination goes on with
/// what it has begun, and answers a later attempt.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(30);
/// Most answers in a row that are none of an agent.
const MOST_FOREIGN_ANSWERS: u32 = 3;
/// Time for the answer to a request that is under way when the migration ends: it says what the
/// destination has to remove. Not waited for once the link is known to be cut.
const LAST_ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// The destination refused it, or its absence is not waited for.
    Error(ClientError),
    /// The limit has passed, or the migration has ended.
    Ended(Failure),
}

/// Returns the answer to a request that can be repeated.
///
/// `limit`: time for which a cut link is waited for. `ended`: why the migration ends meanwhile.
/// `waits`: called after each attempt that was lost.
///
/// # Errors
/// The destination refuses the request, or does not answer in time; the migration ends.
pub(crate) async fn answer<T, A>(
    limit: Duration,
    mut ask: impl FnMut() -> A,
    ended: impl Future<Output = Failure>,
    waits: impl Fn(&ClientError),
) -> Result<T, NoAnswer>
where
    A: Future<Output = Result<T, ClientError>>,
{
    let mut ended = std::pin::pin!(ended);
    let mut every = tokio::time::interval(AGAIN_INTERVAL);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut cut: Option<Cut> = None;
    loop {
        tokio::select! {
            _ = every.tick() => {}
            failure = &mut ended => return Err(NoAnswer::Ended(failure)),
        }
        let most = cut.as_ref().map(|cut| cut.attempt_limit(limit));
        let mut asking = std::pin::pin!(within(most, ask()));
        let answer = tokio::select! {
            answer = &mut asking => answer,
            failure = &mut ended => {
                let last = if cut.is_some() { Duration::ZERO } else { LAST_ANSWER_LIMIT };
                return match tokio::time::timeout(last, asking).await {
                    Ok(Some(Ok(answer))) => Ok(answer),
                    Ok(Some(Err(_)) | None) | Err(_) => Err(NoAnswer::Ended(failure)),
                };
            }
        };
        let now = match (answer, cut) {
            (Some(Ok(answer)), _) => return Ok(answer),
            (Some(Err(error)), cut) => {
                if limit.is_zero() || !may_pass(&error, cut.as_ref()) {
                    return Err(NoAnswer::Error(error));
                }
                Cut::after(error, cut)
            }
            (None, Some(cut)) => cut,
            // Only an attempt during a cut has a limit.
            (None, None) => {
                cut = None;
                continue;
            }
        };
        if now.since.elapsed() >= limit {
            return Err(too_late(now.error, limit));
        }
        waits(&now.error);
        cut = Some(now);
    }
}

/// A cut of the link, as the attempts so far show it.
#[derive(Debug)]
struct Cut {
    since: Instant,
    /// The last error.
    error: ClientError,
    /// Answers in a row that are none of an agent.
    foreign_answers: u32,
}

impl Cut {
    /// Returns the cut after another error.
    fn after(error: ClientError, before: Option<Cut>) -> Cut {
        let (since, foreign) = match before {
            Some(cut) => (cut.since, cut.foreign_answers),
            None => (Instant::now(), 0),
        };
        let is_foreign = matches!(error, ClientError::Protocol { .. });
        Cut { since, error, foreign_answers: if is_foreign { foreign + 1 } else { 0 } }
    }

    /// Returns the time for the next attempt. `limit`: that of the cut.
    fn attempt_limit(&self, limit: Duration) -> Duration {
        ATTEMPT_LIMIT.min(limit.saturating_sub(self.since.elapsed()))
    }
}

/// Waits for the answer to an attempt; `None`: it takes longer than `most`.
async fn within<A: Future>(most: Option<Duration>, asking: A) -> Option<A::Output> {
    match most {
        Some(most) => tokio::time::timeout(most, asking).await.ok(),
        None => Some(asking.await),
    }
}

/// Whether a repetition may have another answer.
fn may_pass(error: &ClientError, cut: Option<&Cut>) -> bool {
    match error {
        ClientError::Unreachable { is_untrusted, .. } => !is_untrusted,
        // An answer that was cut short, or one of another program.
        ClientError::Protocol { .. } => {
            cut.is_none_or(|cut| cut.foreign_answers < MOST_FOREIGN_ANSWERS)
        }
        // The earlier attempt is still being carried out, or the disks are not connected again.
        ClientError::Refused(error) => cut.is_some() && error.code == ErrorCode::Busy,
    }
}

fn too_late(error: ClientError, limit: Duration) -> NoAnswer {
    if !matches!(error, ClientError::Unreachable { .. }) {
        return NoAnswer::Error(error);
    }
    let limit = limit.as_secs();
    let detail = format!("{}; the link was not restored within {limit} s", error.detail());
    NoAnswer::Ended(Failure::new(FailureCode::LaneLost, detail))
}

/// Waits until the migration is cancelled or its guest has ended.
pub(crate) async fn over(vm: &Vm, control: &MigrationControl) -> Failure {
    tokio::select! {
        () = control.cancelled() => {
            Failure::new(FailureCode::Cancelled, "cancelled while the destination was asked")
        }
        () = vm.process.qmp.until_guest_shuts_down() => shut_down(&vm.name),
        _ = vm.process.exited() => {
            let detail = "QEMU ended while the destination was asked";
            Failure::new(FailureCode::HypervisorFailed, detail)
        }
    }
}

/// Shows that a migration, which began at `begun`, waits for its link.
pub(crate) fn shows(vm: &Vm, control: &MigrationControl, begun: Instant, error: &ClientError) {
    tracing::debug!(vm = vm.name.as_str(), %error, "no answer of the destination: asking again");
    control.reconnects(millis(begun.elapsed()));
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use godwit_api::{ApiError, Endpoint};
    use tokio::sync::watch;

    use super::*;

    type MakesError = fn() -> ClientError;

    const LONG: Duration = Duration::from_secs(300);

    fn away() -> ClientError {
        let endpoint = Endpoint::Tcp("10.0.0.2:7700".to_owned());
        let why = "no connection within 5 s".to_owned();
        ClientError::Unreachable { endpoint, why, is_untrusted: false }
    }

    fn cut_short() -> ClientError {
        let endpoint = Endpoint::Tcp("10.0.0.2:7700".to_owned());
        ClientError::Protocol { endpoint, why: "connection closed".to_owned() }
    }

    fn refused(code: ErrorCode) -> ClientError {
        ClientError::Refused(ApiError::new(code, "not now", ""))
    }

    /// Asks a destination that answers with these errors, then well. Returns also the number of
    /// requests, and how often the migration showed that it waits.
    fn ask(
        limit: Duration,
        errors: &[fn() -> ClientError],
    ) -> (Result<u8, NoAnswer>, usize, usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (asked, waited) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let request = || {
            let error = errors.get(asked.fetch_add(1, Ordering::SeqCst));
            std::future::ready(error.map_or(Ok(7), |error| Err(error())))
        };
        let waits = |_: &ClientError| {
            waited.fetch_add(1, Ordering::SeqCst);
        };
        let answered = answer(limit, request, std::future::pending(), waits);
        let answered = runtime.block_on(answered);
        (answered, asked.into_inner(), waited.into_inner())
    }

    #[test]
    fn a_destination_that_is_away_for_a_while_is_asked_again() {
        let (answered, asked, waited) = ask(LONG, &[away, cut_short]);
        assert_eq!((answered.unwrap(), asked, waited), (7, 3, 2));
        // After a cut, the first request may still be carried out.
        let (answered, asked, _) = ask(LONG, &[away, || refused(ErrorCode::Busy)]);
        assert_eq!((answered.unwrap(), asked), (7, 3));
    }

    #[test]
    fn a_refusal_is_not_waited_for_and_nothing_is_without_a_limit() {
        let untrusted = || match away() {
            ClientError::Unreachable { endpoint, why, .. } => {
                ClientError::Unreachable { endpoint, why, is_untrusted: true }
            }
            other => other,
        };
        let refusal = || refused(ErrorCode::Preflight);
        let busy = || refused(ErrorCode::Busy);
        let cases: [(Duration, [MakesError; 2], usize); 5] = [
            (LONG, [refusal, away], 1),
            (LONG, [busy, away], 1),
            (LONG, [untrusted, away], 1),
            (LONG, [away, refusal], 2),
            (Duration::ZERO, [away, away], 1),
        ];
        for (limit, errors, expected) in cases {
            let (answered, asked, _) = ask(limit, &errors);
            assert!(matches!(answered, Err(NoAnswer::Error(_))), "{answered:?}");
            assert_eq!(asked, expected, "{answered:?}");
        }
    }

    #[test]
    fn what_is_no_answer_of_an_agent_is_reported_after_a_few_repetitions() {
        let (answered, asked, _) = ask(LONG, &[cut_short as MakesError; 9]);
        let Err(NoAnswer::Error(ClientError::Protocol { why, .. })) = answered else {
            panic!("{answered:?}")
        };
        assert_eq!((why.as_str(), asked), ("connection closed", 4));
        // A link that is cut in between cuts answers short, too.
        let (answered, asked, _) =
            ask(LONG, &[cut_short, cut_short, cut_short, away, cut_short, cut_short]);
        assert_eq!((answered.unwrap(), asked), (7, 7));
    }

    #[test]
    fn an_attempt_that_a_silent_cut_swallows_does_not_outlast_the_limit() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let asked = AtomicUsize::new(0);
        let request = || {
            let is_first = asked.fetch_add(1, Ordering::SeqCst) == 0;
            async move {
                if !is_first {
                    std::future::pending::<()>().await;
                }
                Err::<u8, _>(away())
            }
        };
        let limit = Duration::from_millis(700);
        let answered = runtime.block_on(answer(limit, request, std::future::pending(), |_| {}));
        let Err(NoAnswer::Ended(failure)) = answered else { panic!("{answered:?}") };
        assert_eq!(failure.code, FailureCode::LaneLost);
        assert!(asked.into_inner() <= 3);
        let cut = Cut::after(away(), None);
        assert_eq!(cut.attempt_limit(Duration::from_secs(9000)), ATTEMPT_LIMIT);
        assert!(cut.attempt_limit(Duration::from_secs(9)) <= Duration::from_secs(9));
    }

    #[test]
    fn a_cut_beyond_the_limit_ends_the_migration_as_one_of_the_lanes_does() {
        let (answered, asked, _) = ask(Duration::from_nanos(1), &[away, away, away]);
        let Err(NoAnswer::Ended(failure)) = answered else { panic!("{answered:?}") };
        assert_eq!(failure.code, FailureCode::LaneLost);
        assert!(failure.detail.contains("no connection within 5 s; the link was not"), "{failure}");
        assert!(asked <= 2, "{asked}");
    }

    #[test]
    fn a_cancelled_migration_does_not_wait_for_a_link_that_is_cut() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let cancel = watch::Sender::new(false);
            let mut cancelled = cancel.subscribe();
            let ended = async {
                let _ = cancelled.wait_for(|cancelled| *cancelled).await;
                Failure::new(FailureCode::Cancelled, "cancelled")
            };
            let request = || std::future::ready(Err::<u8, _>(away()));
            let cancels = |_: &ClientError| {
                cancel.send_replace(true);
            };
            let answered = answer(LONG, request, ended, cancels).await;
            let Err(NoAnswer::Ended(failure)) = answered else { panic!("{answered:?}") };
            assert_eq!(failure.code, FailureCode::Cancelled);
        });
    }

    #[test]
    fn the_answer_under_way_when_a_migration_is_cancelled_is_not_lost() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (reached, is_cancelled) = (watch::Sender::new(false), watch::Sender::new(false));
            let mut asked = reached.subscribe();
            let ended = async {
                let _ = asked.wait_for(|asked| *asked).await;
                is_cancelled.send_replace(true);
                Failure::new(FailureCode::Cancelled, "cancelled")
            };
            let request = || async {
                reached.send_replace(true);
                let mut cancelled = is_cancelled.subscribe();
                let _ = cancelled.wait_for(|cancelled| *cancelled).await;
                Ok(7)
            };
            let answered = answer(LONG, request, ended, |_| {}).await;
            assert_eq!(answered.unwrap(), 7);
        });
    }
}
