//! The SQLite file: access, integrity and format.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::error::{StoreError, file_error};
use crate::revision::Revision;

/// "GDWT": the application ID in SQLite's header that marks the file as Godwit's.
const APPLICATION: i64 = 0x4744_5754;
/// Steps that each convert a file to the next format; the first starts from an empty file. Never
/// change a released step.
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
/// Longest time that another program may hold the file, as a backup does for moments.
const BUSY: Duration = Duration::from_secs(5);

/// A file that this process has exclusively.
pub(super) struct OpenFile {
    pub(super) lock: FileLock,
    pub(super) reader: Connection,
    pub(super) writer: Connection,
    pub(super) revision: Revision,
}

/// A locked file. The lock ends with this value, even while a child process that was forked and has
/// not executed its program yet shares the descriptor.
#[derive(Debug)]
pub(super) struct FileLock(File);

impl Drop for FileLock {
    fn drop(&mut self) {
        // The lock also ends when the last descriptor is closed: an error changes nothing.
        let _ = self.0.unlock();
    }
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
            "its journal stays in mode \"{mode}\": is it on a network file system?"
        ));
        return Err(StoreError::File {
            path: path.to_owned(),
            action: "enable WAL mode for",
            source,
        });
    }
    // An answered commit survives a power loss, not only the end of the process.
    writer.execute_batch("PRAGMA synchronous = FULL;").map_err(failed)?;
    bring_up_to_date(path, &mut writer, STEPS)?;
    let reader = Connection::open(path).map_err(failed)?;
    reader.busy_timeout(BUSY).map_err(failed)?;
    reader.execute_batch("PRAGMA query_only = ON;").map_err(failed)?;
    let revision = revision(&reader).map_err(failed)?;
    Ok(OpenFile { lock, reader, writer, revision })
}

/// Locks out other managers. The lock is a separate file: closing any descriptor of the database
/// would release SQLite's own locks on it.
fn lock(path: &Path) -> Result<FileLock, StoreError> {
    let beside = beside(path, ".lock");
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&beside)
        .map_err(file_error(&beside, "open"))?;
    match lock.try_lock() {
        Ok(()) => Ok(FileLock(lock)),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => {
            Err(StoreError::File { path: beside, action: "lock", source })
        }
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Closes the file to other users: it holds token hashes and VM definitions. SQLite gives the files
/// that it creates beside it the same mode.
fn make_private(path: &Path) -> Result<(), StoreError> {
    match OpenOptions::new().create_new(true).write(true).mode(0o600).open(path) {
        Ok(_) => {
            let dir =
                path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(dir).and_then(|dir| dir.sync_all()).map_err(file_error(dir, "sync"))
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))
                .map_err(file_error(path, "restrict access to"))
        }
        Err(error) => Err(file_error(path, "create")(error)),
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
    // A new file, or one whose creation ended before the first step: the first step sets the ID.
    Ok(())
}

fn check_whole(path: &Path, connection: &Connection) -> Result<(), StoreError> {
    let verdict: String = connection
        .query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))
        .map_err(|error| judge(path, &error))?;
    if verdict == "ok" {
        Ok(())
    } else {
        Err(StoreError::Damaged { path: path.to_owned(), why: verdict })
    }
}

/// Runs the steps that the file lacks, each completely or not at all.
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

/// Converts an error at opening.
fn judge(path: &Path, error: &rusqlite::Error) -> StoreError {
    let path = path.to_owned();
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            StoreError::Damaged { path, why: error.to_string() }
        }
        _ => StoreError::File { path, action: "open", source: io::Error::other(error.to_string()) },
    }
}

/// Writes a copy of a store at its present revision. On failure no file is left.
pub(super) fn back_up(from: &Path, to: &Path) -> Result<(), StoreError> {
    // Without CREATE: a missing store is not created.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let source = Connection::open_with_flags(from, flags).map_err(|error| judge(from, &error))?;
    source.busy_timeout(BUSY).map_err(|error| judge(from, &error))?;
    if pragma(&source, "application_id").map_err(|error| judge(from, &error))? != APPLICATION {
        return Err(StoreError::Foreign { path: from.to_owned() });
    }
    // SQLite fills an existing empty file, so the copy is never readable by other users.
    let copy = OpenOptions::new()
        .create_new(true)
        .write(true)
        .mode(0o600)
        .open(to)
        .map_err(file_error(to, "create the backup"))?;
    let written = source
        .execute("VACUUM INTO ?1", [to.to_string_lossy()])
        .map_err(|error| StoreError::File {
            path: to.to_owned(),
            action: "write the backup",
            source: io::Error::other(error.to_string()),
        })
        .and_then(|_| copy.sync_all().map_err(file_error(to, "sync")));
    if written.is_err() {
        // The first error says more than one of the removal would.
        let _ = fs::remove_file(to);
    }
    written
}

pub(super) fn revision(connection: &Connection) -> rusqlite::Result<Revision> {
    counter(connection, "revision")
}

/// Returns the number of the last leadership that began.
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
    fn a_lock_ends_while_a_forked_child_shares_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manager.db");
        let first = lock(&path).unwrap();
        // What a fork leaves in the child.
        let shared = first.0.try_clone().unwrap();
        assert!(matches!(lock(&path), Err(StoreError::InUse { .. })));
        drop(first);
        lock(&path).unwrap();
        drop(shared);
    }

    #[test]
    fn a_file_of_an_earlier_format_is_upgraded_with_its_content() {
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
    fn a_failed_step_leaves_nothing() {
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
