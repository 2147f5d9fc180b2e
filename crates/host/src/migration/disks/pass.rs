//! Rounds that together send what was left when the first of them began. Pure.
//!
//! With bitmaps, a round sends all that is left. With a mirror, a round sends what has arrived:
//! until the mirror has copied the disks, many rounds are one pass, and only what is left after it
//! says whether passes become shorter.

use godwit_migration::disks::RoundSent;

/// A pass in progress.
#[derive(Debug, Default)]
pub(super) struct Pass {
    planned_bytes: u64,
    sent: Option<RoundSent>,
}

impl Pass {
    /// Begins a pass with a round, unless one is in progress. `rest_bytes`: what the round sends.
    /// `behind_bytes`: what else is left.
    pub(super) fn begins(&mut self, rest_bytes: u64, behind_bytes: u64) {
        if self.sent.is_none() {
            // Without anything else, the round is the pass, also if a cut makes it shorter.
            let is_one = behind_bytes == 0;
            self.planned_bytes = if is_one { 0 } else { rest_bytes.saturating_add(behind_bytes) };
        }
    }

    /// Adds a round.
    pub(super) fn add(&mut self, round: &RoundSent) {
        let all = self.sent.get_or_insert_default();
        all.bytes = all.bytes.saturating_add(round.bytes);
        all.zero_bytes = all.zero_bytes.saturating_add(round.zero_bytes);
        all.referenced_bytes = all.referenced_bytes.saturating_add(round.referenced_bytes);
        all.wire_bytes = all.wire_bytes.saturating_add(round.wire_bytes);
        all.took += round.took;
    }

    /// Returns what the pass has sent, and ends it, if its rounds have sent what was planned, or if
    /// `is_complete`: nothing but the next round is left.
    pub(super) fn take_whole(&mut self, is_complete: bool) -> Option<RoundSent> {
        let planned = self.planned_bytes;
        self.sent.take_if(|sent| is_complete || sent.bytes >= planned)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn round(bytes: u64) -> RoundSent {
        RoundSent { bytes, took: Duration::from_millis(bytes), ..RoundSent::default() }
    }

    #[test]
    fn a_round_that_sends_all_is_a_pass() {
        let mut pass = Pass::default();
        assert_eq!(pass.take_whole(true), None);
        pass.begins(100, 0);
        // Part of it was on the destination's disk before a cut.
        pass.add(&round(60));
        assert_eq!(pass.take_whole(false), Some(round(60)));
        assert_eq!(pass.take_whole(true), None);
    }

    #[test]
    fn rounds_of_a_mirror_are_one_pass_until_they_have_sent_what_was_left() {
        let mut pass = Pass::default();
        pass.begins(10, 90);
        pass.add(&round(10));
        assert_eq!(pass.take_whole(false), None);
        pass.begins(80, 90);
        pass.add(&round(80));
        assert_eq!(pass.take_whole(false), None);
        pass.begins(30, 9);
        pass.add(&round(30));
        assert_eq!(pass.take_whole(false), Some(round(120)));
        // Holes take the rest of the way.
        pass.begins(10, 90);
        pass.add(&round(10));
        assert_eq!(pass.take_whole(true), Some(round(10)));
    }
}
