//! Paths between two hosts. A lane is a pair of addresses with any number of TCP streams of the
//! migration protocol. Calls block; the crate is made for plain threads.
//!
//! Pages leave from a copy, because the guest writes while its memory is read, and the checksum
//! must cover the bytes sent. Without TLS, long runs of pages go from the socket directly to guest
//! memory and are checksummed there. This crate knows frames and sockets; the migration knows what
//! a message means.

mod codec;
#[cfg(test)]
mod corruption_tests;
mod delta;
#[cfg(test)]
mod disk_tests;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod hashing;
mod interrupt;
#[cfg(test)]
mod lane_tests;
mod link;
pub mod pacing;
mod probe;
mod receiver;
mod reference;
mod sender;
mod socket;
#[cfg(test)]
mod test_hosts;
mod unit;

pub use codec::{Compressor, MAX_PIECE_BYTES, Unpacker, try_codec};
pub use delta::{is_sampled, xor};
pub use error::LaneError;
pub use hashing::{Page, hash_page, hash_pages, pages_of};
pub use interrupt::Interrupt;
pub use probe::connect_sized;
pub use receiver::{Incoming, StreamReceiver};
pub use reference::Knowledge;
pub use sender::{DiskPart, StreamSender};
pub use socket::{
    CONNECT_LIMIT, Carries, Near, SAFE_SEGMENT_BYTES, Stream, accept, connect, listen, pair,
};
pub use unit::{
    Comparing, Differing, ENOUGH_FOUND, Effort, Hashing, Packing, Probed, Referring, Tally,
    UnitPages, UnitSent,
};
