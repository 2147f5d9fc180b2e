use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;
use rustix::fs::{CWD, mknodat};

use super::*;

/// A datastore in a directory of its own, and the place of a heartbeat on it.
struct Datastore {
    dir: tempfile::TempDir,
    slot: HeartbeatSlot,
}

impl Datastore {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let uuids = [0; 3].map(|_| Uuid::new_v4());
        let [cluster, host, datastore] = uuids;
        mark(dir.path(), datastore);
        Datastore { dir, slot: HeartbeatSlot { cluster, host, datastore } }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn folder(&self) -> PathBuf {
        self.path().join(".godwit/heartbeats").join(self.slot.cluster.to_string())
    }

    fn file(&self) -> PathBuf {
        self.folder().join(self.slot.host.to_string())
    }

    fn open(&self, term: u64) -> Result<(), HeartbeatError> {
        open(self.path(), self.slot, Term(term), Instant::now() + Duration::from_secs(60))
    }

    fn write(&self, term: u64, least: u64) -> Result<(), HeartbeatError> {
        write(self.path(), self.slot, Term(term), least)
    }

    fn read(&self) -> HeartbeatReading {
        read(self.path(), self.slot.datastore, &[self.slot]).unwrap().remove(0)
    }

    /// Checks that the heartbeat is foreign to readers and that its host leaves it alone.
    fn is_foreign(&self, what: &str) {
        let found = self.read();
        assert!(matches!(found, HeartbeatReading::Foreign { .. }), "{what}: {found:?}");
        self.write(1, 0).expect_err(what);
    }
}

fn mark(dir: &Path, datastore: Uuid) {
    let marker = format!("godwit datastore 1\n{datastore}\n");
    fs::write(dir.join(".godwit-datastore"), marker).unwrap();
}

fn page(slot: HeartbeatSlot, term: u64, sequence: u64) -> Vec<u8> {
    let block = Block { slot: key(slot), mark: Mark { term: Term(term), sequence } };
    Page::of(&block.encode()).0.to_vec()
}

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_host_writes_what_a_reader_has_opened() {
    let datastore = Datastore::new();
    assert!(matches!(datastore.read(), HeartbeatReading::Failed { .. }));
    assert!(matches!(datastore.write(3, 0), Err(HeartbeatError::Missing)));
    datastore.open(3).unwrap();
    assert_eq!(datastore.read(), HeartbeatReading::Block { term: 3, sequence: 0 });
    datastore.write(3, 0).unwrap();
    assert_eq!(datastore.read(), HeartbeatReading::Block { term: 3, sequence: 1 });
    datastore.write(3, 0).unwrap();
    assert_eq!(datastore.read(), HeartbeatReading::Block { term: 3, sequence: 2 });
    let found = fs::metadata(datastore.file()).unwrap();
    assert_eq!((found.len(), found.permissions().mode() & 0o077), (4096, 0));
    assert_eq!(fs::read(datastore.file()).unwrap(), page(datastore.slot, 3, 2));
    fs::write(datastore.file(), [0; FILE_BYTES]).unwrap();
    assert_eq!(datastore.read(), HeartbeatReading::Empty);
    assert!(matches!(datastore.write(3, 2), Err(HeartbeatError::Block(BadBlock::Magic))));
    // Nothing but the heartbeat remains.
    assert_eq!(names(&datastore.folder()), [datastore.slot.host.to_string()]);
}

#[test]
fn an_open_term_stays_and_only_a_later_one_replaces_it() {
    let datastore = Datastore::new();
    datastore.open(3).unwrap();
    datastore.write(3, 0).unwrap();
    datastore.open(3).unwrap();
    assert_eq!(datastore.read(), HeartbeatReading::Block { term: 3, sequence: 1 });
    datastore.open(5).unwrap();
    assert_eq!(datastore.read(), HeartbeatReading::Block { term: 5, sequence: 0 });
    assert!(matches!(datastore.write(3, 1), Err(HeartbeatError::Block(BadBlock::OtherTerm))));
    assert!(matches!(datastore.open(4), Err(HeartbeatError::Newer(Term(5)))));
    let late = open(datastore.path(), datastore.slot, Term(6), Instant::now());
    assert!(matches!(late, Err(HeartbeatError::Late)));
    assert_eq!(datastore.read(), HeartbeatReading::Block { term: 5, sequence: 0 });
    assert_eq!(names(&datastore.folder()).len(), 1);
}

#[test]
fn a_sequence_number_that_went_back_is_not_used_again() {
    let datastore = Datastore::new();
    datastore.open(1).unwrap();
    datastore.write(1, 7).unwrap();
    assert_eq!(datastore.read(), HeartbeatReading::Block { term: 1, sequence: 8 });
    fs::write(datastore.file(), page(datastore.slot, 1, u64::MAX)).unwrap();
    assert!(matches!(datastore.write(1, 8), Err(HeartbeatError::LastSequence)));
    assert_eq!(fs::read(datastore.file()).unwrap(), page(datastore.slot, 1, u64::MAX));
}

#[test]
fn a_directory_that_is_not_the_datastore_gets_no_heartbeat() {
    let datastore = Datastore::new();
    datastore.open(1).unwrap();
    fs::remove_dir_all(datastore.path().join(".godwit")).unwrap();
    let refused = |what: &str| {
        let slot = datastore.slot;
        datastore.open(1).expect_err(what);
        datastore.write(1, 0).expect_err(what);
        assert!(read(datastore.path(), slot.datastore, &[slot]).is_err(), "{what}");
        assert!(!datastore.path().join(".godwit").exists(), "{what}");
    };
    // What is below a mount that is gone has no marker, or one of its own.
    mark(datastore.path(), Uuid::new_v4());
    refused("another marker");
    fs::remove_file(datastore.path().join(".godwit-datastore")).unwrap();
    refused("no marker");
    assert!(names(datastore.path()).is_empty());
}

#[test]
fn links_and_devices_lead_nowhere() {
    let (datastore, other) = (Datastore::new(), Datastore::new());
    datastore.open(1).unwrap();
    let target = other.path().join("shadow");
    let contents = page(datastore.slot, 1, 4);
    fs::write(&target, &contents).unwrap();
    let untouched = || assert_eq!(fs::read(&target).unwrap(), contents);

    fs::remove_file(datastore.file()).unwrap();
    symlink(&target, datastore.file()).unwrap();
    datastore.is_foreign("a link to a file");
    assert!(matches!(datastore.open(2), Err(HeartbeatError::NotAFile)));
    untouched();
    fs::remove_file(datastore.file()).unwrap();
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, datastore.file(), FileType::Fifo, mode, 0).unwrap();
    datastore.is_foreign("a FIFO that nobody reads");
    assert!(matches!(datastore.open(2), Err(HeartbeatError::NotAFile)));
    fs::remove_file(datastore.file()).unwrap();
    fs::create_dir(datastore.file()).unwrap();
    datastore.is_foreign("a folder");
    assert!(matches!(datastore.open(2), Err(HeartbeatError::NotAFile)));

    // Links in place of the folders, to folders with a heartbeat that fits.
    let elsewhere = other.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join(datastore.slot.host.to_string()), &contents).unwrap();
    fs::remove_dir_all(datastore.folder()).unwrap();
    symlink(&elsewhere, datastore.folder()).unwrap();
    datastore.is_foreign("a link to a cluster's folder");
    assert!(matches!(datastore.open(2), Err(HeartbeatError::Link)));
    fs::remove_dir_all(datastore.path().join(".godwit")).unwrap();
    symlink(other.path(), datastore.path().join(".godwit")).unwrap();
    datastore.is_foreign("a link to a folder of another name");
    assert!(matches!(datastore.open(2), Err(HeartbeatError::Link)));
    assert_eq!(names(&elsewhere).len(), 1);
    assert_eq!(names(other.path()), [".godwit-datastore", "elsewhere", "shadow"]);
}

#[test]
fn folders_that_other_users_can_change_have_no_heartbeats() {
    let datastore = Datastore::new();
    datastore.open(1).unwrap();
    let folders = [".godwit", ".godwit/heartbeats"].map(|name| datastore.path().join(name));
    for folder in folders.into_iter().chain([datastore.folder()]) {
        for mode in [0o770, 0o702] {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
            datastore.is_foreign("a folder of others");
            assert!(matches!(datastore.open(2), Err(HeartbeatError::OfOthers)));
        }
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        datastore.write(1, 0).unwrap();
    }
}

#[test]
fn short_damaged_and_foreign_blocks_are_no_heartbeat_and_a_term_replaces_them() {
    let datastore = Datastore::new();
    datastore.open(1).unwrap();
    let own = page(datastore.slot, 1, 4);
    let of = |slot| page(slot, 1, 4);
    let [cluster, host, another] = [0; 3].map(|_| Uuid::new_v4());
    let slot = datastore.slot;
    let mut damaged = own.clone();
    damaged[60] ^= 1;
    for (what, contents) in [
        ("an empty file", Vec::new()),
        ("a block without the rest", own[..512].to_vec()),
        ("a longer file", [&own[..], &[0]].concat()),
        ("a huge file", vec![0; 1 << 20]),
        ("a damaged block", damaged),
        ("a text", b"# not a heartbeat\n".repeat(256)[..FILE_BYTES].to_vec()),
        ("another cluster", of(HeartbeatSlot { cluster, ..slot })),
        ("another host", of(HeartbeatSlot { host, ..slot })),
        ("another datastore", of(HeartbeatSlot { datastore: another, ..slot })),
    ] {
        fs::write(datastore.file(), &contents).unwrap();
        datastore.is_foreign(what);
        assert_eq!(fs::read(datastore.file()).unwrap(), contents, "{what}");
        datastore.open(1).unwrap();
        assert_eq!(datastore.read(), HeartbeatReading::Block { term: 1, sequence: 0 }, "{what}");
        datastore.write(1, 4).unwrap();
        assert_eq!(datastore.read(), HeartbeatReading::Block { term: 1, sequence: 5 }, "{what}");
    }
}

#[test]
fn folders_of_other_clusters_are_not_read() {
    let datastore = Datastore::new();
    datastore.open(1).unwrap();
    let other = datastore.path().join(".godwit/heartbeats").join(Uuid::new_v4().to_string());
    for folder in [&other, &datastore.folder()] {
        fs::create_dir_all(folder).unwrap();
        for number in 0..1000 {
            fs::write(folder.join(format!("file {number}")), "x").unwrap();
        }
    }
    let readings = read(datastore.path(), datastore.slot.datastore, &[datastore.slot; 256]);
    let expected = HeartbeatReading::Block { term: 1, sequence: 0 };
    assert_eq!(readings.unwrap(), vec![expected; 256]);
    datastore.write(1, 0).unwrap();
    datastore.open(2).unwrap();
    assert_eq!((names(&other).len(), names(&datastore.folder()).len()), (1000, 1001));
}

#[test]
fn readers_that_open_a_term_at_once_leave_one_heartbeat() {
    let datastore = Datastore::new();
    for term in 1..4 {
        std::thread::scope(|scope| {
            let opens = [(); 8].map(|()| scope.spawn(|| datastore.open(term)));
            opens.into_iter().for_each(|open| open.join().unwrap().unwrap());
        });
        assert_eq!(datastore.read(), HeartbeatReading::Block { term, sequence: 0 });
        assert_eq!(names(&datastore.folder()).len(), 1);
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Opened(u64),
    Written(u64),
    /// Something wrote the opening block of a term, as a reader that was held up would.
    Reset(u64),
    Damaged,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => (1_u64..4).prop_map(Event::Opened),
        4 => (1_u64..4).prop_map(Event::Written),
        1 => (1_u64..4).prop_map(Event::Reset),
        1 => Just(Event::Damaged),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// In any order of events, each heartbeat that a host writes has a number that it never had
    /// before, and a reader finds it. Opening fails only for a term before the one that is open.
    #[test]
    fn the_numbers_of_heartbeats_grow(events in prop::collection::vec(event(), 1..30)) {
        let datastore = Datastore::new();
        datastore.open(1).unwrap();
        let mut newest = 0;
        for event in events {
            match event {
                Event::Opened(term) => {
                    if datastore.open(term).is_err() {
                        let found = datastore.read();
                        let is_newer = matches!(
                            found, HeartbeatReading::Block { term: other, .. } if other > term
                        );
                        prop_assert!(is_newer, "{found:?}");
                    }
                }
                Event::Written(term) => {
                    if datastore.write(term, newest).is_ok() {
                        let HeartbeatReading::Block { term: found, sequence } = datastore.read()
                        else {
                            return Err(TestCaseError::fail("no block was written"));
                        };
                        prop_assert_eq!(found, term);
                        prop_assert!(sequence > newest);
                        newest = sequence;
                    }
                }
                Event::Reset(term) => {
                    fs::write(datastore.file(), page(datastore.slot, term, 0)).unwrap();
                }
                Event::Damaged => fs::write(datastore.file(), [7; 9]).unwrap(),
            }
        }
    }
}
