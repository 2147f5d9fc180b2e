//! The watchdog of protected VMs: a process of its own, `godwit host watchdog`, that ends them when
//! their host's lease has run out and the agent does not. docs/ha.md explains it.
//!
//! - [`run`]: the process. It knows no VMs and no terms: groups of processes, each with a deadline.
//! - [`follow`]: the agent's task that sends it these.

mod client;
mod keeper;
mod lines;
mod message;
mod process;
mod processes;
mod timer;

use std::path::{Path, PathBuf};

pub(crate) use client::follow;
pub(crate) use message::again as message_again;
pub use process::{WatchdogError, run};

/// Returns the path of the process's socket.
fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("watchdog.sock")
}
