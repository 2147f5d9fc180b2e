//! Inputs of a prediction before a migration: what the guest writes, what its memory holds, and
//! what the lanes carry. A dry run takes its time for that. A migration uses the time in which the
//! destination creates the shadow.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_migration::drive::Tracking;
use godwit_migration::predict::{
    Carry, Conditions, DirtyCurve, LEARNING_UNITS, PageCost, Survey, predict,
};
use godwit_migration::{Policy, first_streams};
use godwit_ram::{PageRange, Region};
use godwit_types::{Compression, EncodingName, Lane, Predicted, RateLimit};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::MissedTickBehavior;

use super::outgoing::{Outgoing, Tracker};
use crate::lanes_seen::LanesCarry;
use crate::network;

/// Time from the end of the checks to round 0 without network delay: the shadow VM, the streams,
/// their TLS. Median of migrations in the lab (`phases[]`: `prepare`, QEMU 7.2 on two cores).
const SHADOW: Duration = Duration::from_millis(130);
/// Part of it from the control stream's hello to round 0, in which the guest's writes are already
/// tracked.
const TRACKED: Duration = Duration::from_millis(2);
/// Round trips before round 0: the destination's API over TCP and TLS, the control stream, its TLS,
/// its hello, `Begin`.
const ROUND_TRIPS: u32 = 9;
/// Time from the guest's start at the destination to the report here: QEMU's end, taps, files
/// (`phases[]`: `announce`).
const LET_GO: Duration = Duration::from_millis(40);
/// Units of a stream that a sweep has protected and not sent yet: one in flight, two queued
/// (`drive/dispatch.rs`).
const UNITS_AHEAD: u64 = 3;
/// Interval for counting a guest's writes while the destination creates the shadow.
const COUNT_INTERVAL: Duration = Duration::from_millis(40);
/// Most counts: a cut of the link may delay the answer for minutes.
const MOST_COUNTS: usize = 250;
/// Memory limit for predictions during a migration: to survey a larger guest would take longer than
/// the shadow.
const MOST_PREDICTED_BYTES: u64 = 64 << 30;

/// Observations of a guest.
#[derive(Debug)]
pub(super) struct GuestSeen {
    pub(super) curve: DirtyCurve,
    /// Time for a scan of all memory for dirty pages.
    scan: Duration,
    /// Content of all memory.
    all: Survey,
    /// Content of the pages that the guest wrote during the observation.
    hot: Survey,
}

/// A guest under observation: all of its writes are seen from the start.
pub(super) struct Looking {
    pub(super) tracker: Tracker,
    regions: Vec<Arc<Region>>,
    begun: Instant,
    samples: Vec<(Duration, u64)>,
    /// Duration of the last count.
    scan: Duration,
}

impl Looking {
    /// Creates an observation that has not begun.
    pub(super) fn new(tracker: Tracker, regions: &[Arc<Region>]) -> Looking {
        Looking {
            tracker,
            regions: regions.to_vec(),
            begun: Instant::now(),
            samples: Vec::new(),
            scan: Duration::ZERO,
        }
    }

    /// Begins. Blocks for some milliseconds for each GiB; the guest runs.
    ///
    /// # Errors
    /// Why the guest cannot be tracked, in words.
    pub(super) fn begin(&mut self) -> Result<(), String> {
        self.tracker.start().map_err(|error| error.to_string())?;
        self.begun = Instant::now();
        Ok(())
    }

    /// Returns the time of its begin.
    pub(super) fn begun(&self) -> Instant {
        self.begun
    }

    /// Counts what has been written until now. Blocks for a millisecond for each GiB.
    ///
    /// # Errors
    /// The errors of [`Looking::begin`].
    pub(super) fn count(&mut self) -> Result<(), String> {
        let since = self.begun.elapsed();
        let count = self.tracker.count_dirty().map_err(|error| error.to_string())?;
        self.scan = self.begun.elapsed().saturating_sub(since);
        // The count of a large guest takes long. Half of what is written meanwhile is seen.
        self.samples.push((since + self.scan / 2, count.pages));
        Ok(())
    }

    /// Returns the observations, with the survey of all memory.
    ///
    /// # Errors
    /// The errors of [`Looking::begin`].
    pub(super) fn seen(&mut self, all: Survey) -> Result<GuestSeen, String> {
        let mut written: Vec<Vec<PageRange>> = Vec::new();
        for (block, region) in self.regions.iter().enumerate() {
            let mut runs = Vec::new();
            self.tracker
                .peek_dirty(block, region.all_pages(), &mut runs)
                .map_err(|error| error.to_string())?;
            written.push(runs);
        }
        let hot = Survey::of(&self.regions, &written).map_err(|error| error.to_string())?;
        Ok(GuestSeen {
            curve: DirtyCurve::new(self.samples.iter().copied()),
            scan: self.scan,
            all,
            hot,
        })
    }
}

/// Observation of a guest while the destination creates its shadow. A failure of it does not affect
/// the migration.
pub(super) enum Glance {
    /// With the content of the guest's memory.
    Looking(Looking, Survey),
    /// No prediction is possible.
    Nothing(Tracker),
}

impl Glance {
    /// Counts what has been written until now.
    fn count(&mut self) {
        if let Glance::Looking(looking, _) = self
            && let Err(why) = looking.count()
        {
            tracing::debug!(why, "writes of the guest not counted");
        }
    }

    /// Ends the observation; returns the tracker and the observations.
    pub(super) fn end(self) -> (Tracker, Option<GuestSeen>) {
        match self {
            Glance::Nothing(tracker) => (tracker, None),
            Glance::Looking(mut looking, all) => {
                let seen = looking.count().and_then(|()| looking.seen(all));
                let seen = seen.inspect_err(|why| tracing::debug!(why, "no prediction"));
                (looking.tracker, seen.ok())
            }
        }
    }
}

/// Surveys the content of a guest's memory.
///
/// # Errors
/// Why the memory cannot be read, in words.
pub(super) fn survey(regions: &[Arc<Region>]) -> Result<Survey, String> {
    Survey::of_memory(regions).map_err(|error| error.to_string())
}

impl Outgoing {
    /// Begins to observe the guest if a prediction is possible, that is, if the capacity of the
    /// lanes is known.
    pub(super) fn glance(&self, tracker: Tracker) -> JoinHandle<Glance> {
        let is_known = self.agent.lanes_seen().to(&self.request.to).is_some();
        let is_worth_it = is_known && self.vm.spec().memory_bytes() <= MOST_PREDICTED_BYTES;
        let regions = self.vm.regions();
        tokio::task::spawn_blocking(move || {
            if !is_worth_it {
                return Glance::Nothing(tracker);
            }
            let mut looking = Looking::new(tracker, &regions);
            match looking.begin().and_then(|()| survey(&regions)) {
                Ok(all) => Glance::Looking(looking, all),
                Err(why) => {
                    tracing::debug!(why, "no prediction");
                    Glance::Nothing(looking.tracker)
                }
            }
        })
    }

    /// Counts the guest's writes repeatedly until `request` has its answer.
    pub(super) async fn count_while<T>(
        glance: JoinHandle<Glance>,
        request: impl Future<Output = T>,
    ) -> (T, Result<Glance, JoinError>) {
        let mut request = std::pin::pin!(request);
        let mut glance = std::pin::pin!(glance);
        // The survey may take longer than the answer.
        let begun = tokio::select! {
            answer = &mut request => return (answer, glance.await),
            begun = &mut glance => begun,
        };
        let mut begun = match begun {
            Ok(begun) => begun,
            Err(error) => return (request.await, Err(error)),
        };
        let mut count = tokio::time::interval(COUNT_INTERVAL);
        count.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for _ in 0..MOST_COUNTS {
            tokio::select! {
                answer = &mut request => return (answer, Ok(begun)),
                _ = count.tick() => tokio::task::block_in_place(|| begun.count()),
            }
        }
        (request.await, Ok(begun))
    }

    /// Predicts the migration from the observations of the guest and recent measurements of the
    /// lanes.
    pub(super) async fn predicted_report(
        &self,
        seen: Option<GuestSeen>,
        addresses: &[SocketAddr],
        preflight: Duration,
    ) -> Option<Predicted> {
        let (seen, carry) = (seen?, self.agent.lanes_seen().to(&self.request.to)?);
        let ours = network::near(&self.agent.config().migration_addresses).await;
        let lanes = godwit_lanes::pair(&ours, addresses);
        let conditions = self.conditions(seen, carry, &lanes, self.policy(), preflight);
        Some(predict(&conditions).to_report())
    }

    /// Returns the conditions of a migration over these lanes; `preflight`: time before the
    /// destination is asked.
    pub(super) fn conditions(
        &self,
        seen: GuestSeen,
        carry: LanesCarry,
        lanes: &[Lane],
        policy: Policy,
        preflight: Duration,
    ) -> Conditions {
        let LanesCarry { bytes_per_s, of_cpus, round_trip, .. } = carry;
        let of_cpus_bytes_per_s = of_cpus.then_some(bytes_per_s);
        let GuestSeen { curve, scan, all, hot } = seen;
        // With faults the paused guest's memory is not scanned.
        let scan = if self.tracks_by_faults() { Duration::ZERO } else { scan };
        let at_most = |limit: Option<RateLimit>| {
            let pace = self.agent.limits().migration(limit);
            lanes.iter().filter_map(|lane| lane.from).for_each(|from| pace.uses(from));
            #[expect(clippy::cast_precision_loss, reason = "three digits count")]
            pace.data_bytes_per_s().map_or(bytes_per_s, |limit| bytes_per_s.min(limit as f64))
        };
        let (wire, unlimited) =
            (at_most(self.request.bandwidth_limit), at_most(Some(RateLimit::NONE)));
        let cores = std::thread::available_parallelism().map_or(1, Into::into);
        let cost = |survey: &Survey, wire| {
            PageCost::of(
                &survey.content,
                self.request.compression,
                Carry { bytes_per_s: wire, of_cpus_bytes_per_s },
                cores,
            )
        };
        let of_a_lane = self
            .request
            .streams
            .map_or_else(|| first_streams(round_trip), |streams| streams as usize);
        let streams = (of_a_lane * lanes.len().max(1)) as u64;
        // Twice as many streams are tried, and learn too. With a fixed compression, none learns.
        let all_streams = if self.request.streams.is_some() { streams } else { 2 * streams };
        let data = cost(&all, wire);
        let learns =
            self.request.compression == Compression::Auto && data.sent_as != EncodingName::Raw;
        let pages_of_a_unit = all.data_pages() / all.chunks.max(1);
        // A guest that writes nothing leaves no sample of writes; all memory serves as one.
        let written = if hot.written_pages == 0 { &all } else { &hot };
        Conditions {
            data_pages: all.data_pages(),
            data,
            learning_pages: if learns { LEARNING_UNITS * all_streams * pages_of_a_unit } else { 0 },
            raw: PageCost::raw(wire),
            hot: cost(written, wire),
            last: cost(written, unlimited),
            hot_chunks: hot.chunks,
            units_ahead: UNITS_AHEAD * streams,
            curve,
            round_trip,
            prepare: preflight + SHADOW + ROUND_TRIPS * round_trip,
            tracked: TRACKED + round_trip,
            let_go: LET_GO,
            scan,
            policy,
        }
    }
}
