//! Count of the pings on their way, which bounds the answers that can wait for the driver.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::drive::inbox::MOST_UNANSWERED_PINGS;

#[derive(Debug, Default)]
pub(crate) struct Pings {
    /// Number of pings that were not answered yet.
    unanswered: AtomicU64,
    /// Number of pings whose answers the driver has not taken yet.
    untaken_answers: AtomicU64,
}

impl Pings {
    /// Counts a ping that is about to be sent. Returns false if [`MOST_UNANSWERED_PINGS`] are on
    /// their way: it must not be sent.
    pub(crate) fn asks(&self) -> bool {
        // Only the driver sends pings and takes the answers.
        if self.untaken_answers.load(Ordering::Relaxed) >= MOST_UNANSWERED_PINGS {
            return false;
        }
        self.untaken_answers.fetch_add(1, Ordering::Relaxed);
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Notes that the driver has taken an answer from its inbox.
    pub(crate) fn took_answer(&self) {
        let less = |untaken: u64| untaken.checked_sub(1);
        let _ = self.untaken_answers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Notes the answer to a ping. Returns false if no ping was sent.
    pub(crate) fn answered(&self) -> bool {
        self.unanswered
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |pings| pings.checked_sub(1))
            .is_ok()
    }
}
