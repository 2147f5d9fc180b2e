//! Files with the history of load: one for each object, of a fixed size. Blocks.
//!
//! Nothing is flushed to the disk: after a power failure the last seconds are missing or torn, and
//! shown as a gap. A file of another size or version, or of another object, is begun anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::figures::{Object, Row};
use super::rings::{DAYS, Day, FAST, FILE_BYTES, MINUTES, Ring, SECTOR, Write, header};

/// Most files. Objects beyond have no history.
const MOST_FILES: usize = 20_000;

/// Directory with the files.
#[derive(Debug)]
pub(crate) struct Files {
    dir: PathBuf,
    names: BTreeSet<String>,
}

impl Files {
    /// Opens a directory, which is created if it does not exist.
    pub(crate) fn open(dir: &Path) -> io::Result<Files> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(dir)? {
            // Others are not the manager's to count or to remove.
            names.extend(entry?.file_name().into_string().ok().filter(|name| is_own(name)));
        }
        Ok(Files { dir: dir.to_owned(), names })
    }

    /// Returns whether an object has a file.
    pub(crate) fn has(&self, object: &Object) -> bool {
        self.names.contains(&file_name(object))
    }

    /// Writes records of an object. Its file is created with the first one.
    pub(crate) fn write(&mut self, object: &Object, writes: &[Write]) -> io::Result<()> {
        let file = match self.existing(object)? {
            Some(file) => file,
            None => self.create(object)?,
        };
        for write in writes {
            match write {
                Write::Fast(period, row) => write_record(&file, FAST, *period, row)?,
                Write::Minute(period, row) => write_record(&file, MINUTES, *period, row)?,
                Write::Day(day) => write_day(&file, day)?,
            }
        }
        Ok(())
    }

    /// Reads a ring of an object, up to the period `newest`; empty without a file.
    pub(crate) fn ring(
        &self,
        object: &Object,
        ring: Ring,
        newest: u64,
    ) -> io::Result<BTreeMap<u64, Row>> {
        let Some(file) = self.existing(object)? else { return Ok(BTreeMap::new()) };
        let mut bytes = vec![0; ring.bytes()];
        file.read_exact_at(&mut bytes, ring.start)?;
        Ok(ring.decode_all(&bytes, newest))
    }

    /// Reads the hours of the days from `first` to `last`, at most a year of them; empty without a
    /// file.
    pub(crate) fn hours(
        &self,
        object: &Object,
        first: u64,
        last: u64,
    ) -> io::Result<BTreeMap<u64, Row>> {
        let Some(file) = self.existing(object)? else { return Ok(BTreeMap::new()) };
        let mut rows = BTreeMap::new();
        for number in first.max(last.saturating_sub(DAYS - 1))..=last {
            if let Some(day) = read_day(&file, number)? {
                rows.extend(day.rows());
            }
        }
        Ok(rows)
    }

    /// Removes files that are not among `known` and were last written `idle` ago. Returns their
    /// number.
    pub(crate) fn remove_idle(
        &mut self,
        known: &BTreeSet<String>,
        idle: Duration,
        now: SystemTime,
    ) -> io::Result<usize> {
        let unknown: Vec<String> = self.names.difference(known).cloned().collect();
        let mut removed = 0;
        for name in unknown {
            let path = self.dir.join(&name);
            let written = fs::metadata(&path).and_then(|data| data.modified());
            let is_idle = match written {
                Ok(written) => now.duration_since(written).is_ok_and(|since| since >= idle),
                Err(error) if error.kind() == io::ErrorKind::NotFound => true,
                Err(error) => return Err(error),
            };
            if is_idle {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => removed += usize::from(self.names.remove(&name)),
                }
            }
        }
        Ok(removed)
    }

    /// Opens the file of an object; none: there is none, or it is not usable.
    fn existing(&self, object: &Object) -> io::Result<Option<File>> {
        if !self.has(object) {
            return Ok(None);
        }
        let path = self.dir.join(file_name(object));
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if file.metadata()?.len() != FILE_BYTES {
            return Ok(None);
        }
        let mut begin = [0; SECTOR];
        file.read_exact_at(&mut begin, 0)?;
        Ok((begin == header(&object.label())).then_some(file))
    }

    fn create(&mut self, object: &Object) -> io::Result<File> {
        let name = file_name(object);
        if !self.names.contains(&name) && self.names.len() >= MOST_FILES {
            let why = format!("there are {MOST_FILES} files already");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
        }
        let path = self.dir.join(&name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(path)?;
        self.names.insert(name);
        // The header is last: a file without it is begun anew.
        file.set_len(FILE_BYTES)?;
        file.write_all_at(&header(&object.label()), 0)?;
        Ok(file)
    }
}

/// Returns whether this may be the name of an object's file.
fn is_own(name: &str) -> bool {
    name == "cluster" || ["vm-", "host-", "datastore-"].iter().any(|kind| name.starts_with(kind))
}

/// Returns the name of an object's file. Names of hosts and datastores are hashed: they may contain
/// any character.
pub(crate) fn file_name(object: &Object) -> String {
    let hashed = |kind: &str, name: &str| {
        let hash = blake3::hash(name.as_bytes()).to_hex();
        format!("{kind}-{}", hash.get(..32).unwrap_or_default())
    };
    match object {
        Object::Vm(uuid) => format!("vm-{}", uuid.simple()),
        Object::Host(name) => hashed("host", name),
        Object::Datastore(id) => hashed("datastore", id),
        Object::Cluster => "cluster".to_owned(),
    }
}

fn write_record(file: &File, ring: Ring, period: u64, row: &Row) -> io::Result<()> {
    file.write_all_at(&ring.encode(period, row), ring.offset(period))
}

/// Writes a day. Hours that the file has already are kept.
fn write_day(file: &File, day: &Day) -> io::Result<()> {
    let before = read_day(file, day.day)?;
    let (mut whole, is_new) = before.map_or((Day::empty(day.day), true), |day| (day, false));
    if whole.complete(day) || is_new {
        file.write_all_at(&whole.encode(), Day::offset(day.day))?;
    }
    Ok(())
}

fn read_day(file: &File, number: u64) -> io::Result<Option<Day>> {
    let mut bytes = [0; SECTOR];
    file.read_exact_at(&mut bytes, Day::offset(number))?;
    Ok(Day::decode(number, &bytes).filter(|day| day.day == number))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use godwit_qemu::Uuid;

    use super::*;
    use crate::load::figures::FIGURES;

    const NOW: u64 = 29_000_000;

    fn row(value: u64) -> Row {
        Row::of(&[Some(value); FIGURES])
    }

    fn vm(number: u128) -> Object {
        Object::Vm(Uuid::from_u128(number))
    }

    fn minutes(files: &Files, object: &Object) -> BTreeMap<u64, Row> {
        files.ring(object, MINUTES, NOW).unwrap()
    }

    #[test]
    fn records_survive_a_restart_and_gaps_stay() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::open(dir.path()).unwrap();
        assert!(minutes(&files, &vm(1)).is_empty());
        let mut day = Day::empty(NOW / 1_440);
        day.hours[3] = Some(row(4));
        let writes = [
            Write::Minute(NOW - 9, row(1)),
            Write::Minute(NOW - 2, row(2)),
            Write::Fast(NOW, row(3)),
            Write::Day(Box::new(day.clone())),
        ];
        files.write(&vm(1), &writes).unwrap();
        let files = Files::open(dir.path()).unwrap();
        assert!(files.has(&vm(1)) && !files.has(&vm(2)));
        let kept = BTreeMap::from([(NOW - 9, row(1)), (NOW - 2, row(2))]);
        assert_eq!(minutes(&files, &vm(1)), kept);
        assert_eq!(files.ring(&vm(1), FAST, NOW).unwrap(), BTreeMap::from([(NOW, row(3))]));
        let hours = files.hours(&vm(1), 0, day.day).unwrap();
        assert_eq!(hours, BTreeMap::from([(day.day * 24 + 3, row(4))]));
    }

    #[test]
    fn a_file_of_another_size_version_or_object_is_begun_anew() {
        let spoil: [fn(&Path, &Path); 4] = [
            |path, _| fs::write(path, "short").unwrap(),
            |path, _| fs::write(path, vec![7; usize::try_from(FILE_BYTES).unwrap()]).unwrap(),
            |path, other| assert!(fs::copy(other, path).unwrap() > 0),
            |path, _| fs::remove_file(path).unwrap(),
        ];
        for spoil in spoil {
            let dir = tempfile::tempdir().unwrap();
            let mut files = Files::open(dir.path()).unwrap();
            files.write(&vm(2), &[Write::Minute(NOW, row(2))]).unwrap();
            files.write(&vm(1), &[Write::Minute(NOW - 1, row(1))]).unwrap();
            assert_eq!(minutes(&files, &vm(1)), BTreeMap::from([(NOW - 1, row(1))]));
            let path = |object| dir.path().join(file_name(&object));
            spoil(&path(vm(1)), &path(vm(2)));
            assert!(minutes(&files, &vm(1)).is_empty());
            files.write(&vm(1), &[Write::Minute(NOW, row(3))]).unwrap();
            assert_eq!(minutes(&files, &vm(1)), BTreeMap::from([(NOW, row(3))]));
        }
    }

    #[test]
    fn hours_of_a_day_are_added_and_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::open(dir.path()).unwrap();
        for (hour, value) in [(3, 1), (3, 2), (4, 3)] {
            let mut day = Day::empty(20_000);
            day.hours[hour] = Some(row(value));
            files.write(&Object::Cluster, &[Write::Day(Box::new(day))]).unwrap();
        }
        let hours = files.hours(&Object::Cluster, 20_000, 20_000).unwrap();
        assert_eq!(hours, BTreeMap::from([(480_003, row(1)), (480_004, row(3))]));
    }

    #[test]
    fn only_idle_files_of_unknown_objects_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("lost+found")).unwrap();
        let mut files = Files::open(dir.path()).unwrap();
        let host = Object::Host("a/../b".into());
        for object in [&vm(1), &vm(2), &host] {
            files.write(object, &[Write::Minute(NOW, row(1))]).unwrap();
        }
        let known = BTreeSet::from([file_name(&vm(1)), file_name(&host)]);
        let idle = Duration::from_secs(3_600);
        let later = SystemTime::now() + 2 * idle;
        assert_eq!(files.remove_idle(&known, idle, SystemTime::now()).unwrap(), 0);
        assert_eq!(files.remove_idle(&known, idle, later).unwrap(), 1);
        assert!(files.has(&vm(1)) && files.has(&host) && !files.has(&vm(2)));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    /// Creates what 1,000 VMs with their disks, 20 hosts and what they share need for a year, with
    /// every record written.
    #[test]
    fn a_year_of_a_thousand_vms_is_at_most_300_mb_of_files() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::open(dir.path()).unwrap();
        let mut writes: Vec<Write> = (0..MINUTES.periods)
            .map(|ago| Write::Minute(NOW - ago, row(NOW - ago)))
            .chain((0..FAST.periods).map(|ago| Write::Fast(NOW - ago, row(ago))))
            .collect();
        for ago in 0..DAYS {
            let mut day = Day::empty(NOW / 1_440 - ago);
            let rows = day.hours.iter_mut().zip(1..);
            rows.for_each(|(hour, number)| *hour = Some(row(ago * 977 + number * 31)));
            writes.push(Write::Day(Box::new(day)));
        }
        let hosts = (0..20).map(|number| Object::Host(format!("host-{number}")));
        let datastores = (0..10).map(|number| Object::Datastore(format!("datastore-{number}")));
        let all: Vec<Object> =
            (0..1_000).map(vm).chain(hosts).chain(datastores).chain([Object::Cluster]).collect();
        files.write(&vm(0), &writes).unwrap();
        let whole = fs::read(dir.path().join(file_name(&vm(0)))).unwrap();
        for object in &all {
            // Every record of the first one; the others get its records by a copy.
            let file = files.create(object).unwrap();
            file.write_all_at(&whole[SECTOR..], SECTOR as u64).unwrap();
        }
        let sizes = fs::read_dir(dir.path()).unwrap().map(|entry| {
            let data = entry.unwrap().metadata().unwrap();
            (data.len(), data.blocks() * 512)
        });
        let (bytes, on_disk) =
            sizes.fold((0, 0), |sum, (bytes, blocks)| (sum.0 + bytes, sum.1 + blocks));
        println!("{} objects: {bytes} bytes, {on_disk} on the disk", all.len());
        assert!(bytes <= 300_000_000 && on_disk <= 300_000_000, "{bytes} bytes, {on_disk} on disk");
        let year = files.hours(&vm(999), NOW / 1_440 - 364, NOW / 1_440).unwrap();
        assert_eq!(year.len(), 365 * 24);
        assert_eq!(files.ring(&vm(999), MINUTES, NOW).unwrap().len(), 1_440);
        assert_eq!(files.ring(&vm(999), FAST, NOW).unwrap().len(), 720);
    }
}
