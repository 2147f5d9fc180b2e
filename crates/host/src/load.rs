//! Load of this host and its VMs over time: counters of the kernel and of QEMU are read in
//! intervals ([`proc`]), and the differences of two readings are a sample ([`Sampler`]).
//!
//! `agent/load.rs` knows which VMs there are, reads, and keeps the newest sample here. Nothing of
//! this folder knows the agent. A counter that goes back, a process that ends and a QEMU that
//! stays silent cost figures of one sample at most.

pub(crate) mod proc;
mod reading;
mod sampler;
mod silence;

use std::sync::Arc;

use godwit_api::LoadSample;
use parking_lot::Mutex;

pub(crate) use reading::{DiskReading, HostReading, Process, Reading, Traffic, VmReading};
pub(crate) use sampler::Sampler;
pub(crate) use silence::Silences;

/// The newest sample; none until two readings were taken.
#[derive(Debug, Default)]
pub(crate) struct NewestLoad(Mutex<Option<Arc<LoadSample>>>);

impl NewestLoad {
    pub(crate) fn set(&self, sample: LoadSample) {
        *self.0.lock() = Some(Arc::new(sample));
    }

    pub(crate) fn get(&self) -> Option<Arc<LoadSample>> {
        self.0.lock().clone()
    }
}
