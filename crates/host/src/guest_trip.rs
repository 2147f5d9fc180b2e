//! How long a guest takes to answer, as its network sees it. While it migrates, the source's host asks the guest some times a second for its
//! address, from a tap of its own on the guest's bridge: that is about what clients of the guest wait for, the switchover among it. Where
//! the guest answers from the other host already, the answer comes by the network between the two.
//!
//! What is asked is an ARP probe (RFC 5227) to the guest alone: it names no address of the sender's, so that nobody notes one, and every guest
//! with IPv4 answers it, whatever it lets through above. Of IPv6 there is no such question that needs no address, and it is not asked.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_qemu::ResolvedNic;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;
use tokio::time::{Instant as Timer, sleep_until};

/// Between two questions.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// The same while an answer is missing: a question that came to a guest which stood still is lost.
const ASK_AGAIN_EVERY: Duration = Duration::from_millis(10);
/// An Ethernet frame at its shortest, without its checksum.
const FRAME_BYTES: usize = 60;
/// The longest frame that is looked at; an answer is short.
const MOST_READ_BYTES: usize = 2048;
const ARP: [u8; 2] = [0x08, 0x06];
/// Ethernet, IPv4, and the lengths of their addresses.
const ETHERNET_AND_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: [u8; 2] = [0, 1];
const REPLY: [u8; 2] = [0, 2];

/// Where a guest is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Its hardware address.
    guest_mac: [u8; 6],
    guest: Ipv4Addr,
    /// What stands behind the tap, and no other.
    own_mac: [u8; 6],
}

/// The times, for who tells of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trips(Arc<Mutex<Times>>);

/// Asks until it is dropped.
#[derive(Debug)]
pub(crate) struct Asking(JoinHandle<()>);

impl Asking {
    /// Asks no more: the tap is gone when this returns.
    pub(crate) async fn end(mut self) {
        self.0.abort();
        // It ends by that, and by nothing else.
        let _ = (&mut self.0).await;
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        // The tap goes with the file.
        self.0.abort();
    }
}

/// What was seen of a guest's answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    /// The question that waits for an answer, the first one since the last answer.
    waits_since: Option<Instant>,
    /// The longest since it was told, and the last.
    longest: Option<Duration>,
    last: Option<Duration>,
}

impl Times {
    fn asked(&mut self, at: Instant) {
        self.waits_since.get_or_insert(at);
    }

    fn answered(&mut self, at: Instant) {
        let Some(since) = self.waits_since.take() else { return };
        let trip = at.saturating_duration_since(since);
        self.longest = self.longest.max(Some(trip));
        self.last = Some(trip);
    }

    /// The longest since this was asked for; grows while an answer is missing. None: the guest has never answered.
    fn take(&mut self, now: Instant) -> Option<Duration> {
        let last = self.last?;
        let waits = self.waits_since.map(|since| now.saturating_duration_since(since));
        let longest = self.longest.take().unwrap_or(last);
        // What has just been asked is not late.
        Some(waits.filter(|waits| *waits > longest).unwrap_or(longest))
    }
}

impl Trips {
    fn times(&self) -> MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest since this was asked for, milliseconds; none: the guest is not asked, or has never answered.
    pub(crate) fn take_ms(&self) -> Option<f64> {
        self.times().take(Instant::now()).map(godwit_migration::millis)
    }
}

impl Asked {
    /// A guest by one of its interfaces; none: it has no IPv4 address that is known.
    pub(crate) fn by(nic: &ResolvedNic) -> Option<Asked> {
        let Some(IpAddr::V4(guest)) = nic.address else { return None };
        let guest_mac = nic.mac.bytes();
        let [_, b1, b2, b3, b4, b5] = guest_mac;
        // Of those that nobody sells; the guest's own begins otherwise, or is the other way round.
        let first = if guest_mac[0] == 0x06 { 0x0a } else { 0x06 };
        Some(Asked { guest_mac, guest, own_mac: [first, b1, b2, b3, b4, b5] })
    }

    fn question(&self) -> [u8; FRAME_BYTES] {
        let nobody = Ipv4Addr::UNSPECIFIED.octets();
        let parts: [&[u8]; 9] = [
            &self.guest_mac,
            &self.own_mac,
            &ARP,
            &ETHERNET_AND_IPV4,
            &REQUEST,
            &self.own_mac,
            &nobody,
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

    /// Asks by this tap from now on.
    pub(crate) fn ask(
        self,
        tap: impl Future<Output = Option<OwnedFd>> + Send + 'static,
        trips: Trips,
    ) -> Asking {
        let task = async move {
            let Some(tap) = tap.await else { return };
            if let Err(error) = self.go_on(tap, &trips).await {
                tracing::warn!(guest = %self.guest, %error, "how long a guest takes to answer is not measured");
            }
        };
        Asking(tokio::spawn(task))
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
                    trips.times().asked(Instant::now());
                    // A bridge that takes none just now is asked again.
                    let _ = rustix::io::write(tap.get_ref(), &question);
                    next = Timer::now() + if is_late { ASK_AGAIN_EVERY } else { ASK_EVERY };
                }
                ready = tap.readable() => {
                    let read = ready?.try_io(|tap| Ok(rustix::io::read(tap.get_ref(), &mut frame)?));
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

    fn asked() -> Asked {
        Asked {
            guest_mac: [0x52, 0x54, 0, 1, 2, 3],
            guest: Ipv4Addr::new(10, 64, 0, 7),
            own_mac: [0x06, 0x54, 0, 1, 2, 3],
        }
    }

    #[test]
    fn a_question_names_no_address_of_its_sender() {
        let frame = asked().question();
        assert_eq!(frame[..14], [0x52, 0x54, 0, 1, 2, 3, 0x06, 0x54, 0, 1, 2, 3, 8, 6]);
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!(
            frame[22..42],
            [6, 0x54, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 64, 0, 7]
        );
        assert!(!asked().is_answer(&frame));
    }

    #[test]
    fn only_the_guests_own_answer_counts() {
        let asked = asked();
        let mut answer = asked.question();
        answer[..6].copy_from_slice(&asked.own_mac);
        answer[20..22].copy_from_slice(&REPLY);
        answer[28..32].copy_from_slice(&asked.guest.octets());
        assert!(asked.is_answer(&answer));
        for (at, byte) in [(0, 0xff), (13, 0), (21, 1), (31, 8)] {
            let mut other = answer;
            other[at] = byte;
            assert!(!asked.is_answer(&other), "{at}");
        }
        for short in [0, 5, 31] {
            assert!(!asked.is_answer(&answer[..short]));
        }
    }

    #[test]
    fn the_longest_is_told_and_a_missing_answer_grows() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let ms = |ms| Some(Duration::from_millis(ms));
        let mut times = Times::default();
        times.asked(at(0));
        assert_eq!(times.take(at(50)), None, "it has never answered");
        times.answered(at(60));
        times.asked(at(100));
        times.answered(at(101));
        assert_eq!(times.take(at(150)), ms(60));
        assert_eq!(times.take(at(160)), ms(1), "nothing new: the last");
        times.asked(at(200));
        times.asked(at(300));
        assert_eq!(times.take(at(400)), ms(200));
        times.answered(at(450));
        assert_eq!(times.take(at(460)), ms(250));
    }
}
