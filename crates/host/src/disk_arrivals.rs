//! Transfers of disks that arrive with a VM: what both the images and the streams of one are known
//! by. [`crate::agent`] makes and removes the images, [`crate::migration`] fills them.

mod opened;
mod present;
mod streams;
mod turns;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use godwit_api::{ApiError, ArrivingBase, ArrivingDisks, ErrorCode};
use godwit_migration::Failure;
use godwit_qemu::Uuid;
use godwit_types::FailureCode;
use godwit_wire::MigrationId;
use parking_lot::Mutex;

use crate::store::SavedArrival;

pub(crate) use opened::{AlikeImage, OpenedContent, OpenedImage};
pub(crate) use present::PresentMap;
pub(crate) use streams::ArrivingStreams;
use turns::Turns;
pub(crate) use turns::{Subject, Turn};

/// Longest time for which a request waits for its turn.
const TURN_LIMIT: Duration = Duration::from_secs(60);
/// Most transfers and checks that begin at once. The storage of each may hang.
const MOST_BEGINNING: usize = 64;
/// Most of them that one host is the source of.
const MOST_BEGINNING_OF_HOST: usize = 32;
/// Most of them for one VM: those that hang leave room for others.
const MOST_BEGINNING_OF_VM: usize = 4;

/// Transfers of this host, also those whose source is not connected.
#[derive(Debug, Default)]
pub(crate) struct DiskArrivals {
    all: Mutex<Vec<Arc<DiskArrival>>>,
    turns: Arc<Turns>,
    beginning: Arc<Mutex<HashMap<MigrationId, Begun>>>,
}

/// What is known of a transfer that begins.
#[derive(Debug)]
struct Begun {
    /// The source host.
    from: String,
    /// Name of the VM.
    vm: String,
    /// Disks that will be open.
    disks: usize,
    /// Whether its source does not want it any more.
    is_given_up: bool,
}

/// A transfer that begins, or goes on: its images are made or opened until this is dropped.
#[derive(Debug)]
pub(crate) struct Beginning {
    id: MigrationId,
    all: Arc<Mutex<HashMap<MigrationId, Begun>>>,
}

impl Beginning {
    /// Whether the source has given the transfer up meanwhile.
    fn is_given_up(&self) -> bool {
        self.all.lock().get(&self.id).is_some_and(|begun| begun.is_given_up)
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        self.all.lock().remove(&self.id);
    }
}

/// Turn of a transfer that begins, or goes on.
pub(crate) struct ArrivalTurn {
    /// Ends before the turn.
    pub(crate) beginning: Beginning,
    _own: Turn,
}

impl ArrivalTurn {
    /// Creates the turn. `own`: that at the transfer and its VM.
    pub(crate) fn new(beginning: Beginning, own: Turn) -> ArrivalTurn {
        ArrivalTurn { beginning, _own: own }
    }

    /// Refuses to go on with a transfer that its source has given up since it began.
    pub(crate) fn refuse_cancelled(&self, vm: &str) -> Result<(), ApiError> {
        if !self.beginning.is_given_up() {
            return Ok(());
        }
        let message = format!("cannot accept the disks of VM \"{vm}\": the move was cancelled");
        Err(ApiError::new(ErrorCode::WrongState, message, "migrate again"))
    }
}

/// A transfer whose images are ready to be filled.
pub(crate) struct PreparedArrival {
    pub(crate) arrival: Arc<DiskArrival>,
    /// Whether its images have just been made.
    pub(crate) is_new: bool,
    /// Ends when the streams of the source are awaited.
    pub(crate) turn: ArrivalTurn,
}

/// Transfers, and disks of them that are open or will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArrivalLoad {
    pub(crate) transfers: usize,
    pub(crate) open_disks: usize,
}

/// One transfer.
pub(crate) struct DiskArrival {
    pub(crate) id: MigrationId,
    pub(crate) record: SavedArrival,
    /// Real paths of the images; of those in pools of Ceph their names.
    pub(crate) images: Vec<PathBuf>,
    /// What is on the disk.
    pub(crate) present: Mutex<PresentMap>,
    /// Streams of the present connection, or of the last one.
    streams: Mutex<Option<Arc<ArrivingStreams>>>,
    /// Backing files that the source stated last, for each disk.
    pub(crate) bases: Mutex<Vec<Vec<ArrivingBase>>>,
    seen: Mutex<Instant>,
    /// Held while the record is written or removed.
    pub(crate) recording: Mutex<()>,
    /// Whether a guest may have begun to write the images: the transfer does not go on.
    is_sealed: AtomicBool,
    /// Whether its source wants it removed.
    is_given_up: AtomicBool,
    /// Claims of the images and of their backing files.
    _claims: Vec<Box<dyn Any + Send + Sync>>,
}

impl fmt::Debug for DiskArrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskArrival").field("id", &self.id).finish_non_exhaustive()
    }
}

impl DiskArrivals {
    /// Waits for a turn at these subjects.
    ///
    /// # Errors
    /// One of them that has been busy all the time.
    pub(crate) async fn turn(
        &self,
        subjects: impl IntoIterator<Item = Subject>,
    ) -> Result<Turn, Subject> {
        self.turns.take(subjects.into_iter().collect(), TURN_LIMIT).await
    }

    /// Begins a transfer or a check, in its turn; `None`: too many begin.
    pub(crate) fn begin(&self, id: MigrationId, from: &str, vm: &str) -> Option<Beginning> {
        let mut beginning = self.beginning.lock();
        let of_host = beginning.values().filter(|begun| begun.from == from).count();
        let of_vm = beginning.values().filter(|begun| begun.vm == vm).count();
        if beginning.len() >= MOST_BEGINNING
            || of_host >= MOST_BEGINNING_OF_HOST
            || of_vm >= MOST_BEGINNING_OF_VM
        {
            return None;
        }
        let (from, vm) = (from.to_owned(), vm.to_owned());
        beginning.insert(id, Begun { from, vm, disks: 0, is_given_up: false });
        Some(Beginning { id, all: Arc::clone(&self.beginning) })
    }

    /// Reserves the disks of a transfer that begins, within a limit for it and all others.
    ///
    /// # Errors
    /// The load of the others. `counts`: whether another transfer stays beside it.
    pub(crate) fn reserve(
        &self,
        transfer: &Beginning,
        disks: usize,
        most: ArrivalLoad,
        counts: impl Fn(&DiskArrival) -> bool,
    ) -> Result<(), ArrivalLoad> {
        let mut beginning = self.beginning.lock();
        let mut others = self.all();
        others.retain(|known| known.id != transfer.id && counts(known));
        let unknown = beginning
            .iter()
            .filter(|(id, _)| **id != transfer.id && others.iter().all(|known| known.id != **id));
        let mut load = ArrivalLoad { transfers: others.len(), open_disks: 0 };
        for (_, begun) in unknown {
            load.transfers += 1;
            load.open_disks += begun.disks;
        }
        for known in &others {
            let open = if known.is_open() { known.record.disks.len() } else { 0 };
            load.open_disks += beginning.get(&known.id).map_or(0, |begun| begun.disks).max(open);
        }
        if load.transfers >= most.transfers || load.open_disks + disks > most.open_disks {
            return Err(load);
        }
        if let Some(begun) = beginning.get_mut(&transfer.id) {
            begun.disks = disks;
        }
        Ok(())
    }

    /// Returns the source of a transfer, also of one that begins.
    pub(crate) fn source_of(&self, id: MigrationId) -> Option<String> {
        let known = self.find(id).map(|known| known.record.from.clone());
        known.or_else(|| self.beginning.lock().get(&id).map(|begun| begun.from.clone()))
    }

    /// Notes that the source of a transfer does not want it any more, should it begin just now.
    pub(crate) fn give_up_beginning(&self, id: MigrationId, from: &str) {
        if let Some(begun) = self.beginning.lock().get_mut(&id)
            && begun.from == from
        {
            begun.is_given_up = true;
        }
    }

    pub(crate) fn all(&self) -> Vec<Arc<DiskArrival>> {
        self.all.lock().clone()
    }

    pub(crate) fn find(&self, id: MigrationId) -> Option<Arc<DiskArrival>> {
        self.all.lock().iter().find(|arrival| arrival.id == id).cloned()
    }

    /// Adds a transfer in place of an earlier one of its ID.
    pub(crate) fn add(&self, arrival: Arc<DiskArrival>) {
        let mut all = self.all.lock();
        all.retain(|known| known.id != arrival.id);
        all.push(arrival);
    }

    pub(crate) fn remove(&self, id: MigrationId) {
        self.all.lock().retain(|arrival| arrival.id != id);
    }
}

impl DiskArrival {
    pub(crate) fn new(
        id: MigrationId,
        record: SavedArrival,
        images: Vec<PathBuf>,
        present: PresentMap,
        claims: Vec<Box<dyn Any + Send + Sync>>,
    ) -> DiskArrival {
        DiskArrival {
            id,
            images,
            present: Mutex::new(present),
            streams: Mutex::default(),
            bases: Mutex::default(),
            // No source could connect before, whatever the clock says now.
            seen: Mutex::new(Instant::now()),
            recording: Mutex::default(),
            record,
            is_sealed: AtomicBool::new(false),
            is_given_up: AtomicBool::new(false),
            _claims: claims,
        }
    }

    /// Whether it is a transfer of this VM.
    pub(crate) fn is_of(&self, vm: &str, uuid: Uuid) -> bool {
        match uuid.is_nil() || self.record.uuid.is_nil() {
            true => *self.record.vm == *vm,
            false => self.record.uuid == uuid,
        }
    }

    /// Sizes of the disks, in bytes.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        self.record.disks.iter().map(|disk| disk.virtual_bytes).collect()
    }

    /// Begins another connection of the source.
    pub(crate) fn connect(&self) -> Arc<ArrivingStreams> {
        let streams = Arc::<ArrivingStreams>::default();
        *self.streams.lock() = Some(Arc::clone(&streams));
        streams
    }

    /// Notes the backing files that the source states.
    pub(crate) fn note_bases(&self, request: &ArrivingDisks) {
        *self.bases.lock() = request.disks.iter().map(|disk| disk.base.clone()).collect();
    }

    fn streams(&self) -> Option<Arc<ArrivingStreams>> {
        self.streams.lock().clone()
    }

    /// Whether a stream of the source is open.
    pub(crate) fn is_connected(&self) -> bool {
        self.streams().is_some_and(|streams| streams.are_open())
    }

    /// Whether its images are open: its source is awaited, or connected.
    pub(crate) fn is_open(&self) -> bool {
        self.streams().is_some_and(|streams| streams.may_write())
    }

    /// Ends the present connection, and waits until nothing of it is written any more. Returns
    /// whether that is certain. Blocks.
    pub(crate) fn disconnect(&self) -> bool {
        self.streams().is_none_or(|streams| streams.end())
    }

    /// Waits until all of the disks is on this host's disk, and nobody else has the images open to
    /// write them.
    ///
    /// # Errors
    /// They do not arrive, or not within `limit`.
    pub(crate) fn wait_complete(&self, limit: Duration) -> Result<(), Failure> {
        let Some(streams) = self.streams() else {
            let detail = "the disks of the VM have not arrived: their streams never connected";
            return Err(Failure::new(FailureCode::DiskFailed, detail));
        };
        streams.wait_complete(limit)
    }

    /// Ends the transfer for good: from now on a guest may write the images.
    pub(crate) fn seal(&self) {
        self.is_sealed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.is_sealed.load(Ordering::SeqCst)
    }

    /// Whether it cannot go on. A thin volume of one that is given up may be marked for its
    /// removal.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_sealed() || (self.is_abandoned() && self.record.has_volumes())
    }

    /// Notes that the source wants it removed.
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::SeqCst);
    }

    /// Whether it is of no use if its VM does not come: it cannot go on, or its source does not
    /// want it to.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.is_sealed() || self.is_given_up.load(Ordering::SeqCst)
    }

    /// Notes that the source is connected, or was until now. Returns the record that says so.
    pub(crate) fn seen(&self) -> SavedArrival {
        *self.seen.lock() = Instant::now();
        self.record.seen_at(now_unix_s())
    }

    /// Time since the source was last seen to be connected, or the agent found the transfer.
    pub(crate) fn unseen_for(&self) -> Duration {
        self.seen.lock().elapsed()
    }
}

/// Returns the time in whole seconds of Unix time.
pub(crate) fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_that_begin_count_and_only_their_source_gives_them_up() {
        let arrivals = DiskArrivals::default();
        let most = ArrivalLoad { transfers: 3, open_disks: 8 };
        let ids = [1, 2, 3, 4].map(|byte| MigrationId([byte; 16]));
        let begun = ids.map(|id| arrivals.begin(id, "b", "web").unwrap());
        let reserve = |number: usize, disks| {
            arrivals.reserve(&begun[number], disks, most, |_| true).map_err(|load| load.open_disks)
        };
        // Three others begin, without a disk yet.
        assert_eq!(reserve(0, 1), Err(0));
        let [first, second, third, fourth] = begun;
        drop(fourth);
        let reserve = |begun: &Beginning, disks| {
            arrivals.reserve(begun, disks, most, |_| true).map_err(|load| load.open_disks)
        };
        assert_eq!(reserve(&first, 6), Ok(()));
        assert_eq!((reserve(&second, 3), reserve(&second, 2)), (Err(6), Ok(())));
        assert_eq!((reserve(&third, 1), reserve(&first, 5)), (Err(8), Ok(())));
        assert_eq!(reserve(&third, 1), Ok(()));
        for (from, is_given_up) in [("c", false), ("b", true)] {
            arrivals.give_up_beginning(second.id, from);
            assert_eq!(second.is_given_up(), is_given_up);
        }
        assert!(!first.is_given_up());
        let id = second.id;
        assert_eq!(arrivals.source_of(id).as_deref(), Some("b"));
        drop(second);
        assert_eq!(arrivals.source_of(id), None);
    }

    #[test]
    fn the_transfers_that_begin_at_once_have_a_bound() {
        let arrivals = DiskArrivals::default();
        let begin = |number: usize, from: &str, vm: &str| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&number.to_le_bytes());
            arrivals.begin(MigrationId(id), from, vm)
        };
        let from_many = |number: usize| {
            let (from, vm) = (format!("host{}", number % 3), format!("vm{number}"));
            begin(number, &from, &vm)
        };
        let mut all: Vec<_> = (0..MOST_BEGINNING).filter_map(from_many).collect();
        assert!(all.len() == MOST_BEGINNING && from_many(MOST_BEGINNING).is_none());
        all.pop();
        assert!(from_many(MOST_BEGINNING).is_some());
        all.clear();
        // One host, or one VM, leaves room for others.
        for (of_one, most) in [(true, MOST_BEGINNING_OF_VM), (false, MOST_BEGINNING_OF_HOST)] {
            let vm = |number: usize| if of_one { "web".to_owned() } else { format!("vm{number}") };
            let begun: Vec<_> = (0..most).filter_map(|n| begin(n, "b", &vm(n))).collect();
            assert!(begun.len() == most && begin(most, "b", &vm(most)).is_none());
            assert!(begin(most, "c", "db").is_some());
        }
    }
}
