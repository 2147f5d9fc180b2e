//! Storage of this manager's records: under its leadership, with changes in doubt when an answer is
//! lost, and with measured times.
//!
//! This module owns the revisions that were last read and written. Only the resource of a record
//! knows its meaning.

pub(crate) mod keeper;
mod logs;
pub(crate) mod measured;
pub(crate) mod planned;
pub(crate) mod planning;
pub(crate) mod term;
pub(crate) mod turns;
mod unsure;
