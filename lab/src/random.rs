//! Random numbers drawn from a seed.

/// `SplitMix64` (Steele, Lea, Flood 2014): each seed has its own sequence.
#[derive(Debug, Clone)]
pub struct Random(u64);

/// Increment from number to number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Computes the output function: numbers that differ a little become numbers that differ a lot.
fn mixed(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Random {
    /// Creates the sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next number.
    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mixed(self.0)
    }

    /// Returns a number below `bound`, which is not zero.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next()).unwrap_or(0) % bound
    }

    /// Returns true in half of all cases.
    pub fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }

    /// Returns a number that is equally often plausible and impossible.
    pub fn number(&mut self) -> u64 {
        match self.below(3) {
            0 => self.next() % 8,
            1 => self.next() % 40_000,
            _ => self.next(),
        }
    }

    /// Returns so many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 8);
        while bytes.len() < count {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_splitmix64s() {
        // The reference implementation's first numbers of the seed 1234567.
        let mut random = Random::new(1_234_567);
        let numbers: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(
            numbers,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
        assert_eq!(Random::new(1).bytes(11).len(), 11);
    }
}
