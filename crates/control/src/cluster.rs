//! The cluster's state: hosts, VMs, networks and datastores, as agents report them and as operators
//! plan them.
//!
//! [`inventory`] is plain data with its own rules. [`state`] holds that data behind a lock and
//! publishes an event for each change. Changes come from agents' reports and from records of the
//! store. Every manager has this state; the module calls only the journal and the planner.

pub(crate) mod bounds;
pub mod inventory;
pub(crate) mod names;
pub(crate) mod nics;
pub(crate) mod peers_digest;
pub(crate) mod planner_input;
pub(crate) mod rule_state;
pub(crate) mod state;
pub(crate) mod text;
