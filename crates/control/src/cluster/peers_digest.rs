//! Digest of the other hosts that an agent knows. It shows whether the agent has the right list.

use std::hash::{DefaultHasher, Hash, Hasher};

/// Returns the digest of a list of hosts, independent of their order. The digest of the list
/// without one host is the difference of the list's digest and that host's.
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
    fn a_digest_ignores_order_and_subtraction_removes_a_host() {
        let (a, b, c) = (("a", "http://a:1"), ("b", "http://b:1"), ("c", "http://c:1"));
        assert_eq!(digest([a, b, c]), digest([c, a, b]));
        assert_eq!(digest([a, b, c]).wrapping_sub(digest([b])), digest([a, c]));
        assert_ne!(digest([a, b]), digest([a, ("b", "http://b:2")]));
        assert_ne!(digest([("ab", "c")]), digest([("a", "bc")]));
    }
}
