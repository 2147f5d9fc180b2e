//! The agent's own hold points ([`godwit_migration::hold`]), beside those of the drivers: before and after what it writes down.

use godwit_migration::hold;

/// Comes to a point. The task's thread is given up to others for as long as the point is held.
pub(crate) fn hold(what: &str) {
    if hold::is_on() {
        tokio::task::block_in_place(|| hold::at("host", what));
    }
}
