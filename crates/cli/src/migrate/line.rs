//! Progress of a migration in one line: a live one on a terminal, otherwise a plain one per round
//! or every two seconds.

use godwit_types::{Phase, Progress};
use indicatif::ProgressBar;

use crate::migrate::eta::next_eta_ms;
use crate::output::{Output, spinner};
use crate::travelling::{progress_text, rest_text};
use crate::units::{byte_count, bytes, millis};

const PLAIN_EVERY_MS: f64 = 2000.0;

/// Shows progress on standard error.
pub(super) struct ProgressLine {
    output: Output,
    bar: Option<ProgressBar>,
    eta_ms: Option<f64>,
    printed: Option<(Phase, u32, f64)>,
}

impl ProgressLine {
    pub(super) fn new(output: Output) -> ProgressLine {
        let bar = spinner();
        ProgressLine { output, bar, eta_ms: None, printed: None }
    }

    pub(super) fn show(&mut self, progress: &Progress) {
        self.eta_ms = next_eta_ms(self.eta_ms, progress.eta_ms, progress.elapsed_ms);
        let text = describe(progress, self.eta_ms);
        match &self.bar {
            Some(bar) => {
                bar.set_message(text);
                bar.tick();
            }
            None if is_due(self.printed, progress) => {
                self.printed = Some((progress.phase, round_of(progress), progress.elapsed_ms));
                self.output.note(&text);
            }
            None => {}
        }
    }

    /// Prints a remark that stays above the line.
    pub(super) fn remark(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => self.output.note(text),
        }
    }

    pub(super) fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Returns whether to print a plain line after the last one (phase, round, elapsed).
fn is_due(printed: Option<(Phase, u32, f64)>, progress: &Progress) -> bool {
    // Pre-copy and convergence alternate; the round already shows that.
    let stage = |phase| if phase == Phase::Convergence { Phase::PreCopy } else { phase };
    printed.is_none_or(|(phase, round, elapsed_ms)| {
        stage(phase) != stage(progress.phase)
            || round != round_of(progress)
            || progress.elapsed_ms - elapsed_ms >= PLAIN_EVERY_MS
    })
}

/// Returns the round of what travels now.
fn round_of(progress: &Progress) -> u32 {
    match &progress.disks {
        Some(disks) if progress.phase == Phase::Disks => disks.round,
        _ => progress.round,
    }
}

/// Formats the line: `pre-copy  round 2  remaining 120 MiB of 1.0 GiB  dirty 19 MiB/s  bandwidth
/// 900 MiB/s  limit 8gbit  ETA 3.00 s`.
pub(super) fn describe(progress: &Progress, eta_ms: Option<f64>) -> String {
    let mut text = progress.phase.to_string();
    if let Some(disks) = progress.disks.filter(|_| progress.phase == Phase::Disks) {
        text.push_str(&format!("  {}", progress_text(&disks)));
    }
    if progress.phase >= Phase::PreCopy {
        text.push_str(&format!(
            "  round {}  remaining {} of {}  dirty {}/s  bandwidth {}/s",
            progress.round,
            byte_count(progress.remaining_bytes),
            byte_count(progress.total_bytes),
            bytes(progress.dirty_bytes_per_s),
            bytes(progress.bandwidth_bytes_per_s),
        ));
        if let Some(limit) = progress.bandwidth_limit {
            text.push_str(&format!("  limit {limit}"));
        }
        if let Some(disks) = progress.disks.filter(|disks| disks.remaining_bytes > 0) {
            text.push_str(&format!("  {}", rest_text(&disks)));
        }
    }
    match eta_ms {
        // The switchover and its last round always remain: below a second, an exact figure is
        // meaningless.
        Some(eta_ms) if eta_ms < 1000.0 => text.push_str("  ETA < 1 s"),
        Some(eta_ms) => text.push_str(&format!("  ETA {}", millis(eta_ms))),
        None => text.push_str(&format!("  {} so far", millis(progress.elapsed_ms))),
    }
    text
}

#[cfg(test)]
mod tests {
    use godwit_types::DisksProgress;

    use super::*;

    #[test]
    fn plain_lines_come_by_round_or_by_time() {
        let at = |phase, round, elapsed_ms| Progress {
            phase,
            round,
            elapsed_ms,
            ..Progress::begin(1 << 30)
        };
        let first = at(Phase::PreCopy, 0, 0.0);
        assert!(is_due(None, &first));
        let printed = Some((Phase::PreCopy, 0, 0.0));
        assert!(!is_due(printed, &at(Phase::PreCopy, 0, 1999.0)));
        assert!(!is_due(printed, &at(Phase::Convergence, 0, 100.0)));
        assert!(is_due(printed, &at(Phase::PreCopy, 1, 100.0)));
        assert!(is_due(printed, &at(Phase::Switchover, 0, 100.0)));
        assert!(is_due(printed, &at(Phase::PreCopy, 0, 2000.0)));
    }

    #[test]
    fn disks_have_rounds_of_their_own() {
        let disks =
            |round| DisksProgress { round, remaining_bytes: 7 << 20, ..DisksProgress::default() };
        let at = |phase, round| Progress {
            phase,
            disks: Some(disks(round)),
            ..Progress::begin(1 << 30)
        };
        let printed = Some((Phase::Disks, 1, 0.0));
        assert!(!is_due(printed, &at(Phase::Disks, 1)) && is_due(printed, &at(Phase::Disks, 2)));
        let text = describe(&at(Phase::Disks, 2), None);
        assert!(text.contains("disks  round 2  remaining 7.0 MiB of"), "{text}");
        let text = describe(&at(Phase::PreCopy, 2), None);
        assert!(text.contains("round 0") && text.contains("  disks 7.0 MiB"), "{text}");
    }

    #[test]
    fn the_line_names_what_there_is() {
        let progress = Progress {
            phase: Phase::PreCopy,
            round: 2,
            remaining_bytes: 120 << 20,
            bandwidth_limit: "2gbit".parse().ok(),
            ..Progress::begin(1 << 30)
        };
        let text = describe(&progress, Some(3000.0));
        for part in ["pre-copy", "round 2", "120 MiB of 1.0 GiB", "limit 2gbit", "ETA 3.00 s"] {
            assert!(text.contains(part), "{text}");
        }
        for eta_ms in [0.0, 999.9] {
            let text = describe(&progress, Some(eta_ms));
            assert!(text.ends_with("ETA < 1 s"), "{text}");
        }
    }
}
