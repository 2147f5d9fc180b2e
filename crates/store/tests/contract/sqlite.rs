//! Tests for SQLite alone: the file, and the process that has it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use godwit_store::{Revision, SqliteStore, Store, StoreError, Transaction};

use crate::rig::{candidate, lead};

/// Variable by which a test gives its child the path of the file.
const CHILD: &str = "GODWIT_TEST_STORE";

/// Child process of the test below: commits until it is killed, and prints what was committed.
#[test]
#[ignore = "run by another test"]
fn child_commits_until_it_is_killed() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let store = SqliteStore::open(Path::new(&path)).unwrap();
        let leads = store.lead(&candidate("child")).await.unwrap();
        for n in 1_u64.. {
            let twice = Transaction::new().put("one", n.to_string()).put("other", n.to_string());
            store.commit(&leads, twice).await.unwrap();
            let mut out = std::io::stdout().lock();
            writeln!(out, "\ncommitted {n}").unwrap();
            out.flush().unwrap();
        }
    });
}

#[tokio::test]
async fn an_answered_commit_survives_kill_9_and_a_second_process_is_locked_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("manager.db");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "sqlite::child_commits_until_it_is_killed"])
        .env(CHILD, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut committed = lines.map_while(Result::ok).filter_map(|line| {
        line.strip_prefix("committed ").and_then(|number| number.parse::<u64>().ok())
    });
    assert_eq!(committed.by_ref().nth(19), Some(20));
    let error = SqliteStore::open(&path).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    assert!(error.remedy().contains("etcd"), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
    let last = committed.last().unwrap_or(20);
    let store = SqliteStore::open(&path).unwrap();
    let items = store.read("").await.unwrap().items;
    assert_eq!(items[0].value, items[1].value);
    // The last commit's response may have been on its way.
    let found: u64 = items[0].value.parse().unwrap();
    assert!(found == last || found == last + 1, "{found} after {last}");
}

fn as_store(store: SqliteStore) -> Arc<dyn Store> {
    Arc::new(store)
}

#[tokio::test]
async fn only_the_owner_can_read_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("manager.db");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let store = as_store(SqliteStore::open(&path).unwrap());
    let leads = lead(&store).await;
    store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    let files: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        let mode = std::fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", file.display());
    }
}

#[tokio::test]
async fn a_damaged_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("manager.db");
    {
        let store = as_store(SqliteStore::open(&path).unwrap());
        let leads = lead(&store).await;
        for n in 0..50 {
            let put = Transaction::new().put(format!("vms/{n}"), "7".repeat(1000));
            store.commit(&leads, put).await.unwrap();
        }
    }
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    // Pages of 4 KiB; the first ones hold the schema.
    file.write_all_at(&[0xa5; 3 * 4096], 4 * 4096).unwrap();
    let error = SqliteStore::open(&path).unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
    assert!(error.remedy().contains("backup"), "{error}");
    std::fs::write(&path, "this is a letter and not a database\n".repeat(300)).unwrap();
    let error = SqliteStore::open(&path).unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
}

#[tokio::test]
async fn a_backup_is_a_store_and_does_not_interrupt_the_original() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.db");
    let path = dir.path().join("manager.db");
    assert!(SqliteStore::back_up(&path, &copy).is_err() && !path.exists() && !copy.exists());
    let store = SqliteStore::open(&path).unwrap();
    let leads = store.lead(&candidate("m1")).await.unwrap();
    store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    SqliteStore::back_up(&path, &copy).unwrap();
    store.commit(&leads, Transaction::new().put("a", "2")).await.unwrap();
    assert!(matches!(SqliteStore::back_up(&path, &copy), Err(StoreError::File { .. })));
    let mode = std::fs::metadata(&copy).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    let restored = SqliteStore::open(&copy).unwrap();
    assert_eq!(restored.read("").await.unwrap().items[0].value, "1");
    assert_eq!(store.read("").await.unwrap().items[0].value, "2");
}

#[tokio::test]
async fn a_watch_from_before_a_restart_gets_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("manager.db");
    {
        let store = as_store(SqliteStore::open(&path).unwrap());
        let leads = lead(&store).await;
        store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    }
    let store = SqliteStore::open(&path).unwrap();
    let mut watch = store.watch("", Revision(0)).await.unwrap();
    assert!(matches!(watch.next().await, Err(StoreError::HistoryGone { .. })));
}
