//! The manager's decisions: which VM moves where and when, how a host is emptied, and what a CPU
//! baseline means.
//!
//! Each decision is a function of the caller's facts, including the time. Nothing here does I/O,
//! reads a clock or keeps state between calls, so that property tests can try any cluster. The
//! crate uses the API's types. It does not know the manager or its store.
//!
//! - [`queue`]: which moves start now, what the others wait for, and each job's life through
//!   crashes.
//! - [`placement`]: where a VM goes: a ranking of hosts, with reasons.
//! - [`drain`]: which VM goes where when a host is emptied, how long it takes, and the undo.
//! - [`disk_drain`]: which disk goes where when a datastore is emptied.
//! - [`failover`]: where protected VMs restart, and whether they fit after hosts fail.
//! - [`baseline`]: what the CPUs of hosts have in common, which hosts fall short of a baseline,
//!   which VMs must restart.
//! - [`alarms`]: what needs an operator's attention, and since when.
//! - [`words`]: formats of figures and lists in reasons.

pub mod alarms;
pub mod baseline;
pub mod disk_drain;
pub mod drain;
pub mod failover;
pub mod placement;
pub mod queue;
pub mod words;
