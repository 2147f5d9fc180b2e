//! Datastores that can hang for one host. A program passes each of them on to the host, as a file
//! system in user space (`bindfs`). While the program is stopped, every access of the host waits,
//! also to files that are open. It runs on the host: it ends with the host's power, and accesses
//! fail then.

use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::mounts;
use crate::process::{self, ProcessId};
use crate::trial::{LIMIT, Trial};

/// Nothing is remembered: another host may have changed it.
const OPTIONS: &str = "allow_other,attr_timeout=0,entry_timeout=0,negative_timeout=0";

/// Directory of a datastore.
#[derive(Debug, Clone)]
pub(super) struct StoreDir {
    /// Path at which hosts have it.
    pub(super) seen: PathBuf,
    /// Path at which this machine has its files.
    pub(super) files: PathBuf,
}

/// Programs that pass the datastores on to a host.
#[derive(Debug)]
pub(super) struct Passages {
    running: Vec<ProcessId>,
}

impl Passages {
    /// Mounts the datastores for one host.
    pub(super) fn open(trial: &Trial, host: &str, stores: &[StoreDir]) -> Result<Passages> {
        let open = |store: &StoreDir| open(trial, host, store);
        Ok(Passages { running: stores.iter().map(open).collect::<Result<_>>()? })
    }

    /// Lets the datastores hang, or go on. A program that has ended with its host is left out.
    pub(super) fn hang(&self, hangs: bool) {
        let how = if hangs { Signal::STOP } else { Signal::CONT };
        let alive = self.running.iter().filter(|id| id.is_alive());
        for pid in alive.filter_map(|id| Pid::from_raw(id.pid)) {
            // It may have ended meanwhile.
            let _ = kill_process(pid, how);
        }
    }
}

fn open(trial: &Trial, host: &str, store: &StoreDir) -> Result<ProcessId> {
    let StoreDir { seen, files } = store;
    let mut command = mounts::command(trial.paths(), host, "bindfs".as_ref());
    command.args(["-f", "-o", OPTIONS]).args([files, seen]);
    let log = trial.paths().host(host).join("passages.log");
    let started = process::start(&trial.namespace(host), command, &log, false)?;
    // The table is that of the program's mount namespace.
    let table = format!("/proc/{}/mountinfo", started.id.pid);
    let is_mounted = || {
        let table = std::fs::read_to_string(&table).unwrap_or_default();
        let is_own =
            |line: &str| line.split(' ').nth(4) == seen.to_str() && line.contains(" - fuse");
        table.lines().any(is_own)
    };
    let what = format!("the passage of host {host} to {}", seen.display());
    started.wait_until(&what, &log, LIMIT, is_mounted).with_context(|| {
        format!("cannot pass {} on; remedy: apt-get install bindfs", files.display())
    })?;
    Ok(started.id)
}
