//! Orders to the running emulator: one datagram each, as JSON, on a socket of its own.

use std::os::unix::net::UnixDatagram;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

const ORDER_BYTES: usize = 4096;

/// Action to perform once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Changes a byte in the middle of the next train of TCP packets that a host sends with at
    /// least so many bytes of payload. TCP's checksum is adapted, so that only the application can
    /// notice.
    CorruptNext {
        /// The host's network namespace.
        namespace: String,
        payload_bytes: usize,
    },
}

/// Sends an order to the emulator that listens on `socket`.
///
/// # Errors
/// No emulator listens.
pub fn give(socket: &Path, order: &Order) -> Result<()> {
    let ours = UnixDatagram::unbound()?;
    ours.send_to(&serde_json::to_vec(order)?, socket)
        .with_context(|| format!("the link emulator takes no orders on {}", socket.display()))?;
    Ok(())
}

/// Takes the next order. Returns `None` if there is none, or none that is readable.
pub(super) fn receive(orders: &UnixDatagram) -> Option<Order> {
    let mut bytes = [0; ORDER_BYTES];
    let length = orders.recv(&mut bytes).ok()?;
    serde_json::from_slice(&bytes[..length]).ok()
}
