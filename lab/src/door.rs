//! Port forwarder from this machine to the lab's manager, which is in a namespace: a connection to
//! a port of 127.0.0.1 here is connected to the manager there. The process runs in the manager's
//! namespace and inherits the socket that listens outside.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;

/// Port of the manager's console and API in its namespace.
pub(crate) const MANAGER_PORT: u16 = 7800;

/// Configuration of the process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DoorConfig {
    /// Address in the namespace to which connections go.
    pub(crate) to: SocketAddr,
}

impl DoorConfig {
    /// Returns the configuration for the manager.
    pub(crate) fn to_manager() -> DoorConfig {
        DoorConfig { to: SocketAddr::from((Ipv4Addr::LOCALHOST, MANAGER_PORT)) }
    }
}

/// Returns a socket that listens on this machine, at the manager's usual port if that is free.
pub(crate) fn listen() -> Result<TcpListener> {
    let at = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    at(MANAGER_PORT)
        .or_else(|_| at(0))
        .context("no port of 127.0.0.1 is free for the manager's console")
}

/// Forwards connections until it is ended. Its standard input is the listening socket.
pub(crate) fn run(config: &DoorConfig, notify_ready: impl FnOnce() -> Result<()>) -> Result<()> {
    let inherited = io::stdin().as_fd().try_clone_to_owned().context("no socket was inherited")?;
    let listener = TcpListener::from(inherited);
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener =
            tokio::net::TcpListener::from_std(listener).context("standard input is no socket")?;
        notify_ready()?;
        let to = config.to;
        loop {
            let (mut outside, _) = listener.accept().await?;
            tokio::spawn(async move {
                // On failure the client sees that the connection ends.
                let mut inside = TcpStream::connect(to).await?;
                copy_bidirectional(&mut outside, &mut inside).await
            });
        }
    })
}
