//! Client of NBD servers (the NBD project's doc/proto.md, fixed newstyle): reads and writes disks,
//! and asks which parts of them are in use or were changed. Also a server that takes writes.
//!
//! Knows no sockets, no QEMU and no VMs. The other side is untrusted: lengths are bounded, each
//! answer must be that of the request, and every loop ends, whatever it says.

mod address;
mod error;
mod export;
mod handshake;
mod server;
mod words;

pub use address::{NbdAddress, parse_nbd};
pub use error::NbdError;
pub use export::{DIRTY, Extent, HOLE, MOST_EXTENTS, NbdExport, TOP_LAYER, ZERO};
pub use server::{NbdRequest, NbdServer};

#[cfg(test)]
mod tests;
