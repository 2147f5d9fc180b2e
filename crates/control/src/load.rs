//! Load of VMs, hosts, datastores and the cluster: the latest samples of the hosts' agents, and
//! their history.
//!
//! This folder owns `state_dir/load`: ring files with an hour in periods of five seconds, a day in
//! minutes and a year in hours ([`rings`]). They are the manager's own and not in its store: each
//! manager follows all agents, so the one that takes over has its own. It calls the inventory
//! alone.
//!
//! A sample passes `service` (called by `agents::following`), then in the thread of `archive`:
//! `measured`, `series`, `files`. A request passes `http`, `service`, the thread, and `span`.

mod archive;
mod figures;
mod files;
pub(crate) mod http;
#[cfg(test)]
mod http_tests;
mod latest;
mod measured;
mod rings;
mod series;
mod service;
mod span;

pub(crate) use rings::read_any;
pub(crate) use service::Loads;
