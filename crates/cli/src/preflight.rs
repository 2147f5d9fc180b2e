//! Implements `godwit vm preflight`: preflight checks and the ranking of hosts.

use std::path::Path;

use godwit_api::TravellingDisks;
use godwit_api::control::{Check, Preflight, PreflightRanking, PreflightReport, Verdict};

use crate::args::{ManagerPlace, PreflightArgs};
use crate::exit::{Exit, Failure};
use crate::manager::client;
use crate::migrate::dry_run::render;
use crate::output::{Output, Tone, table};

pub(crate) async fn run(
    args: PreflightArgs,
    place: &ManagerPlace,
    hosts: Option<&Path>,
    output: Output,
) -> Result<Exit, Failure> {
    let manager = client(place, hosts)?;
    let disks = args.with_disks.then(|| TravellingDisks {
        to: args.disks_to.clone(),
        flatten: args.flatten_disks,
        overwrite: args.overwrite_devices,
        ..TravellingDisks::default()
    });
    let found =
        manager.preflight(&args.vm, args.to.as_deref(), args.predict, disks.as_ref()).await?;
    output.result(&found, || match &found {
        Preflight::Report(report) => report_text(report, output),
        Preflight::Ranking(ranking) => ranking_text(ranking, output),
    })?;
    Ok(if can_move(&found) { Exit::Ok } else { Exit::Preflight })
}

fn can_move(found: &Preflight) -> bool {
    match found {
        Preflight::Report(report) => report.verdict != Verdict::Fail,
        Preflight::Ranking(ranking) => ranking.immovable.is_empty() && !ranking.fits.is_empty(),
    }
}

fn report_text(report: &PreflightReport, output: Output) -> String {
    let PreflightReport { vm, from, to, .. } = report;
    let (tone, says) = match report.verdict {
        Verdict::Pass => (Tone::Good, "can move"),
        Verdict::Warn => (Tone::Good, "can move; see the warnings"),
        Verdict::Unknown => {
            (Tone::Strong, "can move, as far as the manager knows (--predict asks the hosts)")
        }
        Verdict::Fail => (Tone::Bad, "cannot move"),
    };
    let mut text = format!(
        "VM {vm} from {from} to {to}: {}\n{}",
        output.paint(tone, says),
        checks(&report.checks)
    );
    if let Some(prediction) = &report.prediction {
        text += &format!("\n{}", render(prediction, output));
    }
    text
}

fn checks(checks: &[Check]) -> String {
    let row = |check: &Check| {
        vec![
            check.name.name().to_owned(),
            check.verdict.name().to_owned(),
            check.evidence.clone(),
            check.remedy.clone(),
        ]
    };
    let rows: Vec<_> = checks.iter().map(row).collect();
    table(&["check", "verdict", "evidence", "remedy"], &rows)
}

fn ranking_text(ranking: &PreflightRanking, output: Output) -> String {
    let PreflightRanking { vm, from, immovable, fits, ruled_out, best } = ranking;
    let mut text = format!("VM {vm} is on {from}\n");
    if !immovable.is_empty() {
        text += &output.paint(Tone::Bad, "it cannot move to any host:\n");
        text += &checks(immovable);
    }
    let fit = |(place, host): (usize, &godwit_api::control::RankedHost)| {
        vec![
            (place + 1).to_string(),
            host.host.clone(),
            format!("{:.1}", host.score.total),
            match &host.warning {
                Some(warning) => format!("{} ({}: {})", host.why, warning.text, warning.remedy),
                None => host.why.clone(),
            },
        ]
    };
    let out = |host: &godwit_api::control::RuledOutHost| {
        vec!["-".to_owned(), host.host.clone(), "-".to_owned(), host.why.clone()]
    };
    let rows: Vec<_> = fits.iter().enumerate().map(fit).chain(ruled_out.iter().map(out)).collect();
    text += &table(&["rank", "host", "points", "reason"], &rows);
    if let Some(best) = best {
        text += &format!("\n{}", report_text(best, output));
    }
    text
}
