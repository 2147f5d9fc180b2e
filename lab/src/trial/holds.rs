//! Hold points of the hosts' agents (`godwit_migration::hold`), for labs that were asked for with them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::agents::holds;
use crate::trial::{Trial, until};

/// A point at which a host's agent waits for as long as this is there.
#[derive(Debug)]
pub struct Held {
    point: String,
    held: PathBuf,
    reached: PathBuf,
}

impl Trial {
    /// Has the agent of a host wait when it comes to a point from now on; that it came there before is forgotten.
    ///
    /// # Errors
    /// The lab has no hold points ([`crate::Hooks::holds`]).
    pub fn hold(&self, host: &str, point: &str) -> Result<Held> {
        ensure!(self.options.hooks.holds, "this lab's agents know no hold points");
        let folder = holds(&self.paths, host);
        let held = Held {
            point: format!("{point} at host {host}"),
            held: folder.join("hold").join(point),
            reached: folder.join("reached").join(point),
        };
        held.forget()?;
        std::fs::write(&held.held, "").with_context(|| format!("can't hold {}", held.point))?;
        Ok(held)
    }

    /// A point at which nobody waits, to be told when it is reached from now on.
    ///
    /// # Errors
    /// The lab has no hold points.
    pub fn passing(&self, host: &str, point: &str) -> Result<Held> {
        let held = self.hold(host, point)?;
        held.open();
        Ok(held)
    }
}

impl Held {
    /// Waits until somebody has come to the point.
    ///
    /// # Errors
    /// Nobody has within the limit.
    pub fn reached(&self, limit: Duration) -> Result<()> {
        until(&format!("{} is reached", self.point), limit, || Ok(self.is_reached().then_some(())))
    }

    /// Whether somebody has come to the point.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.reached.exists()
    }

    /// Nobody waits here any more.
    pub fn open(&self) {
        // Gone already, or the lab is.
        let _ = std::fs::remove_file(&self.held);
    }

    fn forget(&self) -> Result<()> {
        match std::fs::remove_file(&self.reached) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("can't forget {}", self.point))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.open();
    }
}
