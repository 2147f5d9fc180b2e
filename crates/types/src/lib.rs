//! Plain data that the API, records and reports share: faults and their remedies.
//! It owns the shape of that data: names, units, JSON keys and textual forms.
//! It contains no engine and no I/O, and reads no clock.
//! It may use serde and the standard library, and no other crate of the project.
//! Every other crate may use it.

mod fault;

pub use fault::Fault;
