//! The orders of the guard ([`crate::ha`]), carried out on this host's VMs.
