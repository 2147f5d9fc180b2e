//! Against the QEMU that is installed. Guests are a boot sector: it counts in memory and prints a dot now and then.

// A test's helpers may panic as its tests do.
#![allow(clippy::unwrap_used, clippy::panic)]

mod bench;
mod cpu;
mod migration;
mod start;
