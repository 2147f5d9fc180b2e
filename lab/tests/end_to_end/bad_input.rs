//! Impossible requests get one error with its cause and the remedy, and leave nothing behind. Sent
//! with the `godwit` command, as users do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use godwit_api::{ErrorCode, MigrationRequest, VmState};
use godwit_lab::in_namespace;
use godwit_lab::trial::{CliOutput, GuestPlan, Traces, Trial};
use godwit_qemu::{ByteSize, Disk, DiskFormat, MemoryBlock, VmSpec};
use godwit_types::Outcome;

use crate::move_and_check;

/// Exit codes of the `godwit` command (docs/cli.md).
const FAILURE: i32 = 1;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 3;
const CONFLICT: i32 = 4;
const PREFLIGHT: i32 = 5;

/// Expects one error: an exit code, all the given words in the message, a remedy, and empty
/// standard output.
fn expect_error(trial: &Trial, arguments: &[&str], code: i32, words: &[&str]) -> Result<()> {
    let output = trial.godwit(&[&["--json"], arguments].concat())?;
    check_error(&output, code, words)
        .with_context(|| format!("godwit {}: {output:?}", arguments.join(" ")))
}

fn check_error(output: &CliOutput, code: i32, words: &[&str]) -> Result<()> {
    ensure!(output.code == Some(code), "exit code {:?}, not {code}", output.code);
    let errors: Vec<&str> = output.stderr.lines().filter(|line| line.starts_with('{')).collect();
    ensure!(errors.len() == 1, "{} errors", errors.len());
    let error: serde_json::Value = serde_json::from_str(errors[0])?;
    let error = error.get("error").unwrap_or(&error);
    let message = error["message"].as_str().context("no message")?;
    for word in words {
        ensure!(message.contains(word), "the message lacks {word:?}");
    }
    ensure!(
        !error["remedy"].as_str().unwrap_or_default().is_empty() || message.contains('('),
        "no remedy"
    );
    eprintln!("  error: {message} ({})", error["remedy"].as_str().unwrap_or_default());
    Ok(())
}

fn clean(trial: &Trial) -> Result<[Traces; 2]> {
    Ok([trial.traces("a")?, trial.traces("b")?])
}

fn expect_clean(trial: &Trial, clean: &[Traces; 2]) -> Result<()> {
    trial.expect_traces("a", &clean[0])?;
    trial.expect_traces("b", &clean[1])
}

/// Returns the arguments that create the lab's guest with the command.
fn create<'a>(name: &'a str, kernel: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["vm", "create", name, "--host", "a", "--kernel", kernel, "--start"], more].concat()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

#[test]
fn what_can_not_be_made_is_not_half_made() -> Result<()> {
    let Some(trial) = Trial::begin("bad-input")? else { return Ok(()) };
    let empty = clean(&trial)?;
    let kernel = trial.image().kernel.clone();
    let kernel = text(&kernel);
    // A VM's QEMU must belong to root, and everybody may write to /tmp.
    let folder = tempfile::Builder::new().prefix("godwit-test").tempdir_in("/var/lib")?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    let dies = broken_qemu(folder.path(), "dies", "true")?;
    let others = tempfile::tempdir()?;
    let others = broken_qemu(others.path(), "others", "true")?;
    let no_qemu = folder.path().join("no-qemu");

    expect_error(
        &trial,
        &create("x", "/nowhere/vmlinuz", &[]),
        NOT_FOUND,
        &["/nowhere/vmlinuz", "kernel"],
    )?;
    let disk = "path=/nowhere/disk.img,format=raw";
    expect_error(
        &trial,
        &create("x", kernel, &["--disk", disk]),
        NOT_FOUND,
        &["/nowhere/disk.img"],
    )?;
    expect_error(
        &trial,
        &create("x", kernel, &["--memory", "900TiB"]),
        PREFLIGHT,
        &["x", "MiB", "host a"],
    )?;
    expect_error(
        &trial,
        &create("x", kernel, &["--qemu", text(&dies)]),
        FAILURE,
        &["no luck today"],
    )?;
    expect_error(
        &trial,
        &create("x", kernel, &["--qemu", text(&others)]),
        USAGE,
        &["other than root"],
    )?;
    expect_error(&trial, &create("x", kernel, &["--qemu", text(&no_qemu)]), FAILURE, &["no-qemu"])?;
    expect_error(&trial, &create("x", kernel, &["--nic", "network=wan"]), NOT_FOUND, &["wan"])?;
    expect_error(
        &trial,
        &["vm", "create", "x", "--host", "z", "--kernel", kernel],
        NOT_FOUND,
        &["z"],
    )?;
    expect_error(&trial, &["vm", "show", "x"], NOT_FOUND, &["x"])?;
    expect_error(&trial, &["migrate", "x", "--to", "b"], NOT_FOUND, &["x"])?;
    expect_clean(&trial, &empty)?;
    trial.finish()
}

#[test]
fn what_can_not_be_moved_stays_whole() -> Result<()> {
    let Some(trial) = Trial::begin("bad-move")? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let qemu = broken_qemu(
        folder.path(),
        "no-arrivals",
        "case \"$*\" in *-incoming*) true;; *) false;; esac",
    )?;
    let whole_qemu = set_qemu(&trial, &qemu)?;
    let kernel = folder.path().join("vmlinuz");
    fs::copy(&trial.image().kernel, &kernel)?;
    let plan = GuestPlan::new("web");
    let mut spec = plan.spec(trial.image());
    spec.kernel = Some(kernel.clone());
    let empty_b = trial.traces("b")?;
    let image = godwit_lab::image::GuestImage { kernel: kernel.clone(), ..trial.image().clone() };
    let mut guest = trial.guest_of("a", &GuestPlan { image: Some(image), ..plan }, spec)?;
    let with_guest = clean(&trial)?;

    expect_error(&trial, &["migrate", "web", "--to", "z"], NOT_FOUND, &["z"])?;
    expect_error(&trial, &["migrate", "web", "--to", "a"], CONFLICT, &["already"])?;
    let taken = create("web", text(&kernel), &[]);
    expect_error(&trial, &taken, CONFLICT, &["web", "already"])?;

    // QEMU exits at its start at the destination.
    expect_failed_move(&trial, "no luck today")?;
    trial.expect_traces("b", &empty_b)?;
    // A path that does not exist any more.
    fs::rename(&kernel, folder.path().join("away"))?;
    expect_failed_move(&trial, text(&kernel))?;
    fs::rename(folder.path().join("away"), &kernel)?;
    // Another VM with this name.
    let twin = VmSpec { disks: vec![blank_disk(folder.path())?], ..VmSpec::new("web") };
    trial.create(
        "b",
        VmSpec { memory: vec![MemoryBlock::shared(ByteSize::from_mib(64))], ..twin },
    )?;
    expect_failed_move(&trial, "already")?;
    ensure!(
        trial.vm("b", "web")?.state == VmState::Running,
        "the other VM with this name was harmed"
    );
    trial.delete("b", "web")?;
    // No memory left: it is promised to another VM.
    let info = trial.ask(trial.agent("b").host())?;
    let big = ByteSize::from_mib((info.memory_available_bytes >> 20).saturating_sub(128));
    let big = VmSpec {
        memory: vec![MemoryBlock::shared(big)],
        disks: vec![blank_disk(folder.path())?],
        ..VmSpec::new("big")
    };
    trial.create("b", big)?;
    expect_failed_move(&trial, "MiB")?;
    trial.delete("b", "big")?;

    for (host, traces) in ["a", "b"].iter().zip(&with_guest) {
        trial.expect_traces(host, traces)?;
    }
    trial.expect_whole(&guest)?;
    // With a QEMU that accepts incoming migrations it still moves.
    set_qemu(&trial, &whole_qemu)?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}

#[test]
fn an_agent_whose_port_is_taken_says_so() -> Result<()> {
    let Some(trial) = Trial::begin("port-taken")? else { return Ok(()) };
    let empty = clean(&trial)?;
    let folder = tempfile::tempdir()?;
    let mut config: toml::Table =
        fs::read_to_string(trial.paths().host("a").join("agent.toml"))?.parse()?;
    for (key, name) in
        [("socket", "agent.sock"), ("state_dir", "state"), ("run_dir", "run"), ("ram_dir", "ram")]
    {
        config.insert(key.to_owned(), text(&folder.path().join(name)).into());
    }
    let path = folder.path().join("agent.toml");
    fs::write(&path, toml::to_string(&config)?)?;
    let output = in_namespace(&trial.namespace("a"), || {
        trial.godwit(&["host", "run", "--config", text(&path)])
    })??;
    ensure!(output.code.is_some_and(|code| code > 0), "{output:?}");
    ensure!(
        output.stderr.contains("10.77.0.11:7700")
            && output.stderr.contains("another program uses that port"),
        "{output:?}"
    );
    ensure!(output.stderr.matches("cannot listen").count() == 1, "{output:?}");
    eprintln!("  error: {}", output.stderr.trim());
    ensure!(
        !folder.path().join("agent.sock").exists() && !folder.path().join("run").exists(),
        "the agent left files behind"
    );
    // The agent that has the port is unharmed.
    ensure!(trial.ask(trial.agent("a").host())?.name == "a", "another agent answers");
    expect_clean(&trial, &empty)?;
    trial.finish()
}

/// Migrates to b through the agent's API, expects a refusal with `word`, and checks that the guest
/// is untouched.
fn expect_failed_move(trial: &Trial, word: &str) -> Result<()> {
    let (message, remedy) = match trial.begin_migration("web", "a", &MigrationRequest::to("b")) {
        Err(error) => {
            ensure!(error.code().is_some_and(|code| code != ErrorCode::Unknown), "{error}");
            (error.to_string(), error.to_string())
        }
        Ok(migration) => {
            let report = migration.report()?;
            ensure!(report.outcome == Outcome::Failed, "{report:#?}");
            let error = report.error.context("no reason")?;
            (error.message, error.remedy)
        }
    };
    ensure!(
        message.contains(word) && !remedy.is_empty(),
        "expected {word:?}: {message} ({remedy})"
    );
    eprintln!("  error: {message} ({remedy})");
    ensure!(trial.vm("a", "web")?.state == VmState::Running, "{:?}", trial.vm("a", "web")?);
    Ok(())
}

/// Sets host b's QEMU and returns the previous one.
fn set_qemu(trial: &Trial, qemu: &Path) -> Result<PathBuf> {
    let mut before = None;
    trial
        .reconfigure("b", |config| before = config.insert("qemu".to_owned(), text(qemu).into()))?;
    Ok(before.as_ref().and_then(toml::Value::as_str).context("no QEMU was configured")?.into())
}

/// Makes a QEMU that reports its version and exits at its start if the shell condition `when` is
/// true.
fn broken_qemu(folder: &Path, name: &str, when: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *-version*|*help*) exec qemu-system-x86_64 \"$@\";; esac\n\
         if {when}; then echo 'qemu: no luck today' >&2; exit 1; fi\nexec qemu-system-x86_64 \
         \"$@\"\n"
    );
    fs::write(&path, script)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// Makes an empty disk. Its VM stays in the firmware and touches little memory.
fn blank_disk(folder: &Path) -> Result<Disk> {
    let path = folder.join("blank.img");
    fs::File::create(&path)?.set_len(1 << 20)?;
    Ok(Disk::new(path, DiskFormat::Raw).readonly())
}
