//! Two clusters whose hosts share a datastore, without VMs: each ignores what the other one has
//! there, and a host has its term from one of them alone.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use godwit_api::HaStanding;
use godwit_api::control::{
    AddHost, Alarm, AlarmKind, HaHostStatus, HaPhase, HaSettings, ManagerClient,
};
use godwit_lab::trial::{LIMIT, Trial, until};
use godwit_lab::{Hooks, LabOptions, SecondManager};

/// Hosts of the first manager.
const FIRST: [&str; 2] = ["a", "b"];
/// Hosts of the second.
const SECOND: [&str; 2] = ["c", "d"];
/// Files of a third cluster on the datastore.
const CROWD: u32 = 10_000;
/// That cluster.
const STRANGE: &str = "5b1f5e8e-4d5c-4a2c-9b55-3f0c5a0c77aa";

#[test]
fn two_clusters_on_one_datastore_ignore_each_other() -> Result<()> {
    let hooks = Hooks {
        watchdog: true,
        second_manager: Some(SecondManager::OfOtherCluster),
        ..Hooks::default()
    };
    let options = LabOptions { hosts: 4, manager: true, hooks, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("ha-clusters", options)? else { return Ok(()) };
    let store = tempfile::tempdir_in("/var/tmp")?;
    let (first, second) = (trial.manager(), trial.second_manager());
    for host in trial.hosts() {
        let dirs = vec![store.path().display().to_string()];
        trial
            .reconfigure(&host, |config| drop(config.insert("vm_dirs".to_owned(), dirs.into())))?;
    }
    for host in SECOND {
        add(&trial, &second, host)?;
    }
    for (manager, hosts) in [(&first, FIRST), (&second, SECOND)] {
        until_shared(&trial, manager)?;
        let settings = HaSettings { enabled: true, ..HaSettings::default() };
        trial.ask(manager.set_ha(&settings))?;
        until_all_hold(&trial, manager, &hosts)?;
    }
    let terms = terms_of(&trial, &first)?;
    crowd(store.path())?;

    // The heartbeats of a silent host are read, and nothing else has changed.
    let [_, silent] = SECOND;
    trial.power_off(silent)?;
    until("the silent host is doubtful", LIMIT, || {
        let phase = shown(&trial, &second, silent)?.phase;
        ensure!(phase == HaPhase::Doubtful, "it is {phase:?}");
        Ok(Some(()))
    })?;
    until_all_hold(&trial, &first, &FIRST)?;
    ensure!(terms_of(&trial, &first)? == terms, "they were {terms:?}");
    for manager in [&first, &second] {
        let troubles = troubles(&trial, manager)?;
        ensure!(troubles.is_empty(), "{troubles:?}");
    }

    let [_, shared] = FIRST;
    add(&trial, &second, shared)?;
    until("the second cluster says that it does not hold the host", LIMIT, || {
        let host = shown(&trial, &second, shared)?;
        let troubles = troubles(&trial, &second)?;
        let says_it = |text: &str| text.contains("held by another cluster");
        ensure!(host.term == 0 && host.problem.as_deref().is_some_and(says_it), "{host:?}");
        ensure!(troubles.len() == 1 && says_it(&troubles[0].text), "{troubles:?}");
        Ok(Some(()))
    })?;
    until_all_hold(&trial, &first, &FIRST)?;
    ensure!(terms_of(&trial, &first)? == terms, "they were {terms:?}");
    ensure!(troubles(&trial, &first)?.is_empty(), "the first cluster has troubles");
    trial.finish()?;
    Ok(store.close()?)
}

fn add(trial: &Trial, manager: &ManagerClient, host: &str) -> Result<()> {
    let request = AddHost {
        name: host.to_owned(),
        address: trial.agent_address(host)?,
        labels: BTreeMap::new(),
        link_bits_per_s: None,
        most_moves: None,
    };
    trial.ask(manager.add_host(&request))?;
    Ok(())
}

/// Waits until a manager knows that its two hosts share the datastore.
fn until_shared(trial: &Trial, manager: &ManagerClient) -> Result<()> {
    until("the manager knows that the hosts share the datastore", LIMIT, || {
        let known = trial.ask(manager.datastores())?;
        ensure!(known.iter().any(|one| one.hosts.len() == 2), "it knows {known:?}");
        Ok(Some(()))
    })
}

/// Waits until hosts hold their terms, and write heartbeats.
fn until_all_hold(trial: &Trial, manager: &ManagerClient, hosts: &[&str]) -> Result<()> {
    until("the hosts hold their terms", LIMIT, || {
        for host in hosts {
            let guard = trial.ask(trial.agent(host).ha())?;
            let is_written = |one: &godwit_api::HeartbeatState| {
                one.problem.is_none() && one.written_ms_ago.is_some()
            };
            let writes = guard.datastores.len() == 1 && guard.datastores.iter().all(is_written);
            ensure!(guard.standing == HaStanding::Held && writes, "host {host}: {guard:?}");
            let known = shown(trial, manager, host)?;
            ensure!(known.phase == HaPhase::Watching && known.term == guard.term, "{known:?}");
        }
        Ok(Some(()))
    })
}

/// Returns what a manager shows of a host.
fn shown(trial: &Trial, manager: &ManagerClient, host: &str) -> Result<HaHostStatus> {
    let status = trial.ask(manager.ha())?;
    let known = status.hosts.into_iter().find(|known| known.host == host);
    known.with_context(|| format!("the manager does not show host {host}"))
}

fn terms_of(trial: &Trial, manager: &ManagerClient) -> Result<BTreeMap<String, u64>> {
    let status = trial.ask(manager.ha())?;
    Ok(status.hosts.into_iter().map(|host| (host.host, host.term)).collect())
}

/// Returns a manager's alarms about what HA depends on.
fn troubles(trial: &Trial, manager: &ManagerClient) -> Result<Vec<Alarm>> {
    let mut alarms = trial.ask(manager.alarms())?;
    alarms.retain(|alarm| alarm.kind == AlarmKind::HaTrouble);
    Ok(alarms)
}

/// Puts a folder of a third cluster on the datastore, full of heartbeats that are right in another
/// place.
fn crowd(store: &Path) -> Result<()> {
    let clusters = store.join(".godwit/heartbeats");
    let one = first_in(&first_in(&clusters)?)?;
    let block = fs::read(&one).with_context(|| format!("cannot read {}", one.display()))?;
    let strange = clusters.join(STRANGE);
    fs::create_dir(&strange)?;
    fs::set_permissions(&strange, Permissions::from_mode(0o700))?;
    for number in 0..CROWD {
        let name = format!("{number:08x}-4d5c-4a2c-9b55-3f0c5a0c77aa");
        fs::write(strange.join(name), &block)?;
    }
    Ok(())
}

fn first_in(folder: &Path) -> Result<PathBuf> {
    let entry = fs::read_dir(folder)?.next();
    Ok(entry.with_context(|| format!("{} is empty", folder.display()))??.path())
}
