//! What a probe needs from a stream's socket beyond what a migration does: the size of its packets,
//! and a close that leaves nothing in queues.

use std::time::Duration;

use rustix::net::sockopt;
use socket2::SockRef;

use crate::socket::connect_with;
use crate::{Carries, LaneError, Stream};
use godwit_types::Lane;

/// Connects a stream of a lane whose TCP segments carry at most `segment_bytes` in both directions
/// (TCP_MAXSEG, tcp(7): the size includes options such as timestamps, but not the headers of IP and
/// TCP).
///
/// # Errors
/// [`LaneError::Connect`].
pub fn connect_sized(lane: Lane, limit: Duration, segment_bytes: u32) -> Result<Stream, LaneError> {
    connect_with(lane, limit, None, Carries::Pages, |socket| {
        SockRef::from(socket).set_tcp_mss(segment_bytes)
    })
}

impl Stream {
    /// Returns the payload of a full segment at present, in bytes: without TCP's options, and
    /// reduced as the path and the peer have required so far.
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel does not report it.
    pub fn segment_bytes(&self) -> Result<u32, LaneError> {
        Ok(SockRef::from(self.socket()).tcp_mss()?)
    }

    /// Returns the path's MTU as the kernel knows it: that of the interface, or what routers have
    /// reported since (IP_MTU, ip(7)).
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel does not report it.
    pub fn path_mtu(&self) -> Result<u32, LaneError> {
        let mtu = if self.peer().is_ipv4() {
            sockopt::ip_mtu(self.socket())
        } else {
            sockopt::ipv6_mtu(self.socket())
        };
        Ok(mtu.map_err(std::io::Error::from)?)
    }

    /// Sets how long the peer may be silent, and how long it may accept nothing of what is sent.
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel refuses it.
    pub fn limit_waiting(&self, limit: Duration) -> Result<(), LaneError> {
        self.limit_silence(limit)?;
        Ok(self.socket().set_write_timeout(Some(limit))?)
    }

    /// Sets the close behaviour: when the last handle of the stream is dropped, unsent bytes are
    /// discarded and the peer receives a reset. The next measurement then finds the wire free.
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel refuses it.
    pub fn forget_unsent(&self) -> Result<(), LaneError> {
        Ok(sockopt::set_socket_linger(self.socket(), Some(Duration::ZERO))
            .map_err(std::io::Error::from)?)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::{accept, listen};

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_sized_stream_keeps_to_its_size_at_both_ends() {
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let lane = Lane { from: None, to: listener.local_addr().unwrap() };
        let near = connect_sized(lane, LIMIT, 1000).unwrap();
        let far = accept(&[listener], LIMIT).unwrap().unwrap();
        for end in [&near, &far] {
            let bytes = end.segment_bytes().unwrap();
            // Timestamps take 12 bytes if the host uses them.
            assert!((988..=1000).contains(&bytes), "{bytes}");
        }
        assert!(near.path_mtu().unwrap() >= 1280);
        assert_eq!(near.local().unwrap(), far.peer());
    }

    #[test]
    fn unsent_pages_are_discarded() {
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let near =
            crate::connect(Lane { from: None, to: listener.local_addr().unwrap() }, LIMIT).unwrap();
        let far = accept(&[listener], LIMIT).unwrap().unwrap();
        near.forget_unsent().unwrap();
        near.close();
        drop(near);
        assert!(matches!(far.receiver().receive(), Err(LaneError::Io(_) | LaneError::Closed)));
    }
}
