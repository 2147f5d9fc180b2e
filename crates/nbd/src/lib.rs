//! Client of NBD servers (the NBD project's doc/proto.md, fixed newstyle): reads and writes disks,
//! and asks which parts of them are in use or were changed.
//!
//! Knows no sockets, no QEMU and no VMs. The server is untrusted: lengths are bounded, each answer
//! must be that of the request, and every loop ends, whatever it says.

mod address;
mod error;
mod export;
mod handshake;
mod words;

pub use address::{NbdAddress, parse_nbd};
pub use error::NbdError;
pub use export::{DIRTY, Extent, HOLE, MOST_EXTENTS, NbdExport, TOP_LAYER, ZERO};

#[cfg(test)]
mod tests;
