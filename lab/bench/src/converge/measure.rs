//! One move of a guest with a workload, and its cost for the guest.

use std::time::{Duration, Instant};

use anyhow::Result;
use godwit_lab::trial::Guest;
use godwit_types::{Outcome, Report};
use serde::Serialize;

use crate::converge::recovery::back_after_ms;
use crate::converge::series::{Series, stopped_ms};
use crate::figures::Spread;
use crate::subject::{Engine, Subject};

/// Time for which the guest's undisturbed work is measured before each move.
const UNDISTURBED: Duration = Duration::from_secs(3);
/// Time for which the guest is observed after the report: until then its work should be back at its
/// former rate.
const AFTERWARDS: Duration = Duration::from_secs(3);
/// Interval at which the guest's work is sampled.
const ASKED_EVERY: Duration = Duration::from_millis(200);
/// Fraction of its undisturbed rate from which the guest counts as back.
const BACK_SHARE: f64 = 0.9;

/// Work that the guest has done by a moment.
#[derive(Clone, Copy)]
struct Work {
    at: Instant,
    writes: u64,
    rounds: u64,
}

impl Work {
    fn of(guest: &Guest) -> Result<Work> {
        let status = guest.status()?;
        Ok(Work { at: Instant::now(), writes: status.writes, rounds: status.iterations })
    }

    /// Returns the work done since an earlier moment.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    fn since(self, before: Work) -> Done {
        Done {
            took_s: self.at.saturating_duration_since(before.at).as_secs_f64(),
            writes: self.writes.saturating_sub(before.writes) as f64,
            rounds: self.rounds.saturating_sub(before.rounds) as f64,
        }
    }
}

/// Work of the guest in a span of time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Done {
    pub(crate) took_s: f64,
    /// Number of pages written.
    pub(crate) writes: f64,
    pub(crate) rounds: f64,
}

impl Done {
    pub(crate) fn writes_per_s(self) -> f64 {
        self.writes / self.took_s
    }

    fn rounds_per_s(self) -> f64 {
        self.rounds / self.took_s
    }

    /// Returns how many more writes it would have done at its undisturbed rate. If the span is
    /// longer than the move, only noise is added: outside the move it writes at that rate.
    fn lost_writes(self, undisturbed: Done) -> f64 {
        undisturbed.writes_per_s() * self.took_s - self.writes
    }

    /// Returns the computing thread's speed as a fraction of its undisturbed one, or `None` if it
    /// does not compute.
    fn computing_share(self, undisturbed: Done) -> Option<f64> {
        (undisturbed.rounds > 0.0).then(|| self.rounds_per_s() / undisturbed.rounds_per_s())
    }
}

/// One move.
#[derive(Debug, Serialize)]
pub(crate) struct Run {
    pub(crate) completed: bool,
    /// Work in the seconds before the move.
    pub(crate) undisturbed: Done,
    /// Work from the migration's request to the first answer after its report.
    pub(crate) moving: Done,
    /// Number of writes lost in that time, compared with undisturbed work.
    pub(crate) lost_writes: f64,
    /// Speed of the computing thread meanwhile, as a fraction of its undisturbed one.
    pub(crate) computing_share: Option<f64>,
    /// Speed of the computing thread while the writers were slowed, and in the rounds before that.
    pub(crate) computing_share_while_slowed: Option<f64>,
    pub(crate) computing_share_before_slowed: Option<f64>,
    /// Time from the vCPUs' stop until the guest wrote 90 % of its undisturbed rate.
    pub(crate) back_ms: Option<f64>,
    pub(crate) report: Report,
    /// Written to a separate file because of its size.
    #[serde(skip)]
    pub(crate) series: Series,
}

impl Run {
    /// Computes the losses relative to the guest's undisturbed work.
    fn judged_by(mut self, undisturbed: Done) -> Run {
        let writes_per_s = undisturbed.writes_per_s();
        let back_after =
            |stopped_ms| back_after_ms(&self.series.guest, stopped_ms, writes_per_s, BACK_SHARE);
        self.back_ms = stopped_ms(&self.report).and_then(back_after);
        self.lost_writes = self.moving.lost_writes(undisturbed);
        self.computing_share = self.moving.computing_share(undisturbed);
        let share = |rate: Option<f64>| {
            self.computing_share.and(rate).map(|rate| rate / undisturbed.rounds_per_s())
        };
        let while_slowed = share(self.series.rounds_per_s_while_slowed(&self.report));
        let before_slowed = share(self.series.rounds_per_s_before_slowed(&self.report));
        (self.computing_share_while_slowed, self.computing_share_before_slowed) =
            (while_slowed, before_slowed);
        self.series.undisturbed_writes_per_s = writes_per_s;
        self
    }
}

/// Judges all moves of a case (one part per engine) by the median of the guest's work before each
/// of them. Three seconds on a machine with other load say little, and the loss over minutes is a
/// difference from this rate.
pub(crate) fn judged(runs: Vec<Vec<Option<Run>>>) -> Vec<Vec<Option<Run>>> {
    let all = || runs.iter().flatten().flatten().map(|run| run.undisturbed);
    let median =
        |of: fn(Done) -> f64| Spread::of(all().map(of)).map_or(0.0, |spread| spread.median);
    let (writes, rounds) = (median(Done::writes_per_s), median(Done::rounds_per_s));
    let usual = Done { took_s: 1.0, writes, rounds };
    let each = |run: Option<Run>| run.map(|run| run.judged_by(usual));
    runs.into_iter().map(|runs| runs.into_iter().map(each).collect()).collect()
}

/// Moves the guest once with one engine. Returns `None` if the guest was lost.
pub(crate) fn measure(
    subject: &mut Subject<'_>,
    engine: Engine,
    limit: Duration,
) -> Result<Option<Run>> {
    // Its client probes it during the move, which is work for it as well.
    subject.guest.watch()?;
    let before = Work::of(&subject.guest)?;
    pass(UNDISTURBED);
    let undisturbed = Work::of(&subject.guest)?.since(before);
    let _warm = subject.warm_destination()?;
    let begun = Work::of(&subject.guest)?;
    let sampler = subject.guest.sample(ASKED_EVERY)?;
    let mut progress = Vec::new();
    let Some(watched) =
        subject.move_followed_by(engine, limit, |update| progress.push(update.clone()))?
    else {
        return Ok(None);
    };
    let moving = Work::of(&subject.guest)?.since(begun);
    subject.guest.watch()?;
    pass(AFTERWARDS);
    let samples = sampler.end()?;
    subject.guest.unwatch()?;
    let report = watched.report;
    let series = Series::new(progress, &samples, watched.begun_ns, &report);
    let run = Run {
        completed: report.outcome == Outcome::Completed,
        undisturbed,
        moving,
        lost_writes: 0.0,
        computing_share: None,
        computing_share_while_slowed: None,
        computing_share_before_slowed: None,
        back_ms: None,
        report,
        series,
    };
    Ok(Some(run.judged_by(undisturbed)))
}

fn pass(time: Duration) {
    #[expect(clippy::disallowed_methods, reason = "this time is what is measured")]
    std::thread::sleep(time);
}

/// Returns the line about a move that is printed as soon as it is over.
pub(crate) fn summary(run: Option<&Run>) -> String {
    let Some(run) = run else { return "the guest was lost".to_owned() };
    let writes = format!(
        "{:.0} of {:.0} writes/s, {:.0} lost",
        run.moving.writes_per_s(),
        run.undisturbed.writes_per_s(),
        run.lost_writes
    );
    if !run.completed {
        return format!("not moved, {writes}");
    }
    format!(
        "{:.1} s, switchover {:.1} ms, {writes}",
        run.report.migration_time_ms / 1e3,
        run.report.switchover_ms.unwrap_or(0.0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::converge::table::tests::run;

    const UNDISTURBED: Done = Done { took_s: 3.0, writes: 30_000.0, rounds: 600.0 };

    #[test]
    fn lost_is_what_it_would_have_written_less_what_it_wrote() {
        let moving = Done { took_s: 10.0, writes: 40_000.0, rounds: 1900.0 };
        assert_eq!(moving.lost_writes(UNDISTURBED), 60_000.0);
        assert_eq!(moving.computing_share(UNDISTURBED), Some(0.95));
        // Undisturbed time at either end changes nothing.
        let longer = Done { took_s: 12.0, writes: 60_000.0, rounds: 2300.0 };
        assert_eq!(longer.lost_writes(UNDISTURBED), 60_000.0);
        let idle = Done { rounds: 0.0, ..UNDISTURBED };
        assert_eq!(moving.computing_share(idle), None);
    }

    #[test]
    fn all_moves_of_a_case_are_judged_by_the_same_guest() {
        let of = |writes: f64| {
            let mut moved = run(true, 1000.0, 0.0);
            if let Some(run) = &mut moved {
                run.undisturbed = Done { writes, ..UNDISTURBED };
                run.moving = Done { took_s: 10.0, writes: 40_000.0, rounds: 0.0 };
            }
            moved
        };
        // The second was measured while another program used the machine.
        let judged = judged(vec![vec![of(30_000.0), of(3000.0)], vec![of(30_300.0), None]]);
        let lost: Vec<f64> = judged.iter().flatten().flatten().map(|run| run.lost_writes).collect();
        assert_eq!(lost, [60_000.0; 3]);
        assert_eq!(judged[1].len(), 2);
    }
}
