//! How this manager keeps records in the store: under its leadership, in doubt when an answer is lost, timed.
//!
//! It owns the revisions that were read and written last. What a record means its resource knows, and its resource alone.

pub(crate) mod keeper;
pub(crate) mod measured;
pub(crate) mod planned;
pub(crate) mod planning;
pub(crate) mod term;
pub(crate) mod turns;
