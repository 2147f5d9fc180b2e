//! UDP echo on port 7: every datagram is returned unchanged, so that an outside client can measure
//! the VM's blackout.
//!
//! There is one socket per address family. A common socket would pass each IPv4 datagram through
//! the IPv6 code as well. An emulated guest translates anew the code that it runs first after a
//! move, so a longer path to the answer is a longer blackout.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddrV6, UdpSocket},
    sync::Arc,
};

use anyhow::Context;
use godwit_guest::control::ECHO_PORT;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::guest::Guest;

/// Size of the largest datagram.
const DATAGRAM_BYTES: usize = 1 << 16;

/// Answers IPv4 forever.
pub(crate) fn serve_v4(_: &Arc<Guest>) -> anyhow::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, ECHO_PORT)).context("UDP port 7")?;
    answer(&socket)
}

/// Answers IPv6 forever.
pub(crate) fn serve_v6(_: &Arc<Guest>) -> anyhow::Result<()> {
    let made = rustix::net::socket_with(
        AddressFamily::INET6,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    );
    let Ok(socket) = made else {
        // A kernel without IPv6 has no peers to answer.
        loop {
            std::thread::park();
        }
    };
    sockopt::set_ipv6_v6only(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, ECHO_PORT, 0, 0))
        .context("UDP port 7, IPv6")?;
    answer(&UdpSocket::from(socket))
}

fn answer(socket: &UdpSocket) -> anyhow::Result<()> {
    let mut datagram = vec![0u8; DATAGRAM_BYTES];
    loop {
        // An error that came back by ICMP concerns one sender; serve the others.
        if let Ok((length, sender)) = socket.recv_from(&mut datagram) {
            socket.send_to(&datagram[..length], sender).ok();
        }
    }
}
