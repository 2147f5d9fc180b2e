//! Start of vCPUs. Every path to a running guest uses this function, so that all of them wait for
//! QEMU in the same way.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::qmp::{Qmp, QmpError};

/// QEMU's refusal of `cont` for some milliseconds after its migration has completed (`qmp_cont`,
/// 7.2 to 10.x). Its migration thread reports the status first and sets the run state later.
const NOT_FINALIZED: &str = "Migration is not finalized yet";
/// Longest time that QEMU may take to finalize a completed migration.
const FINALIZE_LIMIT: Duration = Duration::from_secs(10);
/// Pause between two attempts: initial and longest.
const AGAIN: Duration = Duration::from_millis(1);
const AGAIN_MOST: Duration = Duration::from_millis(50);

impl Qmp {
    /// Starts the vCPUs and checks that they run. The answer may come milliseconds after
    /// [`RESUME`](crate::RESUME): vCPUs that start take QEMU's lock first.
    ///
    /// Retries while QEMU has not finalized its own migration. QEMU also takes back the disks that
    /// it had released. Not for a QEMU that still loads a migration: it runs the guest later.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; another QEMU has locked a disk; [`QmpError::NotResumed`] if QEMU
    /// does not finalize its migration within 10 s, or accepts the command and the vCPUs do not
    /// run.
    pub async fn resume(&self) -> Result<(), QmpError> {
        self.resume_within(FINALIZE_LIMIT).await
    }

    pub(crate) async fn resume_within(&self, limit: Duration) -> Result<(), QmpError> {
        let deadline = Instant::now() + limit;
        let mut wait = AGAIN;
        loop {
            match self.execute("cont", Value::Null).await {
                Ok(_) => return self.expect_running().await,
                Err(QmpError::Command { desc, .. }) if desc.contains(NOT_FINALIZED) => {
                    if Instant::now() >= deadline {
                        return Err(QmpError::NotResumed { why: format!("{desc}, for {limit:?}") });
                    }
                    tracing::debug!(desc, "retrying cont");
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(AGAIN_MOST);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Checks after `cont` that the vCPUs run, or have run. A closed monitor does not disprove
    /// that.
    async fn expect_running(&self) -> Result<(), QmpError> {
        match self.status().await {
            Ok(state) if !state.has_run() => {
                let why = format!("it accepted the command, and its state is {}", state.name());
                Err(QmpError::NotResumed { why })
            }
            _ => Ok(()),
        }
    }
}
