//! Sockets of lanes: connecting, listening, options.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use crate::{LaneError, LaneReceiver, LaneSender};

/// Sent data that stays unacknowledged for this long ends the lane; so does silence.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// One TCP connection between two hosts, both directions.
#[derive(Clone, Debug)]
pub struct Lane {
    stream: Arc<TcpStream>,
    peer: SocketAddr,
}

impl Lane {
    /// Takes over a connected stream and sets its options.
    ///
    /// # Errors
    /// [`LaneError::Io`] where the kernel refuses an option.
    pub fn new(stream: TcpStream) -> Result<Lane, LaneError> {
        // Frames are handed over whole: Nagle would only delay the last one.
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE_LIMIT))?;
        let millis = u32::try_from(SILENCE_LIMIT.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&stream, millis).map_err(std::io::Error::from)?;
        let peer = stream.peer_addr()?;
        Ok(Lane { stream: Arc::new(stream), peer })
    }

    /// The other side.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The sending half.
    #[must_use]
    pub fn sender(&self) -> LaneSender {
        LaneSender::new(Arc::clone(&self.stream))
    }

    /// The receiving half.
    #[must_use]
    pub fn receiver(&self) -> LaneReceiver {
        LaneReceiver::new(Arc::clone(&self.stream))
    }

    /// Sets for how long the peer may be silent; the default is ten seconds.
    ///
    /// # Errors
    /// [`LaneError::Io`] where the kernel refuses it.
    pub fn limit_silence(&self, limit: Duration) -> Result<(), LaneError> {
        Ok(self.stream.set_read_timeout(Some(limit))?)
    }

    /// Ends the lane: both halves' calls return at once. What was sent still goes out.
    pub fn close(&self) {
        // A lane that is gone already is closed.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// No more is sent; the peer reads what was sent and then the end. Receiving goes on.
    pub fn finish_sending(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

/// Connects a lane within `limit`.
///
/// # Errors
/// [`LaneError::Connect`].
pub fn connect(to: SocketAddr, limit: Duration) -> Result<Lane, LaneError> {
    let stream =
        TcpStream::connect_timeout(&to, limit).map_err(|source| LaneError::Connect { to, source })?;
    Lane::new(stream)
}

/// Listens for lanes; port 0 takes a free one.
///
/// # Errors
/// [`LaneError::Listen`].
pub fn listen(on: SocketAddr) -> Result<TcpListener, LaneError> {
    TcpListener::bind(on).map_err(|source| LaneError::Listen { on, source })
}

/// Waits for one lane on any of `listeners` within `limit`; none: nobody came.
///
/// # Errors
/// [`LaneError::Io`].
pub fn accept(listeners: &[TcpListener], limit: Duration) -> Result<Option<Lane>, LaneError> {
    let timeout = Timespec::try_from(limit).map_err(|_| LaneError::Silent)?;
    let mut ready: Vec<_> = listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).collect();
    poll(&mut ready, Some(&timeout)).map_err(std::io::Error::from)?;
    let Some(first) = ready.iter().position(|one| !one.revents().is_empty()) else { return Ok(None) };
    let (stream, _) = listeners[first].accept()?;
    Lane::new(stream).map(Some)
}
