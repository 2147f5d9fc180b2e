//! Asks the lab's guests over the network, from inside the client's namespace as their users do.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

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

/// Connects to the control port of the guest at `address`.
pub(crate) fn connect(namespace: &str, address: IpAddr, limit: Duration) -> Result<TcpStream> {
    let socket = SocketAddr::new(address, CONTROL_PORT);
    let connect = || TcpStream::connect_timeout(&socket, limit);
    in_namespace(namespace, connect)?
        .with_context(|| format!("cannot connect to the guest at {socket}"))
}
