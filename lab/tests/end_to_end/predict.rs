//! Predictions: `godwit migrate --dry-run` predicts a migration and moves nothing, and each report
//! contains the prediction.

use std::fs;

use anyhow::{Context, Result, ensure};
use godwit_api::{ClientError, ErrorCode, MigrationRequest, VmState};
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{ByteSize, MemoryBlock, VmSpec};
use godwit_types::{DryRun, Intent, Means, Outcome};

use crate::{move_and_check, slow_link};

/// Exit codes of the `godwit` command (docs/cli.md).
const NOT_FOUND: i32 = 3;
const CONFLICT: i32 = 4;
const PREFLIGHT: i32 = 5;

/// 80 MB/s of incompressible pages, spread over 48 MiB: three times what 200 Mb/s carry.
const TOO_MUCH: &str = "dirty:rate=20000,ws=48M,order=random,zero=0,compressible=0";

fn dry_run(trial: &Trial, guest: &Guest) -> Result<DryRun> {
    let request = guest.to_other_host();
    Ok(trial.ask(trial.agent(&guest.host).dry_run(&guest.name, &request))?)
}

#[test]
fn a_dry_run_predicts_and_moves_nothing() -> Result<()> {
    let Some(trial) = Trial::begin_with("predict", slow_link()?)? else { return Ok(()) };
    let mut guest =
        trial.guest("a", &GuestPlan { fill: ByteSize::from_mib(64), ..GuestPlan::new("web") })?;
    let before = [trial.traces("a")?, trial.traces("b")?];
    let files = trial.agent_open_files("a")?;

    let idle = dry_run(&trial, &guest)?;
    let predicted = idle.predicted.with_context(|| format!("{idle:#?}"))?;
    ensure!(predicted.means == Means::Plain && idle.error.is_none(), "{idle:#?}");
    ensure!(predicted.wire_bytes > 0 && predicted.rounds >= 2, "{idle:#?}");
    let seen = idle.guest.as_ref().context("no figures of the guest")?;
    ensure!(
        seen.data_pages > (32 << 20) / 4096 && seen.data_pages <= idle.guest_bytes / 4096,
        "{seen:?}"
    );
    guest.workload(TOO_MUCH)?;
    let busy = dry_run(&trial, &guest)?;
    let predicted = busy.predicted.with_context(|| format!("{busy:#?}"))?;
    ensure!(
        predicted.means == Means::Throttle && predicted.throttled_to_pages_per_s.is_some(),
        "{busy:#?}"
    );
    eprintln!("  idle: {}; busy: {}", idle.why.context("no why")?, busy.why.context("no why")?);

    // Nothing was made and nothing is kept, not even the right to track the process.
    trial.expect_traces("a", &before[0])?;
    trial.expect_traces("b", &before[1])?;
    ensure!(trial.agent_open_files("a")? <= files + 1, "the agent has more files open than before");
    ensure!(trial.vm("a", "web")?.state == VmState::Running);
    guest.verify()?;
    as_people_see_it(&trial)?;
    // The dry run has given the agent the rate of the lanes.
    let report = move_and_check(&trial, &mut guest)?.report;
    let predicted = report.predicted.with_context(|| format!("{report:#?}"))?;
    ensure!(predicted.migration_time_ms > 0.0 && predicted.wire_bytes > 0, "{predicted:?}");
    ensure!(
        report.means == Some(Means::Throttle) && report.policy == Some(Intent::Auto),
        "{report:#?}"
    );
    trial.finish()
}

fn as_people_see_it(trial: &Trial) -> Result<()> {
    let text = trial.godwit(&["migrate", "web", "--to", "b", "--dry-run"])?;
    ensure!(text.code == Some(0), "{text:?}");
    for part in [
        "VM web would move from a to b",
        "migration time",
        "blackout",
        "means",
        "lanes",
        "by a short probe",
    ] {
        ensure!(text.stdout.contains(part), "{part} is missing in\n{}", text.stdout);
    }
    eprintln!("{}", text.stdout);
    let json = trial.godwit(&["--json", "migrate", "web", "--to", "b", "--dry-run"])?;
    let printed: serde_json::Value = serde_json::from_str(&json.stdout)?;
    let predicted = &printed["predicted"];
    for key in
        ["migration_time_ms", "wire_bytes", "rounds", "switchover_ms", "throttled_to_pages_per_s"]
    {
        ensure!(predicted[key].is_number(), "{key} is missing in {printed:#}");
    }
    ensure!(predicted["means"] == "throttle" && printed["error"].is_null(), "{printed:#}");
    ensure!(
        printed["guest"]["samples"].as_array().is_some_and(|samples| samples.len() > 3),
        "{printed:#}"
    );
    ensure!(printed["lanes"]["known_by"] == "probe", "{printed:#}");
    ensure!(serde_json::from_str::<DryRun>(&json.stdout)?.vm == "web");
    Ok(())
}

#[test]
fn what_a_move_refuses_a_dry_run_refuses() -> Result<()> {
    let Some(trial) = Trial::begin("predict-refusals")? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let kernel = folder.path().join("vmlinuz");
    fs::copy(&trial.image().kernel, &kernel)?;
    let plan = GuestPlan::new("web");
    let mut spec = plan.spec(trial.image());
    spec.kernel = Some(kernel.clone());
    let image = godwit_lab::image::GuestImage { kernel: kernel.clone(), ..trial.image().clone() };
    let guest = trial.guest_of("a", &GuestPlan { image: Some(image), ..plan }, spec)?;
    let before = [trial.traces("a")?, trial.traces("b")?];

    for (arguments, code) in [
        (&["migrate", "x", "--to", "b", "--dry-run"][..], NOT_FOUND),
        (&["migrate", "web", "--to", "z", "--dry-run"], NOT_FOUND),
        (&["migrate", "web", "--to", "a", "--dry-run"], CONFLICT),
    ] {
        let output = trial.godwit(arguments)?;
        ensure!(output.code == Some(code), "{arguments:?}: {output:?}");
    }
    // Invalid values of the request are refused at once, with and without a dry run.
    let wrong = MigrationRequest { switchover_budget_ms: -1.0, ..MigrationRequest::to("b") };
    let refused = trial.ask(trial.agent("a").dry_run("web", &wrong)).unwrap_err();
    ensure!(refused.code() == Some(ErrorCode::InvalidRequest), "{refused}");
    let begun = trial.begin_migration("web", "a", &wrong).err().context("the migration started")?;
    ensure!(begun.to_string() == refused.to_string(), "{begun}; by a dry run: {refused}");

    // A path that does not exist any more; another VM with this name; no memory left.
    fs::rename(&kernel, folder.path().join("away"))?;
    refused_alike(&trial)?;
    fs::rename(folder.path().join("away"), &kernel)?;
    let small = |name: &str, memory| VmSpec {
        memory: vec![MemoryBlock::shared(memory)],
        kernel: Some(kernel.clone()),
        ..VmSpec::new(name)
    };
    trial.create("b", small("web", ByteSize::from_mib(64)))?;
    refused_alike(&trial)?;
    trial.delete("b", "web")?;
    let available = trial.ask(trial.agent("b").host())?.memory_available_bytes;
    trial.create("b", small("big", ByteSize::from_mib((available >> 20).saturating_sub(128))))?;
    refused_alike(&trial)?;
    let output = trial.godwit(&["migrate", "web", "--to", "b", "--dry-run"])?;
    ensure!(
        output.code == Some(PREFLIGHT) && output.stdout.contains("would not move"),
        "{output:?}"
    );
    trial.delete("b", "big")?;

    trial.expect_traces("a", &before[0])?;
    trial.expect_traces("b", &before[1])?;
    trial.expect_whole(&guest)?;
    ensure!(dry_run(&trial, &guest)?.error.is_none(), "the dry run was refused without a reason");
    trial.finish()
}

/// Checks that a dry run and a migration are refused with the same code and the same words, apart
/// from figures that change meanwhile.
fn refused_alike(trial: &Trial) -> Result<()> {
    let request = MigrationRequest::to("b");
    let dry_run = trial.ask(trial.agent("a").dry_run("web", &request))?;
    let predicted = dry_run.error.clone().with_context(|| format!("not refused: {dry_run:#?}"))?;
    ensure!(dry_run.predicted.is_none() && dry_run.guest.is_none(), "{dry_run:#?}");
    let report = trial.begin_migration("web", "a", &request)?.report()?;
    ensure!(report.outcome == Outcome::Failed && report.means.is_none(), "{report:#?}");
    let real = report.error.context("no reason")?;
    let without_figures = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
    ensure!(
        predicted.code == real.code && predicted.remedy == real.remedy,
        "predicted {predicted:?}, in fact {real:?}"
    );
    ensure!(
        without_figures(&predicted.message) == without_figures(&real.message),
        "predicted {predicted:?}, in fact {real:?}"
    );
    eprintln!("  error: {} [{}]", predicted.message, predicted.code);
    Ok(())
}

fn is_second(error: &ClientError) -> bool {
    error.to_string().contains("another dry run")
}

#[test]
fn a_migration_waits_for_no_dry_run() -> Result<()> {
    let Some(trial) = Trial::begin("predict-gives-way")? else { return Ok(()) };
    let mut guest = trial.guest("a", &GuestPlan::new("web"))?;
    let agent = trial.agent("a");
    let request = guest.to_other_host();
    let looks = std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            loop {
                match runtime.block_on(agent.dry_run("web", &request)) {
                    Err(error) if is_second(&error) => {}
                    ended => return anyhow::Ok(ended),
                }
            }
        });
        until("a second dry run is refused", LIMIT, || {
            match trial.ask(trial.agent("a").dry_run("web", &request)) {
                Err(error) if is_second(&error) => Ok(Some(())),
                other => Ok(other.map(|_| None)?),
            }
        })?;
        move_and_check(&trial, &mut guest)?;
        looks.join().map_err(|_| anyhow::anyhow!("the dry run's thread panicked"))?
    })?;
    let gave_way = looks.err().context("the dry run went on")?;
    ensure!(gave_way.code() == Some(ErrorCode::Busy), "{gave_way}");
    eprintln!("  error: {gave_way}");
    trial.finish()
}
