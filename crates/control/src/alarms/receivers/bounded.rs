//! Connection to a mail server that is not trusted: it ends when the server sends too much. The
//! client reads whole lines into memory, and a line may have no end.

use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use lettre::transport::smtp::client::AsyncTokioStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Most bytes that a server may send in a connection. An answer has some 100.
const MOST_BYTES: usize = 256 << 10;

/// Stream of which at most [`MOST_BYTES`] are read.
#[derive(Debug)]
pub(super) struct Bounded<S> {
    stream: S,
    peer: SocketAddr,
    left: usize,
}

impl<S> Bounded<S> {
    pub(super) fn new(stream: S, peer: SocketAddr) -> Bounded<S> {
        Bounded { stream, peer, left: MOST_BYTES }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let read = buffer.filled().len().saturating_sub(before);
        let Some(left) = self.left.checked_sub(read) else {
            self.left = 0;
            return Poll::Ready(Err(io::Error::other("the server sends too much")));
        };
        self.left = left;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S> AsyncTokioStream for Bounded<S>
where
    S: AsyncRead + AsyncWrite + Send + Sync + Unpin + Debug,
{
    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }
}
