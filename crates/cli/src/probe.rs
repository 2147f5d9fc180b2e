//! Implements `godwit probe`: the network between two hosts as a migration would use it.

use godwit_api::{PROBE_SECONDS, ProbeEvent, ProbeRequest};
use godwit_types::{
    Fault,
    probe::{
        LaneProbe, Limit, MoveEstimate, ProbeProgress, ProbeReport, STREAM_COUNTS, ThroughputRun,
    },
};
use indicatif::ProgressBar;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::ProbeArgs;
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::{Output, Tone, fields, spinner, table};
use crate::units::{byte_count, bytes, millis};

pub(crate) async fn run(
    options: ProbeArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    if !PROBE_SECONDS.contains(&options.seconds) {
        let message = format!("cannot measure for {} seconds", options.seconds);
        let remedy =
            format!("set --seconds to {} to {}", PROBE_SECONDS.start(), PROBE_SECONDS.end());
        return Err(Failure::usage(message, remedy));
    }
    hosts.check(&options.to)?;
    let (from, client) = hosts.other(&options.to, options.from.as_deref().or(only))?;
    if from == options.to {
        let message = format!("cannot probe host {from} from itself");
        return Err(Failure::usage(message, "name another host with --from"));
    }
    let request = ProbeRequest {
        to: options.to,
        guest_bytes: options.size.bytes(),
        seconds: options.seconds,
    };
    // Installed before the probe starts: dropping the events ends the probe on both hosts.
    let mut interrupts = signal(SignalKind::interrupt())?;
    let asked = async {
        let mut events = client.probe(&request).await?;
        let mut line = StageLine::new(output);
        loop {
            match events.next().await? {
                Some(ProbeEvent::Progress(progress)) => line.show(&progress),
                Some(ProbeEvent::Report(report)) => {
                    line.end();
                    return Ok(*report);
                }
                Some(ProbeEvent::Failed(error)) => {
                    line.end();
                    return Err(error.into());
                }
                None => {
                    line.end();
                    let message =
                        format!("cannot finish the probe: the agent of host {from} exited");
                    return Err(Failure::new(
                        Exit::Unreachable,
                        message,
                        "read its log (journalctl -u godwit-host), then probe again",
                    ));
                }
            }
        }
    };
    let report: Result<ProbeReport, Failure> = tokio::select! {
        report = asked => report,
        _ = interrupts.recv() => {
            output.note("the probe was stopped");
            return Ok(Exit::Interrupted);
        }
    };
    let report = report?;
    output.result(&report, || render(&report, output))?;
    let all_measured = report.lanes.iter().all(|lane| lane.failure.is_none());
    Ok(if all_measured && !report.lanes.is_empty() { Exit::Ok } else { Exit::Unreachable })
}

/// Shows the current measurement: a live line on a terminal, otherwise a plain one for each.
struct StageLine {
    output: Output,
    bar: Option<ProgressBar>,
}

impl StageLine {
    fn new(output: Output) -> StageLine {
        let bar = spinner();
        StageLine { output, bar }
    }

    fn show(&mut self, progress: &ProbeProgress) {
        let text = stage(progress);
        match &self.bar {
            Some(bar) => {
                bar.set_message(text);
                bar.tick();
            }
            None => self.output.note(&text),
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Formats `lane 1 of 2, 10.0.0.1 → 10.0.0.2:7  throughput, 4 streams`.
fn stage(progress: &ProbeProgress) -> String {
    let lane = match &progress.lane {
        Some(lane) => format!("lane {} of {}, {lane}  ", progress.number, progress.lanes),
        None => String::new(),
    };
    let streams = match progress.streams {
        Some(1) => ", 1 stream".to_owned(),
        Some(streams) => format!(", {streams} streams"),
        None => String::new(),
    };
    format!("{lane}{}{streams}", progress.stage)
}

fn render(report: &ProbeReport, output: Output) -> String {
    let protection = if report.encrypted { "over TLS" } else { "without encryption" };
    let title = format!("{} to {}, {protection}", report.from, report.to);
    let mut text = format!("{}\n\n", output.paint(Tone::Strong, &title));
    let counts = STREAM_COUNTS.map(|streams| match streams {
        1 => "1 stream".to_owned(),
        streams => format!("{streams} streams"),
    });
    let mut heads = vec!["lane", "connect", "tls", "round trip", "mtu"];
    heads.extend(counts.iter().map(String::as_str));
    heads.push("limit");
    let mut rows: Vec<Vec<String>> = report.lanes.iter().map(row).collect();
    if !report.together.is_empty() {
        let dash = || "-".to_owned();
        let limit = report.limit.map_or_else(dash, |limit| limit.to_string());
        let mut all = vec!["all together".to_owned(), dash(), dash(), dash(), dash()];
        all.extend(rates(&report.together));
        all.push(limit);
        rows.push(all);
    }
    text.push_str(&table(&heads, &rows));
    let mut remarks: Vec<String> = report.lanes.iter().flat_map(remarks).collect();
    if let Some(failure) = &report.together_failure {
        let Fault { code, message, remedy } = failure;
        remarks.push(format!("all together: {message} [{code}]\n  remedy: {remedy}\n"));
    }
    if let Some(limit) = report.bandwidth_limit {
        remarks.push(format!(
            "host {} limits a migration to {limit}; the probe ignores limits\n",
            report.from
        ));
    }
    if !remarks.is_empty() {
        text.push('\n');
        text.push_str(&remarks.concat());
    }
    text.push('\n');
    text.push_str(&conclusion(report, output));
    text
}

fn lane_name(lane: &LaneProbe) -> String {
    let to = lane.to.ip();
    lane.from.map_or_else(|| format!("→ {to}"), |from| format!("{from} → {to}"))
}

fn row(lane: &LaneProbe) -> Vec<String> {
    let dash = || "-".to_owned();
    let time = |ms: Option<f64>| ms.map_or_else(dash, |ms| format!("{ms:.2} ms"));
    let mtu = match lane.mtu {
        Some(mtu) => mtu.passes.map_or_else(dash, |passes| passes.to_string()),
        None => dash(),
    };
    let limit = match (&lane.failure, lane.limit) {
        (Some(_), _) => "failed".to_owned(),
        (None, Some(limit)) => limit.to_string(),
        (None, None) => dash(),
    };
    let mut row = vec![
        lane_name(lane),
        time(lane.connect_ms),
        time(lane.secure_ms),
        time(lane.round_trip.map(|round_trip| round_trip.median_ms)),
        mtu,
    ];
    row.extend(rates(&lane.throughput));
    row.push(limit);
    row
}

/// Returns a rate for each number of streams that lanes are measured with.
fn rates(runs: &[ThroughputRun]) -> impl Iterator<Item = String> {
    STREAM_COUNTS.iter().map(|streams| {
        let run = runs.iter().find(|run| run.streams == *streams);
        run.map_or_else(|| "-".to_owned(), |run| format!("{}/s", bytes(run.bytes_per_s)))
    })
}

/// Formats details that do not fit in the row of a lane.
fn remarks(lane: &LaneProbe) -> Vec<String> {
    let name = lane_name(lane);
    let mut lines = Vec::new();
    if let Some(failure) = &lane.failure {
        lines.push(format!(
            "{name}: {} [{}]\n  remedy: {}\n",
            failure.message, failure.code, failure.remedy
        ));
    }
    if let Some(mtu) = lane.mtu {
        let interface =
            mtu.interface.map_or_else(|| "an unknown size".to_owned(), |mtu| mtu.to_string());
        let passes = mtu.passes.map_or_else(|| "less".to_owned(), |passes| passes.to_string());
        if mtu.black_hole {
            lines.push(format!(
                "{name}: the interface has an MTU of {interface}, but only {passes} passes, and \
                 larger packets are dropped silently: a migration would stall for seconds and \
                 continue with small packets\n  remedy: set the interface's MTU to {passes} on \
                 both hosts, or configure the network between them for {interface}\n"
            ));
        } else if mtu.interface > mtu.passes {
            lines.push(format!(
                "{name}: MTU of the interface {interface}, but only {passes} passes\n"
            ));
        }
    }
    lines
}

fn conclusion(report: &ProbeReport, output: Output) -> String {
    let Some(estimate) = &report.estimate else {
        let line = "no lane can carry a migration: see above";
        return format!("{}\n", output.paint(Tone::Bad, line));
    };
    let mut lines = vec![("limit", limit_text(report, estimate))];
    let usual = format!(
        "about {} for a VM of {} with {} of each lane ({}/s)",
        millis(estimate.migration_time_ms),
        byte_count(estimate.guest_bytes),
        if estimate.streams == 1 {
            "1 stream".to_owned()
        } else {
            format!("{} streams", estimate.streams)
        },
        bytes(estimate.bytes_per_s),
    );
    lines.push(("migration time", usual));
    // A smaller gain is no reason for a change.
    if estimate.best_streams > estimate.streams
        && estimate.best_migration_time_ms * 1.1 < estimate.migration_time_ms
    {
        let better = format!("about {}", millis(estimate.best_migration_time_ms));
        lines.push(("faster", format!("{better} with --streams {}", estimate.best_streams)));
    }
    lines.push((
        "assumed",
        "an idle VM without zero pages; one that writes memory takes longer, and zero pages \
         shorten it"
            .to_owned(),
    ));
    fields(&lines)
}

fn limit_text(report: &ProbeReport, estimate: &MoveEstimate) -> String {
    let Some(limit) = report.limit else { return "unknown".to_owned() };
    let why = match limit {
        Limit::Wire if !report.together.is_empty() => {
            format!("the wire is full with {} streams of each lane", estimate.best_streams)
        }
        Limit::Wire if estimate.best_streams > 1 => format!(
            "the wire is full with {} streams; one stream alone carries less",
            estimate.best_streams
        ),
        Limit::Wire => "the wire is full with one stream".to_owned(),
        Limit::FlowCap => {
            "the network or TCP's windows limit each stream: more streams carry more".to_owned()
        }
        Limit::SourceCpu => {
            format!(
                "the CPUs of host {}; a migration, which also reads memory, may be slower",
                report.from
            )
        }
        Limit::DestinationCpu => {
            format!(
                "the CPUs of host {}; a migration, which also writes memory, may be slower",
                report.to
            )
        }
        Limit::Mtu => "the packets are larger than the network carries".to_owned(),
        Limit::Unclear => "more streams carry more, but less than their share".to_owned(),
    };
    format!("{limit}: {why}")
}

#[cfg(test)]
mod tests {
    use godwit_types::probe::{CpuUse, MtuProbe, ProbeStage, RoundTrips};

    use super::*;

    const MIB: f64 = 1_048_576.0;

    fn lane(rates: [f64; 4]) -> LaneProbe {
        let run = |(streams, rate)| ThroughputRun {
            streams,
            bytes_per_s: rate * MIB,
            source: CpuUse::default(),
            destination: CpuUse::default(),
        };
        LaneProbe {
            from: Some("10.0.0.1".parse().unwrap()),
            to: "10.0.0.2:4711".parse().unwrap(),
            connect_ms: Some(0.21),
            secure_ms: Some(1.5),
            round_trip: Some(RoundTrips { least_ms: 0.08, median_ms: 0.1, count: 50 }),
            mtu: Some(MtuProbe { interface: Some(1500), passes: Some(1500), black_hole: false }),
            throughput: STREAM_COUNTS.into_iter().zip(rates).map(run).collect(),
            limit: Some(Limit::FlowCap),
            failure: None,
        }
    }

    /// Returns the estimate for a guest of 16 GiB; `None` if nothing was measured.
    fn estimate(runs: &[ThroughputRun]) -> Option<MoveEstimate> {
        let guest_bytes = 16 << 30;
        let usual = runs.iter().find(|run| run.streams == 2)?;
        let highest = runs.iter().map(|run| run.bytes_per_s).fold(0.0, f64::max);
        let best = runs.iter().find(|run| run.bytes_per_s * 1.1 >= highest)?;
        let time_ms = |run: &ThroughputRun| 16384.0 * MIB / run.bytes_per_s * 1e3;
        Some(MoveEstimate {
            guest_bytes,
            streams: usual.streams,
            bytes_per_s: usual.bytes_per_s,
            migration_time_ms: time_ms(usual),
            best_streams: best.streams,
            best_migration_time_ms: time_ms(best),
        })
    }

    fn report(lanes: Vec<LaneProbe>) -> ProbeReport {
        let runs = lanes[0].throughput.clone();
        ProbeReport {
            from: "a".into(),
            to: "b".into(),
            encrypted: true,
            limit: lanes[0].limit,
            lanes,
            together: Vec::new(),
            together_failure: None,
            bandwidth_limit: None,
            estimate: estimate(&runs),
            probe_time_ms: 6000.0,
        }
    }

    fn expect(text: &str, parts: &[&str]) {
        for part in parts {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn what_was_not_measured_and_what_holds_a_migration_is_told() {
        let mut report = report(vec![lane([100.0, 200.0, 400.0, 800.0])]);
        report.together_failure = Some(Fault {
            code: "lane-lost".to_owned(),
            message: "the peer closed the lane".to_owned(),
            remedy: "check the network".to_owned(),
        });
        report.bandwidth_limit = Some("500mbit".parse().unwrap());
        let text = render(&report, Output::new(false));
        expect(
            &text,
            &[
                "all together: the peer closed the lane [lane-lost]\n  remedy: check the network",
                "host a limits a migration to 500mbit; the probe ignores limits",
                "800 MiB/s",
            ],
        );
    }

    #[test]
    fn the_report_says_what_was_found() {
        let text = render(&report(vec![lane([100.0, 200.0, 400.0, 800.0])]), Output::new(false));
        expect(
            &text,
            &[
                "a to b, over TLS",
                "10.0.0.1 → 10.0.0.2  0.21 ms",
                "1.50 ms",
                "0.10 ms",
                "1500",
                "800 MiB/s",
                "flow cap: the network or TCP's windows limit each stream",
                "about 1 min 22 s for a VM of 16 GiB with 2 streams",
                "about 20.48 s with --streams 8",
                "idle VM",
            ],
        );
    }

    #[test]
    fn a_full_wire_is_told_by_what_was_measured() {
        let full = |rates, together: bool| {
            let lane = LaneProbe { limit: Some(Limit::Wire), ..lane(rates) };
            let mut report = report(vec![lane.clone(), lane]);
            report.together =
                if together { report.lanes[0].throughput[1..].to_vec() } else { Vec::new() };
            render(&report, Output::new(false))
        };
        expect(&full([100.0; 4], false), &["full with one stream"]);
        expect(
            &full([50.0, 100.0, 100.0, 100.0], false),
            &["full with 2 streams; one stream alone"],
        );
        expect(
            &full([50.0, 100.0, 100.0, 100.0], true),
            &["full with 2 streams of each lane", "all together"],
        );
    }

    #[test]
    fn lanes_that_fail_or_swallow_packets_are_told_with_the_mend() {
        let failure = Fault {
            code: "lane-lost".into(),
            message: "can't connect".into(),
            remedy: "look at it".into(),
        };
        let dead = LaneProbe {
            throughput: Vec::new(),
            mtu: None,
            limit: None,
            failure: Some(failure),
            ..lane([0.0; 4])
        };
        let swallows = LaneProbe {
            mtu: Some(MtuProbe { interface: Some(9000), passes: Some(1500), black_hole: true }),
            throughput: Vec::new(),
            limit: Some(Limit::Mtu),
            ..lane([0.0; 4])
        };
        let text = render(&report(vec![swallows, dead]), Output::new(false));
        expect(
            &text,
            &[
                "can't connect [lane-lost]",
                "remedy: look at it",
                "MTU of 9000, but only 1500 passes",
                "failed",
                "no lane can carry a migration",
            ],
        );
    }

    #[test]
    fn the_line_names_lane_and_streams() {
        let progress = ProbeProgress {
            lane: Some("10.0.0.1 → 10.0.0.2:7".into()),
            number: 1,
            lanes: 2,
            stage: ProbeStage::Throughput,
            streams: Some(4),
            elapsed_ms: 1.0,
        };
        assert_eq!(stage(&progress), "lane 1 of 2, 10.0.0.1 → 10.0.0.2:7  throughput, 4 streams");
        let together =
            ProbeProgress { lane: None, stage: ProbeStage::Together, streams: None, ..progress };
        assert_eq!(stage(&together), "throughput of all lanes together");
    }
}
