//! Rate limits: each caller has a bucket of requests that is refilled continuously. Requests of
//! unauthenticated callers are counted by network, in a smaller bucket, so that guessing tokens is
//! hopeless.

use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;

use godwit_api::control::{Problem, ProblemCode};
use governor::{DefaultKeyedRateLimiter, Quota};

/// Requests per second of a caller; also the largest burst.
const OF_CALLER: NonZeroU32 = NonZeroU32::new(200).unwrap();
/// Requests per second of a network with unauthenticated callers.
const OF_NOBODY: NonZeroU32 = NonZeroU32::new(20).unwrap();

/// Buckets of callers and networks.
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
    /// Takes one request from the bucket of a caller or, if the caller is unauthenticated, from
    /// that of its address. Root's own socket has no limit.
    ///
    /// # Errors
    /// [`ProblemCode::TooManyRequests`]: the bucket is empty.
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
        let detail = format!("more than {most} requests per second");
        Err(Problem::new(
            ProblemCode::TooManyRequests,
            detail,
            "try again in a second, and less often",
        ))
    }

    /// Removes the buckets of idle callers and networks.
    pub(crate) fn forget_idle(&self) {
        self.callers.retain_recent();
        self.nobody.retain_recent();
    }
}

/// Returns the network of a sender: an IPv6 host can use every address of its /64.
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
    fn each_caller_has_its_own_bucket() {
        let rates = Rates::default();
        let from = Some(IpAddr::from([10, 0, 0, 1]));
        let passed = (0..1000).filter(|_| rates.check(None, from).is_ok()).count();
        // The bucket is refilled during the test.
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
