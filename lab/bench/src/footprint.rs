//! Memory that the engine itself takes on a host while it moves a guest: anonymous memory of the
//! agents, which does not include the guest's RAM (a shared file). The kernel's socket buffers are
//! not included.

use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use godwit_lab::trial::Trial;

const INTERVAL: Duration = Duration::from_millis(10);

/// Measurement of the agents' memory until [`Footprint::end`].
pub(crate) struct Footprint {
    stop: SyncSender<()>,
    looking: JoinHandle<Vec<u64>>,
    before: Vec<u64>,
}

impl Footprint {
    /// Begins to observe all agents of a lab.
    pub(crate) fn begin(trial: &Trial) -> Result<Footprint> {
        let hosts = trial.hosts();
        let pids = hosts
            .iter()
            .map(|host| Ok(trial.agent_process(host)?.pid))
            .collect::<Result<Vec<_>>>()?;
        let before: Vec<u64> =
            pids.iter().map(|pid| anonymous_bytes(*pid)).collect::<Result<_>>()?;
        let (stop, stopped) = mpsc::sync_channel(1);
        let mut most = before.clone();
        let looking = std::thread::spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                for (most, pid) in most.iter_mut().zip(&pids) {
                    *most = (*most).max(anonymous_bytes(*pid).unwrap_or(0));
                }
            }
            most
        });
        Ok(Footprint { stop, looking, before })
    }

    /// Returns the growth of the agent that took most, compared with the beginning.
    pub(crate) fn end(self) -> Option<u64> {
        drop(self.stop);
        let most = self.looking.join().ok()?;
        most.iter().zip(&self.before).map(|(most, before)| most.saturating_sub(*before)).max()
    }
}

/// Reads `RssAnon` of proc(5).
fn anonymous_bytes(pid: impl std::fmt::Display) -> Result<u64> {
    status_bytes(pid, "RssAnon")
}

/// Reads a size of /proc/PID/status.
pub(crate) fn status_bytes(pid: impl std::fmt::Display, field: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let value = |line: &str| Some(line.strip_prefix(field)?.strip_prefix(':')?.to_owned());
    let kib = text.lines().find_map(value);
    let kib = kib.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{path} has no {field}"))? * 1024)
}
