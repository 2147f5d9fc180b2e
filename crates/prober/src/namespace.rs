//! Network namespaces by name, as `ip netns` keeps them in /run/netns.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Folder in which `ip netns` keeps namespaces.
pub const NAMESPACE_DIR: &str = "/run/netns";

/// Returns the path of a namespace.
#[must_use]
pub fn namespace_path(name: &str) -> PathBuf {
    Path::new(NAMESPACE_DIR).join(name)
}

/// Runs `closure` on a thread of its own inside the namespace: sockets opened, devices made and
/// processes started there belong to it. The caller's own thread stays where it is.
///
/// # Errors
/// The namespace does not exist or cannot be entered (it needs root), or the closure panicked.
pub fn in_namespace<T: Send>(name: &str, closure: impl FnOnce() -> T + Send) -> Result<T> {
    let file = File::open(namespace_path(name))
        .with_context(|| format!("cannot open network namespace {name} (`ip netns` lists them)"))?;
    let inside = move || -> io::Result<T> {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(closure())
    };
    std::thread::scope(|scope| scope.spawn(inside).join())
        .map_err(|_| anyhow!("work inside network namespace {name} panicked"))?
        .with_context(|| format!("cannot enter network namespace {name} (it needs root)"))
}
