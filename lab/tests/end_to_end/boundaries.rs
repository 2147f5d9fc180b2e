//! Isolation of a guest that moves between hosts: each QEMU runs as its own user, and neither keys
//! nor guest memory appear anywhere else.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_qemu::Accel;

use crate::move_and_check;

/// Length of the searched part of a page. No two texts share that much by chance.
const MARK_BYTES: usize = 24;
/// Number of pages whose content is searched.
const MARKS: usize = 8;
const PAGE_BYTES: usize = 4096;

/// Bytes that must not be found, and their origin.
struct Secret {
    what: String,
    bytes: Vec<u8>,
}

#[test]
fn keys_and_guest_memory_stay_where_they_belong() -> Result<()> {
    let Some(trial) = Trial::begin("boundaries")? else { return Ok(()) };
    let mut guest = trial.guest("a", &GuestPlan::new("web"))?;
    trial.bare_guest("a", "bare", Accel::Tcg)?;
    let memory = marks(&ram(&trial, "a"))?;
    expect_separate_users(&trial)?;
    let mut texts = Vec::new();
    for _ in 0..2 {
        let report = move_and_check(&trial, &mut guest)?.report;
        texts.push(("the report".to_owned(), serde_json::to_vec(&report)?));
        let there = fs::read(ram(&trial, &guest.host))?;
        let whole = memory.iter().filter(|mark| has(&there, &mark.bytes)).count();
        ensure!(
            whole == memory.len(),
            "the guest has {whole} of its {} marks in memory",
            memory.len()
        );
        expect_separate_users(&trial)?;
    }
    for words in [
        &["vm", "list", "--json"][..],
        &["vm", "show", "web", "--json"],
        &["migration", "list", "--json"],
    ] {
        let output = trial.godwit(words)?;
        ensure!(output.code == Some(0), "{output:?}");
        texts.push((format!("godwit {}", words.join(" ")), output.stdout.into_bytes()));
    }
    texts.extend(written(trial.paths().root()));
    texts.extend(processes());
    let logs = texts.iter().filter(|(place, _)| place.ends_with("agent.log")).count();
    let commands = texts
        .iter()
        .filter(|(place, text)| place.ends_with("cmdline") && has(text, b"qemu-system"))
        .count();
    ensure!(logs == 2 && commands >= 2, "checked only {logs} logs and {commands} commands");
    let secrets: Vec<Secret> = memory.into_iter().chain(keys(&trial.pki())?).collect();
    for (place, text) in &texts {
        let found = secrets.iter().find(|secret| has(text, &secret.bytes));
        ensure!(found.is_none(), "{} is in {place}", found.map_or("", |secret| &secret.what));
    }
    trial.delete("a", "bare")?;
    trial.finish()
}

/// Checks that the QEMUs of all VMs, on any host, and the agents are different users and cannot
/// change their user.
fn expect_separate_users(trial: &Trial) -> Result<()> {
    let mut users = BTreeSet::new();
    for (host, vm) in [("a", "web"), ("b", "web"), ("a", "bare")] {
        let Some(pid) = trial.vm(host, vm).ok().and_then(|vm| vm.pid) else { continue };
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let value = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            line.map(|line| line.split_whitespace().collect::<Vec<_>>()).unwrap_or_default()
        };
        ensure!(
            value("Seccomp") == ["2"] && value("NoNewPrivs") == ["1"],
            "VM {vm} has no sandbox: {status}"
        );
        let uids: BTreeSet<&str> = value("Uid").into_iter().collect();
        let uid = uids.first().context("no user")?.to_string();
        ensure!(uids.len() == 1 && uid != "0", "VM {vm} can be {uids:?}");
        ensure!(users.insert(uid), "two VMs share a user");
    }
    ensure!(users.len() == 2, "QEMUs run as {users:?}");
    for host in trial.hosts() {
        let agent = trial.agent_process(&host)?.pid;
        let limits = fs::read_to_string(format!("/proc/{agent}/limits"))?;
        let cores = limits
            .lines()
            .find(|line| line.starts_with("Max core file size"))
            .context("no limit")?;
        ensure!(
            cores.split_whitespace().nth(4) == Some("0"),
            "the agent of host {host} may leave a core: {cores}"
        );
    }
    Ok(())
}

fn ram(trial: &Trial, host: &str) -> PathBuf {
    trial.paths().host(host).join("ram/web.0.ram")
}

fn has(text: &[u8], wanted: &[u8]) -> bool {
    text.windows(wanted.len()).any(|window| window == wanted)
}

/// Returns pieces of a guest's memory that are practically random.
fn marks(ram: &Path) -> Result<Vec<Secret>> {
    let memory = fs::read(ram)?;
    let random = |page: &[u8]| page.iter().collect::<BTreeSet<_>>().len() > 250;
    let pages: Vec<usize> = (0..memory.len() / PAGE_BYTES)
        .filter(|page| random(&memory[page * PAGE_BYTES..][..PAGE_BYTES]))
        .collect();
    // Those in the middle belong to the workload. Those of the kernel come and go.
    let ours = &pages[pages.len() / 2..];
    ensure!(ours.len() > 100 * MARKS, "only {} pages are random", pages.len());
    let mark = |page: &usize| Secret {
        what: format!("guest memory of page {page}"),
        bytes: memory[page * PAGE_BYTES + PAGE_BYTES / 2..][..MARK_BYTES].to_vec(),
    };
    Ok(ours.iter().step_by(ours.len() / MARKS).take(MARKS).map(mark).collect())
}

/// Returns every line of every key, and the marker of a private key.
fn keys(pki: &Path) -> Result<Vec<Secret>> {
    let mut secrets = vec![Secret { what: "a key".to_owned(), bytes: b"PRIVATE KEY".to_vec() }];
    for entry in fs::read_dir(pki)?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "key") {
            let text = fs::read_to_string(entry.path())?;
            let lines = text.lines().filter(|line| !line.starts_with("---"));
            let secret = |line: &str| Secret {
                what: format!("{:?}", entry.file_name()),
                bytes: line.into(),
            };
            secrets.extend(lines.map(secret));
        }
    }
    ensure!(secrets.len() > 6, "the lab has an authority and two hosts");
    Ok(secrets)
}

/// Returns all files that the lab's processes have written, except keys and guest memory.
fn written(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let read = |path: PathBuf| match path.is_dir() {
        true => written(&path),
        false
            if path
                .extension()
                .is_some_and(|extension| extension == "key" || extension == "ram") =>
        {
            Vec::new()
        }
        // Sockets cannot be read.
        false => {
            fs::read(&path).map(|text| vec![(path.display().to_string(), text)]).unwrap_or_default()
        }
    };
    entries.flat_map(|entry| read(entry.path())).collect()
}

/// Returns the command lines of the machine's processes, which every user can see, and their
/// environments.
fn processes() -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let files =
        entries.flat_map(|entry| ["cmdline", "environ"].map(|file| entry.path().join(file)));
    files.filter_map(|path| Some((path.display().to_string(), fs::read(&path).ok()?))).collect()
}
