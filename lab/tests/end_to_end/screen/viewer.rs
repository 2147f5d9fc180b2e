//! A viewer of a screen, at an agent or at the manager, which connects again after a move.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt, StreamExt};
use godwit_api::control::{ManagerClient, VmMessage, VmSocket};
use godwit_api::{Client, Endpoint, VmState};
use godwit_lab::trial::{Guest, LIMIT, Trial};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Interval at which the destination is asked whether it runs the guest.
const ASK_INTERVAL: Duration = Duration::from_millis(2);
/// Most bytes that are passed on at once.
const PIECE_BYTES: usize = 16 << 10;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Where a viewer connects.
pub(super) enum Way {
    /// At the agents: the one that has the screen.
    Agents(Vec<Client>),
    Manager(ManagerClient),
}

impl Way {
    pub(super) fn agents(trial: &Trial) -> Way {
        Way::Agents(trial.hosts().iter().map(|host| trial.agent(host)).collect())
    }

    pub(super) fn manager(trial: &Trial) -> Way {
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

/// A viewer after the handshake: RFB 3.8 without a password (RFC 6143, section 7).
pub(super) struct Viewer {
    stream: Box<dyn Stream>,
    pub(super) size: (u16, u16),
}

impl Viewer {
    pub(super) async fn open(agent: &Client, vm: &str) -> Result<Viewer> {
        Viewer::greet(agent.screen(vm).await?).await
    }

    async fn greet(stream: impl Stream + 'static) -> Result<Viewer> {
        tokio::time::timeout(LIMIT, Viewer::shake_hands(Box::new(stream))).await?
    }

    async fn shake_hands(mut stream: Box<dyn Stream>) -> Result<Viewer> {
        let mut version = [0; 12];
        stream.read_exact(&mut version).await?;
        ensure!(version == *b"RFB 003.008\n", "{version:?}");
        stream.write_all(&version).await?;
        let mut kinds = [0; 2];
        stream.read_exact(&mut kinds).await?;
        ensure!(kinds == [1, 1], "the kinds of security are {kinds:?}");
        stream.write_all(&[1]).await?;
        ensure!(stream.read_u32().await? == 0, "the viewer is refused");
        // Others may watch too.
        stream.write_all(&[1]).await?;
        let mut size = [0; 4];
        stream.read_exact(&mut size).await?;
        let mut format = [0; 16];
        stream.read_exact(&mut format).await?;
        let mut name = vec![0; usize::try_from(stream.read_u32().await?)?.min(256)];
        stream.read_exact(&mut name).await?;
        let size = (u16::from_be_bytes([size[0], size[1]]), u16::from_be_bytes([size[2], size[3]]));
        Ok(Viewer { stream, size })
    }

    /// Asks for the whole picture and reads it.
    pub(super) async fn see(&mut self) -> Result<()> {
        let mut asked = vec![3, 0, 0, 0, 0, 0];
        asked.extend(self.size.0.to_be_bytes());
        asked.extend(self.size.1.to_be_bytes());
        self.stream.write_all(&asked).await?;
        tokio::time::timeout(LIMIT, self.read_update()).await?
    }

    /// Reads an update, whose rectangles are raw pixels of 32 bits (RFC 6143, section 7.6.1): the
    /// viewer has asked for nothing else.
    async fn read_update(&mut self) -> Result<()> {
        let mut head = [0; 4];
        self.stream.read_exact(&mut head).await?;
        ensure!(head[0] == 0 && head[3] > 0, "no update of the picture: {head:?}");
        for _ in 0..u16::from_be_bytes([head[2], head[3]]) {
            let mut place = [0; 12];
            self.stream.read_exact(&mut place).await?;
            ensure!(place[8..] == [0; 4], "pixels are not raw: {place:?}");
            let side = |at: usize| u64::from(u16::from_be_bytes([place[at], place[at + 1]]));
            let mut pixels = (&mut self.stream).take(side(4) * side(6) * 4);
            tokio::io::copy(&mut pixels, &mut tokio::io::sink()).await?;
        }
        Ok(())
    }

    /// Waits for the end of the connection.
    pub(super) async fn end(mut self) -> Result<()> {
        let mut rest = [0; 4096];
        let ends = async { while self.stream.read(&mut rest).await.is_ok_and(|read| read > 0) {} };
        Ok(tokio::time::timeout(LIMIT, ends).await?)
    }
}

/// What a viewer has seen of a move.
pub(super) struct Seen {
    /// When the destination first said that it runs the guest.
    handed_over: Instant,
    /// End of the connection to the source.
    cut: Instant,
    /// The first picture of the destination.
    next: Instant,
}

/// A viewer that watches a guest while it moves.
pub(super) struct Watching {
    name: &'static str,
    thread: std::thread::JoinHandle<Result<Seen>>,
}

impl Watching {
    /// Connects a viewer and waits for its first picture.
    pub(super) fn begin(
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
    pub(super) fn report(self, vm: &str) -> Result<()> {
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
