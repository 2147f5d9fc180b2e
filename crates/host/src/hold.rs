//! The agent's own hold points ([`godwit_migration::hold`]): before and after each write of a
//! record. The migration drivers have others.

use godwit_migration::hold;

/// Reaches a hold point. Other tasks may use the thread while the point is held.
pub(crate) fn hold(what: &str) {
    if hold::is_on() {
        tokio::task::block_in_place(|| hold::at("host", what));
    }
}
