//! High availability: protected VMs whose host has failed start on other hosts (docs/ha.md).
//!
//! [`judges`] has a judge for each host while this manager leads: it fetches and answers renewals,
//! reads heartbeats and ends the terms of silent hosts. [`fencing`] cuts their power. [`terms`] has
//! what is known of the terms; [`restarts`] starts the VMs of ended ones, [`admission`] checks that
//! they would fit, [`own`] shows VMs that agents restart among themselves, [`troubles`] collects
//! what operators must know. Requests about VMs use this folder; it knows neither them nor moves.

pub(crate) mod admission;
pub(crate) mod fencing;
mod heartbeats;
pub(crate) mod http;
pub(crate) mod judges;
pub(crate) mod own;
pub(crate) mod record;
mod renewals;
pub(crate) mod restarts;
pub(crate) mod seat;
mod status;
pub(crate) mod terms;
#[cfg(test)]
mod tests;
pub(crate) mod troubles;
mod watch;
