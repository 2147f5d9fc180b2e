//! A viewer of a VM's screen: RFB 3.8 without a password (RFC 6143, section 7), with pixels as the
//! server has them.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use godwit_api::{Client, ConsoleStream};
use godwit_lab::trial::LIMIT;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

/// Pause of a viewer that found its VM on no host.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Kind of an update of the picture.
const UPDATE: u8 = 0;
/// Kind of a bell.
const BELL: u8 = 2;

/// A viewer after the handshake.
pub(crate) struct Viewer {
    stream: ConsoleStream,
    pub(crate) size: (u16, u16),
    pixel_bytes: usize,
}

impl Viewer {
    pub(crate) async fn open(agent: &Client, vm: &str) -> Result<Viewer> {
        tokio::time::timeout(LIMIT, Viewer::greet(agent.screen(vm).await?)).await?
    }

    async fn greet(mut stream: ConsoleStream) -> Result<Viewer> {
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
        Ok(Viewer { stream, size, pixel_bytes: usize::from(format[0] / 8) })
    }

    /// Requests the whole picture, or what changes of it from now on.
    async fn request(&mut self, changes: bool) -> Result<()> {
        let mut request = vec![3, changes.into(), 0, 0, 0, 0];
        request.extend(self.size.0.to_be_bytes());
        request.extend(self.size.1.to_be_bytes());
        Ok(self.stream.write_all(&request).await?)
    }

    /// Asks for the whole picture and reads the beginning of the answer.
    pub(crate) async fn see(&mut self) -> Result<()> {
        self.request(false).await?;
        let mut update = [0; 4];
        tokio::time::timeout(LIMIT, self.stream.read_exact(&mut update)).await??;
        ensure!(update[0] == UPDATE && update[3] > 0, "no update of the picture: {update:?}");
        Ok(())
    }

    /// Waits for the whole picture, or for a change, and reads it.
    async fn update(&mut self, changes: bool) -> Result<()> {
        self.request(changes).await?;
        loop {
            match self.stream.read_u8().await? {
                UPDATE => break,
                BELL => {}
                other => anyhow::bail!("a message of kind {other}"),
            }
        }
        self.stream.read_u8().await?;
        for _ in 0..self.stream.read_u16().await? {
            let mut rectangle = [0; 12];
            self.stream.read_exact(&mut rectangle).await?;
            ensure!(rectangle[8..] == [0; 4], "pixels in an encoding that was not requested");
            let side =
                |at: usize| usize::from(u16::from_be_bytes([rectangle[at], rectangle[at + 1]]));
            let mut pixels = vec![0; side(4) * side(6) * self.pixel_bytes];
            self.stream.read_exact(&mut pixels).await?;
        }
        Ok(())
    }

    /// Waits for the end of the connection.
    pub(crate) async fn end(mut self) -> Result<()> {
        let mut rest = [0; 4096];
        let ends = async { while self.stream.read(&mut rest).await.is_ok_and(|read| read > 0) {} };
        Ok(tokio::time::timeout(LIMIT, ends).await?)
    }
}

/// What a viewer saw that follows its VM.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    pub(crate) updates: usize,
    /// Times from the end of a connection to the next whole picture.
    pub(crate) reconnects: Vec<Duration>,
}

/// A viewer that stays open while its VM moves.
pub(crate) struct Follower {
    end: oneshot::Sender<()>,
    seen: Arc<Mutex<Seen>>,
    thread: JoinHandle<Result<()>>,
}

impl Follower {
    /// Opens a viewer on whichever of these hosts has the VM, again and again.
    pub(crate) fn open(agents: Vec<Client>, vm: &'static str) -> Result<Follower> {
        let (end, ended) = oneshot::channel();
        let seen = Arc::<Mutex<Seen>>::default();
        let shared = Arc::clone(&seen);
        let thread = std::thread::Builder::new().name("viewer".to_owned()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                tokio::select! {
                    // Also if the test has failed.
                    _ = ended => Ok(()),
                    never = follow(&agents, vm, &shared) => never,
                }
            })
        })?;
        Ok(Follower { end, seen, thread })
    }

    pub(crate) fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    pub(crate) fn close(self) -> Result<Seen> {
        let _ = self.end.send(());
        self.thread.join().ok().context("the viewer panicked")??;
        Ok(self.seen.lock().clone())
    }
}

async fn follow(agents: &[Client], vm: &str, seen: &Mutex<Seen>) -> Result<()> {
    let mut retry = tokio::time::interval(RETRY_INTERVAL);
    let mut lost: Option<Instant> = None;
    loop {
        for agent in agents {
            let Ok(mut viewer) = Viewer::open(agent, vm).await else { continue };
            let mut changes = false;
            while viewer.update(changes).await.is_ok() {
                changes = true;
                let mut seen = seen.lock();
                seen.updates += 1;
                seen.reconnects.extend(lost.take().map(|since| since.elapsed()));
            }
            lost = lost.or_else(|| Some(Instant::now()));
        }
        retry.tick().await;
    }
}
