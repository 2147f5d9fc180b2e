//! Numbers that a seed draws.

/// `SplitMix64` (Steele, Lea, Flood 2014): each seed its own sequence.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `bound`, which is not zero.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next()).unwrap_or(0) % bound
    }

    /// One that could be right as often as one that can't.
    pub(super) fn number(&mut self) -> u64 {
        match self.below(3) {
            0 => self.next() % 8,
            1 => self.next() % 40_000,
            _ => self.next(),
        }
    }
}
