//! Parts of the lab's guest that do not depend on being init: memory pages and disks that can be
//! checked, the workloads that dirty pages, and the control protocol (types and client).
//!
//! The binary of this package is the guest's init. This library knows no kernel and no network
//! device, so tests, benchmarks and the lab use the very code that runs in the guest.

pub mod control;
pub mod disks;
pub mod kernels;
pub mod ledger;
pub mod memory;
pub mod options;
pub mod pattern;
pub mod workload;
