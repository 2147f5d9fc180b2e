//! The engines that move a VM, at both of its ends: the drivers of the external engine, bound to
//! QEMU, and QEMU's own migration as the engine of comparison.

mod arriving_disks;
mod begin;
mod cut;
mod disks;
mod dry_run;
mod foresight;
mod image_cache;
mod incoming;
mod outgoing;
mod page_in;
mod qemu_destination;
mod qemu_engine;
mod qemu_source;
mod vcpu_quota;
mod with_disks;

pub(crate) use arriving_disks::{accept_disks, could_disks_arrive};
pub(crate) use begin::migrate;
pub(crate) use dry_run::dry_run;
pub(crate) use incoming::{could_arrive, prepare, resume};
pub(crate) use page_in::session as page_in_session;
