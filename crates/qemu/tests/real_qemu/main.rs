//! Tests with the installed QEMU. Guests are a boot sector that counts in memory and prints a dot
//! now and then.

// Test helpers may panic like tests.
#![allow(clippy::unwrap_used, clippy::panic)]

mod bench;
mod cpu;
mod migration;
mod start;
