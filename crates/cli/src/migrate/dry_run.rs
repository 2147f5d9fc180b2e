//! Prediction of `godwit migrate --dry-run` as text. The JSON form is the type itself.

use std::time::Duration;

use godwit_api::{Client, MigrationRequest};
use godwit_types::{DryRun, GuestFigures, LanesFigures, LanesKnownBy, Means, Predicted};

use crate::exit::{Exit, Failure};
use crate::migrate::interrupts;
use crate::output::{Output, Tone, fields, spinner};
use crate::report::beyond_deadline;
use crate::units::{byte_count, bytes, millis};

/// Refresh interval of the progress line.
const TICK: Duration = Duration::from_millis(100);
const PAGE_BYTES: u64 = 4096;

pub(super) async fn run(
    client: &Client,
    vm: &str,
    request: &MigrationRequest,
    output: Output,
) -> Result<Exit, Failure> {
    let mut interrupts = interrupts()?;
    let what = format!("measuring VM {vm} and the lanes to {} (some seconds)", request.to);
    let bar = spinner();
    match &bar {
        Some(bar) => {
            bar.set_message(what);
            bar.enable_steady_tick(TICK);
        }
        None => output.note(&what),
    }
    let reply = tokio::select! {
        reply = client.dry_run(vm, request) => Some(reply),
        _ = interrupts.recv() => None,
    };
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let Some(reply) = reply else {
        output.note("the agent ends the dry run within seconds");
        return Ok(Exit::Interrupted);
    };
    let dry_run = reply?;
    output.result(&dry_run, || render(&dry_run, output))?;
    Ok(Exit::of_dry_run(&dry_run))
}

pub(crate) fn render(dry_run: &DryRun, output: Output) -> String {
    let DryRun { vm, from, to, error, predicted, .. } = dry_run;
    let moves = predicted.as_ref().is_some_and(|predicted| predicted.means != Means::None);
    let (tone, line) = match moves {
        true => (Tone::Good, format!("VM {vm} would move from {from} to {to}")),
        false => (Tone::Bad, format!("VM {vm} would not move: it stays at {from}")),
    };
    let mut text = format!("{}\n", output.paint(tone, &line));
    if let Some(error) = error {
        text.push_str(&format!("  reason: {} [{}]\n", error.message, error.code));
        if !error.remedy.is_empty() {
            text.push_str(&format!("  remedy:   {}\n", error.remedy));
        }
    }
    let mut lines =
        predicted.as_ref().map_or_else(Vec::new, |predicted| prediction_rows(dry_run, predicted));
    if let Some(guest) = &dry_run.guest {
        lines.extend(of_guest(dry_run, guest));
    }
    if let Some(lanes) = &dry_run.lanes {
        lines.extend(of_lanes(lanes));
    }
    if !lines.is_empty() {
        let assumed =
            "the guest continues to behave as now; no pages are saved by references or deltas";
        lines.push(("assumed", assumed.to_owned()));
        text.push('\n');
        text.push_str(&fields(&lines));
    }
    text
}

fn prediction_rows(dry_run: &DryRun, predicted: &Predicted) -> Vec<(&'static str, String)> {
    let Predicted { migration_time_ms, wire_bytes, rounds, switchover_ms, means, .. } = predicted;
    let about = |ms: f64| format!("about {}", millis(ms));
    let why = dry_run.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    let mut lines =
        vec![("policy", dry_run.policy.to_string()), ("means", format!("{means}{why}"))];
    if *means == Means::None {
        lines
            .push(("gives up", format!("after {} and {rounds} rounds", about(*migration_time_ms))));
        return lines;
    }
    lines.push(("migration time", about(*migration_time_ms)));
    lines.extend(
        beyond_deadline(dry_run.policy, *migration_time_ms).map(|over| ("over deadline", over)),
    );
    let budget_ms = dry_run.switchover_budget_ms;
    let over = if *switchover_ms > budget_ms {
        format!("; the budget is {}", millis(budget_ms))
    } else {
        String::new()
    };
    lines.push(("vCPUs' pause", format!("{}{over}", about(*switchover_ms))));
    lines.extend(dry_run.blackout_ms.map(|ms| ("blackout", about(ms))));
    lines.push(("on the wire", format!("about {} in {rounds} rounds", byte_count(*wire_bytes))));
    lines
}

fn of_guest(dry_run: &DryRun, guest: &GuestFigures) -> Vec<(&'static str, String)> {
    let GuestFigures { data_pages, sent_as, wire_bytes_per_page, working_set_pages, .. } = guest;
    let holding = byte_count(data_pages * PAGE_BYTES);
    let of_a_page = bytes(*wire_bytes_per_page);
    let memory = format!(
        "{}, of which {holding} hold data; {sent_as}, {of_a_page} a page",
        byte_count(dry_run.guest_bytes)
    );
    let within = guest.samples.last().map_or(0.0, |sample| sample.ms);
    let writes = format!(
        "{:.0} pages/s, {working_set_pages} different pages in {}; {} a page",
        guest.dirty_pages_per_s,
        millis(within),
        bytes(guest.written_wire_bytes_per_page)
    );
    vec![("guest memory", memory), ("writes", writes)]
}

fn of_lanes(lanes: &LanesFigures) -> Vec<(&'static str, String)> {
    let known_by = match lanes.known_by {
        LanesKnownBy::Probe => "measured by a short probe",
        LanesKnownBy::Migration => "measured by the last migration there",
    };
    let carry = format!(
        "{}/s, round trip {:.2} ms, {known_by}",
        bytes(lanes.bytes_per_s),
        lanes.round_trip_ms
    );
    let mut lines = vec![("lanes", carry)];
    lines.extend(lanes.bandwidth_limit.map(|limit| ("limit", limit.to_string())));
    lines
}

#[cfg(test)]
mod tests {
    use godwit_types::{DirtySample, EncodingName, Fault, Intent};

    use super::*;

    fn dry_run(means: Means) -> DryRun {
        DryRun {
            vm: "web".into(),
            from: "a".into(),
            to: "b".into(),
            policy: Intent::Auto,
            switchover_budget_ms: 20.0,
            guest_bytes: 1 << 30,
            predicted: Some(Predicted {
                migration_time_ms: 12_340.0,
                wire_bytes: 300 << 20,
                rounds: 5,
                switchover_ms: 31.0,
                means,
                throttled_to_pages_per_s: Some(1800.0),
            }),
            blackout_ms: Some(36.0),
            why: Some("the guest writes 12000 pages/s, the lanes carry 6000".into()),
            guest: Some(GuestFigures {
                data_pages: 131_072,
                sent_as: EncodingName::Zstd,
                wire_bytes_per_page: 2048.0,
                written_wire_bytes_per_page: 4108.0,
                dirty_pages_per_s: 12_000.0,
                working_set_pages: 16_384,
                samples: vec![DirtySample { ms: 3000.0, pages: 16_384 }],
            }),
            lanes: Some(LanesFigures {
                bytes_per_s: 25e6,
                round_trip_ms: 0.1,
                bandwidth_limit: "500mbit".parse().ok(),
                known_by: LanesKnownBy::Probe,
            }),
            error: None,
            dry_run_time_ms: 5000.0,
        }
    }

    fn expect(text: &str, parts: &[&str]) {
        for part in parts {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn it_says_what_will_be_and_by_what() {
        let report = dry_run(Means::Throttle);
        expect(
            &render(&report, Output::new(false)),
            &[
                "VM web would move from a to b",
                "about 12.34 s",
                "about 31.0 ms; the budget is 20.0 ms",
                "about 36.0 ms",
                "about 300 MiB in 5 rounds",
                "throttle: the guest writes 12000 pages/s",
                "1.0 GiB, of which 512 MiB hold data; zstd, 2.0 KiB a page",
                "12000 pages/s, 16384 different pages in 3.00 s; 4.0 KiB a page",
                "24 MiB/s, round trip 0.10 ms, measured by a short probe",
                "500mbit",
            ],
        );
        assert_eq!(Exit::of_dry_run(&report), Exit::Ok);
    }

    #[test]
    fn a_refusal_reads_like_that_of_a_migration() {
        let report = dry_run(Means::None);
        expect(
            &render(&report, Output::new(false)),
            &["would not move", "gives up", "after about 12.34 s"],
        );
        assert_eq!(Exit::of_dry_run(&report), Exit::Preflight);
        let error = Fault {
            code: "insufficient-memory".into(),
            message: "host b has not enough".into(),
            remedy: "take another".into(),
        };
        let refused = DryRun {
            predicted: None,
            blackout_ms: None,
            why: None,
            guest: None,
            lanes: None,
            error: Some(error),
            ..report
        };
        let text = render(&refused, Output::new(false));
        expect(
            &text,
            &["would not move", "host b has not enough [insufficient-memory]", "take another"],
        );
        assert!(!text.contains("assumed"), "{text}");
        assert_eq!(Exit::of_dry_run(&refused), Exit::Preflight);
    }
}
