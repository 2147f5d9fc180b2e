//! Past events: the stream of changes that clients follow, and the audit log.
//!
//! This module owns the ring of events and the keys of the audit log. It calls the store alone, and
//! does not know the meaning of its entries.

pub mod audit;
pub(crate) mod events;
