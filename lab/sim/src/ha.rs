//! Hosts whose guest starts elsewhere after a failure. [`godwit_ha`]'s guards and judges decide. A
//! [`World`](world::World) adds clocks, networks, datastores, watchdogs, fencing devices and the
//! manager's part, one step at a time.
//!
//! `tests/ha_model.rs` checks every order of steps and faults (stateright), [`simulate()`] runs
//! long random ones by seed with finer time.

mod calm;
mod choices;
mod host;
mod rules;
#[cfg(test)]
mod scenarios;
mod simulate;
mod world;

pub use choices::Choice;
pub use rules::Rule;
pub use simulate::{Figures, simulate};
pub use world::{Limits, Options, World};
