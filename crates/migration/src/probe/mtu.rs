//! Size of packets on a lane: either full-size segments arrive, or the sizes that do are searched.

use std::time::Duration;

use godwit_lanes::{Incoming, SAFE_SEGMENT_BYTES};
use godwit_types::Lane;
use godwit_wire::Message;

use super::measure::{Opened, Prober};
use crate::drive::lane_failure;
use crate::failure::{Failure, FailureCode};
use godwit_types::probe::MtuProbe;

/// Bytes of the headers of IPv4 and TCP, without options.
const HEADERS_V4: u32 = 40;
/// Bytes of the headers of IPv6 and TCP, without options.
const HEADERS_V6: u32 = 60;
/// Larger than any wire's packets. Interfaces with a larger MTU (loopback) never lead to a wire.
const LARGEST_WIRE_MTU: u32 = 9216;
/// The length of an IP packet has 16 bits.
const LARGEST_PACKET: u32 = 65_535;
/// Time limit for the answer to a burst of full-size segments, in addition to round trips: longer
/// than TCP's first timeout and its second.
const BURST_LIMIT: Duration = Duration::from_millis(900);
/// Round trips added to the limit: slow start, and a router's report of the MTU.
const BURST_ROUND_TRIPS: u32 = 8;
/// Several full-size segments, but few enough bytes for a slow wire.
const BURST_BYTES: u32 = 32 * 1024;
/// Maximum number of sizes tried.
const MOST_TRIES: u32 = 20;
/// MTUs found in practice: tunnels, PPPoE, Ethernet, jumbo frames of several vendors.
const USUAL: [u32; 15] =
    [1280, 1380, 1400, 1420, 1440, 1450, 1460, 1472, 1480, 1492, 1500, 4000, 8900, 8951, 9000];

impl Prober<'_> {
    /// Measures the MTU. `small` is a stream of the lane with segments of [`SAFE_SEGMENT_BYTES`].
    pub(super) fn mtu(
        &self,
        lane: Lane,
        small: &Opened,
        round_trip: Duration,
    ) -> Result<MtuProbe, Failure> {
        let local = small.stream.local().map_err(|error| lane_failure(&error))?.ip();
        let interface = (self.job.interface_mtu)(local).map(|mtu| mtu.min(LARGEST_PACKET));
        let headers = if lane.to.is_ipv4() { HEADERS_V4 } else { HEADERS_V6 };
        let segment_bytes = small.stream.segment_bytes().map_err(|error| lane_failure(&error))?;
        let options = SAFE_SEGMENT_BYTES.saturating_sub(segment_bytes);
        let limit = BURST_LIMIT + round_trip * BURST_ROUND_TRIPS;
        // A lossy wire may lose one.
        for _ in 0..2 {
            if let Some(opened) = self.burst(lane, None, limit)? {
                let segment =
                    opened.stream.segment_bytes().map_err(|error| lane_failure(&error))?;
                let path = opened.stream.path_mtu().map_err(|error| lane_failure(&error))?;
                // The peer's own interface may accept less than the path.
                let passes = path.min(segment.saturating_add(headers + options));
                let passes = if passes >= LARGEST_WIRE_MTU { path } else { passes };
                return Ok(MtuProbe { interface, passes: Some(passes), black_hole: false });
            }
        }
        // The size is the cause only if a smaller one arrives.
        if self.burst(lane, Some(SAFE_SEGMENT_BYTES), limit)?.is_none() {
            let detail = format!(
                "packets of no size are answered any more: {} KiB took longer than {} ms, or the \
                lane went down",
                BURST_BYTES / 1024,
                limit.as_millis()
            );
            return Err(Failure::new(FailureCode::LaneLost, detail));
        }
        let known_bad = interface.unwrap_or(LARGEST_WIRE_MTU).min(LARGEST_WIRE_MTU);
        let passes = largest(SAFE_SEGMENT_BYTES + headers, known_bad, |mtu| {
            Ok(self.burst(lane, Some(mtu - headers), limit)?.is_some())
        })?;
        Ok(MtuProbe { interface, passes: Some(passes), black_hole: true })
    }

    /// Sends a burst of full-size segments, followed by a ping. Returns `None` if it is not
    /// answered.
    ///
    /// # Errors
    /// The probe is over.
    fn burst(
        &self,
        lane: Lane,
        segment_bytes: Option<u32>,
        limit: Duration,
    ) -> Result<Option<Opened>, Failure> {
        self.job.cancel.check()?;
        let answered = self.open(lane, segment_bytes, limit).and_then(|mut opened| {
            let burst = [Message::Padding { bytes: BURST_BYTES }, Message::Ping { sent_ns: 0 }];
            burst
                .iter()
                .try_for_each(|message| opened.sender.send(message))
                .map_err(|e| lane_failure(&e))?;
            match opened.receiver.receive().map_err(|error| lane_failure(&error))? {
                Incoming::Message(Message::Pong { .. }) => Ok(opened),
                _ => Err(Failure::new(
                    FailureCode::ProtocolBroken,
                    "a ping was answered with something else",
                )),
            }
        });
        match answered {
            Ok(opened) => Ok(Some(opened)),
            // The TLS handshake may contain full-size segments too.
            Err(failure) if failure.code == FailureCode::LaneLost => {
                tracing::debug!(%lane, ?segment_bytes, %failure, "a burst is not answered");
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }
}

/// Finds the largest size that passes, from `passes`, which is known to pass, up to below `fails`,
/// which is known not to. It tries usual sizes first. After [`MOST_TRIES`] it returns the largest
/// size that was seen to pass.
fn largest(
    mut passes: u32,
    mut fails: u32,
    mut try_one: impl FnMut(u32) -> Result<bool, Failure>,
) -> Result<u32, Failure> {
    for _ in 0..MOST_TRIES {
        if fails <= passes + 1 {
            break;
        }
        let between: Vec<u32> =
            USUAL.into_iter().filter(|size| (passes + 1..fails).contains(size)).collect();
        // A usual size that passes is most likely the limit itself, which the next byte shows.
        let next = match between.get(between.len() / 2) {
            Some(&usual) => usual,
            None if USUAL.contains(&passes) => passes + 1,
            None => passes + (fails - passes) / 2,
        };
        if try_one(next)? {
            passes = next;
        } else {
            fails = next;
        }
    }
    Ok(passes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn find(limit: u32, fails: u32) -> (u32, u32) {
        let mut tries = 0;
        let found = largest(1040, fails, |size| {
            tries += 1;
            Ok(size <= limit)
        });
        (found.unwrap(), tries)
    }

    #[test]
    fn usual_limits_are_found_soon() {
        for limit in USUAL {
            let (found, tries) = find(limit, 9216);
            assert_eq!(found, limit);
            assert!(tries <= 6, "{limit} took {tries} tries");
        }
        assert_eq!(find(1040, 1041), (1040, 0));
        assert_eq!(find(1040, 900), (1040, 0));
    }

    #[test]
    fn the_end_of_the_probe_ends_the_search() {
        let ended = largest(1040, 9000, |_| Err(Failure::new(FailureCode::Cancelled, "ended")));
        assert_eq!(ended.unwrap_err().code, FailureCode::Cancelled);
    }

    proptest! {
        #[test]
        fn any_limit_is_found(limit in 1040u32..9215) {
            let (found, tries) = find(limit, 9216);
            prop_assert!(tries <= MOST_TRIES);
            prop_assert_eq!(found, limit);
        }
    }
}
