//! One manager of several leads. The others follow the store, and one of them takes over when nobody leads.
//!
//! It owns the campaign, what exists while this manager leads, and the order in which what is kept is read. It may call every resource;
//! no resource calls it.

pub(crate) mod campaign;
#[cfg(test)]
mod plans_tests;
pub(crate) mod prune;
pub(crate) mod standby;
