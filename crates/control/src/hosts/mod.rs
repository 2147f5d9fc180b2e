//! Hosts: how they are added, changed, forgotten, and how they join with a token.
//!
//! It owns the record of what is planned of a host. It calls the cluster, agents, access (to revoke a host's certificates), and moves and
//! drains, which keep a host from being forgotten.

pub(crate) mod http;
pub(crate) mod in_use;
pub(crate) mod join;
pub(crate) mod record;
