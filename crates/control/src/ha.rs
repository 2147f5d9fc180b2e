//! High availability: protected VMs of a dead host start elsewhere. docs/ha.md explains it.

pub(crate) mod fencing;
