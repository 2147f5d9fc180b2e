//! What the emulator is told to do while it runs: a datagram each, as JSON, on a socket of its own.

use std::os::unix::net::UnixDatagram;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Longest order.
const ORDER_BYTES: usize = 4096;

/// Something to do once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Changes a byte in the next train of TCP packets that a host sends with at least so many bytes of payload, in its middle; TCP's
    /// checksum is made to fit, so that nobody below the application notices.
    CorruptNext {
        /// The host's network namespace.
        namespace: String,
        /// The least payload.
        payload_bytes: usize,
    },
}

/// Gives an order to the emulator that listens on `socket`.
///
/// # Errors
/// None does.
pub fn give(socket: &Path, order: &Order) -> Result<()> {
    let ours = UnixDatagram::unbound()?;
    ours.send_to(&serde_json::to_vec(order)?, socket)
        .with_context(|| format!("the link emulator takes no orders on {}", socket.display()))?;
    Ok(())
}

/// Takes the next order; none: there is none, or none that can be read.
pub(super) fn take(orders: &UnixDatagram) -> Option<Order> {
    let mut bytes = [0; ORDER_BYTES];
    let length = orders.recv(&mut bytes).ok()?;
    serde_json::from_slice(&bytes[..length]).ok()
}
