//! Lifetime of the agent: opens its state, listens on the unix socket and for peers, serves until a
//! signal, and leaves the VMs running.

mod adoption;
mod answers;
mod arriving_disks;
mod clones;
mod connections;
mod console;
mod disks;
mod follow;
mod ha;
mod ha_heartbeats;
mod imports;
mod incoming;
mod limits;
mod local;
mod log;
mod metrics;
mod named;
mod probes;
mod routes;
mod screen;
mod secure;
mod upgraded;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::extract::ConnectInfo;
use godwit_api::ApiError;
use godwit_qemu::Accelerator;
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::agent::Agent;
use crate::config::Config;
use crate::local_socket;

use connections::Patience;
pub use routes::router;

/// Error that keeps the agent from running.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The agent's state is unusable.
    #[error("{}", .0.message)]
    State(#[from] ApiError),
    /// The address is in use or does not belong to this host.
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    /// The socket cannot be created.
    #[error("cannot create the agent's socket {path}: {source}")]
    Socket { path: PathBuf, source: io::Error },
    /// Another agent listens on the socket.
    #[error("another agent already listens on {path}")]
    SocketInUse { path: PathBuf },
    /// Signal handlers cannot be installed.
    #[error("cannot handle signals: {0}")]
    Signals(io::Error),
}

impl RunError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            RunError::State(error) => error.remedy.clone(),
            RunError::Listen { source, .. } => listen_remedy(source).to_owned(),
            RunError::Socket { .. } => {
                "make its directory writable, or change socket in the configuration".to_owned()
            }
            RunError::SocketInUse { .. } => {
                "stop it, or give this agent its own socket, state_dir and run_dir".to_owned()
            }
            RunError::Signals(_) => "check the system's resource limits".to_owned(),
        }
    }
}

fn listen_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program uses that port: stop it, or change listen in the configuration"
        }
        io::ErrorKind::AddrNotAvailable => {
            "no interface of this host has that address: correct listen in the configuration"
        }
        _ => "correct listen in the configuration",
    }
}

/// Runs the agent until SIGTERM or SIGINT. It then removes its socket and leaves its VMs running.
pub async fn run(config: Config) -> Result<(), RunError> {
    keep_to_itself();
    let mut terminate = signal(SignalKind::terminate()).map_err(RunError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(RunError::Signals)?;
    // An agent that answers on the socket uses this state. This check comes first because its error
    // is clearer than that of the state's lock.
    if UnixStream::connect(&config.socket).await.is_ok() {
        return Err(RunError::SocketInUse { path: config.socket.clone() });
    }
    let peers = listen(&config.listen).await?;
    let agent = Agent::guarding(config.clone())?;
    let (stop, stopped) = watch::channel(false);
    let permits = Arc::<connections::Permits>::default();
    let mut servers = tokio::task::JoinSet::new();
    let app = router(agent.clone());
    // The manager's renewals come this way, and must not wait until all VMs are found.
    for listener in peers {
        if agent.identity().is_some() {
            let listener = secure::TlsListener::new(listener, agent.clone(), permits.clone());
            servers.spawn(serve_secure(listener, agent.clone(), app.clone(), stopped.clone()));
        } else {
            servers.spawn(serve(listener, app.clone(), stopped.clone()));
        }
    }
    agent.find_vms().await?;
    let local = local_socket::bind(&config.socket)
        .map_err(|source| RunError::Socket { path: config.socket.clone(), source })?;
    let _socket = RemovedAtEnd(config.socket.clone());
    servers.spawn(serve_local(local, app, stopped));
    if config.insecure {
        tracing::warn!(
            "insecure mode: any client of this agent can run VMs here and read migrating guests"
        );
    }
    tracing::info!(
        host = config.name,
        socket = %config.socket.display(),
        listen = ?config.listen,
        "agent ready"
    );
    probe_in_background(agent.clone());
    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM: the agent ends; its VMs keep running"),
        _ = interrupt.recv() => tracing::info!("SIGINT: the agent ends; its VMs keep running"),
    }
    stop.send_replace(true);
    // Open event streams would delay a graceful shutdown, so they are cut.
    servers.shutdown().await;
    agent.let_all_vcpus_go();
    Ok(())
}

/// Keeps guest memory and the host's key out of files that others can read. Files that this process
/// creates are unreadable to others. Neither this process nor a QEMU, which inherits both settings,
/// leaves a core. The resource limit applies to cores written to files. The filter leaves an empty
/// core for a program to which the kernel pipes cores (core(5)).
fn keep_to_itself() {
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let refused = [
        setrlimit(Resource::Core, none).err().map(io::Error::from),
        fs::write("/proc/self/coredump_filter", "0").err(),
        set_dumpable_behavior(DumpableBehavior::NotDumpable).err().map(io::Error::from),
    ];
    for error in refused.into_iter().flatten() {
        tracing::warn!(%error, "a process that crashes may leave a core with guest memory");
    }
}

async fn listen(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, RunError> {
    let mut listeners = Vec::new();
    for &address in addresses {
        let listener = TcpListener::bind(address)
            .await
            .map_err(|source| RunError::Listen { address, source })?;
        listeners.push(listener);
    }
    Ok(listeners)
}

async fn serve<L>(listener: L, app: Router, mut stopped: watch::Receiver<bool>)
where
    L: axum::serve::Listener,
    L::Addr: std::fmt::Debug,
{
    let until = async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    if let Err(error) = axum::serve(listener, app).with_graceful_shutdown(until).await {
        tracing::error!(%error, "listener ended");
    }
}

async fn serve_local(listener: UnixListener, app: Router, mut stopped: watch::Receiver<bool>) {
    let until = async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    let app = app.layer(axum::middleware::from_fn(local::guard));
    let service = app.into_make_service_with_connect_info::<local::Caller>();
    if let Err(error) = axum::serve(listener, service).with_graceful_shutdown(until).await {
        tracing::error!(%error, "listener of the unix socket ended");
    }
}

async fn serve_secure(
    mut listener: secure::TlsListener,
    agent: Arc<Agent>,
    app: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let patience = Patience::default();
    // The guard checks the caller's rights before any of the body is read.
    let app = connections::reading(app, patience).layer(axum::middleware::from_fn(secure::guard));
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            _ = stopped.wait_for(|stopped| *stopped) => return,
        };
        let Some((stream, permit, connection)) = accepted else { return };
        let (app, agent) = (app.clone(), agent.clone());
        connections.spawn(async move {
            let shown = connection.clone();
            tokio::select! {
                () = connections::serve(stream, app, ConnectInfo(connection), patience) => {}
                () = shown.until_revoked(&agent) => {
                    tracing::warn!("connection closed: its certificate is revoked");
                }
            }
            drop(permit);
        });
    }
}

/// Probes QEMU, KVM and the CPU model in the background, so that neither the first VM nor the first
/// arriving guest waits for it.
fn probe_in_background(agent: Arc<Agent>) {
    tokio::spawn(async move {
        let qemu = match agent.qemu(None).await {
            Ok(qemu) => qemu,
            Err(error) => return tracing::warn!(%error, "QEMU unavailable"),
        };
        let accel =
            if agent.accel(&qemu.path).await.kvm { Accelerator::Kvm } else { Accelerator::Tcg };
        if let Err(error) = agent.cpu(&qemu, accel).await {
            tracing::warn!(%error, remedy = error.remedy(), "cannot determine the guest CPU model");
        }
    });
}

struct RemovedAtEnd(PathBuf);

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
