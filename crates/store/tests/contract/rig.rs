//! The stores on which scenarios run.

use std::path::PathBuf;
use std::sync::Arc;

use godwit_store::{Candidate, Leadership, MemoryStore, SqliteStore, Store};
use tempfile::TempDir;

#[cfg(feature = "etcd")]
use crate::etcd_prefix::Prefix;

/// A store that managers can open.
pub(crate) enum Rig {
    Memory(MemoryStore),
    /// A file; one manager at a time.
    Sqlite(TempDir),
    /// A prefix in an etcd.
    #[cfg(feature = "etcd")]
    Etcd(Prefix),
}

impl Rig {
    pub(crate) fn memory() -> Rig {
        Rig::Memory(MemoryStore::new())
    }

    pub(crate) fn sqlite() -> Rig {
        Rig::Sqlite(tempfile::tempdir().unwrap())
    }

    /// Returns `None` where etcd is not installed.
    #[cfg(feature = "etcd")]
    pub(crate) fn etcd() -> Option<Rig> {
        Prefix::new().map(Rig::Etcd)
    }

    /// Opens the store as a manager.
    pub(crate) fn open(&self) -> Arc<dyn Store> {
        match self {
            Rig::Memory(store) => Arc::new(store.peer()),
            Rig::Sqlite(_) => Arc::new(SqliteStore::open(&self.file()).unwrap()),
            #[cfg(feature = "etcd")]
            Rig::Etcd(prefix) => Arc::new(prefix.open()),
        }
    }

    /// Opens the store as another manager; SQLite has only one.
    pub(crate) fn other(&self, first: &Arc<dyn Store>) -> Arc<dyn Store> {
        match self {
            Rig::Sqlite(_) => Arc::clone(first),
            _ => self.open(),
        }
    }

    /// Ends the present leadership in the store without notifying the leader.
    pub(crate) async fn end_leadership(&self) {
        match self {
            Rig::Memory(store) => store.end_leadership_silently(),
            Rig::Sqlite(_) => {
                let raw = rusqlite::Connection::open(self.file()).unwrap();
                raw.execute("UPDATE counters SET value = value + 1 WHERE name = 'epoch'", [])
                    .unwrap();
            }
            #[cfg(feature = "etcd")]
            Rig::Etcd(prefix) => prefix.remove_leader().await,
        }
    }

    fn file(&self) -> PathBuf {
        match self {
            Rig::Sqlite(dir) => dir.path().join("manager.db"),
            _ => panic!("only SQLite has a file"),
        }
    }
}

pub(crate) fn candidate(name: &str) -> Candidate {
    Candidate { name: name.to_owned(), address: format!("{name}:7710") }
}

/// Takes the leadership, for a test of something else.
pub(crate) async fn lead(store: &Arc<dyn Store>) -> Leadership {
    store.lead(&candidate("m1")).await.unwrap()
}
