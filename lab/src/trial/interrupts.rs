//! Labs of this process that are up, and their removal when a signal ends the process: it drops
//! nothing then, and its labs would stay until another process begins a trial.

use std::fs;
use std::process::exit;

use anyhow::{Context, Result};
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::down::{LabName, down};
use crate::options::LabOptions;
use crate::programs::Programs;
use crate::status::LabStatus;
use crate::up::up;

/// The labs of this process.
static LABS: Labs = Labs { names: Mutex::new(Vec::new()), changes: RwLock::new(()) };

struct Labs {
    /// Labs of which something may exist.
    names: Mutex<Vec<LabName>>,
    /// Held for reading while a lab comes up or goes down, and for writing once the process is
    /// interrupted: no other lab changes from then on.
    changes: RwLock<()>,
}

impl Labs {
    fn change<T>(&self, name: &LabName, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let _changing = self.changes.read();
        let mut names = self.names.lock();
        if !names.contains(name) {
            names.push(name.clone());
        }
        drop(names);
        change()
    }

    fn remove(&self, name: &LabName, remove: impl FnOnce() -> Result<()>) -> Result<()> {
        let _changing = self.changes.read();
        remove()?;
        self.names.lock().retain(|other| other != name);
        Ok(())
    }

    /// Removes all labs, after those that come up or go down have done so. None changes until the
    /// guard is dropped.
    fn remove_all(&self, remove: impl Fn(&LabName) -> Result<()>) -> RwLockWriteGuard<'_, ()> {
        let alone = self.changes.write();
        for name in self.names.lock().drain(..) {
            if let Err(error) = remove(&name) {
                eprintln!("cannot take down lab {}: {error:#}", name.prefix);
            }
        }
        alone
    }
}

/// Brings a lab of this process up.
pub(super) fn bring_up(options: &LabOptions, programs: &Programs) -> Result<LabStatus> {
    LABS.change(&options.name(), || up(options, programs))
}

/// Takes a lab of this process down.
pub(super) fn take_down(name: &LabName) -> Result<()> {
    LABS.remove(name, || down(name).map(drop))
}

/// From now on, takes the labs of this process down when it gets SIGINT, SIGTERM or SIGHUP, and
/// ends it. Further signals are ignored meanwhile. What this process was started to ignore, as by
/// `nohup`, stays ignored.
///
/// # Errors
/// The signals cannot be handled.
pub fn take_down_when_interrupted() -> Result<()> {
    let status = fs::read_to_string("/proc/self/status").context("cannot read ignored signals")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let handled = {
        let _entered = runtime.enter();
        let of = |kind| -> Result<Option<Signal>> {
            if is_ignored(&status, kind) {
                return Ok(None);
            }
            signal(kind).map(Some).context("cannot handle signals")
        };
        [of(SignalKind::interrupt()), of(SignalKind::terminate()), of(SignalKind::hangup())]
    };
    let [interrupt, terminate, hangup] = handled;
    let (mut interrupt, mut terminate, mut hangup) = (interrupt?, terminate?, hangup?);
    let wait = move || {
        let kind = runtime.block_on(async {
            tokio::select! {
                () = received(&mut interrupt) => SignalKind::interrupt(),
                () = received(&mut terminate) => SignalKind::terminate(),
                () = received(&mut hangup) => SignalKind::hangup(),
            }
        });
        eprintln!("interrupted: taking down the lab; the signal is ignored until that is done");
        let _alone = LABS.remove_all(|name| down(name).map(drop));
        exit(128 + kind.as_raw_value());
    };
    std::thread::Builder::new().name("interrupts".to_owned()).spawn(wait)?;
    Ok(())
}

/// Waits for a signal; forever for one that is ignored.
async fn received(signal: &mut Option<Signal>) {
    let received = match signal {
        Some(signal) => signal.recv().await,
        None => None,
    };
    if received.is_none() {
        std::future::pending::<()>().await;
    }
}

/// Whether a process with this status (`/proc/PID/status`) ignores a signal.
fn is_ignored(status: &str, kind: SignalKind) -> bool {
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    ignored.is_some_and(|bits| (bits >> (kind.as_raw_value() - 1)) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use anyhow::bail;

    use super::*;

    fn named(prefix: &str) -> LabName {
        LabName { prefix: prefix.to_owned(), ..LabName::default() }
    }

    #[test]
    fn an_interrupted_process_removes_what_is_up_or_came_up_in_part_and_nothing_else() {
        let labs = Labs { names: Mutex::default(), changes: RwLock::default() };
        labs.change(&named("up"), || Ok(())).unwrap();
        labs.change(&named("up"), || Ok(())).unwrap();
        labs.change::<()>(&named("part"), || bail!("it did not come up")).unwrap_err();
        labs.change(&named("gone"), || Ok(())).unwrap();
        labs.remove(&named("gone"), || Ok(())).unwrap();
        labs.change(&named("stays"), || Ok(())).unwrap();
        labs.remove(&named("stays"), || bail!("it is busy")).unwrap_err();
        let removed = Mutex::new(Vec::new());
        let alone = labs.remove_all(|name| {
            removed.lock().push(name.prefix.clone());
            bail!("one that fails does not keep the others")
        });
        assert_eq!(*removed.lock(), ["up", "part", "stays"]);
        assert!(labs.changes.try_read().is_none(), "a trial would change its lab meanwhile");
        drop(alone);
        assert!(labs.changes.try_read().is_some());
    }

    #[test]
    fn what_a_process_was_started_to_ignore_stays_ignored() {
        // Of `nohup`: SIGHUP.
        let status = "Name:\tgodwit-bench\nSigBlk:\t0000000000000007\n\
            SigIgn:\t0000000000000001\nSigCgt:\t0000000000004002\n";
        assert!(is_ignored(status, SignalKind::hangup()));
        assert!(!is_ignored(status, SignalKind::interrupt()));
        assert!(!is_ignored(status, SignalKind::terminate()));
        assert!(!is_ignored("", SignalKind::hangup()));
        // SIGTERM is the 15th.
        assert!(is_ignored("SigIgn:\t0000000000004000\n", SignalKind::terminate()));
    }

    #[test]
    fn a_lab_that_comes_up_is_removed_after_that() {
        let labs = Labs { names: Mutex::default(), changes: RwLock::default() };
        let (begin, began) = sync_channel(1);
        let (done, is_done) = sync_channel::<()>(1);
        std::thread::scope(|scope| {
            let coming = scope.spawn(|| {
                labs.change(&named("new"), move || {
                    begin.send(())?;
                    Ok(is_done.recv()?)
                })
            });
            began.recv().unwrap();
            assert!(labs.changes.try_write().is_none(), "it would be removed half made");
            done.send(()).unwrap();
            coming.join().unwrap().unwrap();
        });
        let removed = Mutex::new(Vec::new());
        drop(labs.remove_all(|name| {
            removed.lock().push(name.prefix.clone());
            Ok(())
        }));
        assert_eq!(*removed.lock(), ["new"]);
    }
}
