//! What is known and what is planned: hosts, VMs, networks and datastores, as agents report them and as operators plan them.
//!
//! [`inventory`] is plain data with rules of its own, [`state`] is that data behind its lock, with the events of each change. It owns what
//! every manager knows, and calls the journal and the planner alone. A change comes from an agent's report or from a record of the store.

pub(crate) mod bounds;
pub mod inventory;
pub(crate) mod names;
pub(crate) mod peers_digest;
pub(crate) mod planner_input;
pub(crate) mod rule_state;
pub(crate) mod state;
pub(crate) mod text;
