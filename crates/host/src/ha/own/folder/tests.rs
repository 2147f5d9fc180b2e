use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::thread;

use godwit_qemu::{Disk, DiskFormat, VmSpec};
use tempfile::TempDir;

use super::*;

const VM: Uuid = Uuid::from_u128(0x11);
const ONE: Uuid = Uuid::from_u128(0x22);
const OTHER: Uuid = Uuid::from_u128(0x33);
const DATASTORE: Uuid = Uuid::from_u128(0x44);

struct Store(TempDir);

impl Store {
    fn new() -> Store {
        let dir = tempfile::tempdir().unwrap();
        let marker = format!("godwit datastore 1\n{DATASTORE}\n");
        fs::write(dir.path().join(".godwit-datastore"), marker).unwrap();
        Store(dir)
    }

    fn place(&self) -> Place {
        Place { directory: self.0.path().to_owned(), datastore: DATASTORE, vm: VM }
    }

    fn folder(&self) -> PathBuf {
        self.0.path().join(".godwit/protected").join(VM.to_string())
    }

    fn claim(&self, host: Uuid, after: u64) -> Result<Term, OwnError> {
        claim(&self.place(), host, (Term(after), true), true)
    }

    fn beat(&self, host: Uuid, term: u64, end: End) -> Result<(), OwnError> {
        beat(&self.place(), host, (Term(term), 0), (true, end), &LastBlock::default())
    }

    fn found(&self) -> Found {
        look(&self.place()).unwrap().unwrap()
    }

    fn block(&self) -> OwnBlock {
        self.found().block.unwrap().unwrap()
    }

    fn record(&self, term: u64) -> OwnRecord {
        let spec = VmSpec {
            disks: vec![Disk::new(self.0.path().join("web.raw"), DiskFormat::Raw)],
            protect_by_agents: true,
            uuid: Some(VM),
            ..VmSpec::new("web")
        };
        OwnRecord::new(spec, term, "a")
    }
}

#[test]
fn a_term_is_claimed_once_written_by_its_host_alone_and_ends_once() {
    let store = Store::new();
    assert!(look(&store.place()).unwrap().is_none());
    assert_eq!(store.claim(ONE, 0).unwrap(), Term(1));
    for (host, after) in [(OTHER, 0), (OTHER, 2)] {
        let refused = store.claim(host, after).unwrap_err();
        assert!(matches!(refused, OwnError::Claimed(Term(1))), "{refused}");
    }
    assert_eq!((store.block().end, store.block().block.mark.sequence), (End::None, 0));
    store.beat(ONE, 1, End::None).unwrap();
    store.beat(ONE, 1, End::None).unwrap();
    assert_eq!(store.block().block.mark.sequence, 2);
    store.beat(OTHER, 1, End::None).unwrap_err();
    store.beat(ONE, 2, End::None).unwrap_err();
    store.beat(ONE, 1, End::Stopped).unwrap();
    store.beat(ONE, 1, End::None).unwrap_err();
    assert_eq!(store.block().end, End::Stopped);

    assert_eq!(store.claim(OTHER, 1).unwrap(), Term(2));
    let refused = store.beat(ONE, 1, End::None).unwrap_err();
    assert!(matches!(refused, OwnError::Claimed(Term(2))), "{refused}");
}

#[test]
fn its_holder_alone_writes_a_damaged_block_again() {
    let store = Store::new();
    store.claim(ONE, 0).unwrap();
    let (place, file) = (store.place(), store.folder().join("term-1"));
    let last = LastBlock::default();
    let beat = |least| beat(&place, ONE, (Term(1), least), (true, End::None), &last);
    let claimed = fs::read(&file).unwrap();
    let damaged = vec![0xff_u8; claimed.len()];
    fs::write(&file, &damaged).unwrap();
    beat(5).expect_err("it has written nothing yet");
    fs::write(&file, claimed).unwrap();
    beat(5).unwrap();
    assert_eq!(store.block().block.mark.sequence, 6);
    for (bytes, number) in [(&damaged, 7), (&vec![0_u8; damaged.len()], 8)] {
        fs::write(&file, bytes).unwrap();
        store.found().block.expect_err("nobody takes it for a block");
        store.beat(ONE, 1, End::Stopped).expect_err("an agent that has just been started");
        store.beat(OTHER, 1, End::None).expect_err("another host");
        beat(0).unwrap();
        // A number that comes again would be taken for a silence.
        assert_eq!(store.block().block.mark.sequence, number);
    }
    // A good block of another host is no damage, and after it nothing is known.
    let mut foreign = OwnBlock::claim(place.slot(OTHER), Term(1), true).encode().to_vec();
    foreign.resize(damaged.len(), 0);
    fs::write(&file, &foreign).unwrap();
    beat(0).expect_err("another host's");
    fs::write(&file, &damaged).unwrap();
    beat(0).expect_err("it may be another host's");
}

#[test]
fn no_end_of_a_term_is_undone_by_its_damage() {
    for is_written in [true, false] {
        let store = Store::new();
        store.claim(ONE, 0).unwrap();
        let (place, file) = (store.place(), store.folder().join("term-1"));
        let last = LastBlock::default();
        let beat = |end| beat(&place, ONE, (Term(1), 0), (true, end), &last);
        beat(End::None).unwrap();
        let damaged = vec![0xff_u8; fs::read(&file).unwrap().len()];
        if is_written {
            beat(End::Resting).unwrap();
            fs::write(&file, &damaged).unwrap();
        } else {
            fs::write(&file, &damaged).unwrap();
            beat(End::Resting).expect_err("the block may be another one");
        }
        beat(End::None).expect_err("the VM may run without the term");
        assert_eq!(fs::read(&file).unwrap(), damaged);
    }
}

#[test]
fn of_many_hosts_that_claim_at_once_one_gets_the_term() {
    let store = Store::new();
    store.claim(ONE, 0).unwrap();
    for after in 1..20 {
        let claimed = thread::scope(|scope| {
            let begin = |host: u128| {
                let store = &store;
                scope.spawn(move || store.claim(Uuid::from_u128(host), after).is_ok())
            };
            let hosts: Vec<_> = (100..104).map(begin).collect();
            let won = hosts.into_iter().map(|host| host.join().unwrap());
            won.filter(|won| *won).count()
        });
        assert!(claimed <= 1, "{claimed} hosts have term {}", after + 1);
        assert_eq!(store.found().term, Term(after + 1));
    }
    // Nothing but the terms is left.
    assert_eq!(fs::read_dir(store.folder()).unwrap().count(), 20);
}

#[test]
fn a_record_is_put_in_place_by_the_newest_term_alone() {
    let store = Store::new();
    store.claim(ONE, 0).unwrap();
    assert!(store.found().record.unwrap().is_none());
    write_record(&store.place(), &store.record(1)).unwrap();
    assert_eq!(store.found().record.unwrap(), Some(store.record(1)));
    store.claim(OTHER, 1).unwrap();
    write_record(&store.place(), &store.record(2)).unwrap();
    write_record(&store.place(), &store.record(1)).unwrap_err();
    assert_eq!(store.found().record.unwrap(), Some(store.record(2)));
    remove_record(&store.place()).unwrap();
    remove_record(&store.place()).unwrap();
    assert!(store.found().record.unwrap().is_none());
}

#[test]
fn a_folder_is_removed_unless_another_host_has_claimed_the_vm() {
    let store = Store::new();
    store.claim(ONE, 0).unwrap();
    write_record(&store.place(), &store.record(1)).unwrap();
    store.claim(OTHER, 1).unwrap();
    remove(&store.place(), Term(1)).unwrap_err();
    assert!(store.found().record.unwrap().is_some());
    remove(&store.place(), Term(2)).unwrap();
    assert!(look(&store.place()).unwrap().is_none());
    assert_eq!(store.claim(ONE, 0).unwrap(), Term(1), "it can be protected again");
}

#[test]
fn old_terms_and_claims_that_were_cut_off_are_removed() {
    let store = Store::new();
    for after in 0..70 {
        store.claim(ONE, after).unwrap();
    }
    fs::write(store.folder().join(".term-7.x.new"), "").unwrap();
    fs::write(store.folder().join(".vm.json.x.new"), "").unwrap();
    store.claim(ONE, 70).unwrap();
    let names = names(&store.place().open().unwrap()).unwrap();
    assert_eq!(names.len() as u64, KEPT_TERMS);
    assert!(names.iter().all(|name| term_of(name).is_some()), "{names:?}");
}

#[test]
fn what_is_no_file_of_its_user_is_refused() {
    let store = Store::new();
    store.claim(ONE, 0).unwrap();
    write_record(&store.place(), &store.record(1)).unwrap();
    let record = store.folder().join("vm.json");
    fs::set_permissions(&record, fs::Permissions::from_mode(0o666)).unwrap();
    store.found().record.expect_err("others can change it");
    fs::remove_file(&record).unwrap();
    symlink("/etc/hostname", &record).unwrap();
    store.found().record.expect_err("a link");
    fs::remove_file(&record).unwrap();
    fs::write(&record, " ".repeat(1 + usize::try_from(MOST_RECORD_BYTES).unwrap())).unwrap();
    store.found().record.expect_err("too long");
    fs::remove_file(&record).unwrap();

    let term = store.folder().join("term-1");
    fs::write(&term, "short").unwrap();
    store.found().block.expect_err("a short block");
    store.beat(ONE, 1, End::None).expect_err("a short block");
    fs::remove_file(&term).unwrap();
    symlink("/etc/hostname", &term).unwrap();
    store.found().block.expect_err("a link");
}

#[test]
fn what_is_no_folder_of_its_user_is_refused() {
    let store = Store::new();
    store.claim(ONE, 0).unwrap();
    fs::set_permissions(store.folder(), fs::Permissions::from_mode(0o777)).unwrap();
    look(&store.place()).expect_err("others can change the folder");
    store.claim(ONE, 1).expect_err("others can change the folder");
    fs::remove_dir_all(store.folder()).unwrap();
    symlink("/tmp", store.folder()).unwrap();
    look(&store.place()).expect_err("a link");
    store.claim(ONE, 0).expect_err("a link");
    fs::remove_file(store.0.path().join(".godwit-datastore")).unwrap();
    scan(store.0.path(), DATASTORE).expect_err("another directory");
    look(&store.place()).expect_err("another directory");
}

#[test]
fn a_block_of_another_vm_or_term_is_refused() {
    let store = Store::new();
    store.claim(ONE, 0).unwrap();
    fs::copy(store.folder().join("term-1"), store.folder().join("term-2")).unwrap();
    let found = store.found();
    assert_eq!(found.term, Term(2));
    found.block.expect_err("another term");
    store.beat(ONE, 2, End::None).expect_err("another term");
    fs::remove_file(store.folder().join("term-2")).unwrap();
    let other = store.0.path().join(".godwit/protected").join(OTHER.to_string());
    fs::rename(store.folder(), other).unwrap();
    let place = Place { vm: OTHER, ..store.place() };
    look(&place).unwrap().unwrap().block.expect_err("another VM");
}

#[test]
fn a_scan_is_bounded_and_ignores_other_names() {
    let store = Store::new();
    assert_eq!(scan(store.0.path(), DATASTORE).unwrap().vms.len(), 0);
    store.claim(ONE, 0).unwrap();
    let all = store.0.path().join(".godwit/protected");
    fs::create_dir(all.join("other")).unwrap();
    fs::create_dir(all.join(VM.simple().to_string())).unwrap();
    let found = scan(store.0.path(), DATASTORE).unwrap();
    assert_eq!((found.vms.len(), found.left_out), (1, 0));
    for number in 1..=MOST_OWN_VMS {
        fs::create_dir(all.join(Uuid::from_u128(number as u128).to_string())).unwrap();
    }
    let found = scan(store.0.path(), DATASTORE).unwrap();
    assert_eq!((found.vms.len(), found.left_out), (MOST_OWN_VMS, 1));
    fs::remove_dir_all(store.folder()).unwrap();
    let refused = store.claim(ONE, 0).unwrap_err();
    assert!(matches!(refused, OwnError::TooManyVms), "{refused}");
    fs::remove_dir(all.join(Uuid::from_u128(1).to_string())).unwrap();
    store.claim(ONE, 0).unwrap();
    for number in 0..=MOST_NAMES {
        fs::write(all.join(number.to_string()), "").unwrap();
    }
    scan(store.0.path(), DATASTORE).expect_err("too many names");
}
