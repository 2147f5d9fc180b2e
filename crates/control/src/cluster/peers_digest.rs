//! A digest of the other hosts that an agent knows, by which it shows whether that list is the right one.

use std::hash::{DefaultHasher, Hash, Hasher};

/// A digest of a list of hosts that does not depend on their order; that of a list without one of them is the difference.
pub(crate) fn digest<'a>(peers: impl IntoIterator<Item = (&'a str, &'a str)>) -> u64 {
    let one = |(name, address): (&str, &str)| {
        let mut hasher = DefaultHasher::new();
        (name, address).hash(&mut hasher);
        hasher.finish()
    };
    peers.into_iter().map(one).fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_that_of_the_set_and_loses_one_by_subtraction() {
        let (a, b, c) = (("a", "http://a:1"), ("b", "http://b:1"), ("c", "http://c:1"));
        assert_eq!(digest([a, b, c]), digest([c, a, b]));
        assert_eq!(digest([a, b, c]).wrapping_sub(digest([b])), digest([a, c]));
        assert_ne!(digest([a, b]), digest([a, ("b", "http://b:2")]));
        assert_ne!(digest([("ab", "c")]), digest([("a", "bc")]));
    }
}
