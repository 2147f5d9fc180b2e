//! Report of a migration as text. The JSON form is the type itself.

use godwit_types::{
    EncodingName, EncodingReport, FetchTimes, Intent, LaneReport, Means, Outcome, PageInReport,
    Phase, Predicted, ReferencedPages, Report, SwitchoverReport, ThrottleReport, TrackingMeans,
    TrackingReport,
};

use crate::output::{Output, Tone, fields, table};
use crate::travelling::{report_lines, rounds_table};
use crate::units::{byte_count, bytes, millis};

/// Formats the whole report.
pub(crate) fn render(report: &Report, output: Output) -> String {
    let mut text = headline(report, output);
    if let Some(error) = &report.error {
        text.push_str(&format!("  reason: {} [{}]\n", error.message, error.code));
        if !error.remedy.is_empty() {
            text.push_str(&format!("  remedy:   {}\n", error.remedy));
        }
    }
    if !report.has_begun() && report.error.is_some() {
        // Refused before the transfer: there are no figures.
        return text;
    }
    text.push('\n');
    text.push_str(&fields(&figures(report)));
    if !report.rounds.is_empty() {
        text.push('\n');
        text.push_str(&rounds(report));
    }
    if let Some(disks) = report.disks.as_ref().filter(|disks| !disks.rounds.is_empty()) {
        text.push('\n');
        text.push_str(&rounds_table(disks));
    }
    if !report.phases.is_empty() {
        let rows: Vec<Vec<String>> = report
            .phases
            .iter()
            .map(|phase| vec![phase_text(phase.phase), millis(phase.duration_ms)])
            .collect();
        text.push('\n');
        text.push_str(&table(&["phase", "time"], &rows));
    }
    text
}

/// The switchover phase is longer than the pause: it begins when QEMU is asked to stop the guest,
/// and ends when the destination reports that the guest runs.
fn phase_text(phase: Phase) -> String {
    match phase {
        Phase::Switchover => format!("{phase} (measured at the source)"),
        other => other.to_string(),
    }
}

fn headline(report: &Report, output: Output) -> String {
    let Report { vm, from, to, .. } = report;
    let (tone, line) = match report.outcome {
        Outcome::Completed => (Tone::Good, format!("VM {vm} moved from {from} to {to}")),
        Outcome::Failed => (Tone::Bad, format!("the move of VM {vm} failed: it stays at {from}")),
        Outcome::Cancelled => {
            (Tone::Strong, format!("the move of VM {vm} was cancelled: it continues at {from}"))
        }
        Outcome::InDoubt => {
            (Tone::Bad, format!("VM {vm} is in doubt: paused at {from}, and {to} may run it"))
        }
    };
    format!("{}\n", output.paint(tone, &line))
}

fn figures(report: &Report) -> Vec<(&'static str, String)> {
    let mut lines = vec![
        ("engine", format!("{:?}", report.engine).to_lowercase()),
        ("migration time", millis(report.migration_time_ms)),
    ];
    if let Some(predicted) = &report.predicted {
        lines.push(("predicted", predicted_text(predicted)));
    }
    if let Some(policy) = report.policy {
        lines.push(("policy", policy.to_string()));
        if let Some(over) = beyond_deadline(policy, report.migration_time_ms) {
            lines.push(("over deadline", over));
        }
    }
    if let Some(means) = report.means {
        lines.push(("means", means.to_string()));
    }
    if let Some(switchover_ms) = report.switchover_ms {
        let pieces = report
            .switchover
            .as_ref()
            .map_or_else(String::new, |pieces| format!("  ({})", breakdown(pieces)));
        lines.push(("vCPUs' pause", format!("{}{pieces}", millis(switchover_ms))));
        if let Some(budget_ms) =
            report.switchover_budget_ms.filter(|budget_ms| switchover_ms > *budget_ms)
        {
            let over = millis(switchover_ms - budget_ms);
            lines.push(("over budget", format!("by {over}: the budget is {}", millis(budget_ms))));
        }
    }
    lines.push(("blackout", report.blackout_ms.map_or_else(|| "not measured".to_owned(), millis)));
    if let Some(round_trip_ms) = report.round_trip_ms {
        lines.push(("round trip", format!("{round_trip_ms:.2} ms")));
    }
    lines.push(("guest memory", byte_count(report.guest_bytes)));
    lines.push(("on the wire", byte_count(report.wire_bytes)));
    if let Some(disks) = &report.disks {
        lines.extend(report_lines(disks));
    }
    if !report.encodings.is_empty() {
        lines.push(("pages", encodings(&report.encodings)));
    }
    if let Some(text) = referenced_text(report.referenced) {
        lines.push(("by reference", text));
    }
    if report.missing_pages > 0 {
        lines.push((
            "sent in full",
            format!("{} pages that the destination no longer had", report.missing_pages),
        ));
    }
    if let Some(tracking) = &report.tracking {
        lines.push(("writes found", tracking_text(tracking)));
    }
    if let Some(throttle) = &report.throttle {
        lines.push(("throttle", throttle_text(report, throttle)));
    }
    if let Some(page_in) = &report.page_in {
        lines.extend(page_in_lines(page_in));
    }
    if let Some(limit) = report.bandwidth_limit {
        lines.push(("limit", limit.to_string()));
    }
    // A single lane without interruptions adds nothing to the bytes above.
    if report.lanes.len() > 1 || report.lanes.iter().any(|lane| !lane.broken.is_empty()) {
        lines.extend(report.lanes.iter().map(|lane| ("lane", lane_text(lane))));
    }
    lines
}

/// Formats where the content was of pages that were sent by reference.
fn referenced_text(pages: ReferencedPages) -> Option<String> {
    let ReferencedPages { own, memory, disk, spilled } = pages;
    let places = [
        (own, "sent before"),
        (memory, "in the destination's memory"),
        (disk, "on disks of VMs"),
        (spilled, "moved from memory to a disk"),
    ];
    let places = places.into_iter().filter(|(pages, _)| *pages > 0);
    let texts: Vec<_> = places.map(|(pages, place)| format!("{pages} pages {place}")).collect();
    Some(texts.join(", ")).filter(|text| !text.is_empty())
}

/// Formats how the pages were found that the guest wrote.
fn tracking_text(tracking: &TrackingReport) -> String {
    let TrackingReport { means, faults, answering_ms, by_faults_bytes, .. } = tracking;
    match means {
        TrackingMeans::Scans => "by scans".to_owned(),
        TrackingMeans::Faults => format!(
            "by {faults} faults in {} at the end, answered in {}; by scans in the rest",
            byte_count(*by_faults_bytes),
            millis(*answering_ms),
        ),
    }
}

/// Formats how vCPUs were throttled, and by what.
fn throttle_text(report: &Report, throttle: &ThrottleReport) -> String {
    let ThrottleReport { faults, held_ms, least_cpu_percent, .. } = throttle;
    let limits = report.rounds.iter().filter_map(|round| round.throttled_to_pages_per_s);
    let mut text = match limits.min_by(f64::total_cmp) {
        Some(limit) => format!("to {limit:.0} pages/s"),
        None => "in an unfinished round".to_owned(),
    };
    if let Some(percent) = least_cpu_percent {
        text.push_str(&format!("; vCPUs got at least {percent:.0} % of their CPUs"));
    }
    if *faults > 0 {
        text.push_str(&format!("; vCPUs waited {} in total, at {faults} writes", millis(*held_ms)));
    }
    text
}

/// Formats how the missing pages arrived, and the effect on the guest.
fn page_in_lines(page_in: &PageInReport) -> Vec<(&'static str, String)> {
    let PageInReport { pages, demanded_pages, cuts, duration_ms, fetch_ms, .. } = page_in;
    let cut = match cuts {
        0 => String::new(),
        1 => ", cut once".to_owned(),
        cuts => format!(", cut {cuts} times"),
    };
    let mut lines = vec![("paged in", format!("{pages} pages in {}{cut}", millis(*duration_ms)))];
    if *demanded_pages > 0 {
        let FetchTimes { median, p90, p99, max } = fetch_ms;
        let text = format!(
            "for {demanded_pages} of them: median {median:.2} ms, p90 {p90:.2}, \
             p99 {p99:.2}, at most {max:.1}"
        );
        lines.push(("guest waited", text));
    }
    lines
}

/// Formats by how much a deadline was or will be missed.
pub(crate) fn beyond_deadline(policy: Intent, migration_time_ms: f64) -> Option<String> {
    let Intent::Deadline(deadline) = policy else { return None };
    let deadline_ms = deadline.as_secs_f64() * 1e3;
    let over_ms = migration_time_ms - deadline_ms;
    (over_ms > 0.0)
        .then(|| format!("by {}: the deadline is {}", millis(over_ms), millis(deadline_ms)))
}

/// Formats the prediction, for comparison with the measurement.
fn predicted_text(predicted: &Predicted) -> String {
    let Predicted {
        migration_time_ms,
        wire_bytes,
        rounds,
        switchover_ms,
        means,
        throttled_to_pages_per_s,
    } = predicted;
    let limit = throttled_to_pages_per_s.filter(|_| *means == Means::Throttle);
    let held = limit.map_or_else(String::new, |limit| format!(" to {limit:.0} pages/s"));
    format!(
        "{}, {} on the wire in {rounds} rounds, a pause of {}; {means}{held}",
        millis(*migration_time_ms),
        byte_count(*wire_bytes),
        millis(*switchover_ms),
    )
}

/// Formats the encodings of pages in one line.
fn encodings(encodings: &[EncodingReport]) -> String {
    let one = |encoding: &EncodingReport| {
        let EncodingReport { name, pages, raw_bytes, wire_bytes } = encoding;
        let sizes = match name {
            EncodingName::Zero => String::new(),
            EncodingName::Raw => format!(" ({})", byte_count(*raw_bytes)),
            EncodingName::Lz4
            | EncodingName::Zstd
            | EncodingName::Reference
            | EncodingName::Delta => {
                format!(" ({} in {})", byte_count(*raw_bytes), byte_count(*wire_bytes))
            }
        };
        format!("{pages} {name}{sizes}")
    };
    encodings.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn breakdown(pieces: &SwitchoverReport) -> String {
    let SwitchoverReport { last_pages_ms, device_state_ms, flight_ms, load_ms, resume_ms } = pieces;
    format!(
        "last pages {last_pages_ms:.1}, device state {device_state_ms:.1}, flight {flight_ms:.1}, \
         load {load_ms:.1}, resume {resume_ms:.1}"
    )
}

fn lane_text(lane: &LaneReport) -> String {
    let LaneReport { streams, bytes, broken, .. } = lane;
    let plural = if *streams == 1 { "" } else { "s" };
    let mut text = format!("{}: {}, {streams} stream{plural}", lane.lane(), byte_count(*bytes));
    if let Some(why) = broken.first() {
        let more = if broken.len() > 1 {
            format!(", and {} more", broken.len() - 1)
        } else {
            String::new()
        };
        text.push_str(&format!("; broke: {why}{more}"));
    }
    text
}

fn rounds(report: &Report) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people: three digits are shown")]
    let rate = |bytes_sent: u64, ms: f64| {
        if ms > 0.0 { bytes(bytes_sent as f64 / ms * 1e3) } else { "-".to_owned() }
    };
    let row = |round: &godwit_types::RoundReport| {
        vec![
            round.round.to_string(),
            round.pages.to_string(),
            round.zero_pages.to_string(),
            byte_count(round.bytes),
            millis(round.duration_ms),
            format!("{}/s", rate(round.bytes, round.duration_ms)),
            format!("{:.0}", round.dirty_pages_per_s),
        ]
    };
    let rows: Vec<Vec<String>> = report.rounds.iter().map(row).collect();
    table(&["round", "pages", "zero", "bytes", "time", "bandwidth", "dirty pages/s"], &rows)
}

#[cfg(test)]
mod tests {
    use godwit_types::{Fault, Intent, Means, PhaseReport, RoundReport, ThrottleMeans};

    use super::*;

    fn report() -> Report {
        Report {
            migration_time_ms: 1234.5,
            switchover_ms: Some(12.3),
            switchover_budget_ms: Some(10.0),
            wire_bytes: 600 << 20,
            guest_bytes: 1 << 30,
            bandwidth_limit: "5gbit".parse().ok(),
            round_trip_ms: Some(0.2),
            encodings: vec![
                EncodingReport {
                    name: EncodingName::Zero,
                    pages: 100,
                    raw_bytes: 409_600,
                    wire_bytes: 80,
                },
                EncodingReport {
                    name: EncodingName::Zstd,
                    pages: 512,
                    raw_bytes: 2 << 20,
                    wire_bytes: 1 << 19,
                },
            ],
            referenced: ReferencedPages { disk: 700, own: 5, ..ReferencedPages::default() },
            missing_pages: 3,
            throttle: Some(ThrottleReport {
                faults: 5000,
                pages: 5000,
                held_ms: 2100.0,
                ..ThrottleReport::default()
            }),
            page_in: Some(PageInReport {
                pages: 7000,
                demanded_pages: 40,
                cuts: 2,
                duration_ms: 1500.0,
                fetch_ms: FetchTimes { median: 0.5, p90: 0.8, p99: 2.0, max: 1200.0 },
                waits: Vec::new(),
            }),
            policy: Some(Intent::Auto),
            means: Some(Means::Throttle),
            predicted: Some(Predicted {
                migration_time_ms: 1100.0,
                wire_bytes: 500 << 20,
                rounds: 4,
                switchover_ms: 14.0,
                means: Means::Throttle,
                throttled_to_pages_per_s: Some(1650.0),
            }),
            rounds: vec![RoundReport {
                round: 0,
                pages: 262_144,
                zero_pages: 100,
                bytes: 1 << 29,
                duration_ms: 1000.0,
                dirty_pages_per_s: 5000.0,
                throttled_to_pages_per_s: Some(1700.0),
            }],
            phases: vec![PhaseReport { phase: Phase::PreCopy, duration_ms: 1000.0 }],
            switchover: Some(SwitchoverReport::default()),
            ..Report::blank(Outcome::Completed, "web", "a", "b")
        }
    }

    #[test]
    fn the_report_says_what_happened() {
        let text = render(&report(), Output::new(false));
        for part in [
            "moved from a to b",
            "1.23 s",
            "12.3 ms",
            "not measured",
            "512 MiB/s",
            "5gbit",
            "262144",
            "pre-copy",
            "5 pages sent before, 700 pages on disks of VMs",
            "3 pages that the destination no longer had",
            "by 2.3 ms: the budget is 10.0 ms",
            "7000 pages in 1.50 s, cut 2 times",
            "for 40 of them: median 0.50 ms, p90 0.80, p99 2.00, at most 1200.0",
            "to 1700 pages/s; vCPUs waited 2.10 s in total, at 5000 writes",
            "1.10 s, 500 MiB on the wire in 4 rounds, a pause of 14.0 ms; throttle to 1650 pages/s",
            "auto",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(text.contains("100 zero, 512 zstd (2.0 MiB in 512 KiB)"), "{text}");
    }

    #[test]
    fn it_says_by_what_writers_were_held() {
        let quota = ThrottleReport {
            means: ThrottleMeans::Quota,
            least_cpu_percent: Some(12.4),
            ..ThrottleReport::default()
        };
        let text = render(&Report { throttle: Some(quota), ..report() }, Output::new(false));
        assert!(text.contains("to 1700 pages/s; vCPUs got at least 12 % of their CPUs"), "{text}");
        assert!(!text.contains("waited 0"), "{text}");
    }

    #[test]
    fn a_pause_within_its_budget_is_not_remarked_on() {
        let within = Report { switchover_budget_ms: Some(12.3), ..report() };
        let text = render(&within, Output::new(false));
        assert!(!text.contains("over budget") && text.contains("vCPUs' pause:"), "{text}");
    }

    #[test]
    fn a_missed_deadline_is_shown() {
        let after = |deadline: &str| {
            let policy = Some(deadline.parse().unwrap());
            render(&Report { policy, migration_time_ms: 10_900.0, ..report() }, Output::new(false))
        };
        assert!(
            after("deadline=5s").contains("by 5.90 s: the deadline is 5.00 s"),
            "{}",
            after("deadline=5s")
        );
        assert!(!after("deadline=11s").contains("over deadline"));
        assert!(!after("auto").contains("over deadline"));
    }

    #[test]
    fn a_failure_names_reason_and_mend() {
        let error = Fault {
            code: "peer-unreachable".into(),
            message: "b is gone".into(),
            remedy: "look at b".into(),
        };
        let text = render(
            &Report { outcome: Outcome::Failed, error: Some(error), ..report() },
            Output::new(false),
        );
        for part in ["stays at a", "b is gone [peer-unreachable]", "look at b"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }
}
