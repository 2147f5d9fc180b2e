//! Pacing: how fast pages may leave this host. A limit may be set for a migration, for a lane (by
//! this host's address) and for the host. A piece that a stream sends takes from each limit that
//! applies, in this order. Limits may change at any time, and waiting streams see the change at
//! once.
//!
//! A limit counts the bytes of data streams as they are handed to TCP, before TLS, which adds a
//! thousandth.
//! - **Smooth.** A stream requests each piece of whole frames: 2 ms of the limit, 16 to 256 KiB. No
//!   time window exceeds the limit by more than a burst of 5 ms (or of two pieces, if that is
//!   larger). With several limits, each stream may hold one piece that one limit has granted and
//!   the next one has not.
//! - **Fair.** At each limit the waiting migrations take turns by bytes. A migration with eight
//!   streams gets no more than one with two.
//! - **Control traffic never starves.** Control streams (pings, device state, commit) are not
//!   paced. Of each limit 2 % (at least 1 Mbit/s, at most half) is reserved for them; pages get the
//!   rest.
//! - **No stream falls silent.** A peer treats ten seconds of silence as the end of a stream. A
//!   stream that has waited for two seconds sends a byte of padding and goes on waiting.
//! - **The last pages** of a migration, sent while its guest is paused, are not held by the
//!   migration's own limit ([`MigrationPace::let_go`]). That limit protects others from a long
//!   migration, not the guest's users from a short burst. The limits of lanes and host, which
//!   protect other traffic, apply to the end.

mod bucket;
mod limiter;
mod turns;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::LaneError;
use godwit_types::{BitRate, RateLimit};
use limiter::{Limiter, Request, Taken};

/// Time after which a waiting stream sends padding: well below its peer's limit on silence.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// Time elapsed since a fixed moment.
type Clock = dyn Fn() -> Duration + Send + Sync;
type Lanes = BTreeMap<IpAddr, Arc<Limiter>>;

/// The limits of a host and of its lanes. A host has one; clones share it.
#[derive(Clone)]
pub struct Pacing {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Arc<Clock>,
    host: Arc<Limiter>,
    /// Limits by this host's address.
    lanes: Mutex<Lanes>,
    migrations: AtomicU64,
}

impl std::fmt::Debug for Pacing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pacing")
            .field("host", &self.host_limit())
            .field("lanes", &self.lane_limits())
            .finish_non_exhaustive()
    }
}

impl Default for Pacing {
    fn default() -> Self {
        let begun = Instant::now();
        Pacing::with_clock(move || begun.elapsed())
    }
}

impl Pacing {
    /// Creates pacing without limits, with time as `clock` returns it. Tests use a clock that
    /// stands still.
    pub fn with_clock(clock: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        let clock: Arc<Clock> = Arc::new(clock);
        let host = Limiter::new(&clock, RateLimit::NONE);
        Pacing {
            shared: Arc::new(Shared {
                clock,
                host,
                lanes: Mutex::default(),
                migrations: AtomicU64::new(0),
            }),
        }
    }

    #[must_use]
    pub fn host_limit(&self) -> RateLimit {
        self.shared.host.limit()
    }

    pub fn limit_host(&self, limit: RateLimit) {
        self.shared.host.set(limit);
    }

    /// Returns the limits of lanes by this host's address, without unlimited lanes.
    #[must_use]
    pub fn lane_limits(&self) -> BTreeMap<IpAddr, RateLimit> {
        let lanes = self.shared.lanes.lock();
        let limits = lanes.iter().map(|(address, lane)| (*address, lane.limit()));
        limits.filter(|(_, limit)| *limit != RateLimit::NONE).collect()
    }

    /// Sets the limit of the lanes that leave from an address of this host.
    pub fn limit_lane(&self, address: IpAddr, limit: RateLimit) {
        self.lane(address).set(limit);
    }

    fn lane(&self, address: IpAddr) -> Arc<Limiter> {
        let fresh = || Limiter::new(&self.shared.clock, RateLimit::NONE);
        Arc::clone(self.shared.lanes.lock().entry(address.to_canonical()).or_insert_with(fresh))
    }

    /// Registers a new migration with its own limit.
    #[must_use]
    pub fn migration(&self, limit: RateLimit) -> MigrationPace {
        MigrationPace {
            number: self.shared.migrations.fetch_add(1, Ordering::Relaxed),
            own: Limiter::new(&self.shared.clock, limit),
            pacing: self.clone(),
            lanes: Arc::default(),
        }
    }
}

/// Limits of one migration. Clones share them.
#[derive(Clone, Debug)]
pub struct MigrationPace {
    /// Distinguishes the migration from others.
    number: u64,
    own: Arc<Limiter>,
    pacing: Pacing,
    /// The lanes that the migration uses.
    lanes: Arc<Mutex<Lanes>>,
}

impl MigrationPace {
    /// Returns the migration's own limit.
    #[must_use]
    pub fn limit(&self) -> RateLimit {
        self.own.limit()
    }

    /// Sets the migration's own limit.
    pub fn set_limit(&self, limit: RateLimit) {
        self.own.set(limit);
    }

    /// Lifts the migration's own limit: its guest is paused for the switchover.
    pub fn let_go(&self) {
        self.own.suspend();
    }

    /// Counts bytes that were sent on a lane without a request, such as a control stream's padding.
    /// Pages wait for them. `lane` is this host's address on it.
    pub fn charge(&self, lane: IpAddr, bytes: u64) {
        let limiters = [&self.own, &self.pacing.lane(lane), &self.pacing.shared.host];
        limiters.iter().for_each(|limiter| limiter.charge(bytes));
    }

    /// Adds the lanes that leave from an address of this host: their limit applies to the
    /// migration.
    pub fn uses(&self, lane: IpAddr) {
        self.lanes.lock().insert(lane.to_canonical(), self.pacing.lane(lane));
    }

    /// Returns the limits of a data stream of the migration, on a lane that leaves from that
    /// address of this host.
    #[must_use]
    pub fn stream(&self, lane: IpAddr) -> StreamPace {
        self.uses(lane);
        let limiters =
            [Arc::clone(&self.own), self.pacing.lane(lane), Arc::clone(&self.pacing.shared.host)];
        StreamPace {
            shared: Arc::new(StreamShared {
                migration: self.number,
                limiters,
                over: AtomicBool::new(false),
                held: AtomicBool::new(false),
                waiter: Mutex::default(),
            }),
        }
    }

    /// Returns the limit that holds the migration: the lowest of its own, the host's, and the sum
    /// of its lanes' if all of them have one. Other migrations may use part of the host's and the
    /// lanes' limits.
    #[must_use]
    pub fn holding(&self) -> Option<BitRate> {
        let of_lanes = {
            let lanes = self.lanes.lock();
            let sum = lanes.values().try_fold(0_u64, |sum, lane| {
                Some(sum.saturating_add(lane.limit().rate()?.bits_per_second()))
            });
            sum.and_then(BitRate::new)
        };
        let limits = [self.own.limit().rate(), self.pacing.host_limit().rate(), of_lanes];
        limits.into_iter().flatten().min()
    }

    /// Returns the share of [`MigrationPace::holding`] left for pages, in bytes per second.
    #[must_use]
    pub fn data_bytes_per_s(&self) -> Option<u64> {
        self.holding().map(bucket::data_bytes_per_s)
    }
}

/// Limits of one data stream. Clones share them.
#[derive(Clone, Debug)]
pub struct StreamPace {
    shared: Arc<StreamShared>,
}

#[derive(Debug)]
struct StreamShared {
    migration: u64,
    /// The limiters of the migration, the lane and the host.
    limiters: [Arc<Limiter>; 3],
    over: AtomicBool,
    /// Whether a thread waits here.
    held: AtomicBool,
    /// The thread that waits here, or waited last.
    waiter: Mutex<Option<Thread>>,
}

impl StreamPace {
    /// Returns how many bytes to send at a time; `None`: no limit.
    #[must_use]
    pub(crate) fn piece_bytes(&self) -> Option<u64> {
        self.shared.limiters.iter().filter_map(|limiter| limiter.piece_bytes()).min()
    }

    /// Waits until the bytes may be sent. Meanwhile it calls `keep_alive` every two seconds.
    ///
    /// # Errors
    /// The stream was closed on this side, or the error of `keep_alive`.
    pub(crate) fn take(
        &self,
        bytes: u64,
        keep_alive: impl FnMut() -> Result<(), LaneError>,
    ) -> Result<(), LaneError> {
        self.shared.held.store(true, Ordering::Relaxed);
        let taken = self.take_from_each(bytes, keep_alive);
        self.shared.held.store(false, Ordering::Relaxed);
        taken
    }

    /// Returns whether a thread waits to send bytes.
    pub(crate) fn is_held(&self) -> bool {
        self.shared.held.load(Ordering::Relaxed)
    }

    fn take_from_each(
        &self,
        bytes: u64,
        mut keep_alive: impl FnMut() -> Result<(), LaneError>,
    ) -> Result<(), LaneError> {
        let shared = &*self.shared;
        *shared.waiter.lock() = Some(thread::current());
        let mut until = Instant::now() + KEEP_ALIVE;
        for limiter in &shared.limiters {
            let mut again = false;
            loop {
                let request =
                    Request { migration: shared.migration, over: &shared.over, again, until };
                match limiter.take(request, bytes) {
                    Taken::Granted => break,
                    Taken::Ended => {
                        return Err(LaneError::Io(std::io::ErrorKind::ConnectionAborted.into()));
                    }
                    Taken::Waited => {
                        keep_alive()?;
                        until = Instant::now() + KEEP_ALIVE;
                        again = true;
                    }
                }
            }
        }
        Ok(())
    }

    /// Closes the stream: waiting threads return at once.
    pub(crate) fn close(&self) {
        self.shared.over.store(true, Ordering::SeqCst);
        if let Some(thread) = &*self.shared.waiter.lock() {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests;
