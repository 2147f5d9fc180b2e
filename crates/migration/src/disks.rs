//! Disks that travel with a VM: rounds over them at the source, their writes at the destination,
//! and the decision when the rest is small enough for the pause. No QEMU and no files: both ends
//! read and write disks through traits.
//!
//! **Order of writes.** Streams write independently of each other, so two contents of the same
//! bytes must never be on their way at once. A round ends only when all of it is on the
//! destination's disks; a range that is sent again belongs to the same round, and whatever the
//! guest wrote meanwhile is in the next one. A stream that breaks may still have bytes on their
//! way, so the round also waits until the destination has confirmed that it reads no more of that
//! stream. Without that confirmation the round is cut, and all streams are closed: the destination
//! must end the reading of all of them before it accepts others.
//!
//! **References.** The first round of a connection may name content by its hash where the
//! destination probably has it. The destination writes what it finds, verified, and names the rest
//! as missing before it answers the next mark. What is missing was not written: it belongs to the
//! same round and is sent with its content. Later rounds have what the guest has just written, and
//! refer to nothing.

mod access;
mod at_once;
mod bounded_reader;
mod convergence;
mod guesses;
mod lookup;
mod marks;
mod parts;
mod queue;
mod range;
mod receiving;
mod referring;
mod sending;
mod streams;
#[cfg(test)]
mod tests;

pub use access::{DiskReader, DiskWriter, ImageReader};
pub use at_once::at_once;
pub use bounded_reader::BoundedReader;
pub use convergence::{Convergence, Next};
pub use lookup::Lookup;
pub use range::{CHUNK_BYTES, DiskRange};
pub use receiving::{StreamEnd, receive_disks};
pub use sending::DiskSent;
pub use streams::{DiskStreams, RoundCut, RoundSent};
