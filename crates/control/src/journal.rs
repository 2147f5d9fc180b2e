//! Past events: the stream of changes that clients follow, the journal of what happened in the
//! cluster, and the audit log of requests.
//!
//! This module owns the ring of events and the keys of both tables. It calls the store alone, and
//! does not know the meaning of its entries.

pub mod audit;
pub mod entries;
pub(crate) mod events;
pub mod newest_first;
pub(crate) mod requester;
pub(crate) mod throttle;
