//! How often somebody may ask: each caller has a bucket of requests that fills again by the second.
//! Requests of nobody are counted by network,
//! in a smaller bucket: who tries tokens out gets nowhere.

use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;

use godwit_api::control::{Problem, ProblemCode};
use governor::{DefaultKeyedRateLimiter, Quota};

/// Requests a second of a caller, and as many at once.
const OF_CALLER: NonZeroU32 = NonZeroU32::new(200).unwrap();
/// Requests a second of a network whose sender is not known.
const OF_NOBODY: NonZeroU32 = NonZeroU32::new(20).unwrap();

/// The buckets.
#[derive(Debug)]
pub(crate) struct Rates {
    callers: DefaultKeyedRateLimiter<String>,
    nobody: DefaultKeyedRateLimiter<IpAddr>,
}

impl Default for Rates {
    fn default() -> Rates {
        Rates {
            callers: DefaultKeyedRateLimiter::keyed(Quota::per_second(OF_CALLER)),
            nobody: DefaultKeyedRateLimiter::keyed(Quota::per_second(OF_NOBODY)),
        }
    }
}

impl Rates {
    /// Whether one more request may come, of that caller or, where it is nobody's, from that
    /// address. Root's own socket has no limit.
    pub(crate) fn check(&self, caller: Option<&str>, from: Option<IpAddr>) -> Result<(), Problem> {
        let is_within = match (caller, from) {
            (_, None) => true,
            (Some(caller), Some(_)) => self.callers.check_key(&caller.to_owned()).is_ok(),
            (None, Some(from)) => self.nobody.check_key(&network(from)).is_ok(),
        };
        if is_within {
            return Ok(());
        }
        let most = if caller.is_some() { OF_CALLER } else { OF_NOBODY };
        let detail = format!("more than {most} requests a second");
        Err(Problem::new(
            ProblemCode::TooManyRequests,
            detail,
            "ask again in a second, and less often",
        ))
    }

    /// Forgets those who have not asked lately.
    pub(crate) fn forget_idle(&self) {
        self.callers.retain_recent();
        self.nobody.retain_recent();
    }
}

/// What stands for all addresses that one sender may have: an IPv6 host takes each of its /64 as it
/// likes.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_bucket_of_its_own() {
        let rates = Rates::default();
        let from = Some(IpAddr::from([10, 0, 0, 1]));
        let passed = (0..1000).filter(|_| rates.check(None, from).is_ok()).count();
        // It fills again while it is emptied.
        assert!((20..1000).contains(&passed), "{passed}");
        assert!(rates.check(Some("monitoring"), from).is_ok());
        assert!(rates.check(None, Some(IpAddr::from([10, 0, 0, 2]))).is_ok());
        assert!((0..1000).all(|_| rates.check(Some("root"), None).is_ok()));
    }
    #[test]
    fn a_network_is_one_sender() {
        let of = |address: &str| network(address.parse().unwrap());
        assert_eq!(of("2001:db8:0:1::1"), of("2001:db8:0:1:ffff::2"));
        assert_ne!(of("2001:db8:0:1::1"), of("2001:db8:0:2::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
