//! TCP connections to agents. If the other end is lost, a connection ends, also while it waits for
//! a long answer.

use std::io;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// When an idle connection is probed, how often, and how many lost probes end it: a host that has
/// lost power is noticed after 35 s, however long a request may take. That time also ends a
/// connection whose bytes are not confirmed: no probes are sent while some are on their way.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 4);

/// Opens a connection to `HOST:PORT`.
pub(super) async fn connect_tcp(authority: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    let (idle, interval, probes) = KEEP_ALIVE;
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, idle)?;
    sockopt::set_tcp_keepintvl(&stream, interval)?;
    sockopt::set_tcp_keepcnt(&stream, probes)?;
    let lost_after = idle.saturating_add(interval.saturating_mul(probes));
    let millis = u32::try_from(lost_after.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(&stream, millis)?;
    Ok(stream)
}
