//! Sockets of lanes: connecting, listening, options.

use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_pki::{Identity, Peer};
use godwit_types::Lane;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use socket2::SockRef;

use crate::link::{Link, Tls};
use crate::pacing::StreamPace;
use crate::{Interrupt, LaneError, StreamReceiver, StreamSender};

/// Longest time that sent data may stay unacknowledged, or that the peer may be silent, before the
/// lane ends.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Time after which the kernel probes a silent peer, and interval of the probes, where silence is
/// allowed ([`Stream::probe_silent_peer`]).
const PROBE_AFTER: Duration = Duration::from_secs(4);
const PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// Time limit for connecting a stream, in a migration and in a probe.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Congestion controls that do not pace: the usual one, and the one that every kernel has.
const BURSTING: [&str; 2] = ["cubic", "reno"];
/// Prefix of the names of congestion controls that pace.
const PACING: &str = "bbr";

/// A path with a shorter round trip is near.
const NEAR: Duration = Duration::from_millis(1);
/// Send buffer of a socket on a near path: [`FASTEST_BYTES_PER_S`] for the longest near round trip,
/// and small enough to stay in the CPU's cache.
const NEAR_BUFFER_BYTES: usize = 1 << 20;
/// Rate that one stream is designed for: 10 Gbit/s.
const FASTEST_BYTES_PER_S: u64 = 1_250_000_000;
/// Largest send buffer of a socket.
const MOST_BUFFER_BYTES: u64 = 64 << 20;
/// Most unsent bytes in a socket: enough to keep the wire busy while a thread sleeps, and not
/// seconds of a slow wire.
const UNSENT_BYTES: u32 = 1 << 20;

/// TCP connection between two hosts, both directions.
#[derive(Clone, Debug)]
pub struct Stream {
    link: Link,
    peer: SocketAddr,
    /// Bytes handed to the kernel so far.
    sent_bytes: Arc<AtomicU64>,
    /// Limits for pages sent on the stream; `None`: no limits.
    pace: Option<StreamPace>,
    /// Time that connecting took, which is one round trip; `None` if the peer connected.
    connected_in: Option<Duration>,
}

impl Stream {
    /// Takes over a connected stream and sets its options.
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel refuses an option.
    pub fn new(stream: TcpStream) -> Result<Stream, LaneError> {
        // Frames are handed over whole, so Nagle's algorithm would only delay the last one.
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE_LIMIT))?;
        let millis = u32::try_from(SILENCE_LIMIT.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&stream, millis).map_err(std::io::Error::from)?;
        let peer = stream.peer_addr()?;
        let sent_bytes = Arc::default();
        Ok(Stream {
            link: Link::plain_over(stream),
            peer,
            sent_bytes,
            pace: None,
            connected_in: None,
        })
    }

    /// Makes the stream secure, as the connecting side. The peer's certificate must be that of
    /// `host`.
    ///
    /// # Errors
    /// [`LaneError::Handshake`] with the reason.
    pub fn secure(self, identity: &Identity, host: &str) -> Result<Stream, LaneError> {
        let name =
            Identity::server_name(host).map_err(|error| LaneError::Handshake(error.to_string()))?;
        let tls = Tls::connect(self.link.socket().try_clone()?, identity.client(), name)?;
        Ok(Stream { link: Link::Tls(Arc::new(tls)), ..self })
    }

    /// Makes the stream secure, as the accepting side. Returns the stream and its peer.
    ///
    /// # Errors
    /// [`LaneError::Handshake`] with the reason.
    pub fn secure_accepted(self, identity: &Identity) -> Result<(Stream, Peer), LaneError> {
        let (tls, who) = Tls::accept(self.link.socket().try_clone()?, identity.server())?;
        Ok((Stream { link: Link::Tls(Arc::new(tls)), ..self }, who))
    }

    /// Returns the peer's address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns the bytes that the peer's host has acknowledged, including those of a call that has
    /// not handed all its bytes to the kernel yet.
    #[must_use]
    pub fn carried_bytes(&self) -> u64 {
        self.link.acked_bytes()
    }

    /// Returns the bytes that the stream's senders have handed to the kernel.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes that were handed to the kernel and not acknowledged by the peer's host.
    #[must_use]
    pub fn unacked_bytes(&self) -> u64 {
        self.link.unacked_bytes()
    }

    /// Returns the number of consecutive retransmissions that the peer has not answered.
    #[must_use]
    pub fn unanswered_timeouts(&self) -> u8 {
        self.link.unanswered_timeouts()
    }

    /// Returns whether the sender waits for a bandwidth limit.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.pace.as_ref().is_some_and(StreamPace::is_held)
    }

    /// Returns how long connecting took, one round trip; `None` if the peer connected.
    #[must_use]
    pub fn connected_in(&self) -> Option<Duration> {
        self.connected_in
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        self.link.socket()
    }

    /// Returns this side's address, which identifies the lane.
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel does not report it.
    pub fn local(&self) -> Result<SocketAddr, LaneError> {
        Ok(self.link.socket().local_addr()?)
    }

    /// Sets the pace at which units and padding leave.
    #[must_use]
    pub fn paced(self, pace: StreamPace) -> Stream {
        Stream { pace: Some(pace), ..self }
    }

    /// Returns the sending half.
    #[must_use]
    pub fn sender(&self) -> StreamSender {
        StreamSender::new(self.link.clone(), Arc::clone(&self.sent_bytes), self.pace.clone())
    }

    /// Returns the receiving half.
    #[must_use]
    pub fn receiver(&self) -> StreamReceiver {
        StreamReceiver::new(self.link.clone())
    }

    /// Makes data leave as soon as the window allows. A congestion control that paces (BBR) spreads
    /// a burst at the last rate that it saw. If the congestion control cannot be changed, pacing
    /// goes on at two windows per round trip (see `never_pace`).
    pub fn send_in_bursts(&self) {
        let socket = self.link.socket();
        let paces = sockopt::tcp_congestion(socket).is_ok_and(|name| name.starts_with(PACING));
        if paces && !BURSTING.iter().any(|name| sockopt::set_tcp_congestion(socket, name).is_ok()) {
            tracing::debug!("the host's congestion control stays, and paces");
        }
    }

    /// Sets how long the peer may be silent; the default is ten seconds.
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel refuses it.
    pub fn limit_silence(&self, limit: Duration) -> Result<(), LaneError> {
        Ok(self.link.socket().set_read_timeout(Some(limit))?)
    }

    /// Makes the kernel probe a peer that is silent, so that a host that is gone ends the stream
    /// after ten seconds, however long the peer may be silent.
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel refuses it.
    pub fn probe_silent_peer(&self) -> Result<(), LaneError> {
        let socket = self.link.socket();
        // The limit on unacknowledged data (TCP_USER_TIMEOUT) applies to the probes as well.
        let set = sockopt::set_socket_keepalive(socket, true)
            .and_then(|()| sockopt::set_tcp_keepidle(socket, PROBE_AFTER))
            .and_then(|()| sockopt::set_tcp_keepintvl(socket, PROBE_INTERVAL));
        Ok(set.map_err(std::io::Error::from)?)
    }

    /// Sets how long a send may wait for a peer that accepts nothing. By default it waits until the
    /// connection breaks.
    ///
    /// # Errors
    /// [`LaneError::Io`] if the kernel refuses it.
    pub fn limit_sending(&self, limit: Duration) -> Result<(), LaneError> {
        Ok(self.link.socket().set_write_timeout(Some(limit))?)
    }

    /// Closes the stream: calls of both halves return at once. Data already sent still goes out.
    pub fn close(&self) {
        // A stream that is gone already is closed.
        let _ = self.link.socket().shutdown(Shutdown::Both);
        self.pace.iter().for_each(StreamPace::close);
    }

    /// Sends bytes unchanged, in a plain stream.
    #[cfg(test)]
    pub(crate) fn write_all(&self, bytes: &[u8]) {
        std::io::Write::write_all(&mut self.link.socket(), bytes).unwrap();
    }

    /// Ends sending: the peer reads what was sent and then the end. Receiving goes on.
    pub fn finish_sending(&self) {
        self.link.finish();
        let _ = self.link.socket().shutdown(Shutdown::Write);
    }
}

/// Purpose of a stream. It determines how large TCP segments may be, and whether they may be spread
/// over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carries {
    /// Pages, in segments as large as the interface's MTU allows.
    #[default]
    Pages,
    /// Pages, in segments of at most [`SAFE_SEGMENT_BYTES`], in both directions.
    PagesNarrowly,
    /// Messages or pages that a peer waits for, on a stream that is mostly silent. They leave as
    /// soon as the window allows, in segments of at most [`SAFE_SEGMENT_BYTES`].
    Urgent,
}

/// Segment size that passes everywhere: IPv6 requires an MTU of at least 1280 (RFC 8200, section
/// 5).
pub const SAFE_SEGMENT_BYTES: u32 = 1000;

impl Carries {
    pub(crate) fn prepare(self, socket: &OwnedFd) -> std::io::Result<()> {
        match self {
            Carries::Pages => Ok(()),
            Carries::PagesNarrowly | Carries::Urgent => {
                SockRef::from(socket).set_tcp_mss(SAFE_SEGMENT_BYTES)
            }
        }
    }
}

/// Address of this host that lanes may leave from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Near {
    pub address: IpAddr,
    /// Length of its network prefix in bits; `None` if no interface has the address at the moment.
    pub prefix: Option<u8>,
}

impl Near {
    /// Returns whether `to` is in the same network.
    fn is_beside(&self, to: IpAddr) -> bool {
        let Some(prefix) = self.prefix else { return false };
        let same = |ours: u128, theirs: u128, bits: u8| {
            let apart = (ours ^ theirs).checked_shr(u32::from(bits.saturating_sub(prefix)));
            prefix > 0 && apart.unwrap_or(0) == 0
        };
        match (self.address, to) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                same(ours.to_bits().into(), theirs.to_bits().into(), 32)
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => same(ours.to_bits(), theirs.to_bits(), 128),
            _ => false,
        }
    }
}

/// Pairs the addresses of two hosts into lanes, in the order of the destination's addresses.
/// Addresses of one network make a lane, also if one host lacks an address that the other has. The
/// remaining addresses pair in each host's order: the first IPv4 address with the first, the second
/// with the second, and IPv6 likewise. For a surplus address of the destination, the kernel chooses
/// the source address.
#[must_use]
pub fn pair(ours: &[Near], theirs: &[SocketAddr]) -> Vec<Lane> {
    let mut left = ours.to_vec();
    let mut take = |fits: &dyn Fn(&Near) -> bool| {
        let place = left.iter().position(fits)?;
        Some(left.remove(place).address)
    };
    let mut from: Vec<_> = theirs.iter().map(|to| take(&|near| near.is_beside(to.ip()))).collect();
    for (from, to) in from.iter_mut().zip(theirs) {
        if from.is_none() {
            *from = take(&|near| near.address.is_ipv4() == to.is_ipv4());
        }
    }
    theirs.iter().zip(from).map(|(to, from)| Lane { from, to: *to }).collect()
}

/// Connects a stream for pages on a lane within `limit`.
///
/// # Errors
/// [`LaneError::Connect`].
pub fn connect(lane: Lane, limit: Duration) -> Result<Stream, LaneError> {
    connect_with(lane, limit, None, Carries::Pages, |_| Ok(()))
}

/// Connects a stream of a lane within `limit`, unless it is interrupted. `prepare` sets options
/// that must be set before connecting.
pub(crate) fn connect_with(
    lane: Lane,
    limit: Duration,
    interrupt: Option<&Interrupt>,
    carries: Carries,
    prepare: impl FnOnce(&OwnedFd) -> std::io::Result<()>,
) -> Result<Stream, LaneError> {
    let to = lane.to;
    let begun = Instant::now();
    let mut paces = None;
    let prepare = |socket: &OwnedFd| {
        paces = never_pace(socket);
        carries.prepare(socket)?;
        prepare(socket)
    };
    let stream = connect_from(lane, limit, interrupt, prepare)
        .map_err(|source| LaneError::Connect { to, source })?;
    let connected_in = begun.elapsed();
    fit_to_way(&stream, connected_in, paces.filter(|_| carries != Carries::Urgent));
    Ok(Stream { connected_in: Some(connected_in), ..Stream::new(stream)? })
}

/// Makes a socket that is not connected yet send as soon as the window allows. Returns the host's
/// own congestion control if that one paces and another could be set.
///
/// A socket that was connected under a pacing congestion control stays paced, whichever it is given
/// later (Linux sets sk_pacing_status in bbr_init and never resets it): at two windows per round
/// trip, and a round trip on a full wire is mostly queueing. A mostly silent stream then carried 1
/// MB/s on a wire of 25 MB/s: 60 ms for the device state.
fn never_pace(socket: impl AsFd) -> Option<String> {
    let of_host = sockopt::tcp_congestion(&socket).ok().filter(|name| name.starts_with(PACING))?;
    let set = BURSTING.iter().find(|name| sockopt::set_tcp_congestion(&socket, name).is_ok());
    if set.is_none() {
        // Slower, but it works: net.ipv4.tcp_allowed_congestion_control may allow only the host's
        // own.
        tracing::debug!(congestion = of_host, "the host's congestion control stays, and paces");
    }
    set.map(|_| of_host)
}

/// Fits a socket's send buffer to the path's bandwidth × round trip, which connecting has just
/// measured. `paces`: the congestion control for a far path, if it differs from the one that the
/// socket was connected under.
///
/// Near paths get small buffers and no pacing: measured on a link as fast as memory, this takes
/// 0.31 s of CPU per GB instead of 0.47 s. Far paths get room for everything in flight, which the
/// kernel's own bound (the third number of `net.ipv4.tcp_wmem`) does not always give.
fn fit_to_way(socket: &TcpStream, round_trip: Duration, paces: Option<String>) {
    let fitted = if round_trip < NEAR {
        fit_to_near_way(socket)
    } else {
        fit_to_far_way(socket, round_trip, paces)
    };
    // Perhaps slower, but it works.
    if let Err(error) = fitted {
        tracing::debug!(%error, round_trip_us = round_trip.as_micros(), "the socket's buffers stay \
            as they are");
    }
}

fn fit_to_near_way(socket: &TcpStream) -> std::io::Result<()> {
    // The kernel doubles the size for its own bookkeeping.
    Ok(sockopt::set_socket_send_buffer_size(socket, NEAR_BUFFER_BYTES)?)
}

fn fit_to_far_way(
    socket: &TcpStream,
    round_trip: Duration,
    paces: Option<String>,
) -> std::io::Result<()> {
    let micros = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    let on_its_way = FASTEST_BYTES_PER_S.saturating_mul(micros) / 1_000_000;
    let buffer = on_its_way.saturating_add(UNSENT_BYTES.into()).min(MOST_BUFFER_BYTES);
    godwit_ram::limit_unsent_bytes(socket.as_fd(), UNSENT_BYTES)?;
    sockopt::set_socket_send_buffer_size_force(
        socket,
        usize::try_from(buffer).unwrap_or(usize::MAX),
    )?;
    Ok(paces.map_or(Ok(()), |congestion| sockopt::set_tcp_congestion(socket, &congestion))?)
}

fn connect_from(
    lane: Lane,
    limit: Duration,
    interrupt: Option<&Interrupt>,
    prepare: impl FnOnce(&OwnedFd) -> std::io::Result<()>,
) -> std::io::Result<TcpStream> {
    let family = if lane.to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    prepare(&socket)?;
    let _watched = interrupt.map(|interrupt| interrupt.watch(&socket)).transpose()?;
    if let Some(from) = lane.from {
        rustix::net::bind(&socket, &SocketAddr::new(from, 0))?;
    }
    match rustix::net::connect(&socket, &lane.to) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            // Before this moment there was nothing to shut down.
            let is_over = || interrupt.is_some_and(Interrupt::is_over);
            if is_over() {
                return Err(std::io::ErrorKind::ConnectionAborted.into());
            }
            let timeout =
                Timespec::try_from(limit).map_err(|_| std::io::ErrorKind::InvalidInput)?;
            let mut ready = [PollFd::new(&socket, PollFlags::OUT)];
            if poll(&mut ready, Some(&timeout))? == 0 {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
            if is_over() {
                return Err(std::io::ErrorKind::ConnectionAborted.into());
            }
            sockopt::socket_error(&socket)??;
        }
        Err(errno) => return Err(errno.into()),
    }
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Listens for lanes; port 0 selects a free port.
///
/// # Errors
/// [`LaneError::Listen`].
pub fn listen(on: SocketAddr) -> Result<TcpListener, LaneError> {
    let listener = TcpListener::bind(on).map_err(|source| LaneError::Listen { on, source })?;
    // Accepted sockets inherit it: they send only messages.
    never_pace(&listener);
    Ok(listener)
}

/// Waits up to `limit` for one stream on any of `listeners`. Returns `None` if no peer connected.
///
/// # Errors
/// [`LaneError::Io`].
pub fn accept(listeners: &[TcpListener], limit: Duration) -> Result<Option<Stream>, LaneError> {
    let timeout = Timespec::try_from(limit).map_err(|_| LaneError::Silent)?;
    let mut ready: Vec<_> =
        listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).collect();
    poll(&mut ready, Some(&timeout)).map_err(std::io::Error::from)?;
    let Some(first) = ready.iter().position(|one| !one.revents().is_empty()) else {
        return Ok(None);
    };
    let (stream, _) = listeners[first].accept()?;
    Stream::new(stream).map(Some)
}

impl Interrupt {
    /// Connects a stream of a lane within `limit`.
    ///
    /// # Errors
    /// [`LaneError::Connect`], also after an interruption.
    pub fn connect(
        &self,
        lane: Lane,
        limit: Duration,
        carries: Carries,
    ) -> Result<Stream, LaneError> {
        connect_with(lane, limit, Some(self), carries, |_| Ok(()))
    }

    /// Makes the stream secure, as [`Stream::secure`] does.
    ///
    /// # Errors
    /// [`LaneError::Handshake`] with the reason; [`LaneError::Io`] after an interruption.
    pub fn secure(
        &self,
        stream: Stream,
        identity: &Identity,
        host: &str,
    ) -> Result<Stream, LaneError> {
        let _watched = self.watch(stream.socket())?;
        stream.secure(identity, host)
    }
}
