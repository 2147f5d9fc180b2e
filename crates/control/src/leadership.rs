//! Leadership: one of several managers leads. The others follow the store, and one of them takes
//! over when there is no leader.
//!
//! This module owns the campaign, the state that exists only while this manager leads, and the
//! order in which records are read. It may call every resource; no resource calls it.

pub(crate) mod campaign;
#[cfg(test)]
mod plans_tests;
pub(crate) mod prune;
pub(crate) mod standby;
