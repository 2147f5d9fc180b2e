//! What has happened: the events that everybody follows, and the audit log of who did what.
//!
//! It owns the ring of events and the keys of the audit log. It calls the store alone, and knows nothing of what its entries mean.

pub mod audit;
pub(crate) mod events;
