//! Asks the lab's guests over the network, from inside the client's namespace as their users do.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use godwit_guest::control::{Answer, CONTROL_PORT, Request, ask};

use crate::namespace::in_namespace;

/// Longest time that a guest may take to accept a connection.
pub(crate) const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Longest time that a guest may take over an answer: `verify` reads all of its memory, under TCG
/// at some 100 MiB/s.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);

/// Sends one request to the guest at `address` and returns its answer.
///
/// # Errors
/// The namespace cannot be entered, or the guest does not answer in time.
pub fn ask_guest(namespace: &str, address: IpAddr, request: &Request) -> Result<Answer> {
    let mut stream = connect(namespace, address, CONNECT_LIMIT)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    ask(&mut stream, request).with_context(|| format!("the guest at {address} gave no answer"))
}

/// Connects to the control port of the guest at `address`, within `limit`.
///
/// The kernel's search for the guest's MAC address may have begun while the guest was paused. If
/// it ends without an answer, another one begins.
pub(crate) fn connect(namespace: &str, address: IpAddr, limit: Duration) -> Result<TcpStream> {
    let socket = SocketAddr::new(address, CONTROL_PORT);
    let deadline = Instant::now() + limit;
    let connect = || {
        let mut left = limit;
        loop {
            let connected = TcpStream::connect_timeout(&socket, left);
            left = deadline.saturating_duration_since(Instant::now());
            match connected {
                Err(error) if error.kind() == ErrorKind::HostUnreachable && !left.is_zero() => {}
                connected => return connected,
            }
        }
    };
    in_namespace(namespace, connect)?
        .with_context(|| format!("cannot connect to the guest at {socket}"))
}
