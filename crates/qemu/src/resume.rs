//! Letting a guest run: the one place that does it, so that every way back to a running guest waits for QEMU in the same way.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::qmp::{Qmp, QmpError};

/// What QEMU says to `cont` between its migration's `completed` and the moment at which it has finished with it (`qmp_cont`, 7.2 to
/// 10.x). Its migration thread tells the status first and sets the run state after, milliseconds later.
const NOT_FINALIZED: &str = "Migration is not finalized yet";
/// How long QEMU may take to finish with a migration that is over.
const FINALIZE_LIMIT: Duration = Duration::from_secs(10);
/// Between two attempts, at first and at most.
const AGAIN: Duration = Duration::from_millis(1);
const AGAIN_MOST: Duration = Duration::from_millis(50);

impl Qmp {
    /// Lets the vCPUs run, and sees that they do. The answer may come milliseconds after [`RESUME`](crate::RESUME): vCPUs that start
    /// take QEMU's lock first.
    ///
    /// A QEMU that has not finished yet with a migration of its own is asked again. QEMU takes the disks back that it had let go.
    /// Not for a QEMU into which a migration still comes: that one runs the guest later.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; disks that another QEMU has locked; and [`QmpError::NotResumed`] where QEMU does not finish within 10 s, or
    /// takes the command and the vCPUs stand still all the same.
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
                    tracing::debug!(desc, "the guest is let run again in a moment");
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(AGAIN_MOST);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Checks after `cont` that the vCPUs run, or have run. A monitor that has nothing more to say proves nothing against that.
    async fn expect_running(&self) -> Result<(), QmpError> {
        match self.status().await {
            Ok(state) if !state.has_run() => {
                let why = format!("it took the command, and its state is {}", state.name());
                Err(QmpError::NotResumed { why })
            }
            _ => Ok(()),
        }
    }
}
