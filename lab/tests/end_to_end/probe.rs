//! `godwit probe` between two hosts: its figures fit the link, over TLS, and it finds packets that
//! vanish.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use godwit_lab::LabOptions;
use godwit_lab::trial::{LIMIT, Trial, until};
use godwit_types::probe::{Limit, ProbeReport, STREAM_COUNTS};
use rustix::process::{Pid, Signal};

/// Exit codes of the `godwit` command (docs/cli.md).
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 3;
const CONFLICT: i32 = 4;
const UNREACHABLE: i32 = 6;
const INTERRUPTED: i32 = 130;

fn probe(trial: &Trial) -> Result<ProbeReport> {
    let output = trial.godwit(&[
        "--json",
        "probe",
        "b",
        "--from",
        "a",
        "--seconds",
        "0.3",
        "--size",
        "1GiB",
    ])?;
    ensure!(output.code == Some(0), "{output:?}");
    ensure!(
        output.stderr.contains("round trip") && output.stderr.contains("8 streams"),
        "{}",
        output.stderr
    );
    Ok(serde_json::from_str(&output.stdout)?)
}

#[test]
fn a_probe_measures_the_link() -> Result<()> {
    const LINK_BYTES_PER_S: f64 = 100e6 / 8.0;
    let options = LabOptions { link: Some("100mbit".parse()?), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("probe", options)? else { return Ok(()) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let report = probe(&trial)?;
    // IPv4 and IPv6.
    ensure!(report.encrypted && report.lanes.len() == 2, "{report:#?}");
    for lane in &report.lanes {
        ensure!(
            lane.failure.is_none() && lane.secure_ms.is_some() && lane.round_trip.is_some(),
            "{lane:#?}"
        );
        let mtu = lane.mtu.context("no MTU")?;
        ensure!(
            mtu.passes == Some(1500) && mtu.interface == Some(1500) && !mtu.black_hole,
            "{mtu:?}"
        );
        ensure!(lane.throughput.len() == STREAM_COUNTS.len(), "{lane:#?}");
    }
    for run in report.lanes.iter().flat_map(|lane| &lane.throughput).chain(&report.together) {
        let share = run.bytes_per_s / LINK_BYTES_PER_S;
        eprintln!("  {} streams: {share:.3} of the link", run.streams);
        // Bytes that a delayed receiver finds in its buffer count as well. The machine alone
        // carries a hundred times this.
        ensure!(share > 0.0 && share < 1.2, "{run:?}");
    }
    let estimate = report.estimate.context("no estimate")?;
    ensure!(estimate.guest_bytes == 1 << 30 && estimate.migration_time_ms > 0.0, "{estimate:?}");
    // The text output, and refused requests.
    let text = trial.godwit(&["probe", "b", "--from", "a", "--seconds", "0.1"])?;
    ensure!(text.code == Some(0) && text.stdout.contains("migration time"), "{text:?}");
    eprintln!("{}", text.stdout);
    for (arguments, code) in [
        (&["probe", "z"][..], NOT_FOUND),
        (&["probe", "b", "--from", "z"], NOT_FOUND),
        (&["probe", "a", "--from", "a"], USAGE),
        (&["probe", "b", "--seconds", "99"], USAGE),
    ] {
        let output = trial.godwit(arguments)?;
        ensure!(output.code == Some(code), "{arguments:?}: {output:?}");
        eprintln!("  error: {}", output.stderr.trim());
    }
    interrupted(&trial)?;
    // Both hosts are free again.
    until("another probe is accepted", LIMIT, || {
        let output = trial.godwit(&["probe", "b", "--from", "a", "--seconds", "0.1"])?;
        ensure!(output.code == Some(0) || output.code == Some(CONFLICT), "{output:?}");
        Ok((output.code == Some(0)).then_some(()))
    })?;
    trial.expect_traces("a", &clean[0])?;
    trial.expect_traces("b", &clean[1])?;
    trial.finish()
}

/// Interrupts a running probe with Ctrl-C.
fn interrupted(trial: &Trial) -> Result<()> {
    let own = std::env::current_exe()?;
    let godwit =
        own.parent().and_then(Path::parent).context("no folder of this program")?.join("godwit");
    let mut command = Command::new(godwit);
    command.args(["probe", "b", "--from", "a", "--seconds", "30"]);
    command
        .env("GODWIT_HOSTS", trial.paths().hosts_file())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let stderr = BufReader::new(child.stderr.take().context("no standard error")?);
    let mut lines = stderr.lines().map_while(Result::ok);
    lines.find(|line| line.contains("throughput")).context("no throughput was measured")?;
    rustix::process::kill_process(Pid::from_child(&child), Signal::INT)?;
    ensure!(child.wait()?.code() == Some(INTERRUPTED));
    Ok(())
}

#[test]
fn packets_that_vanish_are_found() -> Result<()> {
    let Some(trial) = Trial::begin("probe-mtu")? else { return Ok(()) };
    // The switch between the hosts accepts 1500 bytes and drops larger packets silently. One packet
    // at a time, because the switch cannot know the packet size within a train.
    for host in ["a", "b"] {
        let namespace = trial.namespace(host);
        let set = ["-n", &namespace, "link", "set", "mig0", "mtu", "9000", "gso_max_segs", "1"];
        let set = Command::new("ip").args(set).output()?;
        ensure!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    }
    let report = {
        let output = trial.godwit(&["--json", "probe", "b", "--from", "a", "--seconds", "0.1"])?;
        ensure!(output.code == Some(0), "{output:?}");
        serde_json::from_str::<ProbeReport>(&output.stdout)?
    };
    ensure!(report.estimate.is_none() && report.limit == Some(Limit::Mtu), "{report:#?}");
    for lane in &report.lanes {
        let mtu = lane.mtu.context("no MTU")?;
        // A veth pair leaves room for the four bytes of a VLAN tag.
        let passes = mtu.passes.is_some_and(|passes| (1500..=1504).contains(&passes));
        ensure!(mtu.black_hole && mtu.interface == Some(9000) && passes, "{lane:#?}");
    }
    // A destination without an agent.
    trial.end_agent("b", Signal::KILL)?;
    let output = trial.godwit(&["--json", "probe", "b", "--from", "a"])?;
    ensure!(
        output.code == Some(UNREACHABLE) && output.stderr.contains("peer-unreachable"),
        "{output:?}"
    );
    trial.finish()
}
