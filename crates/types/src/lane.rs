//! A path between two hosts.

use std::net::{IpAddr, SocketAddr};

/// Path between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The local address of its streams; `None`: the kernel chooses.
    pub from: Option<IpAddr>,
    /// The destination's address.
    pub to: SocketAddr,
}

impl std::fmt::Display for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.from {
            Some(from) => write!(f, "{from} → {}", self.to),
            None => write!(f, "→ {}", self.to),
        }
    }
}
