//! Where a transfer of disks is, and how the migration of the memory and the thread of the disks
//! agree that the guest may be stopped. It knows neither rounds nor streams.
//!
//! The migration waits for an answer for a few seconds only. An answer counts if it was taken: the
//! thread learns whether it was, and goes on with its rounds if not.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use godwit_migration::Failure;
use godwit_types::FailureCode;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout_at};

/// Answers in a row that come too late, until the disks count as too slow. A link that swallows
/// packets without a sign is known to be cut after ten seconds.
const MOST_LATE: u32 = 5;

/// Where a transfer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Too much is left for a last round.
    Rounds,
    /// Little is left: the memory's migration can begin, or goes on.
    Ready,
    /// The link is cut, or what it has lost is being sent again.
    Cut,
    /// It does not go on.
    Failed(Failure),
}

/// Answer of the thread: whether the guest may be stopped now, or why it never may.
pub(super) type Answer = Result<bool, Failure>;

/// Who waits until the guest may be stopped, at the thread.
#[derive(Debug, Default)]
pub(super) struct Asker(Option<oneshot::Sender<Answer>>);

impl Asker {
    pub(super) fn new(reply: oneshot::Sender<Answer>) -> Asker {
        Asker(Some(reply))
    }

    /// Whether an answer is still waited for.
    pub(super) fn waits(&self) -> bool {
        self.0.as_ref().is_some_and(|reply| !reply.is_closed())
    }

    /// Answers, once. Returns whether the answer counts.
    pub(super) fn answer(&mut self, answer: Answer) -> bool {
        self.0.take().is_some_and(|reply| reply.send(answer).is_ok())
    }
}

/// Requests of the migration to settle.
#[derive(Debug, Default)]
pub(super) struct Settling {
    /// Answers in a row that came too late.
    late: AtomicU32,
}

impl Settling {
    /// Asks, with `order`, whether the guest may be stopped, and waits up to `limit`. While the
    /// link is cut, it waits for the link first. False: not now.
    ///
    /// # Errors
    /// The transfer has ended, or the disks are too slow.
    pub(super) async fn ask(
        &self,
        mut stage: watch::Receiver<Stage>,
        order: impl FnOnce(oneshot::Sender<Answer>) -> Result<(), Failure>,
        limit: Duration,
    ) -> Answer {
        let until = Instant::now() + limit;
        match timeout_at(until, stage.wait_for(|stage| *stage != Stage::Cut)).await {
            Err(_) => return Ok(self.cut()),
            Ok(Err(_)) => return Err(ended()),
            Ok(Ok(stage)) => {
                if let Stage::Failed(failure) = &*stage {
                    return Err(failure.clone());
                }
            }
        }
        let (reply, mut answer) = oneshot::channel();
        order(reply)?;
        let answered = match timeout_at(until, &mut answer).await {
            Ok(answered) => answered.map_err(|_| ended())?,
            Err(_) => {
                // From here on none counts. One may have come meanwhile.
                answer.close();
                match answer.try_recv() {
                    Ok(answered) => answered,
                    Err(_) => return self.is_late(&stage, limit),
                }
            }
        };
        self.late.store(0, Ordering::SeqCst);
        answered
    }

    /// Notes that the link is known to be cut, which explains what was late.
    fn cut(&self) -> bool {
        self.late.store(0, Ordering::SeqCst);
        false
    }

    fn is_late(&self, stage: &watch::Receiver<Stage>, limit: Duration) -> Answer {
        if *stage.borrow() == Stage::Cut {
            return Ok(self.cut());
        }
        if self.late.fetch_add(1, Ordering::SeqCst) + 1 < MOST_LATE {
            return Ok(false);
        }
        let detail = format!("a round of the disks did not end within {} s", limit.as_secs());
        Err(Failure::new(FailureCode::DisksNotConverging, detail))
    }
}

fn ended() -> Failure {
    Failure::new(FailureCode::Internal, "the thread of the disks ended without a result")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONG: Duration = Duration::from_secs(300);
    const SHORT: Duration = Duration::from_millis(1);

    fn failure() -> Failure {
        Failure::new(FailureCode::DiskFailed, "no space")
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(work)
    }

    /// Asks a thread that answers at once.
    fn ask(settling: &Settling, answer: Answer) -> Answer {
        let (_stage, shown) = watch::channel(Stage::Ready);
        let order = |reply| {
            assert!(Asker::new(reply).answer(answer));
            Ok(())
        };
        run(settling.ask(shown, order, LONG))
    }

    #[test]
    fn what_the_thread_answers_is_taken() {
        let settling = Settling::default();
        assert_eq!(ask(&settling, Ok(true)), Ok(true));
        assert_eq!(ask(&settling, Ok(false)), Ok(false));
        assert_eq!(ask(&settling, Err(failure())), Err(failure()));
        let (_stage, shown) = watch::channel(Stage::Failed(failure()));
        let order = |_: oneshot::Sender<Answer>| -> Result<(), Failure> { panic!("it is over") };
        assert_eq!(run(settling.ask(shown, order, LONG)), Err(failure()));
        // A thread that ends without an answer.
        let (_stage, shown) = watch::channel(Stage::Rounds);
        let ended = run(settling.ask(shown, |_| Ok(()), LONG)).unwrap_err();
        assert_eq!(ended.code, FailureCode::Internal);
    }

    #[test]
    fn a_cut_is_waited_for_before_the_thread_is_asked() {
        let settling = Settling::default();
        let (stage, shown) = watch::channel(Stage::Cut);
        let not_yet = |_: oneshot::Sender<Answer>| -> Result<(), Failure> { panic!("too early") };
        for _ in 0..2 * MOST_LATE {
            assert_eq!(run(settling.ask(shown.clone(), not_yet, SHORT)), Ok(false));
        }
        let order = |reply| {
            assert!(Asker::new(reply).answer(Ok(true)));
            Ok(())
        };
        let both = async {
            let restored = async { stage.send_replace(Stage::Ready) };
            tokio::join!(settling.ask(shown, order, LONG), restored).0
        };
        assert_eq!(run(both), Ok(true));
    }

    #[test]
    fn an_answer_that_comes_too_late_does_not_count() {
        let settling = Settling::default();
        let (_stage, shown) = watch::channel(Stage::Ready);
        let mut asker = Asker::default();
        let order = |reply| {
            asker = Asker::new(reply);
            assert!(asker.waits());
            Ok(())
        };
        assert_eq!(run(settling.ask(shown, order, SHORT)), Ok(false));
        assert!(!asker.waits());
        assert!(!asker.answer(Ok(true)), "both sides must know the same");
        assert!(!asker.answer(Ok(true)) && !Asker::default().waits());
    }

    /// What a thread does with a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Does {
        Settles,
        PutsOff,
        /// It is late, and the link is not known to be cut.
        IsLate,
        /// It is late, and finds that the link is cut.
        FindsCut,
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn only_disks_that_are_late_without_a_cut_are_too_slow(
            script in prop::collection::vec(
                prop::sample::select(vec![
                    Does::Settles, Does::PutsOff, Does::IsLate, Does::FindsCut,
                ]),
                1..20,
            ),
        ) {
            let (settling, mut late) = (Settling::default(), 0);
            for does in script {
                let (stage, shown) = watch::channel(Stage::Ready);
                let mut waiting = Vec::new();
                let order = |reply| {
                    let mut asker = Asker::new(reply);
                    match does {
                        Does::Settles => taken(asker.answer(Ok(true))),
                        Does::PutsOff => taken(asker.answer(Ok(false))),
                        Does::IsLate => {}
                        Does::FindsCut => drop(stage.send_replace(Stage::Cut)),
                    }
                    waiting.push(asker);
                    Ok(())
                };
                let is_late = matches!(does, Does::IsLate | Does::FindsCut);
                let answer = run(settling.ask(shown, order, if is_late { SHORT } else { LONG }));
                late = if does == Does::IsLate { late + 1 } else { 0 };
                if late >= MOST_LATE {
                    prop_assert_eq!(answer.unwrap_err().code, FailureCode::DisksNotConverging);
                } else {
                    prop_assert_eq!(answer, Ok(does == Does::Settles));
                }
                // The thread and the migration agree.
                prop_assert!(waiting.iter_mut().all(|asker| !asker.answer(Ok(true))));
            }
        }
    }

    fn taken(is_taken: bool) {
        assert!(is_taken, "the migration waits");
    }
}
