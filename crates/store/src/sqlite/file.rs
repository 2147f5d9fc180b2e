//! The file: who may open it, whether it is whole, and its format.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::error::{StoreError, file_error};
use crate::transaction::Revision;

/// "GDWT": what SQLite's header says of whose file this is.
const APPLICATION: i64 = 0x4744_5754;
/// Each step makes a file of the format before it (the first: an empty file) one of the next. Steps that were released are never changed.
const STEPS: &[&str] = &["
    CREATE TABLE items (
        key TEXT PRIMARY KEY NOT NULL,
        value TEXT NOT NULL,
        revision INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE counters (
        name TEXT PRIMARY KEY NOT NULL,
        value INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    INSERT INTO counters VALUES ('revision', 0), ('epoch', 0);
"];
/// How long another program may hold the file, as a backup does for moments.
const BUSY: Duration = Duration::from_secs(5);

/// A file that this process has for itself.
pub(super) struct OpenFile {
    pub(super) lock: File,
    pub(super) reader: Connection,
    pub(super) writer: Connection,
    pub(super) revision: Revision,
}

pub(super) fn open(path: &Path) -> Result<OpenFile, StoreError> {
    let lock = lock(path)?;
    make_private(path)?;
    let failed = |error: rusqlite::Error| judge(path, &error);
    let mut writer = Connection::open(path).map_err(failed)?;
    writer.busy_timeout(BUSY).map_err(failed)?;
    check_owner(path, &writer)?;
    check_whole(path, &writer)?;
    let mode: String =
        writer.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)).map_err(failed)?;
    if mode != "wal" {
        let source = io::Error::other(format!(
            "its journal stays in mode \"{mode}\": is it on a network's disk?"
        ));
        return Err(StoreError::File {
            path: path.to_owned(),
            action: "put into WAL mode",
            source,
        });
    }
    // A commit that was answered survives a loss of power, not only of the process.
    writer.execute_batch("PRAGMA synchronous = FULL;").map_err(failed)?;
    bring_up_to_date(path, &mut writer, STEPS)?;
    let reader = Connection::open(path).map_err(failed)?;
    reader.busy_timeout(BUSY).map_err(failed)?;
    reader.execute_batch("PRAGMA query_only = ON;").map_err(failed)?;
    let revision = revision(&reader).map_err(failed)?;
    Ok(OpenFile { lock, reader, writer, revision })
}

/// Keeps other managers out. A file of its own: closing any descriptor of the database's would let go of the locks that SQLite has on it.
fn lock(path: &Path) -> Result<File, StoreError> {
    let beside = beside(path, ".lock");
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&beside)
        .map_err(file_error(&beside, "opened"))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => {
            Err(StoreError::File { path: beside, action: "locked", source })
        }
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Tokens' hashes and VMs' definitions are nobody else's. SQLite gives the files that it makes beside this one the same mode.
fn make_private(path: &Path) -> Result<(), StoreError> {
    match OpenOptions::new().create_new(true).write(true).mode(0o600).open(path) {
        Ok(_) => {
            let dir =
                path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(dir).and_then(|dir| dir.sync_all()).map_err(file_error(dir, "synced"))
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))
                .map_err(file_error(path, "closed to others"))
        }
        Err(error) => Err(file_error(path, "made")(error)),
    }
}

fn check_owner(path: &Path, connection: &Connection) -> Result<(), StoreError> {
    let failed = |error: rusqlite::Error| judge(path, &error);
    let application = pragma(connection, "application_id").map_err(failed)?;
    if application == APPLICATION {
        return Ok(());
    }
    let tables: i64 = connection
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(failed)?;
    if application != 0 || tables > 0 {
        return Err(StoreError::Foreign { path: path.to_owned() });
    }
    // A file that was just made, or by a start that ended before its first step: the first step gives it an owner.
    Ok(())
}

fn check_whole(path: &Path, connection: &Connection) -> Result<(), StoreError> {
    let said: String = connection
        .query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))
        .map_err(|error| judge(path, &error))?;
    if said == "ok" {
        Ok(())
    } else {
        Err(StoreError::Damaged { path: path.to_owned(), why: said })
    }
}

/// Makes the steps that the file lacks, each whole or not at all.
fn bring_up_to_date(
    path: &Path,
    connection: &mut Connection,
    steps: &[&str],
) -> Result<(), StoreError> {
    let failed = |error: rusqlite::Error| judge(path, &error);
    let found = pragma(connection, "user_version").map_err(failed)?;
    let found = usize::try_from(found).unwrap_or(usize::MAX);
    if found > steps.len() {
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        return Err(StoreError::Later {
            path: path.to_owned(),
            found: number(found),
            known: number(steps.len()),
        });
    }
    for (done, step) in steps.iter().enumerate().skip(found) {
        let whole = connection.transaction().map_err(failed)?;
        whole.execute_batch(step).map_err(failed)?;
        let marks =
            format!("PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {};", done + 1);
        whole.execute_batch(&marks).map_err(failed)?;
        whole.commit().map_err(failed)?;
    }
    Ok(())
}

fn pragma(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, name, |row| row.get(0))
}

/// What an error at opening means.
fn judge(path: &Path, error: &rusqlite::Error) -> StoreError {
    let path = path.to_owned();
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            StoreError::Damaged { path, why: error.to_string() }
        }
        _ => {
            StoreError::File { path, action: "opened", source: io::Error::other(error.to_string()) }
        }
    }
}

/// Writes a copy of a store as it is now. Nothing is left where that fails.
pub(super) fn back_up(from: &Path, to: &Path) -> Result<(), StoreError> {
    // One that is not there is not made.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let source = Connection::open_with_flags(from, flags).map_err(|error| judge(from, &error))?;
    source.busy_timeout(BUSY).map_err(|error| judge(from, &error))?;
    if pragma(&source, "application_id").map_err(|error| judge(from, &error))? != APPLICATION {
        return Err(StoreError::Foreign { path: from.to_owned() });
    }
    // SQLite fills a file that is there and empty: so it is never anybody else's to read.
    let copy = OpenOptions::new()
        .create_new(true)
        .write(true)
        .mode(0o600)
        .open(to)
        .map_err(file_error(to, "made for a backup"))?;
    let written = source
        .execute("VACUUM INTO ?1", [to.to_string_lossy()])
        .map_err(|error| StoreError::File {
            path: to.to_owned(),
            action: "written as a backup",
            source: io::Error::other(error.to_string()),
        })
        .and_then(|_| copy.sync_all().map_err(file_error(to, "synced")));
    if written.is_err() {
        // What failed says more.
        let _ = fs::remove_file(to);
    }
    written
}

pub(super) fn revision(connection: &Connection) -> rusqlite::Result<Revision> {
    counter(connection, "revision")
}

/// The number of the last leadership that began.
pub(super) fn epoch(connection: &Connection) -> rusqlite::Result<Revision> {
    counter(connection, "epoch")
}

pub(super) fn set_revision(connection: &Connection, revision: Revision) -> rusqlite::Result<()> {
    set_counter(connection, "revision", revision)
}

pub(super) fn set_epoch(connection: &Connection, epoch: Revision) -> rusqlite::Result<()> {
    set_counter(connection, "epoch", epoch)
}

fn counter(connection: &Connection, name: &str) -> rusqlite::Result<Revision> {
    let mut select = connection.prepare_cached("SELECT value FROM counters WHERE name = ?1")?;
    let value: i64 = select.query_row([name], |row| row.get(0))?;
    Ok(Revision(value.cast_unsigned()))
}

fn set_counter(connection: &Connection, name: &str, value: Revision) -> rusqlite::Result<()> {
    let mut update = connection.prepare_cached("UPDATE counters SET value = ?2 WHERE name = ?1")?;
    update.execute((name, value.0.cast_signed())).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_an_earlier_format_is_brought_forward_with_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manager.db");
        let steps = [STEPS[0], "ALTER TABLE items ADD COLUMN note TEXT NOT NULL DEFAULT 'none';"];
        let mut connection = Connection::open(&path).unwrap();
        bring_up_to_date(&path, &mut connection, &steps[..1]).unwrap();
        connection.execute("INSERT INTO items VALUES ('vms/a', '{}', 1)", []).unwrap();
        bring_up_to_date(&path, &mut connection, &steps).unwrap();
        bring_up_to_date(&path, &mut connection, &steps).unwrap();
        let note: String =
            connection.query_row("SELECT note FROM items", [], |row| row.get(0)).unwrap();
        assert_eq!(note, "none");
        assert_eq!(pragma(&connection, "user_version").unwrap(), 2);
        let error = bring_up_to_date(&path, &mut connection, &steps[..1]).unwrap_err();
        assert!(matches!(error, StoreError::Later { found: 2, known: 1, .. }), "{error}");
    }

    #[test]
    fn a_step_that_fails_leaves_nothing() {
        let mut connection = Connection::open_in_memory().unwrap();
        let steps = ["CREATE TABLE a (x); CREATE TABLE b (y); nonsense;"];
        assert!(bring_up_to_date(Path::new("manager.db"), &mut connection, &steps).is_err());
        let tables: i64 = connection
            .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
            .unwrap();
        assert_eq!((tables, pragma(&connection, "user_version").unwrap()), (0, 0));
    }

    #[test]
    fn another_programs_database_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("other.db");
        Connection::open(&path).unwrap().execute_batch("CREATE TABLE mine (x);").unwrap();
        assert!(matches!(open(&path).map(drop), Err(StoreError::Foreign { .. })));
    }
}
