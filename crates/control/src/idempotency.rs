//! Idempotency keys: a repeated request with the same key is carried out once and gets the first
//! response again.
//!
//! [`keys`] decides and is pure; `kept` manages each caller's keys in the store. This module calls
//! storage alone.

pub(crate) mod kept;
pub(crate) mod keys;
pub(crate) mod record;
