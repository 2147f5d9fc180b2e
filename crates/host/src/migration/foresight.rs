//! What is to be known before a migration so that it can be foretold: what the guest writes, what its memory holds, what the lanes
//! carry. A dry run takes its time for that; a migration has the time that the destination takes to make the shadow.

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

/// From the end of the checks to round 0 where nobody is far: the shadow VM, the streams, their TLS. Median of moves in the lab
/// (`phases[]`: `prepare`, QEMU 7.2 on two cores).
const SHADOW: Duration = Duration::from_millis(130);
/// Of that, from the control stream's hello to round 0: that long the guest's writes have been tracked then.
const TRACKED: Duration = Duration::from_millis(2);
/// Round trips before round 0: the destination's API by TCP and TLS, the control stream, its TLS, its hello, `Begin`.
const ROUND_TRIPS: u32 = 9;
/// From the guest running there to the report here: QEMU's end, taps, files (`phases[]`: `announce`).
const LET_GO: Duration = Duration::from_millis(40);
/// Units of a stream that a sweep has protected and that are not sent: one on its way, two that wait (`drive/dispatch.rs`).
const UNITS_AHEAD: u64 = 3;
/// How often a guest's writes are counted while the destination makes the shadow.
const LOOK_EVERY: Duration = Duration::from_millis(40);
/// Of larger guests nothing is foretold while they move: to look at their memory would take longer than the shadow does.
const MOST_FORETOLD_BYTES: u64 = 64 << 30;

/// What was seen of a guest.
#[derive(Debug)]
pub(super) struct GuestSeen {
    pub(super) curve: DirtyCurve,
    /// What it takes to look for dirty pages in all of the memory.
    scan: Duration,
    /// What its memory holds,
    all: Survey,
    /// and those pages that it wrote while it was looked at.
    hot: Survey,
}

/// A guest that is looked at: all that it writes is seen from the begin on.
pub(super) struct Looking {
    pub(super) tracker: Tracker,
    regions: Vec<Arc<Region>>,
    begun: Instant,
    samples: Vec<(Duration, u64)>,
    /// What the last count took.
    scan: Duration,
}

impl Looking {
    /// Not begun yet.
    pub(super) fn new(tracker: Tracker, regions: &[Arc<Region>]) -> Looking {
        Looking {
            tracker,
            regions: regions.to_vec(),
            begun: Instant::now(),
            samples: Vec::new(),
            scan: Duration::ZERO,
        }
    }

    /// Begins. Blocks for some milliseconds a GiB; the guest runs.
    ///
    /// # Errors
    /// Why it can't be tracked, for people.
    pub(super) fn begin(&mut self) -> Result<(), String> {
        self.tracker.start().map_err(|error| error.to_string())?;
        self.begun = Instant::now();
        Ok(())
    }

    /// When it began.
    pub(super) fn begun(&self) -> Instant {
        self.begun
    }

    /// Counts what has been written until now. Blocks for a millisecond a GiB.
    ///
    /// # Errors
    /// As [`Looking::begin`].
    pub(super) fn count(&mut self) -> Result<(), String> {
        let since = self.begun.elapsed();
        let count = self.tracker.count_dirty().map_err(|error| error.to_string())?;
        self.scan = self.begun.elapsed().saturating_sub(since);
        // Of a large guest a count takes long, and what is written meanwhile is seen by half.
        self.samples.push((since + self.scan / 2, count.pages));
        Ok(())
    }

    /// What was seen, with the survey of all memory.
    ///
    /// # Errors
    /// As [`Looking::begin`].
    pub(super) fn seen(&mut self, all: Survey) -> Result<GuestSeen, String> {
        let mut written: Vec<Vec<PageRange>> = Vec::new();
        for (block, region) in self.regions.iter().enumerate() {
            let mut runs = Vec::new();
            self.tracker
                .look(block, region.all_pages(), &mut runs)
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

/// A glance at a guest while the destination makes its shadow. What fails of it is in nobody's way.
pub(super) enum Glance {
    /// With what its memory holds.
    Looking(Looking, Survey),
    /// Nothing would be foretold.
    Nothing(Tracker),
}

impl Glance {
    /// Counts what has been written until now.
    fn count(&mut self) {
        if let Glance::Looking(looking, _) = self
            && let Err(why) = looking.count()
        {
            tracing::debug!(why, "what the guest writes is not counted");
        }
    }

    /// What was seen until now, and the tracker.
    pub(super) fn end(self) -> (Tracker, Option<GuestSeen>) {
        match self {
            Glance::Nothing(tracker) => (tracker, None),
            Glance::Looking(mut looking, all) => {
                let seen = looking.count().and_then(|()| looking.seen(all));
                let seen = seen.inspect_err(|why| tracing::debug!(why, "nothing is foretold"));
                (looking.tracker, seen.ok())
            }
        }
    }
}

/// What a guest's memory holds.
///
/// # Errors
/// Why it can't be read, for people.
pub(super) fn survey(regions: &[Arc<Region>]) -> Result<Survey, String> {
    Survey::of_memory(regions).map_err(|error| error.to_string())
}

impl Outgoing {
    /// Begins to look at the guest, where that can be made something of: what the lanes carry is known.
    pub(super) fn glance(&self, tracker: Tracker) -> JoinHandle<Glance> {
        let is_known = self.agent.lanes_seen().to(&self.request.to).is_some();
        let is_worth_it = is_known && self.vm.spec.memory_bytes() <= MOST_FORETOLD_BYTES;
        let regions = self.vm.regions.clone();
        tokio::task::spawn_blocking(move || {
            if !is_worth_it {
                return Glance::Nothing(tracker);
            }
            let mut looking = Looking::new(tracker, &regions);
            match looking.begin().and_then(|()| survey(&regions)) {
                Ok(all) => Glance::Looking(looking, all),
                Err(why) => {
                    tracing::debug!(why, "nothing is foretold");
                    Glance::Nothing(looking.tracker)
                }
            }
        })
    }

    /// Counts what the guest writes again and again, until `asking` has its answer.
    pub(super) async fn look_while<T>(
        glance: JoinHandle<Glance>,
        asking: impl Future<Output = T>,
    ) -> (T, Result<Glance, JoinError>) {
        let mut asking = std::pin::pin!(asking);
        let mut glance = std::pin::pin!(glance);
        // The survey may take longer than the answer.
        let begun = tokio::select! {
            answer = &mut asking => return (answer, glance.await),
            begun = &mut glance => begun,
        };
        let mut begun = match begun {
            Ok(begun) => begun,
            Err(error) => return (asking.await, Err(error)),
        };
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                answer = &mut asking => return (answer, Ok(begun)),
                _ = look.tick() => tokio::task::block_in_place(|| begun.count()),
            }
        }
    }

    /// What the migration will be, by what was seen of the guest and what is remembered of the lanes.
    pub(super) async fn foresee(
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

    /// The conditions of its migration by these lanes, of which so long has passed before the destination is asked.
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
        // Twice as many are tried, and learn too; who is told what compresses learns nothing.
        let all_streams = if self.request.streams.is_some() { streams } else { 2 * streams };
        let data = cost(&all, wire);
        let learns =
            self.request.compression == Compression::Auto && data.sent_as != EncodingName::Raw;
        let pages_of_a_unit = all.data_pages() / all.chunks.max(1);
        // A guest that writes nothing leaves no sample: then its memory is one.
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
