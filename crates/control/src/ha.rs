//! High availability: protected VMs whose host has failed start on other hosts (docs/ha.md).
//!
//! [`terms`] has what the judges know about the terms of hosts. [`restarts`] starts the VMs of
//! ended terms, [`admission`] checks that they would fit, [`troubles`] collects what operators must
//! know. Requests about VMs use this folder; it knows neither them nor moves.

pub(crate) mod admission;
pub(crate) mod restarts;
pub(crate) mod terms;
pub(crate) mod troubles;
