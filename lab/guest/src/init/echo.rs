//! UDP echo on port 7: every datagram goes back as it came, which lets a client outside see the VM's blackout.

use std::{
    net::{Ipv4Addr, Ipv6Addr, UdpSocket},
    sync::Arc,
};

use anyhow::Context;
use godwit_guest::control::ECHO_PORT;

use crate::guest::Guest;

/// Answers for ever.
pub(crate) fn serve(_: &Arc<Guest>) -> anyhow::Result<()> {
    // One socket for both families; IPv4 alone where the kernel has no IPv6.
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, ECHO_PORT))
        .or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, ECHO_PORT)))
        .context("UDP port 7")?;
    let mut datagram = vec![0u8; 1 << 16];
    loop {
        // An error that came back by ICMP belongs to one sender: the others go on.
        if let Ok((length, sender)) = socket.recv_from(&mut datagram) {
            socket.send_to(&datagram[..length], sender).ok();
        }
    }
}
