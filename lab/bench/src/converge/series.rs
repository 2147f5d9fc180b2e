//! A move over time: the engine's progress, the guest's work as seen from outside, and the phases.
//! Pure.

use godwit_lab::trial::{Done, Sample};
use godwit_types::{BandwidthPoint, Phase, Progress, Report};
use serde::Serialize;

/// Minimum time over which the guest's rate is measured: shorter steps depend on when its threads
/// run.
const LEAST_STEP_MS: f64 = 190.0;

/// Everything known about one move. Times are since its request.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Series {
    pub(crate) progress: Vec<Progress>,
    pub(crate) guest: Vec<Seen>,
    /// Phases, in order of time.
    pub(crate) spans: Vec<Span>,
    /// Pages that it writes per second without a migration; 0 until that is known.
    pub(crate) undisturbed_writes_per_s: f64,
}

/// Work that the guest had done by a moment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Seen {
    pub(crate) ms: f64,
    /// `None`: the guest did not answer.
    pub(crate) done: Option<Done>,
}

/// Time spent in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Span {
    pub(crate) phase: Phase,
    pub(crate) from_ms: f64,
    pub(crate) to_ms: f64,
}

/// Value that held for a while.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Step {
    pub(crate) from_ms: f64,
    pub(crate) to_ms: f64,
    pub(crate) value: f64,
}

impl Series {
    /// Creates the series of a move that was requested at `begun_ns` by the samples' clock.
    pub(crate) fn new(
        progress: Vec<Progress>,
        samples: &[Sample],
        begun_ns: u64,
        report: &Report,
    ) -> Series {
        #[expect(
            clippy::cast_precision_loss,
            reason = "less than the 104 days that f64 holds exactly"
        )]
        let ms = |at_ns: u64| at_ns.wrapping_sub(begun_ns).cast_signed() as f64 / 1e6;
        let guest =
            samples.iter().map(|sample| Seen { ms: ms(sample.at_ns), done: sample.done }).collect();
        let spans = spans(&progress, report);
        Series { progress, guest, spans, undisturbed_writes_per_s: 0.0 }
    }

    /// Returns the time of the last information.
    pub(crate) fn end_ms(&self) -> f64 {
        let reported = self.progress.last().map_or(0.0, |progress| progress.elapsed_ms);
        let seen = self.guest.last().map_or(0.0, |seen| seen.ms);
        self.spans.last().map_or(0.0, |span| span.to_ms).max(reported).max(seen)
    }

    /// Returns when each round began, with its number.
    pub(crate) fn rounds(&self) -> Vec<(u32, f64)> {
        let mut rounds: Vec<(u32, f64)> = Vec::new();
        let memory_travels = |phase| matches!(phase, Phase::PreCopy | Phase::Convergence);
        for progress in self.progress.iter().filter(|progress| memory_travels(progress.phase)) {
            if rounds.last().is_none_or(|(round, _)| *round < progress.round) {
                rounds.push((progress.round, progress.elapsed_ms));
            }
        }
        rounds
    }

    /// Returns the bytes sent over time.
    pub(crate) fn sent(&self) -> Vec<BandwidthPoint> {
        let sent = |progress: &Progress| BandwidthPoint {
            ms: progress.elapsed_ms,
            bytes: progress.sent_bytes,
        };
        self.progress.iter().map(sent).collect()
    }

    /// Returns the rounds of its computation per second while the guest's writers were slowed: from
    /// the first slowed round on, according to the report, until the vCPUs were stopped. Returns
    /// `None` if they were not slowed, or not for long enough to measure a rate.
    pub(crate) fn rounds_per_s_while_slowed(&self, report: &Report) -> Option<f64> {
        let (_, slowed_ms) = unslowed(report)?;
        self.rounds_per_s(slowed_ms, stopped_ms(report)?)
    }

    /// Returns the rounds of its computation per second in the rounds before that: memory is being
    /// sent, and writers are not slowed.
    pub(crate) fn rounds_per_s_before_slowed(&self, report: &Report) -> Option<f64> {
        let (prepared_ms, slowed_ms) = unslowed(report)?;
        self.rounds_per_s(prepared_ms, slowed_ms)
    }

    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    fn rounds_per_s(&self, from_ms: f64, to_ms: f64) -> Option<f64> {
        let (first, last) = self.work_within(from_ms, to_ms)?;
        Some(last.1.rounds.saturating_sub(first.1.rounds) as f64 / (last.0 - first.0) * 1e3)
    }

    /// Returns when the tracking of the guest's writes began, at the latest, and when the vCPUs
    /// were stopped.
    pub(crate) fn tracked_ms(&self, report: &Report) -> Option<(f64, f64)> {
        let prepared_ms = follow(0.0, report, |phase| phase < Phase::PreCopy).last()?.to_ms;
        Some((prepared_ms, stopped_ms(report)?))
    }

    /// Returns the first and the last work seen within a time, and when.
    pub(crate) fn work_within(
        &self,
        from_ms: f64,
        to_ms: f64,
    ) -> Option<((f64, Done), (f64, Done))> {
        let within = self.guest.iter().filter(|seen| (from_ms..=to_ms).contains(&seen.ms));
        let mut answers = within.filter_map(|seen| Some((seen.ms, seen.done?)));
        let (first, last) = (answers.next()?, answers.next_back()?);
        (last.0 - first.0 >= LEAST_STEP_MS).then_some((first, last))
    }

    /// Returns the pages that the guest wrote per second, in steps of at least this length, without
    /// times in which it did not answer.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub(crate) fn writes_per_s(&self, least_step_ms: f64) -> Vec<Step> {
        let least_step_ms = least_step_ms.max(LEAST_STEP_MS);
        let mut steps = Vec::new();
        let mut last: Option<(f64, Done)> = None;
        for seen in &self.guest {
            last = match (last, seen.done) {
                (_, None) => None,
                (None, Some(done)) => Some((seen.ms, done)),
                (Some((from_ms, before)), Some(done)) if seen.ms - from_ms >= least_step_ms => {
                    let wrote = done.writes.saturating_sub(before.writes) as f64;
                    let value = wrote / (seen.ms - from_ms) * 1e3;
                    steps.push(Step { from_ms, to_ms: seen.ms, value });
                    Some((seen.ms, done))
                }
                (last, Some(_)) => last,
            };
        }
        steps
    }
}

/// Returns when the sending of memory began, and when slowing began, or `None` if writers were not
/// slowed.
fn unslowed(report: &Report) -> Option<(f64, f64)> {
    let slowed = report.rounds.iter().position(|round| round.throttled_to_pages_per_s.is_some())?;
    let before: f64 = report.rounds[..slowed].iter().map(|round| round.duration_ms).sum();
    let prepared_ms = follow(0.0, report, |phase| phase < Phase::PreCopy).last()?.to_ms;
    Some((prepared_ms, prepared_ms + before))
}

/// Returns when the vCPUs were stopped, or `None` if they were not. The report's sums of the phases
/// before are more exact than progress, which comes ten times per second.
pub(crate) fn stopped_ms(report: &Report) -> Option<f64> {
    let place = report.phases.iter().position(|one| one.phase == Phase::Switchover)?;
    Some(report.phases[..place].iter().map(|one| one.duration_ms).sum())
}

/// Returns the spans of the phases. Pre-copy and convergence alternate, and the report has only
/// their sums: between preparation and pause the spans follow progress.
fn spans(progress: &[Progress], report: &Report) -> Vec<Span> {
    let stopped_ms = stopped_ms(report);
    let is_before = |phase| phase < Phase::PreCopy;
    let mut spans = follow(0.0, report, is_before);
    let prepared_ms = spans.last().map_or(0.0, |span| span.to_ms);
    let mut turns: Vec<Span> = Vec::new();
    for update in
        progress.iter().filter(|one| one.elapsed_ms >= prepared_ms && !is_before(one.phase))
    {
        if stopped_ms.is_some_and(|stopped_ms| {
            update.phase >= Phase::Switchover || update.elapsed_ms >= stopped_ms
        }) {
            break;
        }
        let to_ms = update.elapsed_ms;
        match turns.last_mut() {
            Some(last) => last.to_ms = to_ms,
            // A phase without earlier progress began with the end of the preparation.
            None => turns.push(Span { phase: update.phase, from_ms: prepared_ms, to_ms }),
        }
        if turns.last().is_some_and(|last| last.phase != update.phase) {
            turns.push(Span { phase: update.phase, from_ms: to_ms, to_ms });
        }
    }
    if let (Some(last), Some(stopped_ms)) = (turns.last_mut(), stopped_ms) {
        last.to_ms = stopped_ms;
    }
    spans.extend(turns);
    if let Some(stopped_ms) = stopped_ms {
        spans.extend(follow(stopped_ms, report, |phase| phase >= Phase::Switchover));
    }
    spans
}

/// Returns the report's phases of one kind, one after the other.
fn follow(mut at_ms: f64, report: &Report, wanted: impl Fn(Phase) -> bool) -> Vec<Span> {
    let mut spans = Vec::new();
    for one in report.phases.iter().filter(|one| wanted(one.phase)) {
        spans.push(Span { phase: one.phase, from_ms: at_ms, to_ms: at_ms + one.duration_ms });
        at_ms += one.duration_ms;
    }
    spans
}

#[cfg(test)]
pub(crate) mod tests {
    use godwit_types::{Outcome, PhaseReport};

    use super::*;

    pub(crate) fn report(phases: &[(Phase, f64)]) -> Report {
        let mut report = Report::blank(Outcome::Completed, "v", "a", "b");
        report.migration_time_ms = phases.iter().map(|(_, duration_ms)| duration_ms).sum();
        report.phases =
            phases.iter().map(|&(phase, duration_ms)| PhaseReport { phase, duration_ms }).collect();
        report
    }

    pub(crate) fn update(phase: Phase, round: u32, elapsed_ms: f64) -> Progress {
        Progress { phase, round, elapsed_ms, ..Progress::begin(1 << 30) }
    }

    /// Returns samples every 200 ms: thousands of writes per second until each time.
    pub(crate) fn guest(rates: &[f64]) -> Vec<Seen> {
        let mut writes = 0.0;
        let mut all = vec![Seen { ms: 0.0, done: Some(Done { writes: 0, rounds: 0 }) }];
        for (number, rate) in rates.iter().enumerate() {
            writes += rate * 200.0;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "test data"
            )]
            let done = Some(Done { writes: writes as u64, rounds: 0 });
            #[expect(clippy::cast_precision_loss, reason = "test data")]
            all.push(Seen { ms: (number + 1) as f64 * 200.0, done });
        }
        all
    }

    #[test]
    fn phases_follow_progress_and_the_pause_follows_the_report() {
        let progress = [
            update(Phase::Prepare, 0, 10.0),
            update(Phase::PreCopy, 0, 110.0),
            update(Phase::PreCopy, 1, 210.0),
            update(Phase::Convergence, 1, 310.0),
            update(Phase::PreCopy, 2, 410.0),
            update(Phase::Switchover, 2, 510.0),
            update(Phase::PageIn, 2, 610.0),
        ];
        let report = report(&[
            (Phase::Prepare, 100.0),
            (Phase::PreCopy, 300.0),
            (Phase::Convergence, 100.0),
            (Phase::Switchover, 20.0),
            (Phase::PageIn, 200.0),
        ]);
        let span = |phase, from_ms, to_ms| Span { phase, from_ms, to_ms };
        assert_eq!(
            spans(&progress, &report),
            [
                span(Phase::Prepare, 0.0, 100.0),
                span(Phase::PreCopy, 100.0, 310.0),
                span(Phase::Convergence, 310.0, 410.0),
                span(Phase::PreCopy, 410.0, 500.0),
                span(Phase::Switchover, 500.0, 520.0),
                span(Phase::PageIn, 520.0, 720.0),
            ]
        );
        let series = Series { progress: progress.to_vec(), ..Series::default() };
        assert_eq!(series.rounds(), [(0, 110.0), (1, 210.0), (2, 410.0)]);
    }

    #[test]
    fn a_move_that_did_not_end_has_no_pause() {
        let progress = [update(Phase::PreCopy, 0, 100.0), update(Phase::PreCopy, 1, 900.0)];
        let report = report(&[(Phase::Prepare, 100.0), (Phase::PreCopy, 800.0)]);
        assert_eq!(stopped_ms(&report), None);
        let prepare = Span { phase: Phase::Prepare, from_ms: 0.0, to_ms: 100.0 };
        let precopy = Span { phase: Phase::PreCopy, from_ms: 100.0, to_ms: 900.0 };
        assert_eq!(spans(&progress, &report), [prepare, precopy]);
        assert_eq!(spans(&[], &report), [prepare]);
    }

    #[test]
    fn the_slowed_time_is_from_the_first_slowed_round_to_the_stop() {
        let seen = |ms: f64, rounds| Seen { ms, done: Some(Done { writes: 0, rounds }) };
        let series = Series {
            guest: vec![
                seen(0.0, 0),
                seen(450.0, 9),
                seen(650.0, 10),
                seen(850.0, 14),
                seen(1050.0, 30),
            ],
            ..Series::default()
        };
        let mut report =
            report(&[(Phase::Prepare, 100.0), (Phase::PreCopy, 900.0), (Phase::Switchover, 20.0)]);
        let round = |number: u32, duration_ms: f64, limit: &str| {
            let text = format!(
                r#"{{"round":{number},"pages":1,"zero_pages":0,"bytes":1,
                    "duration_ms":{duration_ms},"dirty_pages_per_s":0.0,
                "throttled_to_pages_per_s":{limit}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        report.rounds = vec![round(0, 500.0, "null"), round(1, 300.0, "null")];
        assert_eq!(series.rounds_per_s_while_slowed(&report), None);
        report.rounds = vec![round(0, 500.0, "null"), round(1, 300.0, "9.0")];
        // From 600 to 1000 ms: 4 rounds in 200 ms.
        assert_eq!(series.rounds_per_s_while_slowed(&report), Some(20.0));
        assert_eq!(series.rounds_per_s_before_slowed(&report), None, "one answer only");
        report.rounds[0] = round(0, 700.0, "null");
        assert_eq!(series.rounds_per_s_while_slowed(&report), None, "too short");
    }

    #[test]
    fn silence_of_the_guest_is_a_gap() {
        let mut series = Series { guest: guest(&[5.0, 5.0, 1.0, 2.0]), ..Series::default() };
        let all: Vec<f64> = series.writes_per_s(0.0).iter().map(|step| step.value).collect();
        assert_eq!(all, [5000.0, 5000.0, 1000.0, 2000.0]);
        let slower = series.writes_per_s(400.0);
        assert_eq!(slower[1], Step { from_ms: 400.0, to_ms: 800.0, value: 1500.0 });
        series.guest[2].done = None;
        let broken: Vec<(f64, f64)> =
            series.writes_per_s(0.0).iter().map(|step| (step.from_ms, step.to_ms)).collect();
        assert_eq!(broken, [(0.0, 200.0), (600.0, 800.0)]);
    }

    #[test]
    fn times_are_those_since_the_request() {
        let sample = |at_ns| Sample { at_ns, done: None };
        let series = Series::new(
            Vec::new(),
            &[sample(4_000_000), sample(7_500_000)],
            5_000_000,
            &report(&[]),
        );
        let at: Vec<f64> = series.guest.iter().map(|seen| seen.ms).collect();
        assert_eq!((at, series.end_ms()), (vec![-1.0, 2.5], 2.5));
    }
}
