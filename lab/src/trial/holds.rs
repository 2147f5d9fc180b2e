//! Hold points of the hosts' agents (`godwit_migration::hold`), for labs that were created with
//! them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::agents::holds;
use crate::trial::{Trial, until};

/// Point at which a host's agent waits while this value exists.
#[derive(Debug)]
pub struct Held {
    point: String,
    held: PathBuf,
    reached: PathBuf,
}

impl Trial {
    /// Makes the agent of a host wait when it reaches a point from now on. Earlier arrivals at the
    /// point are forgotten.
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
        std::fs::write(&held.held, "").with_context(|| format!("cannot hold {}", held.point))?;
        Ok(held)
    }

    /// Observes a point without holding it: the result reports when it is reached from now on.
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
    /// Waits until the point is reached.
    ///
    /// # Errors
    /// It is not reached within the limit.
    pub fn reached(&self, limit: Duration) -> Result<()> {
        until(&format!("{} is reached", self.point), limit, || Ok(self.is_reached().then_some(())))
    }

    /// Returns whether the point has been reached.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.reached.exists()
    }

    /// Releases the point.
    pub fn open(&self) {
        // The file, or the lab, may be gone already.
        let _ = std::fs::remove_file(&self.held);
    }

    fn forget(&self) -> Result<()> {
        match std::fs::remove_file(&self.reached) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot forget {}", self.point))
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
