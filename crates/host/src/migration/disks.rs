//! Disks that travel with a VM, at both ends of a migration. The engine that moves their content is
//! in [`godwit_migration::disks`]; here it meets QEMU, files and the agents' API.

mod connecting;
pub(super) mod departure;
mod door;
mod exports;
mod figures;
pub(super) mod making;
mod mirror;
mod pass;
pub(super) mod patience;
pub(super) mod plan;
mod ranges;
mod rounds;
pub(super) mod source;
mod stage;
mod tracking;
mod wires;
