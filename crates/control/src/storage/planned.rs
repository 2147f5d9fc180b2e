//! Records that every manager knows, whether it leads or not: set as a whole where the store was read, and one by one where it changes.

use std::collections::BTreeSet;

use godwit_store::records::Record;

/// A kind of records that every manager knows; `K` is what has them in memory.
pub(crate) trait Planned<K>: Record {
    /// The ids of those that are known.
    fn known(knows: &K) -> BTreeSet<String>;
    /// Knows one from now on as this; none: it is not kept any more.
    fn set(knows: &K, id: &str, record: Option<Self>);

    /// Knows these from now on, and no others.
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
