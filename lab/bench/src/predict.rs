//! Predictions of dry runs compared with the moves that follow: guests that write little and much,
//! over links that are fast and slow, near and far, with and without a limit.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use godwit_api::MigrationRequest;
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_lab::{BitRate, LabOptions, Rtt};
use godwit_qemu::ByteSize;
use godwit_types::{DryRun, Intent, Means, Outcome, Predicted, Report};
use serde::Serialize;

use crate::figures::dash;
use crate::machine::Machine;
use crate::results;
use crate::results::as_text;
use crate::subject::{Engine, Subject};
use crate::switchover::ODD_BYTES;

/// Time for which the guest runs a new workload before it is observed.
const SETTLE: Duration = Duration::from_secs(1);
/// A prediction that deviates by no more than this counts as right.
const CLOSE: f64 = 0.2;
/// Fraction of all cases that must be right.
const MOST_RIGHT: f64 = 0.9;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Names of the links to try, as in the table [default: all]
    #[arg(long = "link", value_name = "NAME", value_delimiter = ',')]
    links: Vec<String>,
    /// The guest's memory (64 KiB more, without which QEMU before 9.0 loses writes under TCG)
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Part of that memory in use
    #[arg(long, value_name = "SIZE", default_value = "192MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if fewer than nine in ten predictions are right
    #[arg(long)]
    check: bool,
}

/// Link, and the cases on it.
struct Link {
    name: &'static str,
    /// `None`: as fast as the machine.
    rate: Option<&'static str>,
    rtt: &'static str,
    cases: &'static [Case],
}

/// Guest with a workload, and a request.
struct Case {
    /// The workload, as text for the guest.
    workload: &'static str,
    limit: Option<&'static str>,
    policy: Intent,
}

const fn case(workload: &'static str) -> Case {
    Case { workload, limit: None, policy: Intent::Auto }
}

/// Pages that no encoding makes smaller, and others.
const LITTLE: &str = "dirty:rate=2000,ws=64M,order=random,zero=10,compressible=40";
const SOME: &str = "dirty:rate=5000,ws=64M,order=random,zero=10,compressible=40";
const MUCH_OF_LITTLE: &str = "dirty:rate=20000,ws=16M,order=random,zero=0,compressible=0";
const MUCH: &str = "dirty:rate=20000,ws=64M,order=random,zero=0,compressible=0";
const FAR_TOO_MUCH: &str = "dirty:rate=60000,ws=128M,order=random,zero=0,compressible=0";

/// Twenty in all.
const LINKS: [Link; 5] = [
    Link {
        name: "200mbit",
        rate: Some("200mbit"),
        rtt: "0ms",
        cases: &[
            case("idle"),
            case(LITTLE),
            case(MUCH),
            case(FAR_TOO_MUCH),
            Case { limit: Some("100mbit"), ..case(LITTLE) },
        ],
    },
    Link {
        name: "1gbit",
        rate: Some("1gbit"),
        rtt: "0ms",
        cases: &[
            case("idle"),
            case(SOME),
            case(MUCH_OF_LITTLE),
            case(FAR_TOO_MUCH),
            Case { limit: Some("500mbit"), ..case(MUCH) },
            Case { policy: Intent::FastEvacuation, ..case(MUCH) },
        ],
    },
    Link {
        name: "unshaped",
        rate: None,
        rtt: "0ms",
        cases: &[
            case("idle"),
            case(SOME),
            case(FAR_TOO_MUCH),
            Case { limit: Some("1gbit"), ..case(SOME) },
        ],
    },
    Link {
        name: "1gbit-10ms",
        rate: Some("1gbit"),
        rtt: "10ms",
        cases: &[case("idle"), case(SOME), case(FAR_TOO_MUCH)],
    },
    Link {
        name: "1gbit-40ms",
        rate: Some("1gbit"),
        rtt: "40ms",
        cases: &[case(LITTLE), case(MUCH)],
    },
];

/// One case, predicted and measured.
#[derive(Debug, Serialize)]
struct Figures {
    link: &'static str,
    workload: &'static str,
    limit: Option<&'static str>,
    policy: Intent,
    /// Measured time divided by predicted time; `None`: the guest did not move, or there was no
    /// prediction.
    ratio: Option<f64>,
    time_is_close: bool,
    means_are_right: bool,
    dry_run: DryRun,
    /// `None`: the guest was lost.
    report: Option<Report>,
}

#[derive(Serialize)]
struct Measured<'a> {
    within_20_percent: usize,
    means_right: usize,
    cases: &'a [Figures],
}

/// Measures, prints, writes. Returns false if too few are right and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  guest of {} and 64 KiB under TCG or KVM as the host can, {} in use; a dry run, \
         then the move, both over TLS, no pages \
         sent by reference",
        settings.memory, settings.fill,
    );
    let mut cases = Vec::new();
    let wanted = |link: &&Link| {
        settings.links.is_empty() || settings.links.iter().any(|name| name == link.name)
    };
    for link in LINKS.iter().filter(wanted) {
        on_link(settings, link, &mut cases)?;
    }
    let count = |is_right: fn(&Figures) -> bool| cases.iter().filter(|case| is_right(case)).count();
    let (within_20_percent, means_right) =
        (count(|case| case.time_is_close), count(|case| case.means_are_right));
    print!("{}", render(&cases));
    println!(
        "\n  within 20 % of the time: {within_20_percent} of {all}; means right: {means_right} of \
         {all}",
        all = cases.len()
    );
    let measured = Measured { within_20_percent, means_right, cases: &cases };
    results::write(&settings.out, "predict", &machine, settings, &measured)?;
    #[expect(clippy::cast_precision_loss, reason = "twenty")]
    let enough = within_20_percent.min(means_right) as f64 >= MOST_RIGHT * cases.len() as f64;
    Ok(enough || !settings.check)
}

fn on_link(settings: &Settings, link: &Link, cases: &mut Vec<Figures>) -> Result<()> {
    let rate: Option<BitRate> = link.rate.map(str::parse).transpose()?;
    let rtt: Rtt = link.rtt.parse()?;
    let trial =
        Trial::begin_with("bench", LabOptions { link: rate, rtt, ..LabOptions::default() })?;
    let trial = trial.context("cannot start a lab here")?;
    let memory = ByteSize::from_bytes(settings.memory.bytes().saturating_add(ODD_BYTES));
    let plan = GuestPlan { memory: vec![memory], fill: settings.fill, ..GuestPlan::new("bench") };
    let mut subject = Subject::new(&trial, plan)?;
    for case in link.cases {
        cases.push(predict_and_move(&trial, &mut subject, link, case)?);
    }
    subject.guest.verify().with_context(|| format!("{} at the end", link.name))?;
    trial.finish()
}

fn predict_and_move(
    trial: &Trial,
    subject: &mut Subject<'_>,
    link: &Link,
    case: &Case,
) -> Result<Figures> {
    let Case { workload, limit, policy } = case;
    subject.work(workload)?;
    let bandwidth_limit = limit.map(str::parse).transpose()?;
    let change = |request| MigrationRequest { bandwidth_limit, policy: *policy, ..request };
    // Probed as during its move, because answering is work too.
    subject.guest.watch()?;
    #[expect(clippy::disallowed_methods, reason = "the guest is to do this for a while")]
    std::thread::sleep(SETTLE);
    let request = change(subject.guest.to_other_host());
    let dry_run = trial.ask(trial.agent(&subject.guest.host).dry_run("bench", &request))?;
    subject.guest.unwatch()?;
    let _warm = subject.warm_destination()?;
    let report = subject.move_by(Engine::Godwit, change)?.map(|watched| watched.report);
    let figures = compare(link, case, dry_run, report);
    eprintln!("  {}", row(&figures).join("  "));
    Ok(figures)
}

fn compare(link: &Link, case: &Case, dry_run: DryRun, report: Option<Report>) -> Figures {
    let moved = report.as_ref().filter(|report| report.outcome == Outcome::Completed);
    let predicted = dry_run.predicted.as_ref().filter(|predicted| predicted.means != Means::None);
    let both = predicted.zip(moved);
    let ratio =
        both.map(|(predicted, report)| report.migration_time_ms / predicted.migration_time_ms);
    let means = |report: &Report| report.means.unwrap_or(Means::None);
    Figures {
        link: link.name,
        workload: case.workload,
        limit: case.limit,
        policy: case.policy,
        ratio,
        time_is_close: ratio.is_some_and(|ratio| (1.0 - CLOSE..=1.0 + CLOSE).contains(&ratio)),
        means_are_right: dry_run.predicted.map(|predicted| predicted.means)
            == report.as_ref().map(means),
        dry_run,
        report,
    }
}

const HEADS: [(&str, usize); 12] = [
    ("link", 10),
    ("guest", 22),
    ("limit", 7),
    ("predicted s", 11),
    ("measured s", 10),
    ("off %", 6),
    ("at start s", 10),
    ("means", 8),
    ("measured", 8),
    ("MiB", 11),
    ("switchover ms", 13),
    ("blackout ms", 12),
];

fn render(cases: &[Figures]) -> String {
    let line = |cells: &mut dyn Iterator<Item = String>| {
        format!("  {}\n", cells.collect::<Vec<_>>().join("  "))
    };
    let mut out = String::from(
        "\npredicted by a dry run; `at start`: by the migration itself before round 0; the last \
         three predicted/measured\n",
    );
    out += &line(&mut HEADS.iter().map(|(head, width)| format!("{head:<width$}")));
    for case in cases {
        let cells = row(case);
        out +=
            &line(&mut cells.iter().zip(HEADS).map(|(cell, (_, width))| format!("{cell:<width$}")));
    }
    out
}

fn row(case: &Figures) -> Vec<String> {
    let seconds = |ms: Option<f64>| ms.map_or_else(dash, |ms| format!("{:.2}", ms / 1e3));
    let predicted = case.dry_run.predicted.as_ref();
    let report = case.report.as_ref();
    let time = |predicted: &Predicted| predicted.migration_time_ms;
    #[expect(clippy::cast_precision_loss, reason = "a table shows whole MiB")]
    let mib = |bytes: Option<u64>| {
        bytes.map_or_else(dash, |bytes| format!("{:.0}", bytes as f64 / f64::from(1 << 20)))
    };
    let ms = |ms: Option<f64>| ms.map_or_else(dash, |ms| format!("{ms:.0}"));
    let pair = |one: String, other: String| format!("{one}/{other}");
    let means = |means: Option<Means>| means.map_or_else(dash, |means| means.to_string());
    vec![
        case.link.to_owned(),
        guest_text(case.workload, case.policy),
        case.limit.unwrap_or("-").to_owned(),
        seconds(predicted.map(time)),
        seconds(report.map(|report| report.migration_time_ms)),
        case.ratio.map_or_else(dash, |ratio| format!("{:+.0}", 100.0 * (ratio - 1.0))),
        seconds(report.and_then(|report| report.predicted.as_ref()).map(time)),
        means(predicted.map(|predicted| predicted.means)),
        means(report.and_then(|report| report.means)),
        pair(
            mib(predicted.map(|predicted| predicted.wire_bytes)),
            mib(report.map(|report| report.wire_bytes)),
        ),
        pair(
            ms(predicted.map(|predicted| predicted.switchover_ms)),
            ms(report.and_then(|report| report.switchover_ms)),
        ),
        pair(ms(case.dry_run.blackout_ms), ms(report.and_then(|report| report.blackout_ms))),
    ]
}

/// Formats the guest as `20000/s of 64M`, with the policy if it is not the default.
fn guest_text(workload: &str, policy: Intent) -> String {
    let word = |key: &str| workload.split([':', ',']).find_map(|word| word.strip_prefix(key));
    let guest = match (word("rate="), word("ws=")) {
        (Some(rate), Some(set)) => format!("{rate}/s of {set}"),
        _ => workload.to_owned(),
    };
    if policy == Intent::Auto { guest } else { format!("{guest}, {policy}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dry_run(predicted: Option<Predicted>) -> DryRun {
        DryRun {
            vm: "bench".into(),
            from: "a".into(),
            to: "b".into(),
            policy: Intent::Auto,
            switchover_budget_ms: 20.0,
            guest_bytes: 1 << 29,
            predicted,
            blackout_ms: None,
            why: None,
            guest: None,
            lanes: None,
            error: None,
            dry_run_time_ms: 4700.0,
        }
    }

    #[test]
    fn an_unknown_prediction_is_never_right() {
        let lost = compare(&LINKS[0], &LINKS[0].cases[0], dry_run(None), None);
        assert!(!lost.time_is_close && lost.ratio.is_none());
        assert!(row(&lost).iter().all(|cell| !cell.is_empty()));
    }

    #[test]
    fn there_are_twenty_and_their_words_are_short() {
        let cases: Vec<&Case> = LINKS.iter().flat_map(|link| link.cases).collect();
        assert_eq!(cases.len(), 20);
        assert_eq!(guest_text(MUCH, Intent::Auto), "20000/s of 64M");
        assert_eq!(guest_text("idle", Intent::Auto), "idle");
        for link in &LINKS {
            assert!(
                link.rate.is_none_or(|rate| rate.parse::<BitRate>().is_ok())
                    && link.rtt.parse::<Rtt>().is_ok()
            );
        }
    }
}
