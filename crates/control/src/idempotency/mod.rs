//! Requests with an idempotency key: a request that is repeated under its key is carried out once, and answered as the first time.
//!
//! [`keys`] decides, pure; `kept` has the keys of each caller in the store. It calls storage alone.

pub(crate) mod kept;
pub(crate) mod keys;
pub(crate) mod record;
