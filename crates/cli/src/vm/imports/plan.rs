//! Implements `godwit vm import --plan`: many imports, wave by wave. A wave starts when the one
//! before it has ended without a failure. The agents have the jobs; the order is kept here, so the
//! command runs until the last wave has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use godwit_api::{JobKind, JobState, JobStatus};
use serde::{Deserialize, Serialize};

use super::{Target, import_kind, import_request};
use crate::args::ImportArgs;
use crate::exit::{Exit, Failure};
use crate::follow::Follower;
use crate::output::{Output, table};
use crate::units::{byte_count, millis};

/// Most imports at once on request, and the default.
const MOST_AT_ONCE: usize = 16;
const AT_ONCE: usize = 2;
/// Longest plan.
const MOST_PLAN_BYTES: u64 = 1 << 20;
const DAY_SECONDS: u64 = 24 * 3600;

/// A plan, as its file has it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    /// Imports at once.
    #[serde(default = "at_once")]
    at_once: usize,
    waves: Vec<Wave>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wave {
    name: String,
    /// Time of the day in which its imports start, in UTC: `22:00-04:00`. Default: any time.
    #[serde(default)]
    window: Option<String>,
    vms: Vec<PlannedVm>,
}

/// A VM of a plan; the settings are the options of `vm import`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PlannedVm {
    file: Option<PathBuf>,
    libvirt: Option<String>,
    host: Option<String>,
    name: Option<String>,
    networks: BTreeMap<String, String>,
    disks_in: Option<PathBuf>,
    take_disks: bool,
    warm: Vec<String>,
    start: bool,
}

/// What became of a VM of a plan.
#[derive(Debug, Serialize)]
struct Outcome {
    wave: String,
    vm: String,
    host: String,
    /// `done`, `failed`, `cancelled` or `skipped`.
    state: &'static str,
    read_bytes: u64,
    written_bytes: u64,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A part of the day, in seconds since midnight UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    from: u64,
    to: u64,
}

fn at_once() -> usize {
    AT_ONCE
}

/// Imports the VMs of a plan.
pub(super) async fn run(
    args: &ImportArgs,
    file: &Path,
    target: Target<'_>,
    output: Output,
) -> Result<Exit, Failure> {
    let plan = read(file)?;
    // Ctrl-C never ends the command without its report.
    let _follower = Follower::silent(JobKind::Import, output)?;
    let stopped = AtomicBool::new(false);
    let mut outcomes = Vec::new();
    for wave in &plan.waves {
        let window = wave.window.as_deref().map(Window::parse).transpose()?;
        if !output.is_json() {
            output.note(&format!("wave {}: {} VMs", wave.name, wave.vms.len()));
        }
        let mut all = Vec::new();
        for vm in &wave.vms {
            let options = options(vm, args, file)?;
            let follower = Follower::silent(import_kind(&options.0), output)?;
            all.push(import_one(&wave.name, options, window, (target, follower), &stopped));
        }
        let ended: Vec<Result<Outcome, Failure>> =
            futures::stream::iter(all).buffer_unordered(plan.at_once).collect().await;
        for outcome in ended {
            outcomes.push(outcome?);
        }
    }
    let all_done = outcomes.iter().all(|outcome| outcome.state == "done");
    output.result(&outcomes, || shown(&outcomes))?;
    Ok(if all_done { Exit::Ok } else { Exit::Failure })
}

fn read(file: &Path) -> Result<Plan, Failure> {
    let failed = |why: String| {
        Failure::usage(format!("cannot read plan {}: {why}", file.display()), "see docs/import.md")
    };
    let length = std::fs::metadata(file).map_err(|error| failed(error.to_string()))?.len();
    if length > MOST_PLAN_BYTES {
        return Err(failed("it is too long".to_owned()));
    }
    let text = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
    parse(&text, file)
}

fn parse(text: &str, file: &Path) -> Result<Plan, Failure> {
    let failed = |why: String| {
        Failure::usage(format!("cannot use plan {}: {why}", file.display()), "see docs/import.md")
    };
    let plan: Plan = toml::from_str(text).map_err(|error| failed(error.to_string()))?;
    if !(1..=MOST_AT_ONCE).contains(&plan.at_once) {
        return Err(failed(format!("at_once is 1 to {MOST_AT_ONCE}")));
    }
    let mut names = BTreeSet::new();
    for wave in &plan.waves {
        if let Some(window) = &wave.window {
            Window::parse(window)?;
        }
        for vm in &wave.vms {
            // Two names in two definitions may still be the same: the host refuses the second VM.
            let file = vm.file.as_ref().map(|file| file.display().to_string());
            let name = vm.name.clone().or(vm.libvirt.clone()).or(file).unwrap_or_default();
            if !names.insert(name.clone()) {
                return Err(failed(format!("it has {name} twice")));
            }
        }
        let has_one = |vm: &PlannedVm| vm.file.is_some() != vm.libvirt.is_some();
        if !wave.vms.iter().all(has_one) {
            return Err(failed(format!("a VM of wave {} needs either file or libvirt", wave.name)));
        }
    }
    Ok(plan)
}

/// Returns the options of a VM. Files are beside the plan, unless their paths are absolute.
fn options(
    vm: &PlannedVm,
    args: &ImportArgs,
    plan: &Path,
) -> Result<(ImportArgs, Option<String>), Failure> {
    let folder = std::path::absolute(plan)?;
    let folder = folder.parent().unwrap_or(Path::new("/"));
    let vm = vm.clone();
    let options = ImportArgs {
        datastore: None,
        file: vm.file.map(|file| folder.join(file)),
        libvirt: vm.libvirt,
        plan: None,
        name: vm.name,
        networks: vm.networks.into_iter().collect(),
        disks_in: vm.disks_in,
        take_disks: vm.take_disks,
        // Only these take part in later passes.
        again: args.again && !vm.warm.is_empty(),
        cut_over: args.cut_over && !vm.warm.is_empty(),
        warm: vm.warm,
        dry_run: args.dry_run,
        start: vm.start && !args.dry_run,
    };
    Ok((options, vm.host))
}

async fn import_one(
    wave: &str,
    (args, host): (ImportArgs, Option<String>),
    window: Option<Window>,
    (target, mut follower): (Target<'_>, Follower),
    stopped: &AtomicBool,
) -> Result<Outcome, Failure> {
    let named = args.name.clone().or_else(|| args.libvirt.clone());
    let named = named.or_else(|| args.file.as_ref().map(|file| file.display().to_string()));
    let mut outcome = Outcome {
        wave: wave.to_owned(),
        vm: named.unwrap_or_default(),
        host: host.clone().unwrap_or_default(),
        state: "skipped",
        read_bytes: 0,
        written_bytes: 0,
        seconds: 0.0,
        error: None,
    };
    // A dry run changes nothing, so it awaits no window and checks each VM.
    if let Some(window) = window.filter(|_| !args.dry_run) {
        tokio::select! {
            () = tokio::time::sleep(window.wait(second_of_day())) => {}
            () = follower.interrupted() => stopped.store(true, Ordering::Relaxed),
        }
    }
    if stopped.load(Ordering::Relaxed) {
        return Ok(outcome);
    }
    let began = Instant::now();
    let imported = async {
        let (host, target) = target.of_host(host.as_deref())?;
        outcome.host = host;
        let job = target.import(&import_request(&args)?).await?;
        follower.wait_for(&target, job).await
    };
    let imported: Result<JobStatus, Failure> = imported.await;
    outcome.seconds = began.elapsed().as_secs_f64();
    match imported {
        Ok(job) => {
            (outcome.read_bytes, outcome.written_bytes) = (job.done_bytes, job.written_bytes);
            outcome.state = match job.state {
                JobState::Done => "done",
                JobState::Cancelled => "cancelled",
                JobState::Running | JobState::Failed => "failed",
            };
            outcome.error = job.error.map(|error| error.message);
            if let Some(plan) = job.plan {
                outcome.vm = plan.spec.name;
            }
        }
        Err(failure) => {
            outcome.state = "failed";
            outcome.error = Some(failure.fault.message);
        }
    }
    if outcome.state != "done" && (!args.dry_run || outcome.state == "cancelled") {
        stopped.store(true, Ordering::Relaxed);
    }
    Ok(outcome)
}

fn shown(outcomes: &[Outcome]) -> String {
    let row = |outcome: &Outcome| {
        vec![
            outcome.wave.clone(),
            outcome.vm.clone(),
            outcome.host.clone(),
            outcome.state.to_owned(),
            byte_count(outcome.read_bytes),
            millis(outcome.seconds * 1000.0),
            outcome.error.clone().unwrap_or_default(),
        ]
    };
    let rows: Vec<_> = outcomes.iter().map(row).collect();
    table(&["wave", "vm", "host", "state", "read", "time", "error"], &rows)
}

fn second_of_day() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() % DAY_SECONDS
}

impl Window {
    fn parse(text: &str) -> Result<Window, Failure> {
        let second = |text: &str| {
            let (hours, minutes) = text.trim().split_once(':')?;
            let (hours, minutes): (u64, u64) = (hours.parse().ok()?, minutes.parse().ok()?);
            (hours < 24 && minutes < 60).then_some(hours * 3600 + minutes * 60)
        };
        let parts = text.split_once('-');
        let window = parts.and_then(|(from, to)| Some((second(from)?, second(to)?)));
        match window {
            Some((from, to)) if from != to => Ok(Window { from, to }),
            _ => Err(Failure::usage(
                format!("invalid window \"{text}\""),
                "write two times of the day in UTC, such as 22:00-04:00",
            )),
        }
    }

    /// Returns how long it takes until the window is open.
    fn wait(self, now: u64) -> Duration {
        let is_open = match self.from < self.to {
            true => (self.from..self.to).contains(&now),
            false => now >= self.from || now < self.to,
        };
        let seconds = if is_open { 0 } else { (self.from + DAY_SECONDS - now) % DAY_SECONDS };
        Duration::from_secs(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_may_pass_midnight() {
        let wait = |text: &str, now: u64| Window::parse(text).unwrap().wait(now).as_secs();
        assert_eq!(wait("22:00-04:00", 23 * 3600), 0);
        assert_eq!(wait("22:00-04:00", 3 * 3600), 0);
        assert_eq!(wait("22:00-04:00", 4 * 3600), 18 * 3600);
        assert_eq!(wait("01:30-02:00", 0), 5400);
        assert_eq!(wait("01:30-02:00", 2 * 3600), 23 * 3600 + 1800);
        for wrong in ["", "22-4", "24:00-01:00", "22:00", "10:00-10:00", "a:b-c:d"] {
            assert!(Window::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_plan_is_checked_before_its_first_wave() {
        let read_text = |text: &str| parse(text, Path::new("waves.toml"));
        let good = "at_once = 3\n[[waves]]\nname = \"web\"\nwindow = \"22:00-04:00\"\n\
                    [[waves.vms]]\nfile = \"shop.xml\"\nhost = \"a\"\n\
                    networks = { br-lan = \"lan\" }\nwarm = [\"nbd://10.0.0.5/shop\"]\n";
        let plan = read_text(good).unwrap();
        assert_eq!((plan.at_once, plan.waves[0].vms.len()), (3, 1));
        for (from, to) in [
            ("at_once = 3", "at_once = 0"),
            ("22:00", "25:00"),
            ("file = \"shop.xml\"", "start = true"),
            ("file = \"shop.xml\"", "file = \"a\"\nlibvirt = \"b\""),
            ("host", "hots"),
            ("warm = [", "[[waves.vms]]\nfile = \"shop.xml\"\nwarm = ["),
        ] {
            assert!(read_text(&good.replace(from, to)).is_err(), "{to}");
        }
    }
}
