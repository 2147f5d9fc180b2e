//! A viewer of a VM's screen: RFB 3.8 without a password (RFC 6143, section 7), with pixels as the
//! server has them.

mod follower;
mod watching;

use anyhow::{Result, bail, ensure};
use godwit_api::Client;
use godwit_lab::trial::LIMIT;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub(crate) use follower::Follower;
pub(crate) use watching::{Watching, Way};

/// Kind of an update of the picture.
const UPDATE: u8 = 0;
/// Kind of a bell.
const BELL: u8 = 2;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A viewer after the handshake.
pub(crate) struct Viewer {
    stream: Box<dyn Stream>,
    pub(crate) size: (u16, u16),
    pixel_bytes: usize,
}

impl Viewer {
    pub(crate) async fn open(agent: &Client, vm: &str) -> Result<Viewer> {
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
        Ok(Viewer { stream, size, pixel_bytes: usize::from(format[0] / 8) })
    }

    /// Requests the whole picture, or what changes of it from now on.
    async fn request(&mut self, changes: bool) -> Result<()> {
        let mut request = vec![3, changes.into(), 0, 0, 0, 0];
        request.extend(self.size.0.to_be_bytes());
        request.extend(self.size.1.to_be_bytes());
        Ok(self.stream.write_all(&request).await?)
    }

    /// Requests the whole picture and reads it.
    pub(crate) async fn see(&mut self) -> Result<()> {
        tokio::time::timeout(LIMIT, self.update(false)).await?
    }

    /// Waits for the whole picture, or for a change, and reads it.
    async fn update(&mut self, changes: bool) -> Result<()> {
        self.request(changes).await?;
        loop {
            match self.stream.read_u8().await? {
                UPDATE => break,
                BELL => {}
                other => bail!("a message of kind {other}"),
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
