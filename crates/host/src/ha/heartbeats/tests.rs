use std::fs;
use std::sync::mpsc;

use super::*;

/// Time limit that no reading reaches, however slow the disk is.
const PATIENCE: Duration = Duration::from_secs(60);

fn patient() -> Heartbeats {
    Heartbeats { limit: PATIENCE, ..Heartbeats::default() }
}

/// A datastore in a directory of its own.
struct Datastore {
    dir: tempfile::TempDir,
    slot: HeartbeatSlot,
}

impl Datastore {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [cluster, host, datastore] = [0; 3].map(|_| Uuid::new_v4());
        let marker = format!("godwit datastore 1\n{datastore}\n");
        fs::write(dir.path().join(".godwit-datastore"), marker).unwrap();
        Datastore { dir, slot: HeartbeatSlot { cluster, host, datastore } }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().to_owned()
    }
}

fn directories(all: &[&Datastore]) -> BTreeMap<Uuid, PathBuf> {
    all.iter().map(|datastore| (datastore.slot.datastore, datastore.path())).collect()
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap()
}

/// Returns the sequence number that was read.
fn number(reading: &HeartbeatReading) -> u64 {
    match reading {
        HeartbeatReading::Block { sequence, .. } => *sequence,
        other => panic!("{other:?}"),
    }
}

/// Begins to write a heartbeat; returns when that began, or why nothing was written.
fn write(
    heartbeats: &Heartbeats,
    datastore: &Datastore,
    term: u64,
) -> Result<Duration, HeartbeatError> {
    let (ended, reports) = mpsc::sync_channel(1);
    let path = datastore.path();
    heartbeats.write(Some(&path), datastore.slot, Term(term), move |written| {
        ended.send(written).unwrap();
    });
    let written = reports.recv().unwrap();
    // The next one has its turn when this one's thread has ended it.
    while matches!(written, Ok(_) | Err(HeartbeatError::Missing))
        && heartbeats.turns.begin(datastore.slot.datastore, Work::Write).is_none()
    {
        std::thread::yield_now();
    }
    written
}

#[tokio::test]
async fn heartbeats_are_opened_written_confirmed_and_read_in_order() {
    let (heartbeats, one, other) = (patient(), Datastore::new(), Datastore::new());
    let all = directories(&[&one, &other]);
    for datastore in [&one, &other] {
        heartbeats.open(Some(datastore.path()), datastore.slot, Term(3)).await.unwrap();
    }
    let before = boot_clock();
    let started_at = write(&heartbeats, &one, 3).unwrap();
    assert!(started_at >= before && started_at <= boot_clock());
    let started_at = write(&heartbeats, &one, 3).unwrap();
    let unknown = Datastore::new();
    let slots = [one.slot, unknown.slot, other.slot, one.slot];
    let readings = heartbeats.read(&all, &slots).await;
    assert!(number(&readings[0]) > ms(started_at), "{readings:?}");
    assert_eq!(readings[1], HeartbeatError::NoDatastore.reading());
    assert_eq!(readings[2], HeartbeatReading::Block { term: 3, sequence: 0 });
    assert_eq!(readings[3], readings[0]);
    let nowhere = heartbeats.open(None, unknown.slot, Term(3)).await;
    assert!(matches!(nowhere, Err(HeartbeatError::NoDatastore)));
}

#[tokio::test]
async fn a_write_that_fails_confirms_nothing_and_says_why() {
    let (heartbeats, datastore) = (patient(), Datastore::new());
    assert!(matches!(write(&heartbeats, &datastore, 1), Err(HeartbeatError::Missing)));
    let (ended, reports) = mpsc::sync_channel(1);
    heartbeats.write(None, datastore.slot, Term(1), move |written| ended.send(written).unwrap());
    assert!(matches!(reports.recv().unwrap(), Err(HeartbeatError::NoDatastore)));
    heartbeats.open(Some(datastore.path()), datastore.slot, Term(1)).await.unwrap();
    write(&heartbeats, &datastore, 1).unwrap();
}

#[tokio::test]
async fn a_term_that_is_opened_once_more_gets_no_number_again() {
    let (heartbeats, datastore) = (patient(), Datastore::new());
    let (all, slot) = (directories(&[&datastore]), datastore.slot);
    let mut newest = 0;
    for _ in 0..3 {
        // As a reader would that was held up.
        let _ = fs::remove_dir_all(datastore.path().join(".godwit"));
        heartbeats.open(Some(datastore.path()), slot, Term(1)).await.unwrap();
        while ms(boot_clock()) <= newest {
            std::thread::yield_now();
        }
        write(&heartbeats, &datastore, 1).unwrap();
        let found = number(&heartbeats.read(&all, &[slot]).await[0]);
        assert!(found > newest);
        newest = found;
    }
}

#[tokio::test]
async fn a_datastore_that_hangs_holds_up_nothing_else() {
    let (mut heartbeats, hung, other) = (patient(), Datastore::new(), Datastore::new());
    let all = directories(&[&hung, &other]);
    for datastore in [&hung, &other] {
        heartbeats.open(Some(datastore.path()), datastore.slot, Term(1)).await.unwrap();
    }
    // Threads that do not return keep their turns.
    let works = [Work::Read, Work::Write];
    let turns = works.map(|work| heartbeats.turns.begin(hung.slot.datastore, work).unwrap());
    heartbeats.limit = Duration::from_millis(1);
    let readings = heartbeats.read(&all, &[hung.slot, hung.slot]).await;
    assert_eq!(readings, vec![HeartbeatError::Late.reading(); 2]);
    let opened = heartbeats.open(Some(hung.path()), hung.slot, Term(2)).await;
    assert!(matches!(opened, Err(HeartbeatError::Late)));
    assert!(matches!(write(&heartbeats, &hung, 1), Err(HeartbeatError::Busy)));

    heartbeats.limit = PATIENCE;
    write(&heartbeats, &other, 1).unwrap();
    let readings = heartbeats.read(&all, &[other.slot]).await;
    assert!(number(&readings[0]) > 0, "{readings:?}");
    drop(turns);
    write(&heartbeats, &hung, 1).unwrap();
    let readings = heartbeats.read(&all, &[hung.slot]).await;
    assert!(number(&readings[0]) > 0, "{readings:?}");
}
