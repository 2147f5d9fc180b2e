//! Response time of a guest, as its network sees it. During a migration, the source's host probes
//! the guest several times a second, from a tap of its own on the guest's bridge. The result is
//! about what clients of the guest wait for, including the switchover. Once the guest answers from
//! the other host, the answer arrives over the network between the two.
//!
//! The probe is an ARP probe (RFC 5227), sent to the guest alone. It contains no address of its
//! sender, so no host records one. Every guest with IPv4 answers it, whatever its firewall. IPv6
//! has no such request without a sender's address, so IPv6 guests are not probed.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_qemu::ResolvedNic;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;
use tokio::time::{Instant as Timer, sleep_until};

/// Interval between two probes.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// Interval between two probes while an answer is missing: a probe that reaches a paused guest is
/// lost.
const ASK_AGAIN_EVERY: Duration = Duration::from_millis(10);
/// Length of the shortest Ethernet frame, without its checksum.
const FRAME_BYTES: usize = 60;
/// Longest frame that is examined; an answer is short.
const MOST_READ_BYTES: usize = 2048;
const ARP: [u8; 2] = [0x08, 0x06];
/// Hardware type, protocol type and address lengths of Ethernet and IPv4.
const ETHERNET_AND_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: [u8; 2] = [0, 1];
const REPLY: [u8; 2] = [0, 2];

/// Addresses of a probed guest and of the prober.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestTarget {
    /// The guest's hardware address.
    guest_mac: [u8; 6],
    guest: Ipv4Addr,
    /// The prober's hardware address, which no other interface has.
    own_mac: [u8; 6],
}

/// Measured response times, shared with the reporter of progress.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trips(Arc<Mutex<Times>>);

/// Running prober; it stops when dropped.
#[derive(Debug)]
pub(crate) struct GuestProber(JoinHandle<()>);

impl GuestProber {
    /// Stops the prober; the tap is gone when this returns.
    pub(crate) async fn end(mut self) {
        self.0.abort();
        // The task ends only by this abort.
        let _ = (&mut self.0).await;
    }
}

impl Drop for GuestProber {
    fn drop(&mut self) {
        // The tap is removed with its file.
        self.0.abort();
    }
}

/// Response times of one guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    /// Time of the first probe since the last answer, if one is unanswered.
    waits_since: Option<Instant>,
    /// Longest response time since the last report, and the last response time.
    longest: Option<Duration>,
    last: Option<Duration>,
}

impl Times {
    fn probed(&mut self, at: Instant) {
        self.waits_since.get_or_insert(at);
    }

    fn answered(&mut self, at: Instant) {
        let Some(since) = self.waits_since.take() else { return };
        let trip = at.saturating_duration_since(since);
        self.longest = self.longest.max(Some(trip));
        self.last = Some(trip);
    }

    /// Returns the longest response time since the last call. It grows while an answer is missing.
    /// `None`: the guest has never answered.
    fn take(&mut self, now: Instant) -> Option<Duration> {
        let last = self.last?;
        let waits = self.waits_since.map(|since| now.saturating_duration_since(since));
        let longest = self.longest.take().unwrap_or(last);
        // A probe that was just sent is not late.
        Some(waits.filter(|waits| *waits > longest).unwrap_or(longest))
    }
}

impl Trips {
    fn times(&self) -> MutexGuard<'_, Times> {
        self.0.lock()
    }

    /// Returns the longest response time since the last call, in milliseconds; `None` if the guest
    /// is not probed or has never answered.
    pub(crate) fn take_ms(&self) -> Option<f64> {
        self.times().take(Instant::now()).map(godwit_migration::millis)
    }
}

impl GuestTarget {
    /// Returns the target of one of a guest's interfaces; `None` if its IPv4 address is unknown.
    pub(crate) fn by(nic: &ResolvedNic) -> Option<GuestTarget> {
        let Some(IpAddr::V4(guest)) = nic.address else { return None };
        let guest_mac = nic.mac.bytes();
        let [_, b1, b2, b3, b4, b5] = guest_mac;
        // A locally administered address. The guest's own has another first byte.
        let first = if guest_mac[0] == 0x06 { 0x0a } else { 0x06 };
        Some(GuestTarget { guest_mac, guest, own_mac: [first, b1, b2, b3, b4, b5] })
    }

    fn question(&self) -> [u8; FRAME_BYTES] {
        let no_address = Ipv4Addr::UNSPECIFIED.octets();
        let parts: [&[u8]; 9] = [
            &self.guest_mac,
            &self.own_mac,
            &ARP,
            &ETHERNET_AND_IPV4,
            &REQUEST,
            &self.own_mac,
            &no_address,
            &[0; 6],
            &self.guest.octets(),
        ];
        let mut frame = [0; FRAME_BYTES];
        for (place, byte) in frame.iter_mut().zip(parts.concat()) {
            *place = byte;
        }
        frame
    }

    fn is_answer(&self, frame: &[u8]) -> bool {
        let has = |at: usize, bytes: &[u8]| frame.get(at..at + bytes.len()) == Some(bytes);
        has(0, &self.own_mac)
            && has(12, &ARP)
            && has(14, &ETHERNET_AND_IPV4)
            && has(20, &REPLY)
            && has(28, &self.guest.octets())
    }

    /// Starts to probe through this tap.
    pub(crate) fn ask(
        self,
        tap: impl Future<Output = Option<OwnedFd>> + Send + 'static,
        trips: Trips,
    ) -> GuestProber {
        let task = async move {
            let Some(tap) = tap.await else { return };
            if let Err(error) = self.go_on(tap, &trips).await {
                let guest = self.guest;
                tracing::warn!(%guest, %error, "response time of the guest not measured");
            }
        };
        GuestProber(tokio::spawn(task))
    }

    async fn go_on(&self, tap: OwnedFd, trips: &Trips) -> std::io::Result<()> {
        fcntl_setfl(&tap, fcntl_getfl(&tap)? | OFlags::NONBLOCK)?;
        let tap = watched(tap)?;
        let question = self.question();
        let mut frame = vec![0; MOST_READ_BYTES];
        let mut next = Timer::now();
        loop {
            tokio::select! {
                () = sleep_until(next) => {
                    let is_late = trips.times().waits_since.is_some();
                    trips.times().probed(Instant::now());
                    // If the bridge accepts no frame now, the next probe follows.
                    let _ = rustix::io::write(tap.get_ref(), &question);
                    next = Timer::now() + if is_late { ASK_AGAIN_EVERY } else { ASK_EVERY };
                }
                ready = tap.readable() => {
                    let read = ready?.try_io(|tap| {
                        Ok(rustix::io::read(tap.get_ref(), &mut frame)?)
                    });
                    let Ok(read) = read else { continue };
                    if self.is_answer(frame.get(..read?).unwrap_or_default()) {
                        trips.times().answered(Instant::now());
                    }
                }
            }
        }
    }
}

#[expect(
    deprecated,
    reason = "it is deprecated for types whose descriptor may change; an OwnedFd keeps its own"
)]
fn watched(tap: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(tap)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> GuestTarget {
        GuestTarget {
            guest_mac: [0x52, 0x54, 0, 1, 2, 3],
            guest: Ipv4Addr::new(10, 64, 0, 7),
            own_mac: [0x06, 0x54, 0, 1, 2, 3],
        }
    }

    #[test]
    fn a_probe_contains_no_address_of_its_sender() {
        let frame = target().question();
        assert_eq!(frame[..14], [0x52, 0x54, 0, 1, 2, 3, 0x06, 0x54, 0, 1, 2, 3, 8, 6]);
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!(
            frame[22..42],
            [6, 0x54, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 64, 0, 7]
        );
        assert!(!target().is_answer(&frame));
    }

    #[test]
    fn only_the_guests_own_answer_counts() {
        let target = target();
        let mut answer = target.question();
        answer[..6].copy_from_slice(&target.own_mac);
        answer[20..22].copy_from_slice(&REPLY);
        answer[28..32].copy_from_slice(&target.guest.octets());
        assert!(target.is_answer(&answer));
        for (at, byte) in [(0, 0xff), (13, 0), (21, 1), (31, 8)] {
            let mut other = answer;
            other[at] = byte;
            assert!(!target.is_answer(&other), "{at}");
        }
        for short in [0, 5, 31] {
            assert!(!target.is_answer(&answer[..short]));
        }
    }

    #[test]
    fn the_longest_time_is_reported_and_a_missing_answer_grows() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let ms = |ms| Some(Duration::from_millis(ms));
        let mut times = Times::default();
        times.probed(at(0));
        assert_eq!(times.take(at(50)), None, "the guest has never answered");
        times.answered(at(60));
        times.probed(at(100));
        times.answered(at(101));
        assert_eq!(times.take(at(150)), ms(60));
        assert_eq!(times.take(at(160)), ms(1), "without a new answer, the last one");
        times.probed(at(200));
        times.probed(at(300));
        assert_eq!(times.take(at(400)), ms(200));
        times.answered(at(450));
        assert_eq!(times.take(at(460)), ms(250));
    }
}
