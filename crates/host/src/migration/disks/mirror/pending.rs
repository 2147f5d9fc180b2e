//! What QEMU's mirrors have sent, until it is on the destination's disk.
//!
//! It has two parts: what is being sent, which does not change, and what was written since. A round
//! begins with the exchange of the two. Both are bounded. If the second is full, writes wait for
//! room, for a moment: after that they are refused, so that a guest never waits for a link that is
//! cut, and QEMU never for this agent. QEMU notes what was refused, and sends it again.

use std::time::{Duration, Instant};

use godwit_migration::disks::DiskRange;
use parking_lot::{Condvar, Mutex};

use super::written::{Content, Written};

/// Most memory of what was written since a round began.
const MOST_COST: usize = 16 << 20;
/// Most memory of it once the guest is about to be stopped, when nothing is refused any more.
const MOST_LAST_COST: usize = 96 << 20;
/// Longest time that a write waits for room.
const HOLD_LIMIT: Duration = Duration::from_millis(250);
/// Part of a disk of which it is known whether anything was written to it.
const GRANULE_BYTES: u64 = 1 << 20;
/// Longest sample.
const SAMPLE_BYTES: u64 = 4096;

/// Content that is to be sent.
pub(super) struct Pending {
    inner: Mutex<Inner>,
    /// There is room again, or something new.
    changed: Condvar,
    hold_limit: Duration,
    /// Most memory of what was written since a round began.
    most_cost: usize,
}

#[derive(Default)]
struct Inner {
    next: Written,
    current: Written,
    most_cost: usize,
    /// Whether writes are refused until the next exchange.
    refuses: bool,
    /// Why no more can arrive.
    broken: Option<String>,
    touched: Vec<Touched>,
    /// Newest content of a part that is on the destination's disk.
    sample: Option<(DiskRange, Vec<u8>)>,
}

/// Which parts of a disk the destination may have something in. Elsewhere, its image is zeros.
enum Touched {
    /// The image is a layer: elsewhere it has what its base has.
    Layer,
    /// A bit for each granule.
    Granules(Vec<u64>),
}

impl Pending {
    /// Creates the state without any content. `disks`: size of each, and whether it is a layer.
    pub(super) fn new(disks: &[(u64, bool)]) -> Pending {
        Pending::with_limits(disks, MOST_COST, HOLD_LIMIT)
    }

    fn with_limits(disks: &[(u64, bool)], most_cost: usize, hold_limit: Duration) -> Pending {
        let touched = disks.iter().map(|&(bytes, is_layer)| match is_layer {
            true => Touched::Layer,
            false => {
                let words = bytes.div_ceil(GRANULE_BYTES).div_ceil(64);
                Touched::Granules(vec![0; usize::try_from(words).unwrap_or_default()])
            }
        });
        let inner = Inner { most_cost, touched: touched.collect(), ..Inner::default() };
        Pending { inner: Mutex::new(inner), changed: Condvar::new(), hold_limit, most_cost }
    }

    /// Notes a write of a guest or of the mirror. Waits for room. Returns whether it is noted.
    pub(super) fn write(&self, disk: usize, at: u64, content: Content) -> bool {
        let (mut inner, until) = (self.inner.lock(), Instant::now() + self.hold_limit);
        let cost = content.cost();
        while !inner.has_room(cost) {
            if inner.refuses || self.changed.wait_until(&mut inner, until).timed_out() {
                inner.refuses = !inner.has_room(cost);
                if inner.refuses {
                    return false;
                }
            }
        }
        inner.note(disk, at, content);
        self.changed.notify_all();
        true
    }

    /// Begins a round: what was written until now is to be sent.
    ///
    /// # Errors
    /// Why not all of what was written is here.
    pub(super) fn exchange(&self) -> Result<Vec<DiskRange>, String> {
        let mut inner = self.inner.lock();
        if let Some(why) = &inner.broken {
            return Err(why.clone());
        }
        let next = std::mem::take(&mut inner.next);
        inner.current.absorb(next);
        inner.refuses = false;
        // The stop for which there was more room may have been put off.
        inner.most_cost = self.most_cost;
        self.changed.notify_all();
        Ok(inner.current.ranges().collect())
    }

    /// Waits until there is a good deal to send, or for this long.
    pub(super) fn wait(&self, limit: Duration) {
        let (mut inner, until) = (self.inner.lock(), Instant::now() + limit);
        while inner.next.cost() < inner.most_cost / 2 && inner.broken.is_none() {
            if self.changed.wait_until(&mut inner, until).timed_out() {
                return;
            }
        }
    }

    /// Ends a round: what was to be sent is on the destination's disk.
    pub(super) fn forget(&self) {
        let mut inner = self.inner.lock();
        let first = inner.current.ranges().next();
        if let Some(first) = first {
            let range = DiskRange { bytes: first.bytes.min(SAMPLE_BYTES), ..first };
            let mut bytes = vec![0; usize::try_from(range.bytes).unwrap_or_default()];
            let is_known = inner.current.read(range.disk, range.offset, &mut bytes);
            inner.sample = is_known.then_some((range, bytes));
        }
        inner.current = Written::default();
    }

    /// Returns a small part of a disk that may be sent once more. `None`: there is none, or a round
    /// is in progress, which may have sent newer content of it.
    pub(super) fn sample(&self) -> Option<DiskRange> {
        let inner = self.inner.lock();
        inner.sample.as_ref().filter(|_| inner.current.is_empty()).map(|(range, _)| *range)
    }

    /// Reads what is to be sent. Returns `false` if it is not here.
    pub(super) fn read(&self, disk: usize, at: u64, buffer: &mut [u8]) -> bool {
        let inner = self.inner.lock();
        if inner.current.read(disk, at, buffer) {
            return true;
        }
        // A stream may take a part of the sample.
        let sample = inner.sample.as_ref().filter(|_| inner.current.is_empty());
        let sample = sample.filter(|(range, _)| range.disk == disk);
        let part = sample.and_then(|(range, bytes)| {
            let from = usize::try_from(at.checked_sub(range.offset)?).ok()?;
            bytes.get(from..from.checked_add(buffer.len())?)
        });
        part.is_some_and(|part| {
            buffer.copy_from_slice(part);
            true
        })
    }

    /// Makes room for what the guest writes until it has stopped.
    pub(super) fn widen(&self) {
        self.inner.lock().most_cost = MOST_LAST_COST;
        self.changed.notify_all();
    }

    /// Notes that no more arrives from a mirror, and why.
    pub(super) fn break_off(&self, why: String) {
        self.inner.lock().broken.get_or_insert(why);
        self.changed.notify_all();
    }
}

impl Inner {
    fn has_room(&self, cost: usize) -> bool {
        self.next.is_empty() || self.next.cost().saturating_add(cost) <= self.most_cost
    }

    fn note(&mut self, disk: usize, at: u64, content: Content) {
        let Some(touched) = self.touched.get_mut(disk) else { return };
        let bytes = content.bytes();
        match (touched, content) {
            (Touched::Granules(bits), Content::Zeros(_)) => {
                // Zeros where the destination has nothing are there already.
                for (at, bytes) in granules(at, bytes) {
                    if is_set(bits, at / GRANULE_BYTES) {
                        self.next.write(disk, at, Content::Zeros(bytes));
                    }
                }
            }
            (Touched::Granules(bits), content) => {
                granules(at, bytes).for_each(|(at, _)| set(bits, at / GRANULE_BYTES));
                self.next.write(disk, at, content);
            }
            (Touched::Layer, content) => self.next.write(disk, at, content),
        }
    }
}

/// Splits a part of a disk where granules begin.
fn granules(at: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = at.saturating_add(bytes);
    let granule = move |number: u64| {
        let from = at.max(number * GRANULE_BYTES);
        let to = end.min((number + 1).saturating_mul(GRANULE_BYTES));
        (from, to.saturating_sub(from))
    };
    (at / GRANULE_BYTES..end.div_ceil(GRANULE_BYTES)).map(granule)
}

fn word_of(granule: u64) -> usize {
    usize::try_from(granule / 64).unwrap_or(usize::MAX)
}

fn is_set(bits: &[u64], granule: u64) -> bool {
    bits.get(word_of(granule)).is_some_and(|word| word & (1 << (granule % 64)) != 0)
}

fn set(bits: &mut [u64], granule: u64) {
    if let Some(word) = bits.get_mut(word_of(granule)) {
        *word |= 1 << (granule % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: u64 = 1 << 30;

    fn range(offset: u64, bytes: u64) -> DiskRange {
        DiskRange { disk: 0, offset, bytes }
    }

    fn bytes(length: usize) -> Content {
        Content::Bytes(vec![7; length])
    }

    #[test]
    fn what_is_being_sent_does_not_change() {
        let pending = Pending::new(&[(DISK, false)]);
        assert!(pending.write(0, 100, bytes(10)));
        assert_eq!(pending.exchange().unwrap(), [range(100, 10)]);
        assert!(pending.write(0, 100, Content::Bytes(vec![1; 10])));
        let mut read = [0; 10];
        assert!(pending.read(0, 100, &mut read));
        assert_eq!(read, [7; 10]);
        assert!(!pending.read(0, 99, &mut read));
        pending.forget();
        // A part that was sent may be sent again.
        assert_eq!(pending.sample(), Some(range(100, 10)));
        assert!(pending.read(0, 100, &mut read));
        assert_eq!(read, [7; 10]);
        assert!(pending.read(0, 103, &mut read[..7]));
        assert!(!pending.read(0, 103, &mut read[..8]) && !pending.read(0, 99, &mut read[..1]));
        assert_eq!(pending.exchange().unwrap(), [range(100, 10)]);
        assert!(pending.read(0, 100, &mut read));
        assert_eq!(read, [1; 10]);
        // What was not sent before stays when something is added.
        assert!(pending.write(0, 105, Content::Bytes(vec![2; 10])));
        assert_eq!(pending.exchange().unwrap(), [range(100, 5), range(105, 10)]);
    }

    #[test]
    fn a_sample_replaces_nothing_that_was_sent_after_it() {
        let pending = Pending::new(&[(DISK, false)]);
        assert!(pending.write(0, 0, bytes(4096)));
        pending.exchange().unwrap();
        pending.forget();
        assert_eq!(pending.sample(), Some(range(0, 4096)));
        assert!(pending.write(0, 512, Content::Bytes(vec![1; 512])));
        pending.exchange().unwrap();
        // The round may end by a cut with all of it on the destination's disk.
        assert_eq!(pending.sample(), None);
        assert!(!pending.read(0, 0, &mut [0; 4096]));
        pending.forget();
        assert_eq!(pending.sample(), Some(range(512, 512)));
    }

    #[test]
    fn zeros_are_sent_only_where_they_change_something() {
        let pending = Pending::new(&[(DISK, false), (DISK, true)]);
        assert!(pending.write(0, 0, Content::Zeros(DISK)));
        assert_eq!(pending.exchange().unwrap(), []);
        assert!(pending.write(0, GRANULE_BYTES + 5, bytes(3)));
        assert!(pending.write(0, 0, Content::Zeros(DISK)));
        assert_eq!(pending.exchange().unwrap(), [range(GRANULE_BYTES, GRANULE_BYTES)]);
        let mut read = [9; 4];
        assert!(pending.read(0, GRANULE_BYTES + 4, &mut read));
        assert_eq!(read, [0; 4]);
        pending.forget();
        // A layer hides its base.
        assert!(pending.write(1, 0, Content::Zeros(DISK)));
        assert_eq!(pending.exchange().unwrap(), [DiskRange { disk: 1, ..range(0, DISK) }]);
    }

    #[test]
    fn a_write_without_room_is_refused_and_another_one_after_the_exchange_is_not() {
        let pending = Pending::with_limits(&[(DISK, false)], 4096, Duration::ZERO);
        // A write of any size finds room when there is nothing else.
        assert!(pending.write(0, 0, bytes(5000)));
        assert!(!pending.write(0, 8192, bytes(1)));
        assert!(!pending.write(0, 8192, bytes(1)));
        assert_eq!(pending.exchange().unwrap(), [range(0, 5000)]);
        assert!(pending.write(0, 8192, bytes(1)));
        pending.widen();
        assert!(pending.write(0, 1 << 20, bytes(1 << 20)));
        // With the next round, the guest is not about to be stopped any more.
        pending.exchange().unwrap();
        assert!(pending.write(0, 8192, bytes(1)));
        assert!(!pending.write(0, 1 << 20, bytes(1 << 20)));
    }

    #[test]
    fn a_write_waits_for_room() {
        let pending = Pending::with_limits(&[(DISK, false)], 4096, Duration::from_secs(3600));
        assert!(pending.write(0, 0, bytes(4096)));
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| pending.write(0, 8192, bytes(1)));
            assert_eq!(pending.exchange().unwrap(), [range(0, 4096)]);
            assert!(writing.join().unwrap());
        });
        pending.forget();
        assert_eq!(pending.exchange().unwrap(), [range(8192, 1)]);
    }

    #[test]
    fn what_is_lost_ends_the_rounds() {
        let pending = Pending::new(&[(DISK, false)]);
        pending.break_off("the first".to_owned());
        pending.break_off("the second".to_owned());
        pending.wait(Duration::from_secs(3600));
        assert_eq!(pending.exchange().unwrap_err(), "the first");
    }
}
