//! A viewer that watches one move, at the agents or at the manager.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::{SinkExt, StreamExt};
use godwit_api::control::{ManagerClient, VmMessage, VmSocket};
use godwit_api::{Client, Endpoint, VmState};
use godwit_lab::trial::{Guest, LIMIT, Trial};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Viewer;

/// Interval at which the destination is asked whether it runs the guest.
const ASK_INTERVAL: Duration = Duration::from_millis(2);
/// Most bytes that are passed on at once.
const PIECE_BYTES: usize = 16 << 10;

/// Where a viewer connects.
pub(crate) enum Way {
    /// At the agents: the one that has the screen.
    Agents(Vec<Client>),
    Manager(ManagerClient),
}

impl Way {
    pub(crate) fn agents(trial: &Trial) -> Way {
        Way::Agents(trial.hosts().iter().map(|host| trial.agent(host)).collect())
    }

    pub(crate) fn manager(trial: &Trial) -> Way {
        Way::Manager(ManagerClient::new(Endpoint::Unix(trial.paths().manager_socket()), None))
    }

    async fn open(&self, vm: &str) -> Result<Viewer> {
        match self {
            Way::Agents(agents) => {
                for agent in agents {
                    if let Ok(viewer) = Viewer::open(agent, vm).await {
                        return Ok(viewer);
                    }
                }
                bail!("no agent has a screen of {vm}")
            }
            Way::Manager(manager) => Viewer::greet(bytes_of(manager.screen(vm).await?)).await,
        }
    }
}

/// Returns the bytes that a connection to the manager carries.
fn bytes_of(mut socket: VmSocket) -> tokio::io::DuplexStream {
    let (viewers, mut ours) = tokio::io::duplex(PIECE_BYTES);
    tokio::spawn(async move {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            tokio::select! {
                message = socket.next() => match message {
                    Some(Ok(VmMessage::Binary(bytes))) => ours.write_all(&bytes).await?,
                    Some(Ok(VmMessage::Ping(_) | VmMessage::Pong(_))) => {}
                    _ => return Ok::<(), anyhow::Error>(()),
                },
                read = ours.read(&mut piece) => match read? {
                    0 => return Ok(()),
                    bytes => socket.send(VmMessage::binary(piece[..bytes].to_vec())).await?,
                },
            }
        }
    });
    viewers
}

/// What a viewer has seen of a move.
pub(crate) struct Seen {
    /// When the destination first said that it runs the guest.
    handed_over: Instant,
    /// End of the connection to the source.
    cut: Instant,
    /// The first picture of the destination.
    next: Instant,
}

/// A viewer that watches a guest while it moves.
pub(crate) struct Watching {
    name: &'static str,
    thread: std::thread::JoinHandle<Result<Seen>>,
}

impl Watching {
    /// Connects a viewer and waits for its first picture.
    pub(crate) fn begin(
        trial: &Trial,
        guest: &Guest,
        (name, way): (&'static str, Way),
    ) -> Result<Watching> {
        let to = trial.agent(&guest.to_other_host().to);
        let vm = guest.name.clone();
        let (ready, is_ready) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(watch(&way, &vm, to, &ready))
        });
        is_ready.recv_timeout(LIMIT).context("the viewer sees nothing")?;
        Ok(Watching { name, thread })
    }

    /// Prints how long the viewer saw nothing new.
    pub(crate) fn report(self, vm: &str) -> Result<()> {
        let seen = self.thread.join().map_err(|_| anyhow::anyhow!("the viewer panicked"))??;
        eprintln!(
            "  {vm}, viewer at {}: next picture {:.0} ms after the hand-over, {:.0} ms after its \
             connection ended",
            self.name,
            (seen.next - seen.handed_over).as_secs_f64() * 1e3,
            (seen.next - seen.cut).as_secs_f64() * 1e3,
        );
        Ok(())
    }
}

async fn watch(
    way: &Way,
    vm: &str,
    to: Client,
    ready: &std::sync::mpsc::SyncSender<()>,
) -> Result<Seen> {
    let mut viewer = way.open(vm).await?;
    viewer.see().await?;
    ready.send(())?;
    let name = vm.to_owned();
    let handed_over = tokio::spawn(async move {
        let mut ask = tokio::time::interval(ASK_INTERVAL);
        loop {
            ask.tick().await;
            if to.vm(&name).await.is_ok_and(|vm| vm.state == VmState::Running) {
                return Instant::now();
            }
        }
    });
    while viewer.see().await.is_ok() {}
    let cut = Instant::now();
    let next = async {
        loop {
            // A source that has just handed over may still take a viewer.
            if let Ok(mut viewer) = way.open(vm).await
                && viewer.see().await.is_ok()
            {
                return Instant::now();
            }
        }
    };
    let next = tokio::time::timeout(LIMIT, next).await.context("no picture after the move")?;
    Ok(Seen { handed_over: handed_over.await?, cut, next })
}
