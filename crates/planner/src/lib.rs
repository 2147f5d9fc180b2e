//! The manager's decisions: who moves where and when, how a host is emptied, what a CPU baseline means.
//!
//! Each is a function of facts that the caller gives, the time included. Nothing here does I/O, reads a clock or keeps state between
//! calls, so that property tests can try any cluster. It knows the API's types, and neither the manager nor its store.
//!
//! | module | decides |
//! |---|---|
//! | [`queue`] | which moves start now, what the others wait for, and each job's life through crashes |
//! | [`placement`] | where a VM goes: a ranking of hosts, with reasons |
//! | [`drain`] | who goes where when a host is emptied, how long it takes, and the way back |
//! | [`baseline`] | what the CPUs of hosts have in common, who falls short of a baseline, which VMs must restart |
//! | [`words`] | figures and lists in the texts of reasons |

pub mod baseline;
pub mod drain;
pub mod placement;
pub mod queue;
pub mod words;
