//! Records that every manager knows, whether it leads or not. They are set as a whole when the
//! store is read, and one by one when they change.

use std::collections::BTreeSet;

use godwit_store::records::Record;

/// A kind of record that every manager knows; `K` holds it in memory.
pub(crate) trait Planned<K>: Record {
    /// Returns the IDs of the known records.
    fn known(knows: &K) -> BTreeSet<String>;
    /// Sets a record; `None`: the record no longer exists.
    fn set(knows: &K, id: &str, record: Option<Self>);

    /// Sets these records and removes all others.
    fn set_all(knows: &K, records: impl IntoIterator<Item = (String, Self)>) {
        let mut gone = Self::known(knows);
        for (id, record) in records {
            gone.remove(&id);
            Self::set(knows, &id, Some(record));
        }
        for id in gone {
            Self::set(knows, &id, None);
        }
    }
}
